"""A good answer of one column, quickly: an even split (the ends lighter by what embedding and head cost) and the least recompute that fits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planner.columns import Column, Mix
from planner.fitting import Fitting, Policy, first_fitting
from planner.program import Answer


def quick(column: Column, fitting: Fitting, policies: Sequence[Policy]) -> Answer | None:
    """The best of a few splits; None where none of them fits."""
    best: Answer | None = None
    for stages in splits(column):
        for policy in policies:
            mixes = spread(column, fitting, stages, policy)
            if mixes is None:
                continue
            seconds = column.step(column.simulate(mixes).seconds)
            if best is None or seconds < best.seconds:
                best = Answer(seconds, tuple(stages), tuple(mixes), column, 0.0)
            break
    return best


def splits(column: Column) -> list[tuple[int, ...]]:
    """Splits worth trying: ranks balanced by layers, and by seconds with embedding and head counted; the chunks of a rank as even as can be,
    what does not divide in its first or in its last ones."""
    layers, chunks = column.layers, column.chunks
    if chunks == 1:
        return [(layers,)]
    u = column.units
    mean = float(u.f.mean() + u.b.min(axis=1).mean() + u.w.mean()) or 1.0
    first, last = sum(u.embedding) / mean, sum(u.least_head) / mean
    pp, vpp = column.layout.pp, column.layout.vpp
    ranks = column.paths.ranks
    out = []
    for a, b in ((first, last), (0.0, 0.0)):
        if vpp == 1:
            ways = [balanced(layers, chunks, a, b)]
        else:
            folded = int(ranks[-1]) == 0
            loads = balanced(layers, pp, a + b if folded else a, 0.0 if folded else b, vpp)
            ways = [dealt_out(ranks, loads, vpp, late) for late in (True, False)]
        out += [way for way in ways if way not in out]
    return out


def dealt_out(ranks: npt.NDArray[np.int64], loads: Sequence[int], vpp: int, late: bool) -> tuple[int, ...]:
    """Each rank's layers over its chunks; ``late``: its last chunks (but for the model's last) take one more where they do not divide."""
    out = [0] * len(ranks)
    for rank, load in enumerate(loads):
        held = [c for c in range(len(ranks)) if ranks[c] == rank]
        each, more = divmod(load, vpp)
        order = sorted(held, key=lambda c: ((c == len(ranks) - 1) if late else 0, -c if late else c))
        for place, chunk in enumerate(order):
            out[chunk] = each + (place < more)
    return tuple(out)


def even_on_ranks(ranks: npt.NDArray[np.int64], stages: Sequence[int]) -> bool:
    """Whether the chunks of every rank differ by at most one layer: the declared space of schedules with several."""
    sizes = np.asarray(stages)
    return all(np.ptp(sizes[ranks == rank]) <= 1 for rank in set(ranks.tolist()))


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
    starts = [sum(stages[:c]) for c in range(len(stages) + 1)]
    spans = [(starts[c], starts[c + 1]) for c in range(len(stages))]
    mixes: list[Mix | None] = [None] * len(stages)
    for rank in range(column.layout.pp):
        held = list(fitting.held(rank))
        if len(held) == 1:
            found = fitting.least_mix(rank, *spans[held[0]], policy)
            if found is None:
                return None
            mixes[held[0]] = found[0]
            continue
        chosen = _rank(column, fitting, rank, held, [spans[c] for c in held], policy)
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


def _recompute(mix: Mix) -> int:
    """About how much a mix recomputes: layers times the place of their mode."""
    return sum(m * n for row in mix for m, n in enumerate(row))


def _rank(
    column: Column, fitting: Fitting, rank: int, held: Sequence[int], spans: Sequence[tuple[int, int]], policy: Policy
) -> list[Mix] | None:
    """Several chunks a rank: the same two modes in all of them, recomputed layers dealt out one chunk after the other."""
    b = column.units.b
    best: tuple[float, list[Mix]] | None = None
    per_chunk = [policy.lines(fitting.counts(*s), len(column.modes)) for s in spans]
    for lines in zip(*per_chunk, strict=False):
        heaviest = [line[-1] for line in lines]
        if (
            fitting.needed(rank, spans, heaviest) > fitting.limit
            and fitting.needed(rank, spans, [x[0] for x in lines]) > fitting.limit
        ):
            continue
        line = _dealt(list(lines))
        place = first_fitting(line, lambda mixes: fitting.needed(rank, spans, mixes) <= fitting.limit)
        if place is None:
            continue
        mixes = line[place]
        cost = sum(n * float(b[k][m]) for mix in mixes for k, row in enumerate(mix) for m, n in enumerate(row))
        if best is None or cost < best[0]:
            best = (cost, list(mixes))
        if place == 0 and all(m == 0 for mix in mixes for row in mix for m, n in enumerate(row) if n):
            break
    return None if best is None else best[1]


def _dealt(lines: list[list[Mix]]) -> list[tuple[Mix, ...]]:
    """Combined line: one more step of one chunk at a time, round robin."""
    at = [0] * len(lines)
    out = [tuple(line[0] for line in lines)]
    while any(a + 1 < len(line) for a, line in zip(at, lines, strict=True)):
        for c, line in enumerate(lines):
            if at[c] + 1 < len(line):
                at[c] += 1
                out.append(tuple(x[a] for x, a in zip(lines, at, strict=True)))
    return out
