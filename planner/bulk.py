"""Lower bounds on the seconds of one microbatch for hundreds of thousands of degrees at once.

The same operations (``cost_models.layers``) and prices (``compute.price``, ``ClusterSpec.collective_seconds``) as the estimate, with arrays
for the degrees. What only adds time and needs a layout one by one (ZeRO's collectives, wider placements of another rank order,
attention cut into ring blocks, tensor-parallel collectives beside backward) is left out: a lower bound, which a property test says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.communication import INTERFERENCE
from cost_models.compute import host_seconds, is_host, price
from cost_models.job import Job
from cost_models.layer_cost import LayerCost
from cost_models.layers import embedding_operations, head_operations, layer_operations
from cost_models.layout import RecomputeRule
from cost_models.measured import measured_pace, measured_saved, rows_of
from cost_models.passes import both_ways, launches, mean_pace, with_activations
from cost_models.recompute import kept_bytes
from cost_models.state_bytes import states
from cost_models.states import Holding, embedding_weights, head_weights, hold, layer_weights
from planner.rules.core import Limits, limits_of
from profiles.operations import Collective, Operation, Pointwise

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

COLUMNS = ("tp", "ring", "ulysses", "ep", "etp", "micro_batch", "kind")
"""Columns of a key: the degrees that a layer's own passes depend on; ``kind`` indexes ``KINDS``."""
KINDS = ("ring", "ulysses", "hybrid", "allgather")


@dataclass(frozen=True)
class Bulk:
    """Seconds by key: ``layers`` key x kind x (f, b, w), ``embedding`` and ``head`` key x (f, b, w)."""

    layers: Floats
    embedding: Floats
    head: Floats

    @cached_property
    def _sums(self) -> tuple[Floats, Floats]:
        return self.layers.sum(axis=2), self.embedding.sum(axis=1) + self.head.sum(axis=1)

    def total(self, totals: Ints) -> Floats:
        """Seconds of one microbatch through the whole model, by key. ``totals``: layers by kind."""
        layers, ends = self._sums
        seconds: Floats = layers @ totals + ends
        return seconds


def lower_seconds(job: Job, keys: Ints) -> Bulk:
    """Lower bounds for ``keys`` (rows of ``COLUMNS``)."""
    model = job.model
    layers = np.zeros((len(keys), len(model.kinds), 3))
    embedding, head = np.zeros((len(keys), 3)), np.zeros((len(keys), 3))
    for kind, name in enumerate(KINDS):
        at = np.flatnonzero(keys[:, 6] == kind)
        if not len(at):
            continue
        degrees = _degrees(keys[at], name)
        for k in range(len(model.kinds)):
            layers[at, k] = _layer(job, degrees, k)
        embedding[at] = _passes(job, degrees, embedding_operations(job, degrees), floor=False)
        tail = _passes(job, degrees, head_operations(job, degrees), floor=False)
        head[at] = tail
        if model.mtp:
            head[at] += model.mtp * (tail + layers[at, model.pattern[-1]])
    return Bulk(layers, embedding, head)


def _degrees(keys: Ints, kind: str) -> Any:
    tp, ring, ulysses, ep, etp, micro, _ = keys.T
    name = "ring" if kind == "hybrid" else kind
    return SimpleNamespace(
        tp=tp,
        sp=tp > 1,
        ring=ring,
        ulysses=ulysses,
        cp=ring * ulysses,
        cp_kind=name,
        ep=ep,
        etp=etp,
        micro_batch=micro,
        dispatcher="alltoall",
        capacity=0.0,
    )


def _layer(job: Job, degrees: Any, kind: int) -> Floats:
    """Key x (f, b, w) seconds of a layer kind; measured ones where there are any."""
    cost = layer_operations(job, degrees, job.model.kinds[kind])
    if not rows_of(job, kind):
        return _passes(job, degrees, cost, floor=True)
    cost = with_activations(job, kind, cost)
    analytic = both_ways(job, cost.forward, cost.backward_input, cost.backward_weight)
    ahead, behind = measured_pace(job, degrees, kind, *analytic, mean_pace(job, kind))
    return _passes(job, degrees, cost, floor=True, paces=(ahead, behind, behind))


def _passes(job: Job, degrees: Any, cost: LayerCost, *, floor: bool, paces: tuple[Any, Any, Any] | None = None) -> Floats:
    """Key x (f, b, w) seconds of a unit; ``floor``: launching it may take longer than the work, as for a layer; ``paces``: by
    pass, measured over analytic compute seconds where the unit was measured, the host's part included."""
    weights = cost.backward_weight
    share = launches(weights) / max(1.0, launches(weights) + launches(cost.backward_input))
    launch = host_seconds(job.cluster.gpu, job.execution, degrees.tp) if floor else 0.0
    blocking = job.execution.blocking_launch_seconds if floor else 0.0
    out = np.zeros((len(degrees.tp), 3))
    for column, (which, operations, least, more) in enumerate((
        ("forward", cost.forward, launch, blocking), ("backward_input", cost.backward_input, launch * (1 - share), blocking),
        ("backward_weight", weights, launch * share, 0.0),
    )):  # fmt: skip
        if operations:
            compute = price(job.cluster.gpu, job.execution, operations)
            if paces is not None:
                compute = compute.times(paces[column])
                out[:, column] = compute.seconds + _exposed(job, degrees, operations, which, compute)
                continue
            busy = np.maximum(compute.seconds + _exposed(job, degrees, operations, which, compute), least) + more
            if is_host(job.cluster.gpu):
                kernels = sum(op.kernels if isinstance(op, Pointwise) else 1 for op in operations if not isinstance(op, Collective))
                busy = busy + job.execution.host_kernel_seconds * kernels
            out[:, column] = busy
    return out


def _exposed(job: Job, degrees: Any, operations: tuple[Operation, ...], which: str, compute: Any) -> Any:
    """What collectives add at least."""
    execution, total, ring = job.execution, 0.0, 0.0
    deduplicated = set(limits_of(job).dispatchers) != {"alltoall"}
    for op in operations:
        if not isinstance(op, Collective):
            continue
        group = _group(degrees, op.axis)
        if group is None:
            continue
        behind = which == "backward_weight" or (which == "backward_input" and op.kind in ("reduce_scatter", "all_reduce"))
        if op.axis == "tp" and execution.tp_overlap == "backward" and behind:
            continue
        if op.axis in ("ep", "etp_ep") and (execution.ep_overlap or deduplicated):
            continue
        ranks, stride = group
        seconds = (
            np.where(
                (ranks > 1) & (np.asarray(op.bytes) > 0), job.cluster.collective_seconds(op.kind, op.bytes, ranks, stride), 0.0
            )
            * op.count
        )
        if op.axis == "tp" and execution.tp_overlap in ("userbuffers", "async"):
            total = total + seconds * execution.tp_exposed
        elif op.axis == "ring" and op.kind == "send_recv" and execution.cp_overlap:
            ring = ring + seconds
        else:
            total = total + seconds
    if np.any(ring):
        beside = compute.attention * (degrees.ring - 1) / degrees.ring
        total = total + np.maximum(0.0, ring - beside) + INTERFERENCE * np.minimum(ring, beside)
    return total


def _group(degrees: Any, axis: str) -> tuple[Any, Any] | None:
    """(ranks, stride) of an axis in the closest placement; None for an axis that is not bounded here."""
    return {
        "tp": (degrees.tp, 1), "ulysses": (degrees.ulysses, degrees.tp), "ring": (degrees.ring, degrees.tp * degrees.ulysses),
        "cp": (degrees.cp, degrees.tp), "etp": (degrees.etp, 1), "ep": (degrees.ep, degrees.etp), "etp_ep": (degrees.etp * degrees.ep, 1),
    }.get(axis)  # fmt: skip


def lower_bytes(
    job: Job, limits: Limits, rows: Ints, modes: tuple[RecomputeRule, ...], *, offload: bool
) -> tuple[Floats, Floats, Floats]:
    """A lower bound on the bytes of the fullest rank, by row (``COLUMNS``, pp, dp, microbatches): the mean over ranks of states under
    the most sharding the target has, and of one microbatch's kept activations in the least mode. Also estimates, without recompute and
    with all of it: all microbatches of 1F1B in flight, one layer and the loss at work."""
    model, execution = job.model, job.execution
    out, plain, tight = np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows))
    totals = np.bincount(model.pattern, minlength=len(model.kinds))
    for kind, name in enumerate(KINDS):
        for pipeline in (False, True):
            at = np.flatnonzero((rows[:, 6] == kind) & ((rows[:, 7] > 1) == pipeline))
            if not len(at):
                continue
            part = rows[at]
            degrees = _degrees(part[:, :7], name)
            pp, dp = part[:, 7], part[:, 8]
            degrees.dp_shard, degrees.pp = dp, pp
            degrees.edp_shard = np.maximum(1, degrees.tp * degrees.cp * dp // (degrees.etp * degrees.ep))
            allowed = [z for z in limits.zero if not pipeline or z <= limits.max_zero_with_pp] or [0]
            degrees.zero, degrees.offload = max(allowed), ("optimizer",) if offload else ()
            held = Holding()
            kept: Any = 0.0
            full: Any = 0.0
            biggest: Any = 0.0
            for k, layer in enumerate(model.kinds):
                held = held + hold(layer_weights(model, layer), degrees, execution).times(int(totals[k]))
                cost = layer_operations(job, degrees, layer)
                each, saved = _kept(job, degrees, k, cost, modes[0])
                full = full + totals[k] * each
                biggest = np.maximum(biggest, saved + cost.transient)
                for mode in modes[1:]:
                    kept_so = _kept(job, degrees, k, cost, mode)[0]
                    each = np.minimum(each, kept_so / (execution.recompute_unit if mode.mode == "full" else 1))
                kept = kept + totals[k] * each
            held = held + hold(embedding_weights(model), degrees, execution)
            held = held + hold(head_weights(model, shares_embedding=model.tied), degrees, execution)
            trained = Holding() if job.frozen or job.lora_rank or job.optimizer == "muon" else None
            state = np.asarray(states(job, degrees, held, trained).total)
            beside = execution.workspace_bytes + job.cluster.gpu.context_bytes
            slack = (
                min(execution.reserved_ratio, execution.eager_reserved_ratio)
                if execution.elementwise == "eager"
                else execution.reserved_ratio
            )
            out[at] = (state + (0.0 if offload else kept)) / pp * slack + beside
            degrees.zero, degrees.offload = (1 if 1 in allowed else max(allowed)), ()
            likely = np.asarray(states(job, degrees, held, trained).total)
            loss = head_operations(job, degrees)
            work = np.maximum(biggest, loss.saved_bytes + loss.transient)
            plain[at] = ((likely + full * np.minimum(pp, part[:, 9])) / pp + work) * slack + beside
            tight[at] = ((likely + kept * np.minimum(pp, part[:, 9])) / pp + work) * slack + beside
    return out, plain, tight


def _kept(job: Job, degrees: Any, kind: int, cost: LayerCost, mode: RecomputeRule) -> tuple[Any, Any]:
    """(kept under ``mode``, saved without recompute) bytes of a layer kind."""
    return measured_saved(job, degrees, kind, mode, kept_bytes(cost, mode, degrees.tp), cost.saved_bytes)
