"""A pipeline chunk's seconds, what a pipeline rank adds at its ends, and the schedule that runs them.

These are the pieces of ``step.estimate``, apart so that a planner can price ten thousand layouts from a few hundred unit prices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from cost_models.activations import runs_of
from cost_models.communication import Network, add_bytes
from cost_models.job import Job
from cost_models.layer_cost import Local
from cost_models.layout import Layout, RecomputeRule
from cost_models.passes import NO_RECOMPUTE, PassSeconds, layer_key, unit_seconds, unit_weights
from cost_models.pipeline import Timeline, simulate
from cost_models.stage_states import ranks_chunks, stage_holding, stage_units
from cost_models.states import Holding
from cost_models.units import EMBEDDING, HEAD, MTP, Unit, unit_cost
from cost_models.update import Update, update_seconds
from profiles.operations import Matmul, Number

Part = tuple[Unit, RecomputeRule]
"""A unit and its recompute rule."""
Parts = tuple[tuple[Part, int], ...]
"""What a chunk is made of: units and how many of each."""


@dataclass(frozen=True, slots=True)
class ChunkSeconds:
    """One chunk's passes for one microbatch: ``forward``, ``backward_input`` (recompute included), ``backward_weight`` seconds,
    the units it is made of with how many of each, and the weights its rank holds for it."""

    forward: float
    backward_input: float
    backward_weight: float
    parts: Parts
    weights: Holding
    saving: tuple[float, float]


def chunk_parts(job: Job, layout: Layout) -> list[Parts]:
    """What each chunk is made of: units with their recompute rules, and how many of each."""
    model = job.model
    out = []
    for chunk in range(layout.chunks):
        counts: defaultdict[Part, int] = defaultdict(int)
        if chunk == 0:
            counts[EMBEDDING, NO_RECOMPUTE] += 1
        for run in runs_of(job, layout, chunk):
            counts[run.kind, run.rule] += run.count
        if chunk == layout.chunks - 1:
            counts[HEAD, NO_RECOMPUTE] += 1
            if model.mtp:
                last = layout.recompute_rules.of(model.num_layers - 1)
                counts[MTP, RecomputeRule(0, None, last.mode, last.modules)] += model.mtp
        out.append(tuple(counts.items()))
    return out


@lru_cache(maxsize=256)
def stage_job(job: Job, layout: Layout, rank: int) -> Job:
    """``job`` as pipeline rank ``rank`` sees it: in a mixed cluster, on the GPUs of the pool its ranks lie in (pools are consecutive)."""
    cluster = job.cluster
    if not cluster.pools:
        return job
    first = layout.rank_at({"pp": rank})
    for pool in cluster.pools:
        if first < pool.gpus:
            return replace(job, cluster=replace(cluster, gpu=pool.gpu, pools=(), name=f"{cluster.name} ({pool.gpu.name})"))
        first -= pool.gpus
    return job


def stage_limit(job: Job, layout: Layout, rank: int) -> float:
    """Device bytes that a rank of pipeline rank ``rank`` may use: those of its own pool's GPU."""
    return stage_job(job, layout, rank).limit_bytes if job.cluster.pools else job.limit_bytes


def chunk_seconds(job: Job, layout: Layout) -> list[ChunkSeconds]:
    """Every chunk's passes, in model order."""
    key = layer_key(job, layout)
    cache: dict[tuple[str, Parts], ChunkSeconds] = {}
    out = []
    for chunk, parts in enumerate(chunk_parts(job, layout)):
        here = stage_job(job, layout, layout.rank_of_chunk(chunk)) if job.cluster.pools else job
        of = (here.cluster.gpu.name, parts)
        if of not in cache:
            cache[of] = _chunk(here, layout, key, parts)
        out.append(cache[of])
    return out


def _chunk(job: Job, layout: Layout, key: Layout, parts: Parts) -> ChunkSeconds:
    f = b = w = save_f = save_b = 0.0
    weights = Holding()
    for (unit, rule), count in parts:
        seconds = unit_seconds(job, key, unit, rule)
        f, b, w = f + count * seconds.f, b + count * seconds.b, w + count * seconds.w
        save_f, save_b = save_f + count * seconds.paired_saving[0], save_b + count * seconds.paired_saving[1]
        weights = weights + unit_weights(job, layout, unit).times(count)
    return ChunkSeconds(f, b, w, parts, weights, (save_f, save_b))


def rank_updates(job: Job, layout: Layout, chunks: Sequence[ChunkSeconds]) -> list[Update]:
    """``rank_update`` of every pipeline rank; ranks that hold alike share it."""
    known: dict[tuple[Any, ...], Update] = {}
    out = []
    for rank in range(layout.pp):
        mine = ranks_chunks(layout, rank)
        key = (tuple(chunks[c].parts for c in mine), stage_units(job, layout, rank), stage_job(job, layout, rank).cluster.gpu.name)
        if key not in known:
            known[key] = rank_update(job, layout, chunks, rank)
        out.append(known[key])
    return out


def rank_update(job: Job, layout: Layout, chunks: Sequence[ChunkSeconds], rank: int) -> Update:
    """Gradient reduction, parameter gathering and optimizer of pipeline rank ``rank``."""
    job = stage_job(job, layout, rank) if job.cluster.pools else job
    held = [chunks[c] for c in ranks_chunks(layout, rank)]
    weights = Holding()
    for chunk in held:
        weights = weights + chunk.weights
    matrices: tuple[Matmul, ...] = ()
    if job.optimizer == "muon":
        matrices = tuple(
            op
            for chunk in held
            for (unit, _), count in chunk.parts
            if isinstance(unit, int)
            for op in unit_cost(job, layout, unit).backward_weight * count
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
        held=stage_holding(job, layout, rank)[0] if job.lora_rank or job.frozen else None,
    )


def run_schedule(
    job: Job, layout: Layout, chunks: Sequence[ChunkSeconds], updates: Sequence[Update], microbatches: int
) -> Timeline:
    """The schedule's timeline with these chunk times."""
    transfer, blocking = boundary_seconds(job, layout), blocks_transfers(job, layout.schedule)
    return simulate(
        layout.schedule, layout.pp, layout.vpp, microbatches,
        [c.forward for c in chunks], [c.backward_input for c in chunks], [c.backward_weight for c in chunks], transfer,
        blocking=blocking, starts=[u.start for u in updates], ends=[u.end for u in updates],
        hidden_forward=[c.saving[0] for c in chunks], hidden_backward=[c.saving[1] for c in chunks],
    )  # fmt: skip


def blocks_transfers(job: Job, schedule: str) -> bool:
    """Whether a pipeline transfer keeps its sender busy."""
    return job.execution.p2p_blocking if schedule in ("gpipe", "1f1b") else not job.execution.p2p_overlap


def boundary_bytes(job: Job, degrees: Any) -> Number:
    """Bytes one rank sends to the next stage for one microbatch; numbers or arrays of degrees."""
    local = Local(job, degrees)
    split = degrees.tp if job.execution.p2p_scatter else local.sp
    return degrees.micro_batch * job.seq_len / local.cp * job.model.hidden * local.bytes / split


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


class ChunkDetail(NamedTuple):
    """One microbatch through a chunk: seconds by cause, wire bytes by axis and link, FLOPs of recomputed operations."""

    causes: dict[str, float]
    sent: dict[str, dict[str, float]]
    recomputed_flops: float


@lru_cache(maxsize=4096)
def chunk_detail(job: Job, key: Layout, parts: Parts) -> ChunkDetail:
    """Where a chunk's seconds go; ``key`` as ``layer_key`` gives it."""
    causes: defaultdict[str, float] = defaultdict(float)
    sent: dict[str, dict[str, float]] = {}
    flops = 0.0
    for (unit, rule), count in parts:
        seconds = unit_seconds(job, key, unit, rule)
        for one in (seconds.forward, seconds.backward_input, seconds.backward_weight):
            for kind in ("matmul", "attention", "pointwise"):
                causes[kind] += float(getattr(one.compute, kind)) * count
            _add_exposed(causes, one, count)
        causes["recompute"] += float(seconds.recompute.compute.seconds) * count
        _add_exposed(causes, seconds.recompute, count)
        for axis, links in seconds.sent.items():
            add_bytes(sent, axis, links, count)
        flops += seconds.recomputed_flops * count
    return ChunkDetail(dict(causes), sent, flops)


def _add_exposed(out: defaultdict[str, float], one: PassSeconds, weight: float) -> None:
    for axis, seconds in one.exposed.items():
        out[f"communication.{axis}"] += seconds * weight
    out["host"] += one.host * weight
