"""A whole step: ``estimate(job, layout)`` -> ``StepEstimate``, with its interval, and where each second goes.

Chunk times (``passes``) go through the schedule (``pipeline.simulate``); each rank starts with the parameters it still has to gather
and ends with its gradient reduction and optimizer step (``update``); the step's fixed cost and the slowest node come on top.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from cost_models.communication import Network, add_bytes, stragglers
from cost_models.flops import flops_per_token
from cost_models.job import Job
from cost_models.layout import Layout, RecomputeRule
from cost_models.memory import StageMemory, stage_memory
from cost_models.passes import EMBEDDING, HEAD, MTP, NO_RECOMPUTE, PassSeconds, layer_key, unit_cost, unit_seconds, unit_weights
from cost_models.pipeline import Timeline, simulate
from cost_models.uncertainty import interval
from cost_models.stage_states import ranks_chunks
from cost_models.states import Holding
from cost_models.update import Update, update_seconds
from profiles.operations import Matmul

Part = tuple[int, RecomputeRule]
"""A unit and its recompute rule."""


ROUNDING = 1e-9
"""Share of a step below which a difference of two sums is rounding."""


@dataclass(frozen=True, slots=True)
class ChunkSeconds:
    """One chunk's passes for one microbatch: ``forward``, ``backward_input`` (recompute included), ``backward_weight`` seconds,
    the units it is made of with how many of each, and the weights its rank holds for it."""

    forward: float
    backward_input: float
    backward_weight: float
    parts: tuple[tuple[Part, int], ...]
    weights: Holding
    saving: tuple[float, float]


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of a step and everything that follows; ``to_json`` gives the keys of ``axisplan estimate --json``."""

    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    tokens_per_second_per_gpu: float
    mfu: float
    """Model FLOPs (causal attention) over the 16-bit peak (the precision's own where that is wider)."""
    mfu_full_attention: float
    """The same with attention counted over the full square."""
    hfu: float
    """Model and recomputed FLOPs, recomputed ones as executed."""
    bubble_fraction: float
    seconds: dict[str, float]
    memory: tuple[StageMemory, ...]
    limit_bytes: float
    fits: bool
    bytes_sent: dict[str, dict[str, float]]
    guessed: tuple[str, ...]
    busiest_stage: int
    stage_seconds: tuple[float, ...] = ()
    """Busy seconds of each pipeline rank."""
    timeline: Timeline | None = field(default=None, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """DESIGN.md's keys: seconds, bytes, fractions."""
        return {
            "step_seconds": self.step_seconds,
            "step_seconds_low": self.step_seconds_low,
            "step_seconds_high": self.step_seconds_high,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "mfu": self.mfu,
            "mfu_full_attention": self.mfu_full_attention,
            "mfu_convention": "model FLOPs with causal attention over the dense 16-bit peak",
            "hfu": self.hfu,
            "bubble_fraction": self.bubble_fraction,
            "seconds": dict(self.seconds),
            "memory": [memory_json(stage) for stage in self.memory],
            "limit_bytes": self.limit_bytes,
            "fits": self.fits,
            "bytes_sent": {axis: dict(links) for axis, links in self.bytes_sent.items()},
            "guessed": list(self.guessed),
            "busiest_stage": self.busiest_stage,
            "stage_seconds": list(self.stage_seconds),
        }


MEMORY_KEYS = (
    "stage", "parameters", "gradients", "optimizer", "activations", "temporary", "communication", "peak_allocated", "peak_reserved", "device",
)  # fmt: skip


def memory_json(stage: StageMemory) -> dict[str, float]:
    """One stage's memory under DESIGN.md's keys, bytes."""
    return {key: getattr(stage, key) for key in (*MEMORY_KEYS, "init_peak")}


def estimate(job: Job, layout: Layout, *, detail: bool = True) -> StepEstimate:
    """Predict a step of ``job`` under ``layout``. ``detail=False`` leaves out memory (``fits`` is then True) and the timeline.

    Raises InputError where the schedule cannot run the layout's microbatches.
    """
    microbatches = layout.microbatches(job.global_batch)
    chunks = chunk_seconds(job, layout)
    updates = [rank_update(job, layout, chunks, rank) for rank in range(layout.pp)]
    timeline = run_schedule(job, layout, chunks, updates, microbatches)
    slow = stragglers(job.cluster.nodes if layout.world > 1 else 1)
    step = (timeline.seconds + job.execution.step_overhead_seconds) * slow
    rank = max(range(layout.pp), key=lambda r: updates[r].start + timeline.busy[r] + updates[r].end)
    seconds = account(job, layout, chunks, updates, timeline, microbatches, rank, step)
    memory = tuple(stage_memory(job, layout)) if detail else ()
    low, high, guessed = interval(job, layout, step, seconds)
    idle = sum(timeline.span - busy for busy in timeline.busy) / layout.pp
    model = flops_per_token(job.model, job.seq_len)
    peak = _peak(job) * layout.world * step
    again = _recomputed_flops(job, layout, chunks, microbatches)
    full = model.training - 3 * model.attention_causal + 3 * model.attention_full
    return StepEstimate(
        step_seconds=step,
        step_seconds_low=low,
        step_seconds_high=high,
        tokens_per_second_per_gpu=job.tokens / step / layout.world,
        mfu=model.training * job.tokens / peak,
        mfu_full_attention=full * job.tokens / peak,
        hfu=(model.training * job.tokens + again) / peak,
        bubble_fraction=max(0.0, idle / step),
        seconds=seconds,
        memory=memory,
        limit_bytes=job.limit_bytes,
        fits=all(stage.needed <= job.limit_bytes for stage in memory),
        bytes_sent=bytes_sent(job, layout, chunks, updates, microbatches),
        guessed=guessed,
        busiest_stage=rank,
        stage_seconds=timeline.busy,
        timeline=timeline if detail else None,
    )


# -- chunks ---------------------------------------------------------------------------------------------------------------


def chunk_parts(job: Job, layout: Layout) -> list[tuple[tuple[Part, int], ...]]:
    """What each chunk is made of: units with their recompute rules, and how many of each."""
    model, rules = job.model, layout.recompute_rules
    out = []
    for chunk in range(layout.chunks):
        counts: defaultdict[Part, int] = defaultdict(int)
        if chunk == 0:
            counts[EMBEDDING, NO_RECOMPUTE] += 1
        for index in layout.layers_of_chunk(chunk, model.num_layers):
            rule = rules.of(index)
            counts[model.pattern[index], RecomputeRule(0, None, rule.mode, rule.modules)] += 1
        if chunk == layout.chunks - 1:
            counts[HEAD, NO_RECOMPUTE] += 1
            if model.mtp:
                last = rules.of(model.num_layers - 1)
                counts[MTP, RecomputeRule(0, None, last.mode, last.modules)] += model.mtp
        out.append(tuple(counts.items()))
    return out


def chunk_seconds(job: Job, layout: Layout) -> list[ChunkSeconds]:
    """Every chunk's passes, in model order."""
    key = layer_key(job, layout)
    cache: dict[tuple[tuple[Part, int], ...], ChunkSeconds] = {}
    out = []
    for parts in chunk_parts(job, layout):
        if parts not in cache:
            cache[parts] = _chunk(job, layout, key, parts)
        out.append(cache[parts])
    return out


def _chunk(job: Job, layout: Layout, key: Layout, parts: tuple[tuple[Part, int], ...]) -> ChunkSeconds:
    f = b = w = save_f = save_b = 0.0
    weights = Holding()
    for (unit, rule), count in parts:
        seconds = unit_seconds(job, key, unit, rule)
        f, b, w = f + count * seconds.f, b + count * seconds.b, w + count * seconds.w
        save_f, save_b = save_f + count * seconds.paired_saving[0], save_b + count * seconds.paired_saving[1]
        weights = weights + unit_weights(job, layout, unit).times(count)
    return ChunkSeconds(f, b, w, parts, weights, (save_f, save_b))


def rank_update(job: Job, layout: Layout, chunks: list[ChunkSeconds], rank: int) -> Update:
    """Gradient reduction, parameter gathering and optimizer of pipeline rank ``rank``."""
    held = [chunks[c] for c in ranks_chunks(layout, rank)]
    weights = Holding()
    for chunk in held:
        weights = weights + chunk.weights
    matrices: tuple[Matmul, ...] = ()
    if job.optimizer == "muon":
        key = layer_key(job, layout)
        matrices = tuple(
            op
            for chunk in held
            for (unit, _), count in chunk.parts
            if unit >= 0
            for op in unit_cost(job, key, unit).backward_weight * count
            if isinstance(op, Matmul)
        )
    ends = job.model.tied and layout.pp > 1 and bool({0, layout.chunks - 1} & set(ranks_chunks(layout, rank)))
    return update_seconds(
        job,
        layout,
        weights,
        shared=unit_weights(job, layout, EMBEDDING).dense if ends else 0.0,
        forward=sum(c.forward for c in held),
        backward=sum(c.backward_input + c.backward_weight for c in held),
        matrices=matrices,
    )


def run_schedule(job: Job, layout: Layout, chunks: list[ChunkSeconds], updates: list[Update], microbatches: int) -> Timeline:
    """The schedule's timeline with these chunk times."""
    execution = job.execution
    transfer = boundary_seconds(job, layout)
    plain = layout.schedule in ("gpipe", "1f1b")
    blocking = execution.p2p_blocking if plain else not execution.p2p_overlap
    return simulate(
        layout.schedule, layout.pp, layout.vpp, microbatches,
        [c.forward for c in chunks], [c.backward_input for c in chunks], [c.backward_weight for c in chunks], transfer,
        blocking=blocking, starts=[u.start for u in updates], ends=[u.end for u in updates],
        hidden_forward=[c.saving[0] for c in chunks], hidden_backward=[c.saving[1] for c in chunks],
    )  # fmt: skip


def boundary_bytes(job: Job, layout: Layout) -> float:
    """Bytes one rank sends to the next stage for one microbatch."""
    tokens = layout.micro_batch * job.seq_len / layout.cp
    split = layout.tp if layout.sp or job.execution.p2p_scatter else 1
    return tokens * job.model.hidden * (4 if job.precision == "fp32" else 2) / split


def boundary_seconds(job: Job, layout: Layout) -> float:
    """Seconds of one pipeline transfer, with the gather that scatter-gather needs."""
    if layout.pp == 1:
        return 0.0
    network = Network(job.cluster, layout)
    size = boundary_bytes(job, layout)
    seconds = network.seconds("send_recv", "pp", size)
    if job.execution.p2p_scatter and not layout.sp:
        seconds += network.seconds("all_gather", "tp", size * layout.tp)
    return seconds


# -- where the seconds go -------------------------------------------------------------------------------------------------


def account(
    job: Job,
    layout: Layout,
    chunks: list[ChunkSeconds],
    updates: list[Update],
    timeline: Timeline,
    microbatches: int,
    rank: int,
    step: float,
) -> dict[str, float]:
    """Seconds of ``step`` by cause, seen from pipeline rank ``rank``; they sum to ``step``. Compute by kind, ``recompute``,
    exposed communication as ``communication.AXIS``, ``optimizer``, ``host``, ``overhead``, ``stragglers``, and what is left: ``bubble``."""
    out: defaultdict[str, float] = defaultdict(float)
    key = layer_key(job, layout)
    runs = _runs(layout, rank, microbatches)
    for chunk, times in runs.items():
        for (unit, rule), count in chunks[chunk].parts:
            unit_time = unit_seconds(job, key, unit, rule)
            weight = count * times
            for one in (unit_time.forward, unit_time.backward_input, unit_time.backward_weight):
                _add_pass(out, one, weight)
            out["recompute"] += float(unit_time.recompute.compute.seconds) * weight
            _add_exposed(out, unit_time.recompute, weight)
    update = updates[rank]
    for axis, seconds in (*update.reduce.items(), *update.gather.items()):
        out[f"communication.{axis}"] += seconds
    out["optimizer"] = update.optimizer
    planned = sum(times * (chunks[c].forward + chunks[c].backward_input + chunks[c].backward_weight) for c, times in runs.items())
    difference = timeline.busy[rank] - planned
    if abs(difference) > ROUNDING * step:
        out["communication.pp" if difference > 0 else "communication.ep"] += difference
    out["overhead"] = job.execution.step_overhead_seconds
    before = timeline.seconds + job.execution.step_overhead_seconds
    out["stragglers"] = step - before
    out["bubble"] = 0.0
    out["bubble"] = max(0.0, step - sum(out.values()))
    return {
        name: seconds
        for name, seconds in out.items()
        if seconds or name in ("matmul", "attention", "pointwise", "bubble", "optimizer")
    }


def _runs(layout: Layout, rank: int, microbatches: int) -> dict[int, int]:
    """How many microbatches rank ``rank`` runs through each of its chunks."""
    if layout.schedule == "dualpipe":
        return {rank: microbatches // 2, layout.pp - 1 - rank: microbatches // 2}
    return dict.fromkeys(layout.chunks_of_rank(rank), microbatches)


def _add_pass(out: defaultdict[str, float], one: PassSeconds, weight: float) -> None:
    for kind in ("matmul", "attention", "pointwise"):
        out[kind] += float(getattr(one.compute, kind)) * weight
    _add_exposed(out, one, weight)


def _add_exposed(out: defaultdict[str, float], one: PassSeconds, weight: float) -> None:
    for axis, seconds in one.exposed.items():
        out[f"communication.{axis}"] += seconds * weight
    out["host"] += one.host * weight


def bytes_sent(
    job: Job, layout: Layout, chunks: list[ChunkSeconds], updates: list[Update], microbatches: int
) -> dict[str, dict[str, float]]:
    """Wire bytes per step of the rank that sends most: axis -> link class -> bytes."""
    best: dict[str, dict[str, float]] = {}
    for rank in {0, min(1, layout.pp - 1), layout.pp - 1}:
        total: dict[str, dict[str, float]] = {}
        for chunk, times in _runs(layout, rank, microbatches).items():
            for (unit, rule), count in chunks[chunk].parts:
                for axis, links in unit_seconds(job, layout, unit, rule).sent.items():
                    add_bytes(total, axis, links, count * times)
            crossings = (chunk > 0) + (chunk < layout.chunks - 1)
            if layout.pp > 1:
                size = boundary_bytes(job, layout) * crossings
                add_bytes(total, "pp", Network(job.cluster, layout).sent("send_recv", "pp", size), times)
        for axis, links in updates[rank].sent.items():
            add_bytes(total, axis, links)
        if _total(total) > _total(best):
            best = total
    return best


def _total(sent: dict[str, dict[str, float]]) -> float:
    return sum(size for links in sent.values() for size in links.values())


def _recomputed_flops(job: Job, layout: Layout, chunks: list[ChunkSeconds], microbatches: int) -> float:
    per_microbatch = sum(
        count * unit_seconds(job, layout, unit, rule).recomputed_flops for chunk in chunks for (unit, rule), count in chunk.parts
    )
    return per_microbatch * layout.tp * layout.cp * microbatches * layout.dp


def _peak(job: Job) -> float:
    gpu = job.cluster.gpu
    return gpu.peak_flops(job.precision if job.precision == "fp32" or "bf16" not in gpu.peaks else "bf16")
