"""Where a rank's part of a parameter lies in the whole, and its initial values.

Values come from (seed, name, block of rows) alone: each rank makes only what it holds, and every layout starts equal.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

BLOCK_ELEMENTS = 1 << 16
"""Elements that one generator state covers: what a rank makes too much of at a shard's edges."""


@dataclass(frozen=True)
class Block:
    """The box ``offsets, sizes`` that this rank holds of a parameter of ``shape``.

    ``copies``: ranks of the model-parallel axes that hold this same box (each element counts once in the gradient norm);
    ``partial``: axes over which each such rank has only its own share of the gradient, to be summed; ``expert``: lives on the
    expert mesh; ``decay``: takes weight decay.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    copies: int = 1
    partial: tuple[str, ...] = ()
    expert: bool = False
    init: Literal["normal", "ones", "zeros"] = "normal"
    std: float = 0.02
    decays: bool | None = None
    """Whether weight decay applies; None: to what starts from noise, and to matrices."""

    @property
    def decay(self) -> bool:
        return (self.init == "normal" or len(self.shape) > 1) if self.decays is None else self.decays


def whole(*shape: int, **facts: object) -> Block:
    """A parameter that each rank holds all of."""
    return Block(shape, (0,) * len(shape), shape, **facts)  # type: ignore[arg-type]


def part(length: int, size: int, rank: int) -> tuple[int, int]:
    """(start, count) of part ``rank`` when ``length`` is cut into ``size`` parts, the last ones shorter."""
    step = math.ceil(length / size)
    start = min(step * rank, length)
    return start, min(step, length - start)


def sliced(shape: tuple[int, ...], dim: int, size: int, rank: int, **facts: object) -> Block:
    """Part ``rank`` of ``size`` of a parameter cut along ``dim``."""
    start, count = part(shape[dim], size, rank)
    offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
    sizes = tuple(count if d == dim else n for d, n in enumerate(shape))
    return Block(shape, offsets, sizes, **facts)  # type: ignore[arg-type]


def parameter(block: Block, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An empty parameter of the block's size, with the block as its attribute ``block``."""
    made = nn.Parameter(torch.empty(block.sizes, dtype=dtype, device=device))
    made.block = block  # type: ignore[attr-defined]
    return made


def blocks_of(module: nn.Module) -> dict[str, Block]:
    """Name -> block of every parameter of ``module`` (before FSDP replaces the parameters)."""
    return {name: p.block for name, p in module.named_parameters()}  # type: ignore[attr-defined]


@torch.no_grad()
def fill(local: Tensor, name: str, block: Block, seed: int) -> None:
    """Write the initial values of ``block`` of parameter ``name`` into ``local`` (shape ``block.sizes``)."""
    if block.init != "normal":
        local.fill_(1.0 if block.init == "ones" else 0.0)
        return
    if local.numel() == 0:
        return
    columns = slice(block.offsets[-1], block.offsets[-1] + block.sizes[-1])
    flat = local.view(-1, block.sizes[-1]) if len(block.sizes) > 1 else local.view(1, -1)
    at = 0
    for first, count in _row_runs(block):
        for values in _rows(name, seed, block.shape[-1], first, count):
            rows = values.shape[0]
            flat[at : at + rows].copy_(values[:, columns] * block.std)
            at += rows


def _row_runs(block: Block) -> Iterator[tuple[int, int]]:
    """Runs of rows of the flattened [rows, columns] view that the block covers, in order."""
    shape, offsets, sizes = block.shape[:-1], block.offsets[:-1], block.sizes[:-1]
    if not shape:
        yield 0, 1
    elif len(shape) == 1:
        yield offsets[0], sizes[0]
    else:
        for i in range(offsets[0], offsets[0] + sizes[0]):
            yield i * shape[1] + offsets[1], sizes[1]


def _rows(name: str, seed: int, columns: int, first: int, count: int) -> Iterator[Tensor]:
    """Standard normal rows ``first .. first + count`` of the parameter, piece by piece (fp32, [n, columns])."""
    step = max(1, BLOCK_ELEMENTS // columns)
    for index in range(first // step, (first + count - 1) // step + 1):
        digest = hashlib.blake2b(f"{seed}/{name}/{index}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.randn(step, columns, generator=generator)
        low, high = max(first, index * step), min(first + count, (index + 1) * step)
        yield values[low - index * step : high - index * step]
