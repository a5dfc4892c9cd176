"""What a chunk of the model keeps for backward, per microbatch, and the most that exists beyond it while its backward runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from cost_models.arrays import maximum, minimum
from cost_models.job import Job
from cost_models.layer_cost import Degrees, LayerCost, Local
from cost_models.layers import embedding_operations, head_operations, layer_operations, mtp_operations
from cost_models.layout import Layout, RecomputeRule
from cost_models.recompute import kept_bytes
from profiles.operations import Number


@dataclass(frozen=True, slots=True)
class ChunkMemory:
    """Bytes per microbatch on one rank. ``kept``: from forward to backward. ``weight_pass``: held from input-gradient to
    weight-gradient pass. ``loss`` and ``backward``: the most that exists beyond ``kept`` (of this microbatch) at the loss (None
    where the chunk has none) and in the backward of its layers. ``largest``: kept by its largest layer."""

    kept: Number = 0
    weight_pass: Number = 0
    loss: Number | None = None
    backward: Number = 0
    largest: Number = 0
    left: Number = 0
    """What an input-gradient pass that frees nothing leaves beyond ``kept`` (``Execution.split_backward_keeps_graph``)."""


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` equal layers in a row: their kind and their recompute rule."""

    kind: int
    rule: RecomputeRule
    count: int


def runs_of(job: Job, layout: Any, chunk: int) -> tuple[Run, ...]:
    """The layers of ``chunk`` as runs of equal ones, in order."""
    return _runs(job.model.pattern, layout.pp, layout.vpp, layout.stages, layout.recompute, chunk)


@lru_cache(maxsize=65536)
def _runs(pattern: tuple[int, ...], pp: int, vpp: int, stages: tuple[int, ...], recompute: str, chunk: int) -> tuple[Run, ...]:
    layout = Layout(pp=pp, vpp=vpp, stages=stages, recompute=recompute)
    rules = layout.recompute_rules
    layers = layout.layers_of_chunk(chunk, len(pattern))

    def sort(i: int) -> tuple[int, str, tuple[str, ...]]:
        rule = rules.of(i)
        return pattern[i], rule.mode, rule.modules

    return tuple(
        Run(kind, RecomputeRule(0, None, mode, modules), len(list(group))) for (kind, mode, modules), group in groupby(layers, sort)
    )


def chunk_memory(job: Job, layout: Layout, chunk: int) -> ChunkMemory:
    """The memory of ``chunk`` under ``layout``."""
    first, last = chunk == 0, chunk == layout.chunks - 1
    return assemble(job, layout, runs_of(job, layout, chunk), first=first, last=last, boundary=not last)


def assemble(job: Job, degrees: Degrees, runs: Iterable[Run], *, first: bool, last: bool, boundary: bool) -> ChunkMemory:
    """A chunk of ``runs`` layers; ``first`` holds the embedding, ``last`` head and MTP modules, ``boundary`` sends its output on.

    Backward goes from the last layer to the first: while a layer runs, what later layers (and the head) kept is free again, and
    the layer's own recomputed tensors and gradients exist beside what is kept.
    """
    kept: Number = 0
    weight_pass: Number = 0
    largest: Number = 0
    freed: Number = 0
    loss: Number | None = None
    backward: Number = 0
    if last:
        for name in ("mtp",) * job.model.mtp + ("head",):
            tail = unit_memory(job, degrees, name)
            kept = kept + tail.kept
            weight_pass = weight_pass + tail.weight_pass
            loss = tail.transient if loss is None else maximum(loss, tail.transient - freed)
            freed = freed + tail.kept
    together = job.execution.recompute_unit
    for run in reversed(tuple(runs)):
        unit = unit_memory(job, degrees, run.kind, run.rule)
        if run.rule.mode == "full":
            total = unit.kept * -(-run.count // together)
            again = unit.saved * min(together, run.count) - unit.kept
        else:
            total, again = unit.kept * run.count, maximum(unit.saved - unit.kept, 0)
        backward = maximum(backward, again + unit.transient - freed)
        kept = kept + total
        weight_pass = weight_pass + unit.weight_pass * run.count
        largest = maximum(largest, unit.kept)
        freed = freed + total
    if first:
        kept = kept + unit_memory(job, degrees, "embedding").kept
    if boundary and job.execution.pipeline_output_kept:
        kept = kept + unit_memory(job, degrees, "boundary").kept
    left = maximum(weight_pass - kept, 0) if job.execution.split_backward_keeps_graph else 0
    return ChunkMemory(kept, weight_pass, loss, backward, largest, left)


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """A layer kind under a recompute rule, or an end of the model, per microbatch on one rank: bytes ``kept``, ``saved`` without
    recompute, held for the weight pass, and the most that exists beyond them."""

    kept: Number
    saved: Number
    weight_pass: Number
    transient: Number


PLAIN = RecomputeRule(0, None, "none")


def unit_memory(job: Job, degrees: Any, unit: int | str, rule: RecomputeRule = PLAIN) -> UnitMemory:
    """The memory of a layer kind by its index, or of ``embedding``, ``head``, ``mtp``, or the ``boundary`` tensor between stages.

    Remembered: by the fields of a ``Layout`` that matter to it, or by the arrays themselves (``memory_bulk.LayoutArrays``).
    """
    if isinstance(degrees, Layout):
        return _remembered(job, _key(degrees), unit, rule)
    if hasattr(degrees, "remember"):
        found: UnitMemory = degrees.remember(("unit", unit, rule), lambda d: _unit(job, d, unit, rule))
        return found
    return _unit(job, degrees, unit, rule)


def _unit(job: Job, degrees: Any, unit: int | str, rule: RecomputeRule) -> UnitMemory:
    if unit == "boundary":
        local = Local(job, degrees)
        size = local.split_tokens * job.model.hidden * local.bytes
        return UnitMemory(size, size, 0, 0)
    cost = unit_cost(job, degrees, unit)
    return UnitMemory(
        kept_bytes(cost, rule, degrees.tp, discards_outputs=job.execution.discards_outputs),
        cost.saved_bytes,
        cost.retained_bytes if job.execution.split_backward_keeps_graph else cost.weight_pass_bytes,
        cost.transient,
    )


def unit_cost(job: Job, degrees: Any, unit: int | str) -> LayerCost:
    """The operations of a unit."""
    if isinstance(degrees, Layout):
        return _cost(job, _key(degrees), unit)
    if unit == "embedding":
        return embedding_operations(job, degrees)
    if unit == "head":
        return head_operations(job, degrees)
    if unit == "mtp":
        return mtp_operations(job, degrees)
    return layer_operations(job, degrees, job.model.kinds[int(unit)])


@lru_cache(maxsize=32768)
def _remembered(job: Job, key: Layout, unit: int | str, rule: RecomputeRule) -> UnitMemory:
    return _unit(job, key, unit, rule)


@lru_cache(maxsize=8192)
def _cost(job: Job, key: Layout, unit: int | str) -> LayerCost:
    if unit == "embedding":
        return embedding_operations(job, key)
    if unit == "head":
        return head_operations(job, key)
    if unit == "mtp":
        return mtp_operations(job, key)
    return layer_operations(job, key, job.model.kinds[int(unit)])


def offloaded(activations: Number, chunks: Iterable[ChunkMemory]) -> Number:
    """Device bytes of kept activations when they are offloaded: two layers' worth, the one that leaves or returns and the next."""
    largest: Number = 0
    for chunk in chunks:
        largest = maximum(largest, chunk.largest)
    return minimum(activations, 2 * largest)


def _key(layout: Layout) -> Layout:
    """``layout`` without what the operations of one microbatch do not depend on."""
    return _microbatch_key(
        layout.tp,
        layout.cp,
        layout.cp_kind,
        layout.ep,
        layout.etp,
        layout.sp,
        layout.micro_batch,
        layout.dispatcher,
        layout.capacity,
    )


@lru_cache(maxsize=16384)
def _microbatch_key(
    tp: int, cp: int, cp_kind: str, ep: int, etp: int, sp: bool, micro_batch: int, dispatcher: str, capacity: float
) -> Layout:
    return Layout(
        tp=tp, cp=cp, cp_kind=cp_kind, ep=ep, etp=etp, sp=sp, micro_batch=micro_batch, dispatcher=dispatcher, capacity=capacity
    )
