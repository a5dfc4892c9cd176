"""The rows of the search: a prefix with a micro batch, hundreds of thousands of them as arrays.

A row's batches (schedule, vpp) depend on (cp, pp, dp) and the micro batch alone, its number of columns on the prefix and the schedule, so
that both are found once for each of those and spread over the rows by index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from cost_models.arrays import distinct
from cost_models.job import Job
from cost_models.layout import RecomputeRule
from planner.bulk import Bulk, lower_seconds
from planner.bulk_bytes import Held, Kept, held_of, kept_of
from planner.space import Batch, Prefix, Space

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
KIND = {"ring": 0, "ulysses": 1, "allgather": 3}


class Row(NamedTuple):
    prefix: Prefix
    micro_batch: int
    microbatches: int
    batches: tuple[Batch, ...]


class Rows(Sequence[Row]):
    """Every row of a space. Rows of a prefix stand together, micro batches rising."""

    def __init__(self, job: Job, space: Space, modes: tuple[RecomputeRule, ...], totals: Ints) -> None:
        self.job, self.space, self.modes, self.totals = job, space, modes, totals
        self.prefixes = space.prefixes
        groups: dict[tuple[int, int, int], int] = {}
        self.slots: list[tuple[Batch, ...]] = []
        """The batches of a micro batch, by (group, micro batch)."""
        first, size = [], []
        of = np.zeros(len(self.prefixes), np.int64)
        for i, p in enumerate(self.prefixes):
            key = (p.cp, p.pp, p.dp)
            if key not in groups:
                groups[key] = len(groups)
                by: dict[int, list[Batch]] = {}
                for batch in space.batches(p.tp, p.cp, p.pp, p.dp):
                    by.setdefault(batch.micro_batch, []).append(batch)
                first.append(len(self.slots))
                size.append(len(by))
                self.slots += [tuple(by[micro]) for micro in sorted(by)]
            of[i] = groups[key]
        self.size = np.array(size, np.int64)[of] if len(of) else of
        self.start = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.size)])
        """The first row of each prefix; at the end, the number of rows."""
        self.at = np.repeat(np.arange(len(of)), self.size)
        """Prefix of each row."""
        place = np.arange(len(self.at)) - self.start[self.at]
        self.slot = np.array(first, np.int64)[of[self.at]] + place if len(of) else place
        """Slot of each row."""

    def __len__(self) -> int:
        return len(self.at)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        batches = self.slots[self.slot[index]]
        return Row(self.prefixes[self.at[index]], batches[0].micro_batch, batches[0].microbatches, batches)

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def of(self, prefix: Prefix, micro_batch: int) -> int:
        """Which row it is."""
        first = int(self.start[self.prefixes.index(prefix)])
        return next(i for i in range(first, len(self)) if self[i].micro_batch == micro_batch)

    def near(self, row: int, far: int) -> Ints:
        """Rows whose degrees and micro batch are at most ``far`` factors of two from a row's in all, data parallelism making up for it."""
        t = self.table
        degrees = np.log2(np.stack([t[:, 0], t[:, 1] * t[:, 2], t[:, 3], t[:, 4], t[:, 5], t[:, 7]], axis=1))
        return np.flatnonzero(np.abs(degrees - degrees[row]).sum(axis=1) <= far)

    # -- what arrays say of them ------------------------------------------------------------------------------------

    @cached_property
    def table(self) -> Ints:
        """Row x (tp, ring, ulysses, ep, etp, micro batch, cp kind, pp, dp, microbatches)."""
        slot = [(s[0].micro_batch, s[0].microbatches) for s in self.slots]
        a = self.prefix_table[self.at]
        b = np.array(slot, np.int64).reshape(len(slot), 2)[self.slot]
        return np.concatenate([a[:, :5], b[:, :1], a[:, 5:], b[:, 1:]], axis=1)

    @cached_property
    def prefix_table(self) -> Ints:
        prefix = [(p.tp, p.ring, p.ulysses, p.ep, p.etp, KIND.get(p.cp_kind, 2), p.pp, p.dp) for p in self.prefixes]
        return np.array(prefix, np.int64).reshape(len(prefix), 8)

    @cached_property
    def counts(self) -> Ints:
        """Columns of each row."""
        if self.space.excludes_pairs:
            return np.array([sum(self.space.count(row.prefix, b) for b in row.batches) for row in self], np.int64)
        place, each, at = self._of_prefixes
        slots = np.repeat(np.arange(len(self.slots)), [len(slot) for slot in self.slots])
        schedules = np.array([place[b.schedule] for slot in self.slots for b in slot], np.int64)
        number = np.bincount(slots * len(place) + schedules, minlength=len(self.slots) * len(place)).reshape(-1, max(1, len(place)))
        counts: Ints = np.einsum("ij,ij->i", number[self.slot], each[at[self.at]])
        return counts

    def columns(self, which: Ints, schedule: str, vpp: int) -> int:
        """Columns of the cores that rows ``which`` make with one schedule."""
        if not self.space.excludes_pairs:
            place, each, at = self._of_prefixes
            return int(each[at[self.at[which]], place[schedule]].sum())
        batches = (next(b for b in self[int(i)].batches if (b.schedule, b.vpp) == (schedule, vpp)) for i in which)
        return sum(self.space.count(self.prefixes[self.at[i]], batch) for i, batch in zip(which, batches, strict=True))

    @cached_property
    def _of_prefixes(self) -> tuple[dict[str, int], Ints, Ints]:
        """(place of each schedule, columns of a core by kind of prefix and schedule, the kind of each prefix)."""
        names = sorted({b.schedule for slot in self.slots for b in slot})
        place = {name: i for i, name in enumerate(names)}
        known: dict[Any, int] = {}
        at = np.array([known.setdefault(key, len(known)) for key in map(self.space.counted_by, self.prefixes)], np.int64)
        each = np.zeros((len(known), len(names)), np.int64)
        samples: dict[int, dict[str, Batch]] = {}
        for row, i in zip(each, distinct(at[:, None])[0].tolist(), strict=True):
            low = int(self.slot[self.start[i]])
            if low not in samples:
                samples[low] = {b.schedule: b for slot in self.slots[low : low + int(self.size[i])] for b in slot}
            some = samples[low]
            row[[place[name] for name in some]] = self.space.counts(self.prefixes[i], list(some.values()))
        return place, each, at

    @cached_property
    def key(self) -> Ints:
        """Of each row: its place among ``keys``."""
        return self._keyed[1]

    @property
    def keys(self) -> Ints:
        """The distinct (tp, ring, ulysses, ep, etp, micro batch, cp kind)."""
        return self._keyed[0]

    @cached_property
    def _keyed(self) -> tuple[Ints, Ints]:
        first, at = distinct(self.table[:, :7])
        return self.table[first, :7], at

    @cached_property
    def bulk(self) -> Bulk:
        """Seconds by key."""
        return lower_seconds(self.job, self.keys, self.modes)

    @cached_property
    def kept(self) -> Kept:
        """Bytes of a microbatch by key."""
        return kept_of(self.job, self.keys, self.modes, offload=self.space.offloads("activations"))

    @cached_property
    def held(self) -> Held:
        """Bytes of states by prefix."""
        return held_of(self.job, self.space.limits, self.prefix_table, offload=self.space.offloads("optimizer"))

    @cached_property
    def held_once(self) -> Held:
        """The same where a step has one microbatch."""
        return held_of(self.job, self.space.limits, self.prefix_table, offload=self.space.offloads("optimizer"), once=True)

    @cached_property
    def bytes(self) -> tuple[Floats, Floats, Floats, Floats]:
        """(lower bound, estimates without recompute, with all of it, and under the most sharding too) of the bytes of the fullest rank, by
        row: the mean over ranks of states under the most sharding and of one microbatch in the least mode; for the estimates, of the
        microbatches that 1F1B has in flight under ZeRO-1, one layer or the loss at work."""
        at, key, pp, m = self.at, self.key, self.table[:, 7], self.table[:, 9]
        held, kept, totals = self.held, self.kept, self.totals
        least, most = kept.kept.min(axis=2) @ totals, kept.kept[:, :, 0] @ totals
        sharded, plain = self._states(at, max), self._states(at, lambda zeros: 1 if 1 in zeros else max(zeros))
        slack, limit = self.job.execution.slack, self.job.limit_bytes
        base = limit - slack * (held.room[at] - np.where(pp > 1, kept.message[key], 0.0))
        work = np.maximum(kept.kept[:, :, 0].max(axis=1) + kept.beyond.min(axis=1), kept.tail + kept.loss)[key]
        flying = np.minimum(pp, m)
        low = base + slack * ((sharded + least[key]) / pp)
        return (
            low,
            base + slack * ((plain + most[key] * flying) / pp + work),
            base + slack * ((plain + least[key] * flying) / pp + work),
            base + slack * ((sharded + least[key] * flying) / pp + work),
        )

    def _states(self, at: Ints, choose: Callable[[list[int]], int]) -> Floats:
        """Bytes of all states of a replica on one rank, by row, under a ZeRO stage that goes with its pipeline."""
        out = np.zeros(len(self))
        for pipeline in (False, True):
            zero = choose(self.space.zero_stages(pipeline))
            for held, once in ((self.held, False), (self.held_once, True)):
                rows = ((self.table[:, 7] > 1) == pipeline) & ((self.table[:, 9] == 1) == once)
                each = held.state[zero] @ self.totals + held.embedding[zero] + held.head[zero]
                out[rows] = each[at[rows]]
        return out

    @cached_property
    def fit(self) -> npt.NDArray[np.bool_]:
        """Whether a row may fit."""
        small: npt.NDArray[np.bool_] = self.bytes[0] <= self.job.limit_bytes
        return small

    @cached_property
    def work(self) -> Floats:
        """Least seconds of the pipeline of each row: the mean rank's work; where no pair hides any, one microbatch's way there and back."""
        least: Floats = self.table[:, 9] * self.bulk.total(self.totals)[self.key] / self.table[:, 7]
        if self.job.execution.ep_overlap:
            return least
        return np.maximum(least, self.bulk.way(self.totals)[self.key])

    def seconds(self, which: Ints) -> Floats:
        """``work`` of the rows ``which``."""
        return self.work[which]

    def idle(self) -> Floats:
        """About the idle share of each row's best schedule."""
        layers = self.job.model.num_layers
        pp = np.ones(len(self.slots), np.int64)
        pp[self.slot] = self.table[:, 7]
        share: Floats = np.array([min(idle(b, int(n), layers) for b in slot) for slot, n in zip(self.slots, pp, strict=True)])
        out: Floats = share[self.slot]
        return out


def idle(batch: Batch, pp: int, layers: int) -> float:
    """About the idle share of a schedule, layers that do not divide over its chunks counted, to try likely ones first."""
    rank = -(-layers // pp)
    rounded = rank * pp / layers if batch.vpp > 1 or pp > layers // 4 else 1.0
    return (1 + bubble(batch, pp, layers)) * rounded - 1


def bubble(batch: Batch, pp: int, layers: int) -> float:
    """About the share of a rank's work for which a schedule leaves it idle."""
    ideal = (pp - 1) / batch.microbatches
    return {
        "interleaved": ideal * -(-layers // (pp * batch.vpp)) / -(-layers // pp),
        "zb-h1": ideal / 3,
        "zb-v": ideal / 5,
        "dualpipe-v": ideal / 4,
        "dualpipe": ideal / 4,
    }.get(batch.schedule, ideal)
