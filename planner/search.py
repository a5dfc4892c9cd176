"""The search: bound prefixes, cut, solve what is left, and keep the books of the certificate.

1. *rows* (a prefix with a micro batch) are bounded together by arrays: least bytes of any rank, least seconds of a step;
2. a first answer comes from the most promising rows;
3. rows that could beat it are expanded into cores (schedule, vpp), those of one pipeline bounded together, by paths and memory;
4. cores are expanded into columns (ZeRO, split of dp, order, dispatcher) and solved one by one, cheapest bound first, until the bound
   of the next is as good as the answer: by dynamic programming where a rank has one chunk, by its loads elsewhere and, to prove, where
   that leaves a gap, which the integer program closes.

Every column is counted once: cut by memory (does not fit with the least recompute and the most sharding), cut by bound, or solved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.answers import NEAR, Answers
from planner.books import Alike, Books, Outcome, Queue
from planner.column_costs import Costs
from planner.columns import placement, priced_as
from planner.core_costs import Pipeline
from planner.cores import Class, Cores, Key
from planner.heuristic import quick
from planner.loads import PROGRAMS, best_loads
from planner.program import Answer
from planner.rows import idle
from planner.solve_column import PROVED, solve_column
from planner.space import Batch, Prefix, Shard

QUICK = 1e-2
"""Relative gap at which the search stops unless a proof is asked for, or is cheap."""
SMALL, TINY = 20_000, 2_000
"""Columns of a space that is worth proving unasked, and of one whose proof takes all the effort that it takes."""
EFFORT, EFFORT_IF_SMALL, EFFORT_TO_PROVE = 600, 4_000, 20_000
"""Classes, columns and programs opened at most: a count, not a time, so that the same input gives the same plan on any machine."""
FINISHED = 6
"""Columns with no more than a quick answer that are solved, where the gap stays open."""
LOADS = 64
"""Loads of one column simulated at most, to prove."""
LOADED, LOADED_IF_SMALL = 160, 400
"""Columns of several chunks a rank whose loads are looked at, unless to prove."""
VAIN = 0.05
"""Share of the way from a column's bound to the answer that its loads must bring; else those of the same shape are not tried, unless to
prove."""
WIDE = 1_000_000
"""Columns of a space beyond which no effort goes into narrowing a gap that stays open."""
PATIENCE = 40
"""Entries opened after the last better answer, once the gap cannot narrow."""
HASTE, LINGER = 400_000_000, 80
"""The same in a wide space, once the gap cannot close: entries times the columns of the space while pipelines are not bounded yet; entries at
most."""
BOUNDED = 320_000_000_000
"""Rows times ranks, times the columns of the space, of pipelines that are bounded by their paths once there is no effort left to open them."""
IN_VAIN = 8
"""Likeliest classes of pipelines tried in a row without a better answer."""
STEPS, CROWD = 6, 60
"""Entries opened after a shape, where that many wait: a better answer then leaves fewer."""


@dataclass
class Search(Answers):
    """The search of a space; ``prove``: until the gap is closed."""

    prove: bool = False
    extra: int = 0
    """Further families of layouts (other degrees) to answer for runners-up."""
    books: Books = field(default_factory=Books)
    report: Callable[[float, str], None] | None = None
    """Is told the share of the search that is done, and the best answer, as it goes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._vain: set[Key] = set()
        self._finished: set[tuple[Prefix, Batch, Shard]] = set()
        self._since, self._vainly, self._loaded, self._share = 0, 0, 0, 0.0
        self._hasty = True

    def _keep(self, answer: Answer | None, prefix: Prefix, batch: Batch, shard: Shard) -> None:
        before = self.fastest
        super()._keep(answer, prefix, batch, shard)
        if self.fastest < before:
            self._since = 0

    # -- the search -------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        rows = self.rows
        if not len(rows):
            return Outcome(None, [], self.books, float("inf"))
        counts, small = rows.counts, rows.fit
        self.books.legal = int(counts.sum())
        self.books.by_memory += int(counts[~small].sum())
        left = np.flatnonzero(small & (counts > 0))
        left = left[np.lexsort((left, self.row_bounds[left]))]
        if len(left):
            self._first_answers(left)
        self._best_first(left)
        if self.best is None and self.books.unexplored:
            self._any_answer()
        self._families(left, self.extra)
        books = self.books
        books.by_bound = books.legal - books.by_memory - books.by_dominance - books.solved - books.unexplored
        return Outcome(self.best, list(self.found.values()), books, min(books.weakest, self.fastest))

    def _best_first(self, left: npt.NDArray[np.int64]) -> None:
        """Shapes are bounded by arrays, the least work first; what may beat the answer enters a queue as classes of columns, and the entry
        with the least bound is opened next: a class into its columns, a column into an answer, an answer into a proof. Rows that look
        fastest go first, so that the rest is compared with a good answer."""
        gap = PROVED if self.prove or self.small else QUICK
        effort = EFFORT_TO_PROVE if self.whole else EFFORT_IF_SMALL if self.small else EFFORT
        queue = Queue(gap)
        self._shapes(queue, Cores(self.rows, left[self.row_bounds[left] < self.fastest], self.store), effort)
        while self._work(queue, effort, 1):
            pass
        if self.best and min(queue.least, self.books.weakest) < self.fastest * (1 - QUICK):
            before = self.fastest
            self._more_answers(left)
            if self.books.legal <= WIDE:
                self._near_answers()
            self._finish()
            if self.fastest < before:
                queue.opened //= 2
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
        waiting, passed = self._order(cores.by), list[tuple[Pipeline, npt.NDArray[np.int64]]]()
        for place, pipeline in enumerate(waiting):
            rows = cores.by[pipeline]
            rows = rows[self.row_bounds[rows] < self.fastest]
            if not len(rows):
                continue
            if self._enough(float(self.row_bounds[rows].min()), queue):
                passed.append((pipeline, rows))
                continue
            self._tell(0.5 * place / len(waiting))
            some = cores.within(pipeline, rows, self.pipeline(self.fastest))
            for bound, one in some:
                queue.add(float(self.step(bound)), 0, one)
            self._try_likeliest(some)
            if len(queue) > CROWD:
                self._work(queue, effort, STEPS)
        self._hasty = bool(passed)
        self._pass_over(passed)

    def _pass_over(self, passed: Sequence[tuple[Pipeline, npt.NDArray[np.int64]]]) -> None:
        """Leave the cores of pipelines unexplored, with the bounds that their mean ranks give; those that hold the gap open, the least bound
        first, with the bounds that some effort gives."""
        coarse = []
        for pipeline, rows in passed:
            if self.late():
                coarse.append((float(self.row_bounds[rows].min()), pipeline, rows))
            else:
                left, work = self.cores.left(pipeline, rows, self.pipeline(self.fastest))
                coarse.append((float(self.step(work)), pipeline, left))
        effort, weakest = BOUNDED // max(1, self.books.legal), self.books.weakest
        for least, pipeline, rows in sorted(coarse, key=lambda c: c[:2]):
            effort -= len(rows) * pipeline[1] if least < weakest else 0
            if least < weakest and len(rows) and effort >= 0 and not self.late():
                some = self.cores.within(pipeline, rows, self.pipeline(self.fastest))
                rows = np.unique([one.row for _, one in some]).astype(np.int64)
                least = max(least, float(self.step(min((bound for bound, _ in some), default=np.inf))))
                weakest = min(weakest, least)
            self._leave(least, self.rows.columns(rows, pipeline[0], pipeline[2]), cut=False)

    def _order(self, pipelines: Iterable[Pipeline]) -> list[Pipeline]:
        """The pipelines whose columns look fastest first, those without a hopeful one by their rows' work after them."""
        best: dict[Pipeline, float] = {}
        for hope in (hope for some in self._hopes for hope in some):
            pipeline = self._pipeline_of(hope)
            best[pipeline] = min(hope.seconds, best.get(pipeline, hope.seconds))
        return sorted(pipelines, key=lambda p: (p not in best, best.get(p) or self._hope_of(p), p))

    def _hope_of(self, pipeline: Pipeline) -> float:
        """About how long the best core of a pipeline takes."""
        schedule, pp, vpp = pipeline
        rows, least = self.cores.by[pipeline], dict[int, float]()
        for m, seconds in zip(self.rows.table[rows, 9].tolist(), self.row_bounds[rows].tolist(), strict=True):
            least[m] = min(seconds, least.get(m, seconds))
        return min(s * (1 + idle(Batch(0, schedule, vpp, m), pp, self.job.model.num_layers)) for m, s in least.items())

    def _try_likeliest(self, some: Sequence[tuple[float, Class]]) -> None:
        """A quick answer of the class with the least bound, where that is well below the best answer: behind a better one more is cut; none
        after several in a row that were no better."""
        bound, one = min(some, key=lambda x: x[0], default=(float("inf"), None))
        if one is None or self._vainly >= IN_VAIN or self.step(bound) >= (1 - QUICK) * self.fastest:
            return
        shards, before = self._members(one), self.fastest
        if shards:
            row, batch, shard = self.rows[one.row], self._batch(one), shards[0]
            column, fitting = self.column(row.prefix, batch, shard)
            self._keep(quick(column, fitting, self.policies(batch, row.prefix), self.fastest), row.prefix, batch, shard)
            self._vainly = 0 if self.fastest < before else self._vainly + 1

    def _work(self, queue: Queue, effort: int, steps: int) -> bool:
        """Open up to ``steps`` entries, the least bound first, while one may beat the answer by more than the gap; whether one was."""
        for done in range(steps):
            if not queue.heap or queue.opened >= effort or queue.heap[0][0] >= self.fastest * (1 - queue.gap):
                return done > 0
            if self._enough(queue.heap[0][0], queue):
                return done > 0
            bound, level, item = queue.pop()
            self._since += 1
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

    def _leave(self, bound: float, number: int, cut: bool) -> None:
        """Columns that nobody looked into: cut by their bound, or not explored."""
        self.books.unexplored += 0 if cut else number
        self.books.weakest = min(self.books.weakest, bound)

    def _open_class(self, bound: float, one: Class) -> Iterator[tuple[float, Any]]:
        """The columns of a class, those of equal costs as one, with their own bounds."""
        prefix, batch = self.rows[one.row].prefix, self._batch(one)
        alike: dict[Any, list[Shard]] = {}
        for shard in self._members(one):
            placed = placement(self.job.cluster, self.space.layout(prefix, batch, shard))
            alike.setdefault((priced_as(shard.dispatcher), shard.offload, placed), []).append(shard)
        groups = [Alike(some[0], len(some)) for some in alike.values()]
        if one.key[0] == "dualpipe" or not groups:
            yield from ((bound, (one, group, None)) for group in groups)
            return
        exact = self.cores.exact(one, [self.column(prefix, batch, group.shard)[0] for group in groups])
        high = self.pipeline(self.fastest) if self.best else 4 * self.pipeline(bound)
        least = self.step(self.cores.bounds(one.key, exact, self.pipeline(bound), high))
        for place, group in enumerate(groups):
            if (own := max(bound, float(least[place]))) < self.fastest:
                yield own, (one, group, exact.take([place]))

    def _answer(self, bound: float, one: Class, alike: Alike, exact: Costs | None) -> Iterator[tuple[float, Any]]:
        """A quick answer of a column; of several chunks a rank, whose loads are looked at next, only where there is none."""
        row, batch, shard = self.rows[one.row], self._batch(one), alike.shard
        if exact is None or batch.vpp == 1 or self.best is None:  # those of several chunks come from their loads
            column, fitting = self.column(row.prefix, batch, shard)
            self._keep(quick(column, fitting, self.policies(batch, row.prefix), self.fastest), row.prefix, batch, shard)
        yield bound, (one, alike, exact)

    def _tell(self, share: float) -> None:
        """Progress, which never goes back."""
        if self.report is not None:
            self._share = max(self._share, min(share, 1.0))
            self.report(self._share, f"best {self.fastest:.4g} s" if self.best else "")

    @property
    def small(self) -> bool:
        """Whether the space is worth proving unasked."""
        return self.books.legal <= SMALL

    @property
    def whole(self) -> bool:
        """Whether effort goes on until the gap is closed."""
        return self.prove or self.books.legal <= TINY

    def _enough(self, least: float, queue: Queue) -> bool:
        """Whether to stop before what is bounded by ``least``: the time allowed is over; or a column that was solved holds the gap open,
        nothing left can narrow it, and no answer got better for long; in a wide space whether or not something can. Never before there is an
        answer."""
        wide, hasty = self.books.legal > WIDE, min(LINGER, 1 + HASTE // self.books.legal)
        over = self.books.weakest < self.fastest * (1 - queue.gap) if wide else least >= self.books.weakest
        most = PATIENCE if not wide else hasty if self._hasty else LINGER
        return self.late() or (self.best is not None and not self.whole and over and self._since >= most)

    def _finish(self) -> None:
        """Solve the columns whose quick answers are the fastest."""
        quickly = [
            f for f in self.found.values() if (f.prefix, f.batch, f.shard) not in self._finished and f.batch.schedule != "dualpipe"
        ]
        for found in sorted(quickly, key=lambda f: f.answer.seconds)[:FINISHED]:
            prefix, batch, shard = found.prefix, found.batch, found.shard
            if found.answer.seconds > NEAR * self.fastest or self.late():
                return
            column, fitting = self.column(prefix, batch, shard)
            if batch.vpp == 1:
                some = self.policies(batch, prefix)
                result = solve_column(
                    column, fitting, some, self.fastest, 0.0, self.totals, QUICK, largest=0, deadline=self.deadline
                )
                self._keep(result.answer, prefix, batch, shard)
            else:
                key = batch.schedule, prefix.pp, batch.vpp, column.microbatches
                one = Class(self.rows.of(prefix, batch.micro_batch), key, shard.zero, shard.dp_shard)
                self._loads(one, shard, self.cores.exact(one, [column]), 0)

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
                self._finished.add((row.prefix, batch, shard))
                self._keep(result.answer, row.prefix, batch, shard)
        if self.prove and exact is not None and column.chunks > 1 and not close and least < self.fastest * (1 - gap):
            return least
        self.books.weakest = min(self.books.weakest, least)
        return None

    def _solve_loads(self, bound: float, one: Class, alike: Alike, exact: Costs, gap: float, close: bool) -> float:
        """The least seconds of any step of a column, by the ways to deal layers to its ranks. ``close``: after a first look, to the end."""
        most = LOADED_IF_SMALL if self.small else LOADED
        if not self.whole and (self._loaded >= most or (one.key in self._vain and not self.small)):
            self.books.unexplored += alike.number
            return bound
        self._loaded += 1
        if not close:
            self.books.solve(alike.number)
        before, least = bound, self._loads(one, alike.shard, exact, PROGRAMS if close else 0)
        bound = max(bound, least)
        if bound < self.fastest * (1 - gap):  # the paths that were found bound it better
            again = self.cores.bounds(one.key, exact, self.pipeline(bound), self.pipeline(self.fastest))[0]
            bound = max(bound, float(self.step(again)))
        if bound < before + VAIN * (self.fastest - before):
            self._vain.add(one.key)
        return bound

    def _loads(self, one: Class, shard: Shard, exact: Costs, programs: int) -> float:
        """Look for answers of a column by its loads; the least seconds of any step of it, as far as that shows."""
        prefix, batch = self.rows[one.row].prefix, self._batch(one)
        column, fitting = self.column(prefix, batch, shard)
        answer, least = best_loads(
            column,
            fitting,
            self.policies(batch, prefix),
            self.cores.shape(one.key),
            exact,
            self.fastest,
            PROVED,
            LOADS if self.prove else LOADS // 8,
            prove=self.prove,
            programs=programs,
            deadline=self.deadline,
        )
        self._keep(answer, prefix, batch, shard)
        self._finished.add((prefix, batch, shard))
        return least
