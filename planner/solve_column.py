"""One column: its best stages and recompute, and the bound that proves it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from planner import bounds
from planner.columns import Column, Mix, alike_spans
from planner.fitting import Counts, Fitting, Policy
from planner.heuristic import quick
from planner.program import TOLERANCE, Answer, Block, Pattern, Program
from planner.stages import Split, best_split

PROVED = 1e-4
"""Relative gap at which an answer counts as proved."""
ONE_CHUNK = ("gpipe", "1f1b", "zb-h1")
"""Schedules that hold one chunk a rank."""


@dataclass
class Result:
    answer: Answer | None
    bound: float
    """No choice of this column is faster (inf: none is faster than the limit asked)."""
    unfit: bool = False
    cut: bool = False
    """Only bounded: no program was needed to see that it is not faster than the limit."""
    programs: int = 0
    cuts: int = 0


def solve_column(
    column: Column,
    fitting: Fitting,
    policies: Sequence[Policy],
    limit: float,
    floor: float,
    totals: npt.NDArray[np.int64],
    gap: float = PROVED,
    largest: int = 300,
    deadline: float | None = None,
) -> Result:
    """The best choice of a column, or the knowledge that none beats ``limit`` seconds. ``floor``: a bound already known; ``largest``: most
    patterns of an integer program that is still solved (beyond, the gap stays)."""
    total = Result(None, float("inf"))
    unfit = cut = True
    for policy in policies:
        if deadline is not None and time.monotonic() > deadline:
            return Result(total.answer, floor, programs=total.programs, cuts=total.cuts)
        bar = min(limit, total.answer.seconds if total.answer else limit)
        one = _solve(column, fitting, policy, bar, floor, totals, gap, largest, deadline)
        unfit = unfit and one.unfit
        total.bound = min(total.bound, one.bound)
        total.programs, total.cuts = total.programs + one.programs, total.cuts + one.cuts
        if one.answer is not None and (total.answer is None or one.answer.seconds < total.answer.seconds):
            total.answer = one.answer
        cut = cut and one.cut
    total.unfit, total.cut = unfit, cut
    return total


def _solve(
    column: Column,
    fitting: Fitting,
    policy: Policy,
    limit: float,
    floor: float,
    totals: npt.NDArray[np.int64],
    gap: float,
    largest: int,
    deadline: float | None,
) -> Result:
    if column.chunks == 1:
        return _single(column, fitting, policy)
    if not _can_hold(column, fitting, policy):
        return Result(None, float("inf"), unfit=True)
    bound = max(floor, path_bound(column, fitting, policy, totals))
    if bound >= limit * (1 - gap):
        return Result(None, bound, unfit=not np.isfinite(bound), cut=True)
    start = quick(column, fitting, [policy])
    bar = min(limit, start.seconds if start else limit)
    if column.layout.schedule in ONE_CHUNK:
        split = _by_stages(column, fitting, policy, bar)
        if split is None:
            return Result(start, bar)
        bound = max(bound, column.step(split.bound))
        if bound >= limit * (1 - gap):
            return Result(start, bound)
        mixes = [m for m in (_mix(fitting, policy, rank, split.counts) for rank in range(column.layout.pp)) if m is not None]
        if len(mixes) == column.layout.pp:
            seconds = column.step(column.simulate(mixes).seconds)
            if start is None or seconds < start.seconds:
                start = Answer(seconds, split.counts, tuple(mixes), column, bound)
        bar = min(limit, start.seconds if start else limit)
        if bound >= bar * (1 - TOLERANCE):
            return Result(start, bound)
    else:
        bounds.improve(column.paths, column.units, totals, column.transfer, column)
        bound = max(bound, path_bound(column, fitting, policy, totals))
        if bound >= bar * (1 - gap):
            return Result(start, bound)
    patterns = _patterns(column, fitting, policy, bar, largest)
    if patterns is None:
        return Result(start, max(bound, bar))
    if not patterns:
        return Result(start, bound)
    program = Program([Block(column, fitting, policy, patterns)], bar)
    answer = program.solve(floor=bound, nodes=2000, rounds=60 if gap <= PROVED else 6, deadline=deadline)
    if answer is None:
        return Result(start, bound if program.stopped else max(bound, bar), programs=1, cuts=program.cuts)
    if start is not None and start.seconds < answer.seconds:
        answer = Answer(start.seconds, start.stages, start.mixes, column, min(answer.bound, start.seconds))
    return Result(answer, max(bound, answer.bound), programs=1, cuts=program.cuts)


def path_bound(column: Column, fitting: Fitting, policy: Policy, totals: npt.NDArray[np.int64]) -> float:
    """The best dual bound of a column under a policy, its own ends and the recompute that memory makes necessary counted."""
    paths, lines, seconds = column.paths, fitting.room(), column.units
    if not policy.free and not policy.block:
        seconds = seconds.only(policy.mode)
        lines = lines.only(policy.mode)
    values = (bounds.dual(paths, w, seconds, totals, column.transfer, column.layer_update, lines) for w in paths.duals)
    return float(column.step(max(values, default=0.0)))


def _single(column: Column, fitting: Fitting, policy: Policy) -> Result:
    """No pipeline: one chunk with every layer."""
    found = fitting.least_mix(0, 0, column.layers, policy)
    if found is None:
        return Result(None, float("inf"), unfit=True)
    seconds = column.step(column.simulate([found[0]]).seconds)
    return Result(Answer(seconds, (column.layers,), (found[0],), column, seconds), seconds)


def _can_hold(column: Column, fitting: Fitting, policy: Policy) -> bool:
    """Whether the ranks together can hold all layers, each with its least-memory mixes (uneven splits included)."""
    if column.layout.schedule not in ONE_CHUNK:
        return _states_fit(column, fitting)
    layers, pp, total = column.layers, column.layout.pp, 0
    each = -(-layers // pp)

    def fits(rank: int, n: int) -> bool:
        at = 0 if rank == 0 else layers - n if rank == pp - 1 else min(rank, layers - n)
        return fitting.least_mix(rank, at, at + n, policy) is not None

    if all(fits(rank, each) for rank in range(pp)):
        return True
    for rank in range(pp):
        each = most_that_fits(partial(fits, rank), each, layers)
        total += each
        if total >= layers:
            return True
    return False


def most_that_fits(fits: Callable[[int], bool], guess: int, top: int) -> int:
    """The most up to ``top`` that fits, as all that is less does: looked for near ``guess`` first."""
    low, high = 0, top
    near = [guess, guess + 1, guess + 2, guess - 1]
    while low < high:
        at = near.pop(0) if near else (low + high + 1) // 2
        if low < at <= high:
            low, high = (at, high) if fits(at) else (low, at - 1)
    return low


def _states_fit(column: Column, fitting: Fitting) -> bool:
    """Several chunks a rank: states of all layers over all ranks."""
    states = sum(n * s for n, s in zip(fitting.counts(0, column.layers), fitting.layer_states, strict=True))
    copies = 2 if column.layout.schedule == "dualpipe" else 1
    return copies * states <= column.layout.pp * fitting.limit / column.job.execution.reserved_ratio


def _by_stages(column: Column, fitting: Fitting, policy: Policy, bar: float) -> Split | None:
    def price(rank: int, start: int, stop: int) -> tuple[float, float, float]:
        found = fitting.least_mix(rank, start, stop, policy)
        return (float("inf"), 0.0, 0.0) if found is None else (found[1], *column.stage_ends(rank, found[0]))

    limit = bar / column.slowing - column.job.execution.step_overhead_seconds
    lowest = column.layers // column.chunks if column.even else 1
    again = policy.recompute(fitting.prefix[None] - fitting.prefix[:, None], column.units.b)
    return best_split(
        column.paths,
        column.units,
        fitting.prefix,
        alike_spans(column.job),
        column.transfer,
        again,
        price,
        lowest,
        limit * (1 + 1e-12),
    )


def _mix(fitting: Fitting, policy: Policy, rank: int, counts: Sequence[int]) -> Mix | None:
    start = sum(counts[:rank])
    found = fitting.least_mix(rank, start, start + counts[rank], policy)
    return None if found is None else found[0]


def _patterns(column: Column, fitting: Fitting, policy: Policy, bar: float, largest: int) -> list[list[Pattern]] | None:
    """The patterns of every chunk that a step below ``bar`` could have; None where a chunk has none, empty where there are more than
    ``largest``."""
    spans = _spans(column, bar)
    if spans is None:
        return None
    number, last = sum(map(len, spans)), column.chunks - 1
    loose = _loose(column, fitting, [max(stop - start for start, stop in s) for s in spans])
    mixes: dict[tuple[Counts, bool, bool], list[Mix]] = {}
    out: list[list[Pattern]] = []
    for chunk, some in enumerate(spans):
        here: list[Pattern] = []
        for start, stop in some:
            if number > largest:
                return []
            key = (fitting.counts(start, stop), chunk == 0, chunk == last)
            if key not in mixes:
                mixes[key] = _worthwhile(column, fitting, policy, chunk, start, stop, loose)
            here += [Pattern(start, stop, mix) for mix in mixes[key]]
            number += len(mixes[key]) - 1
        out.append(here)
    return [] if number > largest else out


def _spans(column: Column, bar: float) -> list[list[tuple[int, int]]] | None:
    """The layers [start, stop) that every chunk could hold in a step below ``bar``; None where a chunk could hold none."""
    chunks, layers = column.chunks, column.layers
    most = _most_layers(column, bar / column.slowing - column.job.execution.step_overhead_seconds)
    if sum(most) < layers:
        return None
    least = [max(1, layers - (sum(most) - most[c])) for c in range(chunks)]
    if column.even:
        most = [min(n, layers // chunks) for n in most]
        least = [layers // chunks] * chunks
    uniform = len(set(column.job.model.pattern)) == 1
    out: list[list[tuple[int, int]]] = []
    for chunk in range(chunks):
        low, high = sum(least[:chunk]), sum(least[:chunk])
        if not uniform:
            low = max(low, layers - sum(most[chunk:]))
            high = min(sum(most[:chunk]), layers - sum(least[chunk:]))
        ends_there = not uniform and chunk == chunks - 1
        sizes = range(least[chunk], most[chunk] + 1)
        here = [(s, s + n) for s in range(low, high + 1) for n in sizes if s + n <= layers and (not ends_there or s + n == layers)]
        if not here:
            return None
        out.append(here)
    return out


def _most_layers(column: Column, room: float) -> list[int]:
    """Most layers of each chunk in a step of ``room`` seconds: a rank is busy with all its microbatches of all its chunks."""
    u = column.units
    each = float(u.least.sum(axis=1).min())
    m = column.microbatches
    out = []
    held = {rank: column.layout.chunks_of_rank(rank) for rank in range(column.layout.pp)}
    for chunk in range(column.chunks):
        rank = column.layout.rank_of_chunk(chunk)
        own = held[rank]
        share = m / 2 if column.layout.schedule == "dualpipe" else m
        others = len(own) - 1
        extra = (sum(u.embedding) if 0 in own else 0.0) + (sum(u.least_head) if column.chunks - 1 in own else 0.0)
        n = (room / share - extra) / each - others
        out.append(int(max(1, min(column.layers - column.chunks + 1, np.floor(n + 1e-9)))))
    return out


def _loose(column: Column, fitting: Fitting, most: Sequence[int]) -> bool:
    """Whether every rank fits without recompute however its chunks are filled."""
    kinds = len(column.job.model.kinds)
    uniform = len(set(column.job.model.pattern)) == 1
    if not uniform:
        return False
    for rank in range(column.layout.pp):
        held = fitting.held(rank)
        spans, mixes = [], []
        for c in held:
            n = most[c]
            start = 0 if c == 0 else column.layers - n if c == column.chunks - 1 else min(c, column.layers - n)
            spans.append((start, start + n))
            rows = [[0] * len(column.modes) for _ in range(kinds)]
            rows[column.job.model.pattern[0]][0] = n
            mixes.append(tuple(tuple(r) for r in rows))
        if fitting.apart(rank, spans, mixes) > fitting.limit:
            return False
    return True


def _worthwhile(column: Column, fitting: Fitting, policy: Policy, chunk: int, start: int, stop: int, loose: bool) -> list[Mix]:
    """The mixes of a span that are not beaten in time and memory by another."""
    counts = fitting.counts(start, stop)
    b = column.units.b
    if loose and policy.free:
        least = tuple(tuple(n if m == 0 else 0 for m in range(len(column.modes))) for n in counts)
        return [least]
    rated: list[tuple[float, float, float, float, Mix]] = []
    for mix in policy.mixes(counts, len(column.modes)):
        cost = sum(n * float(b[k][m]) for k, row in enumerate(mix) for m, n in enumerate(row))
        memory = fitting.chunk(chunk, mix)
        rated.append(
            (cost, float(memory.kept), max(float(memory.backward), float(memory.loss or 0)), float(memory.weight_pass), mix)
        )
    rated.sort(key=lambda r: r[:4])
    kept: list[tuple[tuple[float, ...], Mix]] = []
    for *rates, mix in rated:
        one = tuple(float(x) for x in rates)
        if not any(all(k <= x + 1e-9 for k, x in zip(known, one, strict=True)) for known, _ in kept):
            kept.append((one, mix))
    return [mix for _, mix in kept]
