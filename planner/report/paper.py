"""The same pictures for papers: PNG or SVG, by matplotlib (extra ``plot``)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from planner.plan import Plan
from planner.report import figures
from planner.report.spans import Spans, spans_of
from profiles.errors import AxisplanError

INK = "#2b2f33"
COLOURS = {
    "forward": "#0072B2", "backward": "#E69F00", "backward_input": "#E69F00", "backward_weight": "#009E73", "communication": "#CC79A7",
    "optimizer": "#56B4E9",
}  # fmt: skip
WORDS = {"backward_input": "input gradient", "backward_weight": "weight gradient"}
RASTER_ABOVE = 5000
"""Spans above which the timeline of an SVG is one picture, so that the file stays small."""


def draw(plan: Plan, out: Path, form: str) -> None:
    """Write timeline, memory, seconds and candidates as one figure; the file appears whole or not at all."""
    plt = _pyplot()
    spans = spans_of(plan)
    stages = len(plan.stages)
    figure = plt.figure(figsize=(10, 7.2 + min(3.0, 0.08 * stages)), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=[1.3 + min(2.0, 0.06 * stages), 1.6, 1.3])
    _timeline(figure.add_subplot(grid[0, :]), spans)
    _memory(figure.add_subplot(grid[1, 0]), plan)
    _seconds(figure.add_subplot(grid[1:, 1]), plan)
    _candidates(figure.add_subplot(grid[2, 0]), plan)
    figure.suptitle(
        f"{plan.model['name']} on {plan.cluster['name']}: {plan.step_seconds:.4g} s a step", x=0.01, ha="left", weight="bold"
    )
    _save(plt, figure, out, form)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise AxisplanError("png and svg need matplotlib: pip install 'axisplan[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#8b9298", "text.color": INK,
            "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.titlelocation": "left", "axes.titlesize": 9.5,
            "axes.titleweight": "bold", "legend.frameon": False, "legend.fontsize": 7.5, "svg.hashsalt": "axisplan",
        }
    )  # fmt: skip
    return plt


def _save(plt: Any, figure: Any, out: Path, form: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=f".{out.name}.", suffix=f".{form}", dir=out.parent)
    os.close(handle)
    try:
        metadata = {"Date": None} if form == "svg" else None
        figure.savefig(beside, format=form, dpi=200, facecolor="white", metadata=metadata)
        os.chmod(beside, 0o644)
        os.replace(beside, out)
    finally:
        Path(beside).unlink(missing_ok=True)
        plt.close(figure)


def _timeline(axes: Any, spans: Spans) -> None:
    bars: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for s in spans.spans:
        own = s.end - s.start - s.communication
        name = s.kind if s.kind in COLOURS else "communication"
        if own > 0 and s.kind not in ("gather", "reduce"):
            bars.setdefault(name, {}).setdefault(s.stage, []).append((s.start, own))
        if s.communication > 0:
            bars.setdefault("communication", {}).setdefault(s.stage, []).append((s.end - s.communication, s.communication))
    for name, colour in COLOURS.items():
        for index, (stage, pieces) in enumerate(bars.get(name, {}).items()):
            label = WORDS.get(name, name) if index == 0 else None
            edge = {"edgecolor": "white", "linewidth": 0.3} if len(spans.spans) < 600 else {"linewidth": 0}
            axes.broken_barh(
                pieces, (stage - 0.4, 0.8), facecolors=colour, label=label, rasterized=len(spans.spans) > RASTER_ABOVE, **edge
            )
    stages = 1 + max(s.stage for s in spans.spans)
    axes.set(ylim=(stages - 0.5, -0.5), xlim=(0, spans.seconds), xlabel="seconds", ylabel="stage")
    axes.set_yticks(range(0, stages, max(1, stages // 12)))
    part = f" ({spans.drawn} of {spans.microbatches} microbatches)" if spans.drawn < spans.microbatches else ""
    axes.set_title(f"the step, stage by stage{part}")
    _legend(axes)


def _legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(
        once.values(), once, ncol=len(once), loc="lower right", bbox_to_anchor=(1.0, 1.0), handlelength=1.0, columnspacing=1.0
    )


def _memory(axes: Any, plan: Plan) -> None:
    memory = plan.estimate["memory"]
    stages = [s["stage"] for s in memory]
    parts = [figures.memory_parts(s) for s in memory]
    base = [0.0] * len(stages)
    for name, colour in figures.COLOURS.items():
        heights = [p[name] / figures.GIB for p in parts]
        if any(heights):
            axes.bar(stages, heights, bottom=base, color=colour, label=name, width=0.75)
        base = [b + h for b, h in zip(base, heights, strict=True)]
    limit = plan.estimate["limit_bytes"] / figures.GIB
    axes.axhline(limit, color="#D55E00", linestyle="--", linewidth=1.2)
    axes.text(
        0.99,
        limit,
        f"limit {limit:.1f}",
        transform=axes.get_yaxis_transform(),
        color="#D55E00",
        ha="right",
        va="bottom",
        fontsize=7.5,
        bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1},
    )
    axes.set(xlabel="stage", ylabel="GiB on one GPU", ylim=(0, 1.7 * max(limit, *base)))
    axes.set_xticks(stages[:: max(1, len(stages) // 12)])
    axes.legend(ncol=3, loc="upper right", handlelength=1.0, columnspacing=1.0)
    axes.set_title("memory by stage")


def _seconds(axes: Any, plan: Plan) -> None:
    step = plan.step_seconds
    causes = sorted(((c, s) for c, s in plan.estimate["seconds"].items() if s >= 0.0005 * step), key=lambda item: item[1])
    colours = [figures.GROUPS[figures.group_of(c)][0] for c, _ in causes]
    axes.barh([figures.label(c) for c, _ in causes], [s for _, s in causes], color=colours, height=0.7)
    for row, (_, s) in enumerate(causes):
        axes.text(s, row, f" {100 * s / step:.1f} %", va="center", fontsize=7.5)
    axes.set(xlabel="seconds of a step, on the busiest stage", xlim=(0, 1.15 * max(s for _, s in causes)))
    axes.set_title("where the seconds go")


def _candidates(axes: Any, plan: Plan) -> None:
    rows = figures.candidates(plan)
    for role, colour, marker, size in (
        ("runner-up", "#0072B2", "o", 28),
        ("front", "#009E73", "D", 22),
        ("chosen", "#D55E00", "*", 90),
    ):
        mine = [r for r in rows if r["role"] == role]
        if mine:
            axes.scatter(
                [r["bytes"] / figures.GIB for r in mine], [r["seconds"] for r in mine], c=colour, marker=marker, s=size, label=role
            )
    limit = plan.estimate["limit_bytes"] / figures.GIB
    axes.axvline(limit, color="#D55E00", linestyle="--", linewidth=1.2, label="limit")
    most = max(limit, *(r["bytes"] / figures.GIB for r in rows))
    axes.set(xlabel="GiB on the fullest GPU", ylabel="seconds of a step", xlim=(0, 1.06 * most))
    axes.margins(y=0.25)
    axes.set_title("time against memory")
    _legend(axes)
