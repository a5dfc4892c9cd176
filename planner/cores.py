"""Cores (a row with a schedule and vpp) bounded by arrays, those of one pipeline together: what the search does before it looks at columns one
by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from cost_models.chunks import blocks_transfers
from cost_models.layout import V_SHAPED, divisors
from cost_models.pipeline import simulate
from planner.bulk import Bulk
from planner.column_costs import ROUNDING, Costs
from planner.columns import Column
from planner.core_costs import CoreCosts, Pipeline
from planner.dealing import dealt
from planner.heuristic import balanced
from planner.paths import PathStore
from planner.rows import Rows
from planner.shapes import Shape
from planner.splits import Splits

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Key = tuple[str, int, int, int]
"""(schedule, pp, vpp, microbatches): the shape of a core."""
SAMPLES = 4
"""Rows that are asked which ZeRO stages go with their schedule."""
COARSE, FINE = 5, 12
"""Halvings of the way between a known bound and the answer: of classes by arrays, of a column."""
BLOCK = 1 << 17
"""Numbers (column x rank x layers) of an array that is small enough to stay near the processor."""


@dataclass(frozen=True, slots=True)
class Class:
    """Columns of a core that share their ZeRO stage and the ways ``shard`` in which data parallelism is split."""

    row: int
    key: Key
    zero: int
    shard: int


class Cores(CoreCosts):
    """Every core of some rows, by pipeline; ``store`` keeps paths."""

    def __init__(self, rows: Rows, which: Ints, store: PathStore) -> None:
        super().__init__(rows)
        self.store = store
        self.by = self._grouped(which)
        self._shapes: dict[Key, Shape] = {}
        self._balanced: set[Key] = set()
        self._every: dict[int, tuple[float, Splits]] = {}
        """By number of stages: seconds of pipeline, and the columns whose mean rank may be done within them."""

    def _grouped(self, which: Ints) -> dict[Pipeline, Ints]:
        """Rows by pipeline."""
        rows = self.rows
        pp, slot = rows.table[which, 7], rows.slot[which]
        code = slot * (int(pp.max(initial=1)) + 1) + pp
        order = np.argsort(code, kind="stable")
        by: dict[Pipeline, list[Ints]] = defaultdict(list)
        for part in np.split(which[order], np.flatnonzero(np.diff(code[order])) + 1) if len(which) else []:
            stages = int(rows.table[part[0], 7])
            for batch in rows.slots[rows.slot[part[0]]]:
                by[batch.schedule, stages, batch.vpp].append(part)
        return {pipeline: np.concatenate(parts) for pipeline, parts in by.items()}

    def shape(self, key: Key) -> Shape:
        """The paths of a shape."""
        if key not in self._shapes:
            schedule, pp, vpp, microbatches = key
            blocking = blocks_transfers(self.job, schedule)
            find = partial(self.store.of, schedule, pp, vpp, microbatches, blocking)
            self._shapes[key] = Shape(key, find, self.leading(pp))
        return self._shapes[key]

    # -- what may be done within a time --------------------------------------------------------------------------------

    def zeros(self, pipeline: Pipeline, rows: Ints) -> list[int]:
        """ZeRO stages that columns of a pipeline's cores may have."""
        schedule, pp, vpp = pipeline
        for i in rows[:SAMPLES]:
            row = self.rows[int(i)]
            batch = next(b for b in row.batches if (b.schedule, b.vpp) == (schedule, vpp))
            self.rows.space.stages(row.prefix, batch)
        space = self.rows.space
        return [zero for zero in space.zero_stages(pp > 1) if space.may_go(schedule, pp > 1, zero)]

    def glance(self, pipeline: Pipeline, some: Splits, c: Costs, seconds: float) -> Ints:
        """The columns whose ranks could hold all layers within ``seconds`` of pipeline before the schedule's paths are known: each for itself,
        and all together, as a rank waits for its share of the layers of those before it."""
        schedule, pp, vpp = pipeline
        budget, each, layer = self._budget(pipeline, some, c, np.full(len(some), seconds))
        most = np.floor(budget / each[:, None] + ROUNDING)
        at = np.flatnonzero((most >= vpp).all(axis=1) & (most.sum(axis=1) >= self.main.layers))
        m, spare, ends, less = (x[at] for x in self._around(pipeline, some, c))
        each, enough = each[at], self.main.layers * (1 - ROUNDING)
        share, down, up = layer[at] / each / vpp, np.arange(pp)[::-1], np.arange(pp)
        time = (seconds + less[:, None] + m * (spare - ends)) / each[:, None]
        good = _together(time + up * share[:, None] * (vpp - 1), np.repeat(m, pp, axis=1), share, down) >= enough
        if schedule == "zb-h1":
            # a rank's backwards begin when the first has come back; before that it does the forwards that it may be ahead
            f, b = c.f[at] / each, c.b[at] / each
            own = m - np.minimum(down + 1, m) * f[:, None]
            good &= _together(time - (self.main.layers * f)[:, None], own, b, up) >= enough
        return at[good]

    def _around(self, pipeline: Pipeline, some: Splits, c: Costs) -> tuple[Ints, Floats, Floats, Floats]:
        """(microbatches; column x rank, seconds a microbatch that layers of another kind may save a rank, and those of embedding and head;
        seconds that they may save all ranks)."""
        schedule, pp, vpp = pipeline
        ends = np.zeros((len(some), pp))
        ends[:, 0] += c.embedding.sum(axis=1)
        ends[:, 0 if schedule in V_SHAPED else pp - 1] += c.head.sum(axis=1)
        lead, quicker = self.leading(pp), c.quicker.sum(axis=1)[:, None]
        spare = vpp * c.credit[:, :1] + np.maximum(lead - np.arange(pp), 0) * quicker
        return self.rows.table[some.row, 9][:, None], spare, ends, c.credit.sum(axis=1) + lead * quicker[:, 0]

    def _budget(self, pipeline: Pipeline, some: Splits, c: Costs, seconds: Floats) -> tuple[Floats, Floats, Floats]:
        """(column x rank: seconds a microbatch that it has for its layers, within ``seconds`` of pipeline; by column, seconds of a layer and
        those that it makes later ranks wait). A rank waits for a layer of each chunk before its own, and does all its microbatches; or the
        first one passes all ranks, and a rank does the rest."""
        schedule, pp, _ = pipeline
        m, spare, ends, less = self._around(pipeline, some, c)
        each = np.maximum(c.f + c.b + c.w - c.hidden.sum(axis=1), 1e-30)
        layer = c.f - c.hidden[:, 0] + (c.b + c.w if schedule in ("1f1b", "gpipe", "interleaved") else 0.0)
        wait = np.maximum(0.0, layer[:, None] * np.arange(pp) - less[:, None])
        budget = (seconds[:, None] - wait) / m - ends
        if pp > 1 and schedule in ("1f1b", "gpipe"):
            total = each * self.main.layers + ends.sum(axis=1) - less
            more = np.maximum(m - 1, 1)
            after = (seconds - total)[:, None] / more - ends
            if schedule == "1f1b":
                after += self._ahead(c, some.bulk.f.max(axis=1), after + spare, each, more)
            budget = np.where(m > 1, np.minimum(budget, after), budget)
        return budget + spare, each, layer

    def _recomputing(self, pipeline: Pipeline, some: Splits, c: Costs, seconds: Floats) -> npt.NDArray[np.bool_]:
        """Whether a column's ranks could hold all layers within ``seconds`` of pipeline with the recompute that their memory asks for, at the
        least price of a byte."""
        budget, each, _ = self._budget(pipeline, some, c, seconds)
        most = budget / each[:, None]
        for bytes_, room, price in c.prices(self.flying(pipeline, some.row), self.main.first):
            most = np.minimum(most, (budget + price * room) / (each[:, None] + price * bytes_))
        most = np.floor(most + ROUNDING)
        good: npt.NDArray[np.bool_] = (most >= pipeline[2]).all(axis=1) & (most.sum(axis=1) >= self.main.layers)
        return good

    def _ahead(self, c: Costs, f: Floats, budget: Floats, each: Floats, more: Ints) -> Floats:
        """Column x rank: seconds a microbatch of the forwards that a rank of 1F1B has done when its first backward comes, which the path
        through all ranks does not meet again: at most those of the layers that ``budget`` then has room for; by column ``f`` seconds of the
        slowest layer's forward, ``more`` microbatches after the first."""
        pp = budget.shape[1]
        share = np.minimum(np.arange(pp)[::-1], more) / more
        first = np.zeros_like(budget)
        first[:, 0] = c.embedding[:, 0]
        layers = np.maximum(0.0, budget + share * first) / np.maximum(each[:, None] - share * f[:, None], 1e-30)
        out: Floats = share * (first + f[:, None] * np.minimum(layers, self.main.layers))
        return out

    def within(self, pipeline: Pipeline, rows: Ints, seconds: float) -> list[tuple[float, Class]]:
        """The classes of a pipeline's cores that may be done within ``seconds`` of pipeline, each with its bound: shape by shape, by
        its paths."""
        if pipeline[0] == "dualpipe":
            return self._unbounded(pipeline, rows, seconds)
        looked, found = self._looked(pipeline, rows, seconds), []
        if looked is None:
            return []
        some, costs = looked
        for here in self._by_shape(some.row):
            shape, one = self._shape_of(pipeline, some.row[here]), some.take(here)
            bounds = self._bounds(shape, costs.take(here), one.work, seconds)
            key = (*pipeline, shape.microbatches)
            found += [
                (float(bounds[i]), Class(int(one.row[i]), key, int(one.zero[i]), int(one.shard[i])))
                for i in np.flatnonzero(bounds < np.inf)
            ]
        return found

    def left(self, pipeline: Pipeline, rows: Ints, seconds: float) -> tuple[Ints, float]:
        """(the rows of which a column may be done within ``seconds`` of pipeline, as far as is known without paths; a bound of all of them)."""
        if pipeline[0] == "dualpipe":
            return rows, float(self.rows.work[rows].min(initial=np.inf))
        looked = self._looked(pipeline, rows, seconds)
        if looked is None:
            return rows[:0], np.inf
        some, costs = looked
        low, high = some.work.copy(), np.full(len(some), seconds)
        for _ in range(COARSE):
            middle = (low + high) / 2
            good = self._recomputing(pipeline, some, costs, middle)
            low, high = np.where(good, low, middle), np.where(good, middle, high)
        return np.flatnonzero(np.bincount(some.row)), float(low.min())

    def _looked(self, pipeline: Pipeline, rows: Ints, seconds: float) -> tuple[Splits, Costs] | None:
        """The columns of a pipeline's cores that may be done within ``seconds``, by the mean rank's work, what is known of a schedule without
        its paths, and by its ranks' room; None where there are none."""
        rows = rows[self.rows.work[rows] < seconds]
        if not len(rows):
            return None
        some = self._splits(pipeline, rows, seconds)
        costs = self.timed(some, pipeline)
        at = self.glance(pipeline, some, costs, seconds)
        if not len(at):
            return None
        some, costs = some.take(at), costs.take(at)
        costs = replace(costs, **self.bytes(some, pipeline))
        at = np.flatnonzero(costs.roomy(self.flying(pipeline, some.row), pipeline[2], self.main.layers, self.main.first))
        if not len(at):
            return None
        some, costs = some.take(at), costs.take(at)
        at = np.flatnonzero(self._recomputing(pipeline, some, costs, np.full(len(some), seconds)))
        return (some.take(at), costs.take(at)) if len(at) else None

    def _splits(self, pipeline: Pipeline, rows: Ints, seconds: float) -> Splits:
        """The columns of a pipeline's cores whose mean rank may be done within ``seconds``."""
        pp = pipeline[1]
        if pp not in self._every or self._every[pp][0] < seconds:
            mask = np.zeros(len(self.rows), bool)
            for (schedule, stages, _), some in self.by.items():
                mask[some] |= stages == pp and schedule != "dualpipe"
            every = Splits.every(self.rows, np.flatnonzero(mask & (self.rows.work < seconds)))
            self._every[pp] = seconds, every.take(every.work < seconds)
        every = self._every[pp][1]
        mine = np.zeros(len(self.rows), bool)
        mine[rows] = True
        return every.take(mine[every.row] & np.isin(every.zero, self.zeros(pipeline, rows)) & (every.work < seconds))

    def _unbounded(self, pipeline: Pipeline, rows: Ints, seconds: float) -> list[tuple[float, Class]]:
        """The classes of a schedule whose paths are not kept, with their rows' bounds."""
        zeros = self.zeros(pipeline, rows)
        return [
            (float(s), Class(int(i), (*pipeline, int(self.rows.table[i, 9])), zero, int(d)))
            for s, i in zip(self.rows.seconds(rows), rows, strict=True) if s < seconds
            for zero in zeros
            for d in (divisors(int(self.rows.table[i, 8])) if zero else [1])
        ]  # fmt: skip

    def _by_shape(self, rows: Ints) -> list[Ints]:
        """Places of rows by number of microbatches."""
        m = self.rows.table[rows, 9]
        order = np.argsort(m, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(m[order])) + 1) if len(rows) else []

    def _shape_of(self, pipeline: Pipeline, rows: Ints) -> Shape:
        return self.shape((*pipeline, int(self.rows.table[rows[0], 9])))

    def _bounds(self, shape: Shape, costs: Costs, low: Floats, seconds: float) -> Floats:
        """The bound of every column of a shape, to some precision, ``low`` one that is known; inf where it may not be done in time."""
        out, layers = np.full(len(costs), np.inf), self.main.layers
        at = np.flatnonzero(shape.holds(costs, seconds, layers, memory=False))
        if not len(at):
            return out
        self._know_likely_path((shape.schedule, shape.pp, shape.vpp, shape.microbatches), costs.take(at[:1]))
        size = max(16, BLOCK // (shape.pp * (2 * -(-layers // shape.pp) + 4)))
        for some in np.split(at, range(size, len(at), size)):
            most = np.full(len(some), seconds)
            known = shape.known(costs.take(some), shape.again(costs.take(some), layers))
            good = np.flatnonzero(shape.settle(known.costs, most, layers, memory=True, known=known)[0])
            some, known = some[good], known.take(good)
            out[some] = shape.least(known.costs, np.minimum(low[some], seconds), most[good], layers, steps=COARSE, known=known)
        return out

    def _know_likely_path(self, key: Key, c: Costs) -> None:
        """Keep the path that is longest where the ranks are balanced by the seconds of a column, which those of the schedule alone do not
        show."""
        schedule, pp, vpp, m = key
        if key in self._balanced or pp == 1:
            return
        self._balanced.add(key)
        one, ends = np.array([c.f[0], c.b[0], c.w[0]]), np.stack([c.embedding[0], c.head[0]])
        first, last = ends.sum(axis=1) / max(float(one.sum()), 1e-30)
        ranks = self.shape(key).ranks
        folded = int(ranks[-1]) == 0
        loads = balanced(self.main.layers, pp, first + last if folded else first, 0.0 if folded else last, vpp)
        seconds = np.array(dealt(ranks, loads, vpp), float)[:, None] * one
        seconds[0] += ends[0]
        seconds[-1] += ends[1]
        f, b, w = seconds.T
        timeline = simulate(schedule, pp, vpp, m, f, b, w, float(c.transfer[0]), blocking=blocks_transfers(self.job, schedule))
        self.shape(key).paths.add(timeline.path)

    def exact(self, one: Class, columns: Sequence[Column]) -> Costs:
        """Costs of columns of a class: their own passes and placement."""
        every, number = [column.units for column in columns], len(columns)
        bulk = Bulk(
            np.array([u.f - u.sf for u in every]), np.array([u.b - u.sb for u in every]), np.array([u.w for u in every]),
            np.array([u.embedding for u in every]), np.array([u.least_head for u in every]),
        )  # fmt: skip
        split = Splits.of(self.rows, np.full(number, one.row), one.zero, np.full(number, one.shard), bulk=bulk)
        transfer = np.array([column.transfer for column in columns])
        return replace(self.costs(split, one.key[:3]), transfer=transfer, hidden=np.zeros((number, 2)))

    def bounds(self, key: Key, exact: Costs, low: float, high: float) -> Floats:
        """The bounds of columns between ``low``, a bound, and ``high`` seconds of pipeline, which it is where one may not be faster."""
        shape, layers, out = self.shape(key), self.main.layers, np.full(len(exact), high)
        if low >= high:
            return out
        at = np.flatnonzero(shape.holds(exact, high, layers, memory=False))
        if len(at):
            known = shape.known(exact.take(at), shape.again_each(exact.take(at), layers))
            most = np.full(len(at), high)
            good = np.flatnonzero(shape.settle(known.costs, most, layers, memory=True, known=known)[0])
            known = known.take(good)
            out[at[good]] = shape.least(known.costs, np.full(len(good), low), most[good], layers, steps=FINE, known=known)
        return out


def _together(time: Floats, own: Floats, share: Floats, order: Ints) -> Floats:
    """By column: most layers n of all ranks together where ``own`` n_r + ``share`` x (those of the ranks after r in ``order``) <= ``time`` of
    each rank r: the dual of that linear program, at the prices that meet its every constraint."""
    total, prices = np.zeros(len(time)), np.zeros(len(time))
    for rank in order:
        price = np.maximum(0.0, 1 - share * prices) / np.maximum(own[:, rank], 1e-30)
        total += np.multiply(price, time[:, rank], out=np.zeros(len(time)), where=price > 0)  # time may be without end
        prices += price
    return total
