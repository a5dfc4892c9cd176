"""The dense feed-forward, gated or plain, cut over tp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from planner.runtime import kernels
from planner.runtime.tensor import TensorParallel, split_inputs, split_outputs
from profiles.errors import InputError
from profiles.model import Mlp

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "swiglu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_tanh": "gelu_tanh", "geglu": "gelu", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
"""Hugging Face's names -> the kernels' names."""


def activation(name: str) -> str:
    """The kernel's name of an activation. Raises InputError for one the runtime does not have."""
    if name not in ACTIVATIONS:
        raise InputError("activation", name, f"the runtime has {', '.join(sorted(set(ACTIVATIONS.values())))}", "silu")
    return ACTIVATIONS[name]


class _Gated(torch.autograd.Function):
    """act(gate) * up; saves gate and up, not the product of either."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return kernels.swiglu(gate, up, kind)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return (*kernels.swiglu_backward(grads[0], *ctx.saved_tensors, ctx.kind), None)


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return kernels.activate(x, kind)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return kernels.activate_backward(grads[0], ctx.saved_tensors[0], ctx.kind), None


def act(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    """The inner activation of a feed-forward: act(gate) * up, or act(gate) where it is not gated."""
    return _Activate.apply(gate, kind) if up is None else _Gated.apply(gate, up, kind)


class MlpBlock(nn.Module):
    """[tokens, ..., hidden], entered -> [tokens (/tp under SP), ..., hidden]. Saves its input, gate, up and their product (each
    projection's own input)."""

    entered = True

    def __init__(
        self, spec: Mlp, hidden: int, layers: int, tp: TensorParallel, recompute: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.tp, self.kind, self.recompute = tp, activation(spec.activation), recompute
        if spec.gated:
            self.gate_proj = split_outputs(hidden, spec.width, spec.bias, tp, dtype, device)
        self.up_proj = split_outputs(hidden, spec.width, spec.bias, tp, dtype, device)
        self.down_proj = split_inputs(spec.width, hidden, spec.bias, tp, dtype, device, std=0.02 / (2 * layers) ** 0.5)
        self.gated = spec.gated

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        first, second = (self.gate_proj(x), up) if self.gated else (up, None)
        return self.recompute.through("mlp_act", act, (first, second, self.kind), self.down_proj)
