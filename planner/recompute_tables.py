"""The least recompute of a rank by its number of layers, by arrays of columns: what memory costs in seconds, whatever the time allowed.

A rank's chunks hold as many layers each, or one more. Its bytes at the moment with most in flight are the states of its layers, what waits
for weight gradients, and the activations of the microbatches alive. What they exceed the room by must be saved by recompute: a covering
knapsack over its layers, whose linear relaxation has the dual

    max over prices p of  p S + sum over chunks of n_c min over modes m of (seconds_m - p alive_c saved_m)

The best price is one of the few at which two modes of a chunk cost the same. Any price is a bound, so that all are tried at once. Where a
schedule is V-shaped, a rank's two chunks differ in what they have alive, and recompute goes where most is; elsewhere they are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import comb, prod

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
NEVER = 1e12
"""Seconds of what does not fit."""
ROUNDING = 1e-9
TRIED = 3_000
"""Numbers of layers by mode tried at most for one rank."""


@dataclass(frozen=True)
class Group:
    """Chunks of a rank that are alike, by rank (or column x rank): microbatches ``alive`` and ``waiting`` for their weight gradient at its
    fullest moment."""

    alive: Floats
    waiting: Floats

    def ranks(self, number: int) -> Group:
        """The first ``number`` ranks."""
        return Group(self.alive[..., :number], self.waiting[..., :number])


@dataclass(frozen=True)
class Bytes:
    """By column: ``state`` bytes of a layer, ``kept`` and ``again`` column x mode bytes of a microbatch and seconds of recompute, ``waits``
    what it holds for its weight gradient, less ``above`` a chunk; ``room`` and ``spare`` column x rank (``shapes.Costs``); ``first``: (state,
    kept, waits) of the leading layers of another kind."""

    state: Floats
    kept: Floats
    again: Floats
    waits: Floats
    above: Floats
    room: Floats
    spare: Floats
    first: tuple[Floats, Floats, Floats]

    def ranks(self, number: int) -> Bytes:
        """The first ``number`` ranks."""
        return replace(self, room=self.room[:, :number], spare=self.spare[:, :number])


def least_again(b: Bytes, groups: Sequence[Group], most: int, leading: int = 0) -> Floats:
    """Column x rank x number of layers (1 to ``most``): seconds of recompute of one microbatch at least; ``NEVER`` where they do not fit.
    ``leading``: how many of them are leading layers, in the first group."""
    number = np.arange(1.0, most + 1)
    if len(groups) == 1:
        return _for_sizes(b, groups, [number], leading)
    half, more = np.floor(number / 2), number % 2
    first = _for_sizes(b, groups, [half + more, half], leading)
    return np.minimum(first, _for_sizes(b, groups, [half, half + more], leading))


def _for_sizes(b: Bytes, groups: Sequence[Group], sizes: Sequence[Floats], leading: int) -> Floats:
    """The same where the groups hold ``sizes`` layers."""
    top = b.kept.max(axis=1)
    over, main = _over(b, groups, sizes, leading)
    saved = top[:, None] - b.kept
    plain, all_again = np.zeros(over.shape), np.zeros(over.shape)
    beside = _beside(b, top)[:, :, None]
    for price in _prices(saved, b.again, groups):
        value, mildest = price[:, :, None] * over, np.full(over.shape, -np.inf)
        for group, n in zip(groups, main, strict=True):
            gain = _least_of_modes(b.again, price * group.alive, saved)[:, :, None]
            value += gain * n
            np.maximum(mildest, np.where(n >= 1, gain, -np.inf), out=mildest)
        np.maximum(plain, value - mildest, out=plain)
        np.maximum(all_again, value + price[:, :, None] * beside, out=all_again)
    savable = sum(g.alive[..., None] * n * saved.max(axis=1)[:, None, None] for g, n in zip(groups, main, strict=True))
    out = np.where(over <= 0, 0.0, np.minimum(plain, all_again))
    never = over > savable * (1 + ROUNDING) + 1.0
    return np.where(never | (sizes[0] < leading), NEVER, out)


def _least_of_modes(seconds: Floats, price: Floats, saved: Floats) -> Floats:
    """Column x rank: the least over modes of seconds less what it saves at a ``price``."""
    out: Floats = seconds[:, :1] - price * saved[:, :1]
    for mode in range(1, seconds.shape[1]):
        np.minimum(out, seconds[:, mode : mode + 1] - price * saved[:, mode : mode + 1], out=out)
    return out


def _over(b: Bytes, groups: Sequence[Group], sizes: Sequence[Floats], leading: int) -> tuple[Floats, list[Floats]]:
    """(column x rank x number: bytes that do not fit without recompute; layers of the main kind by group)."""
    top = b.kept.max(axis=1)
    over = -b.room[:, :, None]
    main: list[Floats] = []
    for place, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        rest = np.maximum(size - (leading if place == 0 else 0), 0.0)
        main.append(rest)
        each = b.state[:, None] + group.waiting * b.waits[:, None] + group.alive * top[:, None]
        over = over + each[:, :, None] * rest - (group.waiting * b.above[:, None])[:, :, None]
    if leading:
        state, kept, waits = b.first
        over = (
            over + (leading * (state[:, None] + groups[0].waiting * waits[:, None] + groups[0].alive * kept[:, None]))[:, :, None]
        )
    return over, main


def _beside(b: Bytes, top: Floats) -> Floats:
    """Column x rank: bytes that exist besides where all layers recompute, whose tensors exist whole one layer at a time."""
    if b.kept.shape[1] == 1:
        return np.zeros((len(b.kept), b.room.shape[1]))
    second = np.sort(b.kept, axis=1)[:, -2]
    out: Floats = np.maximum(0.0, (top - second)[:, None] - b.spare)
    return out


def _prices(saved: Floats, again: Floats, groups: Sequence[Group]) -> list[Floats]:
    """Column x rank: seconds a byte at which two modes of a chunk cost the same, those at which no third costs less than both."""
    out: list[Floats] = []
    modes = saved.shape[1]
    for i in range(modes):
        for j in range(i + 1, modes):
            gain, cost = saved[:, j] - saved[:, i], again[:, j] - again[:, i]
            with np.errstate(divide="ignore", invalid="ignore"):
                price = np.where(gain * cost > 0, cost / gain, 0.0)
            both = again[:, i] - price * saved[:, i]
            least = (again - price[:, None] * saved).min(axis=1)
            if (price * (both <= least + ROUNDING * np.abs(both))).any():
                out += [price[:, None] / np.maximum(group.alive, 0.5) for group in groups]
    return out


def least_again_in_whole_layers(b: Bytes, groups: Sequence[Group], most: int, leading: int = 0, tried: int = 0) -> Floats:
    """``least_again`` of one column, each layer in one mode: up to ``tried`` layers, all numbers of layers by mode where they are few."""
    relaxed = least_again(b, groups, most, leading)
    top = float(b.kept[0].max())
    saved, again = top - b.kept[0], b.again[0]
    modes = [m for m in range(len(saved)) if saved[m] > 0]
    beside = _beside(b, b.kept.max(axis=1))[0]
    for n in range(1, min(most, tried) + 1):
        open_ = np.flatnonzero((relaxed[0, :, n - 1] > 0) & (relaxed[0, :, n - 1] < NEVER))
        ways = [(n,)] if len(groups) == 1 else sorted({(n - n // 2, n // 2), (n // 2, n - n // 2)})
        if not modes or sum(prod(comb(size + len(modes), len(modes)) for size in sizes) for sizes in ways) > TRIED:
            break
        best = np.full(len(open_), NEVER)
        for sizes in ways if len(open_) else ():
            over, main = _over(b, groups, [np.array([float(size)]) for size in sizes], leading)
            counts = [_counts(int(size[0]), len(modes)) for size in main]
            alive = [g.alive[open_] for g in groups]
            best = np.minimum(best, _covered(over[0, open_, 0], counts, saved[modes], again[modes], alive, beside[open_]))
        relaxed[0, open_, n - 1] = np.maximum(relaxed[0, open_, n - 1], best)
    return relaxed


@lru_cache(maxsize=512)
def _counts(layers: int, modes: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """(rows of numbers of layers by mode that recompute, of at most ``layers`` in all; whether all of them do)."""
    rows = np.array([row for row in product(range(layers + 1), repeat=modes) if sum(row) <= layers], float)
    return rows, rows.sum(axis=1) == layers


def _covered(
    over: Floats, counts: Sequence[tuple[Floats, npt.NDArray[np.bool_]]], saved: Floats, again: Floats, alive: Sequence[Floats], beside: Floats
) -> Floats:  # fmt: skip
    """By rank: the least seconds of recompute that saves ``over`` bytes, and ``beside`` more where all layers recompute."""
    gain, seconds, every = np.zeros((len(over), 1)), np.zeros(1), np.ones(1, bool)
    for (rows, all_), microbatches in zip(counts, alive, strict=True):
        gain = (gain[:, :, None] + microbatches[:, None, None] * (rows @ saved)).reshape(len(over), -1)
        seconds = (seconds[:, None] + rows @ again).ravel()
        every = (every[:, None] & all_).ravel()
    good = gain - every * beside[:, None] >= (over * (1 - ROUNDING))[:, None]
    least: Floats = np.where(good, seconds, NEVER).min(axis=1)
    return np.where(over <= 0, 0.0, least)
