"""What a step adds to its passes on one pipeline rank: gradient reduction, parameter gathering, gradient norm, optimizer.

Reduction runs beside the last microbatch's backward where the framework overlaps it, gathering beside the next first forward; 80 %
of that time is usable, the last bucket never hides, and what hides still slows the work (``communication.INTERFERENCE``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cost_models.communication import Network, add_bytes, add_sent, hidden, seconds_of
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.sharding import copies, gathers, gathers_once, reduces_once, reductions
from cost_models.state_bytes import shards
from cost_models.states import Holding
from profiles.operations import Matmul, Number

USABLE = 0.8
"""Share of a pass beside which reduction and gathering can run (modelling-notes.md section 2, 11)."""
OPTIMIZER_SHARE = {"adamw": 1.0, "adamw8bit": 0.65, "muon": 0.6, "sgd": 0.45}
"""Traffic of an optimizer's step over AdamW's with fp32 states: bytes read and written (16 + 4 of 34 for 8-bit moments, ...)."""
MUON_STEPS = 5
"""Newton-Schulz iterations (Muon, Jordan et al. 2024; arXiv:2502.16982)."""
HOST_LINK_BYTES_PER_SECOND = 20e9
"""Achieved one way between device and host memory for one GPU of a node at work (PCIe 4; an estimate)."""
HOST_OPTIMIZER_BYTES_PER_SECOND = 20e9
"""One GPU's share of host memory traffic in a vectorised Adam on the CPU (DeepSpeed CPUAdam; an estimate)."""


@dataclass(frozen=True, slots=True)
class Update:
    """Seconds on one pipeline rank: ``reduce`` and ``gather`` as exposed, by axis (dp, edp), ``optimizer``; wire bytes by axis."""

    reduce: dict[str, float] = field(default_factory=dict)
    gather: dict[str, float] = field(default_factory=dict)
    optimizer: float = 0.0
    sent: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def start(self) -> float:
        """Seconds before the rank's first forward."""
        return sum(self.gather.values())

    @property
    def end(self) -> float:
        """Seconds after its last backward."""
        return sum(self.reduce.values()) + self.optimizer


def update_seconds(
    job: Job,
    layout: Layout,
    weights: Holding,
    *,
    forward: float,
    backward: float,
    shared: float = 0.0,
    matrices: tuple[Matmul, ...] = (),
    held: Holding | None = None,
) -> Update:
    """The update of a rank that trains ``weights`` and whose one microbatch takes ``forward`` and ``backward`` seconds in all its
    chunks; ``shared``: weights of a tied embedding that first and last stage both hold; ``matrices``: its weight-gradient
    products, for an optimizer that works on whole matrices; ``held``: all its weights, where some are frozen."""
    network, execution = Network(job.cluster, layout), job.execution
    sent: dict[str, dict[str, float]] = {}
    reduce: dict[str, float] = {}
    gather: dict[str, float] = {}
    whole = held if held is not None and layout.zero == 3 else weights
    for axis, reduction, gathering in zip(("dp", "edp"), reductions(job, layout, weights), gathers(job, whole), strict=True):
        if reduces_once(job, layout) and reduction[0].bytes:
            time = float(seconds_of(network, reduction))
            reduce[axis] = _exposed(time, reduction[0].bytes, execution.dp_bucket_bytes, USABLE * backward, execution.dp_overlap)
            add_sent(sent, network, reduction)
        if gathers_once(job, layout) and gathering.bytes:
            time = float(seconds_of(network, (gathering,)))
            beside = execution.dp_overlap and execution.gather_overlap
            gather[axis] = _exposed(time, gathering.bytes, execution.dp_bucket_bytes, USABLE * forward, beside)
            add_sent(sent, network, (gathering,))
    moved = copies(job, layout, whole, weights)
    for times, once, seconds in ((reduce, reduces_once, moved.into), (gather, gathers_once, moved.out)):
        if seconds and once(job, layout):
            times["dp"] = times.get("dp", 0.0) + float(seconds)
    if shared:
        size = job.reduced_element * shared
        apart = max(1, layout.pp - 1) * network.group("pp").stride
        reduce["pp"] = float(job.cluster.collective_seconds("all_reduce", size, 2, apart))
        add_bytes(sent, "pp", {job.cluster.level_of(2, round(apart)).name: size})
    return Update(reduce, gather, float(optimizer_seconds(job, layout, weights, matrices)), sent)


def _exposed(time: float, size: float, bucket: float, window: float, overlap: bool) -> float:
    """Seconds left of ``time`` that may run beside ``window`` seconds of work, its last ``bucket`` bytes apart."""
    if not overlap or not time:
        return time
    last = time * min(1.0, bucket / size)
    rest = time - last
    return last + float(hidden(rest, window))


def optimizer_seconds(job: Job, degrees: Any, weights: Holding, matrices: tuple[Matmul, ...] = ()) -> Number:
    """Seconds of the optimizer step on the rank's shard, gradient norm included; on the host where its state is offloaded. Numbers or
    arrays."""
    dense, expert = shards(degrees) if degrees.zero >= 1 else (1, 1)
    count = weights.dense / dense + weights.expert / expert
    execution = job.execution
    traffic = execution.optimizer_traffic * OPTIMIZER_SHARE[job.optimizer] * count
    if "optimizer" in degrees.offload:
        across = (execution.gradient_bytes + execution.gather_bytes) * count / HOST_LINK_BYTES_PER_SECOND
        return across + traffic / HOST_OPTIMIZER_BYTES_PER_SECOND
    seconds = traffic / job.cluster.gpu.memory_bytes_per_second
    if job.optimizer == "muon":
        seconds += sum(_newton_schulz(job, op) for op in matrices) / dense
    return seconds


def _newton_schulz(job: Job, op: Matmul) -> float:
    """Seconds to orthogonalise the gradient of one m x n matrix: per iteration X X^T, its square, and a product with X."""
    small, large = min(op.m, op.n), max(op.m, op.n)
    dtype = "bf16" if job.precision != "fp32" else "fp32"
    gpu = job.cluster.gpu
    squares = gpu.seconds(Matmul(small, small, large, dtype)) + gpu.seconds(Matmul(small, small, small, dtype))
    return MUON_STEPS * float(squares + gpu.seconds(Matmul(small, large, small, dtype)))
