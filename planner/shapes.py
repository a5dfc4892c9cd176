"""What a pipeline of one shape (schedule, pp, vpp, microbatches) can do within T: layers that ranks can hold, by arrays of columns.

A rank that is to be done within T holds layers whose seconds along every kept path of the schedule, beside the least that other ranks add to
that path, stay within T, and whose states and activations in flight stay within its memory. How many layers it can hold is a linear program
with two rows (seconds, bytes), so that two recompute modes at most are mixed: all pairs are tried at once. What ranks can hold bounds from
below what the others must hold, which bounds again what they add to a path: a few rounds settle it. If the ranks together cannot hold the
model, no layout of the column is done within T, however it is split and recomputed; the least T for which they can is the column's bound.

Chunks of one rank differ by at most one layer (the declared space), so that a rank's load is its layers times a mean over its chunks, less
what the largest possible imbalance takes off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.communication import INTERFERENCE
from cost_models.layout import V_SHAPED
from cost_models.schedules import KINDS, order_rows, period
from cost_models.update import USABLE
from planner.columns import Paths
from planner.recompute_tables import NEVER, Bytes, Group, least_again, least_again_in_whole_layers

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
ROUNDING = 1e-9
"""Layers by which a capacity may miss a whole number through rounding."""
HIDDEN = USABLE * (1 - INTERFERENCE)
"""Seconds of a rank's gradient reduction that a second more of its backward hides at most."""
ROUNDS = 6
"""Rounds of propagation: each only tightens."""


@dataclass(frozen=True)
class Costs:
    """Costs of columns of one shape, by column first. Seconds of one microbatch: ``f``, ``b`` (least mode), ``w`` of a layer of the main
    kind, ``again`` column x mode what recompute adds; ``embedding``, ``head`` column x (f, b, w); ``transfer``; ``hidden`` column x (f, b)
    what a pair hides of a layer; ``start``, ``end``, ``end_own``, ``least``: ``bulk_sharding.Ends``. Bytes: ``state`` and ``kept`` column
    x mode of a layer, ``waits`` what it holds for its weight gradient, ``room`` column x rank; ``spare``: what a rank has for one
    layer's whole tensors without more room (inf: it never needs them). ``credit``: seconds by column and chunk by which one
    microbatch may pass layers of other kinds faster; ``lighter``: bytes by column and rank by which they may need other; where
    those of another kind lead the model, instead ``ahead`` column x (f, b, w) seconds and ``ahead_bytes`` column x (state, kept in
    the least mode, waits) of one of them."""

    f: Floats
    b: Floats
    w: Floats
    again: Floats
    embedding: Floats
    head: Floats
    transfer: Floats
    hidden: Floats
    start: Floats
    end: Floats
    end_own: Floats
    least: Floats
    state: Floats
    kept: Floats
    waits: Floats
    room: Floats
    spare: Floats
    credit: Floats
    lighter: Floats
    ahead: Floats
    ahead_bytes: Floats

    @property
    def quicker(self) -> Floats:
        """Column x (f, b, w): seconds by which a leading layer is quicker."""
        return np.maximum(0.0, np.stack([self.f, self.b, self.w], axis=1) - self.ahead)

    def take(self, at: Any) -> Costs:
        """The columns ``at``."""
        return Costs(*(getattr(self, name)[at] for name in self.__dataclass_fields__))

    @classmethod
    def joined(cls, parts: Sequence[Costs]) -> Costs:
        """All columns of ``parts``."""
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in cls.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.f)

    def mark(self) -> bytes:
        """Equal for equal costs."""
        return b"".join(np.ascontiguousarray(getattr(self, name)).tobytes() for name in self.__dataclass_fields__)


Need = tuple[Ints, Floats, Floats | None]
"""Paths, and of those column x path: seconds of one layer, and x number of layers: seconds of so many with the recompute that memory asks
for (None: memory is left out)."""


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
        needs = [(paths, each[at], None if whole is None else whole[at]) for paths, each, whole in self.needs]
        return _Known(self.costs.take(at), self.fixed[at], self.quicker[at], needs)


@dataclass(frozen=True)
class Flying:
    """By rank, at its moment with most in flight: microbatches ``alive`` and ``waiting`` for their weight gradient, in the
    mean over its
    chunks; what an imbalance of its chunks may take off each, in layers; microbatches alive of the last chunk where the rank
    holds it."""

    alive: Floats
    alive_off: Floats
    waiting: Floats
    waiting_off: Floats
    tail: Floats
    groups: tuple[Group, ...]
    """Chunks alike: the two of a V-shaped schedule's rank apart, else all of them, with what the least of them has alive at least (in the
    mean of moments that makes this most)."""


class Shape:
    """A schedule's paths and fullest moments, by rank; ``find`` makes the paths when they are asked for; ``leading``: layers of another
    kind before all others."""

    def __init__(self, key: tuple[str, int, int, int], find: Callable[[], Paths], leading: int = 0) -> None:
        self.schedule, self.pp, self.vpp, self.microbatches = key
        self.leading = leading
        self.chunks, self._find = self.pp * self.vpp, find
        chunk = np.arange(self.chunks)
        self.ranks = np.where(chunk < self.pp, chunk, 2 * self.pp - 1 - chunk) if self.schedule in V_SHAPED else chunk % self.pp
        self.mine = self.ranks[None, :] == np.arange(self.pp)[:, None]
        self._table: _Table | None = None
        self._again: dict[bytes, list[Floats]] = {}
        """``again`` of the column asked for last."""

    @cached_property
    def paths(self) -> Paths:
        """Kept paths."""
        return self._find()

    @property
    def table(self) -> _Table:
        """The paths kept so far."""
        if self._table is None or len(self._table.rank) != len(self.paths.rows):
            self._table = _Table.of(self.paths, self.mine, self.leading)
        return self._table

    @cached_property
    def flying(self) -> Flying:
        """What every rank has in flight, from the order of its actions (as ``schedules.in_flight``, its fullest moment alone)."""
        schedule, pp, vpp, m = self.schedule, self.pp, self.vpp, self.microbatches
        shift = period(schedule, pp, vpp, m)
        if shift:
            m = min(m, (4 * pp // shift + 3) * shift + m % shift)
        folded = schedule in V_SHAPED
        groups = tuple(Group(np.zeros(pp), np.zeros(pp)) for _ in range(2 if folded else 1))
        out = Flying(np.zeros(pp), np.zeros(pp), np.zeros(pp), np.zeros(pp), np.zeros(pp), groups)
        forward, split, weight = KINDS.index("F"), KINDS.index("B"), KINDS.index("W")
        for rank, rows in enumerate(order_rows(schedule, pp, vpp, m)):
            kind, chunks = rows[:, 0], np.flatnonzero(self.mine[rank])
            mine = rows[:, 2][:, None] == chunks[None, :]
            starts, waits, done = kind == forward, kind == split, kind == weight
            alive = np.cumsum(mine * (starts.astype(int) - ~(starts | done))[:, None], axis=0)
            waiting = np.cumsum(mine * (waits.astype(int) - done)[:, None], axis=0)
            best = (alive + waiting).sum(axis=1).argmax()
            here, held = alive[best].astype(float), waiting[best].astype(float)
            if rank == self.ranks[0]:  # what waits of the first chunk is what its layers keep, whatever that is
                held = np.zeros(len(chunks))
            for mean, off, some in ((out.alive, out.alive_off, here), (out.waiting, out.waiting_off, held)):
                mean[rank] = some.mean()
                off[rank] = 0.5 * np.abs(some - some.mean()).sum()
            if folded:
                for group, chunk_alive, chunk_held in zip(groups, here, held, strict=True):
                    group.alive[rank], group.waiting[rank] = chunk_alive, chunk_held
            else:
                here = here if len(chunks) == 1 else _evenest(alive)
                groups[0].alive[rank], groups[0].waiting[rank] = here.min(), held[0] if len(chunks) == 1 else 0.0
            if self.chunks - 1 in chunks:
                out.tail[rank] = here[chunks.tolist().index(self.chunks - 1)]
        return out

    def ranks_hold(self, c: Costs, budget: Floats, layers: int) -> Bools:
        """Whether ranks that have ``budget`` seconds (column x rank) for their layers' work on one microbatch, and their
        memory, can hold all layers."""
        each = c.f + c.b + c.w - c.hidden.sum(axis=1)
        ranks = np.arange(self.pp)
        quicker = np.where(ranks < self.leading, c.quicker.sum(axis=1)[:, None], 0.0)
        needs = self._needs(self.again(c, layers), np.repeat(each[:, None], self.pp, axis=1), np.ones(self.pp), ranks)
        most = self._capacity(needs, budget, quicker, layers)
        good: Bools = (most >= self.vpp).all(axis=1) & (most.sum(axis=1) >= layers)
        return good

    def again(self, c: Costs, layers: int) -> list[Floats]:
        """By number of leading layers on a rank: ``recompute_tables.least_again``."""
        mark = c.mark() if len(c) == 1 else b""
        if mark and mark in self._again:
            return self._again[mark]
        mean = -(-layers // self.pp)
        top = min(layers - (self.pp - 1) * self.vpp, 2 * mean + 4)
        first = c.ahead_bytes[:, 0], c.ahead_bytes[:, 1], c.ahead_bytes[:, 2]
        bytes_ = Bytes(c.state, c.kept, c.again, c.waits, c.room + c.lighter, c.spare, first)
        find = partial(least_again_in_whole_layers, tried=mean + 2) if mark else least_again
        out = [find(bytes_, self.flying.groups, top, leading) for leading in range(self.leading + 1)]
        if mark:
            self._again = {mark: out}
        return out

    def holds(self, c: Costs, seconds: Floats, layers: int, *, memory: bool) -> Bools:
        """Whether a column may be done in ``seconds`` of pipeline (a bound: True proves nothing)."""
        return self.settle(c, seconds, layers, memory=memory)[0]

    def settle(
        self,
        c: Costs,
        seconds: Floats,
        layers: int,
        *,
        memory: bool,
        again: list[Floats] | None = None,
        known: _Known | None = None,
    ) -> tuple[Bools, Floats, Floats]:
        """(whether a column may be done in ``seconds`` of pipeline, fewest and most layers of each rank if it is). ``again``: what
        memory asks for, ``known``: what the columns cost along paths, where that is known."""
        number = len(c)
        low = np.full((number, self.pp), float(self.vpp))
        high = np.full((number, self.pp), float(layers - (self.pp - 1) * self.vpp))
        alive = np.zeros(number, bool)
        at = np.arange(number)
        if known is None:
            known = self.known(c, [] if not memory else self.again(c, layers) if again is None else again)
        for _ in range(ROUNDS):
            if not len(at):
                break
            here = known if len(at) == number else known.take(at)
            new = self._most_of_ranks(here, seconds[at], low[at], high[at], layers)
            total = new.sum(axis=1)
            good = (new >= self.vpp).all(axis=1) & (total >= layers)
            floor = np.maximum(low[at], layers - (total[:, None] - new))
            settled = good & (new == high[at]).all(axis=1) & (floor == low[at]).all(axis=1)
            high[at], low[at] = np.maximum(new, 0.0), floor
            alive[at[settled]] = True
            at = at[good & ~settled]
        alive[at] = True
        return alive, low, high

    def known(self, c: Costs, tables: list[Floats]) -> _Known:
        """What columns cost along the paths kept so far; ``tables``: of ``again``, none where memory is left out."""
        t = self.table
        own = c.f[:, None] * t.own[0] + c.b[:, None] * t.own[1] + c.w[:, None] * t.own[2] - c.hidden @ t.paired
        own = own + c.start[:, None] * t.starts + np.where(t.least_b >= 1, c.end_own[:, None], c.end[:, None]) * t.ends
        least = np.where(t.least_b >= 1, t.least_b - HIDDEN * t.ends, t.least_b)
        return _Known(c, self._fixed(c), c.quicker @ t.lead_own, self._needs(tables, own, least, t.rank))

    def _most_of_ranks(self, known: _Known, seconds: Floats, low: Floats, high: Floats, layers: int) -> Floats:
        """Column x rank: the most whole layers that every path leaves time, and the rank has room for; less than nothing where
        the others' least is too long already."""
        budget = seconds[:, None] - known.fixed - self._others(known.costs, low, high, layers)
        most = self._capacity(known.needs, budget, known.quicker, layers)
        by_rank = np.full((self.pp, len(known.costs)), np.inf)
        np.minimum.at(by_rank, self.table.rank, most.T)
        out: Floats = np.minimum(high, by_rank.T)
        return out

    def _needs(self, tables: list[Floats], own: Floats, again: Floats, rank: Ints) -> list[Need]:
        """What whole layers ask for, by number of leading ones: a layer takes ``own`` seconds (column x path), its recompute ``again`` times
        its seconds."""
        out: list[Need] = []
        for leading in range(self.leading + 1):
            at = np.flatnonzero(rank + leading <= self.leading) if leading else np.arange(len(rank))
            if not len(at):
                break
            each = own if len(at) == len(rank) else own[:, at]
            whole = None
            if tables:
                table = tables[leading][:, rank[at]]
                number = np.arange(1, table.shape[2] + 1) - ROUNDING
                whole = each[:, :, None] * number + again[at, None] * table
                whole[table >= NEVER] = np.inf
            out.append((at, each, whole))
        return out

    def _capacity(self, needs: list[Need], budget: Floats, quicker: Floats, layers: int) -> Floats:
        """Column x path: most whole layers within ``budget`` seconds, a leading one taking ``quicker`` less; -1 where there is less than
        nothing."""
        best = np.full(budget.shape, -1.0)
        for leading, (at, each, whole) in enumerate(needs):
            room = budget[:, at] + leading * quicker[:, at]
            if whole is None:
                most = np.floor(np.maximum(room, 0.0) / np.maximum(each, 1e-30) + ROUNDING)
            else:
                top = whole.shape[2]
                fit = whole <= room[:, :, None]
                most = np.where(fit.any(axis=2), top - fit[:, :, ::-1].argmax(axis=2), 0).astype(float)
                most = np.where(most == top, float(layers), most)
            best[:, at] = np.maximum(best[:, at], np.where(room < 0, -1.0, most))
        return best

    def _fixed(self, c: Costs) -> Floats:
        """Column x path: transfers, embedding and head, and what other kinds' layers may save."""
        t = self.table
        out = c.transfer[:, None] * t.p2p + c.embedding @ t.first + c.head @ t.last + c.least[:, None]
        out = out - 0.5 * (c.f[:, None] * t.off[0] + c.b[:, None] * t.off[1] + c.w[:, None] * t.off[2])
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
        """Loads x column x path: what loads of other ranks add at least. Where a path goes through all chunks of a rank alike,
        it meets all its layers; else as many in each chunk as the least of them holds."""
        some = np.stack(loads)
        parts = [some, np.floor(some / self.vpp)] if self.vpp > 1 else [some]
        weighed = np.concatenate([seconds[:, None] * part for part in parts for seconds in (c.f, c.b, c.w)], axis=2)
        met = self.table.bare if c.hidden.any() else self.table.other
        out: Floats = weighed @ met[: weighed.shape[2]]
        return out

    def least(
        self, c: Costs, low: Floats, high: Floats, layers: int, *, steps: int = 14, again: list[Floats] | None = None
    ) -> Floats:
        """The least seconds between ``low`` (a known bound) and ``high`` that each column may be done in, to 1/2^steps of their
        difference; ``high`` where it may not. ``again`` as in ``settle``."""
        low, high = low.copy(), high.copy()
        known = self.known(c, self.again(c, layers) if again is None else again)
        for _ in range(steps):
            middle = (low + high) / 2
            good = self.settle(c, middle, layers, memory=True, known=known)[0]
            high, low = np.where(good, middle, high), np.where(good, low, middle)
        return low


@dataclass(frozen=True)
class _Table:
    """Paths as the propagation reads them, by path: ``rank`` whose work they follow; ``own`` (f, b, w) mean coefficients of its chunks,
    ``least_b`` the least b of them, ``off`` the sums of their absolute deviations, ``paired`` what pairs hide of them; ``other``
    coefficients of other ranks' chunks (``_by_rank``), ``bare`` the same without paired ones, ``peak`` their largest; ``most`` the
    largest coefficient of each chunk; ``lead_own`` and ``lead_others`` (f, b, w) those of the chunk of its own rank that may hold leading
    layers, and the largest of other ranks' such chunks; ``first``, ``last`` those of embedding and
    head; ``p2p`` transfers; ``starts``, ``ends`` whether
    the path begins and ends on its own rank, ``first_rank``, ``last_rank`` where it does."""

    rank: Ints
    own: Floats
    least_b: Floats
    off: Floats
    paired: Floats
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

    @classmethod
    def of(cls, paths: Paths, mine: Bools, leading: int) -> _Table:
        f, b, w, pf, pb, p2p, first, last = paths.matrices
        three = np.stack([f, b, w])
        work = three.sum(axis=0) @ mine.T.astype(float)
        rank = work.argmax(axis=1)
        at = mine[rank]
        size = at.sum(axis=1)
        own = (three * at).sum(axis=2) / size
        off = (np.abs(three - own[:, :, None]) * at).sum(axis=2)
        paired = np.stack([(pf * at).sum(axis=1), (pb * at).sum(axis=1)]) / size
        other = three * ~at
        bare = np.stack([other[0] - pf * ~at, other[1] - pb * ~at, other[2]])
        return cls(
            rank, own, np.where(at, b, np.inf).min(axis=1), off, paired, _by_rank(other, mine), _by_rank(bare, mine),
            other.max(axis=2).T, three.max(axis=0), *_leading(three, rank, leading), three[:, :, 0], three[:, :, -1], p2p,
            (first == rank).astype(float), (last == rank).astype(float), first, last,
        )  # fmt: skip


def _by_rank(three: Floats, mine: Bools) -> Floats:
    """(f, b, w) coefficients of chunks as (3 times rank, twice) x path: a layer's, where all chunks of the rank have the same; else the sum
    of its chunks'."""
    total = three @ mine.T.astype(float)
    most = np.stack([np.where(row, three, -np.inf).max(axis=2) for row in mine], axis=2)
    least = np.stack([np.where(row, three, np.inf).min(axis=2) for row in mine], axis=2)
    same = most == least
    parts = np.concatenate([np.where(same, most, 0.0), np.where(same, 0.0, total)])
    return np.ascontiguousarray(parts.transpose(0, 2, 1).reshape(-1, three.shape[1]))


def _leading(three: Floats, rank: Ints, leading: int) -> tuple[Floats, Floats]:
    """(f, b, w) x path: coefficients of the chunk of the path's own rank among the first ``leading``, and the largest of the other ones."""
    first = three[:, :, : max(1, leading)]
    mine = rank[:, None] == np.arange(first.shape[2])
    return (first * mine).sum(axis=2), np.where(mine, 0.0, first).max(axis=2)


def _evenest(alive: Ints) -> Floats:
    """Microbatches alive by chunk in the mean of the fullest moments in which the chunk with fewest has most: no choice of layers and recompute
    needs less at its own fullest moment than in this mean."""
    some = np.unique(alive[alive.sum(axis=1) == alive.sum(axis=1).max()], axis=0)
    total, best = np.zeros(alive.shape[1]), np.zeros(alive.shape[1])
    for turn in range(1, 17):
        total = total + some[some[:, int(total.argmin())].argmax()]
        if (total / turn).min() > best.min():
            best = total / turn
    return best
