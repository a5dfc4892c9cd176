"""Lower bounds on the seconds of one microbatch for hundreds of thousands of degrees at once.

The same operations (``cost_models.layers``) and prices (``compute.price``, ``ClusterSpec.collective_seconds``) as the estimate, with arrays
for the degrees. What only adds time and needs a layout one by one (ZeRO's collectives, wider placements of another rank order) is left
out: a lower bound, which a property test says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

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
BLOCK = 1 << 14
"""Keys priced at once."""
Seconds = tuple[Floats, Floats, Floats]
"""(f, b by mode, w) of a unit by key."""


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
        for at in _blocks(np.flatnonzero(keys[:, 6] == kind)):
            found = _least_seconds(job, keys[at], name, units)
            for k in range(len(model.kinds)):
                f[at, k], b[at, k], w[at, k] = found[k]
            for out, unit in ((embedding, EMBEDDING), (head, HEAD)):
                ahead, back, weight = found[unit]
                out[at] = np.stack([ahead, back[:, 0], weight], axis=1)
            if model.mtp:
                ahead, back, weight = found[MTP]
                head[at] += model.mtp * np.stack([ahead, back.min(axis=1), weight], axis=1)
    return Bulk(f, b, w, embedding, head)


def _blocks(at: Ints) -> Iterator[Ints]:
    """``at`` in parts whose arrays stay near the processor."""
    return (at[start : start + BLOCK] for start in range(0, len(at), BLOCK))


def _least_seconds(job: Job, keys: Ints, kind: str, units: Mapping[Unit, Sequence[RecomputeRule]]) -> dict[Unit, Seconds]:
    """Seconds of each unit under its modes by key, its tokens travelling to experts in the way that takes least."""
    travelling = [unit for unit in units if isinstance(kind_of(job, unit).ffn, Moe)]
    found: dict[Unit, Seconds] = {}
    whole = keys.copy()
    whole[:, 3:5] = 1
    first, at = distinct(whole)
    degrees = degrees_of(job, whole[first], kind)
    for unit in units:
        if unit not in travelling:
            f, b, w = _seconds(job, degrees, unit, units[unit])
            found[unit] = f[at], b[at], w[at]
    for dispatcher in dispatchers_of(job) if travelling else ():
        degrees = degrees_of(job, keys, kind, dispatcher)
        for unit in travelling:
            f, b, w = _seconds(job, degrees, unit, units[unit])
            least = found.setdefault(unit, (f, b, w))
            found[unit] = np.minimum(f, least[0]), np.minimum(b, least[1]), np.minimum(w, least[2])
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


def distinct(table: Ints) -> tuple[Ints, Ints]:
    """(the first of each distinct row, which of those each row is)."""
    code, number = np.zeros(len(table), np.int64), 1
    for column in table.T:
        values, place = _places(column)
        number, code = _places(code * values + place)
    first = np.zeros(number, np.int64)
    first[code[::-1]] = np.arange(len(table))[::-1]  # of those that are assigned to one place, the last stays
    return first, code


def _places(code: Ints) -> tuple[int, Ints]:
    """(how many distinct whole numbers from 0 there are, the place of each among them, rising)."""
    top = int(code.max(initial=-1)) + 1
    if top > 8 * len(code) + 1024:
        values, place = np.unique(code, return_inverse=True)
        return len(values), place
    seen = np.zeros(top, bool)
    seen[code] = True
    rising = np.cumsum(seen)
    return int(seen.sum()), rising[code] - 1


def degrees_of(job: Job, keys: Ints, kind: str, dispatcher: str = "alltoall") -> Degrees:
    """Keys as the degrees that ``cost_models.layers`` reads; ``kind`` one of ``KINDS``."""
    tp, ring, ulysses, ep, etp, micro, _ = keys.T
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
    nothing = np.zeros(len(degrees.tp))
    b = np.stack([nothing + one.backward_input.seconds + one.again(rule)[1].seconds for rule in modes], axis=1)
    return nothing + one.forward.seconds, b, nothing + one.backward_weight.seconds


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
    stride = np.broadcast_to(stride, ranks.shape)
    code = ranks * (1 << 32) + stride
    codes, first, at = (code, [0], np.zeros(1, int)) if len(code) == 1 else np.unique(code, return_index=True, return_inverse=True)
    known, names = _met(cluster, kind), codes.tolist()
    new = [i for i, name in zip(first, names, strict=True) if name not in known]
    if new:
        ways = cluster.ways(kind, ranks[new], stride[new])
        parts = [np.stack([part + np.zeros(len(new)) for part in (alpha, *chain(*terms))], axis=1) for alpha, terms in ways]
        known.update(zip(code[new].tolist(), np.stack(parts, axis=1), strict=True))
    table = np.moveaxis(np.array([known[name] for name in names]), 0, 2)
    return [(one[0], list(zip(one[1::2], one[2::2], strict=True))) for one in table], at


@lru_cache(maxsize=64)
def _met(cluster: ClusterSpec, kind: str) -> dict[int, Floats]:
    """By number of ranks and stride: algorithm x (latency, then by level seconds a byte and a square root of one)."""
    return {}
