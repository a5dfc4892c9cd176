"""One column with several chunks a rank, exactly: every way to deal layers to ranks that may beat the answer, and the paths that decide.

What ranks can hold within the time of the answer (``planner.shapes``) leaves few loads: a number of layers for every chunk, those of a rank
within one of each other. All of them are kept, and for each the longest of the kept paths is known: its own layers' seconds, its ranks'
gradient reduction and optimizer, and the recompute that memory makes necessary, first by a bound (``planner.memory_recompute``), then, for the
load whose longest path is least, exactly (``planner.least_recompute``). That load is simulated; its critical path is a new cut for all. When
the least bound meets the best answer, the column is solved. Where there are too many loads, a rank's chunks are left open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.chunks import rank_update
from cost_models.dependencies import graph
from cost_models.pipeline import Path
from planner.columns import Column, Mix
from planner.fitting import Fitting, Policy
from planner.heuristic import dealt_out, spread
from planner.least_recompute import least_recompute, menu
from planner.memory_recompute import plain, recompute_bound, some_spans
from planner.program import Answer, Block, Pattern, Program
from planner.shapes import Costs, Shape

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Span = tuple[int, int]
RUN = 10_000_000
"""Actions of all loads run at once at most."""
MOST = 30_000
"""Loads kept at most."""
HIDES = 1.0
"""Times a path takes a rank's backward from which on more recompute there costs more than the reduction that it hides."""
NEVER = 1e12
"""Seconds of what does not fit."""
TRIES, NODES = 16, 2_000
"""Times one load is simulated at most, recompute laid anew in its chunks for the paths that were longest; nodes of
its program."""
REFINED = 100
"""Loads whose recompute is made exact at most, in search of one that is still of interest."""
MANY, SOME = 200, 12
"""Options of a column beyond which only some loads are simulated."""
PROGRAMS, STALLED, EXACT = 2, 3, 1e-4
"""Loads of a column whose recompute the program lays at most, after so many simulations in a row that say nothing new; to what gap."""


@dataclass
class Option:
    """Layers that a rank may hold: ``spans`` of its chunks (in the order of ``Fitting.held``; empty: as even as can be, in the way that is
    best for each path); ``again``: least seconds of recompute of a microbatch, ``start``, ``end`` what its rank adds to a path that begins
    or ends there; ``exact``: whether these are those of the best mixes."""

    layers: int
    spans: tuple[Span, ...] = ()
    again: float = 0.0
    start: float = 0.0
    end: float = 0.0
    exact: bool = False


def best_loads(
    column: Column,
    fitting: Fitting,
    policies: Sequence[Policy],
    shape: Shape,
    costs: Costs,
    limit: float,
    gap: float,
    rounds: int,
    *,
    prove: bool = False,
    programs: int = 0,
) -> tuple[Answer | None, float] | None:
    """(the best answer, the least seconds of any step of the column); None where there are more loads than are kept. ``costs`` of the one
    column; ``limit``: steps at or beyond it are of no interest; ``rounds``: loads simulated at most; ``prove``: a load that simulations
    say nothing new of is left, or closed by the integer program, for so many loads as ``programs`` says."""
    layers, step = column.layers, column.step
    top = limit / column.slowing - column.job.execution.step_overhead_seconds
    good, low, high = shape.settle(costs, np.array([top]), layers, memory=True)
    if column.even:
        each = layers // column.layout.pp
        good &= (low[0] <= each).all() & (high[0] >= each).all()
        low, high = np.full_like(low, each), np.full_like(high, each)
    if not good[0]:
        return None, limit
    options, rows = _options(column, fitting, low[0].astype(np.int64), high[0].astype(np.int64), top)
    if rows is None:
        return None
    if not len(rows):
        return None, limit
    loads = _Loads(column, fitting, policies, shape, costs, options, rows)
    rounds = rounds if sum(map(len, options)) <= MANY else min(rounds, SOME)
    best: Answer | None = None
    tries, stalled = np.zeros((2, len(rows)), np.int64)
    while rounds:
        bar = best.seconds if best else limit
        i = loads.least(bar * (1 - gap), tries < TRIES)
        if i is None:
            break
        rounds -= 1
        answer = loads.tried(i, bool(tries[i]))
        tries[i] += 1 if loads.laid else TRIES // 2
        if answer is None:
            tries[i] = TRIES if loads.laid else tries[i]
            continue
        one, path = answer
        if best is None or one.seconds < best.seconds:
            best = one
        before = loads.bounds[i]
        if not loads.learn(i, path):
            tries[i] = TRIES
        stalled[i] = 0 if loads.bounds[i] > before else stalled[i] + 1
        if prove and loads.laid and (stalled[i] >= STALLED or tries[i] >= TRIES):
            tries[i] = TRIES
            exact = loads.solved(i, min(bar, best.seconds)) if programs > 0 else None
            best, programs = best if exact is None or exact.seconds >= best.seconds else exact, programs - 1
    least = float(step(loads.bounds.min())) if len(rows) else limit
    return best, min(least, limit)


def _options(column: Column, fitting: Fitting, low: Ints, high: Ints, top: float) -> tuple[list[list[Option]], Ints | None]:
    """(what each rank may hold, rows of one choice a rank that hold all layers): every way to lay the chunks where those are few enough, else
    every load; no rows where there are more than ``MOST`` of either."""
    layers, vpp = column.layers, column.layout.vpp
    ranges = [range(least, most + 1) for least, most in zip(low.tolist(), high.tolist(), strict=True)]
    ways: list[list[tuple[int, ...]]] = []
    if all(comb(vpp, n % vpp) <= MOST for some in ranges for n in some):
        ways = [
            [tuple(n // vpp + (i in up) for i in range(vpp)) for n in some for up in combinations(range(vpp), n % vpp)]
            for some in ranges
        ]
    if ways and sum(map(len, ways)) <= MOST:
        rows = _choices([np.array([sum(sizes) for sizes in some]) for some in ways], layers)
        if rows is not None:
            return _placed(column, fitting, ways, rows, top)
    rows = _choices([np.array(some) for some in ranges], layers)
    return [[Option(n) for n in some] for some in ranges], rows


def _placed(
    column: Column, fitting: Fitting, ways: Sequence[Sequence[tuple[int, ...]]], rows: Ints, top: float
) -> tuple[list[list[Option]], Ints]:
    """Options and rows where all chunks' sizes are known, those left out that take ``top`` seconds of pipeline without any recompute: an
    option has the kinds of its chunks' layers, wherever they stand."""
    chunks, pp = fitting.layout.chunks, fitting.layout.pp
    sizes = np.zeros((len(rows), chunks), np.int64)
    for rank in range(pp):
        sizes[:, list(fitting.held(rank))] = np.array(ways[rank]).reshape(len(ways[rank]), -1)[rows[:, rank]]
    stops = np.cumsum(sizes, axis=1)
    counts = fitting.prefix[stops] - fitting.prefix[stops - sizes]
    quick = np.flatnonzero(_plain_seconds(column, counts) < top)
    rows, sizes, stops, counts = rows[quick], sizes[quick], stops[quick], counts[quick]
    out, options = np.zeros_like(rows), []
    for rank in range(pp):
        held = list(fitting.held(rank))
        _, first, inverse = np.unique(
            counts[:, held].reshape(len(rows), len(held) * counts.shape[2]), axis=0, return_index=True, return_inverse=True
        )
        spans = [tuple((int(stops[i, c] - sizes[i, c]), int(stops[i, c])) for c in held) for i in first]
        options.append([Option(sum(b - a for a, b in some), some) for some in spans])
        out[:, rank] = inverse.reshape(-1)
    return options, out


def _plain_seconds(column: Column, counts: Ints) -> Floats:
    """Seconds of the pipeline by row of ``counts`` (row x chunk x kind) without recompute and ends, the schedule run for all rows at once; 0
    where that is too much to do."""
    layout, u = column.layout, column.units
    whole = graph(layout.schedule, layout.pp, layout.vpp, column.microbatches)
    if len(whole.kind) * len(counts) > RUN or whole.paired:
        return np.zeros(len(counts))
    f, b, w = (counts @ u.least[:, i] for i in range(3))
    for part, first, last in zip((f, b, w), u.embedding, u.least_head, strict=True):
        part[:, 0] += first
        part[:, -1] += last
    nothing = np.zeros((1 + layout.pp, len(counts)))
    durations = np.concatenate([f.T, b.T, w.T, (b + w).T, f.T, (b + w).T, nothing])
    ended = np.zeros((len(whole.kind) + 1, len(counts)))
    for node, (before, source, kind) in enumerate(zip(whole.before, whole.source, whole.kind, strict=True), 1):
        ended[node] = np.maximum(ended[before], ended[source]) + durations[kind]
    out: Floats = ended[whole.ends].max(axis=0)
    return out


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


@dataclass
class _Loads:
    """The loads of a column: ``rows`` of one of each rank's ``options``, and by row the seconds of the longest path known."""

    column: Column
    fitting: Fitting
    policies: Sequence[Policy]
    shape: Shape
    costs: Costs
    options: list[list[Option]]
    rows: Ints
    bounds: Floats = field(init=False)
    parts: list[Floats] = field(init=False)
    """Path x row: seconds of the paths known, in the order in which they were found."""

    def __post_init__(self) -> None:
        self.bounds, self.parts, self.known = np.zeros(len(self.rows)), [], 0
        self.laid = any(o.spans for some in self.options for o in some)
        self.weighed: dict[tuple[int, int, int], tuple[float, list[Mix] | None]] = {}
        self.critical: dict[int, tuple[int, int]] = {}
        """By row: how many paths were longest, and which row of the paths is their mean."""
        tables = self.shape.again(self.costs, self.column.layers) if self.laid else []
        for rank, some in enumerate(self.options):
            for option in some:
                if option.spans:
                    option.again = self._at_least(tables, rank, option)
                else:
                    option.again = recompute_bound(self.column, self.fitting, self.shape, self.costs, rank, option.layers)
                    option.exact = True
                spans = option.spans or some_spans(self.column, self.fitting.held(rank), option.layers)
                option.start, option.end = self._ends(rank, spans, option.again)
        self.lengthen()

    def _at_least(self, tables: list[Floats], rank: int, option: Option) -> float:
        """What the tables of ``shapes`` say of the recompute of an option."""
        leading = 0
        if len(tables) > 1:
            first = self.column.job.model.pattern[0]
            leading = sum(self.fitting.counts(*span)[first] for span in option.spans)
        table = tables[leading][0, rank]
        return float(table[option.layers - 1]) if option.layers <= len(table) else 0.0

    def chosen(self, row: int) -> list[Option]:
        return [some[o] for some, o in zip(self.options, self.rows[row], strict=True)]

    def least(self, bar: float, open_: npt.NDArray[np.bool_]) -> int | None:
        """An open row below ``bar`` seconds of a step, its recompute exact: the one with the least bound before that was known; None where
        there is none, or none was found in ``REFINED`` rows."""
        for _ in range(REFINED):
            at = np.flatnonzero(open_ & (self.column.step(self.bounds) < bar))
            if not len(at):
                return None
            i = int(at[self.bounds[at].argmin()])
            for rank, option in enumerate(self.chosen(i)):
                if not option.exact:
                    self._refine(rank, option)
            if self.column.step(self.bounds[i]) < bar:
                return i
        return None

    def _make_exact(self, rank: int, option: Option) -> None:
        if option.exact:
            return
        least = min(least_recompute(self.fitting, p, rank, option.spans)[0] for p in self.policies)
        base = sum(float(np.dot(self.fitting.counts(*s), self.column.units.least[:, 1])) for s in option.spans)
        option.again, option.exact = max(option.again, least - base), True
        option.start, option.end = self._ends(rank, option.spans, option.again)

    def _refine(self, rank: int, option: Option) -> None:
        """Make the recompute of an option exact, and lengthen the rows that have it."""
        old = replace(option)
        at = np.flatnonzero(self.rows[:, rank] == next(i for i, o in enumerate(self.options[rank]) if o is option))
        self._make_exact(rank, option)
        more = np.diff(self._of_rank(rank, [old, option], slice(0, self.known)), axis=1)
        start = 0
        for part in self.parts:
            part[:, at] += more[start : start + len(part)]
            start += len(part)
            self.bounds[at] = np.maximum(self.bounds[at], part[:, at].max(axis=0))

    def learn(self, row: int, path: Path) -> bool:
        """Keep the path that was longest, and its mean with those that were before: a step takes as long as that at least. Whether something
        is known that was not."""
        paths = self.shape.paths
        new = paths.add(path)
        number, before = self.critical.get(row, (0, paths.place(path)))
        mean = _mean_path(paths.rows[before], path, number / (number + 1)) if self.laid else None
        if mean is not None:
            new = paths.add(mean) or new
        at = paths.place(path if mean is None else mean)
        self.critical[row] = (number + 1 if mean is not None else 1), at
        self.lengthen()
        return (number > 0 and self._weigh(row, at)) or new

    def _weigh(self, row: int, path: int) -> bool:
        """Lay the recompute of a row's ranks in their chunks as is best for one path: what that path takes at least is known then; whether
        any was."""
        new = False
        backward = self.shape.paths.matrices[1][path]
        for rank, option in enumerate(self.chosen(row) if self.laid else []):
            weights = backward[list(self.fitting.held(rank))]
            place = int(self.rows[row, rank])
            if option.again == 0 or option.again >= NEVER or (rank, place, path) in self.weighed or not weights.any():
                continue
            found = min(
                (least_recompute(self.fitting, p, rank, option.spans, tuple(weights)) for p in self.policies), key=lambda x: x[0]
            )
            self.weighed[rank, place, path] = found
            new = True
            least = self.column.units.least[:, 1]
            base = sum(w * float(np.dot(self.fitting.counts(*s), least)) for s, w in zip(option.spans, weights, strict=True))
            more = found[0] - base - float(weights.min()) * option.again
            if more > 0:
                self._add(np.flatnonzero(self.rows[:, rank] == place), path, more)
        return new

    def _add(self, at: Ints, path: int, more: float) -> None:
        for part in self.parts:
            if path < len(part):
                part[path, at] += more
                self.bounds[at] = np.maximum(self.bounds[at], part[path, at])
                return
            path -= len(part)

    def tried(self, row: int, late: bool) -> tuple[Answer, Path] | None:
        """An answer with a row's loads, and its critical path."""
        column, fitting, chosen = self.column, self.fitting, self.chosen(row)
        if not self.laid:
            stages = dealt_out(column.paths.ranks, [o.layers for o in chosen], column.layout.vpp, late)
            return _simulated(column, fitting, self.policies, stages, {})
        of = {c: b - a for rank, o in enumerate(chosen) for c, (a, b) in zip(fitting.held(rank), o.spans, strict=True)}
        mixes: dict[int, list[Mix]] = {}
        if row in self.critical:
            for rank, place in enumerate(self.rows[row].tolist()):
                found = self.weighed.get((rank, place, self.critical[row][1]))
                if found is not None and found[1] is not None:
                    mixes[rank] = found[1]
        return _simulated(column, fitting, self.policies, tuple(of[c] for c in range(column.chunks)), mixes)

    def lengthen(self) -> None:
        """Measure the rows along the paths that were found since."""
        paths = slice(self.known, len(self.shape.paths.rows))
        f, b, w, _, _, p2p, _, _ = (x[paths] for x in self.shape.paths.matrices)
        if not len(f):
            return
        c = self.costs
        fixed = p2p * c.transfer[0] + np.stack([f[:, 0], b[:, 0], w[:, 0]], axis=1) @ c.embedding[0]
        fixed = fixed + np.stack([f[:, -1], b[:, -1], w[:, -1]], axis=1) @ c.head[0]
        if any(not o.spans for some in self.options for o in some):
            fixed = fixed - np.stack([f, b, w]).max(axis=0) @ c.credit[0]
        total = np.repeat(fixed[:, None], len(self.rows), axis=1)
        for rank, some in enumerate(self.options):
            total += self._of_rank(rank, some, paths)[:, self.rows[:, rank]]
        self.parts.append(total)
        self.known = paths.stop
        self.bounds = np.maximum(self.bounds, total.max(axis=0, initial=0.0))

    def _of_rank(self, rank: int, some: Sequence[Option], paths: slice) -> Floats:
        """Path x option: what a rank's layers add to the paths."""
        matrices = self.shape.paths.matrices
        f, b, w, pf, pb = (x[paths] for x in matrices[:5])
        first, last = matrices[6][paths], matrices[7][paths]
        if not some:
            return np.zeros((len(f), 0))
        held = list(self.fitting.held(rank))
        f, b, w, pf, pb = f[:, held], b[:, held], w[:, held], pf[:, held], pb[:, held]
        value = self._laid(some, f, b, w) if self.laid else self._open(some, f, b, w, pf, pb)
        again, start, end = (np.array([getattr(o, name) for o in some]) for name in ("again", "start", "end"))
        least = b.min(axis=1)
        extra = np.minimum(again, NEVER)
        value = value + extra * np.where(extra >= NEVER, 1.0, least[:, None])
        hides = (last == rank) & (least < HIDES)
        out: Floats = value + start * (first == rank)[:, None] + np.where(hides[:, None], 0.0, end) * (last == rank)[:, None]
        return out

    def _laid(self, some: Sequence[Option], f: Floats, b: Floats, w: Floats) -> Floats:
        """Work of layers whose chunks and kinds are known."""
        least = self.column.units.least
        counts = np.array([[self.fitting.counts(*span) for span in o.spans] for o in some], float)
        out = np.zeros((len(f), len(some)))
        for kind, (one, other, weight) in enumerate(least):
            out += (f * one + b * other + w * weight) @ counts[:, :, kind].T
        return out

    def _open(self, some: Sequence[Option], f: Floats, b: Floats, w: Floats, pf: Floats, pb: Floats) -> Floats:
        """Work of layers that lie in the rank's chunks as is best for each path."""
        c = self.costs
        cost = f * c.f[0] + b * c.b[0] + w * c.w[0] - pf * c.hidden[0, 0] - pb * c.hidden[0, 1]
        mine = np.sort(cost, axis=1)
        partial = np.concatenate([np.zeros((len(mine), 1)), np.cumsum(mine, axis=1)], axis=1)
        each, more = np.divmod(np.array([o.layers for o in some]), f.shape[1])
        out: Floats = each * partial[:, [-1]] + partial[:, more]
        return out

    def _ends(self, rank: int, spans: Sequence[Span], extra: float) -> tuple[float, float]:
        """Seconds before and after the actions of a rank that holds these layers and recomputes for ``extra`` seconds a microbatch."""
        column, held = self.column, self.fitting.held(rank)
        if not np.isfinite(extra) or column.job.optimizer == "muon":
            return 0.0, 0.0
        lightest, last = int(column.units.b.min(axis=0).argmin()), column.chunks - 1
        chunks: list[Any] = [None] * column.chunks
        for chunk, span in zip(held, spans, strict=True):
            mix = plain(column, self.fitting, span, lightest)
            chunks[chunk] = column.chunk(mix, first=chunk == 0, last=chunk == last, tail=column.tail_of(mix))
        one = chunks[held[0]]
        chunks[held[0]] = replace(one, backward_input=one.backward_input + extra)
        update = rank_update(column.job, column.layout, chunks, rank)
        return update.start, update.end

    def solved(self, row: int, bar: float) -> Answer | None:
        """A row's recompute by the integer program (``planner.program``), its layers given: its best answer below ``bar`` seconds."""
        column, chosen = self.column, self.chosen(row)
        spans = {c: s for rank, o in enumerate(chosen) for c, s in zip(self.fitting.held(rank), o.spans, strict=True)}
        best: Answer | None = None
        least = bar
        for policy in self.policies if column.layout.schedule != "dualpipe" else ():
            patterns = [
                [Pattern(*spans[c], mix) for mix in menu(self.fitting, policy, self.fitting.counts(*spans[c]), c).mixes]
                for c in range(column.chunks)
            ]
            block = Block(column, self.fitting, policy, patterns, [(o.start, o.end) for o in chosen])
            program = Program([block], bar)
            answer = program.solve(nodes=NODES, rounds=TRIES, gap=EXACT / 2)
            if answer is None and program.stopped:
                return best
            if answer is not None:
                least = min(least, answer.bound)
                best = answer if best is None or answer.seconds < best.seconds else best
        self.bounds[row] = max(self.bounds[row], least / column.slowing - column.job.execution.step_overhead_seconds)
        self.lengthen()
        return best


def _mean_path(one: Path, other: Path, share: float) -> Path | None:
    """``share`` of one path and the rest of another, which begin and end on the same ranks; None where they do not."""
    if (one.first, one.last) != (other.first, other.last):
        return None
    names = [f.name for f in fields(Path) if f.name not in ("first", "last")]
    return replace(one, **{name: share * getattr(one, name) + (1 - share) * getattr(other, name) for name in names})


def _simulated(
    column: Column, fitting: Fitting, policies: Sequence[Policy], stages: tuple[int, ...], laid: dict[int, list[Mix]]
) -> tuple[Answer, Path] | None:
    """The fastest answer with these stages, and its critical path; ``laid``: mixes of ranks' chunks where they are chosen already."""
    best: tuple[Answer, Path] | None = None
    for policy in policies:
        mixes = spread(column, fitting, stages, policy)
        if mixes is None:
            continue
        if policy.free:
            for rank, some in laid.items():
                for chunk, mix in zip(fitting.held(rank), some, strict=True):
                    mixes[chunk] = mix
        timeline = column.simulate(mixes)
        seconds = column.step(timeline.seconds)
        if best is None or seconds < best[0].seconds:
            best = Answer(seconds, stages, tuple(mixes), column, 0.0), timeline.path
    return best
