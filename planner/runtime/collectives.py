"""The collectives, over an ``Axis``. On an axis of size 1 each returns its argument and calls nothing.

Gathers and scatters work on dim 0, where no copy is needed: activations are laid out [sequence, batch, hidden].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from planner.runtime.mesh import Axis


def all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Sum (or max) over the axis, in place; returns ``x``."""
    if axis.group is not None:
        dist.all_reduce(x, op, group=axis.group)
    return x


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[n, ...] -> [n * size, ...] in rank order."""
    if axis.group is None:
        return x
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    dist.all_gather_single(out, x.contiguous(), group=axis.group)
    return out


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """[n * size, ...] -> this rank's [n, ...] of the sum."""
    if axis.group is None:
        return x
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    dist.reduce_scatter_single(out, x.contiguous(), group=axis.group)
    return out


def all_to_all(x: Tensor, axis: Axis, received: Sequence[int] | None = None, sent: Sequence[int] | None = None) -> Tensor:
    """Rows ``sent[i]`` go to rank i, ``received[i]`` come from it (equal parts when not given)."""
    if axis.group is None:
        return x
    rows = x.shape[0] if received is None else sum(received)
    out = x.new_empty((rows, *x.shape[1:]))
    dist.all_to_all_single(
        out,
        x.contiguous(),
        list(received) if received is not None else None,
        list(sent) if sent is not None else None,
        group=axis.group,
    )
    return out


def all_reduce_world(x: Tensor) -> Tensor:
    """Sum over every rank of the job, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(x)
    return x


def barrier(axis: Axis, device: torch.device) -> None:
    """Return once every rank of the axis has come here."""
    all_reduce(torch.zeros(1, device=device), axis)
