"""Rows with a ZeRO stage and a split of data parallelism, by arrays: what all schedules share, found once for each number of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.layout import divisors
from planner.bulk import Bulk
from planner.bulk_bytes import gathered_of, states_of
from planner.bulk_sharding import Ends, Sharding
from planner.rows import Rows

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Splits:
    """By column: ``row``, ``zero`` stage and the ways ``shard`` in which data parallelism is split; ``bulk`` seconds of passes, what ZeRO adds
    included, and ``ends``; bytes of a layer's ``state`` by kind, of ``embedding`` and ``head``, of what both hold ``twice`` on two ranks,
    and of what is ``gathered`` in a layer's backward; ``work``: seconds that the pipeline takes at least, the mean rank's."""

    row: Ints
    zero: Ints
    shard: Ints
    bulk: Bulk
    ends: Ends
    state: Floats
    embedding: Floats
    head: Floats
    twice: Floats
    gathered: Floats
    work: Floats

    def __len__(self) -> int:
        return len(self.row)

    def take(self, at: Any) -> Splits:
        """The columns ``at``."""
        out: Splits = _each(Splits, lambda values: values[0][at], [self])
        return out

    @classmethod
    def joined(cls, parts: Sequence[Splits]) -> Splits:
        """All columns of ``parts``."""
        return parts[0] if len(parts) == 1 else _each(cls, np.concatenate, parts)

    @classmethod
    def of(cls, rows: Rows, which: Ints, zero: int, shard: Ints, *, bulk: Bulk | None = None, held: Floats | None = None) -> Splits:
        """Rows ``which`` of one number of stages, all of one microbatch or none, under one ZeRO stage; ``bulk``: with these seconds of passes,
        ZeRO's collectives included; ``held``: ``_held`` of them, where it is known."""
        table = rows.prefix_table[rows.at[which]]
        sharding = Sharding(rows.job, table, shard, zero)
        sharding.degrees_offload = rows.space.offloads("optimizer")
        if bulk is None:
            bulk = sharding.add(rows.bulk.take(rows.key[which]))
        ends = sharding.ends(bulk, rows.totals)
        microbatches, pp = rows.table[which, 9], rows.table[which, 7]
        held = _held(rows, which, zero, shard) if held is None else held
        state, (embedding, head, twice) = held[:, :-3], held[:, -3:].T
        work = np.maximum(rows.work[which], (microbatches * bulk.total(rows.totals) + ends.whole) / pp)
        gathered = gathered_of(rows.job, table, shard, zero)
        return cls(which, np.full(len(which), zero), shard, bulk, ends, state, embedding, head, twice, gathered, work)

    @classmethod
    def every(cls, rows: Rows, which: Ints) -> Splits:
        """All splits of rows of one number of stages that have room (``roomy``)."""
        once, parts = rows.table[which, 9] == 1, []
        for zero in rows.space.zero_stages(int(rows.table[which[0], 7]) > 1):
            for some in filter(len, (which[once], which[~once])):
                ways = [np.array(divisors(int(d)) if zero else [1]) for d in rows.table[some, 8]]
                at, shard = np.repeat(some, [len(w) for w in ways]), np.concatenate(ways)
                held = _held(rows, at, zero, shard)
                if len(good := np.flatnonzero(_roomy(rows, at, held))):
                    parts.append(cls.of(rows, at[good], zero, shard[good], held=held[good]))
        return cls.joined(parts) if parts else cls.of(rows, which[:1], 0, np.ones(1, np.int64)).take(slice(0, 0))

    def roomy(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Whether the ranks of a column have room, all together, for its states and one microbatch of each layer."""
        return _roomy(rows, self.row, np.column_stack([self.state, self.embedding, self.head, self.twice]))


def _held(rows: Rows, which: Ints, zero: int, shard: Ints) -> Floats:
    """Bytes of states by column: of a layer by kind, ``embedding``, ``head``, ``twice``."""
    once, offload = bool((rows.table[which, 9] == 1).all()), rows.space.offloads("optimizer")
    return np.column_stack(states_of(rows.job, rows.prefix_table[rows.at[which]], shard, zero, offload=offload, once=once))


def _roomy(rows: Rows, which: Ints, held: Floats) -> npt.NDArray[np.bool_]:
    key, pp = rows.key[which], rows.table[which, 7]
    room = rows.held.room[rows.at[which]] - np.where(pp > 1, rows.kept.message[key], 0.0)
    least = (held[:, :-3] + rows.kept.kept[key].min(axis=2)) @ rows.totals + held[:, -3] + held[:, -2]
    out: npt.NDArray[np.bool_] = least <= pp * room + 1.0
    return out


def _each(kind: Any, apply: Any, parts: Sequence[Any]) -> Any:
    """A dataclass of arrays made of several of its kind, array by array."""
    values = {f.name: [getattr(p, f.name) for p in parts] for f in fields(kind)}
    return kind(**{
        name: _each(type(of[0]), apply, of) if isinstance(of[0], Bulk | Ends) else apply(of) for name, of in values.items()
    })  # fmt: skip
