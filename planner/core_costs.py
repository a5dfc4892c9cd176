"""The costs of cores (a row with a schedule and vpp) as arrays: seconds and bytes of their layers, ends and messages (``shapes.Costs``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cost_models.chunks import boundary_bytes
from cost_models.communication import reach
from cost_models.layout import SPLIT_BACKWARD, V_SHAPED
from planner.bulk import Bulk, degrees_of
from planner.column_costs import Costs
from planner.flying import Flying, in_flight
from planner.paths import ranks_of
from planner.rows import Rows
from planner.splits import Splits

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Pipeline = tuple[str, int, int]
"""(schedule, pp, vpp): a row has one number of microbatches, so that these make it a core."""
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


class CoreCosts:
    """Costs of columns by their splits: those of one call have one pipeline."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.job = rows, rows.job
        totals = rows.totals
        main = int(totals.argmax())
        mostly = totals[main] >= MOSTLY * totals.sum()
        self.main = Main(main if mostly else None, int(totals.sum()), tuple(self.job.model.pattern), totals)

    def leading(self, pp: int) -> int:
        """Leading layers of another kind that are counted one by one, at most one a rank's first chunk more than the next rank's."""
        return self.main.first if self.main.first <= pp or pp == 1 else 0

    def flying(self, pipeline: Pipeline, rows: Ints) -> Flying:
        """What rows have in flight, by row where that differs."""
        numbers, at = np.unique(self.rows.table[rows, 9], return_inverse=True)
        return Flying.of_columns([in_flight(*pipeline, int(m)) for m in numbers], at)

    def seconds(self, splits: Splits, pipeline: Pipeline) -> dict[str, Floats]:
        """The seconds of ``Costs``."""
        bulk, ends = splits.bulk, splits.ends
        number, chunks, main = len(splits), pipeline[1] * pipeline[2], self.main
        least = bulk.b.min(axis=2)
        share = np.zeros(len(main.totals))
        share[:] = main.totals / main.layers if main.kind is None else np.arange(len(share)) == main.kind
        more = bulk.b - least[:, :, None]
        again = more[:, main.kind] if main.kind is not None else _of_any_kind(more)
        f, b, w = bulk.f @ share, least @ share, bulk.w @ share
        paired = pipeline[0] in ("dualpipe", "dualpipe-v") and self.job.execution.ep_overlap
        nothing = np.zeros(number)
        return {
            "f": f, "b": b, "w": w, "again": again, "embedding": bulk.embedding, "head": bulk.head,
            "transfer": self._transfer(splits.row) if pipeline[1] > 1 else nothing,
            "hidden": np.stack([f, b], axis=1) if paired else np.zeros((number, 2)),
            "start": ends.start.min(axis=1), "end": ends.end.min(axis=1), "end_own": ends.end_own.min(axis=1),
            "least": ends.start_least + ends.end_least,
            "credit": np.zeros((number, chunks)) if self.leading(pipeline[1]) else self._credit(bulk, f + b + w, chunks),
            "ahead": np.stack([x[:, main.pattern[0]] for x in (bulk.f, least, bulk.w)], axis=1),
        }  # fmt: skip

    def timed(self, splits: Splits, pipeline: Pipeline) -> Costs:
        """Costs of columns, memory left out."""
        number, pp = len(splits), pipeline[1]
        none, nothing = np.zeros((number, pp)), np.zeros(number)
        seconds = self.seconds(splits, pipeline)
        kept, ahead = np.zeros_like(seconds["again"]), np.zeros((number, 3))
        return Costs(
            **seconds,
            state=nothing,
            kept=kept,
            lowest=nothing,
            waits=nothing,
            above=nothing,
            room=none,
            spare=none,
            lighter=none,
            ahead_bytes=ahead,
        )

    def costs(self, splits: Splits, pipeline: Pipeline) -> Costs:
        """Costs of columns."""
        return Costs(**self.seconds(splits, pipeline), **self.bytes(splits, pipeline))

    def bytes(self, splits: Splits, pipeline: Pipeline) -> dict[str, Floats]:
        """The bytes of ``Costs``."""
        schedule, pp, _ = pipeline
        flying, k = self.flying(pipeline, splits.row), self.rows.key[splits.row]
        state, gathered, whole = splits.state, splits.gathered, self.rows.held.room[self.rows.at[splits.row]]
        parts, main, kept = self.rows.kept, self.main, self.rows.kept.kept[k]
        last = 0 if schedule in V_SHAPED else pp - 1
        split = schedule in SPLIT_BACKWARD
        room = np.repeat((whole - (parts.message[k] if pp > 1 else 0.0))[:, None], pp, axis=1)
        room[:, 0] -= splits.embedding
        room[:, last] -= splits.head + parts.tail[k] * np.maximum(0.0, flying.tail[..., last] - split)
        if last:
            room[:, last] -= splits.twice
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
            lighter = np.zeros((len(k), pp)) if self.leading(pp) else self._lighter(state, kept, parts.waits[k], pipeline, flying)
            mine = kept[:, main.kind]
            return {
                "state": state[:, main.kind], "kept": mine, "lowest": mine.min(axis=1), "waits": parts.waits[k][:, main.kind],
                "above": parts.above[k], "room": room, "spare": spare,
                "lighter": lighter, "ahead_bytes": ahead,
            }  # fmt: skip
        share, alive = main.totals / main.layers, flying.most()[0]
        top, lowest = kept.max(axis=2), kept.min(axis=2)
        fewer = np.maximum(self._below(top), self._below(lowest))[:, None]
        return {
            "state": state @ share,
            "kept": _of_any_kind((top @ share)[:, None, None] - (top[:, :, None] - kept)),
            "lowest": lowest @ share,
            "waits": parts.waits[k].min(axis=1),
            "above": parts.above[k],
            "room": room,
            "spare": spare,
            "lighter": pipeline[2] * (self._below(state)[:, None] + alive * fewer),
            "ahead_bytes": ahead,
        }

    def _below(self, each: Floats) -> Floats:
        """By column: the most by which consecutive layers of the model fall below as many mean ones, of what layers take by kind (``each``,
        column x kind)."""
        mean = each @ (self.main.totals / self.main.layers)
        run, most = np.zeros(len(each)), np.zeros(len(each))
        for kind in self.main.pattern:
            run = np.maximum(0.0, run + mean - each[:, kind])
            most = np.maximum(most, run)
        return most

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

    def _lighter(self, state: Floats, kept: Floats, waits: Floats, pipeline: Pipeline, flying: Flying) -> Floats:
        """Bytes by which layers of other kinds on a rank may need other than as many of the main kind."""
        _, pp, vpp = pipeline
        out = np.zeros((len(state), pp))
        main = self.main.kind
        assert main is not None
        pattern, ranks, chunks = np.array(self.main.pattern), ranks_of(*pipeline[:2], pp * vpp), pp * vpp
        alive, waiting = flying.most()
        others = [k for k in range(state.shape[1]) if k != main]
        for chunk, rank in enumerate(ranks):
            for k in others:
                reachable = int((pattern[chunk : len(pattern) - (chunks - 1 - chunk)] == k).sum())
                if reachable:
                    less = np.abs(state[:, main] - state[:, k])
                    less = less + waiting[..., rank] * np.abs(waits[:, main] - waits[:, k])
                    less = less + alive[..., rank] * _apart(kept[:, main], kept[:, k])
                    out[:, rank] += reachable * less
        return out


def _apart(one: Floats, other: Floats) -> Floats:
    """The most by which two layers' kept bytes may differ, whatever their modes."""
    most: Floats = np.maximum(np.abs(one.max(axis=1) - other.min(axis=1)), np.abs(other.max(axis=1) - one.min(axis=1)))
    return most


def _of_any_kind(modes: Floats) -> Floats:
    """Column x (mode 0 of the least kind, every other mode of every kind), of column x kind x mode: the modes of a layer whose kind is not
    known."""
    number, kinds, several = modes.shape
    return np.concatenate([modes[:, :, 0].min(axis=1)[:, None], modes[:, :, 1:].reshape(number, kinds * (several - 1))], axis=1)
