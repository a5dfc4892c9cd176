"""A good answer of one column, quickly: an even split (the ends lighter by what embedding and head cost) and the least recompute that fits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from planner.columns import Column, Mix
from planner.dealing import FREE, dealt
from planner.fitting import Fitting, Policy
from planner.least_recompute import least_recompute
from planner.paths import ranks_of
from planner.program import Answer

LIGHTER = 1e-3
"""Layers by which the first and the last rank count as fuller where nothing else decides: what does not divide is missing there first."""


def quick(column: Column, fitting: Fitting, policies: Sequence[Policy], limit: float = float("inf")) -> Answer | None:
    """The best of a few splits that may take less than ``limit`` seconds; None where none of them fits."""
    best: Answer | None = None
    for stages in splits(column):
        bar = min(limit, best.seconds if best else limit)
        if np.isfinite(bar) and any(least(column, fitting, stages) >= bar for least in (_longest_path, _plain)):
            continue
        for policy in policies:
            mixes = spread(column, fitting, stages, policy)
            if mixes is None:
                continue
            seconds = column.step(column.simulate(mixes).seconds)
            if best is None or seconds < best.seconds:
                best = Answer(seconds, tuple(stages), tuple(mixes), column, 0.0)
            break
    return best


def _longest_path(column: Column, fitting: Fitting, stages: Sequence[int]) -> float:
    """Seconds that a step with these stages takes at least: the longest kept path, every layer in its quickest mode."""
    f, b, w, hidden_f, hidden_b, transfers, _, _ = column.paths.matrices
    u, ends = column.units, np.cumsum([0, *stages])
    counts = fitting.prefix[ends[1:]] - fitting.prefix[ends[:-1]]
    pipeline = transfers * column.transfer
    paired, alone = (u.b - u.sb).min(axis=1), u.b.min(axis=1)
    for weights, layer in ((f, u.f), (-hidden_f, u.sf), (b - hidden_b, alone), (hidden_b, paired), (w, u.w)):
        pipeline = pipeline + weights @ (counts @ layer)
    for weights, first, last in zip((f, b, w), u.embedding, u.least_head, strict=True):
        pipeline = pipeline + weights[:, 0] * first + weights[:, -1] * last
    return float(column.step(pipeline.max()))


def _plain(column: Column, fitting: Fitting, stages: Sequence[int]) -> float:
    """Seconds of a step whose layers all have their quickest mode."""
    quickest = (column.units.b - column.units.sb).argmin(axis=1)
    ends = np.cumsum([0, *stages])
    mixes = [
        tuple(
            tuple(n if mode == best else 0 for mode in range(len(column.modes))) for n, best in zip(counts, quickest, strict=True)
        )
        for counts in (fitting.counts(int(start), int(stop)) for start, stop in pairwise(ends))
    ]
    return float(column.step(column.simulate(mixes).seconds))


def splits(column: Column) -> list[tuple[int, ...]]:
    """Splits worth trying: ranks balanced by layers, and by seconds with embedding and head counted; a rank's chunks as even as
    ``planner.dealing`` has it."""
    layers, chunks = column.layers, column.chunks
    if chunks == 1 or column.even:
        return [(layers // chunks,) * chunks]
    u = column.units
    mean = float(u.f.mean() + u.b.min(axis=1).mean() + u.w.mean()) or 1.0
    first, last = sum(u.embedding) / mean, sum(u.least_head) / mean
    pp, vpp = column.layout.pp, column.layout.vpp
    ranks = ranks_of(column.layout.schedule, pp, chunks)
    out = []
    for a, b in ((first, last), (LIGHTER, LIGHTER)):
        if vpp == 1:
            ways = [balanced(layers, chunks, a, b)]
        else:
            folded = int(ranks[-1]) == 0
            loads = balanced(layers, pp, a + b if folded else a, 0.0 if folded else b, vpp)
            ways = [dealt(ranks, loads, vpp, way) for way in range(FREE)]
        out += [way for way in ways if way not in out]
    return out


def balanced(layers: int, chunks: int, first: float, last: float, least: int = 1) -> tuple[int, ...]:
    """Counts that make the largest load least, the first and last one carrying ``first`` and ``last`` layers more; at least ``least`` each."""
    loads = [0.0] * chunks
    loads[0] += first
    loads[-1] += last
    counts = [least] * chunks
    loads = [x + least for x in loads]
    import heapq

    heap = [(load, -c) for c, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(layers - least * chunks):
        load, c = heapq.heappop(heap)
        counts[-c] += 1
        heapq.heappush(heap, (load + 1, c))
    return tuple(counts)


def spread(column: Column, fitting: Fitting, stages: Sequence[int], policy: Policy) -> list[Mix] | None:
    """A mix for every chunk so that every rank fits, with little recompute; None where the policy has none."""
    spans = list(pairwise([0, *accumulate(stages)]))
    mixes: list[Mix | None] = [None] * len(stages)
    for rank in fullest_first([sum(stages[c] for c in fitting.held(rank)) for rank in range(column.layout.pp)]):
        held = list(fitting.held(rank))
        if len(held) == 1:
            found = fitting.least_mix(rank, *spans[held[0]], policy)
            if found is None:
                return None
            mixes[held[0]] = found[0]
            continue
        chosen = least_recompute(fitting, policy, rank, [spans[c] for c in held])[1]
        if chosen is None:
            return None
        for c, mix in zip(held, chosen, strict=True):
            other = mixes[c]
            if other is None or column.layout.schedule != "dualpipe":
                mixes[c] = mix
            elif other != mix:
                mixes[c] = max(other, mix, key=_recompute)
    done = [m for m in mixes if m is not None]
    return done if len(done) == len(stages) else None


def fullest_first(layers: Sequence[int]) -> list[int]:
    """The ranks in about the order in which they are likely not to fit: those of the model's ends, then those of most ``layers``."""
    return sorted(range(len(layers)), key=lambda rank: (0 < rank < len(layers) - 1, -layers[rank]))


def _recompute(mix: Mix) -> int:
    """About how much a mix recomputes: layers times the place of their mode."""
    return sum(m * n for row in mix for m, n in enumerate(row))
