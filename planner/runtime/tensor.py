"""Tensor parallelism, with and without sequence parallelism: the sharded layers, and their collectives as autograd functions.

A block is entered once (``enter``) and left once (``leave``):

=====================  ============================  ============================
                       without SP                    with SP (tokens cut over tp)
=====================  ============================  ============================
enter, forward         nothing                       all-gather of the tokens
enter, backward        all-reduce                    reduce-scatter
leave, forward         all-reduce                    reduce-scatter
leave, backward        nothing                       all-gather
=====================  ============================  ============================

So a transformer layer costs 2 all-reduces forward and 2 backward (Megatron-LM, arXiv:1909.08053), or the same bytes as
reduce-scatter + all-gather (arXiv:2205.05198). The gathered input is kept for backward, not gathered again.
Activations are [sequence, batch, hidden], so both sequence collectives work on dim 0 without a copy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.runtime.collectives import all_gather, all_reduce, reduce_scatter
from planner.runtime.mesh import Axis
from planner.runtime.parameter import Block, parameter, part, sliced, whole


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0].contiguous(), ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grads[0], ctx.axis), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.axis), None


class TensorParallel:
    """The tensor-parallel axis and whether tokens are cut over it between blocks (SP)."""

    def __init__(self, axis: Axis, sequence: bool) -> None:
        self.axis, self.size, self.rank, self.sequence = axis, axis.size, axis.rank, sequence and axis.size > 1

    def enter(self, x: Tensor) -> Tensor:
        """Every token, ready for a layer whose output is cut."""
        if self.size == 1:
            return x
        return _Gather.apply(x, self.axis) if self.sequence else _Copy.apply(x, self.axis)

    def leave(self, x: Tensor) -> Tensor:
        """Sum of the ranks' partial results, cut into tokens again under SP."""
        if self.size == 1:
            return x
        return _Scatter.apply(x, self.axis) if self.sequence else _Reduce.apply(x, self.axis)

    def replicated(self, *shape: int, **facts: Any) -> Block:
        """A parameter every tp rank holds and applies to its own tokens (norms, biases after ``leave``)."""
        return whole(*shape, copies=self.size, partial=("tp",) if self.sequence else (), **facts)


class Linear(nn.Module):
    """x W^T + b with the weight that ``block`` says, and what an adapter adds (``adapters``); collectives are the caller's
    (``enter``, ``leave``)."""

    scale = 1.0

    def __init__(self, block: Block, bias: Block | None, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(block, dtype, device)
        self.bias = parameter(bias, dtype, device) if bias is not None else None
        self.lora_a: nn.Parameter | None = None
        self.lora_b: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(x, F.linear(x, self.weight, self.bias))

    def adapted(self, x: Tensor, y: Tensor) -> Tensor:
        """``y`` and what the adapter makes of ``x``."""
        if self.lora_a is None or self.lora_b is None:
            return y
        return y + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scale


class OutputLinear(Linear):
    """The second layer of a pair: its input is cut, its partial results are summed by ``leave``, its bias is added once, after."""

    def __init__(self, block: Block, bias: Block | None, tp: TensorParallel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(block, bias, dtype, device)
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        y = self.tp.leave(self.adapted(x, F.linear(x, self.weight)))
        return y if self.bias is None else y + self.bias


def split_outputs(
    inputs: int, outputs: int, bias: bool, tp: TensorParallel, dtype: torch.dtype, device: torch.device, **facts: Any
) -> Linear:
    """Output-split (Megatron column-parallel): each rank computes its part of the outputs."""
    weight = sliced((outputs, inputs), 0, tp.size, tp.rank, **facts)
    vector = sliced((outputs,), 0, tp.size, tp.rank, init="zeros") if bias else None
    return Linear(weight, vector, dtype, device)


def split_inputs(
    inputs: int, outputs: int, bias: bool, tp: TensorParallel, dtype: torch.dtype, device: torch.device, **facts: Any
) -> OutputLinear:
    """Input-split (Megatron row-parallel): each rank multiplies its part of the inputs."""
    weight = sliced((outputs, inputs), 1, tp.size, tp.rank, **facts)
    vector = tp.replicated(outputs, init="zeros") if bias else None
    return OutputLinear(weight, vector, tp, dtype, device)


class Embedding(nn.Module):
    """Vocabulary-parallel lookup: [batch, tokens] -> [tokens, batch, hidden], tokens cut over tp under SP."""

    def __init__(self, vocab: int, hidden: int, tp: TensorParallel, dtype: torch.dtype, device: torch.device, **facts: Any) -> None:
        super().__init__()
        self.tp = tp
        self.start, self.count = part(vocab, tp.size, tp.rank)
        self.weight = parameter(sliced((vocab, hidden), 0, tp.size, tp.rank, **facts), dtype, device)

    def forward(self, tokens: Tensor, weight: Tensor | None = None) -> Tensor:
        ids, weight = tokens.t(), self.weight if weight is None else weight
        if self.tp.size == 1:
            return F.embedding(ids, weight)
        inside = (ids >= self.start) & (ids < self.start + self.count)
        if self.count == 0:
            local = weight.new_zeros(*ids.shape, weight.shape[1]) + weight.sum()
        else:
            local = F.embedding((ids - self.start).clamp(0, self.count - 1), weight) * inside.unsqueeze(-1)
        return self.tp.leave(local)
