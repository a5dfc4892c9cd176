"""What fits: bytes of a rank for any stages and recompute of a column, and the least recompute that fits.

The parts are ``cost_models.activations.assemble`` (a chunk's activations), ``stage_states`` and ``overheads`` (what is there whatever the
microbatch); their sum is the one that ``cost_models.memory`` makes, which a test holds equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.activations import ChunkMemory, Place, assemble, place_of
from cost_models.fully_sharded import by_unit
from cost_models.job import Job
from cost_models.layout import Layout, RecomputeRule
from cost_models.memory import Fixed, Peak, fixed_part, peak, rank_memory
from cost_models.overheads import communicators
from cost_models.schedules import in_flight
from cost_models.stage_states import ranks_chunks
from cost_models.state_bytes import States, states
from cost_models.states import Holding, embedding_weights, head_weights, hold, layer_weights
from cost_models.unit_memory import Run
from planner.bounds import Room
from planner.columns import Column, Mix, prefix_counts

Counts = tuple[int, ...]
"""Layers by kind."""
BETWEEN = Place(shares=True)
"""A chunk that keeps what its layers keep: no end of the model, and its output in the place of its input."""


@lru_cache(maxsize=512)
def _chunks(job: Job, key: Layout, modes: tuple[RecomputeRule, ...]) -> dict[tuple[Mix, Place], ChunkMemory]:
    """Chunk memory by mix and place, of all columns whose activations are alike."""
    return {}


@lru_cache(maxsize=1024)
def _chunks_held(schedule: str, pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
    """The chunks of each rank."""
    layout = Layout(pp=pp, vpp=vpp, schedule=schedule)
    return tuple(ranks_chunks(layout, rank) for rank in range(pp))


@lru_cache(maxsize=1024)
def _alike(schedule: str, pp: int, vpp: int, microbatches: int) -> tuple[int, ...]:
    """``Fitting.alike``."""
    layout = Layout(pp=pp, vpp=vpp, schedule=schedule)
    first: dict[tuple[Any, ...], int] = {}
    ranks = []
    for held, chunks in zip(in_flight(schedule, pp, vpp, microbatches), _chunks_held(schedule, pp, vpp), strict=True):
        places = tuple([place_of(layout, chunk) for chunk in chunks])
        moments = tuple([tuple([one[1:] for one in snapshot]) for snapshot in held.snapshots])
        ranks.append(first.setdefault((places, moments), held.rank))
    return tuple(ranks)


def _runs(job: Job, modes: tuple[RecomputeRule, ...], mix: Mix) -> list[Run]:
    """The chunk as runs: kinds in the order they first appear in the model, the costlier modes of a kind first."""
    order = sorted(range(len(mix)), key=job.model.pattern.index)
    return [Run(k, modes[m], mix[k][m]) for k in order for m in reversed(range(len(modes))) if mix[k][m]]


class Fitting:
    """Memory of one column."""

    def __init__(self, column: Column) -> None:
        self.column = column
        job, layout = column.job, column.layout
        self.job, self.layout, self.limit = job, layout, job.limit_bytes
        whole = by_unit(job, layout) or (layout.zero == 2 and job.execution.gradient_bucket_bytes > 0)
        zero = layout.zero if whole else 1  # where chunks hold whole parameters or gradients
        self.key = layout.with_(
            pp=1, vpp=1, schedule="1f1b", recompute="none", stages=(), order="tp-cp-dp-pp", zero=zero, offload=()
        )
        self.known = _chunks(job, self.key, column.modes)
        self.prefix = prefix_counts(job)
        self._static: dict[tuple[Any, ...], Fixed] = {}
        self._least: dict[tuple[Any, ...], tuple[Mix, float] | None] = {}
        self.menus: dict[tuple[Any, ...], Any] = {}
        self.least: dict[tuple[Any, ...], tuple[float, list[Mix] | None]] = {}
        """What ``planner.least_recompute`` found."""

    @cached_property
    def snapshots(self) -> tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...]:
        layout = self.layout
        return tuple(r.snapshots for r in in_flight(layout.schedule, layout.pp, layout.vpp, self.column.microbatches))

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """By rank, the first rank whose chunks stand in places like its own and have as many microbatches alive at every moment."""
        layout = self.layout
        return _alike(layout.schedule, layout.pp, layout.vpp, self.column.microbatches)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Of each chunk."""
        return tuple(place_of(self.layout, chunk) for chunk in range(self.layout.chunks))

    @cached_property
    def _held(self) -> tuple[tuple[int, ...], ...]:
        return _chunks_held(self.layout.schedule, self.layout.pp, self.layout.vpp)

    def held(self, rank: int) -> tuple[int, ...]:
        return self._held[rank]

    def counts(self, start: int, stop: int) -> Counts:
        counts: list[int] = (self.prefix[stop] - self.prefix[start]).tolist()
        return tuple(counts)

    def chunk(self, chunk: int, mix: Mix) -> ChunkMemory:
        return self.chunk_at(self.places[chunk], mix)

    def chunk_at(self, place: Place, mix: Mix) -> ChunkMemory:
        found = self.known.get((mix, place))
        if found is None:
            runs = _runs(self.job, self.column.modes, mix)
            found = assemble(self.job, self.key, runs, place, once=self.column.microbatches == 1)
            self.known[mix, place] = found
        return found

    def static(self, rank: int, spans: Sequence[tuple[int, int]]) -> Fixed:
        """``spans``: the layers [start, stop) of each chunk that the rank holds, in the order of ``held``."""
        held = self.held(rank)
        ends = (0 in held, self.layout.chunks - 1 in held)
        key = (tuple(self.counts(*s) for s in spans), ends)
        if key not in self._static:
            layout = self.layout.with_(stages=self._stages(dict(zip(held, spans, strict=True))))
            self._static[key] = fixed_part(self.job, layout, rank)
        return self._static[key]

    def _stages(self, spans: dict[int, tuple[int, int]]) -> tuple[int, ...]:
        """Counts that put these spans where they are; what the other chunks get does not matter."""
        counts: list[int] = []
        at = 0
        for chunk in range(self.layout.chunks):
            if chunk in spans:
                start, stop = spans[chunk]
                if counts and start > at:
                    counts[-1] += start - at
                counts.append(stop - start)
                at = stop
            else:
                ahead = [s for c, (s, _) in spans.items() if c > chunk]
                goes = (
                    (min(ahead) if ahead else self.column.layers) - at
                    if not any(c > chunk for c in spans) or chunk + 1 in spans
                    else 0
                )
                counts.append(max(0, goes))
                at += max(0, goes)
        return tuple(counts)

    def needed(self, rank: int, spans: Sequence[tuple[int, int]], mixes: Sequence[Mix]) -> float:
        """Device bytes of a rank at its fullest moment, building the model included."""
        chunks = {c: self.chunk(c, mix) for c, mix in zip(self.held(rank), mixes, strict=True)}
        return self.total(self.static(rank, spans), chunks, self.snapshots[rank])

    def apart(self, rank: int, spans: Sequence[tuple[int, int]], mixes: Sequence[Mix]) -> float:
        """``needed`` for spans of equal layers that may overlap: the states of each counted by itself."""
        held = self.held(rank)
        chunks = {c: self.chunk(c, mix) for c, mix in zip(held, mixes, strict=True)}
        small = [(c, c + 1) if c < self.layout.chunks - 1 else (self.column.layers - 1, self.column.layers) for c in held]
        base = self.static(rank, small)

        def states_of(some: Sequence[tuple[int, int]]) -> float:
            return sum(n * s for span in some for n, s in zip(self.counts(*span), self.layer_states, strict=True))

        more = States(states_of(spans) - states_of(small), 0.0, 0.0, 0.0)
        return self.total(replace(base, states=base.states + more), chunks, self.snapshots[rank])

    def total(self, static: Fixed, chunks: dict[int, ChunkMemory], snapshots: Sequence[tuple[tuple[int, int, int], ...]]) -> float:
        """Device bytes at the fullest moment, building the model included, as ``cost_models.memory`` sums them."""
        return float(rank_memory(self.job, 0, static, peak(self.layout, static, chunks, snapshots)).needed)

    @cached_property
    def end_states(self) -> tuple[float, float]:
        """Bytes of states of the embedding and of the head; lower bounds where not everything is trained."""
        job, layout, model = self.job, self.layout, self.job.model
        trained = Holding() if job.frozen or job.lora_rank or job.optimizer == "muon" else None
        together = layout.rank_of_chunk(layout.chunks - 1) == layout.rank_of_chunk(0)
        one, other = embedding_weights(model), head_weights(model, shares_embedding=model.tied and together)
        ends = [states(job, layout, hold(w, layout, job.execution), trained).total for w in (one, other)]
        return float(ends[0]), float(ends[1])

    @cached_property
    def kept_of_layer(self) -> npt.NDArray[np.float64]:
        """kind x mode: bytes of a microbatch that a layer keeps."""
        kinds, modes = range(len(self.job.model.kinds)), range(len(self.column.modes))
        kept = np.zeros((len(kinds), len(modes)))
        for k in kinds:
            for m in modes:
                rows = [[0] * len(modes) for _ in kinds]
                unit = self.job.execution.recompute_unit if self.column.modes[m].mode == "full" else 1
                rows[k][m] = unit
                one = self.chunk_at(BETWEEN, tuple(tuple(r) for r in rows))
                kept[k, m] = float(one.kept) / unit
        return kept

    def room(self) -> Room:
        """What memory lets ranks hold (``bounds.Room``): lower bounds on what a rank needs for its layers."""
        layout, execution = self.layout, self.job.execution
        slack = execution.slack
        kept = self.kept_of_layer
        outside = float(communicators(self.job, layout)) + self.job.cluster.gpu.context_bytes
        whole = (self.limit - execution.workspace_bytes - outside) / slack
        embedding, head = self.end_states
        rooms, low, spare = [], [], []
        for rank in range(layout.pp):
            held = self.held(rank)
            rooms.append(whole - (embedding if 0 in held else 0.0) - (head if layout.chunks - 1 in held else 0.0))
            least, beyond = _alive(self.snapshots[rank])
            low.append(least)
            spare.append(beyond)
        return Room(np.array(rooms), np.array(low), np.array(spare), np.array(self.layer_states), kept)

    # -- the least recompute that fits ------------------------------------------------------------------------------

    def mixes(self, counts: Counts, policy: Policy) -> Iterator[Mix]:
        """The recompute mixes of a chunk that the policy allows."""
        return policy.mixes(counts, len(self.column.modes))

    def least_mix(self, rank: int, start: int, stop: int, policy: Policy) -> tuple[Mix, float] | None:
        """One chunk a rank: the mix with the least recompute time that fits, and its seconds above the least of any; None if none fits."""
        counts = self.counts(start, stop)
        chunk = self.held(rank)[0]
        key = (policy, counts, self.alike[rank])
        if key not in self._least:
            self._least[key] = self._find(rank, chunk, (start, stop), policy)
        return self._least[key]

    def _find(self, rank: int, chunk: int, span: tuple[int, int], policy: Policy) -> tuple[Mix, float] | None:
        static = self.static(rank, [span])
        if rank_memory(self.job, 0, static, Peak(0.0, 0.0, "")).needed > self.limit:
            return None
        b, counts = self.column.units.b, self.counts(*span)
        least = sum(n * float(b[k].min()) for k, n in enumerate(counts))
        found: tuple[float, Mix] | None = None
        snapshots = self.snapshots[rank]
        known: dict[Mix, bool] = {}

        def fits(mix: Mix) -> bool:
            if mix not in known:  # lines share their ends
                known[mix] = self.total(static, {chunk: self.chunk(chunk, mix)}, snapshots) <= self.limit
            return known[mix]

        for line in policy.lines(counts, len(self.column.modes)):
            if found is not None and found[0] <= 0.0:
                break
            place = first_fitting(line, fits)
            if place is None:
                continue
            mix = line[place]
            extra = sum(n * float(b[k][m]) for k, row in enumerate(mix) for m, n in enumerate(row)) - least
            if found is None or (extra, mix) < found:
                found = (extra, mix)
        return None if found is None else (found[1], found[0])

    def fits(self, stages: Sequence[int], mixes: Sequence[Mix]) -> bool:
        """Whether every rank fits."""
        starts = [sum(stages[:c]) for c in range(len(stages) + 1)]
        for rank in range(self.layout.pp):
            held = self.held(rank)
            if self.needed(rank, [(starts[c], starts[c + 1]) for c in held], [mixes[c] for c in held]) > self.limit:
                return False
        return True

    @cached_property
    def layer_states(self) -> tuple[float, ...]:
        """Bytes of states of one layer, by kind: exact but for Muon's whole matrices and adapters, a lower bound there."""
        job, layout = self.job, self.layout
        held = [hold(layer_weights(job.model, kind), layout, job.execution) for kind in job.model.kinds]
        trained = Holding() if job.frozen or job.lora_rank or job.optimizer == "muon" else None
        return tuple(float(states(job, layout, h, trained).total) for h in held)


@lru_cache(maxsize=4096)
def _alive(snapshots: tuple[tuple[tuple[int, int, int], ...], ...]) -> tuple[float, float]:
    """(microbatches alive of the chunk with fewest, those of the others beyond it), in the mean of snapshots that makes the first most.

    Any weighted mean of snapshots is below the peak; the weights are found by giving weight to the snapshot that is best for the
    chunk that has least so far.
    """
    table = np.array([[alive for _, alive, _ in s] for s in snapshots], float)
    total, best = np.zeros(table.shape[1]), (0.0, 0.0)
    for turn in range(1, 33):
        total = total + table[table[:, int(total.argmin())].argmax()]
        mean = total / turn
        if mean.min() > best[0]:
            best = (float(mean.min()), float((mean - mean.min()).sum()))
    single = table[table.min(axis=1).argmax()]
    return max(best, (float(single.min()), float((single - single.min()).sum())))


def first_fitting(line: Sequence[Any], fits: Any) -> int | None:
    """The first mix of a line that fits. After the first two, memory falls along the line, so the rest is searched by halving."""
    for place in range(min(2, len(line))):
        if fits(line[place]):
            return place
    low, high = 2, len(line) - 1
    if high < low or not fits(line[high]):
        return None
    while low < high:
        middle = (low + high) // 2
        if fits(line[middle]):
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True)
class Policy:
    """What may be recomputed: ``free`` (any chunk a mix of two modes of its most frequent kind, its other kinds one mode each), one
    ``mode`` for the whole model, or the first ``block`` layers of every chunk in full."""

    free: bool = True
    mode: int = 0
    block: int = 0

    def lines(self, counts: Counts, modes: int) -> Sequence[Sequence[Mix]]:
        """The mixes in lines along which recompute grows."""
        return _lines(counts, modes) if self.free else [[self._fixed(counts, modes)]]

    def mixes(self, counts: Counts, modes: int) -> Iterator[Mix]:
        seen = set()
        for line in self.lines(counts, modes):
            for mix in line:
                if mix not in seen:
                    seen.add(mix)
                    yield mix

    def recompute(self, counts: npt.NDArray[np.int64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Seconds beyond the least, by chunk, that any of its mixes takes at least; ``counts``: of layers by kind, on the last axis; ``b``:
        kind x mode."""
        more = b - b.min(axis=1)[:, None]
        seconds = np.zeros(counts.shape[:-1])
        if self.block:
            full = np.clip(self.block - (np.cumsum(counts, axis=-1) - counts), 0, counts)
            seconds += full @ more[:, -1] + (counts - full) @ more[:, 0]
        elif not self.free:
            seconds += counts @ more[:, self.mode]
        return seconds

    def _fixed(self, counts: Counts, modes: int) -> Mix:
        rows = [[0] * modes for _ in counts]
        left = self.block
        for k, n in enumerate(counts):
            if self.block:
                full = min(left, n)
                rows[k][modes - 1], rows[k][0] = full, n - full
                left -= full
            else:
                rows[k][self.mode] = n
        return tuple(tuple(r) for r in rows)


def policies(scope: str, modes: tuple[RecomputeRule, ...], longest: int) -> list[Policy]:
    """The policies a target can express (``Limits.recompute``): by layer any; by block one mode, or the first n of every chunk (below
    ``longest``); by model one mode."""
    if scope == "layer":
        return [Policy()]
    out = [Policy(False, m) for m in range(len(modes))]
    if scope == "block" and len(modes) > 1 and modes[0].mode == "none" and modes[-1].mode == "full":
        out += [Policy(False, 0, n) for n in range(1, longest)]
    return out


@lru_cache(maxsize=4096)
def _lines(counts: Counts, modes: int) -> Sequence[Sequence[Mix]]:
    """``Policy.lines`` where any recompute is free."""
    kinds = [k for k, n in enumerate(counts) if n]
    if not kinds:
        return [[tuple((0,) * modes for _ in counts)]]
    main = max(kinds, key=lambda k: (counts[k], k))
    others = [k for k in kinds if k != main]
    out = []
    for choice in product(range(modes), repeat=len(others)):
        for low in range(modes):
            for high in range(low + 1, modes) if modes > 1 else (low,):
                line = []
                for x in range(counts[main] + 1) if modes > 1 else (0,):
                    rows = [[0] * modes for _ in counts]
                    for k, m in zip(others, choice, strict=True):
                        rows[k][m] = counts[k]
                    rows[main][low] += counts[main] - x
                    rows[main][high] += x
                    line.append(tuple(tuple(r) for r in rows))
                out.append(line)
    return out
