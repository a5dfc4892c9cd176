"""Pictures of a measurement: the points, the fitted curve, and how far apart they are. Needs matplotlib (extra ``plot``)."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from profiles.errors import AxisplanError, InputError
from profiles.hardware import GpuProfile, Link
from profiles.measure import fitting, judging
from profiles.measure.samples import Sample, usable
from profiles.operations import Attend, Collective, Matmul, Pointwise, wire_bytes

COLOURS = ("#2a6f97", "#e07a3f", "#4a8f5c", "#8a5a9e", "#b8860b", "#5f6b73")
INK, FAINT = "#2b2f33", "#d8dcdf"
POINTS = ((False, "o", ""), (True, "D", "white"))
"""(held out of the fit, marker, face; empty: the colour of the curve)."""


PICTURES = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Before anything is measured: can a picture be drawn there? Raises InputError for another ending or a folder that is not there,
    AxisplanError without matplotlib."""
    if path.suffix.lower() not in PICTURES:
        raise InputError("--plot", str(path), f"ends in {', '.join(PICTURES)}", str(path.with_suffix(".png")))
    if not path.resolve().parent.is_dir():
        raise InputError("--plot", str(path), f"the folder {path.parent} is not there")
    if importlib.util.find_spec("matplotlib") is None:
        raise AxisplanError("plots need matplotlib: pip install 'axisplan[plot]'")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 9, "axes.edgecolor": "#8b9298", "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK,
            "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": FAINT,
            "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False, "axes.titlelocation": "left",
            "axes.titleweight": "bold", "axes.titlesize": 10,
        }
    )  # fmt: skip
    return plt


def _write(figure: Any, target: Path) -> None:
    """Writes a figure beside its place, then renames it there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=target.parent, suffix=target.suffix)
    os.close(handle)
    try:
        figure.savefig(beside, dpi=150, bbox_inches="tight", facecolor="white")
        os.chmod(beside, 0o644)
        os.replace(beside, target)
    finally:
        Path(beside).unlink(missing_ok=True)
    _pyplot().close(figure)


def _rate(value: float, _: Any = None) -> str:
    """1.2e12 -> 1.2T."""
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:g}{letter}"
    return f"{value:g}"


def _size(value: float, _: Any = None) -> str:
    """1048576 -> 1 MiB."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g} B"


def _ticks(axis: Any, formatter: Any, *, base: int = 10) -> None:
    """Labels one x or y axis at powers of ``base`` only."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=base, numticks=7))
    axis.set_major_formatter(FuncFormatter(formatter))
    axis.set_minor_formatter(NullFormatter())


def _time(value: float, _: Any = None) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= scale * 0.999:
            return f"{value / scale:g} {unit}"
    return f"{value * 1e9:g} ns"


def plot_gpu(profile: GpuProfile, samples: Sequence[Sample], path: str | Path) -> None:
    """Matrix products (rate by size, with the fitted curve of a square product; predicted against measured), attention and memory
    traffic; what was held out of the fit with open marks. Raises as ``check_picture``."""
    check_picture(path := Path(path))
    plt = _pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(11, 8.2), layout="constrained")
    figure.suptitle(f"{profile.name}: {profile.description}", x=0.01, ha="left", fontsize=11)
    _products(axes[0, 0], profile, samples)
    _agreement(axes[0, 1], profile, samples)
    _attention(axes[1, 0], profile, samples)
    _traffic(axes[1, 1], profile, samples)
    _write(figure, path)


def _points(axis: Any, samples: Sequence[Sample], sizes: Sequence[float], colour: str) -> None:
    """A point a sample: its size, and the FLOPs (or bytes) a second that it ran at; open where it was held out of the fit."""
    works = [s.operation.bytes if isinstance(s.operation, Pointwise) else s.operation.flops for s in samples]
    for held_out, marker, face in POINTS:
        own = [(x, work / s.seconds) for s, x, work in zip(samples, sizes, works, strict=True) if s.held_out is held_out]
        across, up = [x for x, _ in own], [rate for _, rate in own]
        axis.scatter(across, up, s=18, marker=marker, c=face or colour, edgecolors=colour, linewidths=0.9, zorder=3)


def _products(axis: Any, profile: GpuProfile, samples: Sequence[Sample]) -> None:
    for colour, dtype in zip(COLOURS, profile.matmul, strict=False):
        timed = [s for s in usable(samples, Matmul, held_out=None) if s.operation.dtype == dtype]
        flops = [s.operation.flops for s in timed]
        _points(axis, timed, flops, colour)
        if timed:
            side = np.geomspace((min(flops) / 2) ** (1 / 3), (max(flops) / 2) ** (1 / 3), 60)
            curve = profile.seconds(Matmul(side, side, side, dtype), sustained=False)
            axis.plot(2 * side**3, 2 * side**3 / curve, color=colour, label=f"{dtype}, fitted (square)")
    axis.scatter([], [], s=18, marker="D", c="white", edgecolors=INK, label="held out of the fit")
    axis.set(xscale="log", title="Matrix products", xlabel="FLOPs of the product", ylabel="FLOP/s", ylim=(0, None))
    _ticks(axis.xaxis, _rate)
    axis.yaxis.set_major_formatter(_rate)
    axis.legend(loc="best")


def _agreement(axis: Any, profile: GpuProfile, samples: Sequence[Sample]) -> None:
    errors = judging.held_out_errors(profile, samples, {})
    limits = []
    for colour, dtype in zip(COLOURS, profile.matmul, strict=False):
        timed = [s for s in usable(samples, Matmul, held_out=None) if s.operation.dtype == dtype]
        for held_out, marker, face in POINTS:
            part = [s for s in timed if s.held_out is held_out]
            measured = np.array([s.seconds for s in part])
            predicted = np.array([float(profile.seconds(s.operation, sustained=False)) for s in part])
            bars = [np.maximum(measured - [s.low for s in part], 0), np.maximum([s.high for s in part] - measured, 0)]
            axis.errorbar(measured, predicted, xerr=bars, fmt="none", ecolor=colour, elinewidth=0.6, alpha=0.6)
            axis.scatter(measured, predicted, s=18, marker=marker, c=face or colour, edgecolors=colour, linewidths=0.9, zorder=3)
            limits += [*measured, *predicted]
        found = errors.get(f"matmul {dtype}")
        text = f"{dtype}: held out {100 * found.median:.0f} % (median of {found.count})" if found else dtype
        axis.scatter([], [], s=18, c=colour, label=text)
    if limits:
        low, high = min(limits) / 1.3, max(limits) * 1.3
        axis.plot([low, high], [low, high], color=INK, linewidth=0.8)
        axis.fill_between(
            [low, high], [low * 0.85, high * 0.85], [low * 1.15, high * 1.15], color=FAINT, alpha=0.5, label="within 15 %"
        )
        axis.set(xlim=(low, high), ylim=(low, high))
    axis.set(xscale="log", yscale="log", title="Predicted against measured", xlabel="measured", ylabel="predicted")
    _ticks(axis.xaxis, _time)
    _ticks(axis.yaxis, _time)
    axis.legend(loc="upper left")


def _attention(axis: Any, profile: GpuProfile, samples: Sequence[Sample]) -> None:
    timed = usable(samples, Attend, held_out=None)
    shapes = sorted({(s.operation.qk_dim, s.operation.backward, s.operation.dtype) for s in timed})
    for colour, (width, backward, dtype) in zip(COLOURS, shapes, strict=False):
        part = [s for s in timed if (s.operation.qk_dim, s.operation.backward, s.operation.dtype) == (width, backward, dtype)]
        _points(axis, part, [s.operation.q_len for s in part], colour)
        length = np.geomspace(min(s.operation.q_len for s in part), max(s.operation.q_len for s in part), 40)
        op = Attend(1, 8, 2, length, length, width, width, length * (length + 1) / 2, dtype, bool(backward))
        name = f"{dtype} head {width}, {'backward' if backward else 'forward'}"
        axis.plot(length, op.flops / profile.seconds(op, sustained=False), color=colour, label=name)
    how = "fitted" if profile.attention.origin == "measured" else "an estimate: too few points"
    axis.set_xscale("log", base=2)
    axis.set(title=f"Causal attention (line: {how}, 8 heads)", xlabel="tokens", ylabel="FLOP/s", ylim=(0, None))
    _ticks(axis.xaxis, lambda v, _: f"{v:g}", base=2)
    axis.yaxis.set_major_formatter(_rate)
    if shapes:
        axis.legend(loc="best")


def _traffic(axis: Any, profile: GpuProfile, samples: Sequence[Sample]) -> None:
    timed = usable(samples, Pointwise, held_out=None)
    for colour, form in zip(COLOURS, sorted({s.form for s in timed}), strict=False):
        part = sorted((s for s in timed if s.form == form), key=lambda s: s.operation.bytes)
        sizes, moved = [s.operation.bytes / s.operation.kernels for s in part], [s.operation.bytes for s in part]
        axis.plot(sizes, [work / s.seconds for s, work in zip(part, moved, strict=True)], color=colour, linewidth=0.9, label=form)
        _points(axis, part, sizes, colour)
    every = np.array([s.operation.bytes / s.operation.kernels for s in timed] or [1.0])
    size = np.geomspace(every.min(), every.max(), 60)
    axis.plot(
        size, size / profile.seconds(Pointwise(size, 0)), color=INK, linestyle="--", linewidth=1, label="used for pointwise work"
    )
    axis.set_xscale("log", base=2)
    axis.set(title="Memory traffic", xlabel="bytes a kernel moves", ylabel="bytes/s", ylim=(0, None))
    _ticks(axis.xaxis, _size, base=2)
    axis.yaxis.set_major_formatter(_rate)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def plot_links(link: Link, samples: Sequence[Sample], path: str | Path) -> None:
    """Seconds by message size, a panel a collective: points with their quartiles, the fitted curve a group size, and one group
    alone where it was measured. Raises as ``check_picture``."""
    check_picture(path := Path(path))
    plt = _pyplot()
    curves = fitting.by_curve(samples)
    kinds = sorted({kind for kind, _ in curves})
    columns = min(3, max(1, len(kinds)))
    lines = -(-max(1, len(kinds)) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(4.2 * columns, 3.6 * lines), layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    figure.suptitle(f"{link.name}: seconds by message size", x=0.01, ha="left", fontsize=11)
    panels = grid.ravel()
    some_alone = False
    for panel in panels[len(kinds) :]:
        panel.set_visible(False)
    for panel, kind in zip(panels, kinds, strict=False):
        for colour, ranks in zip(COLOURS, sorted(r for k, r in curves if k == kind), strict=False):
            part = sorted(curves[kind, ranks], key=lambda s: s.operation.bytes)
            sizes, seconds = np.array([float(s.operation.bytes) for s in part]), np.array([s.seconds for s in part])
            bars = [np.maximum(seconds - [s.low for s in part], 0), np.maximum([s.high for s in part] - seconds, 0)]
            panel.errorbar(sizes, seconds, yerr=bars, fmt="o", markersize=4, color=colour, elinewidth=0.8)
            alone = [s for s in usable(samples, Collective) if _alone(s, kind, ranks, part[0].groups)]
            some_alone = some_alone or bool(alone)
            panel.scatter(
                [s.operation.bytes for s in alone],
                [s.seconds for s in alone],
                s=16,
                facecolors="white",
                edgecolors=colour,
                linewidths=0.8,
            )
            if any(row.ranks == ranks for row in link.curves.get(kind, ())):
                line = np.geomspace(sizes.min(), sizes.max(), 60)
                rate = wire_bytes(kind, sizes.max(), ranks) / float(link.seconds(kind, sizes.max(), ranks))
                panel.plot(
                    line, link.seconds(kind, line, ranks), color=colour, label=f"{ranks} ranks, {rate / 1e9:.2g} GB/s on the wire"
                )
        panel.set_xscale("log", base=2)
        panel.set(yscale="log", title=kind.replace("_", " "))
        _ticks(panel.xaxis, _size, base=2)
        _ticks(panel.yaxis, _time)
        panel.tick_params(axis="x", labelrotation=30)
        panel.legend(loc="upper left")
    figure.supxlabel("bytes of the full buffer" + (" (open circles: one group alone)" if some_alone else ""), fontsize=9)
    _write(figure, path)


def _alone(sample: Sample, kind: str, ranks: int, most: int) -> bool:
    """A sample of one group by itself where the curve is of ``most`` groups at once."""
    op: Any = sample.operation
    return bool(op.kind == kind and sample.ranks == ranks and sample.groups == 1 < most and not sample.beside)
