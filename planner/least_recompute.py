"""The least recompute with which a rank fits, exactly: one mix for each of its chunks, chosen together.

Bytes at a moment of the schedule are a sum over the rank's chunks and the most that the work of one of them needs beside it, so that a
combination of mixes is a row of a few sums. Where the combinations are few, all of them are rows of an array; where they are many, a
Lagrange multiplier on the fullest moment bounds them, and only those are built up, chunk by chunk, that may cost less than the best known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.activations import ChunkMemory
from cost_models.layout import ZERO_BUBBLE
from cost_models.memory import Fixed, Peak, beyond_kept, rank_memory
from cost_models.schedules import in_flight
from planner.columns import Mix
from planner.fitting import Counts, Fitting, Policy

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
WHOLE = 1_000
"""Combinations of mixes up to which all are tried."""
MOMENTS: tuple[str, ...] = (
    "loss",
    "gradient of the head",
    "backward of a layer",
    "input gradients of a chunk",
    "weight gradients of a chunk",
)
AFTER, LOSS = (np.array([name in some for name in MOMENTS]) for some in (MOMENTS[3:], MOMENTS[:1]))
"""Moments of ``memory.beyond_kept``; which are of microbatches that wait for their weight gradient, and which of the loss."""
KEPT, BEAM = 5_000, 500
"""Combinations built up at most beyond that; how many of them go on once they were more."""
CROWD = 300
"""Combinations beyond which those that need the same bytes are looked for before the last chunk."""
HALVINGS = 16
SWAPS, SOME = 40, 1_000
"""Times that two chunks' mixes are exchanged at most; exchanges looked at together."""
MANY, BINS = 50_000, 64
"""Combinations beyond which none are built up where one is known; steps of seconds in which they are counted."""
CHECKED = 50
"""Combinations that seem to fit and are counted in full, the cheapest first."""
ROUNDING, GRAIN = 1e-9, 1024.0
"""Relative and absolute difference of bytes that is none: a combination is counted in full before it is an answer."""


@dataclass(frozen=True)
class Menu:
    """The mixes of a chunk that no other beats in seconds and every kind of bytes: ``seconds`` of recompute and input gradient, ``kept``
    and ``waits`` bytes of a microbatch alive and of one that waits for its weight gradient; ``beside``: the most that exists beyond, moment
    (``MOMENTS``) x mix (-inf: no such moment)."""

    mixes: tuple[Mix, ...]
    seconds: Floats
    kept: Floats
    waits: Floats
    beside: Floats


def menu(fitting: Fitting, policy: Policy, counts: Counts, chunk: int) -> Menu:
    """The menu of a chunk that holds these layers."""
    key = (policy, counts, fitting.places[chunk])
    if key not in fitting.menus:
        fitting.menus[key] = _menu(fitting, policy, counts, chunk)
    found: Menu = fitting.menus[key]
    return found


def _rated(fitting: Fitting, policy: Policy, counts: Counts) -> list[tuple[float, Mix]]:
    """The mixes of a chunk that holds these layers, with their seconds of recompute and input gradient, the quickest first."""
    key = (policy, counts)
    if key not in fitting.menus:
        b = fitting.column.units.b - fitting.column.units.sb
        mixes = list(policy.mixes(counts, len(fitting.column.modes)))
        seconds = np.array(mixes, float).reshape(len(mixes), b.size) @ b.ravel()
        fitting.menus[key] = [(float(seconds[i]), mixes[i]) for i in np.argsort(seconds, kind="stable")]
    rated: list[tuple[float, Mix]] = fitting.menus[key]
    return rated


def _menu(fitting: Fitting, policy: Policy, counts: Counts, chunk: int) -> Menu:
    rated = _rated(fitting, policy, counts)
    table = np.zeros((len(rated), 3 + len(MOMENTS)))
    for row, (seconds, mix) in zip(table, rated, strict=True):
        memory = fitting.chunk(chunk, mix)
        most = dict(beyond_kept(memory, 1, 1, (0.0, 0.0), True))
        row[:] = seconds, memory.kept, memory.weight_pass, *(most.get(name, -np.inf) for name in MOMENTS)
    beaten = ((table[:, None] <= table).all(axis=2) & ~np.tri(len(table), dtype=bool)).any(axis=0)
    rows = table[~beaten].T
    return Menu(tuple(rated[i][1] for i in np.flatnonzero(~beaten)), rows[0], rows[1], rows[2], rows[3:])


@dataclass(frozen=True)
class RankMixes:
    """What a rank's mixes are chosen under: ``room`` bytes; by chunk moment x mix ``loads`` bytes of its microbatches and ``beside`` what
    exists besides while it runs; ``menus``."""

    room: float
    loads: Sequence[Floats]
    beside: Sequence[Floats]
    menus: Sequence[Menu]


def least_recompute(
    fitting: Fitting, policy: Policy, rank: int, spans: Sequence[tuple[int, int]], weights: tuple[float, ...] = ()
) -> tuple[float, list[Mix] | None]:
    """(seconds of recompute and input gradient of one microbatch over the rank's chunks that hold ``spans``, each chunk's times its
    weight: no mixes that fit take less; mixes that take as long and fit). inf and None where none fit."""
    key = policy, tuple(fitting.counts(*s) for s in spans), fitting.alike[rank], weights
    if key not in fitting.least:
        fitting.least[key] = _least(fitting, policy, rank, spans, weights)
    return fitting.least[key]


def _least(
    fitting: Fitting, policy: Policy, rank: int, spans: Sequence[tuple[int, int]], weights: tuple[float, ...]
) -> tuple[float, list[Mix] | None]:
    static = fitting.static(rank, spans)
    if max(_bare(fitting, static), rank_memory(fitting.job, 0, static, Peak(0.0, static.update, "")).needed) > fitting.limit:
        return float("inf"), None
    quickest = [_rated(fitting, policy, fitting.counts(*span))[0] for span in spans]
    fastest = [mix for _, mix in quickest]
    if _needed(fitting, static, rank, fastest) <= fitting.limit:
        return sum(w * seconds for w, (seconds, _) in zip(weights or [1.0] * len(spans), quickest, strict=True)), fastest
    choices = rank_mixes(fitting, policy, rank, spans)
    menus = choices.menus
    if weights:
        menus = [replace(one, seconds=weight * one.seconds) for one, weight in zip(menus, weights, strict=True)]
    bound, seconds, picks = _combinations(replace(choices, menus=menus))
    for i in np.argsort(seconds, kind="stable")[:CHECKED]:
        mixes = [one.mixes[p] for one, p in zip(menus, picks[i], strict=True)]
        if _needed(fitting, static, rank, mixes) <= fitting.limit:
            return bound, mixes
    return bound, None


def _needed(fitting: Fitting, static: Fixed, rank: int, mixes: Sequence[Mix]) -> float:
    chunks = {c: fitting.chunk(c, mix) for c, mix in zip(fitting.held(rank), mixes, strict=True)}
    return fitting.total(static, chunks, fitting.snapshots[rank])


def _bare(fitting: Fitting, static: Fixed) -> float:
    """Device bytes of a rank without any activations."""
    return float(rank_memory(fitting.job, 0, static, Peak(0.0, 0.0, "")).needed)


def rank_mixes(fitting: Fitting, policy: Policy, rank: int, spans: Sequence[tuple[int, int]]) -> RankMixes:
    """What the mixes of a rank whose chunks hold ``spans`` are chosen under."""
    static = fitting.static(rank, spans)
    chunks = [
        _chunk_mixes(fitting, policy, rank, place, fitting.counts(*span), static.gathered) for place, span in enumerate(spans)
    ]
    room = (fitting.limit - _bare(fitting, static)) / fitting.job.execution.slack - static.lasting
    if "activations" in fitting.layout.offload:
        room = 1e30
    room = room * (1 + ROUNDING) + len(chunks) * GRAIN
    return RankMixes(room, [loads for loads, _, _ in chunks], [beside for _, beside, _ in chunks], [one for _, _, one in chunks])


def _chunk_mixes(
    fitting: Fitting, policy: Policy, rank: int, place: int, counts: Counts, gathered: tuple[Any, Any]
) -> tuple[Floats, Floats, Menu]:
    """(``loads``, ``beside``, menu) of a rank's chunk, the one at ``place`` of those that it holds. ``gathered``: bytes that exist whole
    besides, at the loss and in a backward."""
    key = (policy, counts, fitting.alike[rank], place, gathered)
    if key not in fitting.menus:
        one, layout = menu(fitting, policy, counts, fitting.held(rank)[place]), fitting.layout
        moments = _moments(layout.schedule, layout.pp, layout.vpp, fitting.column.microbatches, fitting.alike[rank])
        loss, backward = gathered
        whole = dict(beyond_kept(ChunkMemory(loss=0, head=0), 1, 1, (loss, backward), True))
        more = one.beside + np.array([whole[name] for name in MOMENTS])[:, None]
        loads = moments.alive[place][:, None] * one.kept + moments.held[place][:, None] * one.waits
        most = np.where(moments.at[place][:, :, None], more, -np.inf).max(axis=1)
        fitting.menus[key] = loads, np.maximum(most, moments.floor[:, None]), one
    found: tuple[Floats, Floats, Menu] = fitting.menus[key]
    return found


@dataclass(frozen=True)
class _Moments:
    """The fullest moments of a rank: chunk x moment, microbatches ``alive`` and ``held`` for their weight gradients; ``at``: chunk x moment x
    ``MOMENTS``, whether it may be that one; ``floor``: the least bytes that exist beside, by moment."""

    alive: Floats
    held: Floats
    at: npt.NDArray[np.bool_]
    floor: Floats


@lru_cache(maxsize=4096)
def _moments(schedule: str, pp: int, vpp: int, microbatches: int, rank: int) -> _Moments:
    snapshots = in_flight(schedule, pp, vpp, microbatches)[rank].snapshots
    alive, held = np.array([[(alive, held) for _, alive, held in s] for s in snapshots], float).T
    whole = (held.sum(axis=0) == 0) & (schedule not in ZERO_BUBBLE)
    at = np.where(AFTER, (held > 0)[:, :, None], (alive > 0)[:, :, None] & (whole[:, None] | LOSS))
    return _Moments(alive, held, at, np.where(whole, -np.inf, 0.0))


def _combinations(rank: RankMixes) -> tuple[float, Floats, Ints]:
    """(a bound, seconds of combinations within the room, mix of each chunk): the bound is the least of them where all that could be it
    were built up."""
    if prod(len(m.mixes) for m in rank.menus) <= WHOLE:
        seconds, picks, _ = _grown(rank, np.inf, np.zeros(len(rank.loads[0])))
        return float(seconds.min(initial=np.inf)), seconds, picks
    relaxed = _relaxed(rank)
    if relaxed is None:
        return float("inf"), np.zeros(0), np.zeros((0, len(rank.menus)), np.int64)
    multiplier, least, best, known = relaxed
    slack = (best - least) + ROUNDING * best
    if known is not None and _number(rank, slack, multiplier) > MANY:
        return least, np.array([best]), known[None]
    seconds, picks, whole = _grown(rank, slack, multiplier)
    if known is not None and not whole:
        seconds, picks = np.append(seconds, best), np.append(picks, known[None], axis=0)
    return (float(seconds.min(initial=np.inf)) if whole else least), seconds, picks


def _number(rank: RankMixes, slack: float, multiplier: Floats) -> float:
    """About how many combinations exceed the least of each chunk by ``slack`` at most, whatever room they need."""
    number = np.ones(1)
    for one, loads in zip(rank.menus, rank.loads, strict=True):
        priced = one.seconds + multiplier @ loads
        bins = np.rint((priced - priced.min()) * (BINS / slack)).astype(np.int64)
        number = np.convolve(number, np.bincount(bins[bins <= BINS]))[: BINS + 1]
    return float(number.sum())


def _grown(rank: RankMixes, slack: float, multiplier: Floats) -> tuple[Floats, Ints, bool]:
    """(seconds, mix of each chunk) of combinations within the room, chunk by chunk, whose seconds and priced bytes exceed the least of
    each chunk by ``slack`` at most; whether none had to be left out."""
    loads, beside, chunks = rank.loads, rank.beside, len(rank.menus)
    moments = len(loads[0])
    rest = np.zeros((chunks + 1, moments))
    for c in reversed(range(chunks)):
        rest[c] = rest[c + 1] + loads[c].min(axis=1)
    least_beside = np.max([x.min(axis=1) for x in beside], axis=0)
    used, most = np.zeros((1, moments)), np.tile(least_beside, (1, 1))
    seconds, over, picks, whole = np.zeros(1), np.zeros(1), np.zeros((1, 0), np.int64), True
    for c, one in enumerate(rank.menus):
        priced = one.seconds + multiplier @ loads[c]
        more = priced - priced.min()
        new_over = over[:, None] + more
        at, mix = np.nonzero(new_over <= slack)
        new_used, new_most = used[at] + loads[c].T[mix], np.maximum(most[at], beside[c].T[mix])
        good = np.flatnonzero((new_used + new_most + rest[c + 1] <= rank.room).all(axis=1))
        new_over = new_over[at[good], mix[good]]
        if len(good) > (KEPT if whole else BEAM):
            first = np.argsort(new_over, kind="stable")[:BEAM]
            good, new_over, whole = good[first], new_over[first], False
        if len(good) > CROWD or c == chunks - 1:
            kept = _apart(new_used[good], new_most[good], new_over)
            new_over, good = new_over[kept], good[kept]
        over = new_over
        used, most, at, mix = new_used[good], new_most[good], at[good], mix[good]
        seconds, picks = seconds[at] + one.seconds[mix], np.concatenate([picks[at], mix[:, None]], axis=1)
    return seconds, picks, whole


def _apart(used: Floats, most: Floats, over: Floats) -> Ints:
    """Of combinations that need the same bytes at every moment, to ``GRAIN``, those that cost least."""
    order = np.argsort(over, kind="stable")
    bytes_ = np.round(np.concatenate([used, used + most], axis=1)[order] / GRAIN).astype(np.int64)
    rows = np.ascontiguousarray(bytes_).view(np.dtype((np.void, bytes_.itemsize * bytes_.shape[1]))).reshape(-1)
    _, first = np.unique(rows, return_index=True)
    return order[np.sort(first)]


def _relaxed(rank: RankMixes) -> tuple[Floats, float, float, Ints | None] | None:
    """(price of a byte by moment, least seconds of any combination, seconds of one that fits, its mixes) by halving the price of the
    moment that is fullest without recompute; None where no combination fits."""
    chunks, most = np.arange(len(rank.menus)), max(len(one.mixes) for one in rank.menus)
    seconds = np.full((len(chunks), most), np.inf)
    loads, beside = (np.zeros((len(chunks), len(rank.loads[0]), most)) for _ in range(2))
    for c, one in enumerate(rank.menus):
        number = len(one.mixes)
        seconds[c, :number], loads[c, :, :number], beside[c, :, :number] = one.seconds, rank.loads[c], rank.beside[c]
    floor = np.max([x.min(axis=1) for x in rank.beside], axis=0)
    if (np.sum([x.min(axis=1) for x in rank.loads], axis=0) + floor > rank.room).any():
        return None
    fullest = int((loads[:, :, 0].sum(axis=0) + floor).argmax())
    left = rank.room - float(floor[fullest])
    low, high, least, chosen = 0.0, float(seconds[:, 0].sum()) / left / 64, 0.0, 0.0
    feasible: npt.NDArray[np.int64] | None = None
    for _ in range(HALVINGS):
        price = (low + high) / 2 if feasible is not None else high
        priced = seconds + price * loads[:, fullest]
        picks = priced.argmin(axis=1)
        bound = float(priced[chunks, picks].sum()) - price * left
        if bound > least:
            least, chosen = bound, price
        used = loads[chunks, :, picks].sum(axis=0)
        if (used + beside[chunks, :, picks].max(axis=0) <= rank.room).all():
            feasible, high = picks, price
        else:
            low = price
            high = high if feasible is not None else 8 * high
    best = np.inf
    if feasible is not None:
        table = rank.room, seconds, loads, beside
        feasible = _swapped(*table, _improved(*table, feasible.copy()), fullest)
        best = float(seconds[chunks, feasible].sum())
    multiplier = np.zeros(loads.shape[1])
    multiplier[fullest] = chosen
    return multiplier, least, best, feasible


def _improved(room: float, seconds: Floats, loads: Floats, beside: Floats, picks: Ints) -> Ints:
    """A combination that fits once its chunks, the last one first, take the fastest mix that still fits."""
    chunks = np.arange(len(picks))
    used, most = loads[chunks, :, picks].sum(axis=0), beside[chunks, :, picks]
    for c in reversed(range(len(picks))):
        rest = used - loads[c, :, picks[c]]
        others = np.delete(most, c, axis=0).max(axis=0, initial=-np.inf)
        fits = (rest[:, None] + loads[c] + np.maximum(beside[c], others[:, None]) <= room).all(axis=0)
        picks[c] = int(np.where(fits, seconds[c], np.inf).argmin())
        used, most[c] = rest + loads[c, :, picks[c]], beside[c, :, picks[c]]
    return picks


def _swapped(room: float, seconds: Floats, loads: Floats, beside: Floats, picks: Ints, fullest: int) -> Ints:
    """A combination that fits, as long as two of its chunks have other mixes that take less together and fit."""
    place = np.arange(len(picks))
    chunk, mix = np.nonzero(np.isfinite(seconds))
    each, needs = loads[chunk, :, mix], beside[chunk, :, mix]
    for _ in range(SWAPS):
        more = seconds[chunk, mix] - seconds[chunk, picks[chunk]]
        bytes_ = each - loads[chunk, :, picks[chunk]]
        used, most = loads[place, :, picks].sum(axis=0), beside[place, :, picks].max(axis=0)
        left = room - used - most
        gain = more[:, None] + more
        open_ = (gain < -ROUNDING) & (bytes_[:, None, fullest] + bytes_[:, fullest] <= left[fullest]) & (chunk[:, None] < chunk)
        one, other = np.nonzero(open_)
        if not len(one):
            return picks
        order = np.argsort(gain[one, other], kind="stable")
        for start in range(0, len(order), SOME):
            some = order[start : start + SOME]
            i, j = one[some], other[some]
            fits = (used + bytes_[i] + bytes_[j] + np.maximum(most, np.maximum(needs[i], needs[j])) <= room).all(axis=1)
            if fits.any():
                first = int(fits.argmax())
                picks[chunk[i[first]]], picks[chunk[j[first]]] = mix[i[first]], mix[j[first]]
                break
        else:
            return picks
    return picks
