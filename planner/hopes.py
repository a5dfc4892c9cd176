"""Which columns look fast: about how long their step takes, by arrays. An estimate, not a bound: it says what to try first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models.layout import V_SHAPED
from planner.column_costs import Costs
from planner.columns import prefix_counts
from planner.core_costs import CoreCosts, Pipeline
from planner.dealing import dealt
from planner.flying import Flying, Moment
from planner.heuristic import balanced
from planner.paths import ranks_of
from planner.rows import bubble, idle
from planner.space import Batch
from planner.splits import Splits

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MOST = 400
"""Columns told of at most."""


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
    rows, table, parts = costs.rows, costs.rows.table[which], []
    for piped in (False, True):
        for zero in rows.space.zero_stages(piped):
            for once in (False, True):
                mask = ((table[:, 7] > 1) == piped) & ((table[:, 9] == 1) == once)
                if mask.any():
                    parts.append(Splits.of(rows, which[mask], zero, table[mask, 8] if zero else np.ones(int(mask.sum()), np.int64)))
    return Splits.joined(parts)


def _by_pipeline(costs: CoreCosts, splits: Splits) -> list[tuple[Pipeline, Splits, list[Batch], Floats]]:
    """(pipeline, its columns, each one's batch and idle share of the time): of each schedule the number of chunks that idles least."""
    rows, layers = costs.rows, costs.main.layers
    by: dict[Pipeline, dict[int, tuple[Batch, float]]] = {}
    for slot, at in zip(*np.unique(rows.slot[splits.row], return_index=True), strict=True):
        pp = int(rows.table[splits.row[at], 7])
        best = {b.schedule: b for b in sorted(rows.slots[slot], key=lambda b: (-idle(b, pp, layers), -b.vpp))}
        if len(best) > 1:
            best.pop("gpipe", None)  # 1F1B takes as long and holds less
        for batch in best.values():
            by.setdefault((batch.schedule, pp, batch.vpp), {})[int(slot)] = batch, bubble(batch, pp, layers)
    slots, out = rows.slot[splits.row], []
    for pipeline, batches in sorted(by.items()):
        at = np.flatnonzero(np.isin(slots, list(batches)) & (rows.table[splits.row, 7] == pipeline[1]))
        mine = [batches[slot] for slot in slots[at].tolist()]
        out.append((pipeline, splits.take(at), [b for b, _ in mine], np.array([share for _, share in mine])))
    return out


def _seconds(costs: CoreCosts, pipeline: Pipeline, splits: Splits, share: Floats) -> Floats:
    """About how many seconds of pipeline columns take that idle for a ``share`` of their fullest rank's work; inf where they do not fit."""
    schedule, pp, vpp = pipeline
    if schedule == "dualpipe":  # what its ranks have in flight is not known by arrays
        return np.where(splits.roomy(costs.rows), splits.work * (1 + share), np.inf)
    some, flying, layers = costs.costs(splits, pipeline), costs.flying(pipeline, splits.row), costs.main.layers
    if costs.main.kind is None:
        fits, microbatch = _mixed(costs, pipeline, splits, some, flying)
    else:
        inner = slice(costs.main.first, pp - 1)  # ranks of layers of one kind alone
        state, least, waits = some.state[:, None], some.kept.min(axis=1)[:, None], some.waits[:, None]
        needs = np.array([layers / pp * _bytes(state, least, waits, moment) for moment in flying.moments])
        fits = np.asarray((needs <= some.room)[:, :, inner].all(axis=(0, 2)))
        microbatch = _fullest(some, pp, layers, costs.main.first, folded=schedule in V_SHAPED) + _again(some, flying, layers / pp)
    fits &= some.roomy(flying, vpp, layers, costs.main.first)
    return np.where(fits, costs.rows.table[splits.row, 9] * microbatch * (1 + share), np.inf)


def _bytes(state: Floats, kept: Floats, waits: Floats, moment: Moment) -> Floats:
    """Bytes at a full moment, a rank's chunks alike."""
    alive, waiting = (np.mean([getattr(g, name) for g in moment], axis=0) for name in ("alive", "waiting"))
    out: Floats = state + alive * kept + waiting * waits
    return out


def _mixed(
    costs: CoreCosts, pipeline: Pipeline, splits: Splits, some: Costs, flying: Flying
) -> tuple[npt.NDArray[np.bool_], Floats]:
    """(whether every rank has room with the most recompute, seconds a microbatch of the fullest rank with what it needs) where kinds of layers
    take turns: each rank has those that an even deal gives it."""
    schedule, pp, vpp = pipeline
    layers, chunks, k = costs.main.layers, pp * vpp, costs.rows.key[splits.row]
    ranks, even = ranks_of(schedule, pp, chunks), balanced(layers, pp, 0.0, 0.0, vpp)
    stops = np.cumsum([0, *(even if vpp == 1 else dealt(ranks, even, vpp))])
    counts, prefix = np.zeros((pp, len(costs.main.totals))), prefix_counts(costs.job)
    np.add.at(counts, ranks, prefix[stops[1:]] - prefix[stops[:-1]])
    b, parts = splits.bulk.b, costs.rows.kept
    least = b.min(axis=2)
    seconds = (splits.bulk.f + least + splits.bulk.w) @ counts.T
    seconds[:, 0] += some.embedding.sum(axis=1)
    seconds[:, 0 if schedule in V_SHAPED else pp - 1] += some.head.sum(axis=1)
    kept, again = np.einsum("nkm,rk->mnr", parts.kept[k], counts), np.einsum("nkm,rk->mnr", b - least[:, :, None], counts)
    state, waits, extra, fits = splits.state @ counts.T, parts.waits[k] @ counts.T, np.zeros_like(seconds), np.ones(len(some), bool)
    for moment in flying.moments:
        need = np.array([_bytes(state, mode, waits, moment) for mode in kept])
        fits &= (need.min(axis=0) <= some.room)[:, : max(1, pp - 1)].all(axis=1)
        part = np.maximum(0.0, need.max(axis=0) - some.room) / np.maximum(need.max(axis=0) - need, 1e-30)
        extra = np.maximum(extra, np.where(part <= 1, part * again, again.max(axis=0)).min(axis=0))
    return fits, (seconds + extra).max(axis=1)


def _fullest(c: Costs, pp: int, layers: int, first: int, *, folded: bool) -> Floats:
    """By column: seconds a microbatch of the fullest rank, whole layers dealt so that it has least; ``first``: leading layers of another kind;
    ``folded``: embedding and head stand on one rank."""
    each = np.maximum(c.f + c.b + c.w - c.hidden.sum(axis=1), 1e-30)[:, None]
    ends = np.zeros((len(c), pp))
    ends[:, 0] = c.embedding.sum(axis=1) - first * c.quicker.sum(axis=1)
    ends[:, 0 if folded else pp - 1] += c.head.sum(axis=1)
    some = (ends[:, None, sorted({0, pp // 2, pp - 1})] + each[:, :, None] * np.arange(1, -(-layers // pp) + 4)[:, None]).reshape(
        len(c), -1
    )
    held = np.floor((some[:, :, None] - ends[:, None]) / each[:, :, None] + 1e-9)
    enough = (held >= 1).all(axis=2) & (held.sum(axis=2) >= layers)
    out: Floats = np.where(enough, some, np.inf).min(axis=1)
    return np.where(np.isfinite(out), out, layers / pp * each[:, 0] + ends.max(axis=1))


def _again(c: Costs, flying: Flying, layers: float) -> Floats:
    """By column: about how many seconds of recompute a microbatch needs on the rank that needs most, each with as many layers, by the mode
    that asks for least."""
    state, top, waits, longest = c.state[:, None], c.kept.max(axis=1)[:, None], c.waits[:, None], np.zeros(len(c))
    whole = np.take_along_axis(c.again, c.kept.argmin(axis=1)[:, None], axis=1)
    for moment in flying.moments:
        plain = _bytes(state, top, waits, moment)
        over = layers * plain - c.room
        best = np.repeat(layers * whole, over.shape[1], axis=1)
        for mode in range(c.kept.shape[1]):
            saved = plain - _bytes(state, c.kept[:, mode, None], waits, moment)
            number = np.maximum(over, 0.0) / np.maximum(saved, 1e-30)
            best = np.where(number <= layers, np.minimum(best, number * c.again[:, mode, None]), best)
        longest = np.maximum(longest, np.where(over > 0, best, 0.0).max(axis=1))
    return longest
