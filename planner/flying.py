"""What the ranks of a schedule have in flight at their fullest, as the bounds by arrays read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cost_models.layout import SPLIT_BACKWARD, V_SHAPED
from cost_models.schedules import KINDS, order_rows, settled
from planner.paths import ranks_of
from planner.recompute_tables import Group

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
WAITING = (1.0, 8.0)
"""Times a microbatch alive that one waiting for its weight gradient weighs in the moments that are looked at."""
Moment = tuple[Group, ...]
"""What ranks have in flight at a full moment of theirs: chunks alike, the two of a V-shaped schedule's rank apart, else all of them, with what
the least of them has alive at least (in the mean of moments that makes this most)."""


@dataclass(frozen=True)
class Flying:
    """``moments`` at which a rank may be fullest: with most microbatches in flight; where backward is split, with most of them waiting for
    their weight gradient, which keep more. ``tail``: microbatches alive of the model's last chunk at the emptiest of them. By rank, or by
    column x rank."""

    moments: tuple[Moment, ...]
    tail: Floats

    @classmethod
    def of_columns(cls, some: Sequence[Flying], at: Ints) -> Flying:
        """Column by column, which of ``some`` it has in flight."""
        if all(one is some[0] for one in some):
            return some[0]
        moments = zip(*(one.moments for one in some), strict=True)
        groups = [
            [(np.stack([g.alive for g in of]), np.stack([g.waiting for g in of])) for of in zip(*m, strict=True)] for m in moments
        ]
        every = tuple(tuple(Group(alive[at], waiting[at]) for alive, waiting in moment) for moment in groups)
        return cls(every, np.stack([one.tail for one in some])[at])

    def most(self) -> tuple[Floats, Floats]:
        """(microbatches alive, waiting) of any chunk at any of the moments, by rank or column x rank."""
        groups = [group for moment in self.moments for group in moment]
        return np.max([g.alive for g in groups], axis=0), np.max([g.waiting for g in groups], axis=0)


def in_flight(schedule: str, pp: int, vpp: int, microbatches: int) -> Flying:
    """From the order of every rank's actions (as ``schedules.in_flight``, the fullest moments alone)."""
    return _in_flight(schedule, pp, vpp, settled(schedule, pp, vpp, microbatches))


@lru_cache(maxsize=1024)
def _in_flight(schedule: str, pp: int, vpp: int, microbatches: int) -> Flying:
    number, chunks = 2 if schedule in V_SHAPED else 1, pp * vpp
    weights = WAITING if schedule in SPLIT_BACKWARD else WAITING[:1]
    moments = tuple(tuple(Group(np.zeros(pp), np.zeros(pp)) for _ in range(number)) for _ in weights)
    tail, ranks = np.zeros(pp), ranks_of(schedule, pp, chunks)
    forward, split, weight = KINDS.index("F"), KINDS.index("B"), KINDS.index("W")
    for rank, rows in enumerate(order_rows(schedule, pp, vpp, microbatches)):
        kind, held = rows[:, 0], np.flatnonzero(ranks == rank)
        mine = rows[:, 2][:, None] == held[None, :]
        starts, waits, done = kind == forward, kind == split, kind == weight
        alive = np.cumsum(mine * (starts.astype(int) - ~(starts | done))[:, None], axis=0)
        waiting = np.cumsum(mine * (waits.astype(int) - done)[:, None], axis=0) if len(weights) > 1 else np.zeros_like(alive)
        last = held == chunks - 1
        least = np.inf
        for moment, heavier in zip(moments, weights, strict=True):
            at = (alive + heavier * waiting).sum(axis=1).argmax()
            here, behind = alive[at].astype(float), waiting[at].astype(float)
            if number == 1 and len(held) > 1:
                here, behind = np.full(len(held), _evenest(alive).min()), np.zeros(len(held))
            if rank == ranks[0]:  # what waits of the first chunk is what its layers keep, whatever that is
                behind = np.zeros(len(held))
            for group, chunk_alive, chunk_waiting in zip(moment, here, behind, strict=False):
                group.alive[rank], group.waiting[rank] = chunk_alive, chunk_waiting
            if last.any():
                least = min(least, float(here[last][0]))
        tail[rank] = least if last.any() else 0.0
    return Flying(moments, tail)


def _evenest(alive: Ints) -> Floats:
    """Microbatches alive by chunk in the mean of the fullest moments in which the chunk with fewest has most: no choice of layers and recompute
    needs less at its own fullest moment than in this mean."""
    every = alive.sum(axis=1)
    most = every.max()
    some, chunks = alive[every == most], alive.shape[1]
    total, best = np.zeros(chunks), np.zeros(chunks)
    for turn in range(1, 17):
        total = total + some[some[:, int(total.argmin())].argmax()]
        if (total / turn).min() > best.min():
            best = total / turn
            if best.min() * chunks >= most:  # as even as can be
                break
    return best
