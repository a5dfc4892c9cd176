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
    from profiles.hardware import GpuProfile
    from profiles.measure.against import Difference
    from profiles.measure.links import LinkMeasurement
    from profiles.measure.machine import MachineMeasurement


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


def show_differences(out: Console, known: GpuProfile | None, found: Mapping[str, Difference]) -> None:
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


def machine_document(measured: MachineMeasurement, beside: Mapping[str, Difference]) -> dict[str, Any]:
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


def _failures_and_noise(measured: Any) -> dict[str, Any]:
    return {
        "failures": [{"what": str(sample.operation), "why": sample.failed} for sample in measured.failures],
        "noise": {"spread": measured.noise.spread, "others": measured.noise.others, "noisy": measured.noise.noisy},
    }
