"""A cluster of several GPU types: which stages stand on which pool, with how many layers and how much recompute.

Pools are consecutive ranks and the pipeline is the outermost axis, so a stage's ranks are all of one type and tensor, context, expert
and data parallelism never cross types; what crosses is the pipeline's transfers. Every order of the pools is tried (first stages on the
one, or on the other).

A column is bounded by what its ranks must do: rank r of pool p needs t[k, p] seconds for a layer of kind k and a microbatch, so for any
weights w[p] >= 0 that sum to one over the ranks, the busiest rank is busy for at least

    m (sum_k N_k min_p w[p] t[k, p] + w[first] embedding + w[last] head)        with w[p] in proportion to 1 / t[p].

Cores are looked at in the order of that bound and the pipeline's idle time: layers dealt to ranks by the speed of their pool, the least
recompute with which every rank fits into its own GPU; for the best, every schedule and sharding; for the best of those, layers moved one
by one while the simulated step gets shorter. The search is a local one, so the gap of a mixed plan is what the bound leaves: true, and
wider than a uniform cluster's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

from cost_models.chunks import chunk_seconds, rank_updates, run_schedule, stage_job, stage_limit
from cost_models.communication import stragglers
from cost_models.job import Job
from cost_models.layout import Layout, RecomputeRule, even_split
from cost_models.memory import stage_memory
from cost_models.passes import unit_seconds
from cost_models.stage_states import ranks_chunks
from cost_models.units import EMBEDDING, HEAD, Unit
from planner.books import Books, Found, Outcome
from planner.columns import Column, mode_text, modes_of, modes_within, recompute_text
from planner.paths import PathStore
from planner.program import Answer
from planner.rows import idle
from planner.rules.core import Limits
from planner.space import Batch, Prefix, Shard, Space
from planner.wishes import Wish
from profiles.errors import InputError

PROBED, REFINED, POLISHED = 48, 8, 6
"""Cores looked at with layers dealt by speed; degrees and micro batches of those whose every schedule and sharding is; splits improved."""
MORE_TO_PROVE = 8
"""Times as many with ``--prove``."""
MOVES = 12
"""Layers moved at most from one stage to another after the first deal."""
PAIRED = ("dualpipe", "dualpipe-v")
"""Schedules whose pairs hide work: the bound of a mixed column does not hold for them, so they are left out."""


@dataclass(frozen=True)
class Entry:
    bound: float
    prefix: Prefix
    batch: Batch
    columns: int

    def hope(self, layers: int) -> tuple[float, int, int]:
        """About how long the core takes: its bound and the pipeline's idle time; fewer stages and smaller micro batches first on ties."""
        return self.bound * (1 + float(idle(self.batch, self.prefix.pp, layers))), self.prefix.pp, self.batch.micro_batch

    @property
    def plainness(self) -> tuple[int, int]:
        """1F1B and one chunk a rank first: what says most about degrees and micro batch for the least work."""
        return self.batch.vpp, ("1f1b", "zb-h1", "interleaved", "zb-v", "gpipe").index(self.batch.schedule)


@dataclass
class Pools:
    """The search of one order of the pools; ``modes`` and ``space`` as ``planner.search.Search`` has them."""

    job: Job
    space: Space
    splits: dict[tuple[Entry, Shard], Split] = field(default_factory=dict)
    rated: dict[tuple[Entry, Shard], tuple[float, Layout]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = self.space.limits
        self.modes = modes_within(modes_of(self.job, limits), limits, self.space.pins, self.space.excluded)
        self.store = PathStore()

    # -- bounds -----------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Every core with its bound, the least first."""
        out = []
        for prefix in self.space.prefixes:
            for batch in self.space.batches(prefix.tp, prefix.cp, prefix.pp, prefix.dp):
                number = self.space.count(prefix, batch) if batch.schedule not in PAIRED else 0
                if number:
                    out.append(Entry(self.bound(prefix, batch), prefix, batch, number))
        return sorted(out, key=lambda e: (e.bound, e.prefix.pp, e.prefix.tp, e.batch.vpp, e.batch.micro_batch, e.batch.schedule))

    def bound(self, prefix: Prefix, batch: Batch) -> float:
        """No step of this core is shorter: the bound of the module's docstring."""
        job, model = self.job, self.job.model
        layout = self.space.layout(prefix, batch, self.space.columns_of(prefix, batch)[0]).with_(zero=1)
        ranks = [stage_job(job, layout, rank) for rank in range(layout.pp)]
        kinds = [model.pattern.count(k) for k in range(len(model.kinds))]
        each = {here.cluster.gpu.name: [_passes(here, layout, k) for k in range(len(kinds))] for here in ranks}
        speed = {name: model.num_layers / sum(n * s for n, s in zip(kinds, times, strict=True)) for name, times in each.items()}
        total = sum(speed[here.cluster.gpu.name] for here in ranks)
        weight = {name: s / total for name, s in speed.items()}
        work = sum(n * min(weight[name] * times[k] for name, times in each.items()) for k, n in enumerate(kinds))
        work += weight[ranks[0].cluster.gpu.name] * _passes(ranks[0], layout, EMBEDDING)
        work += weight[ranks[-1].cluster.gpu.name] * _passes(ranks[-1], layout, HEAD)
        return self.step(batch.microbatches * work)

    def step(self, pipeline: float) -> float:
        return float((pipeline + self.job.execution.step_overhead_seconds) * stragglers(self.job.cluster.nodes))

    # -- answers ----------------------------------------------------------------------------------------------------

    def rate(self, entry: Entry, most: int = 4) -> None:
        """Rate a core's most likely columns with layers dealt by speed; the first that needs no recompute is enough."""
        for shard in self._likely(entry)[:most]:
            key = (entry, shard)
            if key in self.splits:
                continue
            layout = self.space.layout(entry.prefix, entry.batch, shard)
            split = Split(self.job, layout, self.modes, self.space.limits)
            self.splits[key] = split
            rated = split.rated(split.dealt()) or split.best()
            if rated is not None:
                self.rated[key] = rated
                if rated[1].recompute == "none":
                    break

    def polish(self, key: tuple[Entry, Shard]) -> None:
        best = self.splits[key].best()
        if best is not None:
            self.rated[key] = best

    def found(self) -> list[Found]:
        out = []
        for (entry, shard), (seconds, layout) in self.rated.items():
            column = _Fixed(self.job, layout, self.modes, self.store)
            out.append(Found(Answer(seconds, layout.stages, (), column, entry.bound), entry.prefix, entry.batch, shard))
        return out

    def _likely(self, entry: Entry) -> list[Shard]:
        """For each ZeRO stage, the split of dp that shards most."""
        best: dict[int, Shard] = {}
        for shard in self.space.columns_of(entry.prefix, entry.batch):
            held = best.get(shard.zero)
            if held is None or (len(held.offload), -held.dp_shard) > (len(shard.offload), -shard.dp_shard):
                best[shard.zero] = shard
        return [best[zero] for zero in sorted(best, key=lambda z: (z == 0 and entry.prefix.dp > 8, z))]


class _Fixed(Column):
    """A column whose stages and recompute are chosen."""

    def layout_of(self, stages: Sequence[int], mixes: Sequence[Any]) -> Layout:
        return self.layout


def _passes(job: Job, layout: Layout, unit: Unit) -> float:
    """Least seconds of a microbatch's passes through a unit on this pool's GPU."""
    seconds = unit_seconds(job, layout, unit)
    return float(seconds.f + seconds.b + seconds.w)


class Split:
    """Layers and recompute of the stages of one column."""

    def __init__(self, job: Job, layout: Layout, modes: tuple[RecomputeRule, ...], limits: Limits) -> None:
        self.job, self.layout, self.modes = job, layout, modes
        self.apart, self.even = limits.recompute == "layer", not limits.uneven_stages
        self.ranks = [list(ranks_chunks(layout, rank)) for rank in range(layout.pp)]
        self.home = [layout.rank_of_chunk(c) for c in range(layout.chunks)]
        kinds = range(len(job.model.kinds))
        here = [stage_job(job, layout, rank) for rank in range(layout.pp)]
        times = [[_passes(j, layout, k) for k in kinds] for j in here]
        shares = [job.model.pattern.count(k) / job.model.num_layers for k in kinds]
        self.each = [sum(s * t for s, t in zip(shares, row, strict=True)) for row in times]
        self.extra = [0.0] * layout.pp
        self.extra[self.home[0]] += _passes(here[self.home[0]], layout, EMBEDDING)
        self.extra[self.home[-1]] += _passes(here[self.home[-1]], layout, HEAD)
        self.microbatches = layout.microbatches(job.global_batch)
        self._seen: dict[tuple[int, ...], tuple[float, Layout] | None] = {}

    def best(self) -> tuple[float, Layout] | None:
        """(seconds, layout) of the best split found; None where none fits."""
        counts = self.dealt()
        now = self.rated(counts)
        for _ in range(MOVES):
            better = None
            for other in self.neighbours(counts, fits=now is not None):
                rated = self.rated(other)
                if (
                    rated is not None
                    and (now is None or rated[0] < now[0] * (1 - 1e-9))
                    and (better is None or rated[0] < better[1][0])
                ):
                    better = (other, rated)
            if better is None:
                break
            counts, now = better
        return now

    def dealt(self) -> tuple[int, ...]:
        """A layer for every chunk, then each further one to the rank that is done with it first; the same for all where the target asks."""
        if self.even:
            return tuple(even_split(self.job.model.num_layers, self.layout.chunks))
        counts = [1] * self.layout.chunks
        for _ in range(self.job.model.num_layers - len(counts)):
            loads = [self.extra[r] + sum(counts[c] for c in held) * self.each[r] for r, held in enumerate(self.ranks)]
            rank = min(range(len(loads)), key=lambda r: (loads[r] + self.each[r], r))
            counts[min(self.ranks[rank], key=lambda c: (counts[c], c))] += 1
        return tuple(counts)

    def neighbours(self, counts: tuple[int, ...], *, fits: bool) -> Iterator[tuple[int, ...]]:
        """One layer from a chunk of the most loaded rank to another rank; from any rank to any where nothing fits yet."""
        if self.even:
            return
        loads = [self.extra[r] + sum(counts[c] for c in held) * self.each[r] for r, held in enumerate(self.ranks)]
        order = sorted(range(len(loads)), key=lambda r: -loads[r])
        for giver in order[:2] if fits else order:
            chunk = max(self.ranks[giver], key=lambda c: (counts[c], -c))
            if counts[chunk] < 2:
                continue
            takers = [r for r in reversed(order) if r != giver]
            for taker in takers[:3] if fits else takers:
                to = min(self.ranks[taker], key=lambda c: (counts[c], c))
                yield tuple(n - (c == chunk) + (c == to) for c, n in enumerate(counts))

    def rated(self, counts: tuple[int, ...]) -> tuple[float, Layout] | None:
        """(seconds, layout) with the least recompute with which every rank fits into its own GPU; None where none does."""
        if counts not in self._seen:
            layout = self.fitting(counts)
            self._seen[counts] = None if layout is None else (self.seconds(layout), layout)
        return self._seen[counts]

    def fitting(self, counts: tuple[int, ...]) -> Layout | None:
        level = [0] * self.layout.pp
        while True:
            layout = self.with_modes(counts, level)
            over = [s.stage for s in stage_memory(self.job, layout) if s.needed > stage_limit(self.job, layout, s.stage)]
            if not over:
                return layout
            if any(level[r] + 1 == len(self.modes) for r in over):
                return None
            for rank in over if self.apart else range(self.layout.pp):
                level[rank] += 1

    def with_modes(self, counts: tuple[int, ...], level: Sequence[int]) -> Layout:
        choices = [mode_text(self.modes[level[self.home[c]]]) for c, n in enumerate(counts) for _ in range(n)]
        return self.layout.with_(stages=counts if self.layout.chunks > 1 else (), recompute=recompute_text(choices))

    def seconds(self, layout: Layout) -> float:
        """Seconds of the step, as ``cost_models.step.estimate`` has them."""
        job = self.job
        chunks = chunk_seconds(job, layout)
        updates = rank_updates(job, layout, chunks)
        timeline = run_schedule(job, layout, chunks, updates, self.microbatches)
        return float((timeline.seconds + job.execution.step_overhead_seconds) * stragglers(job.cluster.nodes))


def search_pools(
    job: Job, pins: Sequence[Wish], excluded: Sequence[Sequence[Wish]], *, offload: bool, prove: bool, deadline: float | None = None
) -> tuple[Pools, Outcome]:
    """The best over every order of the pools, with the certificate's figures over all of them. ``deadline`` (``time.monotonic()``): it ends
    with what it has, once something fits. Raises InputError where nothing is legal."""

    def late() -> bool:
        return deadline is not None and time.monotonic() > deadline and any(s.rated for s in searches)

    times = MORE_TO_PROVE if prove else 1
    searches: list[Pools] = []
    for pools in permutations(job.cluster.pools):
        there = replace(job, cluster=replace(job.cluster, pools=pools, gpu=pools[0].gpu))
        if all(other.job.cluster.pools != pools for other in searches):
            searches.append(Pools(there, Space(there, pins, excluded, offload=offload)))
    queue = [(e, s) for s in searches for e in s.entries()]
    books = Books(legal=sum(e.columns for e, _ in queue))
    if not books.legal:
        sizes = ", ".join(f"{p.gpus} x {p.gpu.name}" for p in job.cluster.pools)
        raise InputError("layout", "any", f"no layout is legal whose stages each lie in one of the pools {sizes}", None)
    queue.sort(key=lambda q: q[0].hope(job.model.num_layers))
    simplest: dict[tuple[Any, ...], tuple[Entry, Pools]] = {}
    for entry, search in queue:
        key = (id(search), entry.prefix, entry.batch.micro_batch)
        held = simplest.get(key)
        if held is None or entry.plainness < held[0].plainness:
            simplest[key] = (entry, search)
    for entry, search in list(simplest.values())[: PROBED * times]:
        if not late():
            search.rate(entry)
    for here, near in _fastest(searches, REFINED * times):
        for entry, search in queue:
            same = (entry.prefix, entry.batch.micro_batch) == (near.prefix, near.batch.micro_batch)
            if search is here and same and entry.bound < min(x[0] for x in here.rated.values()) and not late():
                search.rate(entry)
    for here, near in _fastest(searches, POLISHED * times):
        for column in [k for k in here.rated if k[0] == near and not late()]:
            here.polish(column)
    best = min((x[0] for s in searches for x in s.rated.values()), default=float("inf"))
    for entry, search in queue:
        done = (
            sum((entry, shard) in search.splits for shard in search._likely(entry)) if entry in {k[0] for k in search.splits} else 0
        )
        books.solved += done
        left = entry.columns - done
        books.by_bound += left if entry.bound >= best else 0
        books.unexplored += 0 if entry.bound >= best else left
        books.weakest = min(books.weakest, entry.bound)
    winner = min(searches, key=lambda s: min((x[0] for x in s.rated.values()), default=float("inf")))
    found = winner.found()
    fastest = min(found, key=lambda f: f.answer.seconds) if found else None
    return winner, Outcome(fastest, found, books, min(books.weakest, best))


def _fastest(searches: Sequence[Pools], number: int) -> list[tuple[Pools, Entry]]:
    """The cores of the best ratings, each once."""
    rated = sorted(
        ((x[0], i, n, k[0]) for i, s in enumerate(searches) for n, (k, x) in enumerate(s.rated.items())), key=lambda r: r[:3]
    )
    out: list[tuple[Pools, Entry]] = []
    for _, i, _, entry in rated:
        if (searches[i], entry) not in out:
            out.append((searches[i], entry))
    return out[:number]
