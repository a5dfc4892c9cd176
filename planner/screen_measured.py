"""What was measured, beside what was known: tables and JSON of ``axisplan profile``, and of layers given with ``--profile``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.screen import gib, percent, seconds, table

if TYPE_CHECKING:
    from rich.console import Console

    from cost_models.job import Job
    from cost_models.layout import Layout
    from planner.layer_profiles import Compared
    from profiles.fit import Errors
    from profiles.hardware import GpuProfile
    from profiles.measure.gpu import GpuMeasurement
    from profiles.measure.layer_profile import LayerProfile
    from profiles.measure.links import LinkMeasurement
    from profiles.measure.machine import MachineMeasurement


def show_measurement(out: Console, measured: MachineMeasurement) -> None:
    """What ``profile gpu`` found: rates, the fits' errors on what was left out, what failed, and whether the machine was noisy."""
    profile = measured.gpu.profile
    if profile is not None:
        rows = [(f"{dtype} products", f"{profile.peak_flops(dtype) / 1e9:,.1f} GFLOP/s at most") for dtype in profile.peaks]
        rows += [
            ("attention", profile.attention.source if profile.attention.origin == "estimate" else "fitted"),
            ("memory", f"{profile.memory_bytes_per_second / 1e9:,.1f} GB/s achieved, {gib(profile.usable_bytes)} usable"),
            ("launch", seconds(profile.launch_seconds)),
        ]
        out.print(table(profile.name, ("", "measured"), rows, left=2))
    show_errors(out, measured.gpu)
    if measured.gpu.rough:
        out.print(measured.gpu.rough, soft_wrap=True)
    if measured.links is not None:
        show_links(out, measured.links)


def show_links(out: Console, measured: LinkMeasurement) -> None:
    """What ``profile links`` found: latency and rate of each curve, contention, errors, noise."""
    if measured.link is not None:
        fitted = [
            (f"{kind.replace('_', '-')} over {row.ranks}", seconds(row.alpha_seconds), f"{row.bytes_per_second / 1e9:,.2f} GB/s")
            for kind, curves in measured.link.curves.items()
            for row in curves
        ]
        out.print(table(measured.link.name, ("", "latency", "on a rank's wire"), fitted))
    if measured.contention:
        rows = [(groups, f"x {factor:.2f}") for groups, factor in measured.contention.items()]
        out.print(table("at once, against alone", ("groups", "take"), rows))
    show_errors(out, measured)


def show_errors(out: Console, measured: GpuMeasurement | LinkMeasurement) -> None:
    """By kind of operation: the fit's error on what was held out and how far repeats spread; then failures, and noise in all."""
    noise, spreads = measured.noise, measured.spreads
    rows = []
    for kind in (*measured.held_out, *(k for k in spreads if k not in measured.held_out)):
        errors, spread = measured.held_out.get(kind), spreads.get(kind)
        judged = (percent(errors.median), percent(errors.p90), errors.count) if errors else ("", "", "")
        repeated = ("", "") if spread is None else (percent(spread), "noisy" if spread > noise.limit else "")
        rows.append((kind.replace("_", "-"), *judged, *repeated))
    if rows:
        columns = ("", "median", "nine in ten below", "samples", "spread of repeats", f"over {percent(noise.limit)}")
        out.print(table("error of the fit on samples left out", columns, rows))
    for sample in measured.failures[:5]:
        out.print(f"not measured: {sample.operation}: {sample.failed}", soft_wrap=True)
    if len(measured.failures) > 5:
        out.print(f"not measured: {len(measured.failures) - 5} more (--json, or the samples, name them)")
    out.print(str(noise), soft_wrap=True)


def show_layers(out: Console, profile: LayerProfile) -> None:
    """Rows of ``profile layer``."""
    columns = ("layer", "tp", "micro batch", "tokens", "forward", "backward", "GFLOP", "kept", "peak")
    rows = [
        (r.name, r.tp, r.micro_batch, r.seq_len, r.failed, "", "", "", "") if r.failed else (
            r.name, r.tp, r.micro_batch, r.seq_len, repeated(r.forward_seconds, r.forward_spread),
            repeated(r.backward_seconds, r.backward_spread),
            f"{(r.forward_flops + r.backward_flops) / 1e9:.2f}", gib(r.saved_bytes), gib(r.peak_bytes),
        )
        for r in profile.rows
    ]  # fmt: skip
    out.print(table(f"layers on {profile.device}", columns, rows))
    out.print(profile.noise, soft_wrap=True)


def repeated(value: float, spread: float) -> str:
    """Seconds, and how far the middle half of their repeats spans."""
    return f"{seconds(value)} (+-{percent(spread / 2)})"


def measured_document(job: Job, layout: Layout | None = None) -> dict[str, Any]:
    """``{"measured_layers": [...]}`` for a job with measured layers, else nothing: what ``--json`` adds."""
    from planner.layer_profiles import compare

    return {"measured_layers": [asdict(row) for row in compare(job, layout)]} if job.measured else {}


def show_measured(out: Console, job: Job, layout: Layout | None = None) -> None:
    """The table, and a line where the layout's own layers are not in it; nothing for a job without measured layers."""
    from cost_models.passes import mean_pace
    from planner.layer_profiles import compare

    if not job.measured:
        return
    rows = compare(job, layout)
    columns = ("layer", "tp", "micro batch", "forward", "by formula", "backward", "by formula", "kept", "by formula", "used")
    out.print(table("measured layers", columns, [cells(row) for row in rows]))
    if layout is None:
        return
    for kind in sorted({row.kind for row in rows} - {row.kind for row in rows if row.used}):
        ahead, back = mean_pace(job, kind)
        at = f"tp {layout.tp}, micro batch {layout.micro_batch}" + (", cp or ep" if layout.cp * layout.ep * layout.etp > 1 else "")
        line = f"{job.model.name}.{kind} was not measured at {at}: the formula times what it is off elsewhere"
        out.print(f"{line}, {ahead:.2f} forward and {back:.2f} backward", soft_wrap=True)


def cells(row: Compared) -> Sequence[object]:
    return (
        row.kind, row.tp, row.micro_batch, seconds(row.forward), beside(row.forward, row.analytic_forward), seconds(row.backward),
        beside(row.backward, row.analytic_backward), gib(row.saved_bytes), gib(row.analytic_saved_bytes), "yes" if row.used else "",
    )  # fmt: skip


def beside(measured: float, analytic: float) -> str:
    """The formula's seconds, and how far they are from the measured ones."""
    return f"{seconds(analytic)} ({100 * (analytic / measured - 1):+.0f} %)"


def show_differences(out: Console, known: GpuProfile | None, found: Mapping[str, Errors]) -> None:
    """``profile gpu --against``: how far the known profile is from what was measured, by kind of operation."""
    if known is None:
        return
    rows = [
        (kind, percent(d.median), percent(d.p90), f"{d.ratio:.2f}", d.count, "" if d.median <= NEAR else "far")
        for kind, d in found.items()
    ]
    columns = ("", "median difference", "nine in ten below", "known / measured", "samples", f"over {percent(NEAR)}")
    out.print(table(f"{known.name} as known, against this measurement", columns, rows))


NEAR = 0.10
"""Median difference up to which a known profile stands for a device."""


def machine_document(measured: MachineMeasurement, beside: Mapping[str, Errors]) -> dict[str, Any]:
    """``profile gpu --json``: the cluster as its file holds it, errors on samples left out, failures, noise, and ``against``."""
    from planner.plan import cluster_dump

    gpu = measured.gpu
    return {
        "cluster": cluster_dump(measured.cluster) if measured.cluster else None,
        "facts": gpu.facts,
        "held_out": {name: asdict(errors) for name, errors in gpu.held_out.items()},
        "rough": gpu.rough,
        **_failures_and_noise(gpu),
        "links": links_document(measured.links) if measured.links else None,
        "against": {name: asdict(difference) for name, difference in beside.items()},
        "interrupted": measured.interrupted,
    }


def links_document(measured: LinkMeasurement) -> dict[str, Any]:
    """``profile links --json``."""
    from pydantic import TypeAdapter

    from profiles.hardware import Link

    return {
        "link": TypeAdapter(Link).dump_python(measured.link, mode="json") if measured.link else None,
        "held_out": {name: asdict(errors) for name, errors in measured.held_out.items()},
        "contention": dict(measured.contention),
        **_failures_and_noise(measured),
        "interrupted": measured.interrupted,
    }


def _failures_and_noise(measured: GpuMeasurement | LinkMeasurement) -> dict[str, Any]:
    return {
        "failures": [{"what": str(sample.operation), "why": sample.failed} for sample in measured.failures],
        "spreads": measured.spreads,
        "noise": {"spread": measured.noise.spread, "others": measured.noise.others, "noisy": measured.noise.noisy},
    }
