"""Lower bounds on the seconds of one microbatch for hundreds of thousands of degrees at once.

The same operations (``cost_models.layers``) and prices (``compute.price``, ``ClusterSpec.collective_seconds``) as the estimate, with arrays
for the degrees. What only adds time and needs a layout one by one (ZeRO's collectives, wider placements of another rank order) is left
out: a lower bound, which a property test says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.communication import Exchange, exchanged, reach
from cost_models.job import Job
from cost_models.layout import RecomputeRule
from cost_models.passes import NO_RECOMPUTE, exchange_of, unit_passes
from cost_models.units import EMBEDDING, HEAD, MTP, Unit
from planner.rules.core import limits_of
from profiles.hardware import ClusterSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

COLUMNS = ("tp", "ring", "ulysses", "ep", "etp", "micro_batch", "kind")
"""Columns of a key: the degrees that a layer's own passes depend on; ``kind`` indexes ``KINDS``."""
KINDS = ("ring", "ulysses", "hybrid", "allgather")


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
    for kind, name in enumerate(KINDS):
        at = np.flatnonzero(keys[:, 6] == kind)
        if not len(at):
            continue
        for place, dispatcher in enumerate(dispatchers_of(job)):
            degrees = degrees_of(job, keys[at], name, dispatcher)
            for k in range(len(model.kinds)):
                for into, least in zip((f, b, w), _seconds(job, degrees, k, modes), strict=True):
                    into[at, k] = np.minimum(into[at, k], least) if place else least
        for out, unit in ((embedding, EMBEDDING), (head, HEAD)):
            one = _seconds(job, degrees, unit, (NO_RECOMPUTE,))
            out[at] = np.stack([one[0], one[1][:, 0], one[2]], axis=1)
        if model.mtp:
            one = _seconds(job, degrees, MTP, modes)
            head[at] += model.mtp * np.stack([one[0], one[1].min(axis=1), one[2]], axis=1)
    return Bulk(f, b, w, embedding, head)


def dispatchers_of(job: Job) -> Sequence[str]:
    """The ways in which tokens may travel to experts; any where there are none."""
    return limits_of(job).dispatchers if job.model.moe is not None else ("alltoall",)


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


def _seconds(job: Job, degrees: Degrees, unit: Unit, modes: Sequence[RecomputeRule]) -> tuple[Floats, Floats, Floats]:
    """(f, b by mode, w) of a unit by key."""
    one = unit_passes(job, Closest(job, degrees, exchange_of(job, degrees, unit)), unit, modes)
    nothing = np.zeros(len(degrees.tp))
    b = np.stack([nothing + one.backward_input.seconds + again.seconds for again in one.recompute], axis=1)
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
        execution, cluster = self.job.execution, self.job.cluster
        ranks, stride = (np.asarray(x) for x in self.groups[axis])
        if axis in ("ep", "etp_ep") and execution.ep_overlap:
            return 0.0
        size = np.asarray(bytes)
        if kind == "send_recv":
            seconds = cluster.collective_seconds(kind, size, np.full_like(ranks, 2), reach(cluster, ranks, stride))
        elif axis == "ep" and kind == "all_to_all" and self.exchange is not None:
            seconds = exchanged(cluster.collective_seconds, cluster, self.exchange, size, ranks, stride, any_order=True)
        else:
            seconds = cluster.collective_seconds(kind, size, ranks, stride)
        return np.where((ranks > 1) & (size > 0), seconds, 0.0) * count

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
