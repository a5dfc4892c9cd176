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


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` equal layers in a row: their kind and their recompute rule."""

    kind: int
    rule: RecomputeRule
    count: int


def runs_of(job: Job, layout: Any, chunk: int) -> tuple[Run, ...]:
    """The layers of ``chunk`` as runs of equal ones, in order."""
    recompute = layout.recompute_rules
    layers = layout.layers_of_chunk(chunk, job.model.num_layers)

    def sort(i: int) -> tuple[int, str, tuple[str, ...]]:
        rule = recompute.of(i)
        return job.model.pattern[i], rule.mode, rule.modules

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
        for cost in _tail(job, degrees):
            kept = kept + cost.saved_bytes
            weight_pass = weight_pass + cost.weight_pass_bytes
            loss = cost.transient if loss is None else maximum(loss, cost.transient - freed)
            freed = freed + cost.saved_bytes
    unit = job.execution.recompute_unit
    for run in reversed(tuple(runs)):
        cost = layer_cost(job, degrees, run.kind)
        each = kept_bytes(cost, run.rule, degrees.tp)
        if run.rule.mode == "full":
            together = min(unit, run.count)
            total = each * -(-run.count // unit)
            again = cost.saved_bytes * together - each
        else:
            total, again = each * run.count, maximum(cost.saved_bytes - each, 0)
        backward = maximum(backward, again + cost.transient - freed)
        kept = kept + total
        weight_pass = weight_pass + cost.weight_pass_bytes * run.count
        largest = maximum(largest, each)
        freed = freed + total
    if first:
        kept = kept + _embedding(job, degrees).saved_bytes
    if boundary and job.execution.pipeline_output_kept:
        local = Local(job, degrees)
        kept = kept + local.split_tokens * job.model.hidden * local.bytes
    return ChunkMemory(kept, weight_pass, loss, backward, largest)


def offloaded(activations: Number, chunks: Iterable[ChunkMemory]) -> Number:
    """Device bytes of kept activations when they are offloaded: two layers' worth, the one that leaves or returns and the next."""
    largest: Number = 0
    for chunk in chunks:
        largest = maximum(largest, chunk.largest)
    return minimum(activations, 2 * largest)


def layer_cost(job: Job, degrees: Degrees, kind: int) -> LayerCost:
    """The operations of a layer kind; remembered for a ``Layout``, whose activations depend on few of its fields."""
    if isinstance(degrees, Layout):
        return _layer(job, _key(degrees), kind)
    return layer_operations(job, degrees, job.model.kinds[kind])


def _tail(job: Job, degrees: Degrees) -> list[LayerCost]:
    """What follows the layers, the last to run backward last: MTP modules end the forward, so their losses come first."""
    if isinstance(degrees, Layout):
        key = _key(degrees)
        return [_mtp(job, key)] * job.model.mtp + [_head(job, key)]
    return [mtp_operations(job, degrees) for _ in range(job.model.mtp)] + [head_operations(job, degrees)]


def _key(layout: Layout) -> Layout:
    """``layout`` without what the operations of one microbatch do not depend on."""
    return layout.with_(pp=1, vpp=1, schedule="1f1b", recompute="none", stages=(), order="tp-cp-dp-pp", zero=1, offload=())


@lru_cache(maxsize=8192)
def _layer(job: Job, key: Layout, kind: int) -> LayerCost:
    return layer_operations(job, key, job.model.kinds[kind])


@lru_cache(maxsize=2048)
def _head(job: Job, key: Layout) -> LayerCost:
    return head_operations(job, key)


@lru_cache(maxsize=1024)
def _mtp(job: Job, key: Layout) -> LayerCost:
    return mtp_operations(job, key)


def _embedding(job: Job, degrees: Degrees) -> LayerCost:
    return embedding_operations(job, degrees)
