"""What a pipeline of one shape (schedule, pp, vpp, microbatches) can do within T: layers that ranks can hold, by arrays of columns.

A rank that is to be done within T holds layers whose seconds along every kept path of the schedule, beside the least that other ranks add to
that path, stay within T, and whose states and activations in flight stay within its memory. How many layers it can hold is a linear program
with two rows (seconds, bytes), so that two recompute modes at most are mixed: all pairs are tried at once. What ranks can hold bounds from
below what the others must hold, which bounds again what they add to a path: a few rounds settle it. If the ranks together cannot hold the
model, no layout of the column is done within T, however it is split and recomputed; the least T for which they can is the column's bound.

How a rank's layers lie in its chunks is part of the declared space (``planner.dealing``), so that what they add to a path is known by their
number; where there are two ways, the one that adds less bounds both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from cost_models.communication import INTERFERENCE
from cost_models.update import USABLE
from planner.column_costs import ROUNDING, Costs
from planner.dealing import FREE, order
from planner.flying import Flying, in_flight
from planner.paths import Paths, ranks_of
from planner.recompute_tables import NEVER, Bytes, least_again, least_again_in_whole_layers

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
HIDDEN = USABLE * (1 - INTERFERENCE)
"""Seconds of a rank's gradient reduction that a second more of its backward hides at most."""
REMEMBERED = 64
"""Columns whose recompute in whole layers is kept for each shape."""
ROUNDS = 6
"""Rounds of propagation: each only tightens."""


@dataclass(frozen=True)
class _Dealt:
    """Seconds of a rank's own layers along paths, memory left out: column x path, of one in ``each`` of its chunks; of 1, 2, ... ``more``,
    by way in which they may be dealt."""

    each: Floats
    more: tuple[Floats, ...]

    def take(self, at: Ints) -> _Dealt:
        """The columns ``at``."""
        return _Dealt(self.each[at], tuple(way[at] for way in self.more))

    def most(self, room: Floats) -> Floats:
        """Column x path: most layers within ``room`` seconds."""
        chunks = 1 + self.more[0].shape[2]
        rounds: Floats = np.floor(room / self.each + ROUNDING)
        if chunks == 1:
            return rounds
        left = (room - (rounds - ROUNDING) * self.each)[:, :, None]
        rest: Ints = np.max([np.count_nonzero(way <= left, axis=2) for way in self.more], axis=0)
        out: Floats = rounds * chunks + rest
        return out


@dataclass(frozen=True)
class _Whole:
    """Column x path x number of layers: seconds of so many, or more, with the recompute that memory asks for."""

    seconds: Floats

    def take(self, at: Ints) -> _Whole:
        """The columns ``at``."""
        return _Whole(self.seconds[at])

    def most(self, room: Floats) -> Floats:
        """Column x path: most layers within ``room`` seconds; without end where all that are counted are."""
        out: Floats = np.count_nonzero(self.seconds <= room[:, :, None], axis=2).astype(float)
        out[out == self.seconds.shape[2]] = np.inf
        return out


Need = tuple[Ints, _Dealt | _Whole]
"""Paths, and what whole layers ask for along them."""


@dataclass(frozen=True)
class _Known:
    """What columns cost along paths, whatever the time allowed: ``fixed`` seconds and those by which a leading layer is ``quicker``, column
    x path; what whole layers need, by number of leading ones."""

    costs: Costs
    fixed: Floats
    quicker: Floats
    needs: list[Need]

    def take(self, at: Ints) -> _Known:
        """The columns ``at``."""
        needs = [(paths, need.take(at)) for paths, need in self.needs]
        return _Known(self.costs.take(at), self.fixed[at], self.quicker[at], needs)


class Shape:
    """A schedule's paths and fullest moments, by rank; ``find`` makes the paths when they are asked for; ``leading``: layers of another
    kind before all others."""

    def __init__(self, key: tuple[str, int, int, int], find: Callable[[], Paths], leading: int = 0) -> None:
        self.schedule, self.pp, self.vpp, self.microbatches = key
        self.leading = leading
        self.chunks, self._find = self.pp * self.vpp, find
        self.ranks = ranks_of(self.schedule, self.pp, self.chunks)
        self.mine = self.ranks[None, :] == np.arange(self.pp)[:, None]
        self.deals = self._deals()
        self._table: _Table | None = None
        self._again: dict[bytes, list[Floats]] = {}
        """``again`` of the columns asked for last."""

    def _deals(self) -> list[Ints]:
        """Rank x chunk of it, in the order in which they get a layer more; each way in which they may."""
        held = [np.flatnonzero(row) for row in self.mine]
        first = [some[list(order(len(some), tail=bool(some[-1] == self.chunks - 1)))] for some in held]
        both = [first, [some[::-1] for some in first]] if self.vpp == FREE else [first]
        return [np.array(way) for way in both]

    @cached_property
    def paths(self) -> Paths:
        """Kept paths."""
        return self._find()

    @property
    def table(self) -> _Table:
        """The paths kept so far."""
        if self._table is None or len(self._table.rank) != len(self.paths.rows):
            self._table = _Table.of(self.paths, self.mine, self.leading, self.deals)
        return self._table

    @cached_property
    def flying(self) -> Flying:
        """What every rank has in flight."""
        return in_flight(self.schedule, self.pp, self.vpp, self.microbatches)

    def again(self, c: Costs, layers: int) -> list[Floats]:
        """By number of leading layers on a rank, of the ranks that may hold so many: ``recompute_tables.least_again``; of one column in
        whole layers."""
        return self._tables(c, layers) if len(c) > 1 else self.again_each(c, layers)

    def again_each(self, c: Costs, layers: int) -> list[Floats]:
        """``again`` of columns one by one."""
        found = []
        for i in range(len(c)):
            one = c.take([i])
            mark = one.mark()
            if mark not in self._again:
                if len(self._again) >= REMEMBERED:
                    self._again.clear()
                self._again[mark] = self._tables(one, layers, partial(least_again_in_whole_layers, tried=-(-layers // self.pp) + 2))
            found.append(self._again[mark])
        return [np.concatenate(tables) for tables in zip(*found, strict=True)]

    def _tables(self, c: Costs, layers: int, find: Callable[..., Floats] = least_again) -> list[Floats]:
        top = min(layers - (self.pp - 1) * self.vpp, 2 * -(-layers // self.pp) + 4)
        first = c.ahead_bytes[:, 0], c.ahead_bytes[:, 1], c.ahead_bytes[:, 2]
        bytes_ = Bytes(c.state, c.kept, c.again, c.waits, c.above, c.room + c.lighter, c.spare, first)
        out = []
        for some in range(self.leading + 1):
            ranks = self.leading - some + 1 if some else self.pp
            mine, here = bytes_.ranks(ranks), ([group.ranks(ranks) for group in moment] for moment in self.flying.moments)
            out.append(np.max([find(mine, moment, top, some) for moment in here], axis=0))
        return out

    def holds(self, c: Costs, seconds: float | Floats, layers: int, *, memory: bool) -> Bools:
        """Whether a column may be done in ``seconds`` of pipeline (a bound: True proves nothing)."""
        return self.settle(c, np.broadcast_to(seconds, len(c)), layers, memory=memory)[0]

    def settle(
        self,
        c: Costs,
        seconds: Floats,
        layers: int,
        *,
        memory: bool,
        known: _Known | None = None,
    ) -> tuple[Bools, Floats, Floats]:
        """(whether a column may be done in ``seconds`` of pipeline, fewest and most layers of each rank if it is). ``known``: what
        the columns cost along paths, where that is known."""
        if known is None:
            known = self.known(c, self.again(c, layers) if memory else [])
        number = len(c)
        low = np.full((number, self.pp), float(self.vpp))
        high = np.full((number, self.pp), float(layers - (self.pp - 1) * self.vpp))
        alive, open_ = np.zeros(number, bool), np.ones(number, bool)
        some = np.arange(number)  # those looked at: fewer once most of them are settled
        for _ in range(ROUNDS):
            at = np.flatnonzero(open_[some])
            if not len(at):
                break
            if 2 * len(at) < len(some):
                some, known = some[at], known.take(at)
            new = self._most_of_ranks(known, seconds[some], low[some], high[some], layers)
            total = new.sum(axis=1)
            good = open_[some] & (new >= self.vpp).all(axis=1) & (total >= layers)
            floor = np.maximum(low[some], layers - (total[:, None] - new))
            settled = good & (new == high[some]).all(axis=1) & (floor == low[some]).all(axis=1)
            now = open_[some]
            high[some[now]], low[some[now]] = np.maximum(new, 0.0)[now], floor[now]
            alive[some[settled]] = True
            open_[some] = good & ~settled
        alive |= open_
        return alive, low, high

    def known(self, c: Costs, tables: list[Floats]) -> _Known:
        """What columns cost along the paths kept so far; ``tables``: of ``again``, none where memory is left out."""
        t = self.table
        least = np.where(t.least_b >= 1, t.least_b - HIDDEN * t.ends, t.least_b)
        return _Known(c, self._fixed(c), c.quicker @ t.lead_own, self._needs(c, tables, least))

    def _most_of_ranks(self, known: _Known, seconds: Floats, low: Floats, high: Floats, layers: int) -> Floats:
        """Column x rank: the most whole layers that every path leaves time, and the rank has room for; less than nothing where
        the others' least is too long already."""
        budget = seconds[:, None] - known.fixed - self._others(known.costs, low, high, layers)
        most = self._capacity(known.needs, budget, known.quicker, layers)
        out, t = high.copy(), self.table
        some = t.rank[t.starts_of_rank]
        out[:, some] = np.minimum(out[:, some], np.minimum.reduceat(most, t.starts_of_rank, axis=1))
        return out

    def _needs(self, c: Costs, tables: list[Floats], again: Floats) -> list[Need]:
        """What whole layers ask for, by number of leading ones: their recompute ``again`` times its seconds."""
        t, out = self.table, list[Need]()
        work = t.work(c, tables[0].shape[2]) if tables else None
        dealt = None if tables else t.dealt(c)
        for leading in range(self.leading + 1):
            at = np.flatnonzero(t.rank + leading <= self.leading) if leading else np.arange(len(t.rank))
            if not len(at):
                break
            if work is None:
                assert dealt is not None
                out.append((at, dealt if not leading else _Dealt(dealt.each[:, at], tuple(way[:, at] for way in dealt.more))))
                continue
            table, each = tables[leading][:, t.rank[at]], work[:, at]
            whole = each - ROUNDING * each[:, :, :1] + again[at, None] * table
            whole[table >= NEVER] = np.inf
            out.append((at, _Whole(np.minimum.accumulate(whole[:, :, ::-1], axis=2)[:, :, ::-1])))
        return out

    def _capacity(self, needs: list[Need], budget: Floats, quicker: Floats, layers: int) -> Floats:
        """Column x path: most whole layers within ``budget`` seconds, a leading one taking ``quicker`` less; -1 where there is less than
        nothing."""
        best = np.full(budget.shape, -1.0)
        for leading, (at, need) in enumerate(needs):
            room = budget + leading * quicker if len(at) == budget.shape[1] else budget[:, at] + leading * quicker[:, at]
            most = np.where(room < 0, -1.0, np.minimum(need.most(np.clip(room, 0.0, NEVER)), layers))
            if len(at) == budget.shape[1]:
                np.maximum(best, most, out=best)
            else:
                best[:, at] = np.maximum(best[:, at], most)
        return best

    def _fixed(self, c: Costs) -> Floats:
        """Column x path: transfers, embedding and head, and what other kinds' layers may save."""
        t = self.table
        out = c.transfer[:, None] * t.p2p + c.embedding @ t.first + c.head @ t.last + c.least[:, None]
        if self.leading:
            out = out - self.leading * (c.quicker @ t.lead_others)
        result: Floats = out - c.credit @ t.most.T
        return result

    def _others(self, c: Costs, low: Floats, high: Floats, layers: int) -> Floats:
        """Column x path: the least that chunks of other ranks add. Each rank holds ``low`` layers at least, and all hold
        ``layers``: what is left of what they can hold, at most, is missing anywhere."""
        t = self.table
        ends = low[:, t.first_rank] * c.start[:, None] * (1 - t.starts) + low[:, t.last_rank] * c.end[:, None] * (1 - t.ends)
        missing = high.sum(axis=1) - layers
        worst = c.f[:, None] * t.peak[:, 0] + c.b[:, None] * t.peak[:, 1] + c.w[:, None] * t.peak[:, 2]
        by_low, by_high = self._along(c, low, high)
        result: Floats = np.maximum(by_low, by_high - missing[:, None] * worst) + ends
        return result

    def _along(self, c: Costs, *loads: Floats) -> Floats:
        """Loads x column x path: what loads of other ranks add at least."""
        some = np.stack(loads)
        parts = [some]
        if self.vpp > 1:
            each = np.floor(some / self.vpp)
            rest = (some - each * self.vpp)[..., None] == np.arange(1, self.vpp)
            parts = [each, rest.reshape(*some.shape[:2], -1).astype(float)]
        weighed = np.concatenate([seconds[:, None] * part for part in parts for seconds in (c.f, c.b, c.w)], axis=2)
        out: Floats = weighed @ (self.table.bare if c.hidden.any() else self.table.other)
        return out

    def least(self, c: Costs, low: Floats, high: Floats, layers: int, *, steps: int = 14, known: _Known | None = None) -> Floats:
        """The least seconds between ``low`` (a known bound) and ``high`` that each column may be done in, to 1/2^steps of their
        difference; ``high`` where it may not. ``known`` as in ``settle``."""
        low, high = low.copy(), high.copy()
        known = self.known(c, self.again(c, layers)) if known is None else known
        for _ in range(steps):
            middle = (low + high) / 2
            good = self.settle(c, middle, layers, memory=True, known=known)[0]
            high, low = np.where(good, middle, high), np.where(good, low, middle)
        return low


@dataclass(frozen=True)
class _Table:
    """Paths as the propagation reads them, sorted by the ``rank`` whose work they follow (where its paths begin: ``starts_of_rank``): ``own``
    coefficients (f, b, w, what pairs hide of f and b, start, end of one's own, end) x path of a layer in each of its chunks, ``more`` by way
    of dealing those of the layers that do not divide (0 to chunks - 1 of them); ``least_b`` the least b of its chunks; ``other``, ``bare``
    (without what pairs hide) what other ranks' chunks add: as ``_by_rank`` has it; ``peak`` the largest of other ranks' coefficients; ``most``
    the largest coefficient of each chunk; ``lead_own`` and ``lead_others`` (f, b, w) those of the chunk of its own rank that may hold leading
    layers, and the largest of other ranks' such chunks; ``first``, ``last`` those of embedding and head; ``p2p`` transfers; ``starts``,
    ``ends`` whether the path begins and ends on its own rank, ``first_rank``, ``last_rank`` where it does."""

    rank: Ints
    vpp: int
    own: Floats
    more: tuple[Floats, ...]
    least_b: Floats
    other: Floats
    bare: Floats
    peak: Floats
    most: Floats
    lead_own: Floats
    lead_others: Floats
    first: Floats
    last: Floats
    p2p: Floats
    starts: Floats
    ends: Floats
    first_rank: Ints
    last_rank: Ints
    starts_of_rank: Ints

    @classmethod
    def of(cls, paths: Paths, mine: Bools, leading: int, deals: Sequence[Ints]) -> _Table:
        f, b, w, pf, pb, p2p, first, last = paths.matrices
        follows: Ints = ((f + b + w) @ mine.T.astype(float)).argmax(axis=1)
        order = np.argsort(follows, kind="stable")
        f, b, w, pf, pb, p2p = (x[order] for x in (f, b, w, pf, pb, p2p))
        first, last = first[order], last[order]
        rank = follows[order]
        three = np.stack([f, b, w])
        at = mine[rank]
        vpp, path = deals[0].shape[1], np.arange(len(f))
        least_b, starts, ends = np.where(at, b, np.inf).min(axis=1), (first == rank).astype(float), (last == rank).astype(float)
        ended = np.stack([starts, ends * (least_b >= 1), ends * (least_b < 1)])
        five = np.concatenate([three, pf[None], pb[None]])
        more = [np.concatenate([_partial(five[:, path[:, None], way[rank]]), ended[:, :, None] * np.arange(vpp)]) for way in deals]
        own = np.concatenate([(five * at).sum(axis=2), ended * vpp])
        other = three * ~at
        bare = np.stack([other[0] - pf * ~at, other[1] - pb * ~at, other[2]])
        return cls(
            rank, vpp, own, tuple(more), least_b, _by_rank(other, mine, deals), _by_rank(bare, mine, deals),
            other.max(axis=2).T, three.max(axis=0), *_leading(three, rank, leading), three[:, :, 0], three[:, :, -1], p2p,
            starts, ends, first, last, np.flatnonzero(np.diff(rank, prepend=-1)),
        )  # fmt: skip

    def work(self, c: Costs, most: int) -> Floats:
        """Column x path x number of layers (1 to ``most``): seconds of a rank's own layers along its path, dealt out in the best way."""
        each, rest = np.divmod(np.arange(1, most + 1), self.vpp)
        weights, shape = _weights(c), (len(c), len(self.rank), most)
        out: Floats | None = None
        for more in self.more:
            amounts = self.own[:, :, None] * each + more[:, :, rest]
            one = (weights @ amounts.reshape(len(amounts), -1)).reshape(shape)
            out = one if out is None else np.minimum(out, one)
        assert out is not None
        return out

    def dealt(self, c: Costs) -> _Dealt:
        """What own layers take along every path, memory left out."""
        weights, shape = _weights(c), (len(c), len(self.rank), self.vpp - 1)
        ways = tuple((weights @ more[:, :, 1:].reshape(len(more), -1)).reshape(shape) for more in self.more)
        return _Dealt(np.maximum(weights @ self.own, 1e-30), ways)


def _weights(c: Costs) -> Floats:
    """Column x coefficient of ``_Table.own``: its seconds."""
    return np.stack([c.f, c.b, c.w, -c.hidden[:, 0], -c.hidden[:, 1], c.start, c.end_own, c.end], axis=1)


def _partial(steps: Floats) -> Floats:
    """Sums of the first 0, 1, ... of the last axis, all of them left out."""
    out = np.zeros(steps.shape)
    out[..., 1:] = np.cumsum(steps[..., :-1], axis=-1)
    return out


def _by_rank(three: Floats, mine: Bools, deals: Sequence[Ints]) -> Floats:
    """What a layer in each chunk of a rank adds to a path, by (f, b, w) and rank, then what 1, 2, ... layers that do not divide add in the way
    that adds least, by (f, b, w), rank and number: as rows, path by path."""
    more = np.min([_partial(three[:, :, way])[..., 1:] for way in deals], axis=0)
    paths = three.shape[1]
    rows = [three @ mine.T.astype(float), more.reshape(3, paths, -1)]
    return np.concatenate([np.moveaxis(x, 1, 2).reshape(-1, paths) for x in rows])


def _leading(three: Floats, rank: Ints, leading: int) -> tuple[Floats, Floats]:
    """(f, b, w) x path: coefficients of the chunk of the path's own rank among the first ``leading``, and the largest of the other ones."""
    first = three[:, :, : max(1, leading)]
    mine = rank[:, None] == np.arange(first.shape[2])
    return (first * mine).sum(axis=2), np.where(mine, 0.0, first).max(axis=2)
