"""Seconds of a list of operations on one GPU under an Execution: the interpreter of operations that knows about time.

Matrix products, attention and pointwise work are priced one by one by ``GpuProfile.seconds``; what the framework changes about
them is here: the attention kernel's generation, how far pointwise kernels are from counted bytes, and the host's launch floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cost_models.arrays import always_one, plain
from cost_models.execution import Execution
from profiles.files import read_shipped
from profiles.gpu import GpuProfile
from profiles.operations import Attend, Collective, GroupedMatmul, Matmul, Number, Operation, Pointwise

KINDS = ("matmul", "attention", "pointwise")
"""What compute seconds are broken down by."""
ARCHITECTURES = {
    "ampere": ("a100", "a800", "a30", "a40"),
    "hopper": ("h100", "h800", "h200", "h20", "gh200"),
    "blackwell": ("b200", "b300", "gb200", "gb300"),
}  # fmt: skip
TOGETHER = 1.1
"""Growth of the launch floor under TP: every process must be ready for every collective, so that jitter takes the slowest. vTrain's
single-node runs: 3.05 ms a layer at TP 1, 3.35 at TP 2, 3.0-3.45 at TP 4 (modelling-notes.md, 7)."""
TOGETHER_ACROSS_SOCKETS = 1.5
"""The same where the processes are those of more than one socket (fitted: 4.6-4.8 ms at TP 8)."""
SOCKET = 4
"""GPUs of a node of eight that are behind one socket."""
UNFUSED_ACTIVATIONS = {"relu2": (2.0, 2.3), "silu": (1.7, 2.0), "gelu": (1.0, 1.0), "clamped_swiglu": (8.7, 9.0)}
"""(forward, backward) bytes of an activation run kernel by kernel over those of one fused kernel: squared ReLU is a ReLU and a
square; SwiGLU a sigmoid-product and a product. GPT-OSS's (megatron/core/transformer/moe/experts.py, without bias_activation_fusion;
bytes an expert-hidden element): bias 8, two clamps 8, x sigmoid(1.702 x) 14, the offset 4, product 6, routing weight to fp32 and back
12: 52 forward and 90 backward instead of 6 and 10."""
LOW_PRECISION = ("fp8", "mxfp8", "nvfp4")
ALIGNMENT = 8
"""16-bit elements of the 16-byte words that tensor-core kernels load (cuBLAS documentation, tensor core usage)."""
BATCHED = ("scores", "context", "value_gradient", "probability_gradient", "query_gradient", "key_gradient")
"""Batched products of unfused attention."""
PARTIAL_GRAPHS = 0.5
"""Share of the host's launches left where only attention and router are captured in CUDA graphs (an estimate)."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of compute by kind, and kernels launched; numbers or arrays."""

    matmul: Number = 0.0
    attention: Number = 0.0
    pointwise: Number = 0.0
    kernels: Number = 0

    @property
    def seconds(self) -> Number:
        return self.matmul + self.attention + self.pointwise

    def __add__(self, other: Compute) -> Compute:
        return Compute(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.pointwise + other.pointwise,
            self.kernels + other.kernels,
        )

    def times(self, factor: Number) -> Compute:
        return Compute(self.matmul * factor, self.attention * factor, self.pointwise * factor, self.kernels * factor)


Known = dict[int, tuple[Operation, Number]]
"""Seconds of products and attention priced before, by the operation's identity (which it keeps alive)."""


def price(gpu: GpuProfile, execution: Execution, operations: Iterable[Operation], known: Known | None = None) -> Compute:
    """Seconds by kind of ``operations`` on ``gpu``, one after the other; collectives cost nothing here. ``known``: prices to reuse, and to
    add to."""
    matmul: Number = 0.0
    attention: Number = 0.0
    pointwise: Number = 0.0
    kernels: Number = 0
    for op in operations:
        if isinstance(op, Collective):
            continue
        if isinstance(op, Pointwise):
            kernels = kernels + op.kernels
            factor = 1.0 if counted(op.name) else execution.pointwise_factor
            pointwise = pointwise + op.kernels * gpu.launch_seconds + op.bytes * factor / gpu.memory_rate(op)
            continue
        found = None if known is None else known.get(id(op))
        seconds = _product_seconds(gpu, execution, op) if found is None else found[1]
        if found is None and known is not None:
            known[id(op)] = op, seconds
        if isinstance(op, Attend):
            kernels = kernels + 1
            attention = attention + seconds
        else:
            kernels = kernels + (op.groups if isinstance(op, GroupedMatmul) and not execution.grouped_gemm else 1)
            matmul = matmul + seconds
    return Compute(matmul, attention, pointwise, kernels)


def _product_seconds(gpu: GpuProfile, execution: Execution, op: Matmul | GroupedMatmul | Attend) -> Number:
    """Seconds of a product, of a grouped one (expert by expert where the framework has no grouped kernel), or of attention."""
    if isinstance(op, Attend):
        return gpu.seconds(op, kernel=kernel_speed(execution.attention, architecture(gpu.name)))
    slower = 1.0 / product_speed(execution.libraries, architecture(gpu.name)) if op.dtype in LOW_PRECISION else 1.0
    if not isinstance(op, GroupedMatmul) or execution.grouped_gemm:
        return gpu.seconds(aligned(op)) * slower
    single = Matmul(op.tokens / op.groups, op.n, op.k, op.dtype, 1, op.name, op.weight_gradient)
    if op.weight_gradient:
        single = Matmul(op.k, op.n, op.tokens / op.groups, op.dtype, 1, op.name, True)
    return op.groups * gpu.seconds(single) * slower


def aligned(op: Matmul | GroupedMatmul) -> Matmul | GroupedMatmul:
    """``op`` as it runs: a batched 16-bit product (unfused attention) whose rows are not whole 16-byte words misses the tensor
    cores and runs at the plain fp32 rate (an array only where all of it does: the price is then a lower bound). BLOOM's tuning runs
    with head size 108 are 30 % slower for it than their neighbours."""
    if isinstance(op, GroupedMatmul) or op.name not in BATCHED or op.dtype not in ("fp16", "bf16"):
        return op
    odd = (np.asarray(op.n) % ALIGNMENT != 0) | (np.asarray(op.k) % ALIGNMENT != 0)
    return replace(op, dtype="fp32") if np.all(odd) else op


@cache
def counted(name: str) -> bool:
    """Whether a pointwise operation's bytes are already those its kernels move (loss, softmax, casts, accumulation), so that the
    framework's factor on norms, activations, rotary embedding and residual additions does not apply."""
    return name in ("loss", "softmax", "ring_merge") or name.endswith((".quantise", ".accumulate"))


@cache
def architecture(gpu: str) -> str:
    """ampere, hopper, blackwell, or other, from a GPU's name."""
    first = gpu.lower().replace("_", "-").split("-")[0]
    return next((name for name, members in ARCHITECTURES.items() if first in members), "other")


@cache
def kernel_table() -> dict[str, Any]:
    """``data/attention_kernels.yaml``: kernel -> architecture -> {value, origin, source}, and ``relative_to``."""
    return _table("attention_kernels")


@cache
def product_table() -> dict[str, Any]:
    """``data/product_speed.yaml``: library generation -> architecture -> {value, origin, source}."""
    return _table("product_speed")


def _table(name: str) -> dict[str, Any]:
    found: dict[str, Any] = read_shipped(Path(__file__).parent / "data" / f"{name}.yaml")
    return found


@cache
def product_speed(libraries: str, arch: str) -> float:
    """Speed of 8- and 4-bit matrix products of a library generation relative to the GPU's curve."""
    return float(product_table().get(libraries, {}).get(arch, {"value": 1.0})["value"])


@cache
def kernel_speed(kernel: str, arch: str) -> float:
    """Speed of an attention kernel relative to the GPU's own attention curve."""
    by_arch = kernel_table()[kernel]
    base = kernel_speed(by_arch["relative_to"], arch) if "relative_to" in by_arch else 1.0
    return base * float(by_arch.get(arch, by_arch["other"])["value"])


def with_activation(
    operations: Iterable[Operation], activation: str, execution: Execution, *, backward: bool = False
) -> tuple[Operation, ...]:
    """``operations`` with the activation's traffic as this framework runs it."""
    if activation not in execution.unfused_activations:
        return tuple(operations)
    factor = UNFUSED_ACTIVATIONS.get(activation, (1.0, 1.0))[backward]
    out: list[Operation] = []
    for op in operations:
        if isinstance(op, Pointwise) and op.name.endswith("_activation"):
            op = replace(op, bytes=op.bytes * factor, kernels=op.kernels * round(factor))
        out.append(op)
    return tuple(out)


def price_in_ring(
    gpu: GpuProfile, execution: Execution, operations: Sequence[Operation], ring: Number, known: Known | None = None
) -> Compute:
    """``price`` where fused attention runs as a ring of ranks runs it: ``ring`` kernels, each against the keys of one rank, and their
    partial results put together in fp32 (ring attention, arXiv:2310.01889)."""
    cut: list[Attend] = []
    whole: list[Operation] = []
    for op in operations:
        if isinstance(op, Attend) and op.fused and not always_one(ring):
            cut.append(op)
        else:
            whole.append(op)
    total = price(gpu, execution, whole, known)
    for op in cut:
        block, merge = ring_block(op, ring, execution.ring_merge_bytes)
        total = total + price(gpu, execution, [block]).times(ring) + price(gpu, execution, [merge])
    return Compute(plain(total.matmul), plain(total.attention), plain(total.pointwise), plain(total.kernels))


def ring_launches(ring: Number) -> Number:
    """Kernels of one attention in a ring: its blocks, and what puts each but the first to the others."""
    return 2 * ring - 1


def ring_block(op: Attend, ring: Number, merge_bytes: float) -> tuple[Attend, Pointwise]:
    """One of the ``ring`` kernels of an attention in a ring, and what puts all of their results together: ``merge_bytes`` an element of
    the output forward, half of it for each element of the gradients of queries, keys and values backward."""
    elements = op.heads * op.v_dim
    if op.backward:
        elements = (op.heads * op.qk_dim + op.kv_heads * (op.qk_dim + op.v_dim)) / 2
    merge = Pointwise(merge_bytes * (ring - 1) * op.batch * op.q_len * elements, ring - 1, "ring_merge")
    return replace(op, k_len=op.k_len / ring, pairs=op.pairs / ring), merge


def is_host(gpu: GpuProfile) -> bool:
    """Whether the device is the host itself: launching then takes time from the work instead of running ahead of it."""
    return gpu.is_host


def host_seconds(gpu: GpuProfile, execution: Execution, tp: Number) -> Number:
    """Host time to launch one pass of one layer on a GPU (0 on a CPU, whose operations carry their own overhead)."""
    if execution.graphs == "full" or is_host(gpu):
        return 0.0
    share = PARTIAL_GRAPHS if execution.graphs == "partial" else 1.0
    return execution.host_layer_seconds * share * jitter(tp)


def jitter(tp: Number) -> Number:
    """Growth of the launch floor with TP (a number or an array)."""
    return 1.0 + (tp > 1) * (TOGETHER - 1.0) + (tp > SOCKET) * (TOGETHER_ACROSS_SOCKETS - TOGETHER)
