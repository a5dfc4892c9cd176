"""A whole step: ``estimate(job, layout)`` -> ``StepEstimate``, with its interval, and where each second goes.

Chunk times (``passes``) go through the schedule (``pipeline.simulate``); each rank starts with the parameters it still has to
gather and ends with its gradient reduction and optimizer step (``update``); the step's fixed cost and the slowest node come on top.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cost_models.chunks import (
    ChunkSeconds,
    boundary_bytes,
    boundary_seconds,
    chunk_detail,
    chunk_seconds,
    rank_update,
    rank_updates,
    run_schedule,
    stage_job,
    stage_limit,
)
from cost_models.communication import Network, add_bytes, stragglers
from cost_models.flops import flops_per_token, training_per_token
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.memory import StageMemory, host_bytes, stage_memory
from cost_models.packing import packing
from cost_models.passes import layer_key
from cost_models.pipeline import Timeline
from cost_models.stage_states import ranks_chunks
from cost_models.uncertainty import interval
from cost_models.update import Update

__all__ = [
    "ChunkSeconds", "StepEstimate", "boundary_seconds", "chunk_seconds", "estimate", "memory_json", "rank_update", "ranks_chunks",
    "run_schedule",
]  # fmt: skip

ROUNDING = 1e-9
"""Share of a step below which a difference of two sums is rounding."""


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
    host_bytes_per_node: float = 0.0
    """Where something is offloaded: host memory of the fullest node (``memory.host_bytes``)."""
    packed: dict[str, float] = field(default_factory=dict)
    """Where sequences are packed from documents: ``packed_figures``."""
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
            **({"host_bytes_per_node": self.host_bytes_per_node} if self.host_bytes_per_node else {}),
            **({"packed": dict(self.packed)} if self.packed else {}),
        }


MEMORY_KEYS = (
    "stage", "parameters", "gradients", "optimizer", "activations", "temporary", "communication", "peak_allocated",
    "peak_reserved", "device",
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
    updates = rank_updates(job, layout, chunks)
    timeline = run_schedule(job, layout, chunks, updates, microbatches)
    slow = stragglers(job.cluster.nodes if layout.world > 1 else 1)
    pipeline = timeline.unsynchronised_seconds if job.execution.post_validation else timeline.seconds
    step = float((pipeline + job.execution.step_overhead_seconds) * slow)
    rank = max(range(layout.pp), key=lambda r: updates[r].start + timeline.busy[r] + updates[r].end)
    seconds = account(job, layout, chunks, updates, timeline, microbatches, rank, step)
    memory = tuple(stage_memory(job, layout)) if detail else ()
    low, high, guessed = interval(job, layout, step, seconds)
    idle = sum(timeline.span - busy for busy in timeline.busy) / layout.pp
    model = flops_per_token(job.model, job.seq_len)
    ideal = ideal_seconds(job, layout)
    again = _recomputed_flops(job, layout, chunks, microbatches)
    full = model.training - 3 * model.attention_causal + 3 * model.attention_full
    return StepEstimate(
        step_seconds=step,
        step_seconds_low=low,
        step_seconds_high=high,
        tokens_per_second_per_gpu=job.tokens / step / layout.world,
        mfu=ideal / step,
        mfu_full_attention=ideal / step * full / model.training,
        hfu=ideal / step * (1 + again / (training_per_token(job) * job.tokens)),
        bubble_fraction=float(max(0.0, idle / step)),
        seconds=seconds,
        memory=memory,
        limit_bytes=job.limit_bytes,
        fits=all(stage.needed <= stage_limit(job, layout, stage.stage) for stage in memory),
        bytes_sent=bytes_sent(job, layout, chunks, updates, microbatches),
        guessed=guessed,
        busiest_stage=rank,
        stage_seconds=tuple(float(b) for b in timeline.busy),
        host_bytes_per_node=host_bytes(job, layout, memory) if layout.offload and memory else 0.0,
        packed=packed_figures(job, layout, memory) if job.documents else {},
        timeline=timeline if detail else None,
    )


def packed_figures(job: Job, layout: Layout, memory: Sequence[StageMemory]) -> dict[str, float]:
    """Of packed sequences: ``pairs_share``, their query-key pairs over those of one whole document; ``cp_imbalance``, pairs of the busiest
    ring rank over the mean; ``worst_tokens`` of a microbatch of one sequence where documents are batched whole instead of cut (a longer
    document comes alone), and ``worst_activation_bytes``, what the fullest rank would keep then."""
    found = packing(job.documents, job.seq_len, layout.ring, balanced=job.execution.cp_balanced)
    kept = max((stage.activations for stage in memory), default=0.0)
    return {
        "pairs_share": found.share, "cp_imbalance": found.imbalance, "worst_tokens": float(found.worst_tokens),
        "worst_activation_bytes": kept * found.worst_tokens / job.seq_len,
    }  # fmt: skip


def ideal_seconds(job: Job, layout: Layout) -> float:
    """Seconds that a step's model FLOPs (causal attention) take at the layout's dense 16-bit peak (fp32's for an fp32 job): MFU is
    this over the seconds that the step takes."""
    return training_per_token(job) * job.tokens / (_peak(job) * layout.world / job.cluster.gpus)


# -- where the seconds go -------------------------------------------------------------------------------------------------


def account(
    job: Job,
    layout: Layout,
    chunks: Sequence[ChunkSeconds],
    updates: Sequence[Update],
    timeline: Timeline,
    microbatches: int,
    rank: int,
    step: float,
) -> dict[str, float]:
    """Seconds of ``step`` by cause, seen from pipeline rank ``rank``; they sum to ``step``. Compute by kind, ``recompute``,
    exposed communication as ``communication.AXIS``, ``optimizer``, ``host``, ``overhead``, ``stragglers``, and what is left:
    ``bubble``."""
    out: defaultdict[str, float] = defaultdict(float)
    key = layer_key(job, layout)
    runs = _runs(layout, rank, microbatches)
    here = stage_job(job, layout, rank)
    for chunk, times in runs.items():
        for cause, seconds in chunk_detail(here, key, chunks[chunk].parts).causes.items():
            out[cause] += seconds * times
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
        name: float(seconds)
        for name, seconds in out.items()
        if seconds or name in ("matmul", "attention", "pointwise", "bubble", "optimizer")
    }


def _runs(layout: Layout, rank: int, microbatches: int) -> dict[int, int]:
    """How many microbatches rank ``rank`` runs through each of its chunks."""
    if layout.schedule == "dualpipe":
        return {rank: microbatches // 2, layout.pp - 1 - rank: microbatches // 2}
    return dict.fromkeys(layout.chunks_of_rank(rank), microbatches)


def bytes_sent(
    job: Job, layout: Layout, chunks: Sequence[ChunkSeconds], updates: Sequence[Update], microbatches: int
) -> dict[str, dict[str, float]]:
    """Wire bytes per step of the rank that sends most: axis -> link class -> bytes."""
    best: dict[str, dict[str, float]] = {}
    key, size = layer_key(job, layout), boundary_bytes(job, layout)
    across = Network(job.cluster, layout).sent("send_recv", "pp", size) if layout.pp > 1 else {}
    for rank in {0, min(1, layout.pp - 1), layout.pp - 1}:
        total: dict[str, dict[str, float]] = {}
        for chunk, times in _runs(layout, rank, microbatches).items():
            for axis, links in chunk_detail(job, key, chunks[chunk].parts).sent.items():
                add_bytes(total, axis, links, times)
            add_bytes(total, "pp", across, times * _crossings(layout, chunk))
        for axis, links in updates[rank].sent.items():
            add_bytes(total, axis, links)
        if _total(total) > _total(best):
            best = total
    return best


def _crossings(layout: Layout, chunk: int) -> int:
    """Messages a chunk sends to another rank for one microbatch: its output, and the gradient of its input."""
    here = layout.rank_of_chunk(chunk)
    return sum(0 <= c < layout.chunks and layout.rank_of_chunk(c) != here for c in (chunk - 1, chunk + 1))


def _total(sent: dict[str, dict[str, float]]) -> float:
    return sum(size for links in sent.values() for size in links.values())


def _recomputed_flops(job: Job, layout: Layout, chunks: Sequence[ChunkSeconds], microbatches: int) -> float:
    key = layer_key(job, layout)
    per_microbatch = sum(chunk_detail(job, key, chunk.parts).recomputed_flops for chunk in chunks)
    return per_microbatch * layout.tp * layout.cp * microbatches * layout.dp


def _peak(job: Job) -> float:
    """FLOP/s of the whole cluster in 16 bits, or in fp32 for an fp32 job."""
    pools = [(pool.gpu, pool.gpus) for pool in job.cluster.pools] or [(job.cluster.gpu, job.cluster.gpus)]
    return sum(
        count * gpu.peak_flops(job.precision if job.precision == "fp32" or "bf16" not in gpu.peaks else "bf16")
        for gpu, count in pools
    )
