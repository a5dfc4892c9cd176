"""One column, exactly: every way to deal layers to ranks that may beat the answer, and the paths that decide.

The rows that no kept path makes too long are few (``planner.load_rows``): a number of layers for every chunk. All of them are kept, and for
each the longest of the kept paths is known: its own layers' seconds, its ranks' gradient reduction and optimizer, and the recompute that memory
makes necessary, first by a bound (``planner.recompute_tables``), then, for the row whose longest path is least, exactly
(``planner.least_recompute``). That row is simulated; its critical path is a new cut for all. When the least bound meets the best answer, the
column is solved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from cost_models.arrays import distinct
from cost_models.dependencies import graph
from cost_models.pipeline import Path, makespans
from planner.column_costs import Costs
from planner.columns import Column, Mix
from planner.fitting import Fitting, Policy
from planner.heuristic import fullest_first
from planner.least_recompute import least_recompute, menu
from planner.load_rows import LoadRows, Option, ends, simulated
from planner.polish import polished
from planner.program import Answer, Block, Pattern, Program
from planner.recompute_tables import NEVER
from planner.shapes import Shape

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
WORTH, RUN = 16, 10_000_000
"""Loads that are worth running all at once to leave some out, and actions of all of them at most."""
HIDES = 1.0
"""Times a path takes a rank's backward from which on more recompute there costs more than the reduction that it hides."""
TRIES, NODES = 16, 2_000
"""Times one load is simulated at most, recompute laid anew in its chunks for the paths that were longest; nodes of
its program."""
REFINED = 100
"""Loads whose recompute is made exact at most, in search of one that is still of interest."""
MANY, SOME = 200, 12
"""Options of a column beyond which only some loads are simulated."""
WIDER = 2
"""Times as many rows are kept, to prove."""
PROGRAMS, STALLED, EXACT = 64, 3, 1e-4
"""Loads of a column whose recompute the program lays at most, after so many simulations in a row that say nothing new; to what gap."""


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
    deadline: float | None = None,
) -> tuple[Answer | None, float]:
    """(the best answer, the least seconds of any step of the column). ``costs`` of the one column; ``limit``: steps at or beyond it are of no
    interest; ``rounds``: loads simulated at most; ``prove``: a load that simulations say nothing new of is left, or closed by the integer
    program, for so many loads as ``programs`` says, until the ``deadline`` (``time.monotonic()``)."""
    layers, step = column.layers, column.step
    top = limit / column.slowing - column.job.execution.step_overhead_seconds
    good, low, high = shape.settle(costs, np.array([top]), layers, memory=True)
    if column.even:
        each = layers // column.layout.pp
        good &= (low[0] <= each).all() & (high[0] >= each).all()
        low, high = np.full_like(low, each), np.full_like(high, each)
    if not good[0]:
        return None, limit
    wider = WIDER if prove else 1
    choices = LoadRows(column, fitting, policies, shape, costs, low[0].astype(np.int64), high[0].astype(np.int64), wider)
    rows, beyond, best = choices.few(top, gap)
    options, rows = _placed(column, fitting, choices, rows, top)
    if not len(rows):
        return best, min(float(step(beyond)), best.seconds if best else limit, limit)
    loads = _Loads(column, fitting, policies, shape, costs, options, rows)
    rounds = rounds if sum(map(len, options)) <= MANY else min(rounds, SOME)
    tries, stalled = np.zeros((2, len(rows)), np.int64)
    while rounds and (deadline is None or time.monotonic() < deadline):
        bar = min(best.seconds, limit) if best else limit
        i = loads.least(bar * (1 - gap), tries < TRIES)
        if i is None:
            break
        rounds -= 1
        answer = loads.tried(i)
        tries[i] += 1
        if answer is None:
            tries[i] = TRIES
            continue
        one, path = answer
        if best is None or one.seconds < best.seconds:
            best = one
        before = loads.bounds[i]
        if not loads.learn(i, path):
            tries[i] = TRIES
        stalled[i] = 0 if loads.bounds[i] > before else stalled[i] + 1
        if prove and (stalled[i] >= STALLED or tries[i] >= TRIES):
            tries[i] = TRIES
            best = loads.polished(i, best, gap)
            if programs > 0 and step(loads.bounds[i]) < min(bar, best.seconds) * (1 - gap):
                exact = loads.solved(i, min(bar, best.seconds), deadline)
                best, programs = best if exact is None or exact.seconds >= best.seconds else exact, programs - 1
    return best, min(float(step(loads.bounds.min())), float(step(beyond)), best.seconds if best else limit, limit)


def _placed(column: Column, fitting: Fitting, choices: LoadRows, rows: Ints, top: float) -> tuple[list[list[Option]], Ints]:
    """Options and rows where every chunk's layers stand in their place, those left out that take ``top`` seconds of pipeline without any
    recompute: an option has the kinds of its chunks' layers, wherever they stand."""
    chunks, pp = fitting.layout.chunks, fitting.layout.pp
    sizes = np.zeros((len(rows), chunks), np.int64)
    for rank in range(pp):
        sizes[:, list(fitting.held(rank))] = choices.sizes[rank][rows[:, rank]]
    stops = np.cumsum(sizes, axis=1)
    counts = fitting.prefix[stops] - fitting.prefix[stops - sizes]
    quick = np.flatnonzero(_plain_seconds(column, counts) < top)
    rows, sizes, stops, counts = rows[quick], sizes[quick], stops[quick], counts[quick]
    out, options = np.zeros_like(rows), []
    for rank in range(pp):
        held = list(fitting.held(rank))
        first, place = distinct(counts[:, held].reshape(len(rows), len(held) * counts.shape[2]))
        options.append([Option(tuple((int(stops[i, c] - sizes[i, c]), int(stops[i, c])) for c in held)) for i in first])
        out[:, rank] = place
    return options, out


def _plain_seconds(column: Column, counts: Ints) -> Floats:
    """Seconds of the pipeline by row of ``counts`` (row x chunk x kind) without recompute and ends, the schedule run for all rows at once; 0
    where that is too much to do, or not worth it."""
    layout, u = column.layout, column.units
    table = layout.schedule, layout.pp, layout.vpp, column.microbatches
    whole = graph(*table)
    if len(counts) < WORTH or len(whole.kind) * len(counts) > RUN or whole.paired:
        return np.zeros(len(counts))
    f, b, w = (counts @ u.least[:, i] for i in range(3))
    for part, first, last in zip((f, b, w), u.embedding, u.least_head, strict=True):
        part[:, 0] += first
        part[:, -1] += last
    return makespans(*table, f, b, w, column.transfer, blocking=column.blocking)


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
        self.weighed: dict[tuple[int, int, int], tuple[float, list[Mix] | None]] = {}
        self.answers: dict[int, Answer] = {}
        """By row: the best answer with its loads."""
        self.critical: dict[int, tuple[int, int]] = {}
        """By row: how many paths were longest, and which row of the paths is their mean."""
        tables = self.shape.again(self.costs, self.column.layers)
        for rank, some in enumerate(self.options):
            for option in some:
                option.again = self._at_least(tables, rank, option)
                option.start, option.end = ends(self.column, self.fitting, rank, option.spans, option.again)
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
            chosen = self.chosen(i)
            for rank in fullest_first([option.layers for option in chosen]):
                if self.column.step(self.bounds[i]) < bar and not chosen[rank].exact:
                    self._refine(rank, chosen[rank])
            if self.column.step(self.bounds[i]) < bar:
                return i
        return None

    def _refine(self, rank: int, option: Option) -> None:
        """Make the recompute of an option exact, and lengthen the rows that have it."""
        old = replace(option)
        at = np.flatnonzero(self.rows[:, rank] == next(i for i, o in enumerate(self.options[rank]) if o is option))
        option.make_exact(self.column, self.fitting, self.policies, rank)
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
        mean = _mean_path(paths.rows[before], path, number / (number + 1))
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
        for rank, option in enumerate(self.chosen(row)):
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

    def tried(self, row: int) -> tuple[Answer, Path] | None:
        """An answer with a row's loads, and its critical path."""
        column, fitting, chosen = self.column, self.fitting, self.chosen(row)
        of = {c: b - a for rank, o in enumerate(chosen) for c, (a, b) in zip(fitting.held(rank), o.spans, strict=True)}
        mixes: dict[int, list[Mix]] = {}
        if row in self.critical:
            for rank, place in enumerate(self.rows[row].tolist()):
                found = self.weighed.get((rank, place, self.critical[row][1]))
                if found is not None and found[1] is not None:
                    mixes[rank] = found[1]
        answer = simulated(column, fitting, self.policies, tuple(of[c] for c in range(column.chunks)), mixes)
        if answer is not None and (row not in self.answers or answer[0].seconds < self.answers[row].seconds):
            self.answers[row] = answer[0]
        return answer

    def lengthen(self) -> None:
        """Measure the rows along the paths that were found since."""
        paths = slice(self.known, len(self.shape.paths.rows))
        f, b, w, _, _, p2p, _, _ = (x[paths] for x in self.shape.paths.matrices)
        if not len(f):
            return
        c = self.costs
        fixed = p2p * c.transfer[0] + np.stack([f[:, 0], b[:, 0], w[:, 0]], axis=1) @ c.embedding[0]
        fixed = fixed + np.stack([f[:, -1], b[:, -1], w[:, -1]], axis=1) @ c.head[0]
        total = np.repeat(fixed[:, None], len(self.rows), axis=1)
        for rank, some in enumerate(self.options):
            total += self._of_rank(rank, some, paths)[:, self.rows[:, rank]]
        self.parts.append(total)
        self.known = paths.stop
        self.bounds = np.maximum(self.bounds, total.max(axis=0, initial=0.0))

    def _of_rank(self, rank: int, some: Sequence[Option], paths: slice) -> Floats:
        """Path x option: what a rank's layers add to the paths."""
        matrices = self.shape.paths.matrices
        f, b, w = (x[paths] for x in matrices[:3])
        first, last = matrices[6][paths], matrices[7][paths]
        if not some:
            return np.zeros((len(f), 0))
        held = list(self.fitting.held(rank))
        f, b, w = f[:, held], b[:, held], w[:, held]
        value = self._laid(some, f, b, w)
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

    def polished(self, row: int, best: Answer, gap: float) -> Answer:
        """The better of the best answer and the neighbours of a row's best, until that row is closed."""
        step, one = self.column.step, self.answers[row]
        if step(self.bounds[row]) < best.seconds * (1 - gap):
            for policy in self.policies:
                one = polished(self.column, self.fitting, policy, one, float(step(self.bounds[row])) / (1 - gap))
            self.lengthen()
        return one if one.seconds < best.seconds else best

    def solved(self, row: int, bar: float, deadline: float | None) -> Answer | None:
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
            answer = program.solve(
                nodes=NODES,
                rounds=TRIES,
                floor=float(column.step(self.bounds[row])),
                gap=EXACT / 2,
                deadline=deadline,
                polish=partial(polished, column, self.fitting, policy),
            )
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
