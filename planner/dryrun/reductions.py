"""Collectives that reduce gradients and gather parameters in a step, weight by weight, as the ZeRO stage asks for them.

Sizes are those of ``profiles.operations.Collective``: the full buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cost_models.job import Job
from cost_models.layout import SPLIT_BACKWARD, Layout
from cost_models.stage_states import adapters, stage_units, tensors
from cost_models.states import Weight
from profiles.model import Attention, ModelSpec

Sent = tuple[str, str, float]
"""Axis, kind, bytes of a step's collective."""
WHOLE_UNDER_TP = ("router", "router_bias", "q_norm", "k_norm")
"""Weights that every TP rank applies to other tokens or heads whether or not tokens are split between blocks."""


@dataclass(frozen=True)
class HeldWeight:
    """A weight on a rank: its ``elements`` before ZeRO; the model-parallel axes over which each rank has only its share of the
    gradient (``partial``); whether another rank holds it at the other end of the pipeline (``ends``); how many of this rank's
    ``chunks`` use it."""

    expert: bool
    elements: float
    partial: tuple[str, ...]
    ends: bool
    chunks: int
    trained: bool


def update_collectives(job: Job, layout: Layout, stage: int) -> Iterator[Sent]:
    """Of a rank of pipeline rank ``stage``."""
    for held in held_weights(job, layout, stage):
        ways = layout.edp_shard if held.expert else layout.dp_shard * layout.cp
        if layout.zero == 3 and (ways > 1 or layout.dp_shard * layout.cp > 1):
            yield from _fully_sharded(job, layout, held, ways)
        elif held.trained:
            yield from _in_buckets(job, layout, held, ways)


def _axes(held: HeldWeight) -> tuple[str, str]:
    """(ZeRO shards over, replicas)."""
    return ("edp_shard", "edp_replicate") if held.expert else ("dp_shard_cp", "dp_replicate")


def _fully_sharded(job: Job, layout: Layout, held: HeldWeight, ways: int) -> Iterator[Sent]:
    """ZeRO-3: gathered for forward and backward of a microbatch, reduced after it; once a step where the backward is split."""
    split, microbatches = layout.schedule in SPLIT_BACKWARD, layout.microbatches(job.global_batch)
    shard, replicate = _axes(held)
    wide, part = job.reduced_element * held.elements, job.reduced_element * held.elements / ways
    yield shard, "all_gather", job.gathered_element * held.elements * (1 if split else 2 * microbatches)
    if held.trained:
        times = 1 if split else microbatches
        yield shard, "reduce_scatter", wide * times
        yield replicate, "all_reduce", part * times
        for axis in (*held.partial, *(("ends",) if held.ends else ())):
            yield axis, "all_reduce", part


def _in_buckets(job: Job, layout: Layout, held: HeldWeight, ways: int) -> Iterator[Sent]:
    """ZeRO 0 to 2: reduced once a step, under ZeRO-2 after every backward of a chunk that uses the weight."""
    shard, replicate = _axes(held)
    wide = job.reduced_element * held.elements
    each_time = layout.zero == 2 and ways > 1
    times = layout.microbatches(job.global_batch) * held.chunks if each_time else 1
    for axis in held.partial:
        yield axis, "all_reduce", wide * times
    if held.ends:
        yield "ends", "all_reduce", wide / ways if each_time else wide
    if layout.zero == 0:
        yield "edp" if held.expert else "dp_cp", "all_reduce", wide
        return
    yield shard, "reduce_scatter", wide * times
    yield replicate, "all_reduce", wide / ways
    yield shard, "all_gather", job.gathered_element * held.elements


def held_weights(job: Job, layout: Layout, stage: int) -> Iterator[HeldWeight]:
    """Everything that a rank of pipeline rank ``stage`` holds."""
    for unit, times in stage_units(job, layout, stage):
        weights = tensors(job).units[unit]
        for weight in weights:
            partial = partial_axes(job.model, layout, weight)
            yield _held(job, layout, weight, times, partial, trained=job.trains(weight.part))
        for weight in weights if job.lora_rank else ():
            for adapter in adapters(job, (weight,)):
                whole = weight.split in ("none", "mtp")  # both halves have the gradients that the weight would have
                partial = partial_axes(job.model, layout, weight if whole else adapter, beside=not whole)
                yield _held(job, layout, adapter, times, partial, trained=True)


def _held(job: Job, layout: Layout, weight: Weight, times: int, partial: tuple[str, ...], *, trained: bool) -> HeldWeight:
    expert = weight.split == "expert"
    if layout.zero == 3:
        elements = weight.padded(layout, job.execution, layout.edp_shard if expert else layout.dp_shard * layout.cp)
    else:
        elements = weight.local(layout, job.execution)
    twice = used_at_both_ends(job.model, weight) and layout.chunks > 1
    together = layout.rank_of_chunk(0) == layout.rank_of_chunk(layout.chunks - 1)
    return HeldWeight(expert, float(elements) * times, partial, twice and not together, 2 if twice and together else 1, trained)


def used_at_both_ends(model: ModelSpec, weight: Weight) -> bool:
    """Whether first and last chunk use one weight: a tied head is the embedding, a prediction module embeds tokens too."""
    return (model.tied and weight.name in ("embedding", "head")) or (model.mtp > 0 and weight.name == "embedding")


def partial_axes(model: ModelSpec, layout: Layout, weight: Weight, *, beside: bool = False) -> tuple[str, ...]:
    """The model-parallel axes over which each rank has only its share of a weight's gradient; ``beside``: the weight is an adapter
    of a layer that TP splits."""
    if weight.split in ("none", "mtp") and layout.tp > 1 and (layout.sp or beside or weight.name in WHOLE_UNDER_TP):
        return ("tp",)
    if weight.split == "kv":
        heads = next(k.mixer.kv_heads for k in model.kinds if isinstance(k.mixer, Attention))
        return (f"kv{layout.tp // heads}",) if layout.tp > heads else ()
    return ()
