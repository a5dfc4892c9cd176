"""Cross entropy over a vocabulary cut over tp, summed over valid tokens and divided by the whole batch's count."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.runtime import kernels
from planner.runtime.collectives import all_reduce
from planner.runtime.mesh import Axis

IGNORED = -100
"""The label of a token that does not count."""


class _CrossEntropy(torch.autograd.Function):
    """Per-token loss. Saves logits, targets and logsumexp; two all-reduces of [tokens] and [2, tokens] forward, none backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, start: int) -> Tensor:
        lse, picked = kernels.cross_entropy(logits, targets, start)
        if axis.size > 1:
            top = all_reduce(lse.clone(), axis, dist.ReduceOp.MAX)
            both = all_reduce(torch.stack(((lse - top).exp(), picked)), axis)
            lse, picked = both[0].log() + top, both[1]
        ctx.save_for_backward(logits, targets, lse)
        ctx.start = start
        return torch.where(targets == IGNORED, 0.0, lse - picked)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, lse = ctx.saved_tensors
        scale = torch.where(targets == IGNORED, 0.0, grads[0])
        return kernels.cross_entropy_backward(logits, targets, lse, scale, ctx.start), None, None, None


def token_losses(logits: Tensor, labels: Tensor, axis: Axis, start: int) -> Tensor:
    """Loss of each token (0 where the label is IGNORED).

    ``logits`` [sequence, batch, local vocabulary]; ``labels`` [batch, sequence]; ``start`` the first word of this rank's part.
    """
    return _CrossEntropy.apply(logits.flatten(0, 1), labels.t().reshape(-1), axis, start)
