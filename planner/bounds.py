"""Bounds on a step that need no integer program: valid for every choice of stages and recompute.

* ``work``: some rank is busy at least the average, ``m S / p`` (S: seconds of one microbatch through all layers).
* ``dual``: the longest of several paths is at least their weighted mean; under weights ``l`` (sum 1) a layer in chunk c costs
  ``sum_q l_q (a[q,c] f + b[q,c] b + w[q,c] w)``, so that ``sum over layers of the least such cost over chunks`` bounds every split. Weights
  are optimal for a linear program of one column and are kept: they bound every column with the same schedule shape.

For schedules with one chunk a rank ``planner.stages`` has a bound over the seed paths, memory's recompute included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.columns import Units
from planner.paths import Paths

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def work(units: Units, totals: Ints, microbatches: int, pp: int) -> float:
    """``m S / p`` seconds, S with the least recompute and pairs' savings taken off. ``totals``: layers by kind."""
    layers = float(totals @ units.least.sum(axis=1))
    return microbatches * (layers + sum(units.embedding) + sum(units.least_head)) / pp


@dataclass(frozen=True)
class Room:
    """What memory lets ranks hold, for the dual bound: by rank ``room`` bytes beside what is fixed, ``alive``: microbatches alive of the
    chunk with fewest (at the schedule's fullest moments, in the mean that makes this most), ``spare``: those alive beyond that with
    one layer a chunk; by layer kind ``state`` bytes and ``kept`` bytes by mode."""

    room: Floats
    alive: Floats
    spare: Floats
    state: Floats
    kept: Floats

    def only(self, mode: int) -> Room:
        """The same where every layer has one mode."""
        return Room(self.room, self.alive, self.spare, self.state, self.kept[:, [mode]])

    def segments(self, units: Units, kind: int) -> list[tuple[Floats, Floats]]:
        """(layers, recompute seconds of each) of ``kind`` that each rank can take, cheapest first.

        With every layer at level j of the lower hull of (seconds, bytes kept), a rank holds N_j = room / (state + alive kept_j) layers;
        between N_j and N_j+1 it mixes the two levels, and seconds grow linearly.
        """
        kept, b = self.kept[kind], units.b[kind]
        room = np.maximum(0.0, self.room - self.spare * kept.min())
        levels = _hull(b, kept)
        out: list[tuple[Floats, Floats]] = []
        before, spent = np.zeros(len(room)), np.zeros(len(room))
        for m in levels:
            with np.errstate(divide="ignore"):
                holds = np.where(room > 0, room / np.maximum(self.state[kind] + self.alive * kept[m], 1e-9), 0.0)
            holds = np.minimum(np.maximum(holds, before), 1e9)
            total = holds * (b[m] - b[levels[0]])
            with np.errstate(divide="ignore", invalid="ignore"):
                price = np.where(holds > before, (total - spent) / (holds - before), 0.0)
            out.append((holds - before, price))
            before, spent = holds, total
        return out


def _hull(b: Floats, kept: Floats) -> list[int]:
    """Modes on the lower convex hull of bytes over seconds, from the fastest on."""
    order = sorted(range(len(b)), key=lambda m: (b[m], kept[m]))
    hull: list[int] = []
    for m in order:
        if hull and kept[m] >= kept[hull[-1]]:
            continue
        while len(hull) > 1:
            p, q = hull[-2], hull[-1]
            if (kept[q] - kept[p]) * (b[m] - b[p]) >= (kept[m] - kept[p]) * (b[q] - b[p]):
                hull.pop()
            else:
                break
        hull.append(m)
    return hull


def dual(
    paths: Paths,
    weights: Floats,
    units: Units,
    totals: Ints,
    transfer: float,
    update: Floats | None = None,
    room: Room | None = None,
) -> float:
    """The bound of one set of weights (see the module). ``update``: optimizer seconds of a layer, by kind, at the end of its rank;
    ``room``: recompute that memory makes necessary counts too (inf: the layers do not fit)."""
    f, b, w, pf, pb, p2p, _, last = paths.matrices
    known = len(weights)
    cf, cb, cw = weights @ f[:known], weights @ b[:known], weights @ w[:known]
    hf, hb = weights @ pf[:known], weights @ pb[:known]
    least = np.outer(cf, units.f) - np.outer(hf, units.sf) + np.outer(cw, units.w)
    least = least + np.outer(cb - hb, units.b.min(axis=1)) + np.outer(hb, (units.b - units.sb).min(axis=1))
    if update is not None:
        ends = np.bincount(last[:known], weights=weights, minlength=paths.key[1])
        least = least + np.outer(ends[paths.ranks], update)
    total = float(cf[0] * units.embedding[0] + cb[0] * units.embedding[1] + cw[0] * units.embedding[2])
    h = units.least_head
    total += float(cf[-1] * h[0] + cb[-1] * h[1] + cw[-1] * h[2]) + float(weights @ p2p[:known]) * transfer
    main = int(totals.argmax())
    cheapest = least.min(axis=0)
    if room is None or paths.key[0] == "dualpipe":
        return total + float(totals @ cheapest)
    total += float(totals @ cheapest) - float(totals[main] * cheapest[main])
    return total + _filled(paths, least[:, main], np.maximum(cb - hb, 0.0), float(totals[main]), units, main, room)


def _filled(paths: Paths, cost: Floats, backward: Floats, layers: float, units: Units, kind: int, room: Room) -> float:
    """Least total of layer costs when each rank takes its layers without recompute first, then ones that cost recompute."""
    ranks = paths.key[1]
    each, again = np.full(ranks, np.inf), np.full(ranks, np.inf)
    np.minimum.at(each, paths.ranks, cost)
    np.minimum.at(again, paths.ranks, backward)
    parts = room.segments(units, kind)
    price = np.concatenate([each + np.where(seconds > 0, again * seconds, 0.0) for _, seconds in parts])
    size = np.concatenate([held for held, _ in parts])
    total = 0.0
    for i in np.argsort(price, kind="stable"):
        take = min(layers, float(size[i]))
        if take > 0:
            total += take * float(price[i])
            layers -= take
    return total if layers <= 1e-9 else float("inf")


def improve(
    paths: Paths, units: Units, totals: Ints, transfer: float, column: Any = None, rounds: int = 6, update: Floats | None = None
) -> float:
    """The linear program over chunk sizes for one column: its optimal weights are kept in ``paths.duals``; the bound is returned.

    ``column``: simulates the fractional optimum and adds its critical path, up to ``rounds`` times.
    """
    best = 0.0
    layers = int(totals.sum())
    mean = (totals @ np.stack([units.f, (units.b).min(axis=1), units.w], axis=1)) / layers
    for turn in range(rounds):
        solved = _relaxed(paths, mean, units, layers, transfer)
        if solved is None:
            return best
        value, sizes, weights = solved
        paths.duals.append(weights)
        best = max(best, dual(paths, weights, units, totals, transfer, update))
        if column is None or turn + 1 == rounds:
            return best
        timeline = column.fractional(sizes, mean)
        if timeline.seconds <= value * (1 + 1e-6) or not paths.add(timeline.path):
            return best
    return best


def _relaxed(paths: Paths, mean: Floats, units: Units, layers: int, transfer: float) -> tuple[float, Floats, Floats] | None:
    """min T over fractional chunk sizes: T >= every path. (T, sizes, dual weights); None without HiGHS."""
    try:
        import highspy
    except ImportError:
        return None
    from planner.solver import silent

    f, b, w, _, _, p2p, _, _ = paths.matrices
    chunks = f.shape[1]
    cost = f * mean[0] + b * mean[1] + w * mean[2]
    e, h = units.embedding, units.least_head
    fixed = p2p * transfer + f[:, 0] * e[0] + b[:, 0] * e[1] + w[:, 0] * e[2] + f[:, -1] * h[0] + b[:, -1] * h[1] + w[:, -1] * h[2]
    scale = float(cost.max()) or 1.0
    rows, columns = len(fixed), chunks + 1
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, rows + 1
    lp.col_cost_ = np.r_[np.zeros(chunks), 1.0]
    lp.col_lower_ = np.zeros(columns)
    lp.col_upper_ = np.r_[np.full(chunks, float(layers)), highspy.kHighsInf]
    lp.row_lower_ = np.r_[fixed / scale, float(layers)]
    lp.row_upper_ = np.r_[np.full(rows, highspy.kHighsInf), float(layers)]
    matrix = np.zeros((rows + 1, columns))
    matrix[:rows, :chunks] = -cost / scale
    matrix[:rows, chunks] = 1.0
    matrix[rows, :chunks] = 1.0
    start = np.arange(0, (rows + 1) * columns + 1, columns, dtype=np.int32)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = start
    lp.a_matrix_.index_ = np.tile(np.arange(columns, dtype=np.int32), rows + 1)
    lp.a_matrix_.value_ = matrix.ravel()
    with silent():
        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.passModel(lp)
        solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    solution = solver.getSolution()
    weights = np.maximum(0.0, np.array(solution.row_dual)[:rows])
    if weights.sum() <= 0:
        return None
    return float(solution.col_value[chunks]) * scale, np.array(solution.col_value)[:chunks], weights / weights.sum()
