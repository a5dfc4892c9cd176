"""Lower bounds on the seconds of one microbatch for hundreds of thousands of degrees at once.

The same operations (``cost_models.layers``) and prices (``compute.price``, ``ClusterSpec.collective_seconds``) as the estimate, with arrays
for the degrees. What only adds time and needs a layout one by one (ZeRO's collectives, wider placements of another rank order) is left
out: a lower bound, which a property test says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.arrays import distinct
from cost_models.communication import Exchange, exchanged, reach
from cost_models.job import Job
from cost_models.layout import DEDUPLICATED, RecomputeRule
from cost_models.passes import NO_RECOMPUTE, exchange_of, unit_work
from cost_models.units import EMBEDDING, HEAD, MTP, Unit, kind_of
from planner.rules.core import limits_of
from profiles.cluster import Way, seconds_of_ways
from profiles.hardware import ClusterSpec
from profiles.model import Moe
from profiles.operations import Number

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

COLUMNS = ("tp", "ring", "ulysses", "ep", "etp", "micro_batch", "kind")
"""Columns of a key: the degrees that a layer's own passes depend on; ``kind`` indexes ``KINDS``."""
KINDS = ("ring", "ulysses", "hybrid", "allgather")
SMALL = 1 << 14
"""Places of a grid whose arrays stay near the processor."""
Seconds = tuple[Floats, list[Floats], Floats]
"""(f, b of each mode, w) of a unit by place of a grid."""


@dataclass(frozen=True)
class Bulk:
    """Seconds by key: ``f`` and ``w`` key x kind, ``b`` key x kind x mode (recompute and input gradient), ``embedding`` and ``head``
    key x (f, b, w)."""

    f: Floats
    b: Floats
    w: Floats
    embedding: Floats
    head: Floats

    @cached_property
    def ends(self) -> Floats:
        """Seconds of embedding and head, by key."""
        out: Floats = self.embedding.sum(axis=1) + self.head.sum(axis=1)
        return out

    def total(self, totals: Ints) -> Floats:
        """Seconds of one microbatch through the whole model, by key, with the least recompute. ``totals``: layers by kind."""
        seconds: Floats = (self.f + self.b.min(axis=2) + self.w) @ totals + self.ends
        return seconds

    def way(self, totals: Ints) -> Floats:
        """Seconds of one microbatch's forward and input gradient through the whole model, by key, as ``total``."""
        seconds: Floats = (self.f + self.b.min(axis=2)) @ totals + (self.embedding + self.head)[:, :2].sum(axis=1)
        return seconds

    def take(self, at: Any) -> Bulk:
        """The keys ``at``."""
        return Bulk(self.f[at], self.b[at], self.w[at], self.embedding[at], self.head[at])


def lower_seconds(job: Job, keys: Ints, modes: Sequence[RecomputeRule] = (NO_RECOMPUTE,)) -> Bulk:
    """Lower bounds for ``keys`` (rows of ``COLUMNS``), by recompute mode; equal to ``passes.unit_seconds`` where the rank order is the
    closest one and ZeRO adds nothing."""
    model, number = job.model, len(keys)
    f, w = np.zeros((number, len(model.kinds))), np.zeros((number, len(model.kinds)))
    b = np.zeros((number, len(model.kinds), len(modes)))
    embedding, head = np.zeros((number, 3)), np.zeros((number, 3))
    units: dict[Unit, Sequence[RecomputeRule]] = {EMBEDDING: (NO_RECOMPUTE,), HEAD: (NO_RECOMPUTE,)}
    units |= dict.fromkeys((*range(len(model.kinds)), *((MTP,) if model.mtp else ())), modes)
    for kind, name in enumerate(KINDS):
        for grid in grids(keys, kind):
            at, found = grid.keys, _least_seconds(job, grid, name, units)
            for k in range(len(model.kinds)):
                ahead, back, weight = found[k]
                f[at, k], w[at, k] = grid.spread(ahead), grid.spread(weight)
                for mode, seconds in enumerate(back):
                    b[at, k, mode] = grid.spread(seconds)
            for out, unit in ((embedding, EMBEDDING), (head, HEAD)):
                ahead, back, weight = found[unit]
                out[at] = np.stack([grid.spread(part) for part in (ahead, back[0], weight)], axis=1)
            if model.mtp:
                ahead, back, weight = found[MTP]
                parts = ahead, reduce(np.minimum, back), weight
                head[at] += model.mtp * np.stack([grid.spread(part) for part in parts], axis=1)
    return Bulk(f, b, w, embedding, head)


@dataclass(frozen=True)
class Grid:
    """Keys of one kind as places of a grid: what attention depends on (tp, ring, ulysses, micro batch) x how experts are split (ep, etp),
    so that each is priced once for all of the other. ``keys``: which they are; ``row`` and ``column``: where they stand;
    ``columns``: ``COLUMNS`` but the last as arrays that broadcast to the grid."""

    keys: Ints
    row: Ints
    column: Ints
    columns: tuple[Ints, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*(column.shape for column in self.columns))

    def spread(self, values: Any) -> Floats:
        """Values that broadcast to the grid, by key."""
        return np.broadcast_to(values, self.shape)[self.row, self.column]

    def all(self, job: Job, kind: str, dispatcher: str) -> Degrees:
        """The degrees of every place."""
        return _degrees(job, self.columns, kind, dispatcher)

    def dense(self, job: Job, kind: str) -> Degrees:
        """The degrees of what has no experts to split."""
        one = np.ones((1, 1), np.int64)
        return _degrees(job, (*self.columns[:3], one, one, *self.columns[5:]), kind)


def grids(keys: Ints, kind: int) -> Iterator[Grid]:
    """The keys of one kind: in one grid where that is small, else in one for each tp, which are nearly full."""
    at = np.flatnonzero(keys[:, 6] == kind)
    if not len(at):
        return
    grid = _grid(keys, at)
    if math.prod(grid.shape) <= SMALL:
        yield grid
        return
    for tp in np.flatnonzero(np.bincount(keys[at, 0])):
        yield _grid(keys, at[keys[at, 0] == tp])


def _grid(keys: Ints, at: Ints) -> Grid:
    some = keys[at]
    rows, row = distinct(some[:, [0, 1, 2, 5]])
    columns, column = distinct(some[:, 3:5])
    tp, ring, ulysses, micro = some[rows][:, [0, 1, 2, 5]].T[:, :, None]
    ep, etp = some[columns][:, 3:5].T[:, None, :]
    return Grid(at, row, column, (tp, ring, ulysses, ep, etp, micro))


def _least_seconds(job: Job, grid: Grid, kind: str, units: Mapping[Unit, Sequence[RecomputeRule]]) -> dict[Unit, Seconds]:
    """Seconds of each unit under its modes by place of a grid, its tokens travelling to experts in the way that takes least."""
    travelling = [unit for unit in units if isinstance(kind_of(job, unit).ffn, Moe)]
    degrees = grid.dense(job, kind)
    found = {unit: _seconds(job, degrees, unit, units[unit]) for unit in units if unit not in travelling}
    for dispatcher in dispatchers_of(job) if travelling else ():
        degrees = grid.all(job, kind, dispatcher)
        for unit in travelling:
            f, b, w = _seconds(job, degrees, unit, units[unit])
            if unit in found:
                least = found[unit]
                f, b, w = np.minimum(f, least[0]), list(map(np.minimum, b, least[1])), np.minimum(w, least[2])
            found[unit] = f, b, w
    return found


def dispatchers_of(job: Job) -> Sequence[str]:
    """The ways in which tokens may travel to experts, one of those that cost the same; any where there are none."""
    if job.model.moe is None:
        return ("alltoall",)
    ways = limits_of(job).dispatchers
    alike = [way for way in ways if way in DEDUPLICATED]
    return [way for way in ways if way not in alike[1:]]


class Degrees(SimpleNamespace):
    """Degrees of many layouts, as arrays; remembers what was computed from them."""

    def remember(self, key: Any, compute: Callable[[Any], Any]) -> Any:
        """``compute(self)``, once."""
        memo = self.__dict__.setdefault("memo", {})
        if key not in memo:
            memo[key] = compute(self)
        return memo[key]


def degrees_of(job: Job, keys: Ints, kind: str, dispatcher: str = "alltoall") -> Degrees:
    """Keys as the degrees that ``cost_models.layers`` reads; ``kind`` one of ``KINDS``."""
    return _degrees(job, tuple(keys.T[:6]), kind, dispatcher)


def _degrees(job: Job, columns: Sequence[Ints], kind: str, dispatcher: str = "alltoall") -> Degrees:
    tp, ring, ulysses, ep, etp, micro = columns
    name = "ring" if kind == "hybrid" else kind
    return Degrees(
        tp=tp,
        sp=(tp > 1) & limits_of(job).sequence_parallel,
        ring=ring,
        ulysses=ulysses,
        cp=ring * ulysses,
        cp_kind=name,
        ep=ep,
        etp=etp,
        micro_batch=micro,
        dispatcher=dispatcher,
        capacity=0.0,
    )


def _seconds(job: Job, degrees: Degrees, unit: Unit, modes: Sequence[RecomputeRule]) -> Seconds:
    exchange = degrees.remember(("exchange", kind_of(job, unit).ffn), lambda d: exchange_of(job, d, unit))
    one = unit_work(job, Closest(job, degrees, exchange), unit)
    b = [one.backward_input.seconds + one.again(rule)[1].seconds for rule in modes]
    return one.forward.seconds, b, one.backward_weight.seconds


@dataclass(frozen=True)
class Closest:
    """Prices collectives by key in the closest placement (``communication.Priced``)."""

    job: Job
    layout: Any
    exchange: Exchange | None = None

    @property
    def cluster(self) -> ClusterSpec:
        return self.job.cluster

    def seconds(self, kind: str, axis: str, bytes: Any, count: Any = 1) -> Any:
        """Least seconds; 0 where nothing moves, and for exchanges that other work may hide whole."""
        if axis in ("ep", "etp_ep") and self.job.execution.ep_overlap:
            return 0.0
        known = self.layout.remember("collectives", lambda _: {})
        key = kind, axis, id(bytes), id(self.exchange)
        if key not in known:
            known[key] = bytes, self.exchange, self._seconds(kind, axis, bytes)
        return known[key][2] * count

    def _seconds(self, kind: str, axis: str, bytes: Any) -> Any:
        cluster = self.job.cluster
        ranks, stride = (np.asarray(x) for x in self.groups[axis])
        size = np.asarray(bytes)
        if kind == "send_recv":
            seconds = self._along(kind, axis, size, np.full_like(ranks, 2), reach(cluster, ranks, stride))
        elif axis == "ep" and kind == "all_to_all" and self.exchange is not None:

            def price(kind: str, part: Number, some: Number, apart: Number) -> Number:
                return self._along(kind, axis if some is ranks else f"{axis} in a domain", part, some, apart)

            seconds = exchanged(price, cluster, self.exchange, size, ranks, stride, any_order=True)
        else:
            seconds = self._along(kind, axis, size, ranks, stride)
        return np.where((ranks > 1) & (size > 0), seconds, 0.0)

    def _along(self, kind: str, group: str, size: Number, ranks: Any, stride: Any) -> Number:
        """``ClusterSpec.collective_seconds``: what does not depend on the bytes is found once for a group's distinct (ranks, stride)."""
        if not np.ndim(ranks):
            return self.cluster.collective_seconds(kind, size, ranks, stride)
        ways, at = self.layout.remember(("ways", kind, group), lambda _: _ways_of(self.cluster, kind, ranks, stride))
        spread: list[Way] = [(alpha[at], [(rate[at], c[at]) for rate, c in terms]) for alpha, terms in ways]
        return seconds_of_ways(spread, size)

    @cached_property
    def groups(self) -> dict[str, tuple[Any, Any]]:
        """(ranks, stride) of each axis that a layer's operations name, and of those over which its weights are sharded."""
        d = self.layout
        place = d.etp * d.ep
        out = {
            "tp": (d.tp, 1), "ulysses": (d.ulysses, d.tp), "ring": (d.ring, d.tp * d.ulysses), "cp": (d.cp, d.tp),
            "etp": (d.etp, 1), "ep": (d.ep, d.etp), "etp_ep": (place, 1),
        }  # fmt: skip
        if hasattr(d, "dp_shard"):
            zero = d.dp_shard * d.cp
            out |= {
                "zero": (zero, d.tp), "dp_replicate": (d.dp_replicate, d.tp * zero),
                "edp_shard": (d.edp_shard, place), "edp_replicate": (d.edp_replicate, place * d.edp_shard),
            }  # fmt: skip
        return out


def _ways_of(cluster: ClusterSpec, kind: str, ranks: Ints, stride: Any) -> tuple[list[Way], Ints]:
    """(``ClusterSpec.ways`` of the distinct groups, which of them each is): those that were met before are kept."""
    ranks, stride = np.broadcast_arrays(ranks, stride)
    shape, ranks, stride = ranks.shape, ranks.ravel(), stride.ravel()
    code = ranks * (1 << 32) + stride
    codes, first, at = (code, [0], np.zeros(1, int)) if len(code) == 1 else np.unique(code, return_index=True, return_inverse=True)
    known, names = _met(cluster, kind), codes.tolist()
    new = [i for i, name in zip(first, names, strict=True) if name not in known]
    if new:
        ways = cluster.ways(kind, ranks[new], stride[new])
        parts = [np.stack([part + np.zeros(len(new)) for part in (alpha, *chain(*terms))], axis=1) for alpha, terms in ways]
        known.update(zip(code[new].tolist(), np.stack(parts, axis=1), strict=True))
    table = np.moveaxis(np.array([known[name] for name in names]), 0, 2)
    return [(one[0], list(zip(one[1::2], one[2::2], strict=True))) for one in table], at.reshape(shape)


@lru_cache(maxsize=64)
def _met(cluster: ClusterSpec, kind: str) -> dict[int, Floats]:
    """By number of ranks and stride: algorithm x (latency, then by level seconds a byte and a square root of one)."""
    return {}
