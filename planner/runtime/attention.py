"""Attention: grouped-query heads cut over tp, rotary positions, and the call into the kernel.

Saved for backward: the block's gathered input (by the projections), q, k, v after rotation, the output and one number a query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.runtime import kernels
from planner.runtime.norms import Norm, wanted, zeros_like
from planner.runtime.parameter import Block, parameter, sliced
from planner.runtime.query_norms import WideNorm
from planner.runtime.tensor import Linear, TensorParallel, split_inputs, split_outputs
from profiles.model import Attention, ModelSpec


@dataclass(frozen=True)
class Tokens:
    """Which tokens the rank's activations are: ``spans`` of positions, and the document of each ([batch, tokens]) where packed."""

    spans: tuple[int, ...]
    documents: Tensor | None = None

    @property
    def count(self) -> int:
        return sum(self.spans[1::2])

    def positions(self, device: torch.device) -> Tensor:
        runs = zip(self.spans[::2], self.spans[1::2], strict=True)
        return torch.cat([torch.arange(a, a + n, device=device) for a, n in runs])


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, spans: Sequence[int],
        rule: tuple[int, int, float],
    ) -> Tensor:  # fmt: skip
        out, lse = kernels.attend(q, k, v, documents, documents, spans, spans, *rule)
        out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.rest = (documents, documents, spans, spans, *rule)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (q, k, v, out, lse, sinks) = grads[0].contiguous(), ctx.saved_tensors
        sink_grad = grad_of_sinks(grad, out, lse, sinks)
        if sinks is not None and not wanted(ctx, 0):  # the weight's part of a split backward
            return None, None, None, sink_grad, None, None, None
        return (*kernels.attend_grad(grad, q, k, v, out, lse, *ctx.rest), sink_grad, None, None, None)


def attend(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, window: int, chunk: int, scale: float, sinks: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Causal attention of one rank's tokens among themselves: [s, b, heads, width] -> [s, b, heads, v width].

    ``sinks`` [heads]: a logit that takes part in each row's softmax and gives nothing (gpt-oss).
    """
    return _Attend.apply(q, k, v, sinks, tokens.documents, tokens.spans, (window, chunk, scale))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention's result and logsumexp [b, heads, s] with one more logit in every row. Backward from these two is that of attention:
    the sink's value is zero, so it changes no other gradient but through them."""
    if sinks is None:
        return out, lse
    both = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    return (out * (lse - both).exp().permute(2, 0, 1).unsqueeze(-1)).to(out.dtype), both


def grad_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Minus the sink's probability times what the row's gradient and result agree by, summed over rows."""
    if sinks is None:
        return None
    share = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp()
    return -(share * (grad * out).sum(-1, dtype=lse.dtype).permute(1, 2, 0)).sum((0, 2)).to(sinks.dtype)


class _Rotate(torch.autograd.Function):
    """Rotary embedding is linear: nothing of the input is saved, backward turns the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
        ctx.turn = (cos, sin, pairs)
        width = 2 * cos.shape[-1]
        a, b = (x[..., 0:width:2], x[..., 1:width:2]) if pairs else (x[..., : width // 2], x[..., width // 2 : width])
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., width:]], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin, pairs = ctx.turn
        width, g = 2 * cos.shape[-1], grads[0]
        a, b = g[..., : width // 2], g[..., width // 2 : width]
        back = [a * cos + b * sin, b * cos - a * sin]
        turned = [torch.stack(back, -1).flatten(-2)] if pairs else back
        return torch.cat([*turned, g[..., width:]], -1), None, None, None


class Rotary:
    """cos and sin of the positions of a rank's tokens, [s, 1, 1, rotated / 2], made once and kept.

    ``pairs``: neighbours 2i, 2i+1 turn together (DeepSeek), their results placed in halves: a permutation that queries and keys
    share. Else halves turn together (Llama).
    """

    def __init__(self, width: int, model: ModelSpec, fraction: float = 1.0, pairs: bool = False) -> None:
        self.rotated = int(width * fraction) // 2 * 2
        self.theta, self.scaling, self.pairs = model.rope_theta, model.rope_scaling, pairs
        self._made: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def frequencies(self) -> Tensor:
        """Radians a position of each pair, scaled as the model says (fp64)."""
        plain = self.theta ** -(torch.arange(0, self.rotated, 2, dtype=torch.float64) / self.rotated)
        scaling = self.scaling
        if scaling is None:
            return plain
        if scaling.kind == "linear":
            return plain / scaling.factor
        turns = scaling.original * plain / (2 * math.pi)
        if scaling.kind == "llama3":
            kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        else:
            low, high = (self._place(scaling.original, rotations) for rotations in (scaling.fast, scaling.slow))
            first, last = max(math.floor(low), 0), min(math.ceil(high), self.rotated - 1)
            kept = 1 - ((torch.arange(len(plain), dtype=torch.float64) - first) / (last - first or 0.001)).clamp(0, 1)
        return plain * kept + plain / scaling.factor * (1 - kept)

    def _place(self, positions: int, rotations: float) -> float:
        """The pair that turns ``rotations`` times over ``positions``."""
        return self.rotated * math.log(positions / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Rotate the first ``rotated`` of the head width of [s, b, heads, width]."""
        key = (tokens.spans, x.dtype, x.device)
        if key not in self._made:
            angles = tokens.positions(x.device).to(torch.float64)[:, None, None, None] * self.frequencies().to(x.device)
            size = 1.0 if self.scaling is None else self.scaling.attention
            self._made[key] = ((angles.cos() * size).to(x.dtype), (angles.sin() * size).to(x.dtype))
        return _Rotate.apply(x, *self._made[key], self.pairs)


class SelfAttention(nn.Module):
    """Multi-head, grouped-query or multi-query attention. Key/value heads are repeated on neighbouring ranks where tp exceeds them."""

    entered = True

    def __init__(
        self, spec: Attention, model: ModelSpec, tp: TensorParallel, core: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec, self.tp, self.core = spec, tp, core
        self.heads = spec.heads // tp.size
        self.copies = max(1, tp.size // spec.kv_heads)
        self.kv_heads = max(1, spec.kv_heads // tp.size)
        hidden, width, value = model.hidden, spec.head_dim, spec.value_width
        self.q_proj = split_outputs(hidden, spec.heads * width * (2 if spec.output_gate else 1), spec.qkv_bias, tp, dtype, device)
        self.k_proj = self._key_values(hidden, spec.kv_heads * width, dtype, device)
        self.v_proj = self._key_values(hidden, spec.kv_heads * value, dtype, device)
        std = 0.02 / (2 * model.num_layers) ** 0.5
        self.o_proj = split_inputs(spec.heads * value, hidden, spec.output_bias, tp, dtype, device, std=std)
        self.q_norm: Norm | WideNorm | None = None
        self.k_norm: Norm | WideNorm | None = None
        if spec.qk_norm == "head":
            every = {"copies": tp.size, "partial": ("tp",) if tp.size > 1 else ()}
            self.q_norm = Norm(model.norm, _vector(width, every), model.norm_eps, spec.qk_norm_bias, True, dtype, device)
            self.k_norm = Norm(model.norm, _vector(width, every), model.norm_eps, spec.qk_norm_bias, True, dtype, device)
        elif spec.qk_norm != "none":
            self.q_norm = self._wide_norm(model, sliced((spec.heads * width,), 0, tp.size, tp.rank, init="ones"), dtype, device)
            self.k_norm = self._wide_norm(model, self._of_keys(spec.kv_heads * width, init="ones"), dtype, device)
        self.sinks = parameter(sliced((spec.heads,), 0, tp.size, tp.rank, init="zeros"), dtype, device) if spec.sinks else None
        self.rotary = Rotary(width, model, model.rope_fraction) if spec.rotary and not model.learned_positions else None
        self.rule = (spec.window or 0, spec.chunk or 0, width**-0.5)

    def _key_values(self, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> Linear:
        bias = self._of_keys(outputs, init="zeros") if self.spec.qkv_bias else None
        return Linear(self._of_keys(outputs, inputs), bias, dtype, device)

    def _of_keys(self, *shape: int, **facts: Any) -> Block:
        """A parameter cut by key/value heads, which neighbouring ranks share where there are more ranks."""
        parts, place = self.tp.size // self.copies, self.tp.rank // self.copies
        held = {"copies": self.copies, "partial": (f"kv{self.copies}",) if self.copies > 1 else ()}
        return sliced(shape, 0, parts, place, **held, **facts)

    def _wide_norm(self, model: ModelSpec, block: Block, dtype: torch.dtype, device: torch.device) -> WideNorm:
        bias = zeros_like(block) if self.spec.qk_norm_bias else None
        return WideNorm(model.norm, self.spec.qk_norm == "full", block, bias, model.norm_eps, self.tp.axis, dtype, device)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """[s, b, hidden], entered -> [s (/tp under SP), b, hidden]."""
        s, b, _ = x.shape
        q, gate = self.q_proj(x).view(s, b, self.heads, -1), None
        if self.spec.output_gate:
            q, gate = (part.contiguous() for part in q.chunk(2, -1))
        k = self.k_proj(x).view(s, b, self.kv_heads, -1)
        v = self.v_proj(x).view(s, b, self.kv_heads, -1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, tokens), self.rotary(k, tokens)
        seen = self.core(q, k, v, tokens, *self.rule, self.sinks)
        return self.o_proj((seen if gate is None else seen * gate.sigmoid()).flatten(2))


def _vector(width: int, facts: dict[str, Any]) -> Block:
    return Block((width,), (0,), (width,), init="ones", **facts)
