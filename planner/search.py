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

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.communication import stragglers
from cost_models.job import Job
from cost_models.memory import StageMemory, fits
from planner import bounds
from planner.bulk import Bulk, lower_bytes, lower_seconds
from planner.columns import Column, PathStore, Units, mode_text, modes_of, prefix_counts, units
from planner.fitting import Fitting, policies
from planner.heuristic import quick
from planner.program import Answer
from planner.solve_column import PROVED, Result, solve_column
from planner.space import Batch, Prefix, Shard, Space
from profiles.errors import InputError

QUICK = 1e-2
"""Relative gap at which the search stops unless a proof is asked for, or is cheap."""
CHEAP = 400
"""Columns left that are worth proving unasked."""
KIND = {"ring": 0, "ulysses": 1, "allgather": 3}


@dataclass
class Row:
    prefix: Prefix
    micro_batch: int
    microbatches: int
    batches: tuple[Batch, ...]


@dataclass
class Core:
    row: int
    batch: Batch
    bound: float


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
    least_bytes: float = float("inf")


@dataclass
class Search:
    job: Job
    space: Space
    prove: bool = False
    extra: int = 0
    """Further families of layouts (other degrees) to answer for runners-up."""
    books: Books = field(default_factory=Books)

    def __post_init__(self) -> None:
        self.modes = modes_of(self.job, self.space.limits)
        self.store = PathStore()
        self.totals = prefix_counts(self.job)[-1]
        self.slowing = stragglers(self.job.cluster.nodes if self.job.cluster.gpus > 1 else 1)
        self.found: dict[tuple[Prefix, Batch, Shard], Found] = {}
        self.best: Found | None = None
        self._early: dict[tuple[int, Batch, Shard], Result] = {}

    # -- rows -------------------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> list[Row]:
        out = []
        for prefix in self.space.prefixes:
            by: dict[int, list[Batch]] = {}
            for batch in self.space.batches(prefix.tp, prefix.cp, prefix.pp, prefix.dp):
                by.setdefault(batch.micro_batch, []).append(batch)
            out += [Row(prefix, micro, batches[0].microbatches, tuple(batches)) for micro, batches in by.items()]
        return out

    @cached_property
    def _table(self) -> npt.NDArray[np.int64]:
        """Row x (tp, ring, ulysses, ep, etp, micro batch, cp kind, pp, dp, microbatches)."""
        data = []
        for row in self.rows:
            p = row.prefix
            kind = KIND.get(p.cp_kind, 2)
            data.append((p.tp, p.ring, p.ulysses, p.ep, p.etp, row.micro_batch, kind, p.pp, p.dp, row.microbatches))
        return np.array(data, np.int64).reshape(len(data), 10)

    @cached_property
    def _keys(self) -> tuple[Bulk, npt.NDArray[np.int64]]:
        """Seconds by distinct key, and each row's key."""
        table = self._table[:, :7]
        code = np.zeros(len(table), np.int64)
        for i in range(7):
            values, inverse = np.unique(table[:, i], return_inverse=True)
            code = code * len(values) + inverse
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        return lower_seconds(self.job, table[first]), inverse

    def step(self, pipeline: Any) -> Any:
        return (pipeline + self.job.execution.step_overhead_seconds) * self.slowing

    @cached_property
    def row_bounds(self) -> npt.NDArray[np.float64]:
        """Least seconds of a step, by row."""
        bulk, at = self._keys
        table = self._table
        bound: npt.NDArray[np.float64] = self.step(table[:, 9] * bulk.total(self.totals)[at] / table[:, 7])
        return bound

    @cached_property
    def _bytes(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        offload = any(self.space._offloads())
        return lower_bytes(self.job, self.space.limits, self._table, self.modes, offload=offload)

    @property
    def row_bytes(self) -> npt.NDArray[np.float64]:
        """Least bytes of the fullest rank, by row."""
        return self._bytes[0]

    def _hopes(self) -> npt.NDArray[np.float64]:
        """About how long a row's best step takes: its bound, the pipeline's idle time, and recompute where memory asks for it."""
        idle = np.array([min(_bubble(b, r.prefix.pp) for b in r.batches) for r in self.rows])
        least, plain = self._bytes
        over = np.clip((plain - self.job.limit_bytes) / np.maximum(plain - least, 1.0), 0.0, 1.0)
        hopes: npt.NDArray[np.float64] = self.row_bounds * (1 + idle) * (1 + over / 3)
        return hopes

    # -- books ------------------------------------------------------------------------------------------------------

    def count(self, row: Row) -> int:
        """Columns of a row."""
        total = 0
        by: dict[str, int] = {}
        for batch in row.batches:
            by[batch.schedule] = by.get(batch.schedule, 0) + 1
        for schedule, number in by.items():
            sample = next(b for b in row.batches if b.schedule == schedule)
            total += number * self.space.count(row.prefix, sample)
        return total

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

    def try_row(self, row: Row, most: int = 2) -> bool:
        """Quick answers of a row's most promising columns; whether one fits."""
        ranked = sorted(row.batches, key=lambda b: (_bubble(b, row.prefix.pp), b.vpp))[:most]
        some = False
        for batch in ranked:
            for shard in self._likely(row.prefix, batch):
                column, fitting = self.column(row.prefix, batch, shard)
                answer = quick(column, fitting, self.policies(batch, row.prefix))
                some = some or answer is not None
                self._keep(answer, row.prefix, batch, shard)
                if answer is not None and not any(n for mix in answer.mixes for r in mix for n in r[1:]):
                    break
        return some

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
        if not rows:
            return Outcome(None, [], self.books, float("inf"))
        counts = np.array([self.count(r) for r in rows])
        self.books.legal = int(counts.sum())
        small = self.row_bytes <= self.job.limit_bytes
        self.books.by_memory += int(counts[~small].sum())
        order = [int(i) for i in np.lexsort((np.arange(len(rows)), self.row_bounds)) if small[i] and counts[i]]
        self._first_answers(order)
        gap = PROVED if self.prove else QUICK
        cores = self._cores(order, counts)
        left = self._columns(cores, gap)
        if not self.prove and len(left) <= CHEAP:
            left = self._solve(left, PROVED)
        for bound, *_ in left:
            self.books.by_bound += 1
            self.books.weakest = min(self.books.weakest, bound)
        self._families(order)
        return Outcome(
            self.best, list(self.found.values()), self.books, min(self.books.weakest, self.fastest), float(self.row_bytes.min())
        )

    def _first_answers(self, order: Sequence[int], patience: int = 10, most: int = 60) -> None:
        """Quick answers from the rows that look fastest, their pipelines' idle time counted, until they stop getting better."""
        hopes = self._hopes()
        waited = 0
        for i in sorted(order, key=lambda i: (hopes[i], i))[:most]:
            if waited >= patience:
                break
            if self.row_bounds[i] >= self.fastest:
                continue
            before = self.fastest
            fitted = self.try_row(self.rows[i])
            waited = 0 if self.fastest < before * (1 - 1e-3) else waited + (1 if fitted else 0)

    def _cores(self, order: Sequence[int], counts: npt.NDArray[np.int64]) -> list[Core]:
        """Cores of rows that could beat the answer, bounded by paths; the rest is cut by bound."""
        keep: list[Core] = []
        for i in order:
            row = self.rows[i]
            floor = float(self.row_bounds[i])
            if floor >= self.fastest * (1 - PROVED):
                self._cut(floor, int(counts[i]))
                continue
            sample = self.space.layout(row.prefix, row.batches[0], self._any_shard(row))
            column = Column(self.job, sample, self.modes[:1], self.store)
            exact = max(floor, self.step(bounds.work(column.units, self.totals, row.microbatches, row.prefix.pp)))
            for batch in row.batches:
                number = self.space.count(row.prefix, batch)
                if not number:
                    continue
                if batch.schedule in ("dualpipe", "dualpipe-v"):
                    bound = floor
                else:
                    bound = exact
                if bound < self.fastest * (1 - PROVED) and row.prefix.pp > 1:
                    bound = max(bound, self._paths_bound(row, batch, column))
                if bound >= self.fastest * (1 - PROVED):
                    self._cut(bound, number)
                else:
                    keep.append(Core(i, batch, bound))
        return sorted(keep, key=lambda c: (c.bound, c.row, c.batch.vpp, c.batch.schedule))

    def _any_shard(self, row: Row) -> Shard:
        """A shard choice whose own collectives cost least: no gathering inside the passes, the default order."""
        return Shard(1, row.prefix.dp, 1, self.space.limits.orders[0], "alltoall")

    def _cut(self, bound: float, number: int) -> None:
        self.books.by_bound += number
        self.books.weakest = min(self.books.weakest, bound)

    def _paths_bound(self, row: Row, batch: Batch, sample: Column) -> float:
        """The bound of kept path weights; where a shape has none yet, those of this core's own linear program."""
        column = Column(self.job, self.space.layout(row.prefix, batch, self._any_shard(row)), sample.modes, self.store)
        paths = column.paths
        if not paths.duals:
            bound = bounds.improve(paths, column.units, self.totals, column.transfer, column, rounds=1)
            if self.step(bound) >= self.fastest * 0.97:
                bounds.improve(paths, column.units, self.totals, column.transfer, column)
        return float(self.step(max(bounds.dual(paths, w, column.units, self.totals, column.transfer) for w in paths.duals)))

    def _columns(self, cores: list[Core], gap: float) -> list[tuple[float, Core, Shard]]:
        columns = []
        for core in cores:
            for shard in self.space.columns_of(self.rows[core.row].prefix, core.batch):
                columns.append((self._column_bound(core, shard), core, shard))
        columns.sort(key=lambda c: (c[0], c[1].row, c[1].batch.vpp, c[1].batch.schedule, c[2].zero, c[2].dp_shard, c[2].order))
        return self._solve(columns, gap)

    def _column_bound(self, core: Core, shard: Shard) -> float:
        """The core's bound; the mean rank's work with its own gradient reduction and optimizer; path weights with the optimizer at the
        ends, and with the recompute that memory makes necessary. Passes are priced without ZeRO's collectives here."""
        row = self.rows[core.row]
        column, fitting = self.column(row.prefix, core.batch, shard)
        if row.prefix.pp == 1:
            result = solve_column(column, fitting, self.policies(core.batch, row.prefix), self.fastest, core.bound, self.totals)
            self._early[core.row, core.batch, shard] = result
            return result.bound
        plain = self._plain_units(row, core.batch)
        work = bounds.work(plain, self.totals, row.microbatches, row.prefix.pp)
        bound = max(core.bound, float(self.step(work + column.mean_ends)))
        paths = column.paths
        for room in (None, True):
            if bound >= self.fastest * (1 - PROVED):
                break
            lines = fitting.room() if room else None
            for weights in paths.duals:
                value = bounds.dual(paths, weights, plain, self.totals, column.transfer, column.layer_update, lines)
                bound = max(bound, float(self.step(value)))
        return bound

    def _plain_units(self, row: Row, batch: Batch) -> Units:
        """Unit seconds in all modes without what ZeRO adds."""
        return units(self.job, self.space.layout(row.prefix, batch, self._any_shard(row)), self.modes)

    def _solve(self, columns: list[tuple[float, Core, Shard]], gap: float) -> list[tuple[float, Core, Shard]]:
        """Solve columns whose bound is below the answer, in order; those left are returned."""
        for place, (bound, core, shard) in enumerate(columns):
            if bound >= self.fastest * (1 - gap):
                return [c for c in columns[place:] if not self._unfit(*c)]
            self._solve_one(bound, core, shard)
        return []

    def _unfit(self, bound: float, core: Core, shard: Shard) -> bool:
        """Books a column whose bound says that it cannot hold the layers."""
        if np.isfinite(bound):
            return False
        self._early.pop((core.row, core.batch, shard), None)
        self.books.by_memory += 1
        return True

    def _solve_one(self, bound: float, core: Core, shard: Shard) -> None:
        row = self.rows[core.row]
        result = self._early.pop((core.row, core.batch, shard), None)
        if result is None:
            column, fitting = self.column(row.prefix, core.batch, shard)
            result = solve_column(column, fitting, self.policies(core.batch, row.prefix), self.fastest, bound, self.totals)
        self.books.programs += result.programs
        self.books.cuts += result.cuts
        if result.unfit:
            self.books.by_memory += 1
            return
        if result.cut:
            self._cut(max(bound, result.bound), 1)
            return
        self.books.solved += 1
        self.books.weakest = min(self.books.weakest, max(bound, result.bound))
        self._keep(result.answer, row.prefix, core.batch, shard)

    # -- what fits at all -------------------------------------------------------------------------------------------

    def _lean_rows(self, most: int) -> list[Row]:
        order = np.lexsort((self._table[:, 5], self.row_bytes))
        return [self.rows[int(i)] for i in order[:most]]

    def anything_fits(self, most: int = 40) -> bool:
        """Whether one of the rows that need least has a column that fits."""
        if not len(self.rows) or float(self.row_bytes.min()) > self.job.limit_bytes:
            return False
        for row in self._lean_rows(most):
            for batch in row.batches[:3]:
                for shard in sorted(self.space.columns_of(row.prefix, batch), key=lambda s: (-s.zero, -s.dp_shard, not s.offload))[:3]:
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

    def _families(self, order: Sequence[int]) -> None:
        """Answers for further families (other degrees), cheapest bound first, for the runners-up."""
        if not self.extra or self.best is None:
            return
        seen = {family(f.prefix, f.shard) for f in self.found.values()}
        tried: dict[tuple[int, ...], int] = {}
        for i in order:
            row = self.rows[i]
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


def _bubble(batch: Batch, pp: int) -> float:
    """About the idle share of a schedule, to try likely ones first."""
    ideal = (pp - 1) / batch.microbatches
    return {
        "interleaved": ideal / batch.vpp,
        "zb-h1": ideal / 3,
        "zb-v": ideal / 5,
        "dualpipe-v": ideal / 4,
        "dualpipe": ideal / 4,
    }.get(batch.schedule, ideal)
