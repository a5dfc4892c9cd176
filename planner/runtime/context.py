"""Context parallelism: which tokens a rank holds, and attention across the ranks that hold a sequence together.

A sequence is cut into 2 n chunks for a ring of n; rank r takes chunks r and 2 n - 1 - r, front and back, so that every rank has
equally many causal pairs. Inside a ring place, Ulysses ranks hold consecutive parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cost_models.layout import Layout
from profiles.errors import InputError


def spans(layout: Layout, seq_len: int, cp_rank: int) -> tuple[int, ...]:
    """(start, length) pairs of the positions that a context-parallel rank holds, in the order it holds them."""
    ring, ulysses = layout.ring, layout.ulysses
    place, inner = divmod(cp_rank, ulysses)
    pieces = ring_spans(ring, seq_len, place)
    share = sum(pieces[1::2]) // ulysses
    if share * ulysses * ring != seq_len:
        raise InputError(
            "seq_len", seq_len, f"must be a multiple of {2 * ring * ulysses if ring > 1 else ulysses} for cp={layout.cp}"
        )
    return cut(pieces, inner * share, share)


def ring_spans(ring: int, seq_len: int, place: int) -> tuple[int, ...]:
    """What place ``place`` of the ring holds, front chunk first."""
    if ring == 1:
        return (0, seq_len)
    if seq_len % (2 * ring):
        raise InputError(
            "seq_len", seq_len, f"must be a multiple of {2 * ring} for a ring of {ring}", seq_len // (2 * ring) * 2 * ring
        )
    step = seq_len // (2 * ring)
    return (place * step, step, (2 * ring - 1 - place) * step, step)


def cut(pieces: tuple[int, ...], start: int, count: int) -> tuple[int, ...]:
    """Elements ``start .. start + count`` of the tokens that ``pieces`` lists."""
    out: list[int] = []
    for a, n in zip(pieces[::2], pieces[1::2], strict=True):
        low, high = max(0, start), min(n, start + count)
        if low < high:
            out += [a + low, high - low]
        start -= n
    return tuple(out)


def take(x: Tensor, held: tuple[int, ...]) -> Tensor:
    """The columns of [batch, sequence] that ``held`` lists."""
    if held == (0, x.shape[1]):
        return x
    return torch.cat([x[:, a : a + n] for a, n in zip(held[::2], held[1::2], strict=True)], 1)
