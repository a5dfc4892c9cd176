"""Cores (a row with a schedule and vpp) by shape, and their costs as arrays: what the search bounds before it looks at columns one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from cost_models.chunks import blocks_transfers, boundary_bytes
from cost_models.communication import reach
from cost_models.layout import SPLIT_BACKWARD, V_SHAPED, divisors
from cost_models.pipeline import simulate
from planner.bulk import Bulk, degrees_of
from planner.bulk_bytes import gathered_of, states_of
from planner.bulk_sharding import Ends, Sharding
from planner.columns import Column, PathStore
from planner.dealing import dealt
from planner.heuristic import balanced
from planner.rows import Rows
from planner.shapes import ROUNDING, Costs, Shape

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Key = tuple[str, int, int, int]
"""(schedule, pp, vpp, microbatches)."""
COARSE, FINE = 5, 12
"""Halvings of the way between a known bound and the answer: of classes by arrays, of a column."""
FEW = 12
"""Rows up to which all splits of data parallelism are looked at together, none of them first by ZeRO stage alone."""
MOSTLY = 0.9
"""Share of the layers above which a kind stands for all of them, the others' savings counted apart."""


@dataclass(frozen=True)
class Main:
    """The layers of a model as one kind: ``kind`` (None: their mean stands for all), ``layers`` of all kinds, ``pattern``."""

    kind: int | None
    layers: int
    pattern: tuple[int, ...]
    totals: Ints

    @cached_property
    def first(self) -> int:
        """How many layers of one other kind stand before all of the main kind; 0 where layers of others stand elsewhere."""
        if self.kind is None or self.kind not in self.pattern:
            return 0
        number = self.pattern.index(self.kind)
        return number if len({*self.pattern[:number]}) == 1 and {*self.pattern[number:]} == {self.kind} else 0


class Cores:
    """Every core of some rows, grouped by shape."""

    def __init__(self, rows: Rows, which: Ints, store: PathStore) -> None:
        self.rows, self.store, self.job = rows, store, rows.job
        totals = rows.totals
        main = int(totals.argmax())
        mostly = totals[main] >= MOSTLY * totals.sum()
        self.main = Main(main if mostly else None, int(totals.sum()), tuple(self.job.model.pattern), totals)
        self.by: dict[Key, Ints] = self._grouped(which)
        self._shapes: dict[Key, Shape] = {}
        self._balanced: set[Key] = set()

    def _grouped(self, which: Ints) -> dict[Key, Ints]:
        """Rows by shape."""
        rows = self.rows
        pp, slot = rows.table[which, 7], rows.slot[which]
        code = slot * (int(pp.max(initial=1)) + 1) + pp
        order = np.argsort(code, kind="stable")
        by: dict[Key, list[Ints]] = defaultdict(list)
        for part in np.split(which[order], np.flatnonzero(np.diff(code[order])) + 1) if len(which) else []:
            stages = int(rows.table[part[0], 7])
            for batch in rows.slots[rows.slot[part[0]]]:
                by[batch.schedule, stages, batch.vpp, batch.microbatches].append(part)
        return {key: np.concatenate(parts) for key, parts in by.items()}

    def shape(self, key: Key) -> Shape:
        """The paths of a shape."""
        if key not in self._shapes:
            schedule, pp, vpp, microbatches = key
            blocking = blocks_transfers(self.job, schedule)
            find = partial(self.store.of, schedule, pp, vpp, microbatches, blocking)
            self._shapes[key] = Shape(key, find, self.leading(key))
        return self._shapes[key]

    def leading(self, key: Key) -> int:
        """Leading layers of another kind that are counted one by one, at most one a rank's first chunk more than the next rank's."""
        return self.main.first if self.main.first <= key[1] or key[1] == 1 else 0

    # -- what may be done within a time --------------------------------------------------------------------------------

    def zeros(self, key: Key, rows: Ints) -> list[int]:
        """ZeRO stages that some column of a shape has."""
        space = self.rows.space
        found: set[int] = set()
        for i in rows:
            row = self.rows[int(i)]
            batch = next(b for b in row.batches if (b.schedule, b.vpp) == (key[0], key[2]))
            found |= space.stages(row.prefix, batch)
        return sorted(found)

    def glance(self, key: Key, rows: Ints, seconds: float) -> Ints:
        """The rows whose ranks could hold all layers within ``seconds`` of pipeline before the schedule's paths are known: a rank waits for
        a layer of each chunk before its own, and does all its microbatches; or the first one passes all ranks, and a rank does the rest."""
        schedule, pp, vpp, m = key
        c = self.quick(rows, key)
        each = c.f + c.b + c.w - c.hidden.sum(axis=1)
        last = 0 if schedule in V_SHAPED else pp - 1
        ends = np.zeros((len(rows), pp))
        ends[:, 0] += c.embedding.sum(axis=1)
        ends[:, last] += c.head.sum(axis=1)
        lead, quicker = self.leading(key), c.quicker.sum(axis=1)[:, None]
        less = c.credit.sum(axis=1) + lead * quicker[:, 0]
        credit = vpp * c.credit[:, :1]
        spare = credit + np.maximum(lead - np.arange(pp), 0) * quicker
        wait = c.f - c.hidden[:, 0] + (c.b + c.w if schedule in ("1f1b", "gpipe", "interleaved") else 0.0)
        wait = np.maximum(0.0, wait[:, None] * np.arange(pp) - less[:, None])
        budget = (seconds - wait) / m - ends
        if pp > 1 and m > 1 and schedule in ("1f1b", "gpipe"):
            total = each * self.main.layers + ends.sum(axis=1) - less
            after = (seconds - total[:, None]) / (m - 1) - ends
            if schedule == "1f1b":
                after += self._ahead(rows, c, after + spare, each, m)
            budget = np.minimum(budget, after)
        most = budget + spare
        most = np.floor(most / np.maximum(each[:, None], 1e-30) + ROUNDING)
        good = np.flatnonzero((most >= vpp).all(axis=1) & (most.sum(axis=1) >= self.main.layers))
        if not len(good):
            return rows[:0]
        rows, budget = rows[good], (budget + credit)[good]
        loosest = self.costs(rows, key, max(self.rows.held.state), rows, bare=True)
        return rows[self.shape(key).ranks_hold(loosest, budget, self.main.layers)]

    def _ahead(self, rows: Ints, c: Costs, budget: Floats, each: Floats, microbatches: int) -> Floats:
        """Row x rank: seconds a microbatch of the forwards that a rank of 1F1B has done when its first backward comes, which the path
        through all ranks does not meet again: at most those of the layers that ``budget`` then has room for."""
        pp = budget.shape[1]
        share = np.minimum(np.arange(pp)[::-1], microbatches - 1) / (microbatches - 1)
        f = self.passes(rows).f.max(axis=1)[:, None]
        first = np.zeros_like(budget)
        first[:, 0] = c.embedding[:, 0]
        layers = np.maximum(0.0, budget + share * first) / np.maximum(each[:, None] - share * f, 1e-30)
        out: Floats = share * (first + f * np.minimum(layers, self.main.layers))
        return out

    def within(self, key: Key, rows: Ints, seconds: float) -> list[tuple[float, Class]]:
        """The classes of a shape's cores that may be done within ``seconds`` of pipeline, each with its bound."""
        if key[0] != "dualpipe":
            rows = self.glance(key, rows, seconds)
            if not len(rows):
                return []
            shape = self.shape(key)
            rows = rows[shape.holds(self.quick(rows, key), np.full(len(rows), seconds), self.main.layers, memory=False)]
        if not len(rows):
            return []
        stages = self.zeros(key, rows)
        if key[0] == "dualpipe":
            least = self.rows.seconds(rows)
            return [
                (float(s), Class(int(i), key, zero, int(d)))
                for s, i in zip(least, rows, strict=True) if s < seconds
                for zero in stages
                for d in (divisors(int(self.rows.table[i, 8])) if zero else [1])
            ]  # fmt: skip
        return self._classes(key, rows, stages, seconds)

    def _classes(self, key: Key, rows: Ints, stages: Sequence[int], seconds: float) -> list[tuple[float, Class]]:
        shape, layers, parts, one = self.shape(key), self.main.layers, [], []
        self._know_likely_path(key, rows)
        for zero in stages:
            some = rows
            if len(rows) > FEW:
                bare = self.costs(rows, key, zero, rows, bare=True)
                some = rows[shape.holds(bare, np.full(len(rows), seconds), layers, memory=True)]
            if not len(some):
                continue
            ways = [np.array(divisors(int(d)) if zero else [1]) for d in self.rows.table[some, 8]]
            at, shard = np.repeat(some, [len(w) for w in ways]), np.concatenate(ways)
            parts.append(self.costs(at, key, zero, shard))
            one += [Class(int(i), key, zero, int(s)) for i, s in zip(at, shard, strict=True)]
        if not parts:
            return []
        chosen = Costs.joined(parts)
        at = np.flatnonzero(shape.holds(chosen, np.full(len(chosen), seconds), layers, memory=False))
        if not len(at):
            return []
        chosen = chosen.take(at)
        again = shape.again(chosen, layers)
        good = np.flatnonzero(shape.settle(chosen, np.full(len(chosen), seconds), layers, memory=True, again=again)[0])
        if not len(good):
            return []
        at, again = at[good], [table[good] for table in again]
        low = np.minimum(self.rows.seconds(np.array([one[i].row for i in at])), seconds)
        found = shape.least(chosen.take(good), low, np.full(len(at), seconds), layers, steps=COARSE, again=again)
        return [(float(b), one[i]) for b, i in zip(found, at, strict=True)]

    def _know_likely_path(self, key: Key, rows: Ints) -> None:
        """Keep the path that is longest where the ranks are balanced by seconds, which those of the schedule alone do not show."""
        schedule, pp, vpp, m = key
        if key in self._balanced or pp == 1:
            return
        self._balanced.add(key)
        c = self.quick(rows[:1], key)
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
        chosen = self.costs(rows, key, one.zero, np.array([one.shard]), bulk=bulk)
        return replace(chosen, transfer=np.array([column.transfer]), hidden=np.zeros((1, 2)))

    def bound(self, key: Key, chosen: Costs, low: float, high: float) -> float:
        """The bound of one column between ``low``, a bound, and ``high`` seconds of pipeline, which it is where it may not be faster."""
        shape, layers, top = self.shape(key), self.main.layers, np.array([high])
        if low >= high or not shape.holds(chosen, top, layers, memory=True)[0]:
            return high
        return float(shape.least(chosen, np.array([low]), top, layers, steps=FINE)[0])

    # -- costs ------------------------------------------------------------------------------------------------------

    def passes(self, rows: Ints) -> Bulk:
        """Seconds of rows' passes without what ZeRO adds."""
        return self.rows.bulk.take(self.rows.key[rows])

    def seconds(self, rows: Ints, key: Key, bulk: Bulk, ends: Ends | None) -> dict[str, Floats]:
        """The seconds of ``Costs`` for the passes ``bulk`` of ``rows``, and what they add at ends."""
        number, chunks, main = len(rows), key[1] * key[2], self.main
        least = bulk.b.min(axis=2)
        share = np.zeros(len(main.totals))
        share[:] = main.totals / main.layers if main.kind is None else np.arange(len(share)) == main.kind
        again = (bulk.b[:, main.kind] - least[:, main.kind, None]) if main.kind is not None else np.zeros((number, bulk.b.shape[2]))
        f, b, w = bulk.f @ share, least @ share, bulk.w @ share
        paired = key[0] in ("dualpipe", "dualpipe-v") and self.job.execution.ep_overlap
        nothing = np.zeros(number)
        return {
            "f": f, "b": b, "w": w, "again": again, "embedding": bulk.embedding, "head": bulk.head,
            "transfer": self._transfer(rows) if key[1] > 1 else nothing,
            "hidden": np.stack([f, b], axis=1) if paired else np.zeros((number, 2)),
            "start": nothing if ends is None else ends.start.min(axis=1), "end": nothing if ends is None else ends.end.min(axis=1),
            "end_own": nothing if ends is None else ends.end_own.min(axis=1),
            "least": nothing if ends is None else ends.start_least + ends.end_least,
            "credit": np.zeros((number, chunks)) if self.leading(key) else self._credit(bulk, f + b + w, chunks),
            "ahead": np.stack([x[:, main.pattern[0]] for x in (bulk.f, least, bulk.w)], axis=1),
        }  # fmt: skip

    def quick(self, rows: Ints, key: Key) -> Costs:
        """Costs of rows without memory, ZeRO, and ends: for a first look."""
        seconds, number, pp = self.seconds(rows, key, self.passes(rows), None), len(rows), key[1]
        none = np.zeros((number, pp))
        return Costs(
            **seconds,
            state=np.zeros(number),
            kept=np.zeros_like(seconds["again"]),
            waits=np.zeros(number),
            room=none,
            spare=none,
            lighter=none,
            ahead_bytes=np.zeros((number, 3)),
        )

    def costs(self, rows: Ints, key: Key, zero: int, shard: Ints, *, bare: bool = False, bulk: Bulk | None = None) -> Costs:
        """Costs of rows under a ZeRO stage over ``shard`` ways of data parallelism; ``bare``: without its collectives, over all of it;
        ``bulk``: with these
        seconds of passes, its collectives included."""
        at, k, held = self.rows.at[rows], self.rows.key[rows], self.rows.held_once if key[3] == 1 else self.rows.held
        table = self.rows.prefix_table[at]
        room, gathered = held.room[at], gathered_of(self.job, table, table[:, 7] if bare else shard, zero)
        if bare:
            seconds = self.seconds(rows, key, self.passes(rows), None)
            states = held.state[zero][at], held.embedding[zero][at], held.head[zero][at]
            return Costs(**seconds, **self.bytes(key, *states, room, k, self.rows.kept.kept[k], gathered))
        sharding = Sharding(self.job, table, shard, zero)
        offload = self.rows.space.may_offload
        sharding.degrees_offload = offload
        if bulk is None:
            bulk = sharding.add(self.passes(rows))
        seconds = self.seconds(rows, key, bulk, sharding.ends(bulk))
        state, embedding, head = states_of(self.job, table, shard, zero, offload=offload, once=key[3] == 1)
        bytes_ = self.bytes(key, state, embedding, head, room, k, self.rows.kept.kept[k], gathered)
        return Costs(**seconds, **bytes_)

    def bytes(
        self, key: Key, state: Floats, embedding: Floats, head: Floats, whole: Floats, k: Ints, kept: Floats, gathered: Floats
    ) -> dict[str, Floats]:
        """The bytes of ``Costs``: ``state`` column x kind; by column ``embedding``, ``head``, ``whole`` room, what is ``gathered`` in a layer's
        backward; ``k`` keys."""
        schedule, pp, vpp, _ = key
        parts, main = self.rows.kept, self.main
        last = 0 if schedule in V_SHAPED else pp - 1
        flying = self.shape(key).flying
        split = schedule in SPLIT_BACKWARD
        room = np.repeat((whole - (parts.message[k] if pp > 1 else 0.0))[:, None], pp, axis=1)
        room[:, 0] -= embedding
        room[:, last] -= head + parts.tail[k] * max(0.0, flying.tail[last] - split)
        spare = np.zeros((len(k), pp))
        spare[:, last] = parts.tail[k]
        if split:
            spare[:, 0] = np.inf
        else:
            if pp == 1:
                spare[:, 0] += parts.loss[k]
                room[:, 0] -= np.maximum(parts.loss[k], parts.beyond[k].max(axis=1) + gathered - parts.tail[k])
            room[:, np.arange(pp) != last] -= (parts.beyond[k].min(axis=1) + gathered)[:, None]
        one = main.pattern[0]
        ahead = np.stack([state[:, one], kept[:, one].min(axis=1), parts.waits[k][:, one]], axis=1)
        if main.kind is not None:
            lighter = np.zeros((len(k), pp)) if self.leading(key) else self._lighter(state, kept, parts.waits[k], pp * vpp, key)
            return {
                "state": state[:, main.kind], "kept": kept[:, main.kind], "waits": parts.waits[k][:, main.kind], "room": room, "spare": spare,
                "lighter": lighter, "ahead_bytes": ahead,
            }  # fmt: skip
        share = main.totals / main.layers
        mean_kept = np.repeat((kept.min(axis=2) @ share)[:, None], kept.shape[2], axis=1)
        most = max(float(group.alive.max()) for moment in flying.moments for group in moment)
        apart = np.abs(state - (state @ share)[:, None]) + most * np.abs(kept.min(axis=2) - mean_kept[:, :1])
        lighter = np.repeat((apart @ main.totals)[:, None], pp, axis=1)
        return {
            "state": state @ share,
            "kept": mean_kept,
            "waits": parts.waits[k].min(axis=1),
            "room": room,
            "spare": spare,
            "lighter": lighter,
            "ahead_bytes": ahead,
        }

    def _transfer(self, rows: Ints) -> Floats:
        """Seconds of a pipeline message at least: between neighbours as near as any order puts them."""
        table, cluster = self.rows.table[rows], self.job.cluster
        degrees = degrees_of(self.job, table[:, :7], "ring")
        apart = reach(cluster, table[:, 7], degrees.tp * degrees.cp).astype(float)
        size, two = boundary_bytes(self.job, degrees), np.full(len(rows), 2)
        out: Floats = np.asarray(cluster.collective_seconds("send_recv", size, two, apart), float)
        return out

    def _credit(self, bulk: Bulk, one: Floats, chunks: int) -> Floats:
        """Seconds by chunk by which one microbatch may pass consecutive layers faster than as many of the layer that stands for all."""
        number = len(one)
        out = np.zeros((number, chunks))
        pattern = self.main.pattern
        if len(set(pattern)) == 1:
            return out
        each = bulk.f + bulk.b.min(axis=2) + bulk.w
        run, most = np.zeros(number), np.zeros(number)
        for layer in reversed(range(len(pattern))):
            run = np.maximum(0.0, run + one - each[:, pattern[layer]])
            most = np.maximum(most, run)
            if layer < chunks:
                out[:, layer] = most
        return out

    def _lighter(self, state: Floats, kept: Floats, waits: Floats, chunks: int, key: Key) -> Floats:
        """Bytes by which layers of other kinds on a rank may need other than as many of the main kind."""
        schedule, pp, _, _ = key
        out = np.zeros((len(state), pp))
        main = self.main.kind
        assert main is not None
        pattern = np.array(self.main.pattern)
        groups = [group for moment in self.shape(key).flying.moments for group in moment]
        alive, waiting = (np.max(x, axis=0) for x in zip(*((g.alive, g.waiting) for g in groups), strict=True))
        others = [k for k in range(state.shape[1]) if k != main]
        for chunk in range(chunks):
            rank = (2 * pp - 1 - chunk if chunk >= pp else chunk) if schedule in V_SHAPED else chunk % pp
            for k in others:
                reachable = int((pattern[chunk : len(pattern) - (chunks - 1 - chunk)] == k).sum())
                if reachable:
                    less = np.abs(state[:, main] - state[:, k])
                    less = less + waiting[rank] * np.abs(waits[:, main] - waits[:, k])
                    less = less + alive[rank] * _apart(kept[:, main], kept[:, k])
                    out[:, rank] += reachable * less
        return out


@dataclass(frozen=True, slots=True)
class Class:
    """Columns of a core that share their ZeRO stage and the ways ``shard`` in which data parallelism is split."""

    row: int
    key: Key
    zero: int
    shard: int


def _apart(one: Floats, other: Floats) -> Floats:
    """The most by which two layers' kept bytes may differ, whatever their modes."""
    most: Floats = np.maximum(np.abs(one.max(axis=1) - other.min(axis=1)), np.abs(other.max(axis=1) - one.min(axis=1)))
    return most
