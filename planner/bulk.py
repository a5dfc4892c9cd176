"""Lower bounds on the seconds of one microbatch for hundreds of thousands of degrees at once.

The same operations (``cost_models.layers``) and prices (``compute.price``, ``ClusterSpec.collective_seconds``) as the estimate, with arrays
for the degrees. What only adds time and needs a layout one by one (ZeRO's collectives, wider placements of another rank order) is left
out: a lower bound, which a property test says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.communication import Pass, exposed
from cost_models.compute import Compute, is_host, price, ring_block
from cost_models.job import Job
from cost_models.layer_cost import LayerCost
from cost_models.layers import embedding_operations, head_operations, layer_operations, mtp_operations
from cost_models.layout import RecomputeRule
from cost_models.measured import measured_pace, rows_of
from cost_models.passes import (
    EMBEDDING,
    HEAD,
    MTP,
    NO_RECOMPUTE,
    both_ways,
    host_part,
    mean_pace,
    operations_again,
    with_activations,
)  # fmt: skip
from planner.rules.core import limits_of
from profiles.hardware import ClusterSpec
from profiles.operations import Attend, Collective, Operation, Pointwise

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

COLUMNS = ("tp", "ring", "ulysses", "ep", "etp", "micro_batch", "kind")
"""Columns of a key: the degrees that a layer's own passes depend on; ``kind`` indexes ``KINDS``."""
KINDS = ("ring", "ulysses", "hybrid", "allgather")


@dataclass(frozen=True)
class Bulk:
    """Seconds by key: ``f`` and ``w`` key x kind, ``b`` key x kind x mode (recompute and input gradient), ``embedding`` and ``head``
    key x (f, b, w)."""

    f: Floats
    b: Floats
    w: Floats
    embedding: Floats
    head: Floats

    @cached_property
    def ends(self) -> Floats:
        """Seconds of embedding and head, by key."""
        out: Floats = self.embedding.sum(axis=1) + self.head.sum(axis=1)
        return out

    def total(self, totals: Ints) -> Floats:
        """Seconds of one microbatch through the whole model, by key, with the least recompute. ``totals``: layers by kind."""
        seconds: Floats = (self.f + self.b.min(axis=2) + self.w) @ totals + self.ends
        return seconds

    def take(self, at: Any) -> Bulk:
        """The keys ``at``."""
        return Bulk(self.f[at], self.b[at], self.w[at], self.embedding[at], self.head[at])


def lower_seconds(job: Job, keys: Ints, modes: Sequence[RecomputeRule] = (NO_RECOMPUTE,)) -> Bulk:
    """Lower bounds for ``keys`` (rows of ``COLUMNS``), by recompute mode; equal to ``passes.unit_seconds`` where the rank order is the
    closest one and ZeRO adds nothing."""
    model, number = job.model, len(keys)
    f, w = np.zeros((number, len(model.kinds))), np.zeros((number, len(model.kinds)))
    b = np.zeros((number, len(model.kinds), len(modes)))
    embedding, head = np.zeros((number, 3)), np.zeros((number, 3))
    for kind, name in enumerate(KINDS):
        at = np.flatnonzero(keys[:, 6] == kind)
        if not len(at):
            continue
        for place, dispatcher in enumerate(dispatchers_of(job)):
            degrees = degrees_of(job, keys[at], name, dispatcher)
            for k in range(len(model.kinds)):
                cost = with_activations(job, k, layer_operations(job, degrees, model.kinds[k]))
                for into, least in zip((f, b, w), _passes(job, degrees, cost, k, modes), strict=True):
                    into[at, k] = np.minimum(into[at, k], least) if place else least
        for out, unit, cost in (
            (embedding, EMBEDDING, embedding_operations(job, degrees)), (head, HEAD, head_operations(job, degrees)),
        ):  # fmt: skip
            one = _passes(job, degrees, cost, unit, (NO_RECOMPUTE,))
            out[at] = np.stack([one[0], one[1][:, 0], one[2]], axis=1)
        if model.mtp:
            one = _passes(job, degrees, with_activations(job, MTP, mtp_operations(job, degrees)), MTP, modes)
            head[at] += model.mtp * np.stack([one[0], one[1].min(axis=1), one[2]], axis=1)
    return Bulk(f, b, w, embedding, head)


def dispatchers_of(job: Job) -> Sequence[str]:
    """The ways in which tokens may travel to experts; any where there are none."""
    return limits_of(job).dispatchers if job.model.moe is not None else ("alltoall",)


def degrees_of(job: Job, keys: Ints, kind: str, dispatcher: str = "alltoall") -> Any:
    """Keys as the degrees that ``cost_models.layers`` reads; ``kind`` one of ``KINDS``."""
    tp, ring, ulysses, ep, etp, micro, _ = keys.T
    name = "ring" if kind == "hybrid" else kind
    return SimpleNamespace(
        tp=tp,
        sp=(tp > 1) & limits_of(job).sequence_parallel,
        ring=ring,
        ulysses=ulysses,
        cp=ring * ulysses,
        cp_kind=name,
        ep=ep,
        etp=etp,
        micro_batch=micro,
        dispatcher=dispatcher,
        capacity=0.0,
    )


def _passes(job: Job, degrees: Any, cost: LayerCost, unit: int, modes: Sequence[RecomputeRule]) -> tuple[Floats, Floats, Floats]:
    """(f, b by mode, w) seconds of a unit, as ``passes._unit`` has them."""
    weights = cost.backward_weight
    first, second = _launched(degrees, cost.backward_input), _launched(degrees, weights)
    share = second / np.maximum(1.0, first + second)
    launch, blocking, sync = host_part(job, unit, degrees.tp)
    number = len(degrees.tp)
    ahead: Any = None
    behind: Any = None
    if rows_of(job, unit):
        analytic = both_ways(job, cost.forward, cost.backward_input, weights)
        ahead, behind = measured_pace(job, degrees, unit, *analytic, mean_pace(job, unit))
    forward = np.zeros(number) + _pass(job, degrees, cost.forward, "forward", launch, blocking + sync, ahead)
    back = _pass(job, degrees, cost.backward_input, "backward_input", launch * (1 - share), blocking, behind)
    b = np.zeros((number, len(modes)))
    for m, rule in enumerate(modes):
        again, whole = operations_again(job.execution, cost, rule), rule.mode == "full"
        b[:, m] = back + _pass(job, degrees, again, "forward", launch if whole else 0.0, blocking + sync if whole else 0.0, ahead)
    return forward, b, np.zeros(number) + _pass(job, degrees, weights, "backward_weight", launch * share, 0.0, behind)


def _pass(
    job: Job, degrees: Any, operations: tuple[Operation, ...], which: Pass, least: Any, extra: float = 0.0, pace: Any = None
) -> Any:
    """Seconds of one pass by key; launching it takes ``least`` seconds at least; ``extra`` on top; ``pace``: where it was measured, its
    seconds over those of its compute, the host's part included."""
    if not operations:
        return 0.0
    gpu, execution = job.cluster.gpu, job.execution
    rings = np.any(degrees.ring > 1) and degrees.cp_kind != "allgather"
    cut = tuple(op for op in operations if rings and isinstance(op, Attend) and op.fused)
    compute = price(gpu, execution, [op for op in operations if op not in cut] if cut else operations)
    for op in cut:
        block, merge = ring_block(op, degrees.ring, execution.ring_merge_bytes)
        compute = compute + price(gpu, execution, [block]).times(degrees.ring) + price(gpu, execution, [merge])
    if pace is not None:
        compute = compute.times(pace)
        return compute.seconds + _exposed(Closest(job, degrees), operations, which, compute)
    busy = np.maximum(compute.seconds + _exposed(Closest(job, degrees), operations, which, compute), least) + extra
    if is_host(gpu):
        busy = busy + execution.host_kernel_seconds * _launched(degrees, operations, len(cut))
    return busy


def _launched(degrees: Any, operations: tuple[Operation, ...], cut: int = 0) -> Any:
    """Kernels and collectives that the host launches, at least: a collective over one rank is none."""
    total: Any = cut * 2.0 * (degrees.ring - 1)
    for op in operations:
        if isinstance(op, Collective):
            group = _group(degrees, op.axis)
            total = total + (0 if group is None else (np.asarray(group[0]) > 1) & (np.asarray(op.bytes) > 0))
        else:
            total = total + (op.kernels if isinstance(op, Pointwise) else 1)
    return total


def _exposed(closest: Closest, operations: tuple[Operation, ...], which: Pass, compute: Compute) -> Any:
    return sum(exposed(closest, closest.job.execution, operations, which, compute).values())


@dataclass(frozen=True)
class Closest:
    """Prices collectives by key in the closest placement (``communication.Priced``)."""

    job: Job
    layout: Any

    @property
    def cluster(self) -> ClusterSpec:
        return self.job.cluster

    def seconds(self, kind: str, axis: str, bytes: Any, count: Any = 1) -> Any:
        """Least seconds; 0 where nothing moves, and for exchanges that are priced by nodes."""
        group = _group(self.layout, axis)
        if group is None:
            return 0.0
        execution, cluster = self.job.execution, self.job.cluster
        if axis in ("ep", "etp_ep") and (execution.ep_overlap or self.layout.dispatcher in ("deepep", "hybridep")):
            return 0.0
        ranks, stride = (np.asarray(x) for x in group)
        size = np.asarray(bytes)
        if kind == "send_recv":
            apart: Any = stride
            for level in cluster.levels[:-1]:
                apart = np.where(ranks * stride > level.size, np.maximum(apart, level.size), apart)
            seconds = cluster.collective_seconds(kind, size, np.full_like(ranks, 2), apart)
        elif axis == "ep" and kind == "all_to_all":
            domain = cluster.levels[0].size
            inside = np.minimum(ranks, np.maximum(1, domain // np.maximum(stride, 1)))
            within = cluster.collective_seconds(kind, size * inside / ranks / execution.exchange_efficiency, inside, stride)
            across = cluster.collective_seconds(kind, size, ranks, stride)
            slower = np.maximum(np.where(inside > 1, within, 0.0), np.where(inside < ranks, across, 0.0))
            seconds = slower + execution.exchange_seconds
        else:
            seconds = cluster.collective_seconds(kind, size, ranks, stride)
        return np.where((ranks > 1) & (size > 0), seconds, 0.0) * count


def _group(degrees: Any, axis: str) -> tuple[Any, Any] | None:
    """(ranks, stride) of an axis in the closest placement; None for an axis that is not bounded here."""
    return {
        "tp": (degrees.tp, 1), "ulysses": (degrees.ulysses, degrees.tp), "ring": (degrees.ring, degrees.tp * degrees.ulysses),
        "cp": (degrees.cp, degrees.tp), "etp": (degrees.etp, 1), "ep": (degrees.ep, degrees.etp), "etp_ep": (degrees.etp * degrees.ep, 1),
    }.get(axis)  # fmt: skip
