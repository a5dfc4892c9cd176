"""Pipeline schedules as order tables: what every rank does, in which order, whatever the durations.

A table holds one tuple of ``Action`` per pipeline rank. Chunks are numbered in model order (0 holds the embedding). Kinds are
``F`` (forward), ``B`` (gradient of the input), ``W`` (gradient of the weights) and ``BW`` (both at once).

=============  =====================================================================================================
gpipe          all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)
1f1b           ``pp - 1 - rank`` warm-up forwards, then one forward, one backward (PipeDream-flush, arXiv:2006.09503)
interleaved    Megatron-LM's order over ``vpp`` chunks a rank (arXiv:2104.04473, section 2.2), in groups of ``group_size``
zb-h1, zb-h2   1F1B with W delayed by ``rank`` (H1) or ``2 rank`` (H2) microbatches (Qi et al. 2024, arXiv:2401.10241,
               section 2). H2 warms up with ``2 (pp - rank) - 1`` forwards. zb-h1 with vpp > 1 is the interleaved form.
zb-v           two chunks a rank in a V: chunk c and 2 pp - 1 - c (the same paper, section 6)
dualpipe       two copies of the model, one in each direction; forwards overlap the backwards of the other direction
               (DeepSeek-V3, arXiv:2412.19437, section 3.2.1). Even microbatches enter at rank 0, odd ones at the last rank.
dualpipe-v     the same order folded into a V on half the ranks, one copy
=============  =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cost_models.arrays import distinct
from profiles.errors import InputError

KINDS = ("F", "B", "W", "BW")
MOST = 1 << 22
"""Forwards of the longest table that is written out. Longer steps are extrapolated, where their steady state is found."""
Rows = npt.NDArray[np.int64]
"""Actions as rows of (index of the kind in ``KINDS``, microbatch, chunk, paired)."""


class Action(NamedTuple):
    """One piece of work of a rank. ``paired``: runs together with the action after it (DualPipe's overlapped forward and
    backward); the pair starts when both may start and both its results exist when it ends."""

    kind: str
    microbatch: int
    chunk: int
    paired: bool = False

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"


Order = tuple[Action, ...]


def check_schedule(schedule: str, pp: int, vpp: int, microbatches: int) -> None:
    """Raise InputError unless the schedule can run on ``pp`` ranks with ``vpp`` chunks each and this many microbatches."""
    if schedule not in _ORDERS:
        raise InputError("schedule", schedule, f"is one of {', '.join(_ORDERS)}", "1f1b")
    if min(pp, vpp, microbatches) < 1:
        raise InputError("microbatches", microbatches, "pp, vpp and the microbatches must be at least 1", 1)
    if schedule in ("zb-v", "dualpipe-v") and vpp != 2:
        raise InputError("vpp", vpp, f"{schedule} places exactly 2 chunks on a rank", 2)
    if schedule in ("gpipe", "1f1b", "zb-h2", "dualpipe") and vpp != 1:
        raise InputError("vpp", vpp, f"{schedule} places one chunk on a rank", 1)
    if schedule == "dualpipe":
        if pp % 2:
            raise InputError("pp", pp, "dualpipe needs an even number of ranks", pp + 1)
        if microbatches % 2 or microbatches < 2 * pp:
            near = max(2 * pp, microbatches + microbatches % 2)
            raise InputError("microbatches", microbatches, f"dualpipe needs an even number, at least 2*pp = {2 * pp}", near)
    if schedule == "dualpipe-v" and microbatches < 2 * pp:
        raise InputError("microbatches", microbatches, f"dualpipe-v needs at least 2*pp = {2 * pp}", 2 * pp)


def group_size(pp: int, microbatches: int) -> int:
    """Microbatches an interleaved rank runs through one chunk before it turns to the next.

    ``pp`` when it divides the microbatches; else the smallest group g >= pp that leaves no remainder below pp, as Megatron-LM
    demands of ``--microbatch-group-size-per-virtual-pipeline-stage``; all of them when there are fewer than pp.
    """
    for size in range(pp, microbatches + 1):
        rest = microbatches % size
        if rest == 0 or rest >= pp:
            return size
    return microbatches


def period(schedule: str, pp: int, vpp: int, microbatches: int) -> int:
    """Microbatches after which the steady part of the table repeats itself; 0 where there is no steady part."""
    if schedule == "gpipe":
        return 0
    if schedule == "interleaved" or (schedule == "zb-h1" and vpp > 1):
        return group_size(pp, microbatches) if microbatches % pp == 0 else 0
    return 2 if schedule == "dualpipe" else 1


@lru_cache(maxsize=256)
def order_rows(schedule: str, pp: int, vpp: int, microbatches: int) -> tuple[Rows, ...]:
    """The order of every rank as an array of rows. Raises InputError where the schedule cannot run (``check_schedule``)."""
    check_schedule(schedule, pp, vpp, microbatches)
    if pp * vpp * microbatches > MOST:
        most = max(1, MOST // (pp * vpp))
        raise InputError("microbatches", microbatches, f"a table of {pp} ranks with {vpp} chunks each is walked up to {most}", most)
    return tuple(_ORDERS[schedule](rank, pp, vpp, microbatches) for rank in range(pp))


@lru_cache(maxsize=64)
def order_table(schedule: str, pp: int, vpp: int, microbatches: int) -> tuple[Order, ...]:
    """The order of every rank, as actions. Raises InputError where the schedule cannot run."""
    orders = order_rows(schedule, pp, vpp, microbatches)
    return tuple(tuple(Action(KINDS[k], m, c, bool(p)) for k, m, c, p in rows.tolist()) for rows in orders)


def rank_of(schedule: str, pp: int, chunk: int, microbatch: int = 0) -> int:
    """The rank that runs ``chunk`` for ``microbatch`` (the microbatch matters to dualpipe alone)."""
    if schedule in ("zb-v", "dualpipe-v"):
        return chunk if chunk < pp else 2 * pp - 1 - chunk
    if schedule == "dualpipe" and microbatch % 2:
        return pp - 1 - chunk
    return chunk % pp


@dataclass(frozen=True)
class InFlight:
    """What one rank holds at its fullest moments.

    A snapshot lists (chunk, microbatches whose saved activations are alive, microbatches of which only what the weight gradient
    needs is alive) of every chunk the rank has. Activations live from F to B or BW; the inputs of the weight gradient from B to
    W, and may be more than those activations were. Only snapshots that no other one exceeds everywhere are kept, so the peak for
    any bytes a chunk is among them.
    """

    rank: int
    snapshots: tuple[tuple[tuple[int, int, int], ...], ...]

    @cached_property
    def fullest(self) -> tuple[tuple[int, int, int], ...]:
        """The snapshot with most microbatches alive or held (most alive on ties)."""
        return max(self.snapshots, key=lambda s: (sum(alive + held for _, alive, held in s), sum(alive for _, alive, _ in s)))

    @cached_property
    def counts(self) -> dict[int, int]:
        """Chunk -> microbatches alive or held, at the fullest moment."""
        return {chunk: alive + held for chunk, alive, held in self.fullest}

    def peak(self, alive_bytes: Mapping[int, float], held_bytes: Mapping[int, float] | None = None) -> float:
        """Most bytes held at once, given bytes a microbatch by chunk, alive and held for W (default: as many as alive)."""
        held_of = alive_bytes if held_bytes is None else held_bytes
        return max(sum(alive * alive_bytes[c] + held * held_of[c] for c, alive, held in s) for s in self.snapshots)


@lru_cache(maxsize=512)
def in_flight(schedule: str, pp: int, vpp: int, microbatches: int) -> tuple[InFlight, ...]:
    """The fullest moments of every rank, exactly as the table has them. Raises InputError where the schedule cannot run."""
    check_schedule(schedule, pp, vpp, microbatches)
    few = settled(schedule, pp, vpp, microbatches)
    if few < microbatches:
        return in_flight(schedule, pp, vpp, few)
    return tuple(_in_flight(rank, rows) for rank, rows in enumerate(order_rows(schedule, pp, vpp, microbatches)))


def settled(schedule: str, pp: int, vpp: int, microbatches: int) -> int:
    """The fewest microbatches whose table holds at its fullest moments what that of ``microbatches`` holds: more periods repeat it."""
    shift = period(schedule, pp, vpp, microbatches)
    return min(microbatches, (4 * pp // shift + 3) * shift + microbatches % shift) if shift else microbatches


def _in_flight(rank: int, rows: Rows) -> InFlight:
    kind, chunks = rows[:, 0], np.flatnonzero(np.bincount(rows[:, 2]))
    mine = rows[:, 2][:, None] == chunks
    forward, split, weight, whole = np.array([kind == KINDS.index(name) for name in ("F", "B", "W", "BW")])
    alive = np.cumsum(mine * (forward.astype(int) - (split | whole))[:, None], axis=0)
    held = np.cumsum(mine * (split.astype(int) - weight)[:, None], axis=0)
    full = (forward & ~np.append(forward[1:], False)) | split
    moments = np.stack([alive[full], held[full]], axis=2).reshape(-1, 2 * len(chunks))
    seen = moments[distinct(moments)[0]]
    exceeds = ~np.eye(len(seen), dtype=bool)
    for bytes_ in seen.T:
        exceeds &= np.greater_equal.outer(bytes_, bytes_)
    if split.any() and whole.any():  # whole backwards run while nothing is held: those moments are their own
        waits = seen[:, 1::2].any(axis=1)
        exceeds &= np.equal.outer(waits, waits)
    kept = seen[~exceeds.any(axis=0)].reshape(-1, len(chunks), 2).tolist()
    names = chunks.tolist()
    return InFlight(rank, tuple(tuple((c, a, h) for c, (a, h) in zip(names, one, strict=True)) for one in kept))


def holds(snapshot: tuple[tuple[int, int, int], ...]) -> bool:
    """Whether a microbatch waits for its weight gradients."""
    return any(held for _, _, held in snapshot)


# -- the orders -----------------------------------------------------------------------------------------------------------


def _rows(kind: str, which: Rows) -> Rows:
    """Actions of one kind for (microbatch, chunk) rows."""
    rows = np.zeros((len(which), 4), np.int64)
    rows[:, 0], rows[:, 1:3] = KINDS.index(kind), which
    return rows


def _virtual(rank: int, pp: int, vpp: int, microbatches: int) -> tuple[Rows, Rows]:
    """(microbatch, chunk) of the k-th forward and of the k-th backward of a rank with ``vpp`` chunks, group by group."""
    forwards, backwards = _first_ranks(pp, vpp, microbatches)
    here = np.array([0, rank])
    return forwards + here, backwards + here


@lru_cache(maxsize=16)
def _first_ranks(pp: int, vpp: int, microbatches: int) -> tuple[Rows, Rows]:
    """``_virtual`` of rank 0."""
    size = group_size(pp, microbatches) if vpp > 1 else microbatches
    order = np.arange(microbatches)
    group = order // size
    forward = np.stack([np.repeat(order, vpp), np.tile(np.arange(vpp), microbatches)], axis=1)
    by_group = np.repeat(group, vpp)
    forwards = forward[np.lexsort((forward[:, 0], forward[:, 1], by_group))]
    backwards = forward[np.lexsort((forward[:, 0], -forward[:, 1], by_group))]
    return forwards * [1, pp], backwards * [1, pp]


def _gpipe(rank: int, pp: int, vpp: int, microbatches: int) -> Rows:
    forward, backward = _virtual(rank, pp, 1, microbatches)
    return np.concatenate([_rows("F", forward), _rows("BW", backward)])


def _one_f_one_b(rank: int, pp: int, vpp: int, microbatches: int) -> Rows:
    return _alternating(*_virtual(rank, pp, 1, microbatches), pp - 1 - rank)


def _interleaved(rank: int, pp: int, vpp: int, microbatches: int) -> Rows:
    warm = 2 * (pp - 1 - rank) + (vpp - 1) * group_size(pp, microbatches)
    return _alternating(*_virtual(rank, pp, vpp, microbatches), warm)


def _zero_bubble_h1(rank: int, pp: int, vpp: int, microbatches: int) -> Rows:
    warm = pp - 1 - rank + (vpp - 1) * group_size(pp, microbatches)
    return _alternating(*_virtual(rank, pp, vpp, microbatches), warm, lag=rank)


def _zero_bubble_h2(rank: int, pp: int, vpp: int, microbatches: int) -> Rows:
    return _alternating(*_virtual(rank, pp, 1, microbatches), 2 * (pp - rank) - 1, lag=2 * rank, backward_first=True)


def _alternating(forward: Rows, backward: Rows, warm: int, lag: int | None = None, backward_first: bool = False) -> Rows:
    """``warm`` forwards, then a forward and a backward in turn until the forwards are done, then backwards. With ``lag`` the
    backwards are split: each W comes ``lag`` backwards after its B, the last ones at the end."""
    total = len(forward)
    warm = min(warm, total)
    turns = np.full((total, 3, 4), -1, np.int64)
    at_f, at_b, at_w = (2, 0, 1) if backward_first else (0, 1, 2)
    turns[: total - warm, at_f] = _rows("F", forward[warm:])
    turns[:, at_b] = _rows("BW" if lag is None else "B", backward)
    if lag is not None:
        turns[lag:, at_w] = _rows("W", backward[: max(0, total - lag)])
    middle = turns.reshape(-1, 4)
    parts = [_rows("F", forward[:warm]), middle[middle[:, 0] >= 0]]
    if lag is not None:
        parts.append(_rows("W", backward[max(0, total - lag) :]))
    return np.concatenate(parts)


def _zero_bubble_v(rank: int, pp: int, vpp: int, microbatches: int) -> Rows:
    """The handcrafted V of the paper's section 6, for at least 2 pp - 1 microbatches; with fewer, those not there are left out."""
    steady = max(2 * pp - 1, microbatches)
    f0, b0, w0, f1, b1, w1 = range(6)
    steps = [f0] * (2 * (pp - rank) - 1) + [f1, f0] * rank + [f1, b1, w1] * (pp - rank)
    steps += [f0, b0, w0, f1, b1, w1] * (steady - steps.count(f0))
    steps += [b0, w0, f1, b1, w1] * (steady - steps.count(f1))
    steps += [b0, b1] * rank + [b0, w0] * (pp - rank)
    steps += [w1] * (steps.count(b1) - steps.count(w1)) + [w0] * (steps.count(b0) - steps.count(w0))
    step = np.array(steps)
    rows = np.zeros((len(step), 4), np.int64)
    rows[:, 0], rows[:, 2] = step % 3, np.where(step < 3, rank, 2 * pp - 1 - rank)
    for one in range(6):
        _number(rows, step == one)
    return rows[rows[:, 1] < microbatches]


def _number(rows: Rows, which: npt.NDArray[np.bool_]) -> None:
    """Give some actions the microbatches 0, 1, ... in turn."""
    rows[which, 1] = np.arange(np.count_nonzero(which))


def _dual(rank: int, ranks: int, microbatches: int) -> Rows:
    """DualPipe's eight steps: rows of (index of the kind, index of the microbatch within its phase, phase 0 or 1, paired).

    Read from the public description of DualPipe-V; for DualPipe the same steps hold with the ranks and microbatches of one half.
    """
    after, steady = ranks - 1 - rank, max(0, microbatches - 2 * ranks + rank + 1)
    f0, f1 = (0, 0, 0), (0, 1, 0)
    pair0, pair1 = (0, 0, 1), (0, 1, 1)
    split0, split1 = (1, 0, 0), (1, 1, 0)
    weight = (2, 0, 0)
    both0, both1 = (3, 0, 0), (3, 1, 0)
    turns = [pair0, both1, pair1, both0] * steady
    if turns and not after:
        turns[0] = f0
    whole = (rank + 1) // 2
    ending = [both1, both0] * whole + ([split1, split0] if rank % 2 else [both1, split0]) + [split1, split0] * (rank - whole)
    steps = [f0] * (2 * after) + [f0, f1] * (rank + 1) + [split1, weight, f1] * after + turns + [both1, pair1, both0] * after
    steps += ending + [weight, split0] * after + [weight] * (ending.count(split0) + ending.count(split1))
    kind, phase, paired = np.array(steps, np.int64).T
    rows = np.stack([kind, np.zeros(len(kind), np.int64), phase, paired], axis=1)
    forward, weights = kind == 0, kind == 2
    for one in (0, 1):
        _number(rows, forward & (phase == one))
        _number(rows, ~forward & ~weights & (phase == one))
    rows[weights, 1:3] = rows[kind == 1, 1:3]  # weight gradients follow in the order of their inputs' ones
    return rows


def _dualpipe_v(rank: int, pp: int, vpp: int, microbatches: int) -> Rows:
    rows = _dual(rank, pp, microbatches)
    rows[:, 2] = np.where(rows[:, 2] == 0, rank, 2 * pp - 1 - rank)
    return rows


def _dualpipe(rank: int, pp: int, vpp: int, microbatches: int) -> Rows:
    half = min(rank, pp - 1 - rank)
    rows = _dual(half, pp // 2, microbatches // 2)
    phase = rows[:, 2].copy()
    rows[:, 1] = 2 * rows[:, 1] + (phase ^ int(rank >= pp // 2))
    rows[:, 2] = np.where(phase == 0, half, pp - 1 - half)
    return rows


_ORDERS = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble_h1,
    "zb-h2": _zero_bubble_h2,
    "zb-v": _zero_bubble_v,
    "dualpipe": _dualpipe,
    "dualpipe-v": _dualpipe_v,
}
