"""Quick answers of a space: its rows in the order of their hopes, their likeliest columns tried."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.communication import stragglers
from cost_models.job import Job
from cost_models.memory import StageMemory, fits, stage_memory
from planner.books import Found
from planner.columns import Column, mode_text, modes_of, modes_within, prefix_counts, priced_as, takes_turns
from planner.core_costs import CoreCosts, Pipeline
from planner.fitting import Fitting, policies
from planner.heuristic import quick
from planner.hopes import Hope, hopes
from planner.paths import PathStore
from planner.program import Answer
from planner.rows import Row, Rows, idle
from planner.space import Batch, Prefix, Shard, Space
from profiles.errors import InputError

LEAN = 12
"""Rows that need least memory, looked at for what a job needs that does not fit: bounds pass over what a micro batch costs."""
CLOSE = 0.98
"""Share of the best answer's seconds above which what looks no faster is not tried first."""
TRIES, WITHOUT, EACH, ALIKE = 10, 60, 3, 4
"""Cores that look fast answered at most before the rest is bounded: in all, or while none fits; of each pipeline; of the same degrees."""
MORE, NEAR = 48, 1.1
"""Cores answered where the gap stays open, and times the best answer's seconds beyond which one is not."""
FAR, NEIGHBOURS = 2, 24
"""Factors of two by which columns near the best one may differ from it in all; how many of them are answered each time."""
ORDERED = 6
"""Times that an answer which does not fit with its layers in their order is replaced by one that needs less."""
VAIN = 2
"""Cores of a family tried for a runner-up at most."""
RECOMPUTED, SHARDED, UNFIT = 1 / 3, 1.4, 1.5
"""The share by which a row counts as slower where all layers recompute; how many times, where only sharded gradients or parameters fit, and
where not even those do."""
ROWS, BLOCKS = 128, 8
"""Rows whose columns' hopes are looked at together, and how many times at most."""


@dataclass
class Answers:
    """What is known of the best layouts of a space."""

    job: Job
    space: Space
    deadline: float | None = field(default=None, kw_only=True)
    """``time.monotonic()`` at which the search ends, whatever is left."""

    def __post_init__(self) -> None:
        limits = self.space.limits
        self.modes = modes_within(modes_of(self.job, limits), limits, self.space.pins, self.space.excluded)
        self.store = PathStore()
        self.totals = prefix_counts(self.job)[-1]
        self.slowing = stragglers(self.job.cluster.nodes if self.job.cluster.gpus > 1 else 1)
        self.found: dict[tuple[Prefix, Batch, Shard], Found] = {}
        self.best: Found | None = None
        self._hopes: list[list[Hope]] = []
        """Of so many rows, those that look fastest first."""
        self._tried: set[tuple[int, Batch, int]] = set()
        """Cores, with a ZeRO stage, that were answered because they look fast."""

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

    @cached_property
    def core_costs(self) -> CoreCosts:
        """The costs of its columns by arrays."""
        return CoreCosts(self.rows)

    # -- answers ----------------------------------------------------------------------------------------------------

    @property
    def fastest(self) -> float:
        return self.best.answer.seconds if self.best else float("inf")

    def _keep(self, answer: Answer | None, prefix: Prefix, batch: Batch, shard: Shard) -> None:
        if answer is not None and self.turns:
            answer = self._fitting(answer, self.policies(batch, prefix))
        if answer is None:
            return
        key = (prefix, batch, shard)
        held = self.found.get(key)
        if held is None or answer.seconds < held.answer.seconds:
            self.found[key] = Found(answer, prefix, batch, shard)
        if answer.seconds < self.fastest:
            self.best = self.found[key]

    def _fitting(self, answer: Answer, some: Sequence[Any]) -> Answer | None:
        """The answer, where it fits with its layers in their order, which may need more than mixes of kinds tell; else a quick one of its
        column with that much less room; None where there is none."""
        less = 0.0
        for _ in range(ORDERED):
            column = answer.column
            memory = stage_memory(self.job, column.layout_of(answer.stages, answer.mixes))
            over = max(stage.needed for stage in memory) - self.job.limit_bytes
            if over <= 0:
                return answer
            less += over
            fitting = Fitting(column)
            fitting.limit -= less
            found = quick(column, fitting, some)
            if found is None:
                return None
            answer = found
        return None

    def column(self, prefix: Prefix, batch: Batch, shard: Shard) -> tuple[Column, Fitting]:
        column = Column(self.job, self.space.layout(prefix, batch, shard), self.modes, self.store)
        return column, Fitting(column)

    def policies(self, batch: Batch, prefix: Prefix) -> Sequence[Any]:
        chunks = prefix.pp * batch.vpp
        # where kinds take turns, the first n layers of a chunk are of kinds by where it starts, which counts by kind cannot say
        longest = 0 if self.turns else -(-self.job.model.num_layers // chunks) + 2
        return policies(self.space.limits.recompute, self.modes, longest)

    @cached_property
    def turns(self) -> bool:
        """Whether the model's kinds of layers take turns."""
        return takes_turns(self.job.model.pattern)

    def try_row(self, row: Row, most: int = 2, spare: int = 1) -> bool:
        """Quick answers of a row's most promising columns: of ``most`` schedules that fit, ``spare`` that do not passed over; whether one
        fits."""
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
                    answer = quick(column, fitting, self.policies(batch, row.prefix))
                    self._keep(answer, row.prefix, batch, shard)
                    some = some or answer is not None
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

    def pipeline(self, step: float) -> float:
        """Seconds of pipeline in a step of ``step`` seconds."""
        return step / self.slowing - self.job.execution.step_overhead_seconds

    def late(self) -> bool:
        """Whether the time allowed is over."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def _first_answers(self, left: npt.NDArray[np.int64]) -> None:
        """Quick answers of columns that look fast, until one fits and the next look little faster: behind a poor answer nothing is cut, and
        effort is spent on what is no better. A few of each pipeline, and of the same degrees each with another schedule, since one that
        promises too much is like another."""
        tried, degrees_of, of = 0, dict[tuple[Any, ...], set[str]](), dict[Pipeline, int]()
        for hope in self._hopeful(left):
            most = TRIES if self.best else WITHOUT
            if self.step(hope.seconds) >= CLOSE * self.fastest or tried == most or self.late():
                return
            prefix, pipeline = self.rows.prefixes[self.rows.at[hope.row]], self._pipeline_of(hope)
            schedules = degrees_of.setdefault((prefix.cp_kind, *family(prefix, None)), set())
            if of.get(pipeline, 0) == EACH or hope.batch.schedule in schedules or len(schedules) == ALIKE:
                continue
            if columns := self._columns_of(hope):
                schedules.add(hope.batch.schedule)
                of[pipeline], tried = of.get(pipeline, 0) + 1, tried + 1
                self._try(hope, columns, self.fastest)

    def _more_answers(self, left: npt.NDArray[np.int64]) -> None:
        """Quick answers of further columns that look about as fast as the best one, where the search ended with its gap open."""
        tried, of = 0, dict[Pipeline, int]()
        for hope in self._hopeful(left):
            if self.step(hope.seconds) >= NEAR * self.fastest or tried == MORE or self.late():
                return
            pipeline = self._pipeline_of(hope)
            new = (hope.row, hope.batch, hope.zero) not in self._tried and of.get(pipeline, 0) < 4 * EACH
            if new and (columns := self._columns_of(hope)):
                of[pipeline], tried = of.get(pipeline, 0) + 1, tried + 1
                self._try(hope, columns, self.fastest)

    def _near_answers(self) -> None:
        """Quick answers of columns near the best one, farther ones only once no nearer one is better."""
        far = 1
        while self.best is not None and far <= FAR and not self.late():
            before = self.best
            self._try_near(before, far)
            far = 1 if self.best is not before else far + 1

    def _try_near(self, best: Found, far: int) -> None:
        """Quick answers of columns whose degrees and micro batch are up to ``far`` factors of two from those of ``best``. What they promise
        is compared with what that one promised itself."""
        row, tried = self.rows.of(best.prefix, best.batch.micro_batch), 0
        near = hopes(self.core_costs, self.rows.near(row, far))
        mine = row, best.batch.schedule, best.shard.zero
        own = min((h.seconds for h in near if (h.row, h.batch.schedule, h.zero) == mine), default=0.0)
        for hope in near:
            if self.step(hope.seconds) >= NEAR * max(best.answer.seconds, self.step(own)) or tried == NEIGHBOURS:
                return
            if (hope.row, hope.batch, hope.zero) not in self._tried and (columns := self._columns_of(hope)):
                tried += 1
                self._try(hope, columns, NEAR * self.fastest)

    def _pipeline_of(self, hope: Hope) -> Pipeline:
        return hope.batch.schedule, int(self.rows.table[hope.row, 7]), hope.batch.vpp

    @cached_property
    def _row_hopes(self) -> npt.NDArray[np.float64]:
        """About how long the best step of a row takes, as far as rows tell: its bound, the pipeline's idle time, what memory asks for."""
        _, plain, tight, sharded = self.rows.bytes
        limit = self.job.limit_bytes
        recomputed = np.clip((plain - limit) / np.maximum(plain - tight, 1.0), 0.0, 1.0)
        slower = np.where(tight > limit, SHARDED, 1.0) * np.where(sharded > limit, UNFIT, 1.0)
        hopes_: npt.NDArray[np.float64] = self.row_bounds * (1 + self.rows.idle()) * (1 + RECOMPUTED * recomputed) * slower
        return hopes_

    def _hopeful(self, left: npt.NDArray[np.int64]) -> Iterator[Hope]:
        """Columns of the rows ``left``, the most hopeful first as far as rows say which ones to look at, some of them at a time."""
        hope, most = self._row_hopes[left], min(len(left), BLOCKS * ROWS)
        likely = np.argpartition(hope, most - 1)[:most] if most else left
        likely = likely[np.lexsort((likely, hope[likely]))]
        waiting: list[Hope] = []
        for place, start in enumerate(range(0, most, ROWS)):
            if place == len(self._hopes):
                self._hopes.append(hopes(self.core_costs, left[likely[start : start + ROWS]]))
            waiting = sorted([*waiting, *self._hopes[place]], key=lambda h: h.seconds)
            rest = float(hope[likely[start + ROWS]]) if start + ROWS < most else float("inf")
            ready = sum(self.step(h.seconds) <= rest for h in waiting)
            yield from waiting[:ready]
            waiting = waiting[ready:]
        yield from waiting

    def _columns_of(self, hope: Hope) -> list[Shard]:
        """The columns of a hope, one of each way to price them."""
        groups = self._likely(self.rows.prefixes[self.rows.at[hope.row]], hope.batch)
        return [shard for group in groups for shard in group if shard.zero == hope.zero]

    def _try(self, hope: Hope, columns: Sequence[Shard], limit: float) -> bool:
        """Quick answers within ``limit`` seconds; whether there is one."""
        prefix, found = self.rows.prefixes[self.rows.at[hope.row]], False
        self._tried.add((hope.row, hope.batch, hope.zero))
        for shard in columns:
            column, fitting = self.column(prefix, hope.batch, shard)
            answer = quick(column, fitting, self.policies(hope.batch, prefix), limit)
            self._keep(answer, prefix, hope.batch, shard)
            found = found or answer is not None
        return found

    # -- what fits at all -------------------------------------------------------------------------------------------

    def _lean_rows(self, most: int, smallest: bool = False) -> list[Row]:
        """Rows by the least bytes of their bound; ``smallest``: of the same degrees those with the smallest micro batch."""
        order = np.lexsort((self.rows.table[:, 5], self.row_bytes))
        order = order[self.rows.counts[order] > 0][:most]
        if smallest:
            order = np.flatnonzero(np.bincount(self.rows.start[self.rows.at[order]]))
        return [self.rows[int(i)] for i in order]

    def _lean_columns(self, row: Row, most: int) -> Iterator[tuple[Batch, Shard]]:
        """Of ``most`` batches of a row that have columns, as many columns each: the most sharded ones."""
        some = ((batch, shards) for batch in row.batches if (shards := self.space.columns_of(row.prefix, batch)))
        for batch, shards in islice(some, most):
            for shard in sorted(shards, key=lambda s: (-s.zero, -s.dp_shard, not s.offload))[:most]:
                yield batch, shard

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
            for batch, shard in self._lean_columns(row, 3):
                column, fitting = self.column(row.prefix, batch, shard)
                if quick(column, fitting, self.policies(batch, row.prefix)) is not None:
                    return True
        return False

    def leanest(self) -> tuple[str, StageMemory]:
        """(layout, fullest stage) of the layout that needs least among the leanest rows: everything sharded, all recomputed."""
        best: tuple[float, str, StageMemory] | None = None
        for row in self._lean_rows(LEAN, smallest=True):
            for batch, shard in self._lean_columns(row, 2):
                layout = self.space.layout(row.prefix, batch, shard, recompute=mode_text(self.modes[-1]))
                worst = fits(self.job, layout)[1]
                if best is None or worst.needed < best[0]:
                    best = (worst.needed, layout.text(), worst)
        if best is None:
            raise InputError("layout", "any", f"no layout of {self.job.cluster.gpus} GPUs is legal")
        return best[1], best[2]

    # -- runners-up -------------------------------------------------------------------------------------------------

    def _families(self, left: npt.NDArray[np.int64], extra: int) -> None:
        """Answers for further families (other degrees), the most hopeful first, for the runners-up."""
        if not extra or self.best is None:
            return
        seen = {family(f.prefix, f.shard)[:-1] for f in self.found.values()}
        tried: dict[tuple[int, ...], int] = {}
        for hope in self._hopeful(left):
            degrees, columns = family(self.rows.prefixes[self.rows.at[hope.row]], None)[:-1], self._columns_of(hope)
            if not columns or degrees in seen or tried.get(degrees, 0) == VAIN:
                continue
            tried[degrees] = tried.get(degrees, 0) + 1
            if self._try(hope, columns, float("inf")):
                seen.add(degrees)
            if len(seen) > extra + 3 or len(tried) > 4 * extra + 8 or self.late():
                return


def family(prefix: Prefix, shard: Shard | None) -> tuple[int, ...]:
    """What makes a layout really different: its degrees, and whether parameters are sharded."""
    return (prefix.tp, prefix.ring, prefix.ulysses, prefix.pp, prefix.ep, prefix.etp, int(shard is not None and shard.zero == 3))
