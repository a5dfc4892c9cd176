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

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.communication import stragglers
from cost_models.job import Job
from cost_models.memory import StageMemory, fits
from planner.books import Alike, Books, Found, Outcome, Queue
from planner.columns import Column, PathStore, mode_text, modes_of, modes_within, placement, prefix_counts, priced_as
from planner.core_costs import Pipeline
from planner.cores import Class, Cores, Key
from planner.fitting import Fitting, policies
from planner.heuristic import quick, quick_within
from planner.loads import PROGRAMS, best_loads
from planner.program import Answer
from planner.rows import Row, Rows, idle
from planner.shapes import Costs
from planner.solve_column import PROVED, solve_column
from planner.space import Batch, Prefix, Shard, Space
from profiles.errors import InputError

QUICK = 1e-2
"""Relative gap at which the search stops unless a proof is asked for, or is cheap."""
SMALL, TINY = 20_000, 2_000
"""Columns of a space that is worth proving unasked, and of one whose proof takes all the effort that it takes."""
EFFORT, EFFORT_TO_PROVE = 600, 20_000
"""Classes, columns and programs opened at most: a count, not a time, so that the same input gives the same plan on any machine."""
LOADS = 64
"""Loads of one column simulated at most, to prove."""
VAIN = 0.05
"""Share of the way from a column's bound to the answer that its loads must bring; else those of the same shape are not tried, unless to
prove."""
LEAN = 12
"""Rows that need least memory, looked at for what a job needs that does not fit: bounds pass over what a micro batch costs."""
PATIENCE = 40
"""Entries opened after the last better answer, once the gap cannot narrow."""
STEPS, CROWD = 6, 60
"""Entries opened after a shape, where that many wait: a better answer then leaves fewer."""
CLOSE = 0.95
"""Share of the first answer's seconds above which no further family is asked for one."""
SCHEDULES, MICRO_BATCHES = 3, 4
"""Schedules of a row that looks fast answered before the rest is bounded; micro batches of the same degrees tried where memory decides."""
POOR = 1.5
"""Times what the best row promises, beyond which a first answer is poor."""


@dataclass
class Search:
    job: Job
    space: Space
    prove: bool = False
    extra: int = 0
    """Further families of layouts (other degrees) to answer for runners-up."""
    books: Books = field(default_factory=Books)
    deadline: float | None = None
    """``time.monotonic()`` at which the search ends, whatever is left."""

    report: Callable[[float, str], None] | None = None
    """Is told the share of the search that is done, and the best answer, as it goes."""

    def __post_init__(self) -> None:
        limits = self.space.limits
        self.modes = modes_within(modes_of(self.job, limits), limits, self.space.pins, self.space.excluded)
        self.store = PathStore()
        self.totals = prefix_counts(self.job)[-1]
        self.slowing = stragglers(self.job.cluster.nodes if self.job.cluster.gpus > 1 else 1)
        self.found: dict[tuple[Prefix, Batch, Shard], Found] = {}
        self.best: Found | None = None
        self._vain: set[Key] = set()
        self._patience, self._share = PATIENCE, 0.0

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
        _, plain, tight, _ = self.rows.bytes
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
            self.best, self._patience = self.found[key], PATIENCE

    def column(self, prefix: Prefix, batch: Batch, shard: Shard) -> tuple[Column, Fitting]:
        column = Column(self.job, self.space.layout(prefix, batch, shard), self.modes, self.store)
        return column, Fitting(column)

    def policies(self, batch: Batch, prefix: Prefix) -> Sequence[Any]:
        chunks = prefix.pp * batch.vpp
        longest = -(-self.job.model.num_layers // chunks) + 2
        return policies(self.space.limits.recompute, self.modes, longest)

    def try_row(self, row: Row, most: int = 2, spare: int = 1, *, faster: bool = False) -> bool:
        """Quick answers of a row's most promising columns: of ``most`` schedules that fit, ``spare`` that do not passed over; ``faster``: of
        no use unless faster than the best one. Whether one fits, or need not be looked at."""
        layers, pp = self.job.model.num_layers, row.prefix.pp
        best = {b.schedule: b for b in sorted(row.batches, key=lambda b: (-idle(b, pp, layers), -b.vpp))}
        ranked = sorted(best.values(), key=lambda b: idle(b, pp, layers))
        fitted = 0
        for place, batch in enumerate(ranked):
            if fitted == most or place - fitted > spare:
                break
            some = False
            for shards in self._likely(row.prefix, batch):
                plain = False
                for shard in shards:
                    column, fitting = self.column(row.prefix, batch, shard)
                    limit = self.fastest if faster else float("inf")
                    answer, may_be = quick_within(column, fitting, self.policies(batch, row.prefix), limit)
                    self._keep(answer, row.prefix, batch, shard)
                    some = some or answer is not None or not may_be
                    plain = plain or (answer is not None and not any(n for mix in answer.mixes for r in mix for n in r[1:]))
                if plain:
                    break
            fitted += some
        return fitted > 0

    def _likely(self, prefix: Prefix, batch: Batch) -> list[list[Shard]]:
        """A few shard choices, with each dispatcher and offload: sharded optimizer over all, whole replicas, everything sharded."""
        shards = self.space.columns_of(prefix, batch)
        out: list[list[Shard]] = []
        for zero in (0, 1, 2, 3) if prefix.dp * prefix.cp <= 8 else (1, 2, 3, 0):
            some = [s for s in shards if s.zero == zero]
            ways: dict[Any, list[Shard]] = {}
            for shard in some:
                ways.setdefault((priced_as(shard.dispatcher), shard.offload), []).append(shard)
            same = [[s for s in way if s.dispatcher == way[0].dispatcher] for way in ways.values()]
            out.append([max(way, key=lambda s: s.dp_shard) for way in same])
        return [group for group in out if group]

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
        self._best_first(left)
        if self.best is None and self.books.unexplored:
            self._any_answer()
        self._families(left)
        books = self.books
        books.by_bound = books.legal - books.by_memory - books.by_dominance - books.solved - books.unexplored
        return Outcome(self.best, list(self.found.values()), books, min(books.weakest, self.fastest))

    def pipeline(self, step: float) -> float:
        """Seconds of pipeline in a step of ``step`` seconds."""
        return step / self.slowing - self.job.execution.step_overhead_seconds

    def _best_first(self, left: npt.NDArray[np.int64]) -> None:
        """Shapes are bounded by arrays, the least work first; what may beat the answer enters a queue as classes of columns, and the entry
        with the least bound is opened next: a class into its columns, a column into an answer, an answer into a proof. Rows that look
        fastest go first, so that the rest is compared with a good answer."""
        gap = PROVED if self.prove or self.books.legal <= SMALL else QUICK
        effort = EFFORT_TO_PROVE if self.whole else EFFORT
        queue = Queue(gap)
        self._shapes(queue, Cores(self.rows, left[self.least[left] < self.fastest], self.store), effort)
        while self._work(queue, effort, 1):
            pass
        rows: dict[tuple[int, Key], list[Class]] = {}
        for bound, level, _, item in queue.heap:
            cut = bound >= self.fastest * (1 - queue.gap)
            self._leave(bound, item[1].number if level in (1, 2) else 0, cut)
            if level == 0 and not cut:
                rows.setdefault((item.row, item.key), []).append(item)
        for some in rows.values():
            classes = {(one.zero, one.shard) for one in some}
            every = self.space.columns_of(self.rows[some[0].row].prefix, self._batch(some[0]))
            self.books.unexplored += sum((s.zero, s.dp_shard) in classes for s in every)

    def _shapes(self, queue: Queue, cores: Cores, effort: int) -> None:
        """Bound the cores of rows pipeline by pipeline, and work on what they add to the queue."""
        self.cores = cores
        waiting = sorted((self._hope_of(pipeline, rows), pipeline) for pipeline, rows in cores.by.items())
        for place, (_, pipeline) in enumerate(waiting):
            rows = cores.by[pipeline]
            rows = rows[self.least[rows] < self.fastest]
            if not len(rows):
                continue
            least = float(self.least[rows].min())
            if self._enough(least):
                self._leave(least, sum(self._columns(int(i), pipeline) for i in rows), cut=False)
                continue
            self._tell(0.5 * place / len(waiting))
            some = cores.within(pipeline, rows, self.pipeline(self.fastest))
            for bound, one in some:
                queue.add(float(self.step(bound)), 0, one)
            self._try_likeliest(some)
            if len(queue) > CROWD:
                self._work(queue, effort, STEPS)

    def _hope_of(self, pipeline: Pipeline, rows: npt.NDArray[np.int64]) -> float:
        """About how long the best core of a pipeline takes."""
        schedule, pp, vpp = pipeline
        least: dict[int, float] = {}
        for m, seconds in zip(self.rows.table[rows, 9].tolist(), self.least[rows].tolist(), strict=True):
            least[m] = min(seconds, least.get(m, seconds))
        return min(s * (1 + idle(Batch(0, schedule, vpp, m), pp, self.job.model.num_layers)) for m, s in least.items())

    def _try_likeliest(self, some: Sequence[tuple[float, Class]]) -> None:
        """A quick answer of the class with the least bound, where that is well below the best answer: behind a better one more is cut."""
        bound, one = min(some, key=lambda x: x[0], default=(float("inf"), None))
        shards = self._members(one) if one is not None and self.step(bound) < (1 - QUICK) * self.fastest else []
        if one is None or not shards:
            return
        row, batch, shard = self.rows[one.row], self._batch(one), shards[0]
        column, fitting = self.column(row.prefix, batch, shard)
        self._keep(quick_within(column, fitting, self.policies(batch, row.prefix), self.fastest)[0], row.prefix, batch, shard)

    def _work(self, queue: Queue, effort: int, steps: int) -> bool:
        """Open up to ``steps`` entries, the least bound first, while one may beat the answer by more than the gap; whether one was."""
        for done in range(steps):
            if not queue.heap or queue.opened >= effort or queue.heap[0][0] >= self.fastest * (1 - queue.gap):
                return done > 0
            if self._enough(queue.heap[0][0]):
                return done > 0
            bound, level, item = queue.pop()
            self._patience -= 1
            self._tell(0.5 + 0.5 * queue.opened / effort if queue.opened > effort // 2 else 0.0)
            if level >= 2:
                one, alike, exact = item
                left = self._solve_one(bound, one, alike, exact, queue.gap, level == 3)
                if left is not None:
                    queue.add(left, 3, item)
                continue
            for least, entry in self._open_class(bound, item) if level == 0 else self._answer(bound, *item):
                queue.add(least, level + 1, entry)
        return True

    def _batch(self, one: Class) -> Batch:
        return next(b for b in self.rows[one.row].batches if (b.schedule, b.vpp) == (one.key[0], one.key[2]))

    def _members(self, one: Class) -> list[Shard]:
        """The columns of a class."""
        shards = self.space.columns_of(self.rows[one.row].prefix, self._batch(one))
        return [s for s in shards if s.zero == one.zero and s.dp_shard == one.shard]

    def _columns(self, row: int, pipeline: Pipeline) -> int:
        batch = next(b for b in self.rows[row].batches if (b.schedule, b.vpp) == (pipeline[0], pipeline[2]))
        return self.space.count(self.rows[row].prefix, batch)

    def _leave(self, bound: float, number: int, cut: bool) -> None:
        """Columns that nobody looked into: cut by their bound, or not explored."""
        self.books.unexplored += 0 if cut else number
        self.books.weakest = min(self.books.weakest, bound)

    def _open_class(self, bound: float, one: Class) -> Iterator[tuple[float, Any]]:
        """The columns of a class, those of equal costs as one."""
        prefix, batch = self.rows[one.row].prefix, self._batch(one)
        alike: dict[Any, list[Shard]] = {}
        for shard in self._members(one):
            placed = placement(self.job.cluster, self.space.layout(prefix, batch, shard))
            alike.setdefault((priced_as(shard.dispatcher), shard.offload, placed), []).append(shard)
        for some in alike.values():
            yield bound, (one, Alike(some[0], len(some)))

    def _answer(self, bound: float, one: Class, alike: Alike) -> Iterator[tuple[float, Any]]:
        """A column's own bound, and a quick answer; of several chunks a rank, whose loads are looked at next, only where there is
        none."""
        row, batch, shard = self.rows[one.row], self._batch(one), alike.shard
        column, fitting = self.column(row.prefix, batch, shard)
        exact = None
        if one.key[0] != "dualpipe":
            exact = self.cores.exact(one, column)
            high = self.pipeline(self.fastest) if self.best else 4 * self.pipeline(bound)
            bound = max(bound, float(self.step(self.cores.bound(one.key, exact, self.pipeline(bound), high))))
        if bound >= self.fastest:
            return
        if exact is None or column.layout.vpp == 1 or self.best is None:  # those of several chunks come from their loads
            self._keep(quick_within(column, fitting, self.policies(batch, row.prefix), self.fastest)[0], row.prefix, batch, shard)
        yield bound, (one, alike, exact)

    def _first_answers(self, left: npt.NDArray[np.int64]) -> None:
        """Quick answers of rows that look fast, until one fits and the next look little faster: behind a poor answer nothing is cut, and effort
        is spent on what is no better. Where none comes near what rows promise, memory is what decides: rows that fit with all recompute and
        sharding go first then."""
        hopes = self._hopes(self.least)
        self._answers_in_order(left, hopes, 60, 1)
        if self.fastest > POOR * float(hopes[left].min()):
            fits = self.rows.bytes[3] <= self.job.limit_bytes
            self._answers_in_order(left, np.where(fits, self.least * (1 + self.rows.idle()), np.inf), 30, MICRO_BATCHES)

    def _answers_in_order(self, left: npt.NDArray[np.int64], hopes: npt.NDArray[np.float64], rows: int, micro_batches: int) -> None:
        """Quick answers of up to ``rows`` rows in the order of their ``hopes``: of the same degrees up to ``micro_batches`` until one fits."""
        tried: dict[tuple[int, ...], int] = {}
        for i in left[np.lexsort((left, hopes[left]))]:
            if hopes[i] >= CLOSE * self.fastest or rows == 0 or self.late() or not np.isfinite(hopes[i]):
                return
            degrees = family(self.rows.prefixes[self.rows.at[i]], None)
            if tried.get(degrees, 0) < micro_batches:
                fits, rows = self.try_row(self.rows[int(i)], SCHEDULES, faster=True), rows - 1
                tried[degrees] = micro_batches if fits else tried.get(degrees, 0) + 1

    def _tell(self, share: float) -> None:
        """Progress, which never goes back."""
        if self.report is not None:
            self._share = max(self._share, min(share, 1.0))
            self.report(self._share, f"best {self.fastest:.4g} s" if self.best else "")

    @property
    def whole(self) -> bool:
        """Whether effort goes on until the gap is closed."""
        return self.prove or self.books.legal <= TINY

    def _enough(self, least: float) -> bool:
        """Whether to stop before what is bounded by ``least``: the time allowed is over; or nothing left can narrow the gap, which something
        left unexplored holds open, and no answer got better for long."""
        return self.late() or (not self.whole and least >= self.books.weakest and self._patience <= 0)

    def late(self) -> bool:
        """Whether the time allowed is over."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def _solve_one(self, bound: float, one: Class, alike: Alike, exact: Costs | None, gap: float, close: bool) -> float | None:
        """Solve a column. To prove, one that may still be faster is left to be closed when nothing has a lesser bound: its bound then."""
        row, batch, shard = self.rows[one.row], self._batch(one), alike.shard
        column, fitting = self.column(row.prefix, batch, shard)
        some = self.policies(batch, row.prefix)
        if exact is not None and (column.layout.vpp > 1 or close):
            least = self._solve_loads(bound, one, alike, exact, gap, close)
        else:
            result = solve_column(column, fitting, some, self.fastest, bound, self.totals, gap, deadline=self.deadline)
            self.books.programs += result.programs
            self.books.cuts += result.cuts
            least = max(bound, result.bound)
            if result.unfit:
                self.books.by_memory += alike.number
                return None
            if not result.cut:
                self.books.solve(alike.number)
                self._keep(result.answer, row.prefix, batch, shard)
        if self.prove and exact is not None and column.chunks > 1 and not close and least < self.fastest * (1 - gap):
            return least
        self.books.weakest = min(self.books.weakest, least)
        return None

    def _solve_loads(self, bound: float, one: Class, alike: Alike, exact: Costs, gap: float, close: bool) -> float:
        """The least seconds of any step of a column, by the ways to deal layers to its ranks. ``close``: after a first look, to the end."""
        if not self.whole and one.key in self._vain:
            self.books.unexplored += alike.number
            return bound
        if not close:
            self.books.solve(alike.number)
        before = bound
        row, batch, shard = self.rows[one.row], self._batch(one), alike.shard
        column, fitting = self.column(row.prefix, batch, shard)
        rounds, programs = LOADS if self.prove else LOADS // 8, PROGRAMS if close else 0
        shape, some = self.cores.shape(one.key), self.policies(batch, row.prefix)
        answer, least = best_loads(
            column,
            fitting,
            some,
            shape,
            exact,
            self.fastest,
            PROVED,
            rounds,
            prove=self.prove,
            programs=programs,
            deadline=self.deadline,
        )
        self._keep(answer, row.prefix, batch, shard)
        bound = max(bound, least)
        if bound < self.fastest * (1 - gap):  # the paths that were found bound it better
            again = self.cores.bound(one.key, exact, self.pipeline(bound), self.pipeline(self.fastest))
            bound = max(bound, float(self.step(again)))
        if bound < before + VAIN * (self.fastest - before):
            self._vain.add(one.key)
        return bound

    # -- what fits at all -------------------------------------------------------------------------------------------

    def _lean_rows(self, most: int, smallest: bool = False) -> list[Row]:
        """Rows by the least bytes of their bound; ``smallest``: of the same degrees those with the smallest micro batch."""
        order = np.lexsort((self.rows.table[:, 5], self.row_bytes))[:most]
        if smallest:
            order = np.unique(self.rows.start[self.rows.at[order]])
        return [self.rows[int(i)] for i in order]

    def _any_answer(self, most: int = 60) -> None:
        """An answer from the rows that need least, where effort ended before any was found."""
        for row in self._lean_rows(most):
            if self.try_row(row) or self.late():
                return

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
        for row in self._lean_rows(LEAN, smallest=True):
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
        """Answers for further families (other degrees), the most hopeful first, for the runners-up."""
        if not self.extra or self.best is None:
            return
        left = left[np.lexsort((left, self._hopes(self.least)[left]))]
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
