"""One chunk a rank: the split of layers whose longest seed path is least, over all splits, by dynamic programming over (rank, layers placed).

A path that stays on one rank takes a sum of what is before the rank, on it, and behind it, so that it is two arrays, over the first layer
of the rank and over the one after its last. What memory asks for and the rank's ends are looked up one by one, once for every number of
layers by kind, and only of stages that some split has whose paths are within the limit without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.columns import Units
from planner.paths import Paths

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Price = Callable[[int, int, int], tuple[float, float, float]]
"""(rank, start, stop) -> (seconds of recompute beyond the least, seconds at the rank's start, at its end) of a stage that holds the layers
[start, stop); infinite recompute where it does not fit."""


@dataclass(frozen=True)
class Split:
    """A split of layers over ranks: its bound (the least over all splits of the longest seed path), and the counts."""

    bound: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Line:
    """A path that stays on one rank: ``before[start] + behind[stop]`` seconds where that holds the layers [start, stop) with the least
    recompute, ``again`` times each second of recompute more; it begins on rank ``first`` and ends on rank ``last``."""

    before: Floats
    behind: Floats
    again: float
    first: int
    last: int

    def seconds(self, start: Any, stop: Any, extra: Any) -> Floats:
        seconds: Floats = self.before[start] + self.behind[stop] + self.again * extra
        return seconds


def best_split(
    paths: Paths, units: Units, prefix: Ints, alike: Ints, transfer: float, again: Floats, price: Price, lowest: int, limit: float
) -> Split | None:
    """The split whose longest seed path is least; None where no split is within ``limit`` seconds, or fits.

    ``prefix``: layers of each kind among the first i. By first layer and the one after the last, ``alike``: the same number where layers of
    every kind are as many; ``again``: seconds of recompute beyond the least that any stage has. ``lowest``: fewest layers of a stage.
    """
    lines = _lines(paths, units, prefix, transfer)
    ranks, size = len(lines), len(prefix)
    open_ = _open(lines, again, lowest, limit)
    best, back, least_end = np.full(size, np.inf), np.zeros((ranks, size), np.int64), 0.0
    best[0] = 0.0
    for rank, some in enumerate(lines):
        start, stop = np.nonzero(open_[rank] & np.isfinite(best)[:, None])
        if not len(start):
            return None
        priced = _priced(rank, start, stop, alike, price)
        fits = np.isfinite(priced[0])
        start, stop, (extra, begin, end) = start[fits], stop[fits], priced[:, fits]
        height = np.zeros(len(start))
        for line in some:
            ends = (begin if line.first == rank else 0.0) + (end if line.last == rank else least_end if line.last == 0 else 0.0)
            height = np.maximum(height, line.seconds(start, stop, extra) + ends)
        within = height <= limit
        if rank == 0:
            least_end = float(end[within].min(initial=np.inf))
        table = np.full((size, size), np.inf)
        table[start[within], stop[within]] = np.maximum(best[start], height)[within]
        best, back[rank] = table.min(axis=0), table.argmin(axis=0)
    if not np.isfinite(best[-1]):
        return None
    counts, at = [], size - 1
    for origin in back[::-1]:
        counts.append(at - int(origin[at]))
        at = int(origin[at])
    return Split(float(best[-1]), tuple(reversed(counts)))


def _priced(rank: int, start: Ints, stop: Ints, alike: Ints, price: Price) -> Floats:
    """Of every stage, (recompute, start, end): asked for once of those that are alike."""
    _, first, at = np.unique(alike[start, stop], return_index=True, return_inverse=True)
    found = np.array([price(rank, int(start[i]), int(stop[i])) for i in first])
    priced: Floats = found[at].T
    return priced


def _open(lines: Sequence[Sequence[Line]], again: Floats, lowest: int, limit: float) -> npt.NDArray[np.bool_]:
    """rank x start x stop: whether a split has that stage whose paths are all within the limit, recompute of ``again`` seconds counted."""
    ranks, size = len(lines), len(again)
    place = np.arange(size)
    out = np.tile(place[None] - place[:, None] >= lowest, (ranks, 1, 1))
    ahead, behind = place == 0, place == size - 1
    for rank, some in enumerate(lines):
        out[rank] &= ahead[:, None]
        for line in some:
            out[rank] &= line.seconds(place[:, None], place[None], again) <= limit
        ahead = out[rank].any(axis=0)
    for rank in reversed(range(ranks)):
        out[rank] &= behind[None]
        behind = out[rank].any(axis=1)
    return out


def _lines(paths: Paths, units: Units, prefix: Ints, transfer: float) -> list[list[Line]]:
    """By rank, the paths that stay on it: those that meet all chunks before it alike, and all behind it."""
    f, b, w, pf, pb, p2p, first, last = paths.matrices
    embedding, head = np.array(units.embedding), np.array(units.least_head)
    through = prefix @ np.stack([units.f, units.b.min(axis=1), units.w], axis=1)
    ranks = f.shape[1]
    out: list[list[Line]] = [[] for _ in range(ranks)]
    for q in range(len(f)):
        if pf[q].any() or pb[q].any():
            continue
        table = np.stack([f[q], b[q], w[q]], axis=1)
        rank = int(table.sum(axis=1).argmax())
        if (table[:rank] != table[:1]).any() or (table[rank + 1 :] != table[-1:]).any():
            continue
        ahead = through @ (table[0] if rank else np.zeros(3))
        own = through @ table[rank]
        later = through @ (table[-1] if rank < ranks - 1 else np.zeros(3))
        fixed = float(p2p[q] * transfer + table[0] @ embedding + table[-1] @ head)
        out[rank].append(Line(ahead - own, own + (later[-1] - later) + fixed, float(b[q, rank]), int(first[q]), int(last[q])))
    return out
