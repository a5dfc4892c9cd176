"""One column with several chunks a rank, exactly: every way to deal layers to ranks that may beat the answer, and the paths that decide.

What ranks can hold within the time of the answer (``planner.shapes``) leaves few loads, a number of layers for each rank. All of them are
kept, and for each the longest of the kept paths is known, with the chunks of a rank as even as can be, the best of them longer, and the least
recompute that memory makes necessary. The load with the least longest path is simulated; its critical path is a new cut for all. When the
least bound meets the best answer, the column is solved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.chunks import rank_update
from cost_models.pipeline import Path
from planner.bulk_bytes import slack_of
from planner.columns import Column, Mix
from planner.fitting import Fitting, Policy, first_fitting
from planner.heuristic import dealt_out, spread
from planner.program import Answer
from planner.shapes import Costs, Shape

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MOST = 30_000
"""Loads kept at most."""
HIDES = 1.0
"""Times a path takes a rank's backward from which on more recompute there costs more than the reduction that it hides."""
FEW, NEAR = 32, 1.005
"""Chunks up to which recompute is dealt out in both ways, and how near to the answer asked for."""
TRIED = 10_000
"""Numbers of layers by mode tried at most for one rank."""


@dataclass(frozen=True)
class Option:
    """Layers that a rank may hold, and how they lie in its chunks (in the order of ``Fitting.held``; empty: as even as can be, in the way
    that is best for each path)."""

    layers: int
    sizes: tuple[int, ...] = ()


def best_loads(
    column: Column, fitting: Fitting, policies: Sequence[Policy], shape: Shape, costs: Costs, limit: float, gap: float, rounds: int
) -> tuple[Answer | None, float] | None:
    """(the best answer, the least seconds of any step of the column); None where there are more loads than are kept. ``costs`` of the one
    column; ``limit``: steps at or beyond it are of no interest; ``rounds``: loads simulated at most."""
    layers, step = column.layers, column.step
    top = limit / column.slowing - column.job.execution.step_overhead_seconds
    good, low, high = shape.settle(costs, np.array([top]), layers, memory=True)
    if not good[0]:
        return None, limit
    found = _options(low[0].astype(np.int64), high[0].astype(np.int64), layers, shape.vpp)
    if found is None:
        return None
    options, loads = found
    best: Answer | None = None
    again = [[_recompute(column, fitting, shape, costs, rank, o) for o in some] for rank, some in enumerate(options)]
    ends = [
        [_ends(column, fitting, rank, o, extra) for o, extra in zip(some, more, strict=True)]
        for rank, (some, more) in enumerate(zip(options, again, strict=True))
    ]
    bounds, known = np.zeros(len(loads)), 0
    tries = np.zeros(len(loads), np.int64)
    for _ in range(rounds):
        rows = len(shape.paths.rows)
        bounds = np.maximum(bounds, _lengths(shape, costs, options, loads, again, ends, known))
        known = rows
        bar = best.seconds if best else limit
        open_ = np.flatnonzero((step(bounds) < bar * (1 - gap)) & (tries < 2))
        if not len(open_):
            break
        i = int(open_[bounds[open_].argmin()])
        answer = _tried(
            column, fitting, policies, [some[o] for some, o in zip(options, loads[i], strict=True)], bool(tries[i]), limit
        )
        tries[i] += 1
        if answer is None:
            continue
        one, path = answer
        if best is None or one.seconds < best.seconds:
            best = one
        if not shape.paths.add(path):
            tries[i] = 2
    least = float(step(bounds.min())) if len(bounds) else limit
    return best, min(least, limit)


def _options(low: Ints, high: Ints, layers: int, vpp: int) -> tuple[list[list[Option]], Ints] | None:
    """(what each rank may hold, rows of one choice a rank that hold all layers): every way to lay the chunks where those are few enough, else
    every load; None where there are more than ``MOST`` of either."""
    for laid in (True, False):
        options = []
        for least, most in zip(low.tolist(), high.tolist(), strict=True):
            some: list[Option] = []
            for n in range(least, most + 1):
                each, more = divmod(n, vpp)
                if not laid:
                    some.append(Option(n))
                elif comb(vpp, more) <= MOST:
                    some += [Option(n, tuple(each + (i in up) for i in range(vpp))) for up in combinations(range(vpp), more)]
            options.append(some)
        if sum(map(len, options)) > MOST:
            continue
        rows = _choices([np.array([o.layers for o in some]) for some in options], layers)
        if rows is not None:
            return options, rows
    return None


def _choices(sizes: Sequence[Ints], layers: int) -> Ints | None:
    """Rows of one index a rank whose sizes sum to ``layers``; None where there are more than ``MOST``."""
    if any(not len(s) for s in sizes):
        return np.zeros((0, len(sizes)), np.int64)
    low, high = np.array([s.min() for s in sizes]), np.array([s.max() for s in sizes])
    floor = np.concatenate([np.cumsum(low[::-1])[::-1][1:], [0]])
    spare = np.concatenate([np.cumsum(high[::-1])[::-1][1:], [0]])
    rows, left = np.zeros((1, 0), np.int64), np.array([layers])
    for rank, here in enumerate(sizes):
        rest = left[:, None] - here[None, :]
        at, option = np.nonzero((rest >= floor[rank]) & (rest <= spare[rank]))
        if len(at) > MOST:
            return None
        rows, left = np.concatenate([rows[at], option[:, None]], axis=1), rest[at, option]
    return rows


def _recompute(column: Column, fitting: Fitting, shape: Shape, c: Costs, rank: int, option: Option) -> float:
    """The least seconds that recompute adds to one microbatch where a rank holds these layers (inf: they do not fit).

    What the layers need without recompute is counted exactly, moment by moment; where another way to lay them is meant too, it may need less
    by what the chunks differ in microbatches in flight. What recompute saves is its layers' kept bytes, those first whose chunk has most in
    flight.
    """
    flying, held, n = shape.flying, fitting.held(rank), option.layers
    each, more = divmod(n, len(held))
    sizes = option.sizes or tuple(each + (place < more) for place in range(len(held)))
    other = c.lighter[0, rank]
    if not option.sizes:
        other = other + 2 * (flying.alive_off[rank] * c.kept[0].max() + flying.waiting_off[rank] * c.waits[0])
    spans = _spans(column, held, sizes)
    mixes = [_plain(column, fitting, span, int(c.kept[0].argmax())) for span in spans]
    chunks = {chunk: fitting.chunk(chunk, mix) for chunk, mix in zip(held, mixes, strict=True)}
    static, hull, worst = fitting.static(rank, spans), _hull(c.kept[0], c.again[0]), 0.0
    most = [max(sizes)] * len(sizes) if not option.sizes else list(sizes)
    for snapshot in fitting.snapshots[rank]:
        over = (fitting.total(static, chunks, [snapshot]) - fitting.limit) / slack_of(column.job) - other
        if over > 0:
            alive = sorted(((a, most[place]) for place, (_, a, _) in enumerate(snapshot)), reverse=True)
            worst = max(worst, _cheapest(over, alive, n, hull), _whole_layers(over, alive, n, c.kept[0], c.again[0]))
    return worst


def _hull(kept: Floats, again: Floats) -> list[tuple[float, float]]:
    """(bytes saved of a layer and microbatch, seconds a byte) of each further step of recompute, cheapest first."""
    out: list[tuple[float, float]] = []
    at = int(kept.argmax())
    while True:
        gain = kept[at] - kept
        better = [m for m in range(len(kept)) if gain[m] > 0]
        if not better:
            return out
        price = {m: max(0.0, again[m] - again[at]) / gain[m] for m in better}
        step = min(better, key=lambda m: (price[m], -gain[m]))
        out.append((float(gain[step]), float(price[step])))
        at = step


def _cheapest(over: float, alive: Sequence[tuple[int, int]], layers: int, hull: Sequence[tuple[float, float]]) -> float:
    """The least seconds of recompute that saves ``over`` bytes where chunks have so many microbatches in flight and at most so many layers
    each; inf where nothing does."""
    steps = []
    left = layers
    for some, most in alive:
        size = min(left, most)
        left -= size
        if some:
            steps += [(price / some, gain * size * some) for gain, price in hull]
    seconds = 0.0
    for price, bytes_ in sorted(steps):
        take = min(over, bytes_)
        seconds += take * price
        over -= take
        if over <= 0:
            return seconds
    return float("inf")


def _whole_layers(over: float, alive: Sequence[tuple[int, int]], layers: int, kept: Floats, again: Floats) -> float:
    """``_cheapest`` in whole layers, exactly: for numbers of layers by mode, modes that save most go where most is in flight. 0 where there
    are too many to try."""
    gain = kept.max() - kept
    modes = sorted((m for m in range(len(kept)) if gain[m] > 0), key=lambda m: -gain[m])
    if not modes or (layers + 1) ** len(modes) > TRIED:
        return 0.0
    flying = [a for a, most in alive for _ in range(most)][:layers]
    total = np.concatenate([[0.0], np.cumsum(flying)])
    grids = np.meshgrid(*[np.arange(len(flying) + 1)] * len(modes), indexing="ij")
    until, before = np.zeros_like(grids[0]), np.zeros_like(grids[0])
    saved, seconds = np.zeros(until.shape), np.zeros(until.shape)
    for mode, count in zip(modes, grids, strict=True):
        until = np.minimum(before + count, len(flying))
        saved = saved + gain[mode] * (total[until] - total[before])
        seconds = seconds + again[mode] * (until - before)
        before = until
    good = saved >= over * (1 - 1e-12)
    return float(seconds[good].min()) if good.any() else float("inf")


def _spans(column: Column, held: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Layers for a rank's chunks of these sizes, somewhere in the model."""
    out, at = [], 0
    for place, (chunk, size) in enumerate(zip(held, sizes, strict=True)):
        rest = sum(sizes[place:])
        at = 0 if chunk == 0 else column.layers - size if chunk == column.chunks - 1 else max(at, min(chunk, column.layers - rest))
        out.append((at, at + size))
        at += size
    return out


def _plain(column: Column, fitting: Fitting, span: tuple[int, int], mode: int) -> Mix:
    return tuple(tuple(n if m == mode else 0 for m in range(len(column.modes))) for n in fitting.counts(*span))


def _ends(column: Column, fitting: Fitting, rank: int, option: Option, extra: float) -> tuple[float, float]:
    """Seconds before and after the actions of a rank that holds these layers and recomputes for ``extra`` seconds a microbatch."""
    held = fitting.held(rank)
    if not np.isfinite(extra) or column.job.optimizer == "muon":
        return 0.0, 0.0
    each, more = divmod(option.layers, len(held))
    sizes = option.sizes or tuple(each + (place < more) for place in range(len(held)))
    lightest = int(column.units.b.min(axis=0).argmin())
    last = column.chunks - 1
    chunks: list[Any] = [None] * column.chunks
    for chunk, span in zip(held, _spans(column, held, sizes), strict=True):
        mix = _plain(column, fitting, span, lightest)
        chunks[chunk] = column.chunk(mix, first=chunk == 0, last=chunk == last, tail=column.tail_of(mix))
    one = chunks[held[0]]
    chunks[held[0]] = replace(one, backward_input=one.backward_input + extra)
    update = rank_update(column.job, column.layout, chunks, rank)
    return update.start, update.end


def _lengths(
    shape: Shape, c: Costs, options: Sequence[Sequence[Option]], loads: Ints, again: Sequence[Sequence[float]],
    ends: Sequence[Sequence[tuple[float, float]]], known: int,
) -> Floats:  # fmt: skip
    """Seconds of the longest of the paths after the first ``known``, by row of ``loads``."""
    f, b, w, pf, pb, p2p, first, last = (x[known:] for x in shape.paths.matrices)
    if not len(f):
        return np.zeros(len(loads))
    cost = f * c.f[0] + b * c.b[0] + w * c.w[0] - pf * c.hidden[0, 0] - pb * c.hidden[0, 1]
    fixed = p2p * c.transfer[0] + np.stack([f[:, 0], b[:, 0], w[:, 0]], axis=1) @ c.embedding[0]
    fixed = fixed + np.stack([f[:, -1], b[:, -1], w[:, -1]], axis=1) @ c.head[0] - np.stack([f, b, w]).max(axis=0) @ c.credit[0]
    total = np.repeat(fixed[:, None], len(loads), axis=1)
    for rank, some in enumerate(options):
        held = np.flatnonzero(shape.mine[rank])
        sizes = np.array([o.layers for o in some], float)
        if some and some[0].sizes:
            value = cost[:, held] @ np.array([o.sizes for o in some], float).T
        else:
            mine = np.sort(cost[:, held], axis=1)
            partial = np.concatenate([np.zeros((len(mine), 1)), np.cumsum(mine, axis=1)], axis=1)
            each, more = np.divmod(sizes.astype(int), len(held))
            value = each * partial[:, [-1]] + partial[:, more]
        extra = np.minimum(np.array(again[rank]), 1e12)
        value = value + extra * np.where(extra >= 1e12, 1.0, b[:, held].min(axis=1)[:, None])
        begin, end = np.array(ends[rank]).T
        least = b[:, held].min(axis=1)
        hides = (last == rank) & (least < HIDES)
        value = value + begin * (first == rank)[:, None] + np.where(hides[:, None], 0.0, end) * (last == rank)[:, None]
        total += value[:, loads[:, rank]]
    out: Floats = total.max(axis=0)
    return out


def _tried(
    column: Column, fitting: Fitting, policies: Sequence[Policy], chosen: Sequence[Option], late: bool, limit: float
) -> tuple[Answer, Path] | None:
    """An answer with these loads, and its critical path."""
    if chosen[0].sizes:
        of = {c: n for rank, o in enumerate(chosen) for c, n in zip(fitting.held(rank), o.sizes, strict=True)}
        stages = tuple(of[c] for c in range(column.chunks))
    else:
        stages = dealt_out(column.paths.ranks, [o.layers for o in chosen], column.layout.vpp, late)
    best: tuple[Answer, Path] | None = None
    for policy in policies:
        for way in (least_mixes, spread) if policy.free else (spread,):
            mixes = way(column, fitting, stages, policy)
            if mixes is None:
                continue
            timeline = column.simulate(mixes)
            seconds = column.step(timeline.seconds)
            if best is None or seconds < best[0].seconds:
                best = Answer(seconds, stages, tuple(mixes), column, 0.0), timeline.path
            plain = not any(m and n for mix in mixes for row in mix for m, n in enumerate(row))
            if plain or column.chunks > FEW or best[0].seconds > limit * NEAR:
                break
    return best


def least_mixes(column: Column, fitting: Fitting, stages: Sequence[int], policy: Policy) -> list[Mix] | None:
    """Recompute layer by layer where it costs least for what it saves: the cheapest step of recompute first, in the chunk with most
    microbatches in flight, until the rank fits. None where it does not."""
    starts = [sum(stages[:c]) for c in range(len(stages) + 1)]
    out: dict[int, Mix] = {}
    for rank in range(column.layout.pp):
        held = fitting.held(rank)
        spans = [(starts[c], starts[c + 1]) for c in held]
        plain = [_plain(column, fitting, span, 0) for span in spans]
        if fitting.needed(rank, spans, plain) <= fitting.limit:
            out.update(zip(held, plain, strict=True))
            continue
        steps = _steps(column, fitting, rank, held, spans)
        line = [plain]
        for place, kind, low, high in steps:
            rows = [list(row) for row in line[-1][place]]
            rows[kind][low] -= 1
            rows[kind][high] += 1
            line.append([*line[-1][:place], tuple(tuple(r) for r in rows), *line[-1][place + 1 :]])
        at = first_fitting(line, lambda mixes, r=rank, s=spans: fitting.needed(r, s, mixes) <= fitting.limit)
        if at is None:
            return None
        out.update(zip(held, line[at], strict=True))
    return [out[c] for c in range(len(stages))]


def _steps(
    column: Column, fitting: Fitting, rank: int, held: Sequence[int], spans: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int, int]]:
    """Single steps of recompute as (chunk's place, kind, mode before, mode after), those that cost least a byte first."""
    alive = [max(a for snapshot in fitting.snapshots[rank] for c, a, _ in snapshot if c == chunk) for chunk in held]
    b, kept = column.units.b, fitting.kept_of_layer
    steps = []
    for kind in range(len(b)):
        at = 0
        while True:
            gain = kept[kind, at] - kept[kind]
            better = [m for m in range(len(gain)) if gain[m] > 0]
            if not better:
                break
            after = min(better, key=lambda m: (max(0.0, b[kind, m] - b[kind, at]) / gain[m], -gain[m]))
            price = max(0.0, float(b[kind, after] - b[kind, at])) / float(gain[after])
            for place, span in enumerate(spans):
                steps += [(price / max(alive[place], 0.5), place, kind, at, after)] * fitting.counts(*span)[kind]
            at = after
    return [step[1:] for step in sorted(steps, key=lambda x: x[0])]
