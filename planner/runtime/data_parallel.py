"""Data parallelism and ZeRO 0-2: parameters and gradients in flat buckets, one collective a bucket (ZeRO-3: ``fully_sharded``).

A bucket holds parameters that are reduced over the same ranks and counted alike. Its gradients are one buffer that autograd adds
into, its parameters views of another, so that neither reduction nor gathering copies anything:

ZeRO 0   all-reduce of the gradients; every rank updates everything
ZeRO 1   reduce-scatter once a step, update of a shard, all-gather of the parameters
ZeRO 2   reduce-scatter after every microbatch into a shard; the full gradient exists for one bucket's backward only, and a bucket
         of matrices ends with its layer

Shards lie over dp_shard x cp (expert parameters: edp_shard), and are summed over dp_replicate (edp_replicate).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial as partial_call
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.runtime.collectives import all_reduce
from planner.runtime.mesh import Axis, Mesh
from planner.runtime.parameter import Block

BUCKET_BYTES = 64 << 20
"""Gradient bytes of a bucket: large enough for bandwidth, small beside what a rank holds."""


@dataclass(frozen=True)
class Piece:
    """A box of a named parameter and the local tensor that holds it (or what belongs to it: gradient, moment)."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Tensor

    def rows(self, low: int, high: int) -> Piece:
        """Rows ``low`` to ``high`` - 1 of it."""
        offsets, sizes = (self.offsets[0] + low, *self.offsets[1:]), (high - low, *self.sizes[1:])
        return Piece(self.name, self.shape, offsets, sizes, self.tensor[low:high])


class Shards(Protocol):
    """What the optimizer updates together: this rank's shards of some parameters, and their reduced gradients.

    ``weight``: 1 / ranks of the job that hold each element; ``decay``: takes weight decay; ``replicate``: the ranks that hold the
    same shards.
    """

    weight: float
    decay: bool
    replicate: Axis

    @property
    def values(self) -> list[Tensor]:
        """The shards in the dtype that the model computes with (or is gathered from)."""
        ...

    @property
    def gradients(self) -> list[Tensor]:
        """The reduced gradients, one for each of ``values``, after ``reduce``."""
        ...

    def clear(self) -> None:
        """Forget the gradients: a step begins."""
        ...

    def collect(self) -> None:
        """Take the gradients of a microbatch whose backward is complete."""
        ...

    def reduce(self) -> None:
        """Sum over every axis that holds a share of the gradient."""
        ...

    def publish(self) -> None:
        """Give the updated shards to whoever computes with them."""
        ...

    def pieces(self, tensors: list[Tensor]) -> Iterator[Piece]:
        """Boxes of the whole parameters that ``tensors`` (shaped as ``values``) hold."""
        ...


@dataclass
class Slot:
    """A parameter's place in its bucket."""

    name: str
    parameter: nn.Parameter
    block: Block
    start: int

    @property
    def count(self) -> int:
        return self.parameter.numel()


class Bucket:
    """Parameters that are reduced and updated together.

    ``shard`` / ``replicate``: the axes gradients are scattered over and summed over; ``partial``: model-parallel axes summed
    first, those of them that hold one weight at both ends of a pipeline (``ends``) once a step; ``weight``: 1 / ranks of the job
    that hold each element after the reduction.
    """

    def __init__(
        self, slots: list[Slot], shard: Axis, replicate: Axis, partial: list[Axis], weight: float, zero: int, wide: torch.dtype
    ) -> None:
        first = slots[0].parameter
        self.slots, self.shard, self.replicate = slots, shard, replicate
        self.partial = [axis for axis in partial if axis.name != "ends"]
        self.ends = [axis for axis in partial if axis.name == "ends"]
        self.weight, self.decay = weight, slots[0].block.decay
        used = slots[-1].start + slots[-1].count
        self.length = -(-used // shard.size) * shard.size
        self.low = self.length // shard.size * shard.rank
        self.high = self.low + self.length // shard.size
        self.wide = wide
        self.parameters = torch.zeros(self.length, dtype=first.dtype, device=first.device)
        keeps = zero < 2 or shard.size == 1
        self.full: Tensor | None = torch.zeros(self.length, dtype=wide, device=first.device) if keeps else None
        self.sharded: Tensor | None = None
        if self.full is None:
            self.sharded = torch.zeros(self.high - self.low, dtype=wide, device=first.device)
        self.direct = self.full is not None and wide == first.dtype
        self._arrived: set[int] = set()
        for slot in slots:
            view = self.parameters[slot.start : slot.start + slot.count].view(slot.parameter.shape)
            view.copy_(slot.parameter.data)
            slot.parameter.data = view
            if self.direct:
                assert self.full is not None
                slot.parameter.grad = self.full[slot.start : slot.start + slot.count].view(slot.parameter.shape)
            else:
                slot.parameter.register_post_accumulate_grad_hook(partial_call(self._arrive, slot))

    @property
    def values(self) -> list[Tensor]:
        return [self.parameters[self.low : self.high]]

    @property
    def gradients(self) -> list[Tensor]:
        if self.sharded is not None:
            return [self.sharded]
        assert self.full is not None
        return [self.full[self.low : self.high]]

    def clear(self) -> None:
        buffer = self.full if self.sharded is None else self.sharded
        assert buffer is not None
        buffer.zero_()

    def collect(self) -> None:
        """Take what no hook saw: a weight-gradient pass of a split backward calls none."""
        if self.direct:
            return
        for slot in self.slots:
            self._take(slot)
        if self.sharded is not None and self.full is not None:
            self._scatter()

    def _arrive(self, slot: Slot, _: Tensor) -> None:
        """A gradient is complete: let its own tensor go at once, and under ZeRO-2 the bucket when it was the last."""
        self._take(slot)
        self._arrived.add(slot.start)
        if self.sharded is not None and len(self._arrived) == len(self.slots):
            self._scatter()

    def _take(self, slot: Slot) -> None:
        """Move a parameter's own gradient into the bucket's wide buffer."""
        grad = slot.parameter.grad
        if grad is None:
            return
        if self.full is None:
            self.full = torch.zeros(self.length, dtype=self.wide, device=grad.device)
        self.full[slot.start : slot.start + slot.count].view(grad.shape).add_(grad)
        slot.parameter.grad = None

    def _scatter(self) -> None:
        """ZeRO-2: reduce what one microbatch gave and let the full buffer go."""
        assert self.full is not None
        assert self.sharded is not None
        for axis in self.partial:
            all_reduce(self.full, axis)
        part = self.full[self.low : self.high]
        dist.reduce_scatter_single(part, self.full, group=self.shard.group)
        self.sharded.add_(part)
        self.full = None
        self._arrived.clear()

    def reduce(self) -> None:
        if self.sharded is not None:
            for axis in (*self.ends, self.replicate):
                all_reduce(self.sharded, axis)
            return
        assert self.full is not None
        for axis in (*self.partial, *self.ends):
            all_reduce(self.full, axis)
        part = self.full[self.low : self.high]
        if self.shard.size > 1:
            dist.reduce_scatter_single(part, self.full, group=self.shard.group)
        all_reduce(part, self.replicate)

    def publish(self) -> None:
        if self.shard.size > 1:
            dist.all_gather_single(self.parameters, self.parameters[self.low : self.high], group=self.shard.group)

    def pieces(self, tensors: list[Tensor]) -> Iterator[Piece]:
        for slot in self.slots:
            low, high = max(self.low, slot.start), min(self.high, slot.start + slot.count)
            if low < high:
                local = tensors[0][low - self.low : high - self.low]
                yield from boxes(slot.name, slot.block, local, low - slot.start)


def boxes(name: str, block: Block, flat: Tensor, start: int) -> Iterator[Piece]:
    """The boxes of the whole parameter that elements ``start ..`` of the flattened block cover (at most 3 for a matrix)."""
    sizes = block.sizes
    if len(sizes) == 1:
        yield Piece(name, block.shape, (block.offsets[0] + start,), (flat.numel(),), flat)
        return
    columns = 1
    for n in sizes[1:]:
        columns *= n
    at = 0
    while at < flat.numel():
        row, inside = divmod(start + at, columns)
        rest = flat.numel() - at
        if inside or rest < columns:
            count = min(columns - inside, rest)
            inner = Block(block.shape[1:], block.offsets[1:], sizes[1:])
            for piece in boxes(name, inner, flat[at : at + count], inside):
                offsets = (block.offsets[0] + row, *piece.offsets)
                yield Piece(name, block.shape, offsets, (1, *piece.sizes), piece.tensor.view(1, *piece.sizes))
        else:
            rows = rest // columns
            count = rows * columns
            box = (rows, *sizes[1:])
            yield Piece(name, block.shape, (block.offsets[0] + row, *block.offsets[1:]), box, flat[at : at + count].view(box))
        at += count


Key = tuple[int, str, bool, tuple[str, ...], int, bool]


def grouped(modules: Iterable[nn.Module], *, by_layer: bool = False) -> dict[Key, list[tuple[str, nn.Parameter, Block]]]:
    """Trained parameters by (chunk, layer, expert, partial, copies, decay): what may share a bucket. One that two chunks share is
    apart: its bucket is reduced after the backwards of both. ``by_layer``: the matrices of each layer are apart."""
    groups: dict[Key, list[tuple[str, nn.Parameter, Block]]] = {}
    seen: set[int] = set()
    modules = list(modules)
    chunks_of = Counter(id(parameter) for module in modules for parameter in module.parameters())
    for number, module in enumerate(modules):
        blocks: dict[str, Block] = module.blocks  # type: ignore[assignment]
        for name, parameter in module.named_parameters():
            block = blocks[name]
            if id(parameter) not in seen and parameter.requires_grad:
                seen.add(id(parameter))
                chunk = number if chunks_of[id(parameter)] == 1 else len(modules)
                layer = layer_of(name) if by_layer and block.decay else ""
                key = (chunk, layer, block.expert, block.partial, block.copies, block.decay)
                groups.setdefault(key, []).append((name, parameter, block))
    return groups


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to, or the module at an end of the model."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first == "layers" else first


def frozen_pieces(modules: Iterable[nn.Module]) -> Iterator[Piece]:
    """The boxes that this rank holds of parameters that are not trained."""
    for module in modules:
        blocks: dict[str, Block] = module.blocks  # type: ignore[assignment]
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                block = blocks[name]
                yield Piece(name, block.shape, block.offsets, block.sizes, parameter.data)


def make_buckets(modules: Iterable[nn.Module], mesh: Mesh, wide: torch.dtype) -> list[Shards]:
    """The buckets of every parameter of the rank's chunks. ``wide`` is the dtype gradients accumulate in."""
    zero = mesh.layout.zero
    out: list[Shards] = []
    for (_, _, expert, partial, copies, _), members in grouped(modules, by_layer=zero == 2).items():
        shard, replicate = shard_axes(mesh, expert, zero)
        weight = 1.0 / (copies * replicate.size * (1 if zero else shard.size))
        axes = [mesh.axis(name) for name in partial]
        for slots in _cut(members, wide):
            out.append(Bucket(slots, shard, replicate, axes, weight, zero, wide))
    return out


def shard_axes(mesh: Mesh, expert: bool, zero: int) -> tuple[Axis, Axis]:
    """(scattered over, summed over)."""
    if zero == 0:
        return Axis("none", ranks=(mesh.rank,)), mesh.axis("edp") if expert else mesh.dp_cp
    return (mesh.axis("edp_shard"), mesh.axis("edp_replicate")) if expert else (mesh.axis("dp_shard_cp"), mesh.axis("dp_replicate"))


def _cut(members: list[tuple[str, nn.Parameter, Block]], wide: torch.dtype) -> Iterator[list[Slot]]:
    """Members in order of the model, cut where a bucket is full."""
    limit = BUCKET_BYTES // wide.itemsize
    slots: list[Slot] = []
    start = 0
    for name, parameter, block in members:
        if slots and start + parameter.numel() > limit:
            yield slots
            slots, start = [], 0
        slots.append(Slot(name, parameter, block, start))
        start += parameter.numel()
    if slots:
        yield slots
