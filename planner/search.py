"""The search: bound prefixes, cut, solve what is left, and keep the books of the certificate.

1. *rows* (a prefix with a micro batch) are bounded together by arrays: least bytes of any rank, least seconds of a step;
2. a first answer comes from the most promising rows;
3. rows that could beat it are expanded into cores (schedule, vpp) and bounded by paths;
4. cores are expanded into columns (ZeRO, split of dp, order, dispatcher) and solved one by one, cheapest bound first, until the bound
   of the next is as good as the answer: dynamic programming where a rank has one chunk, the integer program elsewhere and where that
   leaves a gap.

Every column is counted once: cut by memory (does not fit with the least recompute and the most sharding), cut by bound, or solved.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.communication import stragglers
from cost_models.job import Job
from cost_models.memory import StageMemory, fits
from planner import bounds
from planner.columns import Column, PathStore, Units, mode_text, modes_of, modes_within, prefix_counts, units
from planner.fitting import Fitting, policies
from planner.heuristic import quick
from planner.program import Answer
from planner.rows import Row, Rows, idle
from planner.solve_column import PROVED, solve_column
from planner.space import Batch, Prefix, Shard, Space
from profiles.errors import InputError

QUICK = 1e-2
"""Relative gap at which the search stops unless a proof is asked for, or is cheap."""
CHEAP = 40
"""Entries left that are worth proving unasked."""
EFFORT, EFFORT_TO_PROVE = 60, 4000
"""Columns solved at most: a count, not a time, so that the same input gives the same plan on any machine."""
BOUNDED, BOUNDED_TO_PROVE = 4000, 1_000_000
"""Rows, cores and columns bounded at most, one by one."""
PAIRED = ("dualpipe", "dualpipe-v")


@dataclass(frozen=True)
class Core:
    row: int
    batch: Batch


@dataclass
class Books:
    """The certificate's figures as they grow."""

    legal: int = 0
    by_memory: int = 0
    by_bound: int = 0
    solved: int = 0
    cuts: int = 0
    programs: int = 0
    weakest: float = float("inf")
    """The least bound over columns cut by bound or solved."""


@dataclass
class Found:
    """An answer of one column with where it stands in the space."""

    answer: Answer
    prefix: Prefix
    batch: Batch
    shard: Shard


@dataclass
class Outcome:
    fastest: Found | None
    found: list[Found]
    books: Books
    best_bound: float


@dataclass
class Search:
    job: Job
    space: Space
    prove: bool = False
    extra: int = 0
    """Further families of layouts (other degrees) to answer for runners-up."""
    books: Books = field(default_factory=Books)

    def __post_init__(self) -> None:
        limits = self.space.limits
        self.modes = modes_within(modes_of(self.job, limits), limits, self.space.pins, self.space.excluded)
        self.store = PathStore()
        self.totals = prefix_counts(self.job)[-1]
        self.slowing = stragglers(self.job.cluster.nodes if self.job.cluster.gpus > 1 else 1)
        self.found: dict[tuple[Prefix, Batch, Shard], Found] = {}
        self.best: Found | None = None

    # -- rows -------------------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> Rows:
        return Rows(self.job, self.space, self.modes, self.totals)

    def step(self, pipeline: Any) -> Any:
        return (pipeline + self.job.execution.step_overhead_seconds) * self.slowing

    @cached_property
    def row_bounds(self) -> npt.NDArray[np.float64]:
        """Least seconds of a step, by row."""
        bound: npt.NDArray[np.float64] = self.step(self.rows.seconds(np.arange(len(self.rows))))
        return bound

    @property
    def row_bytes(self) -> npt.NDArray[np.float64]:
        """Least bytes of the fullest rank, by row."""
        return self.rows.bytes[0]

    def _hopes(self, bounds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """About how long a row's best step takes: its bound, the pipeline's idle time, and recompute where memory asks for it."""
        _, plain, tight = self.rows.bytes
        limit = self.job.limit_bytes
        over = np.clip((plain - limit) / np.maximum(plain - tight, 1.0), 0.0, 1.0)
        hopes: npt.NDArray[np.float64] = bounds * (1 + self.rows.idle()) * (1 + over / 3) * np.where(tight > limit, 1.4, 1.0)
        return hopes

    # -- answers ----------------------------------------------------------------------------------------------------

    @property
    def fastest(self) -> float:
        return self.best.answer.seconds if self.best else float("inf")

    def _keep(self, answer: Answer | None, prefix: Prefix, batch: Batch, shard: Shard) -> None:
        if answer is None:
            return
        key = (prefix, batch, shard)
        held = self.found.get(key)
        if held is None or answer.seconds < held.answer.seconds:
            self.found[key] = Found(answer, prefix, batch, shard)
        if answer.seconds < self.fastest:
            self.best = self.found[key]

    def column(self, prefix: Prefix, batch: Batch, shard: Shard) -> tuple[Column, Fitting]:
        column = Column(self.job, self.space.layout(prefix, batch, shard), self.modes, self.store)
        return column, Fitting(column)

    def policies(self, batch: Batch, prefix: Prefix) -> Sequence[Any]:
        chunks = prefix.pp * batch.vpp
        longest = -(-self.job.model.num_layers // chunks) + 2
        return policies(self.space.limits.recompute, self.modes, longest)

    def try_row(self, row: Row, most: int = 2, spare: int = 1) -> bool:
        """Quick answers of a row's most promising columns: of ``most`` batches that fit, ``spare`` that do not passed over; whether one
        fits."""
        ranked = sorted(row.batches, key=lambda b: (idle(b, row.prefix.pp, self.job.model.num_layers), b.vpp))
        fitted = 0
        for place, batch in enumerate(ranked):
            if fitted == most or place - fitted > spare:
                break
            some = False
            for shard in self._likely(row.prefix, batch):
                column, fitting = self.column(row.prefix, batch, shard)
                answer = quick(column, fitting, self.policies(batch, row.prefix))
                some = some or answer is not None
                self._keep(answer, row.prefix, batch, shard)
                if answer is not None and not any(n for mix in answer.mixes for r in mix for n in r[1:]):
                    break
            fitted += some
        return fitted > 0

    def _likely(self, prefix: Prefix, batch: Batch) -> list[Shard]:
        """A few shard choices: sharded optimizer over all, whole replicas, everything sharded."""
        shards = self.space.columns_of(prefix, batch)
        out: list[Shard] = []
        for zero in (0, 1, 2, 3) if prefix.dp * prefix.cp <= 8 else (1, 2, 3, 0):
            some = [s for s in shards if s.zero == zero]
            if some:
                out.append(max(some, key=lambda s: s.dp_shard))
        return out

    # -- the search -------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        rows = self.rows
        if not len(rows):
            return Outcome(None, [], self.books, float("inf"))
        counts, small = rows.counts, rows.fit
        self.books.legal = int(counts.sum())
        self.books.by_memory += int(counts[~small].sum())
        left = np.flatnonzero(small & (counts > 0))
        self.least = np.full(len(rows), np.inf)
        self.least[left] = self.step(rows.seconds(left))
        left = left[np.lexsort((left, self.least[left]))]
        if len(left):
            self._first_answers(left)
        self._best_first(left, counts)
        self._families(left)
        return Outcome(self.best, list(self.found.values()), self.books, min(self.books.weakest, self.fastest))

    def _best_first(self, left: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> None:
        """Rows open into cores, cores into columns, columns are solved, always the least bound next; what is left at the end is cut by
        its bound."""
        near = left[self.least[left] < self.fastest]
        self.books.by_bound += int(counts[left].sum() - counts[near].sum())
        heap: list[tuple[float, int, int, Any]] = [(float(self.least[i]), 0, n, int(i)) for n, i in enumerate(near)]
        heapq.heapify(heap)
        serial, solved = len(near), 0
        last = serial + (BOUNDED_TO_PROVE if self.prove else BOUNDED)
        gap = PROVED if self.prove else QUICK
        effort = EFFORT_TO_PROVE if self.prove else EFFORT
        while heap and solved < effort and serial < last:
            if heap[0][0] >= self.fastest * (1 - gap):
                if gap == PROVED or len(heap) > CHEAP or heap[0][0] >= self.fastest * (1 - PROVED):
                    break
                gap = PROVED
            bound, level, _, item = heapq.heappop(heap)
            if level == 3:
                solved += 1
                core, shard = item
                self._solve_one(bound, core, shard, gap)
                continue
            for opened in (self._open_row, self._open_core, self._open_columns)[level](bound, item):
                if not np.isfinite(opened[0]):
                    self.books.by_memory += self._number(*opened[1:])
                    continue
                serial += 1
                heapq.heappush(heap, (opened[0], opened[1], serial, opened[2]))
        for bound, level, _, item in heap:
            self._cut(bound, int(counts[item]) if level == 0 else self._number(level, item))

    def _number(self, level: int, item: Any) -> int:
        """Columns of an entry: a core (1 or 2), or one column."""
        return 1 if level == 3 else self.space.count(self.rows[item.row].prefix, item.batch)

    def _open_row(self, bound: float, i: int) -> Iterator[tuple[float, int, Any]]:
        """The cores of a row, bounded by the exact seconds of its passes without what ZeRO adds."""
        row = self.rows[i]
        least = self.step(bounds.work(self._plain_units(row, row.batches[0]), self.totals, row.microbatches, row.prefix.pp))
        for batch in row.batches:
            if self.space.count(row.prefix, batch):
                yield (bound if batch.schedule in PAIRED else max(bound, least)), 1, Core(i, batch)

    def _open_core(self, bound: float, core: Core) -> Iterator[tuple[float, int, Any]]:
        """The same core, bounded by path weights."""
        if self.rows[core.row].prefix.pp > 1:
            bound = max(bound, self._paths_bound(self.rows[core.row], core.batch))
        yield bound, 2, core

    def _open_columns(self, bound: float, core: Core) -> Iterator[tuple[float, int, Any]]:
        """The columns of a core, each with its own ends and memory."""
        for shard in self.space.columns_of(self.rows[core.row].prefix, core.batch):
            yield self._column_bound(core, shard, bound), 3, (core, shard)

    def _first_answers(self, left: npt.NDArray[np.int64], most: int = 60, each: int = 12) -> None:
        """Quick answers: one row of each family of degrees that looks fast, then more rows of the families that did best."""
        hopes = self._hopes(self.least)
        left = left[np.lexsort((left, hopes[left]))]
        numbers: dict[tuple[int, ...], int] = {}
        of = np.array([numbers.setdefault(family(p, None), len(numbers)) for p in self.rows.prefixes], np.int64)[self.rows.at[left]]
        answers: list[tuple[float, int, list[int]]] = []
        waited = 0
        for place, first in enumerate(sorted(np.unique(of, return_index=True)[1])[:most]):
            before = self.fastest
            members = [int(i) for i in left[of == of[first]][:each]]
            fastest = min(self._row_answer(i, 1) for i in members[:2])
            answers.append((fastest, place, members))
            waited = 0 if self.fastest < before * (1 - 1e-3) else waited + int(np.isfinite(fastest))
            if waited >= 16 or hopes[members[0]] >= self.fastest:
                break
        for _, _, members in sorted(answers)[:3]:
            for i in members:
                if self.least[i] < self.fastest and hopes[i] < self.fastest * 1.05:
                    self._row_answer(i, 3)

    def _row_answer(self, i: int, most: int) -> float:
        """Seconds of a row's quick answers."""
        row = self.rows[i]
        self.try_row(row, most)
        own = (f for f in self.found.values() if f.prefix == row.prefix and f.batch.micro_batch == row.micro_batch)
        return min((f.answer.seconds for f in own), default=float("inf"))

    def _any_shard(self, row: Row) -> Shard:
        """A shard choice whose own collectives cost least: no gathering inside the passes, the default order."""
        return Shard(1, row.prefix.dp, 1, self.space.limits.orders[0], "alltoall")

    def _cut(self, bound: float, number: int) -> None:
        self.books.by_bound += number
        self.books.weakest = min(self.books.weakest, bound)

    def _paths_bound(self, row: Row, batch: Batch) -> float:
        """The bound of kept path weights; where a shape has none yet, those of this core's own linear program."""
        column = Column(self.job, self.space.layout(row.prefix, batch, self._any_shard(row)), self.modes, self.store)
        paths, plain = column.paths, self._plain_units(row, batch)
        if not paths.duals:
            bound = bounds.improve(paths, plain, self.totals, column.transfer, column, rounds=1)
            if self.step(bound) >= self.fastest * 0.97:
                bounds.improve(paths, plain, self.totals, column.transfer, column)
        return float(self.step(max(bounds.dual(paths, w, plain, self.totals, column.transfer) for w in paths.duals)))

    def _column_bound(self, core: Core, shard: Shard, known: float) -> float:
        """The mean rank's work with its own gradient reduction and optimizer; path weights with the optimizer at the ends, and with the
        recompute that memory makes necessary. Passes are priced without ZeRO's collectives here. Infinite: it does not fit."""
        row = self.rows[core.row]
        column, fitting = self.column(row.prefix, core.batch, shard)
        plain = self._plain_units(row, core.batch)
        work = bounds.work(plain, self.totals, row.microbatches, row.prefix.pp)
        bound = max(known, float(self.step(work + column.mean_ends))) if core.batch.schedule not in PAIRED else known
        if row.prefix.pp == 1:
            return bound
        for room in (None, True):
            if bound >= self.fastest * (1 - PROVED):
                break
            lines = fitting.room() if room else None
            for weights in column.paths.duals:
                value = bounds.dual(column.paths, weights, plain, self.totals, column.transfer, column.layer_update, lines)
                bound = max(bound, float(self.step(value)))
        return bound

    def _plain_units(self, row: Row, batch: Batch) -> Units:
        """Unit seconds in all modes without what ZeRO adds."""
        return units(self.job, self.space.layout(row.prefix, batch, self._any_shard(row)), self.modes)

    def _solve_one(self, bound: float, core: Core, shard: Shard, gap: float) -> None:
        row = self.rows[core.row]
        column, fitting = self.column(row.prefix, core.batch, shard)
        result = solve_column(column, fitting, self.policies(core.batch, row.prefix), self.fastest, bound, self.totals, gap)
        self.books.programs += result.programs
        self.books.cuts += result.cuts
        if result.unfit:
            self.books.by_memory += 1
        elif result.cut:
            self._cut(max(bound, result.bound), 1)
        else:
            self.books.solved += 1
            self.books.weakest = min(self.books.weakest, max(bound, result.bound))
            self._keep(result.answer, row.prefix, core.batch, shard)

    # -- what fits at all -------------------------------------------------------------------------------------------

    def _lean_rows(self, most: int) -> list[Row]:
        order = np.lexsort((self.rows.table[:, 5], self.row_bytes))
        return [self.rows[int(i)] for i in order[:most]]

    def anything_fits(self, most: int = 40) -> bool:
        """Whether one of the rows that need least has a column that fits."""
        if not len(self.rows) or float(self.row_bytes.min()) > self.job.limit_bytes:
            return False
        for row in self._lean_rows(most):
            for batch in row.batches[:3]:
                for shard in sorted(self.space.columns_of(row.prefix, batch), key=lambda s: (-s.zero, -s.dp_shard, not s.offload))[
                    :3
                ]:
                    column, fitting = self.column(row.prefix, batch, shard)
                    if quick(column, fitting, self.policies(batch, row.prefix)) is not None:
                        return True
        return False

    def leanest(self) -> tuple[str, StageMemory]:
        """(layout, fullest stage) of the layout that needs least among the leanest rows: everything sharded, all recomputed."""
        best: tuple[float, str, StageMemory] | None = None
        for row in self._lean_rows(12):
            for batch in row.batches[:2]:
                shards = sorted(self.space.columns_of(row.prefix, batch), key=lambda s: (-s.zero, -s.dp_shard, not s.offload))[:2]
                for shard in shards:
                    layout = self.space.layout(row.prefix, batch, shard, recompute=mode_text(self.modes[-1]))
                    worst = fits(self.job, layout)[1]
                    if best is None or worst.needed < best[0]:
                        best = (worst.needed, layout.text(), worst)
        if best is None:
            raise InputError("layout", "any", f"no layout of {self.job.cluster.gpus} GPUs is legal")
        return best[1], best[2]

    # -- runners-up -------------------------------------------------------------------------------------------------

    def _families(self, left: npt.NDArray[np.int64]) -> None:
        """Answers for further families (other degrees), cheapest bound first, for the runners-up."""
        if not self.extra or self.best is None:
            return
        seen = {family(f.prefix, f.shard) for f in self.found.values()}
        tried: dict[tuple[int, ...], int] = {}
        for i in left:
            row = self.rows[int(i)]
            degrees = family(row.prefix, None)
            if tried.get(degrees, 0) >= 2 or any(s[:-1] == degrees[:-1] for s in seen):
                continue
            tried[degrees] = tried.get(degrees, 0) + 1
            if self.try_row(row, 1):
                seen = {family(f.prefix, f.shard) for f in self.found.values()}
            if len(seen) > self.extra + 3 or len(tried) > 4 * self.extra + 8:
                return


def family(prefix: Prefix, shard: Shard | None) -> tuple[int, ...]:
    """What makes a layout really different: its degrees, and whether parameters are sharded."""
    return (prefix.tp, prefix.ring, prefix.ulysses, prefix.pp, prefix.ep, prefix.etp, int(shard is not None and shard.zero == 3))
