"""Who waits for whom in a schedule: the dependency graph of an order table, with the durations left open.

Built once for (schedule, ranks, chunks, microbatches) and cached; ``cost_models.pipeline`` walks it with seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from cost_models.schedules import Rows, order_rows, period, rank_of

KINDS = 6
"""Kinds of duration a chunk has, in this order: F, B, W, BW, F in a pair, BW in a pair."""
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order; node 0 is before everything, nodes 1..pp are the starts of the ranks.

    ``before``: the node before it on its rank. ``source``: the node whose result it awaits (0 = none), over transfer ``lag``
    (0 = none, 1 + c = forward from chunk c, 1 + chunks + c = backward into chunk c). ``kind``: its duration, ``KINDS * chunks``
    values by kind and chunk, then a zero, then the start of each rank.

    *Steady state.* A rank's actions read head, block, block, ..., tail, where a block equals the block before it, a period of
    microbatches later. ``steady`` is a range of blocks such that no ancestor of them lies in a tail and everything that later nodes
    await lies in it or after it. If there each node ends d later than the same node k blocks before, and k blocks before that,
    with its own d, then the ends of longer runs go on as straight lines, provided that no node comes to wait for its other
    predecessor: the larger of two straight lines, once it has been straight over three points, is straight between them
    (convexity), so that it is enough to look at the last block that is added (``steady_state``).
    """

    pp: int
    chunks: int
    before: list[int]
    source: list[int]
    lag: list[int]
    kind: list[int]
    firsts: list[int]
    """First action's node of each rank."""
    ends: list[int]
    """Last node of each rank."""
    counts: Ints
    """Nodes by rank and kind of duration."""
    rank: Ints
    position: Ints
    """Rank and position in its order of every node; -1 for node 0, position -1 for the starts. A pair has one node more."""
    orders: tuple[Rows, ...]
    results: tuple[Ints, ...]
    """The node that holds the result of every action, by rank and position."""
    shift: int
    """Microbatches of a block; 0 where nothing repeats."""

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """(rank, position in its order) of every node."""
        return list(zip(self.rank.tolist(), self.position.tolist(), strict=True))

    @cached_property
    def paired(self) -> bool:
        """Whether any actions run in pairs (whose inner nodes belong to no block)."""
        return any(bool(rows[:, 3].any()) for rows in self.orders)

    @cached_property
    def _repeating(self) -> tuple[Ints, Ints, list[int]]:
        return _blocks(self)

    @property
    def blocks(self) -> Ints:
        """The nodes of each block, a row each, over all ranks; empty where the orders do not repeat."""
        return self._repeating[0]

    @property
    def block_counts(self) -> Ints:
        """Nodes of one block by rank and kind."""
        return self._repeating[1]

    @property
    def block_of(self) -> list[int]:
        """The block of every node: -1 in a head, the number of blocks in a tail."""
        return self._repeating[2]

    @cached_property
    def steady(self) -> tuple[int, int]:
        """First and last block that must have repeated; (1, 0) where the table is too short to tell."""
        return _window(self.block_of, self.before, self.source, len(self.blocks)) if len(self.blocks) else (1, 0)

    def times(self, durations: list[float], lags: list[float]) -> list[float]:
        """Seconds at which every node ends."""
        ended = [0.0]
        append = ended.append
        for before, source, lag, kind in zip(self.before, self.source, self.lag, self.kind, strict=True):
            ready, arrived = ended[before], ended[source] + lags[lag]
            append((ready if ready > arrived else arrived) + durations[kind])
        return ended

    @cached_property
    def awaited(self) -> tuple[Ints, Ints, Ints, Ints]:
        """For every node of the last steady block: (place in its block, blocks later) of the node before it and of the node it
        awaits; place -1 where there is none."""
        place = np.full((len(self.before) + 1, 2), -1)
        for number, nodes in enumerate(self.blocks):
            place[nodes, 0], place[nodes, 1] = np.arange(len(nodes)), number
        last = self.blocks[self.steady[1]]
        found = []
        for others in (np.array([0, *self.before])[last], np.array([0, *self.source])[last]):
            found += [place[others, 0], np.where(place[others, 0] >= 0, place[others, 1] - self.steady[1], 0)]
        return found[0], found[1], found[2], found[3]

    def steady_state(
        self, times: list[float], durations: list[float], lags: list[float], more: int, tolerance: float
    ) -> int | None:
        """Blocks k after which the ends of the steady blocks repeat themselves on straight lines, where ``more`` further blocks
        (a multiple of k) stay on them; None where the steady state has not been reached, or would be left. -k where only ``more``
        is no multiple of k."""
        first, last = self.steady
        if last < first:
            return None
        ended = np.array(times)[self.blocks]
        allowed = tolerance * times[self.ends[0]]
        for apart in range(1, min(first // 2, 2 * self.pp + 1) + 1):
            grown = ended[first - apart : last + 1] - ended[first - 2 * apart : last + 1 - apart]
            if np.abs(grown[-1] - grown[-1 - apart]).max() > allowed or np.abs(grown[apart:] - grown[:-apart]).max() > allowed:
                continue
            if np.ptp(grown[-apart:], axis=None) <= allowed or (
                not self.paired and self._holds(ended, durations, lags, apart, more, allowed)
            ):
                return apart if more % apart == 0 else -apart
            return None
        return None

    def _holds(self, ended: Floats, durations: list[float], lags: list[float], apart: int, more: int, allowed: float) -> bool:
        """Whether every node still follows from its predecessors ``more`` blocks on, all of them on their lines."""
        last = self.steady[1]
        before, before_blocks, source, source_blocks = self.awaited
        nodes = self.blocks[last]
        seconds = np.array(durations)[np.array(self.kind)[nodes - 1]]
        lag = np.array(lags)[np.array(self.lag)[nodes - 1]]
        turns = -(-more // apart) * apart

        def end(place: Ints, block: Ints | int) -> Floats:
            """Ends of nodes in ``block`` blocks after the last one, on their lines."""
            behind = np.broadcast_to(-np.asarray(block), place.shape)
            phase, periods = behind % apart, behind // apart
            base = ended[last - phase, place]
            line: Floats = base - periods * (base - ended[last - phase - apart, place])
            return line

        everyone = np.arange(len(nodes))
        for phase in range(apart):
            at = turns - phase
            ready = np.where(before >= 0, end(before, before_blocks + at), -np.inf)
            arrived = np.where(source >= 0, end(source, source_blocks + at) + lag, -np.inf)
            if np.abs(np.maximum(ready, arrived) + seconds - end(everyone, at)).max() > allowed:
                return False
        return True

    def longer(self, times: list[float], durations: list[float], lags: list[float], apart: int, more: int) -> list[float]:
        """Ends of the nodes of a run that is ``more`` blocks longer: its last steady blocks and what comes after them, at the nodes
        of this one. What lies before the steady blocks is left as it is."""
        first, last = self.steady
        later = times.copy()
        for number in range(first, last + 1):
            nodes = self.blocks[number]
            ended = np.array(times)[nodes]
            grown = ended - np.array(times)[self.blocks[number - apart]]
            for node, end in zip(nodes.tolist(), (ended + more // apart * grown).tolist(), strict=True):
                later[node] = end
        for node in range(1, len(later)):
            if self.block_of[node] > last:
                ready, arrived = later[self.before[node - 1]], later[self.source[node - 1]] + lags[self.lag[node - 1]]
                later[node] = (ready if ready > arrived else arrived) + durations[self.kind[node - 1]]
        return later


@lru_cache(maxsize=512)
def remote_boundaries(schedule: str, pp: int, chunks: int) -> tuple[bool, ...]:
    """Whether chunks c and c + 1 lie on different ranks, by c; False for the last."""
    return (*(rank_of(schedule, pp, c) != rank_of(schedule, pp, c + 1) for c in range(chunks - 1)), False)


@lru_cache(maxsize=64)
def graph(schedule: str, pp: int, vpp: int, microbatches: int) -> Graph:
    """The graph of ``order_rows``; the last few are kept, each a megabyte or so. Raises InputError where the schedule cannot run."""
    shift = period(schedule, pp, vpp, microbatches)
    remote = np.array(remote_boundaries(schedule, pp, pp * vpp))
    return build(order_rows(schedule, pp, vpp, microbatches), pp * vpp, remote, shift)


@dataclass(frozen=True)
class _Slots:
    """Nodes numbered rank by rank (from 1), before they are put in an order: what each awaits, over which transfer, its duration,
    its rank, and for every action the slot that holds its result."""

    source: Ints
    lag: Ints
    kind: Ints
    rank: Ints
    position: Ints
    result: list[Ints]


def build(orders: tuple[Rows, ...], chunks: int, remote: npt.NDArray[np.bool_], shift: int) -> Graph:
    """The graph of any orders, one a rank, over ``chunks`` chunks; ``remote[c]``: chunks c and c + 1 are on different ranks.

    Raises AssertionError where the orders wait for one another in a circle.
    """
    pp = len(orders)
    slots = _slots(orders, chunks, remote)
    order = np.array(_topological(slots, pp))
    number = np.zeros(len(order) + 1, np.int64)
    number[order] = np.arange(1 + pp, len(order) + 1 + pp)
    rank = slots.rank[order]
    before = np.concatenate([np.zeros(pp, np.int64), _previous(order, rank, number, pp)])
    source = np.concatenate([np.zeros(pp, np.int64), number[slots.source[order]]])
    kind = np.concatenate([KINDS * chunks + 1 + np.arange(pp), slots.kind[order]])
    lag = np.concatenate([np.zeros(pp, np.int64), slots.lag[order]])
    counts = np.zeros((pp, KINDS * chunks + 1 + pp), np.int64)
    np.add.at(counts, (np.concatenate([np.arange(pp), rank]), kind), 1)
    results = tuple(number[result] for result in slots.result)
    firsts, ends = ([int(number[s]) for s in slots_of] for slots_of in _ends_of(slots, pp))
    ranks = np.concatenate([[-1], np.arange(pp), rank])
    positions = np.concatenate([np.full(pp + 1, -1), slots.position[order]])
    return Graph(
        pp, chunks, before.tolist(), source.tolist(), lag.tolist(), kind.tolist(), firsts, ends, counts,
        ranks, positions, orders, results, shift,
    )  # fmt: skip


def _slots(orders: tuple[Rows, ...], chunks: int, remote: npt.NDArray[np.bool_]) -> _Slots:
    """One slot an action, two for the first of a pair (its own wait, then the partner's): a pair starts when both may start, and both
    its results exist when it ends."""
    lengths = [len(rows) for rows in orders]
    rank, position = np.repeat(np.arange(len(orders)), lengths), np.concatenate([np.arange(n) for n in lengths])
    kind, microbatch, chunk, paired = np.concatenate(orders).T
    slot = 1 + np.arange(len(kind)) + np.cumsum(paired)
    first, partner = paired == 1, np.roll(paired, 1) == 1  # of a pair; no rank ends with the first of one
    result = np.where(first, np.roll(slot, -1), slot)
    is_forward, is_backward = kind == 0, (kind == 1) | (kind == 3)
    most = 1 + int(microbatch.max())
    forward, backward = np.zeros((most, chunks + 1), np.int64), np.zeros((most, chunks + 2), np.int64)
    forward[microbatch[is_forward], chunk[is_forward] + 1] = result[is_forward]
    backward[microbatch[is_backward], chunk[is_backward]] = result[is_backward]
    up, down = is_forward & (chunk > 0), is_backward & (chunk < chunks - 1)
    awaited = np.where(up, forward[microbatch, chunk], np.where(down, backward[microbatch, np.minimum(chunk + 1, chunks - 1)], 0))
    missing = np.flatnonzero((up | down) & (awaited == 0))
    if len(missing):
        raise AssertionError(f"the order deadlocks on rank {rank[missing[0]]}: it awaits an action that no rank does")
    boundary = np.where(up, chunk - 1, np.where(down, chunk, -1))
    crossed = np.where((boundary >= 0) & remote[boundary], 1 + boundary + np.where(up, 0, chunks), 0)
    source, lag, kinds, ranks, positions = np.zeros((5, int(slot[-1]) + 1), np.int64)
    kinds[:] = KINDS * chunks
    own = np.where(partner, 0, awaited), np.where(partner, 0, crossed)
    source[slot] = np.where(first, np.roll(awaited, -1), own[0])
    lag[slot] = np.where(first, np.roll(crossed, -1), own[1])
    kinds[slot] = np.where(first, 4, np.where(partner, 5, kind)) * chunks + chunk
    ranks[slot], positions[slot] = rank, position
    waits = slot[first] - 1
    source[waits], lag[waits], ranks[waits], positions[waits] = awaited[first], crossed[first], rank[first], position[first]
    return _Slots(source, lag, kinds, ranks, positions, np.split(result, np.cumsum(lengths)[:-1]))


def _ends_of(slots: _Slots, pp: int) -> tuple[list[int], list[int]]:
    """(result of the first action, last slot) of every rank."""
    last = np.searchsorted(slots.rank[1:], np.arange(pp), side="right")
    return [int(result[0]) for result in slots.result], [int(slot) for slot in last]


def _topological(slots: _Slots, pp: int) -> list[int]:
    """The slots in an order in which each comes after what it waits for."""
    source = slots.source.tolist()
    bounds = [1, *(int(end) + 1 for end in np.searchsorted(slots.rank[1:], np.arange(pp), side="right"))]
    at, stops = bounds[:-1].copy(), bounds[1:]
    done = bytearray(len(source))
    done[0] = 1
    sleeping: dict[int, int] = {}
    order: list[int] = []
    ready = list(range(pp))
    while ready:
        rank = ready.pop()
        slot, stop = at[rank], stops[rank]
        while slot < stop:
            awaited = source[slot]
            if not done[awaited]:
                sleeping[awaited] = rank
                break
            done[slot] = 1
            order.append(slot)
            if slot in sleeping:
                ready.append(sleeping.pop(slot))
            slot += 1
        at[rank] = slot
    if len(order) < len(source) - 1:
        stuck = next(rank for rank in range(pp) if at[rank] < stops[rank])
        raise AssertionError(f"the order deadlocks on rank {stuck} at its action {int(slots.position[at[stuck]])}")
    return order


def _previous(order: Ints, rank: Ints, number: Ints, pp: int) -> Ints:
    """For every node in ``order``: the node before it on its rank (slots of a rank are consecutive), or the rank's start."""
    before: Ints = number[order - 1]
    starts = np.zeros(len(order), bool)
    first = np.full(pp, len(order) + 1)
    np.minimum.at(first, rank, order)
    starts[np.flatnonzero(order == first[rank])] = True
    return np.where(starts, rank + 1, before)


# -- the steady state ---------------------------------------------------------------------------------------------------------


def _blocks(g: Graph) -> tuple[Ints, Ints, list[int]]:
    """``Graph.blocks``, ``block_counts`` and ``block_of``."""
    per_block = np.zeros(g.counts.shape, np.int64)
    runs = [_run(rows, g.shift) for rows in g.orders] if g.shift else []
    number = min((blocks for _, _, blocks in runs), default=0)
    if number < 3:
        return np.zeros((0, 0), np.int64), per_block, []
    nodes = [g.results[rank][start : start + number * size].reshape(number, size) for rank, (start, size, _) in enumerate(runs)]
    start, size = (np.array([run[i] for run in runs]) for i in (0, 1))
    block = np.clip((g.position - start[g.rank]) // size[g.rank], -1, number)
    block[0] = -1
    for rank, (first, length, _) in enumerate(runs):
        part = g.orders[rank][first : first + length]
        partner = np.roll(g.orders[rank][:, 3], 1)[first : first + length]
        kind = np.where(part[:, 3] == 1, 4, np.where(partner == 1, 5, part[:, 0]))
        np.add.at(per_block[rank], kind * g.chunks + part[:, 2], 1)
    return np.concatenate(nodes, axis=1), per_block, block.tolist()


def _window(block_of: list[int], before: list[int], source: list[int], number: int) -> tuple[int, int]:
    """First and last block that must have repeated (see ``Graph``)."""
    block = np.array(block_of)
    reach, tail = 1, 1
    for other in (np.array([0, *before]), np.array([0, *source])):
        theirs = block[other]
        inside = (other > 0) & (theirs >= 0) & (theirs < number)
        late, early = inside & (block == number), inside & (block >= 0) & (block < number)
        tail = max(tail, int((number - theirs[late]).max(initial=1)))
        reach = max(reach, int((block - theirs)[early].max(initial=1)))
    farthest = list(block_of)
    for node, (one, two) in enumerate(zip(before, source, strict=True), start=1):
        most = farthest[one] if farthest[one] > farthest[two] else farthest[two]
        if most > farthest[node]:
            farthest[node] = most
    ahead = (np.array(farthest) - block)[(block >= 0) & (block < number)]
    last = number - 1 - int(ahead.max(initial=0))
    first = min(last - reach + 1, number - tail)
    return (first, last) if first >= 1 else (1, 0)


def _run(rows: Rows, shift: int) -> tuple[int, int, int]:
    """(start, actions, number) of the equal blocks in the middle of an order; number 0 where there are none."""
    forwards = np.flatnonzero(rows[:, 0] == 0)
    later = forwards[forwards >= len(rows) // 2]
    if not len(later):
        return 0, 1, 0
    middle = int(later[0])
    earlier = forwards[(rows[forwards, 1] == rows[middle, 1] - shift) & (rows[forwards, 2] == rows[middle, 2])]
    if not len(earlier):
        return 0, 1, 0
    back = int(earlier[0])
    size = middle - back
    step = np.array([0, shift, 0, 0])
    different = np.flatnonzero((rows[size:] != rows[:-size] + step).any(axis=1))
    start = int(different[different < back].max(initial=-1)) + 1
    stop = int(different[different > back].min(initial=len(rows) - size))
    if rows[start + size - 1, 3]:
        start += 1
    return start, size, (stop - start) // size + 1
