"""The static pictures of the report as plotly figures (plain dictionaries): memory, seconds, candidates. Okabe-Ito colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.layout_words import short
from planner.plan import Plan

GIB = 2**30
COLOURS = {
    "parameters": "#0072B2", "gradients": "#56B4E9", "optimizer": "#009E73", "activations": "#E69F00", "temporary": "#F0E442",
    "cached by the allocator": "#999999", "communication": "#CC79A7", "context": "#7A6A5A",
}  # fmt: skip
GROUPS = {
    "compute": ("#0072B2", ("matmul", "attention", "pointwise", "recompute", "optimizer")),
    "communication": ("#CC79A7", ("communication",)),
    "waiting": ("#E69F00", ("bubble", "stragglers")),
    "host and fixed costs": ("#999999", ("host", "overhead")),
}
Figure = dict[str, Any]


def memory_parts(stage: Mapping[str, float]) -> dict[str, float]:
    """Bytes of a stage by what holds them; they sum to what the device must have (``device``)."""
    parts = {k: stage.get(k, 0.0) for k in ("parameters", "gradients", "optimizer", "activations", "temporary")}
    parts["cached by the allocator"] = max(0.0, stage["peak_reserved"] - stage["peak_allocated"])
    parts["communication"] = stage.get("communication", 0.0)
    parts["context"] = max(0.0, stage["device"] - sum(parts.values()))
    return parts


def memory_figure(estimate: Mapping[str, Any]) -> Figure:
    """Bars by stage, stacked by category, the limit as a line."""
    stages = [s["stage"] for s in estimate["memory"]]
    parts = [memory_parts(s) for s in estimate["memory"]]
    limit = estimate["limit_bytes"] / GIB
    bars = [
        {
            "type": "bar", "name": name, "x": stages, "y": [p[name] / GIB for p in parts], "marker": {"color": colour},
            "hovertemplate": f"stage %{{x}}<br>{name} %{{y:.2f}} GiB<extra></extra>",
        }
        for name, colour in COLOURS.items() if any(p[name] for p in parts)
    ]  # fmt: skip
    ends = [min(stages) - 0.5, max(stages) + 0.5]
    line = {
        "type": "scatter", "mode": "lines", "name": f"limit {limit:.1f} GiB", "x": ends, "y": [limit, limit],
        "line": {"color": "#D55E00", "width": 2, "dash": "dash"}, "hoverinfo": "name",
    }  # fmt: skip
    return {
        "data": [*bars, line],
        "layout": {
            "barmode": "stack", "bargap": 0.25 if len(stages) < 64 else 0.05, "xaxis": _whole("pipeline stage", stages, ends),
            "yaxis": {"title": {"text": "GiB on one GPU"}, "rangemode": "tozero"}, "height": 400,
        },
    }  # fmt: skip


def _whole(title: str, values: Sequence[int], ends: Sequence[float]) -> dict[str, Any]:
    step = max(1, len(values) // 16)
    return {"title": {"text": title}, "tickmode": "array", "tickvals": list(values)[::step], "range": list(ends)}


def group_of(cause: str) -> str:
    """compute, communication, waiting, or host and fixed costs."""
    return next((g for g, (_, names) in GROUPS.items() if cause.split(".")[0] in names), "host and fixed costs")


def seconds_figure(estimate: Mapping[str, Any]) -> Figure:
    """Horizontal bars by cause, the longest first; they sum to the step."""
    step = estimate["step_seconds"]
    causes = sorted(((c, s) for c, s in estimate["seconds"].items() if s >= 0.0005 * step), key=lambda item: item[1])
    bars = []
    for group, (colour, _) in GROUPS.items():
        mine = [(c, s) for c, s in causes if group_of(c) == group]
        if mine:
            bars.append(
                {
                    "type": "bar", "orientation": "h", "name": group, "y": [label(c) for c, _ in mine], "x": [s for _, s in mine],
                    "marker": {"color": colour}, "text": [f"{100 * s / step:.1f} %" for _, s in mine], "textposition": "outside",
                    "cliponaxis": False, "hovertemplate": "%{y}: %{x:.4g} s (%{text})<extra></extra>",
                }
            )  # fmt: skip
    longest = max((s for _, s in causes), default=step)
    return {
        "data": bars,
        "layout": {
            "xaxis": {"title": {"text": "seconds of a step, on the busiest stage"}, "range": [0, 1.18 * longest]}, "bargap": 0.3,
            "yaxis": {"categoryorder": "array", "categoryarray": [label(c) for c, _ in causes], "automargin": True},
            "height": 110 + 26 * len(causes),
        },
    }  # fmt: skip


def label(cause: str) -> str:
    return cause.replace("communication.", "communication: ").replace("_", " ")


def candidates(plan: Plan) -> list[dict[str, Any]]:
    """What the time against memory picture shows: role, layout, seconds and bytes of the fullest stage."""

    def row(role: str, text: str, estimate: Mapping[str, Any]) -> dict[str, Any]:
        device = max((s["device"] for s in estimate["memory"]), default=0.0)
        return {"role": role, "layout": text, "seconds": estimate["step_seconds"], "bytes": device}

    rows = [row("chosen", plan.layout_text, plan.estimate)]
    rows += [row("runner-up", r.layout_text, r.estimate) for r in plan.runners_up]
    for point in plan.front:
        if "estimate" in point:
            rows.append(row("front", point.get("layout_text", ""), point["estimate"]))
        elif "step_seconds" in point:
            size = point.get("device_bytes", point.get("peak_bytes", point.get("bytes", 0.0)))
            rows.append({"role": "front", "layout": point.get("layout_text", ""), "seconds": point["step_seconds"], "bytes": size})
    return rows


def pareto(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that no other beats on both time and memory, by time."""
    best: list[Mapping[str, Any]] = []
    for row in sorted(rows, key=lambda r: (r["seconds"], r["bytes"])):
        if not best or row["bytes"] < best[-1]["bytes"]:
            best.append(row)
    return best


def candidates_figure(plan: Plan, considered: Sequence[Mapping[str, Any]] = ()) -> Figure:
    """Step time against the memory of the fullest stage: ``considered`` candidates, the runners-up, the chosen plan; the front joined."""
    rows = [*considered, *candidates(plan)]
    front = pareto(rows)
    limit = plan.estimate["limit_bytes"] / GIB
    looks = {
        "considered": ("#999999", "circle-open", 7), "chosen": ("#D55E00", "star", 16), "runner-up": ("#0072B2", "circle", 10),
        "front": ("#009E73", "diamond", 9),
    }  # fmt: skip
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines", "name": "not beaten on both", "x": [r["bytes"] / GIB for r in front],
            "y": [r["seconds"] for r in front], "line": {"color": "#999999", "dash": "dot", "shape": "vh"}, "hoverinfo": "skip",
        }
    ]  # fmt: skip
    for role, (colour, symbol, size) in looks.items():
        mine = [r for r in rows if r["role"] == role]
        if mine:
            traces.append(
                {
                    "type": "scatter", "mode": "markers", "name": role, "x": [r["bytes"] / GIB for r in mine],
                    "y": [r["seconds"] for r in mine], "marker": {"color": colour, "symbol": symbol, "size": size},
                    "text": [wrapped(short(r["layout"])) for r in mine],
                    "hovertemplate": "%{text}<br>%{y:.4g} s, %{x:.1f} GiB<extra>" + role + "</extra>",
                }
            )  # fmt: skip
    seconds = [r["seconds"] for r in rows]
    reach = max(1.05, (max(seconds) / min(seconds)) ** 0.15)
    traces.append(
        {
            "type": "scatter", "mode": "lines", "name": "limit", "x": [limit, limit],
            "y": [min(seconds) / reach, max(seconds) * reach],
            "line": {"color": "#D55E00", "width": 2, "dash": "dash"}, "hoverinfo": "name",
        }
    )  # fmt: skip
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": "GiB on the fullest GPU"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "seconds of a step"}, "type": "log"}, "height": 380,
        },
    }  # fmt: skip


def wrapped(layout: str, every: int = 4) -> str:
    parts = layout.split(",")
    return "<br>".join(", ".join(parts[i : i + every]) for i in range(0, len(parts), every))
