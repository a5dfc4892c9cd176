"""The integer program over stages and recompute, of one column or of several at once.

For column c, chunk s and pattern p (the layers [start, stop) the chunk holds, and its recompute mix):

    x[c] in {0, 1}          the column is chosen            one_column:   sum_c x[c] = 1
    y[c, s, p] in {0, 1}    its chunk s has pattern p       one_pattern:  sum_p y[c, s, p] = x[c]
    every layer once and in order                           in_order:     where a chunk's pattern stops, the next one's starts
                                                            all_layers:   or, where all layers are alike, sum_{s,p} n_p y = L x[c]
    bytes of every rank, at each snapshot of the schedule   memory:       static + kept + beyond <= limit
    z, the pipeline's seconds and what follows              longest_path: z >= sum coefficients of y, for every path kept so far
    minimise z

``longest_path`` starts from the seed paths; the answer is simulated, and while its makespan exceeds z its critical path is added (valid for
every answer, tight for this one) and the program solved again. Ends (gradient reduction, optimizer) are coefficients of the patterns of
the path's first and last rank; where a rank holds several chunks its end is bounded from below by what its layers alone need, and the
difference stays in the gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cost_models.layout import ZERO_BUBBLE
from cost_models.memory import Fixed, beyond_kept
from cost_models.schedules import holds
from cost_models.state_bytes import States
from planner.columns import Column, Mix
from planner.fitting import Fitting, Policy

TOLERANCE = 1e-7
"""Relative difference below which a simulated makespan meets the program's bound."""


@dataclass(frozen=True)
class Pattern:
    start: int
    stop: int
    mix: Mix

    @property
    def layers(self) -> int:
        return self.stop - self.start


@dataclass
class Answer:
    """Seconds of the step, the stages and mixes; ``bound``: no choice of the columns asked is faster."""

    seconds: float
    stages: tuple[int, ...]
    mixes: tuple[Mix, ...]
    column: Column
    bound: float
    cuts: int = 0


Polish = Callable[[Answer, float], Answer]
"""(an answer, the seconds that are enough) -> it, or a faster one of its column."""


@dataclass
class Block:
    """One column inside the program."""

    column: Column
    fitting: Fitting
    policy: Policy
    patterns: list[list[Pattern]]
    rank_ends: Sequence[tuple[float, float]] = ()
    """(start, end) of each rank, where all patterns of a chunk hold the same layers."""
    chosen: Any = None
    y: list[list[Any]] = field(default_factory=list)
    paths_in: int = 0
    seconds: list[list[tuple[float, float, float, float, float]]] = field(default_factory=list)
    end: list[list[tuple[float, float]]] = field(default_factory=list)


class Program:
    """The program over ``blocks``; ``limit``: steps at or beyond it are of no interest."""

    def __init__(self, blocks: Sequence[Block], limit: float) -> None:
        import pulp

        self.pulp, self.blocks, self.limit = pulp, list(blocks), limit
        self.model = pulp.LpProblem("axisplan", pulp.LpMinimize)
        self.scale = limit if np.isfinite(limit) and limit > 0 else 1.0
        self.z = pulp.LpVariable("z", lowBound=0)
        self.model += self.z
        self.cuts = 0
        self.stopped = False
        """Whether a node limit ended the last solution without an answer: nothing is known then beyond the bounds before."""
        for number, block in enumerate(self.blocks):
            self._variables(number, block)
        self.one_column()
        for number, block in enumerate(self.blocks):
            self.one_pattern(number, block)
            if block.column.job.model.pattern.count(block.column.job.model.pattern[0]) == block.column.layers:
                self.all_layers(number, block)
            else:
                self.in_order(number, block)
            self.memory(number, block)
            self.longest_path(number, block)

    def _variables(self, number: int, block: Block) -> None:
        pulp, column = self.pulp, block.column
        block.chosen = pulp.LpVariable(f"x_{number}", cat="Binary")
        last = column.chunks - 1
        for chunk, patterns in enumerate(block.patterns):
            block.y.append([pulp.LpVariable(f"y_{number}_{chunk}_{i}", cat="Binary") for i in range(len(patterns))])
            block.seconds.append([
                column.chunk_seconds(p.mix, first=chunk == 0, last=chunk == last, tail=column.tail_of(p.mix)) for p in patterns
            ])  # fmt: skip
            block.end.append([_ends(block, chunk, p) for p in patterns])

    # -- constraint families ----------------------------------------------------------------------------------------

    def one_column(self) -> None:
        self.model += self.pulp.lpSum(b.chosen for b in self.blocks) == 1, "one_column"

    def one_pattern(self, number: int, block: Block) -> None:
        for chunk, variables in enumerate(block.y):
            self.model += self.pulp.lpSum(variables) == block.chosen, f"one_pattern_{number}_{chunk}"

    def all_layers(self, number: int, block: Block) -> None:
        terms = [
            (v, p.layers) for ps, vs in zip(block.patterns, block.y, strict=True) for p, v in zip(ps, vs, strict=True) if p.layers
        ]
        self.model += self._sum(terms) == block.column.layers * block.chosen, f"all_layers_{number}"

    def in_order(self, number: int, block: Block) -> None:
        for chunk in range(block.column.chunks - 1):
            stops: dict[int, list[tuple[Any, float]]] = {}
            for p, v in zip(block.patterns[chunk], block.y[chunk], strict=True):
                stops.setdefault(p.stop, []).append((v, 1.0))
            for p, v in zip(block.patterns[chunk + 1], block.y[chunk + 1], strict=True):
                stops.setdefault(p.start, []).append((v, -1.0))
            for at, terms in sorted(stops.items()):
                self.model += self._sum(terms) == 0, f"in_order_{number}_{chunk}_{at}"

    def memory(self, number: int, block: Block) -> None:
        """Bytes of every rank at each snapshot: static bytes by pattern, kept activations, and the most that exists beyond them."""
        fitting, column = block.fitting, block.column
        for rank in range(column.layout.pp):
            fixed, each = _fixed_lines(block, rank)
            execution = column.job.execution
            slack = execution.slack
            room = (fitting.limit - execution.workspace_bytes - fixed.outside) / slack - fixed.states.total - fixed.lasting
            unit = max(abs(room), 1.0)
            whole = column.layout.schedule not in ZERO_BUBBLE
            for place, snapshot in enumerate(fitting.snapshots[rank]):
                beyond = self.pulp.LpVariable(f"beyond_{number}_{rank}_{place}", lowBound=0)
                terms: list[tuple[Any, float]] = [(beyond, 1.0)]
                for chunk, alive, waiting in snapshot:
                    moments: dict[str, list[tuple[Any, float]]] = {}
                    for p, v in zip(block.patterns[chunk], block.y[chunk], strict=True):
                        memory = fitting.chunk(chunk, p.mix)
                        states = sum(n * e for n, e in zip(fitting.counts(p.start, p.stop), each, strict=True))
                        terms.append((v, (states + alive * float(memory.kept) + waiting * float(memory.weight_pass)) / unit))
                        for name, size in beyond_kept(memory, alive, waiting, fixed.gathered, whole and not holds(snapshot)):
                            moments.setdefault(name, [(beyond, -1.0)]).append((v, float(size) / unit))
                    for name, most in moments.items():
                        self.model += self._sum(most) <= 0, f"{name.split()[0]}_{number}_{rank}_{place}_{chunk}"
                self.model += self._sum(terms) <= room / unit * block.chosen, f"memory_{number}_{rank}_{place}"

    def longest_path(self, number: int, block: Block) -> int:
        """Rows for the paths not yet in the program; how many were added."""
        column = block.column
        rows = column.paths.rows
        added = 0
        for q in range(block.paths_in, len(rows)):
            path = rows[q]
            transfers = float(np.sum(path.p2p_forward) + np.sum(path.p2p_backward)) * column.transfer
            terms: list[tuple[Any, float]] = [(block.chosen, column.step(transfers) / self.scale)]
            firsts, lasts = block.fitting.held(path.first), block.fitting.held(path.last)
            for chunk in range(column.chunks):
                cf, cb, cw = path.forward[chunk], path.backward_input[chunk], path.backward_weight[chunk]
                hf, hb = path.paired_forward[chunk], path.paired_backward[chunk]
                for i, v in enumerate(block.y[chunk]):
                    f, b, w, sf, sb = block.seconds[chunk][i]
                    value = cf * f + cb * b + cw * w - hf * sf - hb * sb
                    if chunk in firsts:
                        value += block.end[chunk][i][0]
                    if chunk in lasts:
                        value += block.end[chunk][i][1]
                    if value:
                        terms.append((v, value * column.slowing / self.scale))
            self.model += self._sum(terms) <= self.z, f"longest_path_{number}_{q}"
            added += 1
        block.paths_in = len(rows)
        return added

    # -- solving ----------------------------------------------------------------------------------------------------

    def solve(
        self,
        *,
        rounds: int = 60,
        nodes: int = 20_000,
        floor: float = 0.0,
        deadline: float | None = None,
        gap: float = TOLERANCE,
        polish: Polish | None = None,
    ) -> Answer | None:
        """Cut until the answer's makespan is within ``gap`` of the bound. None: no choice is faster than ``limit`` (or fits), unless
        ``stopped``: rounds, nodes or the ``deadline`` (``time.monotonic()``) ended it before it knew. ``polish``: an answer near one
        that is longer than the bound says."""
        from planner.solver import bound_of, run

        best: Answer | None = None
        bound = floor
        for _ in range(rounds):
            self.z.lowBound = bound / self.scale
            if np.isfinite(self.limit):
                self.z.upBound = min(self.limit, best.seconds if best else self.limit) / self.scale
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            status = run(self.model, nodes=nodes, seconds=left)
            if status is None:
                if best is not None:
                    best.bound = best.seconds
                return best
            if status == "unknown":
                self.stopped = True
                return best
            bound = max(bound, bound_of(self.model) * self.scale)
            block = next(b for b in self.blocks if b.chosen.value() > 0.5)
            picks = [max(range(len(vs)), key=lambda i, vs=vs: vs[i].value()) for vs in block.y]  # type: ignore[misc]
            patterns = [block.patterns[c][i] for c, i in enumerate(picks)]
            stages, mixes = tuple(p.layers for p in patterns), tuple(p.mix for p in patterns)
            if not block.fitting.fits(stages, mixes):
                self._forbid(block, picks)
                continue
            timeline = block.column.simulate(mixes)
            seconds = block.column.step(timeline.seconds)
            one = Answer(seconds, stages, mixes, block.column, bound)
            if polish is not None:
                one = polish(one, bound * (1 + gap))
            if best is None or one.seconds < best.seconds:
                best = one
            best.bound, best.cuts = min(bound, best.seconds), self.cuts
            if best.seconds <= bound * (1 + gap):
                return best
            block.column.paths.add(timeline.path)
            if not sum(self.longest_path(n, b) for n, b in enumerate(self.blocks) if b.column.paths is block.column.paths):
                self._forbid(block, picks)
            self.cuts += 1
        self.stopped = True
        return best

    def _forbid(self, block: Block, picks: Sequence[int]) -> None:
        """This very choice no more: it does not fit, or its ends are longer than the program can say; its value is recorded."""
        self.cuts += 1
        chosen = [block.y[c][i] for c, i in enumerate(picks)]
        self.model += self.pulp.lpSum(chosen) <= len(chosen) - 1, f"forbid_{self.cuts}"

    def _sum(self, terms: Sequence[tuple[Any, float]]) -> Any:
        return self.pulp.LpAffineExpression(list(terms))


def _ends(block: Block, chunk: int, pattern: Pattern) -> tuple[float, float]:
    """(start, end) of the rank that holds ``chunk`` as a coefficient of its pattern: exact where the rank has no other chunk; else the
    optimizer's seconds of the chunk's own weights."""
    column = block.column
    if block.rank_ends:
        rank = column.layout.rank_of_chunk(chunk)
        return block.rank_ends[rank] if chunk == block.fitting.held(rank)[0] else (0.0, 0.0)
    last = chunk == column.chunks - 1
    one = column.chunk(pattern.mix, first=chunk == 0, last=last, tail=column.tail_of(pattern.mix))
    rank = column.layout.rank_of_chunk(chunk) if column.layout.schedule != "dualpipe" else chunk
    if len(block.fitting.held(rank)) == 1:
        return column.ends(rank, [one])
    from cost_models.update import optimizer_seconds

    if column.job.optimizer == "muon":
        return 0.0, 0.0
    return 0.0, optimizer_seconds(column.job, column.layout, one.weights)


def _fixed_lines(block: Block, rank: int) -> tuple[Fixed, tuple[float, ...]]:
    """(what a rank holds without any layer, bytes of states a layer by kind).

    States are a sum over layers; buffers do not grow with them. What is not linear (Muon's whole matrices) is met by checking the answer.
    """
    fitting = block.fitting
    spans = [(block.patterns[c][0].start, block.patterns[c][0].stop) for c in fitting.held(rank)]
    base, each = fitting.static(rank, spans), fitting.layer_states
    counts = np.sum([fitting.counts(*s) for s in spans], axis=0)
    return replace(base, states=base.states + States(-float(np.dot(counts, each)), 0.0, 0.0, 0.0)), each
