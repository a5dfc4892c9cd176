"""Memory of every pipeline rank, by category, in the order of the step: the peak over its moments, not the sum of maxima.

Moments of a steady step: the loss of a microbatch on the last stage; the backward of each layer while the schedule's other
microbatches are in flight (``schedules.in_flight``); the optimizer step. Bytes of one microbatch come from the operations' kept
tensors (``layers``) and the recompute rule; states from ``state_bytes``. *Allocated* is what the framework's allocator hands out,
*reserved* what it holds, *device* what the GPU shows: reserved, context and communicators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cost_models.activations import ChunkMemory, Place, chunk_memory, offloaded, place_of, runs_of
from cost_models.arrays import maximum, minimum, plain, where
from cost_models.job import Job
from cost_models.layout import ZERO_BUBBLE, Layout
from cost_models.overheads import communicators, gathered_buffers, graph_pool, initial_bytes, lasting_buffers, optimizer_temporary
from cost_models.schedules import holds, in_flight
from cost_models.stage_states import Units, ranks_chunks, stage_holding, stage_units
from cost_models.state_bytes import States
from cost_models.state_bytes import states as states_of
from cost_models.unit_memory import Run
from profiles.errors import InputError
from profiles.operations import Number


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on the worst rank of a pipeline rank ``stage``. The categories up to ``temporary`` add to ``peak_allocated``: what
    lives at the step's fullest moment, ``peak_at``. ``communication``: communicators, outside the allocator. ``host``: on the
    node's side, per rank."""

    stage: int
    parameters: Number
    gradients: Number
    optimizer: Number
    activations: Number
    temporary: Number
    communication: Number
    peak_allocated: Number
    peak_reserved: Number
    device: Number
    init_peak: Number
    host: Number = 0.0
    peak_at: Any = ""

    @property
    def states(self) -> Number:
        return self.parameters + self.gradients + self.optimizer

    @property
    def needed(self) -> Number:
        """Device bytes the rank needs at its fullest, building the model included."""
        return maximum(self.device, self.init_peak)


@dataclass(frozen=True, slots=True)
class Fixed:
    """What a rank holds whatever its microbatches do: its states; buffers of the whole step; gathered parameters and whole
    gradients (at the loss, in a backward); the optimizer step's temporaries; bytes outside the allocator; allocated while it is
    built."""

    states: States
    lasting: Number
    gathered: tuple[Number, Number]
    update: Number
    communication: Number
    outside: Number
    initial: Number


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest moment: activations, temporaries beside the states, its name; activations that offloading moves to the host."""

    activations: Number
    temporary: Number
    moment: Any
    offloaded: Number = 0.0


@lru_cache(maxsize=256)
def stage_memory(job: Job, layout: Layout) -> tuple[StageMemory, ...]:
    """Memory of each pipeline rank. Raises InputError where the schedule cannot run the job's microbatches."""
    microbatches = layout.microbatches(job.global_batch)
    if microbatches < 1:
        need = layout.micro_batch * layout.dp
        raise InputError("global_batch", job.global_batch, f"must be at least micro_batch * dp = {need}", need)
    return tuple(ranks_memory(job, layout, microbatches))


def ranks_memory(job: Job, layout: Any, microbatches: int) -> Iterator[StageMemory]:
    """Memory of each pipeline rank of a ``Layout``, or of many that agree in all but their degrees (``memory_bulk.LayoutArrays``)."""
    fixed: dict[Units, Fixed] = {}
    alike: dict[tuple[tuple[Run, ...], Place], ChunkMemory] = {}
    for rank, held in enumerate(in_flight(layout.schedule, layout.pp, layout.vpp, microbatches)):
        units, chunks = stage_units(job, layout, rank), {}
        if units not in fixed:
            fixed[units] = fixed_part(job, layout, rank)
        for chunk in ranks_chunks(layout, rank):
            key = (runs_of(job, layout, chunk), place_of(layout, chunk))
            if key not in alike:
                alike[key] = chunk_memory(job, layout, chunk)
            chunks[chunk] = alike[key]
        yield rank_memory(job, rank, fixed[units], peak(layout, fixed[units], chunks, held.snapshots))


def fixed_part(job: Job, layout: Any, rank: int) -> Fixed:
    """What pipeline rank ``rank`` holds throughout."""
    holding, trained = stage_holding(job, layout, rank)
    states = states_of(job, layout, holding, trained)
    lasting = lasting_buffers(job, layout, rank)
    communication = communicators(job, layout)
    return Fixed(
        states,
        lasting,
        gathered_buffers(job, layout, rank),
        lasting + optimizer_temporary(job, layout, holding),
        communication,
        communication + job.cluster.gpu.context_bytes,
        initial_bytes(job, holding, states),
    )


Snapshot = tuple[tuple[int, int, int], ...]
"""(chunk, microbatches alive, microbatches held for the weight gradient) of each chunk: ``schedules.InFlight``."""
Beyond = tuple[Number, Any]
"""Bytes beyond what is kept at a moment, and what the moment is called."""


def peak(layout: Any, fixed: Fixed, chunks: Mapping[int, ChunkMemory], snapshots: Sequence[Snapshot]) -> Peak:
    """The fullest moment of a rank with these ``chunks`` over the schedule's ``snapshots``."""
    whole = layout.schedule not in ZERO_BUBBLE
    known: dict[tuple[tuple[bool, bool], ...], Beyond] = {}
    activations: Number = 0.0
    temporary: Number = -np.inf
    moment: Any = ""
    for snapshot in snapshots:
        kept = kept_at(chunks, snapshot)
        running = tuple([(alive > 0, held > 0) for _, alive, held in snapshot])
        if running not in known:
            known[running] = _fullest(chunks, snapshot, fixed.gathered, whole and not holds(snapshot))
        beyond, name = known[running]
        more = kept + beyond > activations + temporary
        activations, temporary, moment = where(more, kept, activations), where(more, beyond, temporary), where(more, name, moment)
    away: Number = 0.0
    if "activations" in layout.offload:
        stays = offloaded(activations, chunks.values())
        away, activations = activations - stays, stays
    temporary = temporary + fixed.lasting
    stepping = fixed.update > activations + temporary
    # a moment may hold less than the steady gradients: that is told of the activations, so that no category is negative
    below = minimum(0.0, temporary)
    return Peak(
        where(stepping, 0.0, activations + below),
        where(stepping, fixed.update, temporary - below),
        where(stepping, "optimizer step", moment),
        away,
    )


def _fullest(chunks: Mapping[int, ChunkMemory], snapshot: Snapshot, gathered: tuple[Number, Number], whole: bool) -> Beyond:
    """The fullest of the moments around one snapshot of the schedule."""
    found: list[Beyond] = [] if whole else [(0.0, "forward")]
    for chunk, alive, held in snapshot:
        found += [(beyond, name) for name, beyond in beyond_kept(chunks[chunk], alive, held, gathered, whole)]
    most, called = found[0]
    for beyond, name in found[1:]:
        more = beyond > most
        most, called = where(more, beyond, most), where(more, name, called)
    return most, called


def kept_at(chunks: Mapping[int, ChunkMemory], snapshot: Snapshot) -> Number:
    """What the chunks' microbatches keep at a snapshot."""
    total: Number = 0
    for c, alive, held in snapshot:
        total = total + alive * chunks[c].kept + (held * chunks[c].weight_pass if held else 0)
    return total


def beyond_kept(
    chunk: ChunkMemory, alive: int, held: int, gathered: tuple[Number, Number], whole: bool
) -> Iterator[tuple[str, Number]]:
    """(moment, the most bytes beyond what is kept) while a chunk with so many microbatches alive and held for their weight
    gradients runs; ``whole``: backwards that are not split happen then. An input-gradient pass is told of by what it leaves."""
    if alive and chunk.loss is not None:
        yield "loss", chunk.loss + gathered[0]
    if alive and whole and chunk.head is not None:
        yield "gradient of the head", chunk.head + gathered[0]
    if alive and whole:
        yield "backward of a layer", chunk.backward + gathered[1]
    if held:
        yield "input gradients of a chunk", chunk.input_pass
        yield "weight gradients of a chunk", chunk.ending + gathered[1]


def rank_memory(job: Job, rank: int, fixed: Fixed, fullest: Peak) -> StageMemory:
    """The figures of a rank from its parts. ``StageMemory.needed`` is what must fit."""
    states, slack = fixed.states, job.execution.slack
    allocated = states.total + fullest.activations + fullest.temporary
    reserved = allocated * slack + job.execution.workspace_bytes
    return StageMemory(
        rank,
        plain(states.parameters),
        plain(states.gradients),
        plain(states.optimizer),
        plain(fullest.activations),
        plain(fullest.temporary),
        plain(fixed.communication),
        plain(allocated),
        plain(reserved),
        plain(reserved + fixed.outside + graph_pool(job, fullest.activations)),
        plain(fixed.initial * slack + fixed.outside),
        plain(states.host + fullest.offloaded),
        fullest.moment,
    )


def fits(job: Job, layout: Layout) -> tuple[bool, StageMemory]:
    """Whether every rank's device bytes stay within the job's limit, building the model included, and the worst rank."""
    if not job.cluster.pools:
        worst = max(stage_memory(job, layout), key=lambda s: s.needed)
        return worst.needed <= job.limit_bytes, worst
    from cost_models.chunks import stage_limit

    worst = max(stage_memory(job, layout), key=lambda s: s.needed / stage_limit(job, layout, s.stage))
    return worst.needed <= stage_limit(job, layout, worst.stage), worst


def host_bytes(job: Job, layout: Layout, stages: Sequence[StageMemory]) -> float:
    """Bytes of the fullest node's host memory: its ranks' offloaded states and activations, and the copies of the model they build."""
    ranks = min(job.cluster.gpus_per_node, layout.world)
    worst = max((stage.host for stage in stages), default=0.0)
    built = 4.0 * job.execution.initial_host_copies * float(job.model.parameters.total)
    return float(ranks * (worst + built))
