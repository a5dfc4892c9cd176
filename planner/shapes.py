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
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.communication import INTERFERENCE
from cost_models.layout import V_SHAPED
from cost_models.schedules import KINDS, order_rows, period
from cost_models.update import USABLE
from planner.columns import Paths

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
    microbatch may pass layers of other kinds faster; ``lighter``: bytes by column and rank by which they may need other."""

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


class Shape:
    """A schedule's paths and fullest moments, by rank; ``find`` makes the paths when they are asked for."""

    def __init__(self, key: tuple[str, int, int, int], find: Callable[[], Paths]) -> None:
        self.schedule, self.pp, self.vpp, self.microbatches = key
        self.chunks, self._find = self.pp * self.vpp, find
        chunk = np.arange(self.chunks)
        self.ranks = np.where(chunk < self.pp, chunk, 2 * self.pp - 1 - chunk) if self.schedule in V_SHAPED else chunk % self.pp
        self.mine = self.ranks[None, :] == np.arange(self.pp)[:, None]
        self._table: _Table | None = None

    @cached_property
    def paths(self) -> Paths:
        """Kept paths."""
        return self._find()

    @property
    def table(self) -> _Table:
        """The paths kept so far."""
        if self._table is None or len(self._table.rank) != len(self.paths.rows):
            self._table = _Table.of(self.paths, self.mine)
        return self._table

    @cached_property
    def flying(self) -> Flying:
        """What every rank has in flight, from the order of its actions (as ``schedules.in_flight``, its fullest moment alone)."""
        schedule, pp, vpp, m = self.schedule, self.pp, self.vpp, self.microbatches
        shift = period(schedule, pp, vpp, m)
        if shift:
            m = min(m, (4 * pp // shift + 3) * shift + m % shift)
        out = Flying(*(np.zeros(pp) for _ in range(5)))
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
            if self.chunks - 1 in chunks:
                out.tail[rank] = here[chunks.tolist().index(self.chunks - 1)]
        return out

    def ranks_hold(self, c: Costs, budget: Floats, layers: int) -> Bools:
        """Whether ranks that have ``budget`` seconds (column x rank) for their layers' work on one microbatch, and their
        memory, can hold all layers."""
        each = c.f + c.b + c.w - c.hidden.sum(axis=1)
        time = np.repeat(np.maximum(each, 1e-30)[:, None], self.pp, axis=1)
        again = np.repeat(c.again[:, None, :], self.pp, axis=1)
        most = np.floor(self._most(c, np.maximum(budget, 0.0), time, again, np.arange(self.pp)) + ROUNDING)
        good: Bools = (most >= self.vpp).all(axis=1) & (most.sum(axis=1) >= layers)
        return good

    def holds(self, c: Costs, seconds: Floats, layers: int, *, memory: bool) -> Bools:
        """Whether a column may be done in ``seconds`` of pipeline (a bound: True proves nothing)."""
        return self.settle(c, seconds, layers, memory=memory)[0]

    def settle(self, c: Costs, seconds: Floats, layers: int, *, memory: bool) -> tuple[Bools, Floats, Floats]:
        """(whether a column may be done in ``seconds`` of pipeline, fewest and most layers of each rank if it is)."""
        number = len(c)
        low = np.full((number, self.pp), float(self.vpp))
        high = np.full((number, self.pp), float(layers - (self.pp - 1) * self.vpp))
        alive = np.zeros(number, bool)
        at = np.arange(number)
        for _ in range(ROUNDS):
            if not len(at):
                break
            here = c if len(at) == number else c.take(at)
            new = self._most_of_ranks(here, seconds[at], low[at], high[at], layers, memory)
            total = new.sum(axis=1)
            good = (new >= self.vpp).all(axis=1) & (total >= layers)
            floor = np.maximum(low[at], layers - (total[:, None] - new))
            settled = good & (new == high[at]).all(axis=1) & (floor == low[at]).all(axis=1)
            high[at], low[at] = np.maximum(new, 0.0), floor
            alive[at[settled]] = True
            at = at[good & ~settled]
        alive[at] = True
        return alive, low, high

    def _most_of_ranks(self, c: Costs, seconds: Floats, low: Floats, high: Floats, layers: int, memory: bool) -> Floats:
        """Column x rank: the most whole layers that every path leaves time, and the rank has room for; less than nothing where
        the others' least is too long already."""
        t = self.table
        own = c.f[:, None] * t.own[0] + c.b[:, None] * t.own[1] + c.w[:, None] * t.own[2] - c.hidden @ t.paired
        own = own + c.start[:, None] * t.starts + np.where(t.least_b >= 1, c.end_own[:, None], c.end[:, None]) * t.ends
        again = np.where(t.least_b >= 1, t.least_b - HIDDEN * t.ends, t.least_b)
        budget = seconds[:, None] - self._fixed(c) - self._others(c, low, high, layers)
        time = np.maximum(budget, 0.0)
        most = (
            self._most(c, time, own, c.again[:, None, :] * again[None, :, None], t.rank)
            if memory
            else time / np.maximum(own, 1e-30)
        )
        most = np.where(budget < 0, -1.0, np.floor(most + ROUNDING))
        by_rank = np.full((self.pp, len(c)), np.inf)
        np.minimum.at(by_rank, t.rank, most.T)
        out: Floats = np.minimum(high, by_rank.T)
        return out

    def _fixed(self, c: Costs) -> Floats:
        """Column x path: transfers, embedding and head, and what other kinds' layers may save."""
        t = self.table
        out = c.transfer[:, None] * t.p2p + c.embedding @ t.first + c.head @ t.last + c.least[:, None]
        out = out - 0.5 * (c.f[:, None] * t.off[0] + c.b[:, None] * t.off[1] + c.w[:, None] * t.off[2])
        result: Floats = out - c.credit @ t.most.T
        return result

    def _others(self, c: Costs, low: Floats, high: Floats, layers: int) -> Floats:
        """Column x path: the least that chunks of other ranks add. Each rank holds ``low`` layers at least, and all hold
        ``layers``: what is left of what they can hold, at most, is missing anywhere."""
        t = self.table
        by_low = self._along(c, low)
        ends = low[:, t.first_rank] * c.start[:, None] * (1 - t.starts) + low[:, t.last_rank] * c.end[:, None] * (1 - t.ends)
        missing = high.sum(axis=1) - layers
        worst = c.f[:, None] * t.peak[:, 0] + c.b[:, None] * t.peak[:, 1] + c.w[:, None] * t.peak[:, 2]
        by_high = self._along(c, high) - missing[:, None] * worst
        result: Floats = np.maximum(by_low, by_high) + ends
        return result

    def _along(self, c: Costs, loads: Floats) -> Floats:
        """Column x path: what these loads of other ranks add at least. Where a path goes through all chunks of a rank alike,
        it meets all its layers; else as many in each chunk as the least of them holds."""
        all_, some = self.table.bare if c.hidden.any() else self.table.other
        each = np.floor(loads / self.vpp)
        f, b, w = (loads @ x.T + each @ y.T for x, y in zip(all_, some, strict=True))
        out: Floats = c.f[:, None] * f + c.b[:, None] * b + c.w[:, None] * w
        return out

    def _most(self, c: Costs, budget: Floats, own: Floats, again: Floats, rank: Ints) -> Floats:
        """Most layers (fractional) by column and path under both limits. Where all layers recompute, one layer's tensors exist
        whole besides; a mixture has one layer at least of either mode, which is no less."""
        room, bytes_ = self.memory(c)
        beside = np.maximum(0.0, (c.kept.max(axis=1, keepdims=True) - c.kept)[:, None, :] - c.spare[:, :, None])
        alone = np.maximum(room[:, :, None] - beside, 0.0)[:, rank]
        r, bytes_ = np.maximum(room, 0.0)[:, rank], bytes_[:, rank]
        time = np.maximum(own[:, :, None] + again, 1e-30)
        best: Floats = np.minimum(budget[:, :, None] / time, alone / bytes_).max(axis=2)
        modes = time.shape[2]
        for i in range(modes):
            for j in range(i + 1, modes):
                ti, tj, bi, bj = time[:, :, i], time[:, :, j], bytes_[:, :, i], bytes_[:, :, j]
                det = ti * bj - tj * bi
                with np.errstate(divide="ignore", invalid="ignore"):
                    x, y = (budget * bj - r * tj) / det, (r * ti - budget * bi) / det
                    both = (x >= 1 - ROUNDING) & (y >= 1 - ROUNDING) & (np.abs(det) > 0)
                    best = np.where(both, np.maximum(best, x + y), best)
                for one, other in ((i, j), (j, i)):
                    t, m = budget - time[:, :, one], r - bytes_[:, :, one]
                    edge = 1 + np.minimum(t / time[:, :, other], m / bytes_[:, :, other])
                    best = np.where((t >= 0) & (m >= 0), np.maximum(best, edge), best)
        return best

    def memory(self, c: Costs) -> tuple[Floats, Floats]:
        """(bytes there are by column and rank, bytes of a layer by column, rank and mode)."""
        flying = self.flying
        room = c.room + c.lighter + flying.alive_off * c.kept.max(axis=1)[:, None] + flying.waiting_off * c.waits[:, None]
        held = c.state[:, None] + flying.waiting * c.waits[:, None]
        return room, np.maximum(held[:, :, None] + flying.alive[None, :, None] * c.kept[:, None, :], 1e-3)

    def least(self, c: Costs, low: Floats, high: Floats, layers: int, *, steps: int = 14) -> Floats:
        """The least seconds between ``low`` (a known bound) and ``high`` that each column may be done in, to 1/2^steps of their
        difference; ``high`` where it may not."""
        low, high = low.copy(), high.copy()
        for _ in range(steps):
            middle = (low + high) / 2
            good = self.holds(c, middle, layers, memory=True)
            high, low = np.where(good, middle, high), np.where(good, low, middle)
        return low


@dataclass(frozen=True)
class _Table:
    """Paths as the propagation reads them, by path: ``rank`` whose work they follow; ``own`` (f, b, w) mean coefficients of its chunks,
    ``least_b`` the least b of them, ``off`` the sums of their absolute deviations, ``paired`` what pairs hide of them; ``other``
    coefficients of other ranks' chunks (``_by_rank``), ``bare`` the same without paired ones, ``peak`` their largest; ``most`` the
    largest coefficient of each chunk; ``first``, ``last`` those of embedding and head; ``p2p`` transfers; ``starts``, ``ends`` whether
    the path begins and ends on its own rank, ``first_rank``, ``last_rank`` where it does."""

    rank: Ints
    own: Floats
    least_b: Floats
    off: Floats
    paired: Floats
    other: tuple[Floats, Floats]
    bare: tuple[Floats, Floats]
    peak: Floats
    most: Floats
    first: Floats
    last: Floats
    p2p: Floats
    starts: Floats
    ends: Floats
    first_rank: Ints
    last_rank: Ints

    @classmethod
    def of(cls, paths: Paths, mine: Bools) -> _Table:
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
            other.max(axis=2).T, three.max(axis=0), three[:, :, 0], three[:, :, -1], p2p,
            (first == rank).astype(float), (last == rank).astype(float), first, last,
        )  # fmt: skip


def _by_rank(three: Floats, mine: Bools) -> tuple[Floats, Floats]:
    """(f, b, w) coefficients of chunks as path x rank: (a layer's, where all chunks of the rank have the same; else the sum of
    its
    chunks')."""
    total = three @ mine.T.astype(float)
    most = np.stack([np.where(row, three, -np.inf).max(axis=2) for row in mine], axis=2)
    least = np.stack([np.where(row, three, np.inf).min(axis=2) for row in mine], axis=2)
    same = most == least
    return np.where(same, most, 0.0), np.where(same, 0.0, total)
