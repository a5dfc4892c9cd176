"""Operations made real: for each one of ``profiles.operations`` the torch call that stands for it in training.

``build(operation, form, device)`` allocates its tensors and returns the call to time. Forms of a matrix product are the three of
training, by how its operands lie: ``forward`` (activation x weight^T), ``input_gradient`` (gradient x weight) and
``weight_gradient`` (gradient^T x activation). Pointwise forms are those of a transformer layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.nn import functional

from profiles.operations import BYTES, Attend, GroupedMatmul, Matmul, Operation, Pointwise

Call = Callable[[], object]
DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip
POINTWISE_WIDTH = 512
"""Row length of the pointwise tensors; rows carry the size."""
ARRAYS = {"copy": 2.0, "add": 3.0, "swiglu": 8.0, "norm": 5.0, "optimizer": 8.5}
"""Arrays of the tensor's size that a pointwise form moves as operation lists count them (``cost_models.layers``): each input read
and each output written once, forward and backward, as if fused. What the framework moves beyond that shows as a lower rate."""
KERNELS = {"add": 1, "swiglu": 2, "norm": 2, "copy": 1, "optimizer": 1}
TINY_LAYER_OPERATIONS = 33
"""Operations an operation list holds for ``tiny_layer``: 7 products, attention, 2 norms, 2 residuals, 1 gate; backward 14 + 6."""
TINY_FEED_FORWARD_OPERATIONS = 15
"""The same of ``tiny_feed_forward``: 3 products, a norm, a residual, a gate; backward 6 + 3."""


def needed_bytes(op: Operation, form: str) -> float:
    """Bytes of the tensors that timing ``op`` allocates, at the most."""
    if isinstance(op, Matmul):
        return float(BYTES[op.dtype] * (op.m * op.k + op.k * op.n) + max(BYTES[op.dtype], 2) * op.m * op.n) * op.batch
    if isinstance(op, GroupedMatmul):
        return float(BYTES[op.dtype] * (op.tokens * (op.k + op.n) + op.groups * op.k * op.n))
    if isinstance(op, Attend):
        rows = op.batch * (op.heads * op.q_len + 2 * op.kv_heads * op.k_len)
        return float(BYTES[op.dtype] * rows * (op.qk_dim + op.v_dim) * 2)
    if isinstance(op, Pointwise):
        return float(op.bytes)
    raise TypeError(type(op).__name__)


def build(op: Operation, form: str, device: torch.device) -> Call:
    """Allocates the tensors of ``op`` on ``device`` (normal random data: constants run faster than real data) and returns the call.

    Raises torch's own errors where memory does not suffice or the device has no such kernel.
    """
    if isinstance(op, Matmul):
        return _matmul(op, form, device)
    if isinstance(op, GroupedMatmul):
        return _grouped(op, device)
    if isinstance(op, Attend):
        return _attend(op, device)
    if isinstance(op, Pointwise):
        return pointwise(form, int(op.bytes), device, DTYPES["fp32" if device.type == "cpu" else "bf16"])
    raise TypeError(type(op).__name__)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    wide = torch.randn(*shape, device=device, dtype=torch.float32 if dtype.itemsize < 4 else dtype)
    return wide.to(dtype)


def _matmul(op: Matmul, form: str, device: torch.device) -> Call:
    if op.dtype not in DTYPES:
        raise TypeError(f"no {op.dtype} product is timed here")
    dtype, m, n, k = DTYPES[op.dtype], int(op.m), int(op.n), int(op.k)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = op.dtype == "tf32"
    if op.dtype == "fp8":
        one = torch.ones((), device=device)
        left, right = _random(device, dtype, m, k), _random(device, dtype, n, k).t()
        return lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)
    lead = () if int(op.batch) == 1 else (int(op.batch),)
    if form == "weight_gradient":
        gradient, activation = _random(device, dtype, *lead, k, m).transpose(-1, -2), _random(device, dtype, *lead, k, n)
        return lambda: gradient @ activation
    if form == "input_gradient":
        upstream, matrix = _random(device, dtype, *lead, m, k), _random(device, dtype, *lead, k, n)
        return lambda: upstream @ matrix
    inputs, weight = _random(device, dtype, *lead, m, k), _random(device, dtype, *lead, n, k).transpose(-1, -2)
    return lambda: inputs @ weight


def _grouped(op: GroupedMatmul, device: torch.device) -> Call:
    dtype, groups, tokens = DTYPES[op.dtype], int(op.groups), int(op.tokens)
    rows, weights = _random(device, dtype, tokens, int(op.k)), _random(device, dtype, groups, int(op.k), int(op.n))
    ends = torch.tensor([tokens * (g + 1) // groups for g in range(groups)], dtype=torch.int32, device=device)
    return lambda: functional.grouped_mm(rows, weights, offs=ends)


def _attend(op: Attend, device: torch.device) -> Call:
    dtype, grouped, causal = DTYPES[op.dtype], int(op.heads) != int(op.kv_heads), op.pairs < op.q_len * op.k_len
    q = _random(device, dtype, int(op.batch), int(op.heads), int(op.q_len), int(op.qk_dim))
    k = _random(device, dtype, int(op.batch), int(op.kv_heads), int(op.k_len), int(op.qk_dim))
    v = _random(device, dtype, int(op.batch), int(op.kv_heads), int(op.k_len), int(op.v_dim))

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    if not op.backward:
        return forward
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = forward()
    upstream = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)


def pointwise(form: str, total_bytes: int, device: torch.device, dtype: torch.dtype) -> Call:
    """The call of a pointwise form that moves about ``total_bytes`` (``ARRAYS[form]`` arrays)."""
    rows = max(1, int(total_bytes / (ARRAYS[form] * POINTWISE_WIDTH * dtype.itemsize)))
    a, b, c = (_random(device, dtype, rows, POINTWISE_WIDTH) for _ in range(3))
    if form == "copy":
        return lambda: b.copy_(a)
    if form == "add":
        return lambda: a + b
    if form == "optimizer":
        parameter = torch.nn.Parameter(a)
        parameter.grad = b
        adam = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
        return adam.step
    a.requires_grad_()
    b.requires_grad_()
    if form == "swiglu":
        return lambda: torch.autograd.grad(functional.silu(a) * b, (a, b), c)
    weight = torch.ones(POINTWISE_WIDTH, device=device, dtype=dtype, requires_grad=True)
    return lambda: torch.autograd.grad(functional.rms_norm(a, (POINTWISE_WIDTH,), weight), (a, weight), c)


TINY_WIDTH, TINY_TOKENS = 16, 4


def tiny_layer(device: torch.device) -> Call:
    """Forward and backward of a transformer layer so small that only launches take time."""
    x, scale, weights = _tiny(device, 7)

    def call() -> object:
        normed = functional.rms_norm(x, (TINY_WIDTH,), scale)
        q, k, v = (functional.linear(normed, w).view(1, TINY_TOKENS, 2, 8).transpose(1, 2) for w in weights[:3])
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        hidden = x + functional.linear(mixed, weights[3])
        return torch.autograd.grad(_gated(hidden, scale, weights[4:]).sum(), [x, scale, *weights])

    return call


def tiny_feed_forward(device: torch.device) -> Call:
    """The feed-forward of such a layer alone: other operations, by which the launch cost is judged."""
    x, scale, weights = _tiny(device, 3)
    return lambda: torch.autograd.grad(_gated(x, scale, weights).sum(), [x, scale, *weights])


def _tiny(device: torch.device, products: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    x = torch.randn(1, TINY_TOKENS, TINY_WIDTH, device=device, requires_grad=True)
    weights = [torch.randn(TINY_WIDTH, TINY_WIDTH, device=device, requires_grad=True) for _ in range(products)]
    return x, torch.ones(TINY_WIDTH, device=device, requires_grad=True), weights


def _gated(hidden: torch.Tensor, scale: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    normed = functional.rms_norm(hidden, (TINY_WIDTH,), scale)
    gated = functional.silu(functional.linear(normed, weights[0])) * functional.linear(normed, weights[1])
    return hidden + functional.linear(gated, weights[2])


GRAPH_KERNELS = 200


def launch_graph(device: torch.device, kernels: int = GRAPH_KERNELS) -> Call:
    """CUDA: so many tiny additions in one graph, so that the host's part is not timed."""
    x = torch.zeros(32, device=device)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(kernels):
            x.add_(1.0)
    return graph.replay


def usable_bytes(device: torch.device, processes: int) -> tuple[float, float, float]:
    """(reported, usable by one of ``processes`` workers, taken by context) bytes of memory, found by asking for it.

    CUDA: what one process can really allocate, in blocks of decreasing size, and what was gone before the first tensor. CPU: the
    system's available memory split evenly, and this process's resident size.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held: list[torch.Tensor] = []
        block = 1 << 30
        while block >= 1 << 21:
            try:
                held.append(torch.empty(block, dtype=torch.uint8, device=device))
            except torch.OutOfMemoryError:
                block >>= 1
        got = float(torch.cuda.memory_reserved(device))
        del held
        torch.cuda.empty_cache()
        return float(total), got, float(total - free)
    reported, available, resident = host_memory()
    return reported / processes, available / processes, resident


def host_memory() -> tuple[float, float, float]:
    """(total, available, resident of this process) bytes of the host, a container's own limit included."""
    import os
    import resource

    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    total = float(page * pages)
    available = total
    try:
        with open("/proc/meminfo") as lines:
            available = next(float(ln.split()[1]) * 1024 for ln in lines if ln.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    for limit_file, used_file in CGROUP_FILES:
        try:
            with open(limit_file) as limit, open(used_file) as used:
                cap = float(limit.read())
                total, available = min(total, cap), min(available, max(cap - float(used.read()), 0.0))
            break
        except (OSError, ValueError):
            continue
    resident = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)
    return total, available, resident


CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
