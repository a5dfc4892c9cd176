"""Measures the links between ranks: each collective over message sizes, for the groups of each mesh axis, one or all at once.

Runs inside any world that torchrun started (``measure_links`` finds itself in one by its environment), over NCCL or gloo, or starts
one of its own on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import combinations
from typing import Any

from profiles.errors import AxisplanError, InputError
from profiles.hardware import Link
from profiles.links import KINDS
from profiles.measure import fitting, judging
from profiles.measure.gpu import Collector, Progress, check, inside_torchrun, workers
from profiles.measure.samples import Sample, usable
from profiles.measure.timing import noise, others_busy, patience
from profiles.operations import Collective

SIZES = tuple(1 << p for p in range(10, 31, 2))
"""1 KiB to 1 GiB, in steps of four."""
Groups = Sequence[Sequence[int]]


@dataclass
class LinkMeasurement(judging.Measured):
    """What ``measure_links`` found; ``link`` is None where too little was measured before an interruption. ``contention`` is how
    much longer large messages take when others communicate at once (``contention``)."""

    link: Link | None = None
    contention: dict[str, float] = field(default_factory=dict)


def default_axes(world: int, *, strided: bool = False) -> dict[str, list[list[int]]]:
    """Groups of consecutive ranks for every divisor of ``world``; with ``strided`` also those of ranks as far apart as can be."""
    axes: dict[str, list[list[int]]] = {}
    for size in (d for d in range(2, world + 1) if world % d == 0):
        axes[f"{size} ranks"] = [list(range(first, first + size)) for first in range(0, world, size)]
        if strided and size < world:
            step = world // size
            axes[f"{size} ranks, {step} apart"] = [list(range(first, world, step)) for first in range(step)]
    return axes


def check_axes(axes: Mapping[str, Groups], world: int) -> None:
    """InputError unless each axis is disjoint, equally large groups of ranks below ``world``, two or more in a group."""
    for name, groups in axes.items():
        ranks = [r for group in groups for r in group]
        sizes = {len(group) for group in groups}
        if len(sizes) != 1 or min(sizes) < 2:
            raise InputError(f"groups.{name}", list(map(list, groups)), "groups of one size, at least two ranks each")
        if len(set(ranks)) != len(ranks):
            raise InputError(f"groups.{name}", list(map(list, groups)), "a rank is in one group of an axis")
        if min(ranks) < 0 or max(ranks) >= world:
            raise InputError(f"groups.{name}", max(ranks), f"ranks are 0 to {world - 1} in a world of {world}", world - 1)


def measure_links(
    axes: Mapping[str, Groups] | None = None,
    *,
    processes: int | None = None,
    device: str | None = None,
    kinds: Sequence[str] = KINDS,
    sizes: Sequence[int] = SIZES,
    budget_seconds: float = 120.0,
    progress: Progress | None = None,
    threads: int = 1,
) -> LinkMeasurement | None:
    """Measures collectives over the groups of ``axes`` (default: consecutive ranks of every size that divides the world); of axes that
    are given, every two also at the same time.

    Under torchrun every rank calls this, and rank 0 gets the result (the others None). Elsewhere ``processes`` workers are started
    on this machine. Ctrl-C returns what there is. Raises InputError for impossible groups, kinds or sizes, AxisplanError where a
    worker fails.
    """
    inside = inside_torchrun()
    device, _ = check(device, None, 1 if inside or processes is None else processes, budget_seconds)
    world = workers(processes, device)
    if world < 2:
        raise InputError("processes", world, "a link needs two", 2)
    pairs = list(map(list, combinations(axes, 2))) if axes else []
    axes = dict(axes) if axes else default_axes(world)
    check_axes(axes, world)
    for kind in kinds or ("none",):
        if kind not in KINDS:
            close = get_close_matches(kind, KINDS, 1)
            raise InputError("kinds", kind, f"is one of {', '.join(KINDS)}", close[0] if close else "all_reduce")
    if not sizes or min(sizes) < 1:
        raise InputError("sizes", min(sizes, default=0), "message sizes are positive bytes", 1024)
    groups = {name: [list(map(int, g)) for g in gs] for name, gs in axes.items()}
    job = {
        "axes": groups, "kinds": list(kinds), "sizes": sorted(set(map(int, sizes))), "budget_seconds": budget_seconds, "pairs": pairs,
    }  # fmt: skip
    collector, others = Collector(progress), others_busy()
    interrupted = False
    try:
        if inside:
            _measure_inside(device, collector, job)
        else:
            from profiles.measure.launch import run_workers

            limit = patience(budget_seconds)
            run_workers({"device": device, "links": job}, world, timeout_seconds=limit, on_record=collector, threads=threads)
    except KeyboardInterrupt:
        interrupted = True
    if inside and int(os.environ["RANK"]) != 0:
        return None
    return finish(collector, interrupted=interrupted, others=others)


def finish(collector: Collector, *, interrupted: bool, others: float) -> LinkMeasurement:
    """Fits what was collected; after an interruption the link may be None."""
    samples = [s for s in collector.samples if isinstance(s.operation, Collective)]
    result = LinkMeasurement(samples, collector.facts, interrupted=interrupted)
    result.noise = noise([s.spread for s in samples if not s.failed], others=others, threads=int(collector.facts.get("world", 1)))
    result.contention = contention(samples)
    try:
        result.link, result.held_out = fitting.link(samples, collector.facts)
    except fitting.TooFew as error:
        if not interrupted:
            raise AxisplanError(f"profile: {error}; give it a longer budget") from None
    return result


def contention(samples: Sequence[Sample], *, smallest: int = 1 << 20) -> dict[str, float]:
    """How much longer messages of ``smallest`` bytes on take when others communicate at once, the mean over kinds and sizes: by axis,
    all of its groups at once over one group alone; by two axes, both at once over the longer of the two."""
    timed = [s for s in usable(samples, Collective) if s.operation.bytes >= smallest]
    by_itself = [s for s in timed if not s.beside]
    ratios: dict[str, list[float]] = {}
    for s in timed:
        op = s.operation
        if s.beside:
            both = [_nearest(by_itself, axis, op, most=True) for axis in (op.axis, s.beside)]
            name, others = f"{op.axis} and {s.beside}", [other.seconds for other in both if other]
            if len(others) == 2:
                ratios.setdefault(name, []).append(s.seconds / max(others))
        elif s.groups > 1 and (one := _nearest(by_itself, op.axis, op, most=False)) and one.groups == 1:
            ratios.setdefault(op.axis, []).append(s.seconds / one.seconds)
    return {groups: sum(r) / len(r) for groups, r in ratios.items()}


def _nearest(samples: Sequence[Sample[Collective]], axis: str, op: Collective, *, most: bool) -> Sample[Collective] | None:
    """Of an axis, the sample of ``op``'s kind nearest in size, with the most or the fewest groups at once."""
    own = [s for s in samples if s.operation.axis == axis and s.operation.kind == op.kind]
    return min(own, key=lambda s: (abs(s.operation.bytes - op.bytes), -s.groups if most else s.groups), default=None)


def _measure_inside(device: str, collector: Collector, job: dict[str, Any]) -> None:
    import torch.distributed as dist

    from profiles.measure.link_worker import measure_here
    from profiles.measure.together import Workers
    from profiles.measure.worker import device_of_worker, join

    own = device_of_worker(device)
    ours = not dist.is_initialized()
    if ours:
        join(own)
    try:
        measure_here(own, Workers(), report=collector, **job)
    finally:
        if ours:
            dist.destroy_process_group()
