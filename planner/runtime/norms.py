"""Normalisation of the hidden width. RMSNorm saves its input, weight and one number a row; LayerNorm two numbers a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.runtime import kernels
from planner.runtime.parameter import Block, parameter


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, rstd = kernels.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        for_x, for_weight = wanted(ctx, 0), wanted(ctx, 1)
        x_grad, weight_grad = kernels.rms_norm_backward(grads[0], x, weight, rstd, for_x, for_weight)
        return x_grad if for_x else None, weight_grad if for_weight else None, None


def wanted(ctx: Any, place: int) -> bool:
    """Whether the running backward goes on to the input ``place``: a split backward asks for one of them at a time."""
    node = ctx.next_functions[place][0]
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient autograd.grad was asked for
        return True


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim, with weight (and bias) as ``block`` says."""

    def __init__(
        self, kind: str, block: Block, eps: float, bias: bool, weight: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.kind, self.eps, self.width = kind, eps, block.shape
        self.weight = parameter(block, dtype, device) if weight else None
        self.bias = parameter(zeros_like(block), dtype, device) if bias and weight else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "rms":
            weight = self.weight if self.weight is not None else x.new_ones(self.width)
            return _RmsNorm.apply(x, weight, self.eps)
        return F.layer_norm(x, self.width, self.weight, self.bias, self.eps)


def zeros_like(block: Block) -> Block:
    """The block of a bias beside a weight."""
    return replace(block, init="zeros")
