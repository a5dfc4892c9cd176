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

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
    return tuple(_in_flight(rank, order) for rank, order in enumerate(order_table(schedule, pp, vpp, microbatches)))


def settled(schedule: str, pp: int, vpp: int, microbatches: int) -> int:
    """The fewest microbatches whose table holds at its fullest moments what that of ``microbatches`` holds: more periods repeat it."""
    shift = period(schedule, pp, vpp, microbatches)
    return min(microbatches, (4 * pp // shift + 3) * shift + microbatches % shift) if shift else microbatches


def _in_flight(rank: int, order: Order) -> InFlight:
    chunks = sorted({a.chunk for a in order})
    alive, held = dict.fromkeys(chunks, 0), dict.fromkeys(chunks, 0)
    seen: set[tuple[tuple[int, int, int], ...]] = set()
    for a, following in zip(order, (*order[1:], None), strict=True):
        if a.kind == "F":
            alive[a.chunk] += 1
            if following is None or following.kind != "F":
                seen.add(tuple((c, alive[c], held[c]) for c in chunks))
        elif a.kind == "W":
            held[a.chunk] -= 1
        else:
            alive[a.chunk] -= 1
            held[a.chunk] += a.kind == "B"
            if a.kind == "B":
                seen.add(tuple((c, alive[c], held[c]) for c in chunks))
    apart = {"B", "BW"} <= {a.kind for a in order}  # whole backwards run while nothing is held: those moments are their own
    groups = [[s for s in seen if holds(s)], [s for s in seen if not holds(s)]] if apart else [list(seen)]
    return InFlight(rank, tuple(sorted(s for some in groups if some for s in _fullest(some))))


def _fullest(moments: list[tuple[tuple[int, int, int], ...]]) -> list[tuple[tuple[int, int, int], ...]]:
    """The moments that no other exceeds in every count, those that hold most in all first looked at: each leaves few."""
    counts = np.array([[count for _, *both in moment for count in both] for moment in moments])
    left, out = np.argsort(-counts.sum(axis=1), kind="stable"), []
    while len(left):
        first, left = left[0], left[1:]
        out.append(moments[first])
        left = left[(counts[left] > counts[first]).any(axis=1)]
    return out


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
    size = group_size(pp, microbatches) if vpp > 1 else microbatches
    order = np.arange(microbatches)
    group = order // size
    forward = np.stack([np.repeat(order, vpp), np.tile(np.arange(vpp), microbatches)], axis=1)
    by_group = np.repeat(group, vpp)
    forwards = forward[np.lexsort((forward[:, 0], forward[:, 1], by_group))]
    backwards = forward[np.lexsort((forward[:, 0], -forward[:, 1], by_group))]
    return forwards * [1, pp] + [0, rank], backwards * [1, pp] + [0, rank]


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


def _collected(actions: Iterator[Action]) -> Rows:
    return np.array([(KINDS.index(a.kind), a.microbatch, a.chunk, a.paired) for a in actions], np.int64)


def _zero_bubble_v(rank: int, pp: int, vpp: int, microbatches: int) -> Rows:
    return _collected(_zero_bubble_v_actions(rank, pp, microbatches))


def _zero_bubble_v_actions(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    """The handcrafted V of the paper's section 6, for at least 2 pp - 1 microbatches; with fewer, those not there are left out."""
    steady = max(2 * pp - 1, microbatches)
    near, far = rank, 2 * pp - 1 - rank
    done: dict[tuple[str, int], int] = defaultdict(int)

    def step(*kinds: tuple[str, int]) -> Iterator[Action]:
        for kind, chunk in kinds:
            m = done[kind, chunk]
            done[kind, chunk] += 1
            if m < microbatches:
                yield Action(kind, m, chunk)

    f0, b0, w0, f1, b1, w1 = ("F", near), ("B", near), ("W", near), ("F", far), ("B", far), ("W", far)
    yield from step(*[f0] * (2 * (pp - rank) - 1))
    yield from step(*[f1, f0] * rank)
    yield from step(*[f1, b1, w1] * (pp - rank))
    while done[f1] < done[f0] or done[f0] < steady:
        if done[f0] < steady:
            yield from step(f0)
        yield from step(b0, w0, f1, b1, w1)
    yield from step(*[b0, b1] * rank)
    yield from step(*[b0, w0] * (pp - rank))
    yield from step(*[w1] * (done[b1] - done[w1]))
    yield from step(*[w0] * (done[b0] - done[w0]))


def _dual(rank: int, ranks: int, microbatches: int) -> Iterator[tuple[str, int, int, bool]]:
    """(kind, index of the microbatch within its phase, phase 0 or 1, paired) of DualPipe's eight steps.

    Read from the public description of DualPipe-V; for DualPipe the same steps hold with the ranks and microbatches of one half.
    """
    count: dict[tuple[str, int], int] = defaultdict(int)
    waiting: deque[tuple[int, int]] = deque()

    def do(kind: str, phase: int, paired: bool = False) -> tuple[str, int, int, bool]:
        key = ("F" if kind == "F" else "B", phase)
        m = count[key]
        count[key] += 1
        if kind == "B":
            waiting.append((m, phase))
        return kind, m, phase, paired

    def weight() -> Iterator[tuple[str, int, int, bool]]:
        if waiting:
            m, phase = waiting.popleft()
            yield "W", m, phase, False

    after = ranks - 1 - rank
    for _ in range(2 * after):
        yield do("F", 0)
    for _ in range(rank + 1):
        yield do("F", 0)
        yield do("F", 1)
    for _ in range(after):
        yield do("B", 1)
        yield from weight()
        yield do("F", 1)
    for i in range(microbatches - 2 * ranks + rank + 1):
        yield do("F", 0, paired=not (i == 0 and after == 0))
        yield do("BW", 1)
        yield do("F", 1, paired=True)
        yield do("BW", 0)
    for _ in range(after):
        yield do("BW", 1)
        yield do("F", 1, paired=True)
        yield do("BW", 0)
    split = False
    for i in range(rank + 1):
        split = split or (i == (rank + 1) // 2 and rank % 2 == 1)
        yield do("B" if split else "BW", 1)
        split = split or (i == (rank + 1) // 2 and rank % 2 == 0)
        yield do("B" if split else "BW", 0)
    for _ in range(after):
        yield from weight()
        yield do("B" if split else "BW", 0)
    while waiting:
        yield from weight()


def _dualpipe_v(rank: int, pp: int, vpp: int, microbatches: int) -> Rows:
    chunks = (rank, 2 * pp - 1 - rank)
    return _collected(Action(kind, m, chunks[phase], paired) for kind, m, phase, paired in _dual(rank, pp, microbatches))


def _dualpipe(rank: int, pp: int, vpp: int, microbatches: int) -> Rows:
    half = min(rank, pp - 1 - rank)
    second = rank >= pp // 2
    chunks = (half, pp - 1 - half)
    steps = _dual(half, pp // 2, microbatches // 2)
    return _collected(Action(kind, 2 * m + (phase ^ second), chunks[phase], paired) for kind, m, phase, paired in steps)


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
