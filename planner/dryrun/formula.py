"""The same figures from the cost models: what the operations of ``cost_models.layers`` and the state formulas say of one rank's step.

Only what the step adds beside its layers is written here: sends between stages, reduction and gathering by ZeRO stage, and the few
numbers that ranks agree on. Sizes are those of ``profiles.operations.Collective``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from cost_models.activations import chunk_memory, runs_of
from cost_models.job import Job
from cost_models.layer_cost import Local
from cost_models.layers import first_layer
from cost_models.layout import SPLIT_BACKWARD, Layout
from cost_models.memory import StageMemory, stage_memory
from cost_models.passes import operations_again
from cost_models.schedules import in_flight
from cost_models.stage_states import adapters, stage_units, tensors
from cost_models.states import Weight
from cost_models.units import unit_cost
from profiles.model import Attention, ModelSpec, Moe
from profiles.operations import Attend, Collective, GroupedMatmul, Matmul, Operation

Key = tuple[str, str]
"""(axis, kind) of a collective."""


@dataclass
class StepFormula:
    """One rank's step: FLOPs by kind, collective bytes by (axis, kind), memory of its stage."""

    memory: StageMemory
    kept: float = 0.0
    """Most activations kept at once, whatever else exists then."""
    flops: Counter[str] = field(default_factory=Counter)
    sent: dict[Key, float] = field(default_factory=lambda: defaultdict(float))


def step_formula(job: Job, layout: Layout, stage: int) -> StepFormula:
    """What the cost models say of a rank of pipeline rank ``stage``."""
    microbatches = layout.microbatches(job.global_batch)
    out = StepFormula(stage_memory(job, layout)[stage], kept_activations(job, layout, stage, microbatches))
    for chunk in layout.chunks_of_rank(stage):
        for operation in chunk_operations(job, layout, chunk):
            if isinstance(operation, (Matmul, GroupedMatmul)):
                out.flops["products"] += operation.flops * microbatches
            elif isinstance(operation, Attend):
                out.flops["attention"] += operation.flops * microbatches
            elif isinstance(operation, Collective):
                out.sent[operation.axis, operation.kind] += operation.bytes * operation.count * microbatches
        out.sent["pp", "send_recv"] += microbatches * boundary_bytes(job, layout, chunk)
    for axis, kind, size in (*update_collectives(job, layout, stage), *agreements(job, layout, stage)):
        out.sent[axis, kind] += size
    return out


def kept_activations(job: Job, layout: Layout, stage: int, microbatches: int) -> float:
    """Most bytes kept from forward to backward at once, over the schedule's fullest moments."""
    chunks = {c: chunk_memory(job, layout, c) for c in layout.chunks_of_rank(stage)}
    alive, held = ({c: float(size(m)) for c, m in chunks.items()} for size in (attrgetter("kept"), attrgetter("weight_pass")))
    return in_flight(layout.schedule, layout.pp, layout.vpp, microbatches)[stage].peak(alive, held)


def chunk_operations(job: Job, layout: Layout, chunk: int) -> Iterator[Operation]:
    """Everything a chunk runs for one microbatch, recomputation included."""
    if chunk == 0:
        yield from unit_cost(job, layout, "embedding").operations()
    runs = runs_of(job, layout, chunk)
    for run in runs:
        cost = unit_cost(job, layout, run.kind)
        begins = chunk == 0 and run is runs[0]
        if begins:
            yield from (*first_layer(job, cost).operations(), *operations_again(job.execution, cost, run.rule))
        yield from (*cost.operations(), *operations_again(job.execution, cost, run.rule)) * (run.count - begins)
    if chunk == layout.chunks - 1:
        yield from unit_cost(job, layout, "head").operations()
        last = layout.recompute_rules.of(job.model.num_layers - 1)
        for _ in range(job.model.mtp):
            cost = unit_cost(job, layout, "mtp")
            yield from cost.operations()
            layer = unit_cost(job, layout, job.model.pattern[-1])
            yield from operations_again(job.execution, layer, last)


def boundary_bytes(job: Job, layout: Layout, chunk: int) -> int:
    """Bytes a chunk sends to other ranks for one microbatch: its output on, its input's gradient back."""
    local = Local(job, layout)
    here = layout.rank_of_chunk(chunk)
    ways = sum(0 <= other < layout.chunks and layout.rank_of_chunk(other) != here for other in (chunk - 1, chunk + 1))
    return int(ways * local.split_tokens * job.model.hidden * local.bytes)


def update_collectives(job: Job, layout: Layout, stage: int) -> Iterator[tuple[str, str, float]]:
    """(axis, kind, bytes) of reducing gradients and gathering parameters in a step."""
    microbatches = layout.microbatches(job.global_batch)
    wide, narrow = job.reduced_element, job.gathered_element
    for weight, count, ends, trained in stage_weights(job, layout, stage):
        expert = weight.split == "expert"
        shard, replicate = ("edp_shard", "edp_replicate") if expert else ("dp_shard_cp", "dp_replicate")
        ways = layout.edp_shard if expert else layout.dp_shard * layout.cp
        times = microbatches * uses(job, layout, weight) if layout.zero == 2 and ways > 1 and not ends else 1
        partial = ("ends",) if ends else partial_axis(job.model, layout, weight)
        fully = layout.zero == 3 and (ways > 1 or layout.dp_shard * layout.cp > 1)
        share = count / ways if fully else count
        if not trained:  # gathered where it is sharded, nothing else
            if fully:
                split = layout.schedule in SPLIT_BACKWARD
                yield shard, "all_gather", narrow * count * (1 if split else 2 * microbatches)
            continue
        for axis in partial:
            yield axis, "all_reduce", wide * share * times
        if layout.zero == 0:
            yield "edp" if expert else "dp_cp", "all_reduce", wide * count
        elif fully:
            split = layout.schedule in SPLIT_BACKWARD
            yield shard, "all_gather", narrow * count * (1 if split else 2 * microbatches)
            yield shard, "reduce_scatter", wide * count * (1 if split else microbatches)
            yield replicate, "all_reduce", wide * count / ways * (1 if split else microbatches)
        else:
            yield shard, "reduce_scatter", wide * count * times
            yield replicate, "all_reduce", wide * count / ways
            yield shard, "all_gather", narrow * count


def uses(job: Job, layout: Layout, weight: Weight) -> int:
    """Chunks of one rank that a weight serves: both ends of a V share the embedding."""
    ends = (
        (job.model.tied or job.model.mtp > 0)
        and layout.chunks > 1
        and layout.rank_of_chunk(0) == layout.rank_of_chunk(layout.chunks - 1)
    )
    return 2 if ends and weight.name == "embedding" else 1


def stage_weights(job: Job, layout: Layout, stage: int) -> Iterator[tuple[Weight, float, bool, bool]]:
    """(weight, elements on the rank before ZeRO, held at both ends of the pipeline, trained) of everything a rank holds."""
    for unit, times in stage_units(job, layout, stage):
        weights = tensors(job).units[unit]
        beside = adapters(job, weights) if job.lora_rank else ()
        for weight in (*weights, *beside):
            ends = (
                (job.model.tied or (job.model.mtp > 0 and weight.name == "embedding"))
                and weight.name in ("embedding", "head")
                and layout.rank_of_chunk(0) != layout.rank_of_chunk(layout.chunks - 1)
            )
            if layout.zero == 3:
                held = weight.padded(
                    layout, job.execution, layout.edp_shard if weight.split == "expert" else layout.dp_shard * layout.cp
                )
            else:
                held = weight.local(layout, job.execution)
            yield weight, float(held) * times, ends, job.trains(weight.part) or weight.name.endswith((".a", ".b"))


WHOLE_UNDER_TP = ("router", "router_bias", "q_norm", "k_norm")
"""Weights that every TP rank applies to other tokens or heads whether or not tokens are split between blocks."""


WHOLE_LAYERS = ("q_down", "kv_down", "mtp_projection")
"""Linear layers that TP does not split: both halves of their adapters have the gradients that the layer's weight would have."""


def partial_axis(model: ModelSpec, layout: Layout, weight: Weight) -> tuple[str, ...]:
    """The model-parallel axis over which each rank has only its share of a weight's gradient."""
    if weight.split in ("none", "mtp") and layout.tp > 1:
        halves = weight.name.endswith((".a", ".b")) and weight.name.rpartition(".")[0] not in WHOLE_LAYERS
        if layout.sp or halves or weight.name in WHOLE_UNDER_TP:
            return ("tp",)
    if weight.split == "kv":
        heads = next(k.mixer.kv_heads for k in model.kinds if isinstance(k.mixer, Attention))
        return (f"kv{layout.tp // heads}",) if layout.tp > heads else ()
    return ()


def agreements(job: Job, layout: Layout, stage: int) -> Iterator[tuple[str, str, float]]:
    """Numbers that ranks agree on once a step: valid tokens; loss, norm, stop, balance loss, loss of MTP modules; tokens an expert
    got."""
    model, chunks = job.model, layout.chunks_of_rank(stage)
    yield "dp_cp", "all_reduce", 8.0
    yield "world", "all_reduce", 40.0 if model.mtp else 32.0
    layers = [model.layer(i) for c in chunks for i in layout.layers_of_chunk(c, model.num_layers)]
    layers += [model.layer(model.num_layers - 1)] * (model.mtp if layout.chunks - 1 in chunks else 0)
    loads = 4.0 * sum(layer.ffn.experts for layer in layers if isinstance(layer.ffn, Moe))
    if loads:
        yield "dp_cp", "all_reduce", loads
        yield "tp", "all_reduce", loads
