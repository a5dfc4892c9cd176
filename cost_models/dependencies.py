"""Who waits for whom in a schedule: the dependency graph of an order table, with the durations left open.

Built once for (schedule, ranks, chunks, microbatches) and cached; ``cost_models.pipeline`` walks it with seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cost_models.schedules import Action, Order, order_table, period, rank_of

KINDS = 6
"""Kinds of duration a chunk has, in this order: F, B, W, BW, F in a pair, BW in a pair."""
_ROW = {"F": 0, "B": 1, "W": 2, "BW": 3}


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order; node 0 is before everything, nodes 1..pp are the starts of the ranks.

    ``before``: the node before it on its rank. ``source``: the node whose result it awaits (0 = none), over transfer ``lag``
    (0 = none, 1 + c = forward from chunk c, 1 + chunks + c = backward into chunk c). ``kind``: its duration, ``KINDS * chunks``
    values by kind and chunk, then a zero, then the start of each rank.

    *Steady state.* A rank's actions read head, block, block, ..., tail, where a block equals the block before it, a period of
    microbatches later. If every node of blocks ``steady[0]..steady[1]`` ended x later than the same node k blocks earlier, and no
    ancestor of those blocks lies in a tail, then, by induction over the topological order, so does every later block of a longer
    run, and k more blocks add x to the whole: what a node awaits lies at most so many blocks back that the range covers it.
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
    places: list[tuple[int, int]]
    """(rank, position in its order) of every node; position -1 for the starts. A pair has one node more, for its second wait."""
    counts: npt.NDArray[np.int64]
    """Nodes by rank and kind of duration."""
    blocks: npt.NDArray[np.int64]
    """The nodes of each block, a row each, over all ranks."""
    block_counts: npt.NDArray[np.int64]
    """Nodes of one block by rank and kind."""
    steady: tuple[int, int]
    """First and last block that must have repeated; (1, 0) where the table is too short to tell."""

    def times(self, durations: list[float], lags: list[float]) -> list[float]:
        """Seconds at which every node ends."""
        ended = [0.0]
        append = ended.append
        for before, source, lag, kind in zip(self.before, self.source, self.lag, self.kind, strict=True):
            ready, arrived = ended[before], ended[source] + lags[lag]
            append((ready if ready > arrived else arrived) + durations[kind])
        return ended

    def growth(self, times: list[float], tolerance: float) -> tuple[int, float] | None:
        """(k, seconds that k more blocks add) where the steady state has been reached, k as small as can be; else None.

        k is more than 1 where the slowest cycle of waits runs over several microbatches: one that goes down the pipeline and back
        while only so many microbatches may be under way.
        """
        first, last = self.steady
        if last < first:
            return None
        ended = np.array(times)[self.blocks]
        allowed = tolerance * times[self.ends[0]]
        for apart in range(1, min(first, 2 * self.pp + 1) + 1):
            grown: float = ended[last, 0] - ended[last - apart, 0]
            if np.abs(ended[last] - ended[last - apart] - grown).max() > allowed:
                continue
            if np.abs(ended[first : last + 1] - ended[first - apart : last + 1 - apart] - grown).max() <= allowed:
                return apart, grown
        return None


@lru_cache(maxsize=512)
def remote_boundaries(schedule: str, pp: int, chunks: int) -> tuple[bool, ...]:
    """Whether chunks c and c + 1 lie on different ranks, by c; False for the last."""
    return (*(rank_of(schedule, pp, c) != rank_of(schedule, pp, c + 1) for c in range(chunks - 1)), False)


@lru_cache(maxsize=256)
def graph(schedule: str, pp: int, vpp: int, microbatches: int) -> Graph:
    """The graph of ``order_table``; cached. Raises InputError where the schedule cannot run."""
    builder = _Builder(order_table(schedule, pp, vpp, microbatches), pp * vpp, remote_boundaries(schedule, pp, pp * vpp))
    return builder.build(period(schedule, pp, vpp, microbatches))


class _Builder:
    """Lays the nodes of a table in an order in which each comes after what it waits for."""

    def __init__(self, table: tuple[Order, ...], chunks: int, remote: tuple[bool, ...]) -> None:
        self.table, self.chunks, self.remote, self.pp = table, chunks, remote, len(table)
        self.before: list[int] = []
        self.source: list[int] = []
        self.lag: list[int] = []
        self.kind: list[int] = []
        self.places = [(-1, -1)]
        self.last = [0] * self.pp
        self.node_at = [[0] * len(order) for order in table]
        self.done: dict[tuple[bool, int, int], int] = {}
        """Node that ended (forward?, microbatch, chunk)."""

    def build(self, shift: int) -> Graph:
        for rank in range(self.pp):
            self._add(rank, 0, 0, KINDS * self.chunks + 1 + rank, -1)
        self._lay()
        firsts = [self.node_at[rank][0] for rank in range(self.pp)]
        counts = np.zeros((self.pp, KINDS * self.chunks + 1 + self.pp), np.int64)
        np.add.at(counts, ([rank for rank, _ in self.places[1:]], self.kind), 1)
        blocks, per_block, steady = self._steady(shift, counts.shape)
        return Graph(
            self.pp, self.chunks, self.before, self.source, self.lag, self.kind, firsts, self.last, self.places,
            counts, blocks, per_block, steady,
        )  # fmt: skip

    def _add(self, rank: int, source: int, lag: int, kind: int, position: int) -> int:
        self.before.append(self.last[rank])
        self.source.append(source)
        self.lag.append(lag)
        self.kind.append(kind)
        self.places.append((rank, position))
        self.last[rank] = len(self.before)
        return self.last[rank]

    def _awaited(self, a: Action) -> tuple[tuple[bool, int, int], int] | None:
        """(what the action waits for, boundary it crosses); None when it only waits for its own rank."""
        if a.kind == "F" and a.chunk > 0:
            return (True, a.microbatch, a.chunk - 1), a.chunk - 1
        if a.kind in ("B", "BW") and a.chunk < self.chunks - 1:
            return (False, a.microbatch, a.chunk + 1), a.chunk
        return None

    def _lay(self) -> None:
        at = [0] * self.pp
        sleeping: dict[tuple[bool, int, int], int] = {}
        ready = list(range(self.pp))
        while ready:
            rank = ready.pop()
            order = self.table[rank]
            while at[rank] < len(order):
                position = at[rank]
                parts = order[position : position + 2] if order[position].paired else order[position : position + 1]
                sources, missing = [], None
                for part in parts:
                    awaited = self._awaited(part)
                    if awaited is None:
                        sources.append((0, 0))
                    elif awaited[0] in self.done:
                        boundary = awaited[1]
                        lag = 1 + boundary + (0 if part.kind == "F" else self.chunks)
                        sources.append((self.done[awaited[0]], lag if self.remote[boundary] else 0))
                    else:
                        missing = awaited[0]
                        break
                if missing is not None:
                    sleeping[missing] = rank
                    break
                node = self._place(rank, position, parts, sources)
                for offset, part in enumerate(parts):
                    self.node_at[rank][position + offset] = node
                    if part.kind != "W":
                        key = (part.kind == "F", part.microbatch, part.chunk)
                        self.done[key] = node
                        if key in sleeping:
                            ready.append(sleeping.pop(key))
                at[rank] += len(parts)
        for rank, order in enumerate(self.table):
            if at[rank] < len(order):
                raise AssertionError(f"the order table deadlocks on rank {rank} before {order[at[rank]]}")

    def _place(self, rank: int, position: int, parts: tuple[Action, ...], sources: list[tuple[int, int]]) -> int:
        rows = [_ROW[part.kind] for part in parts]
        if len(parts) == 2:
            self._add(rank, *sources[0], KINDS * self.chunks, position)
            self._add(rank, *sources[1], 4 * self.chunks + parts[0].chunk, position)
            return self._add(rank, 0, 0, 5 * self.chunks + parts[1].chunk, position + 1)
        return self._add(rank, *sources[0], rows[0] * self.chunks + parts[0].chunk, position)

    # -- the steady state ---------------------------------------------------------------------------------------------

    def _steady(self, shift: int, shape: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], tuple[int, int]]:
        per_block = np.zeros(shape, np.int64)
        runs = [_run(order, shift) for order in self.table] if shift else []
        number = min((blocks for _, _, blocks in runs), default=0)
        if number < 3:
            return np.zeros((0, 0), np.int64), per_block, (1, 0)
        rows = [self.node_at[rank][start : start + number * size] for rank, (start, size, _) in enumerate(runs)]
        blocks = np.concatenate([np.array(row).reshape(number, -1) for row in rows], axis=1)
        block_of = [-1]
        for rank, position in self.places[1:]:
            start, size, _ = runs[rank]
            block_of.append(-1 if position < start else min(number, (position - start) // size))
        for rank, (start, size, _) in enumerate(runs):
            order = self.table[rank]
            for i in range(start, start + size):
                row = _ROW[order[i].kind]
                if order[i].paired or (i > 0 and order[i - 1].paired):
                    row = 4 if row == 0 else 5
                per_block[rank, row * self.chunks + order[i].chunk] += 1
        return blocks, per_block, self._window(block_of, number)

    def _window(self, block_of: list[int], number: int) -> tuple[int, int]:
        """Blocks that must have repeated (see ``Graph``)."""
        farthest = list(block_of)
        depth, reach, tail = 0, 1, 1
        for node in range(1, len(self.places)):
            own = block_of[node]
            for other in (self.before[node - 1], self.source[node - 1]):
                if not other:
                    continue
                farthest[node] = max(farthest[node], farthest[other])
                theirs = block_of[other]
                if 0 <= theirs < number:
                    if own == number:
                        tail = max(tail, number - theirs)
                    elif own >= 0:
                        reach = max(reach, own - theirs)
            if 0 <= own < number:
                depth = max(depth, farthest[node] - own)
        last = number - 1 - depth
        first = min(last - reach + 1, number - tail)
        return (first, last) if first >= 1 else (1, 0)


def _run(order: Order, shift: int) -> tuple[int, int, int]:
    """(start, actions, number) of the equal blocks in the middle of an order; number 0 where there are none."""
    place = {(a.kind, a.microbatch, a.chunk): i for i, a in enumerate(order)}
    middle = next((i for i in range(len(order) // 2, len(order)) if order[i].kind == "F"), None)
    if middle is None:
        return 0, 1, 0
    a = order[middle]
    back = place.get((a.kind, a.microbatch - shift, a.chunk))
    if back is None:
        return 0, 1, 0
    size = middle - back

    def same(i: int) -> bool:
        x, y = order[i], order[i + size]
        return x.kind == y.kind and x.chunk == y.chunk and x.paired == y.paired and y.microbatch == x.microbatch + shift

    start = back
    while start > 0 and same(start - 1):
        start -= 1
    stop = back
    while stop + size < len(order) and same(stop):
        stop += 1
    if start + size <= len(order) and order[start + size - 1].paired:
        start += 1
    return start, size, (stop - start) // size + 1
