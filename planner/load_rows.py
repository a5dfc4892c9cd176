"""Which ways to deal a column's layers to its ranks may beat the answer: rows of one option a rank.

A rank's option is a number of layers, and how they lie in its chunks (``planner.dealing``). A row takes at least as long as any kept path of
the schedule: a sum over its ranks. Rank by rank, with the least that the ranks to come must add to each path, only rows are grown that no path
makes too long. Where they are too many still, the likeliest row is simulated; its critical path, and what memory really asks of its ranks,
leave fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from cost_models.chunks import ChunkSeconds, rank_update
from cost_models.pipeline import Path
from cost_models.states import Holding
from planner.column_costs import Costs
from planner.columns import Column, Mix
from planner.dealing import ways
from planner.fitting import Fitting, Policy
from planner.heuristic import spread
from planner.least_recompute import least_recompute
from planner.program import Answer
from planner.recompute_tables import NEVER
from planner.shapes import HIDDEN, Shape

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Span = tuple[int, int]
MOST, LIKELY = 30_000, 1_000
"""Rows kept at most; of more, how many of the likeliest are grown to the end."""
CELLS = 4_000_000
"""Rows times paths kept at most."""
AT_ONCE = 512
"""Rows measured at once: what they add up stays in the processor's caches."""
TIMES, TRIED = 40, 8
"""Times that a row is simulated at most to leave fewer; rows tried each time until one tells something new."""
TIMES_WIDER, TRIED_WIDER = 80, 400
"""The same where more rows are kept."""


NOTHING = ChunkSeconds(0.0, 0.0, 0.0, (), Holding(), (0.0, 0.0))
"""A chunk without layers."""


@dataclass
class Option:
    """Layers that a rank may hold: ``spans`` of its chunks (in the order of ``Fitting.held``); ``again``: least seconds of recompute of a
    microbatch, ``start``, ``end`` what its rank adds to a path that begins or ends there; ``exact``: whether these are those of the best
    mixes."""

    spans: tuple[Span, ...]
    again: float = 0.0
    start: float = 0.0
    end: float = 0.0
    exact: bool = False

    @property
    def layers(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def make_exact(self, column: Column, fitting: Fitting, policies: Sequence[Policy], rank: int) -> None:
        """The recompute of the best mixes, and what the rank then adds at the ends."""
        least = min(least_recompute(fitting, p, rank, self.spans)[0] for p in policies)
        base = sum(float(np.dot(fitting.counts(*s), column.units.least[:, 1])) for s in self.spans)
        self.again, self.exact = max(self.again, least - base), True
        self.start, self.end = ends(column, fitting, rank, self.spans, self.again)


def somewhere(column: Column, held: Sequence[int], sizes: Sequence[int]) -> tuple[Span, ...]:
    """Spans of a rank's chunks of these sizes, somewhere in the model."""
    out, at = [], 0
    for place, (chunk, size) in enumerate(zip(held, sizes, strict=True)):
        ahead = max(at, min(chunk, column.layers - sum(sizes[place:])))
        at = 0 if chunk == 0 else column.layers - size if chunk == column.chunks - 1 else ahead
        out.append((at, at + size))
        at += size
    return tuple(out)


def ends(column: Column, fitting: Fitting, rank: int, spans: Sequence[Span], extra: float) -> tuple[float, float]:
    """Seconds before and after the actions of a rank that holds these layers and recomputes for ``extra`` seconds a microbatch."""
    held = fitting.held(rank)
    if not np.isfinite(extra) or column.job.optimizer == "muon":
        return 0.0, 0.0
    counts = tuple(map(sum, zip(*(fitting.counts(*span) for span in spans), strict=True)))
    whole = column.lightest(counts, first=0 in held, last=column.chunks - 1 in held)
    chunks = [NOTHING] * column.chunks
    chunks[held[0]] = replace(whole, backward_input=whole.backward_input + extra)
    update = rank_update(column.job, column.layout, chunks, rank)
    return update.start, update.end


def simulated(
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


@dataclass
class LoadRows:
    """The rows of a column whose ranks hold ``low`` to ``high`` layers. Layers of kinds other than the main one are priced as the main one's,
    less what they may save (``shapes.Costs``). Where all are alike, or those of another kind lead the model, what memory asks of a rank is made
    exact as it is needed."""

    column: Column
    fitting: Fitting
    policies: Sequence[Policy]
    shape: Shape
    costs: Costs
    low: Ints
    high: Ints
    wider: int = 1
    """How many times as many rows are kept, and of the likeliest grown to the end."""
    options: list[list[Option]] = field(init=False)
    sizes: list[Ints] = field(init=False)
    """By rank: option x chunk, its layers."""

    def __post_init__(self) -> None:
        vpp, tail = self.column.layout.vpp, self.column.layout.rank_of_chunk(self.column.chunks - 1)
        tables, leading = self.shape.again(self.costs, self.column.layers), self.shape.leading
        self.options, self.sizes = [], []
        for rank, (low, high) in enumerate(zip(self.low.tolist(), self.high.tolist(), strict=True)):
            dealt = [way for n in range(low, high + 1) for way in ways(n, vpp, tail=rank == tail)]
            held = self.fitting.held(rank)
            made = [Option(somewhere(self.column, held, way)) for way in dealt]
            least = np.min([table[0, rank] for some, table in enumerate(tables) if not some or rank + some <= leading], axis=0)
            for option in made:
                option.again = float(least[option.layers - 1]) if option.layers <= len(least) else 0.0
            self.options.append(made)
            self.sizes.append(np.array(dealt, np.int64).reshape(len(dealt), vpp))
        self.alike = len(set(self.column.job.model.pattern)) == 1

    def few(self, top: float, gap: float) -> tuple[Ints, float, Answer | None]:
        """(rows that may take less than ``top`` seconds of pipeline and the best answer, what other rows take at least: inf where none was
        left out, the best answer found on the way)."""
        best: Answer | None = None
        bar, column = top, self.column
        times, tried = (TIMES_WIDER, TRIED_WIDER) if self.wider > 1 else (TIMES, TRIED)
        for _ in range(times):
            rows, beyond = self.below(bar)
            if not np.isfinite(beyond) or beyond >= bar * (1 - gap) or not len(rows):
                break
            for row in rows[:tried]:
                new, answer = self.fewer(row)
                if answer is not None and (best is None or answer.seconds < best.seconds):
                    best = answer
                    bar = min(top, best.seconds / column.slowing - column.job.execution.step_overhead_seconds)
                if new:
                    break
            else:
                break
        return rows, beyond, best

    def below(self, top: float) -> tuple[Ints, float]:
        """(rows that no path makes longer than ``top`` seconds, the shortest first; what any row left out takes at least, inf where none
        had to be)."""
        fixed, prices, layers = self._fixed(), [self._price(rank) for rank in range(len(self.options))], self.column.layers
        to_come = self._to_come(prices)
        rows, used, seconds = np.zeros((1, 0), np.int64), np.zeros(1, np.int64), fixed[None, :]
        most = max(1, min(self.wider * MOST, CELLS // max(1, len(fixed))))
        beyond, bound = float("inf"), np.zeros(1)
        for rank, price in enumerate(prices):
            sizes, rest, kept = self.sizes[rank].sum(axis=1), np.ascontiguousarray(to_come[rank + 1].T), []
            for option, size in enumerate(sizes.tolist()):
                at = np.flatnonzero(used + size <= layers)
                longest = _longest(seconds, at, price[:, option], rest, layers - used[at] - size)
                good = np.flatnonzero(longest < top)
                kept.append((at[good], np.full(len(good), option), longest[good]))
            if not kept:
                return np.zeros((0, len(prices)), np.int64), float("inf")
            at, choice, bound = (np.concatenate(parts) for parts in zip(*kept, strict=True))
            if len(at) > most:
                order = np.argsort(bound, kind="stable")
                likely = min(most, self.wider * LIKELY)
                beyond, most, first = min(beyond, float(bound[order[likely]])), likely, order[:likely]
                at, choice, bound = at[first], choice[first], bound[first]
            seconds, used = seconds[at] + price.T[choice], used[at] + sizes[choice]
            rows = np.concatenate([rows[at], choice[:, None]], axis=1)
        return rows[np.argsort(bound, kind="stable")], beyond

    def _to_come(self, prices: Sequence[Floats]) -> list[Floats]:
        """By rank: path x layers left for it and those after it, the least seconds that they add."""
        layers = self.column.layers
        out = [np.full((len(prices[0]), layers + 1), np.inf)]
        out[0][:, 0] = 0.0
        for price, sizes in zip(reversed(prices), reversed(self.sizes), strict=True):
            here = np.full(out[0].shape, np.inf)
            for option, size in enumerate(sizes.sum(axis=1).tolist()):
                if size <= layers:
                    here[:, size:] = np.minimum(here[:, size:], out[0][:, : layers + 1 - size] + price[:, [option]])
            out.insert(0, here)
        return out

    def _fixed(self) -> Floats:
        """By path: transfers, embedding and head, less what layers of other kinds may save."""
        c, leading = self.costs, self.shape.leading
        f, b, w, _, _, p2p, _, _ = self.shape.paths.matrices
        three = np.stack([f, b, w])
        out = p2p * c.transfer[0] + three[:, :, 0].T @ c.embedding[0] + three[:, :, -1].T @ c.head[0] + min(c.least[0], 0.0)
        if leading:
            out = out - leading * (c.quicker[0] @ three[:, :, :leading].max(axis=2))
        result: Floats = out - three.max(axis=0) @ c.credit[0]
        return result

    def _price(self, rank: int) -> Floats:
        """Path x option: what a rank adds to the paths at least."""
        c, some = self.costs, self.options[rank]
        held = list(self.fitting.held(rank))
        f, b, w, pf, pb = (x[:, held] for x in self.shape.paths.matrices[:5])
        first, last = (x == rank for x in self.shape.paths.matrices[6:])
        each = f * c.f[0] + b * c.b[0] + w * c.w[0] - pf * c.hidden[0, 0] - pb * c.hidden[0, 1]
        least, number = b.min(axis=1)[:, None], self.sizes[rank].sum(axis=1)
        exact, again = np.array([o.exact for o in some]), np.minimum(np.array([o.again for o in some]), NEVER)
        start, end = (np.array([getattr(o, name) for o in some]) for name in ("start", "end"))
        whole = least >= 1
        hidden = HIDDEN * (whole & last[:, None] & ~exact)
        out: Floats = each @ self.sizes[rank].T + again * np.where(again >= NEVER, 1.0, least - hidden)
        out += first[:, None] * np.where(exact, start, number * c.start[0])
        out += last[:, None] * np.where(exact, np.where(whole, end, 0.0), number * np.where(whole, c.end_own[0], c.end[0]))
        return out

    def _make_exact(self, rank: int, option: Option) -> None:
        """The recompute of the best mixes. A rank among the leading layers of another kind holds, by where its first chunk starts, more of
        them or fewer: it takes the least of all."""
        (start, stop), *others = option.spans
        starts = range(rank, self.shape.leading + 1) if 0 < rank < self.shape.leading else [start]
        placed = [replace(option, spans=((at, at + stop - start), *others)) for at in starts]
        for one in placed:
            one.make_exact(self.column, self.fitting, self.policies, rank)
        option.again, option.start, option.end = (min(getattr(one, name) for one in placed) for name in ("again", "start", "end"))
        option.exact = True

    def fewer(self, row: Ints) -> tuple[bool, Answer | None]:
        """Simulate a row, its recompute made exact, and keep its critical path: (whether something is known that was not, its answer)."""
        new = False
        chosen = [some[o] for some, o in zip(self.options, row, strict=True)]
        for rank, option in enumerate(chosen):
            if not option.exact and (self.alike or self.shape.leading):
                self._make_exact(rank, option)
                new = True
        if any(option.again >= NEVER for option in chosen):
            return new, None
        of = {c: int(n) for rank, o in enumerate(row) for c, n in zip(self.fitting.held(rank), self.sizes[rank][o], strict=True)}
        found = simulated(self.column, self.fitting, self.policies, tuple(of[c] for c in range(self.column.chunks)), {})
        if found is None:
            return new, None
        return self.shape.paths.add(found[1]) or new, found[0]


def _longest(seconds: Floats, at: Ints, more: Floats, rest: Floats, left: Ints) -> Floats:
    """Of the rows ``at`` (``seconds``: row x path) the longest path, with what one option (``more``: by path) and the ``rest`` (layers left x
    path) add to it."""
    out = np.empty(len(at))
    for start in range(0, len(at), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        here = seconds[at[some]]
        here += more
        here += rest[left[some]]
        here.max(axis=1, out=out[some])
    return out
