"""Cores (a row with a schedule and vpp) bounded by arrays, those of one pipeline together: what the search does before it looks at columns one
by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from cost_models.chunks import blocks_transfers
from cost_models.layout import V_SHAPED, divisors
from cost_models.pipeline import simulate
from planner.bulk import Bulk
from planner.columns import Column, PathStore
from planner.core_costs import CoreCosts, Pipeline
from planner.dealing import dealt
from planner.heuristic import balanced
from planner.rows import Rows
from planner.shapes import ROUNDING, Costs, Shape

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Key = tuple[str, int, int, int]
"""(schedule, pp, vpp, microbatches): the shape of a core."""
COARSE, FINE = 5, 12
"""Halvings of the way between a known bound and the answer: of classes by arrays, of a column."""
FEW = 12
"""Rows up to which all splits of data parallelism are looked at together, none of them first by ZeRO stage alone."""
BLOCK = 1 << 17
"""Numbers (row x rank x layers) of an array that is small enough to stay near the processor."""


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
        """ZeRO stages that some column of a pipeline's cores has."""
        space = self.rows.space
        found: set[int] = set()
        for i in rows:
            row = self.rows[int(i)]
            batch = next(b for b in row.batches if (b.schedule, b.vpp) == (pipeline[0], pipeline[2]))
            found |= space.stages(row.prefix, batch)
        return sorted(found)

    def glance(self, pipeline: Pipeline, rows: Ints, seconds: float) -> Ints:
        """The rows whose ranks could hold all layers within ``seconds`` of pipeline before the schedule's paths are known: a rank waits for
        a layer of each chunk before its own, and does all its microbatches; or the first one passes all ranks, and a rank does the rest."""
        schedule, pp, vpp = pipeline
        m = self.rows.table[rows, 9][:, None]
        c = self.quick(rows, pipeline)
        each = c.f + c.b + c.w - c.hidden.sum(axis=1)
        last = 0 if schedule in V_SHAPED else pp - 1
        ends = np.zeros((len(rows), pp))
        ends[:, 0] += c.embedding.sum(axis=1)
        ends[:, last] += c.head.sum(axis=1)
        lead, quicker = self.leading(pp), c.quicker.sum(axis=1)[:, None]
        less = c.credit.sum(axis=1) + lead * quicker[:, 0]
        credit = vpp * c.credit[:, :1]
        spare = credit + np.maximum(lead - np.arange(pp), 0) * quicker
        wait = c.f - c.hidden[:, 0] + (c.b + c.w if schedule in ("1f1b", "gpipe", "interleaved") else 0.0)
        wait = np.maximum(0.0, wait[:, None] * np.arange(pp) - less[:, None])
        budget = (seconds - wait) / m - ends
        if pp > 1 and schedule in ("1f1b", "gpipe"):
            total = each * self.main.layers + ends.sum(axis=1) - less
            more = np.maximum(m - 1, 1)
            after = (seconds - total[:, None]) / more - ends
            if schedule == "1f1b":
                after += self._ahead(rows, c, after + spare, each, more)
            budget = np.where(m > 1, np.minimum(budget, after), budget)
        most = budget + spare
        most = np.floor(most / np.maximum(each[:, None], 1e-30) + ROUNDING)
        good = np.flatnonzero((most >= vpp).all(axis=1) & (most.sum(axis=1) >= self.main.layers))
        rows, budget = rows[good], (budget + credit)[good]
        size = max(16, BLOCK // (pp * (2 * -(-self.main.layers // pp) + 4)))
        kept = [
            rows[at][self._ranks_hold(pipeline, rows[at], budget[at])]
            for start in range(0, len(rows), size)
            for at in [slice(start, start + size)]
        ]
        return np.concatenate([rows[:0], *kept])

    def _ranks_hold(self, pipeline: Pipeline, rows: Ints, budget: Floats) -> npt.NDArray[np.bool_]:
        """``Shape.ranks_hold`` of rows whose ranks have ``budget``, under the most sharding."""
        good = np.zeros(len(rows), bool)
        for at in self._by_once(rows):
            c = self.costs(rows[at], pipeline, max(self.rows.held.state), rows[at], bare=True)
            shape = self.shape((*pipeline, int(self.rows.table[rows[at[0]], 9])))
            good[at] = shape.ranks_hold(c, self.flying(pipeline, rows[at]), budget[at], self.main.layers)
        return good

    def _by_once(self, rows: Ints) -> Iterator[Ints]:
        """Places of rows of one microbatch, and of the others."""
        once = self.rows.table[rows, 9] == 1
        return (at for at in (np.flatnonzero(once), np.flatnonzero(~once)) if len(at))

    def _ahead(self, rows: Ints, c: Costs, budget: Floats, each: Floats, more: Ints) -> Floats:
        """Row x rank: seconds a microbatch of the forwards that a rank of 1F1B has done when its first backward comes, which the path
        through all ranks does not meet again: at most those of the layers that ``budget`` then has room for; ``more``: microbatches after
        the first, by row."""
        pp = budget.shape[1]
        share = np.minimum(np.arange(pp)[::-1], more) / more
        f = self.passes(rows).f.max(axis=1)[:, None]
        first = np.zeros_like(budget)
        first[:, 0] = c.embedding[:, 0]
        layers = np.maximum(0.0, budget + share * first) / np.maximum(each[:, None] - share * f, 1e-30)
        out: Floats = share * (first + f * np.minimum(layers, self.main.layers))
        return out

    def within(self, pipeline: Pipeline, rows: Ints, seconds: float) -> list[tuple[float, Class]]:
        """The classes of a pipeline's cores that may be done within ``seconds`` of pipeline, each with its bound."""
        if pipeline[0] == "dualpipe":
            return self._unbounded(pipeline, rows, seconds)
        rows = self.glance(pipeline, rows, seconds)
        return [found for at in self._by_once(rows) for found in self._classes(pipeline, rows[at], seconds)]

    def _unbounded(self, pipeline: Pipeline, rows: Ints, seconds: float) -> list[tuple[float, Class]]:
        """The classes of a schedule whose paths are not kept, with their rows' bounds."""
        zeros = self.zeros(pipeline, rows)
        return [
            (float(s), Class(int(i), (*pipeline, int(self.rows.table[i, 9])), zero, int(d)))
            for s, i in zip(self.rows.seconds(rows), rows, strict=True) if s < seconds
            for zero in zeros
            for d in (divisors(int(self.rows.table[i, 8])) if zero else [1])
        ]  # fmt: skip

    def _classes(self, pipeline: Pipeline, rows: Ints, seconds: float) -> list[tuple[float, Class]]:
        """``within`` for rows that passed the first glance: by the schedule's paths, then by ZeRO stage, then by every split of data
        parallelism. Costs are found for all rows at once, the rest shape by shape."""
        layers, quick = self.main.layers, self.quick(rows, pipeline)
        kept = [
            at[self._shape_of(pipeline, rows[at]).holds(quick.take(at), seconds, layers, memory=False)]
            for at in self._by_shape(rows)
        ]
        rows = rows[np.concatenate(kept)] if kept else rows[:0]
        if not len(rows):
            return []
        for at in self._by_shape(rows):
            self._know_likely_path((*pipeline, int(self.rows.table[rows[at[0]], 9])), rows[at])
        zeros = self.zeros(pipeline, rows)
        at, zero, shard = self._splits(rows, zeros, self._stages(pipeline, rows, zeros, seconds))
        if not len(at):
            return []
        parts = [self.costs(at[zero == z], pipeline, z, shard[zero == z]) for z in zeros if (zero == z).any()]
        costs, found = Costs.joined(parts), []
        for some in self._by_shape(at):
            shape = self._shape_of(pipeline, at[some])
            bounds = self._bounds(shape, costs.take(some), at[some], seconds)
            key = (*pipeline, shape.microbatches)
            found += [
                (b, Class(int(at[i]), key, int(zero[i]), int(shard[i]))) for i, b in zip(some, bounds, strict=True) if b < np.inf
            ]
        return found

    def _by_shape(self, rows: Ints) -> list[Ints]:
        """Places of rows by number of microbatches."""
        m = self.rows.table[rows, 9]
        order = np.argsort(m, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(m[order])) + 1) if len(rows) else []

    def _shape_of(self, pipeline: Pipeline, rows: Ints) -> Shape:
        return self.shape((*pipeline, int(self.rows.table[rows[0], 9])))

    def _stages(self, pipeline: Pipeline, rows: Ints, zeros: Sequence[int], seconds: float) -> npt.NDArray[np.bool_]:
        """Row x ZeRO stage: whether some column may be done in time, as far as its stage alone tells; of few rows it is not asked."""
        good = np.ones((len(rows), len(zeros)), bool)
        shapes = [at for at in self._by_shape(rows) if len(at) > FEW]
        if not shapes:
            return good
        costs = [self.costs(rows, pipeline, zero, rows, bare=True) for zero in zeros]
        for at in shapes:
            all_ = Costs.joined([c.take(at) for c in costs])
            holds = self._shape_of(pipeline, rows[at]).holds(all_, seconds, self.main.layers, memory=True)
            good[at] = holds.reshape(len(zeros), len(at)).T
        return good

    def _splits(self, rows: Ints, zeros: Sequence[int], good: npt.NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
        """(row, ZeRO stage, ways in which data parallelism is split) of all columns of rows under the stages that are ``good``."""
        out = [(rows[:0], rows[:0], rows[:0])]
        for place, zero in enumerate(zeros):
            some = rows[good[:, place]]
            ways = [np.array(divisors(int(d)) if zero else [1]) for d in self.rows.table[some, 8]]
            at = np.repeat(some, [len(w) for w in ways])
            out.append((at, np.full(len(at), zero), np.concatenate([rows[:0], *ways])))
        row, zero_, shard = (np.concatenate(x) for x in zip(*out, strict=True))
        return row, zero_, shard

    def _bounds(self, shape: Shape, costs: Costs, rows: Ints, seconds: float) -> Floats:
        """The bound of every column of a shape, to some precision; inf where it may not be done in time."""
        out, layers = np.full(len(rows), np.inf), self.main.layers
        at = np.flatnonzero(shape.holds(costs, seconds, layers, memory=False))
        if not len(at):
            return out
        costs = costs.take(at)
        again = shape.again(costs, layers)
        good = np.flatnonzero(shape.settle(costs, np.full(len(at), seconds), layers, memory=True, again=again)[0])
        if len(good):
            at, again = at[good], [table[good] for table in again]
            low = np.minimum(self.rows.seconds(rows[at]), seconds)
            out[at] = shape.least(costs.take(good), low, np.full(len(at), seconds), layers, steps=COARSE, again=again)
        return out

    def _know_likely_path(self, key: Key, rows: Ints) -> None:
        """Keep the path that is longest where the ranks are balanced by seconds, which those of the schedule alone do not show."""
        schedule, pp, vpp, m = key
        if key in self._balanced or pp == 1:
            return
        self._balanced.add(key)
        c = self.quick(rows[:1], key[:3])
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

    def exact(self, one: Class, column: Column) -> Costs:
        """Costs of one column: its own passes and placement."""
        rows, key, u = np.array([one.row]), one.key, column.units
        bulk = Bulk(u.f[None] - u.sf[None], u.b[None] - u.sb[None], u.w[None], np.array([u.embedding]), np.array([u.least_head]))
        chosen = self.costs(rows, key[:3], one.zero, np.array([one.shard]), bulk=bulk)
        return replace(chosen, transfer=np.array([column.transfer]), hidden=np.zeros((1, 2)))

    def bound(self, key: Key, chosen: Costs, low: float, high: float) -> float:
        """The bound of one column between ``low``, a bound, and ``high`` seconds of pipeline, which it is where it may not be faster."""
        shape, layers = self.shape(key), self.main.layers
        if low >= high or not all(shape.holds(chosen, high, layers, memory=memory)[0] for memory in (False, True)):
            return high
        return float(shape.least(chosen, np.array([low]), np.array([high]), layers, steps=FINE)[0])
