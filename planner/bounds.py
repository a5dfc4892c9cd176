"""Bounds on a step that need no integer program: valid for every choice of stages and recompute.

* ``work``: some rank is busy at least the average, ``m S / p`` (S: seconds of one microbatch through all layers).
* ``dual``: the longest of several paths is at least their weighted mean; under weights ``l`` (sum 1) a layer in chunk c costs
  ``sum_q l_q (a[q,c] f + b[q,c] b + w[q,c] w)``, so that ``sum over layers of the least such cost over chunks`` bounds every split. Weights
  are optimal for a linear program of one column and are kept: they bound every column with the same schedule shape.
* ``stages_table``: for schedules with one chunk a rank, dynamic programming over (rank, layers placed): the least makespan over the seed
  paths, memory's recompute included. It also gives the split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.columns import Paths, Units

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


# -- dynamic programming over stages --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """A split of layers over ranks: its bound (the least over all splits of the longest seed path), and the counts."""

    bound: float
    counts: tuple[int, ...]


def stages_table(
    paths: Paths, units: Units, prefix: npt.NDArray[np.int64], transfer: float, backward: Any, ends: Any, lowest: int, limit: float
) -> Split | None:
    """One chunk a rank: the split whose longest seed path is least, over all splits, exactly.

    ``prefix``: layers of each kind among the first i. ``backward(rank, start, stop)``: least recompute-and-input-gradient seconds of such a
    stage that fits in memory beyond ``units``' least (inf: none fits). ``ends(rank, start, stop)``: (start, end) seconds. ``lowest``: fewest
    layers of a stage. ``limit``: splits longer than this are of no interest. None where no split is within the limit, or fits.
    """
    f, b, w, _, _, p2p, first, last = paths.matrices
    ranks, layers = f.shape[1], len(prefix) - 1
    one = _through(units, prefix)
    chosen = _simple_paths(paths)
    total = _chunk_range(units, one, 0, layers, True, True)
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    back = np.zeros((ranks, layers + 1), np.int64)
    least_end = min(
        (ends(0, 0, n)[1] for n in range(lowest, layers - (ranks - 1) * lowest + 1) if np.isfinite(backward(0, 0, n))), default=0.0
    )
    for rank in range(ranks):
        after = ranks - 1 - rank
        now = np.full(layers + 1, np.inf)
        lo = rank * lowest
        for start in range(lo, layers - (after + 1) * lowest + 1):
            if best[start] > limit:
                continue
            stops = range(start + lowest, layers - after * lowest + 1) if after else (layers,)
            for stop in stops:
                extra = backward(rank, start, stop)
                if not np.isfinite(extra):
                    if stop > start + lowest:
                        break
                    continue
                own = _chunk_range(units, one, start, stop, rank == 0, rank == ranks - 1) + np.array([0.0, extra, 0.0])
                before = _chunk_range(units, one, 0, start, True, False) if rank else np.zeros(3)
                behind = total - before - own + np.array([0.0, extra, 0.0])
                begin, end = ends(rank, start, stop)
                height = 0.0
                for q, pre, post in chosen[rank]:
                    value = f[q, rank] * own[0] + b[q, rank] * own[1] + w[q, rank] * own[2] + p2p[q] * transfer
                    value += float(pre @ before) + float(post @ behind)
                    value += begin if first[q] == rank else 0.0
                    value += end if last[q] == rank else least_end if last[q] == 0 else 0.0
                    height = max(height, value)
                if height > limit:
                    if stop > start + lowest:
                        break
                    continue
                if max(best[start], height) < now[stop]:
                    now[stop] = max(best[start], height)
                    back[rank, stop] = start
        best = now
    if not np.isfinite(best[layers]):
        return None
    counts, stop = [], layers
    for rank in reversed(range(ranks)):
        start = int(back[rank, stop])
        counts.append(stop - start)
        stop = start
    return Split(float(best[layers]), tuple(reversed(counts)))


def _through(units: Units, prefix: npt.NDArray[np.int64]) -> Floats:
    """(L + 1) x 3: seconds (f, least b, w) of the first i layers."""
    seconds: Floats = prefix @ np.stack([units.f, units.b.min(axis=1), units.w], axis=1)
    return seconds


def _chunk_range(units: Units, one: Floats, start: int, stop: int, first: bool, last: bool) -> Floats:
    out: Floats = one[stop] - one[start]
    if first:
        out = out + np.array(units.embedding)
    if last:
        out = out + np.array(units.least_head)
    return out


def _simple_paths(paths: Paths) -> list[list[tuple[int, Floats, Floats]]]:
    """By rank, the paths that stay on it: (index, coefficients (f, b, w) of every chunk before it, and of every chunk after it)."""
    f, b, w, pf, pb, _, _, _ = paths.matrices
    ranks = f.shape[1]
    out: list[list[tuple[int, Floats, Floats]]] = [[] for _ in range(ranks)]
    for q in range(len(f)):
        if pf[q].any() or pb[q].any():
            continue
        table = np.stack([f[q], b[q], w[q]], axis=1)
        rank = int(table.sum(axis=1).argmax())
        before, behind = table[:rank], table[rank + 1 :]
        if (len(before) > 1 and (before != before[0]).any()) or (len(behind) > 1 and (behind != behind[0]).any()):
            continue
        out[rank].append((q, before[0] if len(before) else np.zeros(3), behind[0] if len(behind) else np.zeros(3)))
    return out
