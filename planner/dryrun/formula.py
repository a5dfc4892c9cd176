"""The same figures from the cost models: what the operations of ``cost_models.layers`` and the state formulas say of one rank's step.

Only what the step adds beside its layers is written here: sends between stages, and the few numbers that ranks agree on
(``reductions``: what the ZeRO stage reduces and gathers). Sizes are those of ``profiles.operations.Collective``.
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
from cost_models.layout import Layout
from cost_models.memory import StageMemory, stage_memory
from cost_models.passes import operations_again
from cost_models.schedules import in_flight
from cost_models.units import unit_cost
from planner.dryrun.reductions import Sent, update_collectives
from profiles.model import Moe
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


def agreements(job: Job, layout: Layout, stage: int) -> Iterator[Sent]:
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
