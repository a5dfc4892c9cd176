"""Which columns look fast: about how long their step takes, by arrays. An estimate, not a bound: it says what to try first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.core_costs import CoreCosts, Pipeline
from planner.rows import idle
from planner.shapes import Costs
from planner.space import Batch
from planner.splits import Splits

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SCHEDULES, MOST = 4, 400
"""Schedules of a row looked at, those with the least idle time; columns told of at most."""


@dataclass(frozen=True, slots=True)
class Hope:
    """Columns of a core under a ZeRO stage over all of data parallelism, and about how many ``seconds`` of pipeline they take."""

    seconds: float
    row: int
    batch: Batch
    zero: int


def hopes(costs: CoreCosts, which: Ints) -> list[Hope]:
    """The columns of rows ``which`` whose ranks have room with the most recompute, the most hopeful ones first."""
    parts = _by_pipeline(costs, _most_sharded(costs, which))
    seconds = [_seconds(costs, pipeline, splits, share) for pipeline, splits, _, share in parts]
    part = np.repeat(np.arange(len(parts)), [len(s) for s in seconds])
    place = np.concatenate([np.arange(len(s)) for s in seconds])
    every = np.concatenate(seconds)
    out = []
    for i in np.argsort(every, kind="stable")[:MOST]:
        _, splits, batches, _ = parts[part[i]]
        if np.isfinite(every[i]):
            at = place[i]
            out.append(Hope(float(every[i]), int(splits.row[at]), batches[at], int(splits.zero[at])))
    return out


def _most_sharded(costs: CoreCosts, which: Ints) -> Splits:
    """Every ZeRO stage over all of data parallelism."""
    rows, limits = costs.rows, costs.rows.space.limits
    table, parts = rows.table[which], []
    for zero in sorted({0, *limits.zero}):
        legal = (table[:, 7] == 1) | (zero <= limits.max_zero_with_pp)
        for mask in (legal & (table[:, 9] == 1), legal & (table[:, 9] > 1)):
            if mask.any():
                parts.append(Splits.of(rows, which[mask], zero, table[mask, 8] if zero else np.ones(int(mask.sum()), np.int64)))
    return Splits.joined(parts)


def _by_pipeline(costs: CoreCosts, splits: Splits) -> list[tuple[Pipeline, Splits, list[Batch], Floats]]:
    """(pipeline, its columns, each one's batch and idle share of the time) for the schedules of each row that idle least."""
    rows, layers = costs.rows, costs.main.layers
    by: dict[Pipeline, dict[int, tuple[Batch, float]]] = {}
    for slot, at in zip(*np.unique(rows.slot[splits.row], return_index=True), strict=True):
        pp = int(rows.table[splits.row[at], 7])
        shares = {b: idle(b, pp, layers) for b in rows.slots[slot]}
        best = {b.schedule: b for b in sorted(shares, key=lambda b: (-shares[b], -b.vpp))}
        for batch in sorted(best.values(), key=lambda b: shares[b])[:SCHEDULES]:
            by.setdefault((batch.schedule, pp, batch.vpp), {})[int(slot)] = batch, shares[batch]
    slots, out = rows.slot[splits.row], []
    for pipeline, batches in sorted(by.items()):
        at = np.flatnonzero(np.isin(slots, list(batches)) & (rows.table[splits.row, 7] == pipeline[1]))
        mine = [batches[slot] for slot in slots[at].tolist()]
        out.append((pipeline, splits.take(at), [b for b, _ in mine], np.array([share for _, share in mine])))
    return out


def _seconds(costs: CoreCosts, pipeline: Pipeline, splits: Splits, share: Floats) -> Floats:
    """About how many seconds of pipeline columns take that idle for a ``share`` of their work; inf where they do not fit."""
    seconds: Floats = splits.work * (1 + share)
    if pipeline[0] == "dualpipe":  # what its ranks have in flight is not known by arrays
        return np.where(splits.roomy(costs.rows), seconds, np.inf)
    some, flying = costs.costs(splits, pipeline), costs.flying(pipeline, splits.row)
    alive, waiting = (np.mean([getattr(g, name) for g in flying.moments[0]], axis=0) for name in ("alive", "waiting"))
    seconds = seconds + costs.rows.table[splits.row, 9] * _again(some, alive, waiting, costs.main.layers / pipeline[1])
    return np.where(some.roomy(flying, pipeline[2], costs.main.layers, costs.leading(pipeline[1])), seconds, np.inf)


def _again(c: Costs, alive: Floats, waiting: Floats, layers: float) -> Floats:
    """By column: about how many seconds of recompute a microbatch needs on the rank that needs most, each with as many layers, by the mode
    that asks for least."""
    top = c.kept.max(axis=1)[:, None]
    over = layers * (c.state[:, None] + alive * top + waiting * c.waits[:, None]) - c.room
    whole = c.kept.argmin(axis=1)
    least = layers * np.take_along_axis(c.again, whole[:, None], axis=1)[:, 0]
    best = np.broadcast_to(least[:, None], over.shape)
    for mode in range(c.kept.shape[1]):
        saved = np.maximum(alive * (top - c.kept[:, mode, None]), 1e-30)
        number = np.maximum(over, 0.0) / saved
        best = np.where(number <= layers, np.minimum(best, number * c.again[:, mode, None]), best)
    out: Floats = np.where(over > 0, best, 0.0).max(axis=1)
    return out
