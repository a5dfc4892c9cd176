"""The pipeline's timeline: the longest path through a schedule's order table, and what follows from it.

An action starts when the action before it on its rank has ended and its input has arrived: a forward's from the chunk before, a
backward's from the chunk after. ``p2p`` seconds of a transfer either delay the receiver only (overlapped) or keep the sender busy
as well (``blocking``: Megatron-LM's batched exchange after each forward and each backward). Nothing is approximated: with many
microbatches the steady state is extrapolated only after it has been seen to repeat (``cost_models.dependencies.Graph``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cost_models.dependencies import KINDS, Graph, graph, remote_boundaries
from cost_models.schedules import Action, InFlight, check_schedule, in_flight, order_table, period

__all__ = ["Action", "InFlight", "Interval", "Path", "Timeline", "in_flight", "makespans", "order_table", "seed_paths", "simulate"]

Floats = npt.NDArray[np.float64]
Durations = Sequence[float] | Floats
FULL_ACTIONS = 2000
"""Actions up to which a schedule is simulated whole; beyond, a shorter run of the same shape is tried first."""
TOLERANCE = 1e-12
"""Difference, relative to the step, below which two times are equal: the rounding of sums, nothing else."""


@dataclass(frozen=True)
class Path:
    """A chain of actions, each waiting for the one before: its length bounds the step from below whatever the durations are.

    Counts by chunk of forwards, input gradients and weight gradients on it; ``paired_*`` how many of them run in a pair;
    ``p2p_forward[c]`` transfers from chunk c to c + 1, ``p2p_backward[c]`` from c + 1 to c. ``first`` and ``last`` are the ranks
    where it starts and ends.
    """

    forward: Floats
    backward_input: Floats
    backward_weight: Floats
    paired_forward: Floats
    paired_backward: Floats
    p2p_forward: Floats
    p2p_backward: Floats
    first: int
    last: int

    def seconds(
        self,
        forward: Durations,
        backward_input: Durations,
        backward_weight: Durations,
        p2p: float | Durations = 0.0,
        *,
        starts: float | Durations = 0.0,
        ends: float | Durations = 0.0,
        hidden_forward: float | Durations = 0.0,
        hidden_backward: float | Durations = 0.0,
    ) -> float:
        """Length of the path under these durations (the arguments of ``simulate``): at most ``simulate(...).seconds``."""
        chunks = len(self.forward)
        total = self.forward @ _by(forward, chunks) + self.backward_input @ _by(backward_input, chunks)
        total += self.backward_weight @ _by(backward_weight, chunks) + (self.p2p_forward + self.p2p_backward) @ _by(p2p, chunks)
        total -= self.paired_forward @ _by(hidden_forward, chunks) + self.paired_backward @ _by(hidden_backward, chunks)
        return float(total) + _at(starts, self.first) + _at(ends, self.last)


@dataclass(frozen=True)
class Interval:
    """One action on one rank, seconds from the start of the step."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class _Shape:
    """What is simulated: the table, and the durations as ``Graph.times`` reads them."""

    table: tuple[str, int, int, int]
    durations: list[float]
    lags: list[float]
    ends: list[float]
    blocking: bool


@dataclass(frozen=True)
class Timeline:
    """``seconds`` of the pipeline, ends included; ``begin``, ``finish`` and ``busy`` seconds by rank (ends excluded)."""

    seconds: float
    begin: tuple[float, ...]
    finish: tuple[float, ...]
    busy: tuple[float, ...]
    _shape: _Shape = field(repr=False)
    _graph: Graph = field(repr=False)
    _times: list[float] = field(repr=False)
    _later: list[float] = field(repr=False)
    """Ends in the run asked for, of the nodes after the steady state of the run that was walked."""
    _skipped: int = field(repr=False)
    """Blocks of the steady state that were extrapolated."""
    _apart: int = field(repr=False, default=1)
    """Blocks after which the steady state repeats."""

    @property
    def span(self) -> float:
        """Seconds until the last rank has done its last action."""
        return max(self.finish)

    @property
    def unsynchronised_seconds(self) -> float:
        """Seconds a step takes where ranks may begin the next one while others still finish this one (the zero-bubble paper's
        post-validation, which runs the optimizer without waiting for the global norm): the longest any rank is in a step."""
        return max(f + e - b for b, f, e in zip(self.begin, self.finish, self._shape.ends, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the span, over all ranks: 1 - busy / span."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.span) if self.span else 0.0

    @cached_property
    def _whole(self) -> tuple[Graph, list[float]]:
        if not self._skipped:
            return self._graph, self._times
        whole = graph(*self._shape.table)
        return whole, whole.times(self._shape.durations, self._shape.lags)

    @cached_property
    def intervals(self) -> tuple[Interval, ...]:
        """Every action with its start and end, by rank and time, for pictures and traces; a pair's parts one after the other."""
        whole, times = self._whole
        table = order_table(*self._shape.table)
        out = []
        for node in range(1, len(times)):
            if whole.kind[node - 1] < KINDS * whole.chunks:
                rank, position = whole.places[node]
                start = times[node] - self._shape.durations[whole.kind[node - 1]]
                out.append(Interval(rank, table[rank][position], start, times[node]))
        return tuple(sorted(out, key=lambda i: (i.rank, i.start, i.end)))

    @cached_property
    def path(self) -> Path:
        """The critical path: its length is ``seconds``, and under any other durations a lower bound of theirs."""
        rank = max(range(len(self.finish)), key=lambda r: self.finish[r] + self._shape.ends[r])
        g = self._graph
        steps = _backtrack(g, self._times, self._later, self._shape.lags, g.ends[rank])
        if self._skipped:
            stretch = _stretch(g, steps, self._skipped, self._apart)
            if stretch is None:
                g, times = self._whole
                steps = _backtrack(g, times, times, self._shape.lags, g.ends[rank])
            else:
                steps = steps + stretch
        return _path(g, steps, self._shape.blocking, rank, self._shape.table[0])


def simulate(
    schedule: str,
    pp: int,
    vpp: int,
    microbatches: int,
    forward: Durations,
    backward_input: Durations,
    backward_weight: Durations,
    p2p: float | Durations = 0.0,
    *,
    blocking: bool = False,
    starts: float | Durations = 0.0,
    ends: float | Durations = 0.0,
    hidden_forward: float | Durations = 0.0,
    hidden_backward: float | Durations = 0.0,
) -> Timeline:
    """Run the schedule: the exact longest path over its fixed order.

    ``forward``, ``backward_input``, ``backward_weight``: seconds of one microbatch, by chunk in model order (``pp * vpp`` of them).
    ``p2p``: seconds of a transfer between chunk c and c + 1 (one number, or by c); none where both are on one rank.
    ``starts``: seconds before a rank may begin; ``ends``: seconds a rank needs after its last action (gradient reduction,
    optimizer). ``hidden_*``: seconds, by chunk, that an overlapped pair (DualPipe) saves over its parts run one after the other.
    Raises InputError where the schedule cannot run so.
    """
    check_schedule(schedule, pp, vpp, microbatches)
    chunks = pp * vpp
    f, b, w = _by(forward, chunks), _by(backward_input, chunks), _by(backward_weight, chunks)
    transfer = np.where(remote_boundaries(schedule, pp, chunks), _by(p2p, chunks), 0.0)
    hidden = _by(hidden_forward, chunks), _by(hidden_backward, chunks)
    durations, lags = _durations(f, b, w, hidden, transfer, blocking, _by(starts, pp))
    shape = _Shape((schedule, pp, vpp, microbatches), durations.tolist(), lags, _by(ends, pp).tolist(), blocking)
    for shorter, skipped in _shorter(schedule, pp, vpp, microbatches):
        found = _extrapolated(shape, shorter, skipped)
        if found:
            return found
    whole = graph(schedule, pp, vpp, microbatches)
    return _timeline(shape, whole, whole.times(shape.durations, shape.lags))


def makespans(
    schedule: str,
    pp: int,
    vpp: int,
    microbatches: int,
    forward: Floats,
    backward_input: Floats,
    backward_weight: Floats,
    p2p: float | Durations = 0.0,
    *,
    blocking: bool = False,
    starts: float | Durations = 0.0,
    ends: float | Durations = 0.0,
) -> Floats:
    """``simulate(...).seconds`` of many durations, row by row (row x chunk), the schedule walked once for all; its pairs hide nothing."""
    chunks, nothing = pp * vpp, (np.zeros(pp * vpp), np.zeros(pp * vpp))
    transfer = np.where(remote_boundaries(schedule, pp, chunks), _by(p2p, chunks), 0.0)
    durations, lags = _durations(forward, backward_input, backward_weight, nothing, transfer, blocking, _by(starts, pp))
    seconds = list(np.ascontiguousarray(durations.T))
    whole = graph(schedule, pp, vpp, microbatches)
    table = np.zeros((len(whole.kind) + 1, len(forward)))
    ended = list(table)
    for out, before, source, lag, kind in zip(ended[1:], whole.before, whole.source, whole.lag, whole.kind, strict=True):
        if source:
            np.add(ended[source], lags[lag], out=out)
            np.maximum(out, ended[before], out=out)
            np.add(out, seconds[kind], out=out)
        else:
            np.add(ended[before], seconds[kind], out=out)
    longest: Floats = (table[whole.ends] + _by(ends, pp)[:, None]).max(axis=0)
    return longest


def _durations(
    f: Floats, b: Floats, w: Floats, hidden: tuple[Floats, Floats], transfer: Floats, blocking: bool, starts: Floats
) -> tuple[Floats, list[float]]:
    """(durations as ``Graph.kind`` numbers them, on the last axis; lags as ``Graph.lag`` does)."""
    lags = transfer.tolist()
    if blocking:
        f, b, lags = f + transfer, b + np.concatenate([[0.0], transfer[:-1]]), [0.0] * len(lags)
    rest = np.broadcast_to(np.concatenate([[0.0], starts]), (*f.shape[:-1], 1 + len(starts)))
    return np.concatenate([f, b, w, b + w, f - hidden[0], b + w - hidden[1], rest], axis=-1), [0.0, *lags, *lags]


def _extrapolated(shape: _Shape, shorter: int, skipped: int) -> Timeline | None:
    """The timeline from a run of ``shorter`` microbatches, ``skipped`` blocks short; None where that has no steady state."""
    schedule, pp, vpp, microbatches = shape.table
    for _ in range(2):
        short = graph(schedule, pp, vpp, shorter)
        times = short.times(shape.durations, shape.lags)
        apart = short.steady_state(times, shape.durations, shape.lags, skipped, TOLERANCE)
        if apart is None:
            return None
        if apart > 0:
            later = short.longer(times, shape.durations, shape.lags, apart, skipped)
            return _timeline(shape, short, times, skipped, later, apart)
        shorter += skipped % -apart * ((microbatches - shorter) // skipped)
        skipped -= skipped % -apart
    return None


@lru_cache(maxsize=4096)
def _shorter(schedule: str, pp: int, vpp: int, microbatches: int) -> tuple[tuple[int, int], ...]:
    """(microbatches, blocks left out) of shorter runs to try: the same for many numbers of microbatches, so that their graphs
    are reused."""
    shift = period(schedule, pp, vpp, microbatches)
    if not shift or 2 * pp * vpp * microbatches <= FULL_ACTIONS:
        return ()
    rest, out = microbatches % shift, []
    blocks = 6 if shift >= pp else 6 * pp // shift + 2
    while shift * blocks + rest < 0.7 * microbatches:
        out.append((shift * blocks + rest, microbatches // shift - blocks))
        blocks *= 2
    return tuple(out)


def _timeline(
    shape: _Shape, g: Graph, times: list[float], skipped: int = 0, later: list[float] | None = None, apart: int = 1
) -> Timeline:
    finish = tuple((later or times)[end] for end in g.ends)
    begin = tuple(times[n] - shape.durations[g.kind[n - 1]] for n in g.firsts)
    size = KINDS * g.chunks
    busy = (g.counts + skipped * g.block_counts if skipped else g.counts)[:, :size] @ np.array(shape.durations[:size])
    seconds = max(t + e for t, e in zip(finish, shape.ends, strict=True))
    return Timeline(seconds, begin, finish, tuple(busy.tolist()), shape, g, times, later or times, skipped, apart)


def _by(value: float | Durations, size: int) -> Floats:
    return np.broadcast_to(np.asarray(value, np.float64), (size,))


def _at(value: float | Durations, rank: int) -> float:
    array = np.asarray(value, np.float64)
    return float(array[rank] if array.ndim else array)


# -- paths ----------------------------------------------------------------------------------------------------------------

Step = tuple[int, bool]
"""A node of a path, and whether the path came to it over a transfer (rather than from the node before it on its rank)."""


def _backtrack(g: Graph, times: list[float], later: list[float], lags: list[float], node: int) -> list[Step]:
    """The longest path into ``node``: by the ends in ``later`` after the steady state, by those in ``times`` up to it."""
    steps = []
    while node:
        before, source = g.before[node - 1], g.source[node - 1]
        ends = later if later is not times and g.block_of[node] > g.steady[1] else times
        across = source > 0 and ends[source] + lags[g.lag[node - 1]] > ends[before]
        steps.append((node, across))
        node = source if across else before
    return steps[::-1]


def _stretch(g: Graph, steps: list[Step], blocks: int, apart: int) -> list[Step] | None:
    """What ``blocks`` more blocks add to a path: a stretch of it between a node and the same one k blocks later, repeated
    blocks / k times, k a multiple of ``apart`` that divides ``blocks``. None where there is none inside the steady state."""
    first = max(0, g.steady[0] - apart)
    place = {node: (b, i) for b in range(first, g.steady[1] + 1) for i, node in enumerate(g.blocks[b].tolist())}
    seen: dict[int, list[tuple[int, int]]] = {}
    for at, (node, _) in enumerate(steps):
        block, index = place.get(node, (-1, -1))
        if index < 0:
            continue
        for start, before in seen.setdefault(index, []):
            k = block - before
            if k > 0 and k % apart == 0 and blocks % k == 0:
                return steps[start + 1 : at + 1] * (blocks // k)
        seen[index].append((at, block))
    return None


def _path(g: Graph, steps: list[Step], blocking: bool, last: int, schedule: str) -> Path:
    return _as_path(*_count(g, steps), g, blocking, schedule, g.places[steps[0][0]][0], last)


def _count(g: Graph, steps: list[Step]) -> tuple[Floats, Floats]:
    kinds, lags = [g.kind[node - 1] for node, _ in steps], [g.lag[node - 1] for node, across in steps if across]
    counts = np.bincount(kinds, minlength=KINDS * g.chunks + 1 + g.pp)
    return counts.astype(float), np.bincount(np.array(lags, np.int64), minlength=2 * g.chunks + 1).astype(float)


def _as_path(counts: Floats, transfers: Floats, g: Graph, blocking: bool, schedule: str, first: int, last: int) -> Path:
    f, b, w, both, paired_f, paired_b = counts[: KINDS * g.chunks].reshape(KINDS, g.chunks)
    forward, backward = f + paired_f, b + both + paired_b
    up, down = transfers[1 : 1 + g.chunks], transfers[1 + g.chunks :]
    if blocking:
        remote = np.array(remote_boundaries(schedule, g.pp, g.chunks), np.float64)
        up, down = forward * remote, np.append(backward[1:], 0.0) * remote
    return Path(forward, backward, w + both + paired_b, paired_f, paired_b, up, down, first, last)


@lru_cache(maxsize=1024)
def seed_paths(schedule: str, pp: int, vpp: int, microbatches: int, blocking: bool = False) -> tuple[Path, ...]:
    """Real paths of the schedule, a few for each rank: lower bounds of its makespan before anything was simulated.

    Each goes down the pipeline to a rank's first action (or to its first backward), does everything that is left for that rank to
    do, and leaves over what waits for its last backward (or stays until its last action). Their number does not grow with the
    microbatches; counts do, linearly.
    """
    for run, skipped in (*_shorter(schedule, pp, vpp, microbatches), (microbatches, 0)):
        g = graph(schedule, pp, vpp, run)
        if skipped and g.steady[1] < g.steady[0]:
            continue
        return tuple(
            _as_path(counts + skipped * g.block_counts[rank] if skipped else counts, transfers, g, blocking, schedule, first, last)
            for rank, counts, transfers, first, last in _seeds(schedule, pp, vpp, run)
        )
    raise AssertionError("the whole run is always tried")


@lru_cache(maxsize=1024)
def _seeds(schedule: str, pp: int, vpp: int, microbatches: int) -> tuple[tuple[int, Floats, Floats, int, int], ...]:
    """(rank it follows, its nodes by kind, its transfers, ranks it begins and ends on) of each path."""
    g = graph(schedule, pp, vpp, microbatches)
    kind, waiter = np.array(g.kind), np.zeros(len(g.rank), np.int64)
    waiter[g.source] = np.arange(1, len(g.rank))
    backward = (kind // g.chunks >= 1) & (kind // g.chunks <= 3) | (kind // g.chunks == 5)
    by_rank = np.argsort(g.rank, kind="stable")
    own = np.split(by_rank[1:], np.flatnonzero(np.diff(g.rank[by_rank[1:]])) + 1)
    paths, ways = [], _Ways(g, waiter)
    for rank, (_, *nodes) in enumerate(own):
        some = np.array(nodes)
        awaited = np.flatnonzero(waiter[some])
        first_backward = int(backward[some - 1].argmax())
        for entry, leave in itertools.product(
            {0, first_backward}, {int(awaited[-1]) if len(awaited) else len(some) - 1, len(some) - 1}
        ):
            if leave < entry:
                continue
            came, left = ways.into(nodes[entry]), ways.out_of(nodes[leave])
            counts = came.counts + left.counts + np.bincount(kind[some[entry + 1 : leave + 1] - 1], minlength=len(came.counts))
            paths.append((rank, counts, came.transfers + left.transfers, came.end, rank if left.end < 0 else left.end))
    return tuple(paths)


class _Way(NamedTuple):
    """Nodes by kind and transfers of a way, and the rank of its far end (-1: it has none)."""

    counts: Floats
    transfers: Floats
    end: int


class _Ways:
    """Ways into nodes of a graph, over transfers wherever there is one, and out of them, from transfer to transfer over what waits for them
    (``waiter``); each grows from the way into, or out of, the node next to it."""

    def __init__(self, g: Graph, waiter: npt.NDArray[np.int64]) -> None:
        self.g, self.waiter = g, waiter.tolist()
        none = _Way(np.zeros(KINDS * g.chunks + 1 + g.pp), np.zeros(2 * g.chunks + 1), -1)
        self._in: dict[int, _Way] = {0: none}
        self._out: dict[int, _Way] = {0: none}

    def into(self, node: int) -> _Way:
        """From the start of a rank."""
        g, chain = self.g, list[int]()
        while node not in self._in:
            chain.append(node)
            node = g.source[node - 1] or g.before[node - 1]
        way = self._in[node]
        for node in reversed(chain):
            way = self._longer(way, node, across=g.source[node - 1] > 0, end=way.end)
            self._in[node] = way
        return way

    def out_of(self, node: int) -> _Way:
        """The nodes after ``node``."""
        chain = [node]
        while (node := self.waiter[node]) and node not in self._out:
            chain.append(node)
        way, later = self._out[node], node
        for node in reversed(chain):
            if later:
                way = self._longer(way, later, across=True, end=way.end)
            self._out[node] = way
            later = node
        return way

    def _longer(self, way: _Way, node: int, *, across: bool, end: int) -> _Way:
        counts, transfers = way.counts.copy(), way.transfers
        counts[self.g.kind[node - 1]] += 1.0
        if across:
            transfers = transfers.copy()
            transfers[self.g.lag[node - 1]] += 1.0
        return _Way(counts, transfers, int(self.g.rank[node]) if end < 0 else end)
