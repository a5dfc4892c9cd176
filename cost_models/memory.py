"""Memory of every pipeline rank, by category, in the order of the step: the peak over its moments, not the sum of maxima.

Moments of a steady step: the loss of a microbatch on the last stage; the backward of each layer while the schedule's other
microbatches are in flight (``schedules.in_flight``); the optimizer step. Bytes of one microbatch come from the operations' kept
tensors (``layers``) and the recompute rule; states from ``state_bytes``. *Allocated* is what the framework's allocator hands out,
*reserved* what it holds, *device* what the GPU shows: reserved, context and communicators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cost_models.activations import ChunkMemory, chunk_memory, offloaded
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.overheads import communicators, gathered_buffers, graph_pool, initial_bytes, lasting_buffers, optimizer_temporary
from cost_models.schedules import in_flight
from cost_models.stage_states import ranks_chunks, stage_holding
from cost_models.state_bytes import States
from cost_models.state_bytes import states as states_of
from profiles.errors import InputError


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on the worst rank of a pipeline rank ``stage``. The categories up to ``temporary`` add to ``peak_allocated``: what
    lives at the step's fullest moment, ``peak_at``. ``communication``: communicators, outside the allocator. ``host``: on the
    node's side, per rank."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float
    communication: float
    peak_allocated: float
    peak_reserved: float
    device: float
    init_peak: float
    host: float = 0.0
    peak_at: str = ""

    @property
    def states(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    @property
    def needed(self) -> float:
        """Device bytes the rank needs at its fullest, building the model included."""
        return max(self.device, self.init_peak)


@dataclass(frozen=True, slots=True)
class Fixed:
    """What a rank holds whatever its microbatches do: its states; buffers of the whole step; gathered parameters and whole
    gradients (at the loss, in a backward); the optimizer step's temporaries; bytes outside the allocator; allocated while it is
    built."""

    states: States
    lasting: float
    gathered: tuple[float, float]
    update: float
    communication: float
    outside: float
    initial: float


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest moment: activations, temporaries beside the states, its name; activations that offloading moves to the host."""

    activations: float
    temporary: float
    moment: str
    offloaded: float = 0.0


@lru_cache(maxsize=256)
def stage_memory(job: Job, layout: Layout) -> tuple[StageMemory, ...]:
    """Memory of each pipeline rank. Raises InputError where the schedule cannot run the job's microbatches."""
    microbatches = layout.microbatches(job.global_batch)
    if microbatches < 1:
        need = layout.micro_batch * layout.dp
        raise InputError("global_batch", job.global_batch, f"must be at least micro_batch * dp = {need}", need)
    held = in_flight(layout.schedule, layout.pp, layout.vpp, microbatches)
    out = []
    for rank in range(layout.pp):
        chunks = {chunk: chunk_memory(job, layout, chunk) for chunk in ranks_chunks(layout, rank)}
        fixed = fixed_part(job, layout, rank)
        out.append(rank_memory(job, rank, fixed, peak(layout, fixed, chunks, held[rank].snapshots)))
    return tuple(out)


def fixed_part(job: Job, layout: Layout, rank: int) -> Fixed:
    """What pipeline rank ``rank`` holds throughout."""
    holding, trained = stage_holding(job, layout, rank)
    states = states_of(job, layout, holding, trained)
    lasting = float(lasting_buffers(job, layout, rank))
    loss, backward = gathered_buffers(job, layout, rank)
    communication = float(communicators(job, layout))
    return Fixed(
        states,
        lasting,
        (float(loss), float(backward)),
        lasting + float(optimizer_temporary(job, layout, holding)),
        communication,
        communication + float(job.cluster.gpu.context_bytes),
        float(initial_bytes(job, holding, states)),
    )


Snapshot = tuple[tuple[int, int, int], ...]
"""(chunk, microbatches alive, microbatches held for the weight gradient) of each chunk: ``schedules.InFlight``."""


def peak(layout: Layout, fixed: Fixed, chunks: Mapping[int, ChunkMemory], snapshots: Sequence[Snapshot]) -> Peak:
    """The fullest moment of a rank with these ``chunks`` over the schedule's ``snapshots``."""
    moments = [
        found for snapshot in snapshots for found in _moments(chunks, snapshot, fixed.gathered, layout.schedule in ZERO_BUBBLE)
    ]
    activations, temporary, moment = max(moments, key=lambda found: found[0] + found[1])
    away = 0.0
    if "activations" in layout.offload:
        stays = float(offloaded(activations, chunks.values()))
        away, activations = activations - stays, stays
    temporary += fixed.lasting
    if fixed.update > activations + temporary:
        return Peak(0.0, fixed.update, "optimizer step", away)
    below = min(0.0, temporary)  # the moment holds less than the steady gradients: told of the activations, no category is negative
    return Peak(activations + below, temporary - below, moment, away)


ZERO_BUBBLE = ("zb-h1", "zb-h2", "zb-v")
"""Schedules that split the backward of every microbatch."""


def _moments(
    chunks: Mapping[int, ChunkMemory], snapshot: Snapshot, gathered: tuple[float, float], split: bool
) -> list[tuple[float, float, str]]:
    """(activations, temporaries, name) at the moments around one snapshot of the schedule: the loss and the backward of a layer,
    of the chunk with activations alive that needs most. What an input-gradient pass leaves may be more than what it found."""
    kept = float(sum(alive * chunks[c].kept + held * chunks[c].weight_pass for c, alive, held in snapshot))
    running = [chunks[c] for c, alive, _ in snapshot if alive] or [chunks[c] for c, _, _ in snapshot]
    losses = [float(c.loss) for c in running if c.loss is not None]
    if split:
        out = [(kept, float(max(c.left + c.passing for c in running)), "input gradients of a chunk")]
        out.append((kept, float(max(c.left + c.ending for c in running)) + gathered[1], "weight gradients of a chunk"))
    else:
        out = [(kept, max(float(c.backward) for c in running) + gathered[1], "backward of a layer")]
    if losses:
        out.append((kept, max(losses) + gathered[0], "loss"))
    return out


def rank_memory(job: Job, rank: int, fixed: Fixed, fullest: Peak) -> StageMemory:
    """The figures of a rank from its parts. ``StageMemory.needed`` is what must fit."""
    execution, states = job.execution, fixed.states
    slack = execution.eager_reserved_ratio if execution.elementwise == "eager" else execution.reserved_ratio
    allocated = float(states.total) + fullest.activations + fullest.temporary
    reserved = allocated * slack + execution.workspace_bytes
    return StageMemory(
        rank,
        float(states.parameters),
        float(states.gradients),
        float(states.optimizer),
        fullest.activations,
        fullest.temporary,
        fixed.communication,
        allocated,
        reserved,
        reserved + fixed.outside + float(graph_pool(job, fullest.activations)),
        fixed.initial * slack + fixed.outside,
        float(states.host) + fullest.offloaded,
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
