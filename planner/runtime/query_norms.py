"""Norms of queries and keys that are wider than a head: over all heads together (OLMo 2), or with a weight a head (Cohere).

Heads are cut over tp. A norm over all of them needs one number a token from every rank, forward and backward (an all-reduce of
[tokens]); where key heads stand on several ranks each counts once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.runtime.collectives import all_reduce
from planner.runtime.mesh import Axis
from planner.runtime.parameter import Block, parameter


class _SumOver(torch.autograd.Function):
    """The sum over an axis of what every rank has a share of; the gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_reduce(x.clone(), axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0].clone(), ctx.axis), None


class WideNorm(nn.Module):
    """[s, b, heads of this rank, width] -> the same. ``block``: the weight [all heads * width], cut as the heads are.

    ``full``: RMS (or mean and variance) over all ``block.shape[0]`` values of a token; else over each head's.
    """

    def __init__(
        self, kind: str, full: bool, block: Block, bias: Block | None, eps: float, axis: Axis, dtype: torch.dtype, device: torch.device
    ) -> None:  # fmt: skip
        super().__init__()
        self.kind, self.full, self.eps, self.axis, self.total = kind, full, eps, axis, block.shape[0]
        self.copies = block.copies
        self.weight = parameter(block, dtype, device)
        self.bias = parameter(bias, dtype, device) if bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        if not self.full:
            size = (x.shape[-1],)
            normed = F.rms_norm(wide, size, eps=self.eps) if self.kind == "rms" else F.layer_norm(wide, size, eps=self.eps)
        else:
            if self.kind != "rms":
                wide = wide - self._mean(wide)
            normed = wide * torch.rsqrt(self._mean(wide.square()) + self.eps)
        out = normed.to(x.dtype) * self.weight.view(x.shape[-2:])
        return out if self.bias is None else out + self.bias.view(x.shape[-2:])

    def _mean(self, x: Tensor) -> Tensor:
        """Over all heads of a token, [s, b, 1, 1]."""
        total = x.sum((-2, -1), keepdim=True)
        if self.axis.size > 1:
            total = _SumOver.apply(total, self.axis) / self.copies
        return total / self.total
