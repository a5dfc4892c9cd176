"""FLOPs and collectives of single operations, as a trace meets them.

Bytes of a collective are those of ``profiles.operations.Collective``: the full buffer; for an all-to-all the larger of what the
rank sends and receives; for a transfer the message (counted where it is sent).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import ScriptObject, Tensor
from torch.distributed import distributed_c10d
from torch.utils.flop_counter import flop_registry

from planner.runtime.attention_blocks import pairs

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Call:
    """One collective: axis, kind, bytes, ranks of its group, the phase it ran in and when on the trace's clock."""

    axis: str
    kind: str
    bytes: int
    ranks: int
    phase: str
    clock: int


def _mm(a: Tensor, b: Tensor) -> int:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def _attention(q: Tensor, v: Tensor, q_spans: list[int], k_spans: list[int], window: int, chunk: int) -> int:
    return 2 * pairs(q_spans, k_spans, window, chunk) * (q.shape[3] + v.shape[3]) * q.shape[2] * q.shape[1]


def flops_of(name: str, args: Any, out: Any) -> tuple[str, int] | None:
    """(kind, FLOPs) of a matrix product or an attention; None for anything else."""
    match name:
        case "aten::mm":
            return "matmul", _mm(*args[:2])
        case "aten::addmm":
            return "matmul", _mm(*args[1:3])
        case "aten::bmm":
            return "matmul", 2 * args[0].shape[0] * args[0].shape[1] * args[0].shape[2] * args[1].shape[2]
        case "aten::_grouped_mm":
            a, b = args[:2]
            return "grouped_matmul", 2 * a.shape[0] * a.shape[1] * b.shape[-1]
        case "axisplan::attend":
            q, _, v, _, _, q_spans, k_spans, window, chunk, _ = args
            return "attention", _attention(q, v, q_spans, k_spans, window, chunk)
        case "axisplan::attend_backward":
            _, q, _, v, _, _, _, _, q_spans, k_spans, window, chunk, _ = args
            return "attention", _attention(q, v, q_spans, k_spans, window, chunk) * 5 // 2
    if name in ATTENTION:
        return "attention", int(flop_registry[ATTENTION[name]](*args, out_val=out))
    return None


ATTENTION: dict[str, Any] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": aten._scaled_dot_product_flash_attention,
    "aten::_scaled_dot_product_flash_attention": aten._scaled_dot_product_flash_attention,
    "aten::_scaled_dot_product_efficient_attention": aten._scaled_dot_product_efficient_attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": aten._scaled_dot_product_flash_attention_backward,
    "aten::_scaled_dot_product_flash_attention_backward": aten._scaled_dot_product_flash_attention_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": aten._scaled_dot_product_efficient_attention_backward,
}
"""PyTorch's own attention operations (user modules) -> the one whose FLOPs torch knows: every query against every key."""


KINDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "allreduce_": ("all_reduce", (0,)),
    "_allgather_base_": ("all_gather", (0,)),
    "allgather_": ("all_gather", (0,)),
    "all_gather_single": ("all_gather", (0,)),
    "_reduce_scatter_base_": ("reduce_scatter", (1,)),
    "reduce_scatter_single": ("reduce_scatter", (1,)),
    "alltoall_base_": ("all_to_all", (0, 1)),
    "all_to_all_single": ("all_to_all", (0, 1)),
    "broadcast_": ("broadcast", (0,)),
    "send": ("send_recv", (0,)),
}
"""c10d operation -> kind, and the arguments whose largest is the full buffer."""


FUNCTIONAL = {
    "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all", "broadcast": "broadcast",
}  # fmt: skip
"""Functional collectives (DTensor's) -> kind. Their full buffer is the larger of what goes in and comes out."""


def call_of(name: str, args: Any, out: Any, axis_of: Callable[[tuple[int, ...]], str], phase: str, clock: int) -> Call | None:
    """The collective that an operation is; None where nothing is sent (a receive, a barrier, a wait)."""
    space, _, operation = name.partition("::")
    if space == "c10d" and operation in KINDS:
        kind, places = KINDS[operation]
        group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, ScriptObject) and "ProcessGroup" in str(a._type()))
        size = max(_bytes(args[i]) for i in places)
    elif space == "_c10d_functional" and operation in FUNCTIONAL:
        kind = FUNCTIONAL[operation]
        resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
        group = resolve(next(a for a in reversed(args) if isinstance(a, str)))
        size = max(_bytes(args[0]), _bytes(out))
    else:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    return Call(axis_of(ranks), kind, size, len(ranks), phase, clock)


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(v) for v in value) if isinstance(value, (list, tuple)) else 0
