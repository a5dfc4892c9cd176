"""A better answer near one of several chunks a rank: recompute moved between the chunks of a rank, its layers where they are.

The least recompute that fits a rank is one of many that take as long, and which chunks have it decides who waits for whom. A neighbour of an
answer gives one or two chunks of a rank another mix of their menus, so that the rank still fits. Those that a kept path makes no
faster are left out; the schedule is run for all others at once, and the fastest one is simulated and counted in full before it is an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from cost_models.arrays import distinct
from cost_models.dependencies import graph
from cost_models.pipeline import makespans
from planner.columns import Column
from planner.fitting import Fitting, Policy
from planner.least_recompute import RankMixes, rank_mixes
from planner.program import Answer

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
ROUNDS = 24
"""Times an answer is replaced by a neighbour at most."""
RUN, FEW = 1_000_000, 32
"""Actions of all neighbours run at once at most; neighbours that are worth it."""
FASTER = 1e-9
"""Relative difference of seconds from which on a neighbour is faster."""


def polished(column: Column, fitting: Fitting, policy: Policy, answer: Answer, goal: float) -> Answer:
    """The answer, or a faster one with the same stages: as soon as a step takes ``goal`` seconds at most, or no neighbour is faster."""
    layout = column.layout
    if answer.seconds <= goal or layout.vpp == 1 or not policy.free or layout.schedule == "dualpipe":
        return answer
    starts = np.cumsum([0, *answer.stages]).tolist()
    spans = [(starts[c], starts[c + 1]) for c in range(column.chunks)]
    ranks = [rank_mixes(fitting, policy, rank, [spans[c] for c in fitting.held(rank)]) for rank in range(layout.pp)]
    near = _Neighbours(column, fitting, ranks)
    if any(mix not in some for some, mix in zip(near.mixes, answer.mixes, strict=True)):
        return answer
    for _ in range(ROUNDS):
        better = near.best(answer) if answer.seconds > goal else None
        if better is None:
            break
        answer = better
    return answer


@dataclass
class _Neighbours:
    """The neighbours of answers with the same stages: by rank what its mixes are chosen under."""

    column: Column
    fitting: Fitting
    ranks: Sequence[RankMixes]

    def __post_init__(self) -> None:
        column, last = self.column, self.column.chunks - 1
        menus = {c: one for rank, some in enumerate(self.ranks) for c, one in zip(self.fitting.held(rank), some.menus, strict=True)}
        self.mixes = [menus[c].mixes for c in range(column.chunks)]
        self.seconds = [
            np.array([column.chunk_seconds(m, first=c == 0, last=c == last, tail=column.tail_of(m))[:3] for m in some]).T
            for c, some in enumerate(self.mixes)
        ]
        """By chunk: forward, backward, weight gradient x mix."""

    def best(self, answer: Answer) -> Answer | None:
        """The fastest neighbour; None where none is faster."""
        column, layout = self.column, self.column.layout
        picks = np.array([some.index(mix) for some, mix in zip(self.mixes, answer.mixes, strict=True)])
        timeline = column.simulate(answer.mixes)
        column.paths.add(timeline.path)
        _, starts, ends = column.laid(answer.mixes)
        rows = np.concatenate([self._moves(rank, picks, column.paths.place(timeline.path)) for rank in range(layout.pp)])
        if not len(rows):
            return None
        bar = timeline.seconds * (1 - FASTER)
        f, b, w = (np.stack([self.seconds[c][part][rows[:, c]] for c in range(column.chunks)], axis=1) for part in range(3))
        bounds = self._along_paths(f, b, w, np.array(starts), np.array(ends))
        order = np.argsort(bounds, kind="stable")
        nodes = len(graph(layout.schedule, layout.pp, layout.vpp, column.microbatches).kind)
        order = order[bounds[order] < bar][: max(FEW, RUN // nodes)]
        if not len(order):
            return None
        seconds = makespans(
            layout.schedule, layout.pp, layout.vpp, column.microbatches, f[order], b[order], w[order], column.transfer,
            blocking=column.blocking, starts=starts, ends=ends,
        )  # fmt: skip
        for i in np.argsort(seconds, kind="stable")[:FEW]:
            if seconds[i] >= bar:
                return None
            mixes = tuple(some[p] for some, p in zip(self.mixes, rows[order[i]], strict=True))
            step = float(column.step(column.simulate(mixes).seconds))
            if step < answer.seconds and self.fitting.fits(answer.stages, mixes):
                return Answer(step, answer.stages, mixes, column, answer.bound)
        return None

    def _along_paths(self, f: Floats, b: Floats, w: Floats, starts: Floats, ends: Floats) -> Floats:
        """By row of chunks' seconds: the longest kept path."""
        pf, pb, pw, _, _, p2p, first, last = self.column.paths.matrices
        fixed = p2p * self.column.transfer + starts[first] + ends[last]
        longest: Floats = (f @ pf.T + b @ pb.T + w @ pw.T + fixed).max(axis=1)
        return longest

    def _moves(self, rank: int, picks: Ints, path: int) -> Ints:
        """Picks of every chunk where one or two of a rank's chunks have another mix, the rank fits, and a path is shorter."""
        held, choices = self.fitting.held(rank), self.ranks[rank]
        matrices = [m[path] for m in self.column.paths.matrices[:3]]
        gain = [sum(m[c] * (s - s[picks[c]]) for m, s in zip(matrices, self.seconds[c], strict=True)) for c in held]
        used = sum(load[:, picks[c]] for c, load in zip(held, choices.loads, strict=True))
        most = np.array([beside[:, picks[c]] for c, beside in zip(held, choices.beside, strict=True)])
        out = []
        for i, j in combinations(range(len(held)), 2):
            c, d = held[i], held[j]
            p, q = np.nonzero(gain[i][:, None] + gain[j] < 0)
            if not len(p):
                continue
            rest = used - choices.loads[i][:, picks[c]] - choices.loads[j][:, picks[d]]
            others = np.delete(most, (i, j), axis=0).max(axis=0, initial=-np.inf)
            beside = np.maximum(np.maximum(choices.beside[i][:, p], choices.beside[j][:, q]), others[:, None])
            fits = (rest[:, None] + choices.loads[i][:, p] + choices.loads[j][:, q] + beside <= choices.room).all(axis=0)
            rows = np.tile(picks, (int(fits.sum()), 1))
            rows[:, c], rows[:, d] = p[fits], q[fits]
            out.append(rows)
        every = np.concatenate(out) if out else np.zeros((0, len(picks)), np.int64)
        return every[distinct(every)[0]]
