"""Expert parallelism: tokens to the ranks that hold their experts, and results back to their own order.

Each rank routes its own tokens. Their copies are sorted by expert, exchanged over ep with uneven all-to-alls, and, where experts
are cut over etp, gathered over etp; the experts' partial results go the same way back. Sizes are read on the host once a layer:
a rank without a token takes part in every collective with an empty buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.runtime.collectives import all_gather, all_to_all, reduce_scatter
from planner.runtime.mesh import Axis, Mesh
from planner.runtime.mlp import act, activation
from planner.runtime.parameter import Block, parameter, part
from profiles.errors import InputError
from profiles.model import Moe


class _Exchange(torch.autograd.Function):
    """Rows ``sent[i]`` to rank i of the axis, ``received[i]`` from it; backward the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sent: list[int], received: list[int]) -> Tensor:
        ctx.way = (axis, sent, received)
        return all_to_all(x, axis, received, sent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        axis, sent, received = ctx.way
        return all_to_all(grads[0], axis, sent, received), None, None, None


class _GatherRows(torch.autograd.Function):
    """Every rank's rows to all (``counts`` rows each); backward sums the gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
        ctx.way = (axis, counts)
        return _gather_rows(x, axis, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _scatter_rows(grads[0], *ctx.way), None, None


class _ScatterRows(torch.autograd.Function):
    """Sum of the ranks' partial rows, each rank's own back to it; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
        ctx.way = (axis, counts)
        return _scatter_rows(x, axis, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gather_rows(grads[0].contiguous(), *ctx.way), None, None


class Place(torch.autograd.Function):
    """Row i of ``x`` to row ``index[i]`` of ``count`` rows, zeros elsewhere. Saves the index (``index_copy`` saves the rows)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index)
        return x.new_zeros(count, *x.shape[1:]).index_copy_(0, index, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


def _gather_rows(x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    if len(set(counts)) == 1:
        return all_gather(x, axis)
    return all_to_all(x.repeat(axis.size, 1), axis, counts, [len(x)] * axis.size)


def _scatter_rows(x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    if len(set(counts)) == 1:
        return reduce_scatter(x, axis)
    own = counts[axis.rank]
    return all_to_all(x, axis, [own] * axis.size, counts).view(axis.size, own, x.shape[1]).sum(0)


@dataclass(frozen=True)
class Route:
    """How one layer's rows travel. ``order``: rows sorted by expert; sizes of each exchange, by rank."""

    order: Tensor
    sent: list[int]
    received: list[int]
    gathered: list[int]
    """Rows that each etp rank received."""
    arrange: Tensor | None
    """Arrived rows -> rows sorted by local expert (None where they are)."""
    per_expert: list[int]
    """Rows of each local expert, of all etp ranks."""


class Dispatcher:
    """Moves rows between the ranks of a layer's experts."""

    def __init__(self, mesh: Mesh, experts: int) -> None:
        self.ep, self.etp, self.experts = mesh.axis("ep"), mesh.axis("etp"), experts
        if experts % self.ep.size:
            raise InputError("ep", self.ep.size, f"must divide the {experts} experts")
        self.local = experts // self.ep.size

    def plan(self, expert: Tensor) -> Route:
        """The route of rows whose experts are ``expert`` ([rows]; ``experts`` = dropped, which sort last and stay)."""
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=self.experts)[: self.experts]
        arriving = all_to_all(counts, self.ep).view(self.ep.size, self.local)
        everyone = all_gather(arriving.unsqueeze(0).contiguous(), self.etp)  # [etp, ep, local]
        sizes = self.read(torch.cat((counts.view(self.ep.size, self.local).sum(1), everyone.flatten())))
        sent = sizes[: self.ep.size]
        blocks = np.array(sizes[self.ep.size :]).reshape(self.etp.size, self.ep.size, self.local)
        received = blocks[self.etp.rank].sum(1).tolist()
        per_expert = blocks.sum((0, 1)).tolist()
        arrange = None
        if blocks[..., 0].size > 1:
            owner = np.tile(np.arange(self.local), self.etp.size * self.ep.size).repeat(blocks.ravel())
            arrange = torch.tensor(owner.argsort(kind="stable"), device=expert.device)
        kept = order[: sum(sent)]
        return Route(kept, sent, received, blocks.sum((1, 2)).tolist(), arrange, per_expert)

    def read(self, sizes: Tensor) -> list[int]:
        """Rows sent to each ep rank, then rows that arrive, by (etp, ep, local expert): what the host waits for."""
        found: list[int] = sizes.tolist()
        return found

    def dispatch(self, rows: Tensor, route: Route) -> Tensor:
        """Rows in ``route.order`` -> the rows of this rank's experts, sorted by expert."""
        if self.ep.size > 1:
            rows = _Exchange.apply(rows, self.ep, route.sent, route.received)
        if self.etp.size > 1:
            rows = _GatherRows.apply(rows, self.etp, route.gathered)
        return rows if route.arrange is None else rows.index_select(0, route.arrange)

    def combine(self, rows: Tensor, route: Route) -> Tensor:
        """The way back: results in ``route.order``."""
        if route.arrange is not None:
            rows = Place.apply(rows, route.arrange, len(rows))
        if self.etp.size > 1:
            rows = _ScatterRows.apply(rows, self.etp, route.gathered)
        if self.ep.size > 1:
            rows = _Exchange.apply(rows, self.ep, route.received, route.sent)
        return rows


class Experts(nn.Module):
    """This rank's experts: rows sorted by expert in, results out (partial sums under etp)."""

    scale = 1.0

    def __init__(
        self, spec: Moe, hidden: int, layers: int, mesh: Mesh, recompute: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.kind, self.gated, self.recompute = activation(spec.activation), spec.gated, recompute
        ep, etp = mesh.axis("ep"), mesh.axis("etp")

        first, count = part(spec.experts, ep.size, ep.rank)

        def made(outputs: int, inputs: int, dim: int, std: float) -> nn.Parameter:
            shape = (spec.experts, outputs, inputs)
            low, width = part(shape[dim], etp.size, etp.rank)
            offsets, sizes = [first, 0, 0], [count, outputs, inputs]
            offsets[dim], sizes[dim] = low, width
            return parameter(Block(shape, tuple(offsets), tuple(sizes), expert=True, std=std), dtype, device)

        def bias(outputs: int, cut: bool) -> nn.Parameter | None:
            if not spec.bias:
                return None
            low, width = part(outputs, etp.size, etp.rank) if cut else (0, outputs)
            held = {"copies": 1, "partial": ()} if cut else {"copies": etp.size, "partial": ("etp",) if etp.size > 1 else ()}
            block = Block((spec.experts, outputs), (first, low), (count, width), expert=True, init="zeros", decays=False, **held)
            return parameter(block, dtype, device)

        if spec.gated:
            self.gate_proj = made(spec.width, hidden, 1, 0.02)
        self.up_proj = made(spec.width, hidden, 1, 0.02)
        self.down_proj = made(hidden, spec.width, 2, 0.02 / (2 * layers) ** 0.5)
        self.gate_proj_bias = bias(spec.width, True) if spec.gated else None
        self.up_proj_bias, self.down_proj_bias = bias(spec.width, True), bias(hidden, False)
        self.adds_down_bias = etp.rank == 0

    def forward(self, x: Tensor, per_expert: list[int]) -> Tensor:
        up = self._linear(x, "up_proj", per_expert)
        first, second = (self._linear(x, "gate_proj", per_expert), up) if self.gated else (up, None)
        return self.recompute.through(
            "moe_act", act, (first, second, self.kind), lambda made: self._linear(made, "down_proj", per_expert)
        )

    def _linear(self, x: Tensor, name: str, per_expert: list[int]) -> Tensor:
        """Each expert's weight, and its adapter where there is one (``adapters``)."""
        y, a = grouped_linear(x, getattr(self, name), per_expert), getattr(self, f"{name}_lora_a", None)
        if (bias := getattr(self, f"{name}_bias")) is not None:
            rows = bias.repeat_interleave(torch.tensor(per_expert, device=x.device), 0, output_size=len(x))
            y = y + (rows if name != "down_proj" or self.adds_down_bias else rows * 0)  # partial sums: one rank of etp adds it
        if a is None:
            return y
        inner = grouped_linear(x, a, per_expert)
        return y + grouped_linear(inner, getattr(self, f"{name}_lora_b"), per_expert) * self.scale


def grouped_linear(x: Tensor, weight: Tensor, rows: list[int]) -> Tensor:
    """x_e W_e^T for consecutive runs of ``rows[e]`` rows: one grouped product where the dtype has one, else an expert at a time."""
    if x.dtype == torch.bfloat16 and len(x) and all(n % 8 == 0 for n in weight.shape[1:]):
        ends = torch.tensor(rows, device=x.device).cumsum(0).to(torch.int32)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    if len(rows) == 1:
        return F.linear(x, weight[0])
    return torch.cat([F.linear(part, w) for part, w in zip(x.split(rows), weight.unbind(0), strict=True)])
