"""A mixture of experts: the router, its balance, the routed experts (``expert``) and the shared ones.

What selects an expert and what weighs its result are kept apart: the selection bias only selects (DeepSeek-V3, arXiv:2412.19437).
The default auxiliary loss is per sequence (the same report, equations 17-20): ``alpha sum_i f_i P_i`` with the share f of a
sequence's tokens that chose expert i and the mean P of its normalised scores, averaged over the batch's sequences. Counts are
summed over the ranks that hold a sequence together, so no layout changes it. ``switch`` takes a micro batch for a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.runtime.collectives import all_gather, all_reduce
from planner.runtime.expert import Dispatcher, Experts, Place
from planner.runtime.mesh import Axis, Mesh
from planner.runtime.mlp import MlpBlock
from planner.runtime.parameter import parameter, whole
from planner.runtime.tensor import TensorParallel
from profiles.errors import InputError
from profiles.model import Mlp, Moe


@dataclass
class Balance:
    """How the routers of a rank are kept balanced, and what they did in this step. ``weight``: of one sequence in the batch."""

    form: str = "sequence"
    coefficient: float = 1e-3
    weight: float = 1.0
    recording: bool = True
    """False while a layer is recomputed: nothing is counted twice."""
    loss: Tensor | float = 0.0
    loads: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> tokens of this rank that chose each expert."""

    def begin(self) -> None:
        self.loss, self.loads = 0.0, {}

    def everyone(self, mesh: Mesh) -> dict[int, Tensor]:
        """Layer -> tokens of the whole batch that chose each expert, for this stage's layers (one sum over dp, cp and tp)."""
        if not self.loads:
            return {}
        layers = sorted(self.loads)
        together = torch.stack([self.loads[i] for i in layers])
        return dict(zip(layers, all_reduce(all_reduce(together, mesh.dp_cp), mesh.tp), strict=True))


class _AddLoss(torch.autograd.Function):
    """Passes ``x`` on; in backward the auxiliary loss gets a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones(
            (), dtype=torch.float64 if grads[0].dtype == torch.float64 else torch.float32, device=grads[0].device
        )


class _Own(torch.autograd.Function):
    """Without SP every tp rank holds all tokens: each takes its own part, and gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.chunk(axis.size)[axis.rank].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.axis), None


class _All(torch.autograd.Function):
    """The way back: parts to all, each rank's own gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.axis.size)[ctx.axis.rank].contiguous(), None


class Router(nn.Module):
    """Scores of every expert for a token, the ``top_k`` chosen and their weights. Computed in fp32 (fp64) whatever the model's dtype."""

    e_score_correction_bias: Tensor

    def __init__(self, spec: Moe, hidden: int, tp: TensorParallel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        facts: dict[str, Any] = {"copies": tp.size, "partial": ("tp",) if tp.size > 1 else ()}
        self.weight = parameter(whole(spec.experts, hidden, **facts), dtype, device)
        self.bias = parameter(whole(spec.experts, init="zeros", **facts), dtype, device) if spec.router_bias else None
        if spec.selection_bias:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            self.register_buffer("e_score_correction_bias", torch.zeros(spec.experts, dtype=wide, device=device))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, hidden] -> experts [tokens, k], weights [tokens, k], scores normalised to sum 1 [tokens, experts]."""
        spec = self.spec
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        bias = None if self.bias is None else self.bias.to(wide)
        logits = F.linear(x.to(wide), self.weight.to(wide), bias)
        scores = logits.softmax(-1) if spec.router == "softmax" else logits.sigmoid()
        choice = scores.detach()
        if spec.selection_bias:
            choice = choice + self.e_score_correction_bias
        if spec.groups > 1:
            choice = self._limited(choice)
        experts = choice.topk(spec.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if spec.normalise_top_k:
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if spec.router == "sigmoid" else 0.0))
        normal = scores if spec.router == "softmax" else scores / scores.sum(-1, keepdim=True)
        return experts, weights * spec.scaling, normal

    def move_bias(self, loads: Tensor, rate: float) -> None:
        """Raise the selection bias of experts below the mean load, lower that of those above (DeepSeek-V3, section 2.1.2)."""
        self.e_score_correction_bias.add_(rate * torch.sign(loads.mean() - loads).to(self.e_score_correction_bias))

    def _limited(self, choice: Tensor) -> Tensor:
        """Scores with every group but the ``top_groups`` best masked: by its best expert, or by its two best where a bias selects."""
        spec = self.spec
        grouped = choice.unflatten(-1, (spec.groups, -1))
        value = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1) if spec.selection_bias else grouped.amax(-1)
        best = value.topk(spec.top_groups, -1).indices
        keep = torch.zeros_like(value, dtype=torch.bool).scatter_(1, best, True)
        return grouped.masked_fill(~keep.unsqueeze(-1), float("-inf")).flatten(-2)


class MoeBlock(nn.Module):
    """[s (/tp under SP), b, hidden] -> the same."""

    entered = False

    def __init__(
        self, spec: Moe, hidden: int, layers: int, index: int, mesh: Mesh, tp: TensorParallel, capacity: float, balance: Balance,
        recompute: Any, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec, self.tp, self.mesh, self.capacity, self.balance, self.index, self.recompute = (
            spec,
            tp,
            mesh,
            capacity,
            balance,
            index,
            recompute,
        )
        self.gate = Router(spec, hidden, tp, dtype, device)
        self.experts = Experts(spec, hidden, layers, mesh, recompute, dtype, device)
        self.dispatcher = Dispatcher(mesh, spec.experts)
        if spec.shared_width:
            shared = Mlp(width=spec.shared_width, gated=spec.gated, bias=spec.shared_bias, activation=spec.activation)
            self.shared_experts = MlpBlock(shared, hidden, layers, tp, recompute, dtype, device)
        if spec.shared_gate:
            self.shared_expert_gate = parameter(tp.replicated(1, hidden), dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        out = self._routed(x)
        if not self.spec.shared_width:
            return out
        shared = self.recompute("shared_experts", lambda one: self.shared_experts(self.tp.enter(one)), x)
        if self.spec.shared_gate:
            shared = shared * F.linear(x, self.shared_expert_gate).sigmoid()
        return out + shared

    def _routed(self, x: Tensor) -> Tensor:
        """Each rank routes its own tokens."""
        apart = self.tp.size > 1 and not self.tp.sequence
        if apart:
            if len(x) % self.tp.size:
                raise InputError(
                    "seq_len", len(x), f"tokens of a rank must be a multiple of tp = {self.tp.size} in a mixture of experts"
                )
            x = _Own.apply(x, self.tp.axis)
        s, b, h = x.shape
        rows = x.reshape(s * b, h)
        experts, weights, scores = self.gate(rows)
        chosen = self._within_capacity(experts)
        route = self.dispatcher.plan(chosen.flatten())
        k = self.spec.top_k
        results = self.dispatcher.combine(
            self.experts(self.dispatcher.dispatch(rows[route.order // k], route), route.per_expert), route
        )
        placed = Place.apply(results, route.order, s * b * k)
        out = (placed.view(s * b, k, h) * weights.to(rows.dtype).unsqueeze(-1)).sum(1).view(s, b, h)
        loss = self._balance(experts.view(s, b, k), scores.view(s, b, -1))
        if loss is not None:
            out = _AddLoss.apply(out, loss)
        return _All.apply(out, self.tp.axis) if apart else out

    def _within_capacity(self, experts: Tensor) -> Tensor:
        """Experts with those beyond their capacity marked dropped (first come; capacity x tokens x k / experts of this rank)."""
        if not self.capacity:
            return experts
        limit = math.ceil(self.capacity * experts.numel() / self.spec.experts)
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.spec.experts)
        place = torch.empty_like(flat)
        place[order] = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[flat[order]]
        return torch.where(place < limit, flat, self.spec.experts).view_as(experts)

    def _balance(self, experts: Tensor, scores: Tensor) -> Tensor | None:
        """Count the choices; this rank's share of the auxiliary loss (the sum over ranks is the whole)."""
        s, b, k = experts.shape
        count = self.spec.experts
        per_sequence = torch.zeros(b, count, dtype=scores.dtype, device=scores.device)
        flat = experts.transpose(0, 1).reshape(b, s * k)
        per_sequence.scatter_add_(1, flat, torch.ones_like(flat, dtype=scores.dtype))
        balance = self.balance
        if balance.recording:
            balance.loads[self.index] = balance.loads.get(self.index, 0) + per_sequence.sum(0).detach()
        if not balance.coefficient or balance.form == "none":
            return None
        tokens = s * self.mesh.cp.size * self.tp.size
        frequency = all_reduce(all_reduce(per_sequence, self.tp.axis), self.mesh.cp) * count / (k * tokens)
        score = scores.sum(0) / tokens
        if balance.form == "switch":
            frequency, score, weight = frequency.mean(0), score.mean(0), balance.weight * b
        else:
            weight = balance.weight
        loss = balance.coefficient * weight * (frequency * score).sum()
        if balance.recording:
            balance.loss = balance.loss + loss.detach().double()
        return loss
