"""Seconds and bytes of collectives under a layout: where each group lies, what the cluster needs for it, what overlap hides.

``Network`` knows, for every axis, how many ranks a group has and how far apart they are, and prices collectives over it through
``ClusterSpec.collective_seconds``. ``exposed`` turns the collectives of one pass of one layer into the seconds they add to it, by
the mechanism that the Execution has; hidden communication is never free: it takes SMs and memory bandwidth from what it hides
beside (``INTERFERENCE``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from cost_models.arrays import always_one, maximum, minimum, nowhere, where
from cost_models.compute import Compute, is_host
from cost_models.execution import Execution
from cost_models.layout import EXPERT_AXES, Layout
from profiles.hardware import ClusterSpec
from profiles.operations import Collective, Number, Operation, wire_bytes

Pass = Literal["forward", "backward_input", "backward_weight"]

INTERFERENCE = 0.15
"""Share of hidden communication by which the work beside it is slowed (SMs that NCCL takes; modelling-notes.md section 3)."""
STRAGGLERS = 0.0045
"""Slowing of a step for each doubling of nodes (weak-scaling rows of dgxc-benchmarking: 0.45-0.6 %)."""


class Group(NamedTuple):
    """Ranks of a communication group and how far apart: ``stride`` is such that ``domain / stride`` of them share a domain."""

    ranks: int
    stride: float
    span: int
    """Ranks from the first to the last member, inclusive."""


class Exchange(NamedTuple):
    """How tokens travel to experts: ``efficiency`` and ``seconds`` of an uneven all-to-all inside a domain; ``outside``, the share
    of the bytes between domains that is left where one copy of a token goes to each node (DeepEP, HybridEP: ``forwarded`` from
    there to its experts' ranks, so that every copy travels inside a node as well), and the ``outside_efficiency`` of that."""

    efficiency: Number = 1.0
    seconds: Number = 0.0
    outside: Number = 1.0
    outside_efficiency: Number = 1.0
    forwarded: Any = False


@dataclass(frozen=True)
class Network:
    """A cluster as one layout uses it."""

    cluster: ClusterSpec
    layout: Layout
    exchange: Exchange | None = None

    def group(self, axis: str) -> Group:
        """The group of ``axis``: a mesh axis, ``cp``'s parts ``ring`` and ``ulysses``, ``dp`` (both parts), ``zero`` (the ranks
        over which ZeRO shards dense parameters: dp_shard x cp), ``edp_shard``, ``edp_replicate``, ``etp_ep``."""
        return _group(self.layout, axis, self.cluster.levels[0].size)

    def seconds(self, kind: str, axis: str, bytes: float, count: float = 1) -> float:
        """Seconds of ``count`` collectives in a row over ``axis``; 0 for a group of one."""
        group = self.group(axis)
        if group.ranks <= 1 or not bytes:
            return 0.0
        price = partial(_seconds, self.cluster)
        if kind == "send_recv":
            return count * price(kind, float(bytes), 2, reach(self.cluster, group.ranks, group.stride))
        if axis == "ep" and kind == "all_to_all" and self.exchange is not None:
            return count * float(exchanged(price, self.cluster, self.exchange, float(bytes), group.ranks, group.stride))
        return count * price(kind, float(bytes), group.ranks, group.stride)

    def sent(self, kind: str, axis: str, bytes: float, count: float = 1) -> dict[str, float]:
        """Wire bytes of one rank by the name of the level they travel on: inside a domain and, for the share that leaves it,
        outside."""
        group = self.group(axis)
        if group.ranks <= 1 or not bytes:
            return {}
        if kind == "send_recv":
            return {self.cluster.level_of(2, max(1, round(reach(self.cluster, group.ranks, group.stride)))).name: bytes * count}
        out: dict[str, float] = {}
        below = 1
        for level, inside in zip(self.cluster.levels, self.cluster.spread(group.ranks, group.stride), strict=True):
            here = int(inside)
            if here > below:
                if kind == "all_to_all":
                    left = self.exchange.outside if self.exchange is not None and axis == "ep" and below > 1 else 1.0
                    out[level.name] = bytes * (here - below) / group.ranks * count * left
                else:
                    out[level.name] = wire_bytes(kind, bytes / below, here / below) * count
                below = here
        return out


def reach(cluster: ClusterSpec, ranks: Number, stride: Number) -> Number:
    """How far apart to price a message between neighbours of a group: some pair of a group that leaves a domain lies across its
    border, and the ring (or the pipeline) goes at that pair's pace."""
    apart = stride
    for level in cluster.levels[:-1]:
        apart = where(ranks * stride > level.size, maximum(apart, level.size), apart)
    return apart


Price = Callable[[str, Number, Number, Number], Number]
"""Seconds of a collective of a kind, from its bytes, ranks and stride."""


def exchanged(
    price: Price, cluster: ClusterSpec, exchange: Exchange, bytes: Number, ranks: Number, stride: Number, *, any_order: bool = False
) -> Number:  # fmt: skip
    """Seconds of one all-to-all of tokens: the slower of what stays inside the innermost domain and what leaves it. ``any_order``: at
    least, however the group's ranks lie; how many of them share a domain says how long forwarding inside it takes, so that it is left
    out."""
    inside = minimum(ranks, maximum(1, cluster.levels[0].size // maximum(stride, 1)))
    part = where(exchange.forwarded, bytes, bytes * inside / ranks) / exchange.efficiency
    whole = bytes * exchange.outside / exchange.outside_efficiency
    within = 0.0 if always_one(inside) else where(inside > 1, price("all_to_all", part, inside, stride), 0.0)
    across = 0.0 if nowhere(inside < ranks) else where(inside < ranks, price("all_to_all", whole, ranks, stride), 0.0)
    if any_order:
        within = where(exchange.forwarded, 0.0, within)
    return maximum(within, across) + exchange.seconds


@lru_cache(maxsize=65536)
def _seconds(cluster: ClusterSpec, kind: str, bytes: float, ranks: int, stride: float) -> float:
    return float(cluster.collective_seconds(kind, bytes, ranks, stride))


@lru_cache(maxsize=8192)
def _group(layout: Layout, axis: str, domain: int) -> Group:
    if axis in (*EXPERT_AXES, "edp_shard", "edp_replicate", "etp_ep"):
        place = layout.etp * layout.ep
        ranks, stride = {
            "etp": (layout.etp, 1), "ep": (layout.ep, layout.etp), "etp_ep": (place, 1), "edp": (layout.edp, place),
            "edp_shard": (layout.edp_shard, place), "edp_replicate": (layout.edp_replicate, place * layout.edp_shard),
        }[axis]  # fmt: skip
        return _placed(
            ranks,
            [_rank_of_place(layout, i * stride) for i in range(min(ranks, domain))],
            _rank_of_place(layout, (ranks - 1) * stride),
            domain,
        )
    strides: dict[str, tuple[int, int]] = {}
    reach = 1
    for name, size in layout.axes:
        strides[name] = (size, reach)
        reach *= size
    if axis in ("ring", "ulysses"):
        _, base = strides["cp"]
        return _strided(layout.ulysses, base) if axis == "ulysses" else _strided(layout.ring, base * layout.ulysses)
    if axis == "dp":
        return _strided(layout.dp, strides["dp_shard"][1])
    if axis == "zero":
        parts = sorted((strides["cp"], strides["dp_shard"]), key=lambda part: part[1])
        (inner, first), (outer, second) = parts
        members = [i % inner * first + i // inner * second for i in range(min(inner * outer, domain))]
        return _placed(inner * outer, members, (inner - 1) * first + (outer - 1) * second, domain)
    return _strided(*strides[axis])


def _strided(ranks: int, stride: int) -> Group:
    return Group(ranks, float(stride), (ranks - 1) * stride + 1)


def _placed(ranks: int, first_members: list[int], last: int, domain: int) -> Group:
    inside = sum(member < domain for member in first_members)
    stride = domain / inside if inside > 1 and ranks > inside else (last / (ranks - 1) if ranks > 1 else 1.0)
    return Group(ranks, float(stride), last + 1)


def _rank_of_place(layout: Layout, place: int) -> int:
    """The rank at ``place`` of the first stage's mesh (the dense axes without pp)."""
    rank, stride = 0, 1
    for axis, size in layout.axes:
        if axis != "pp":
            rank += place % size * stride
            place //= size
        stride *= size
    return rank


class Priced(Protocol):
    """What prices collectives: a ``Network`` for one layout, or bounds for arrays of degrees (``planner.bulk``)."""

    @property
    def cluster(self) -> ClusterSpec: ...
    @property
    def layout(self) -> Any:
        """Its ``ring`` degree is read."""

    def seconds(self, kind: str, axis: str, bytes: Number, count: Number = 1) -> Number: ...


def exposed(
    network: Priced, execution: Execution, operations: Iterable[Operation], which: Pass, beside: Compute
) -> dict[str, Number]:
    """Seconds that the collectives of one pass add to its compute, by axis. ``beside``: the pass's own compute.

    Userbuffers and async-TP leave a share; Megatron hides, in backward, the gather of the input beside the input gradient's product
    and the reduction of the input gradient beside the weight gradient's; rings pass K and V beside the block at hand. All-to-all of
    tokens is exposed here: what a second microbatch hides of it needs both passes (``passes.unit_seconds``).
    """
    seconds: defaultdict[str, Number] = defaultdict(float)
    tp_behind: list[Number] = []
    ring: list[Number] = []
    overlap = execution.tp_overlap
    for op in operations:
        if not isinstance(op, Collective):
            continue
        time = network.seconds(op.kind, op.axis, op.bytes, op.count)
        if op.axis == "tp" and overlap in ("userbuffers", "async"):
            family, time = "tp", time * execution.tp_exposed
        elif op.axis == "tp" and overlap == "backward" and _behind(op, which):
            tp_behind.append(time)
            continue
        elif op.axis == "ring" and op.kind == "send_recv" and execution.cp_overlap and not is_host(network.cluster.gpu):
            ring.append(time)
            continue
        else:
            family = FAMILY.get(op.axis, op.axis)
        seconds[family] = seconds[family] + time
    if tp_behind:
        seconds["tp"] = seconds["tp"] + hidden(sum(tp_behind), beside.matmul)
    if ring:
        ranks = network.layout.ring
        seconds["cp"] = seconds["cp"] + hidden(sum(ring), beside.attention * (ranks - 1) / ranks)
    return dict(seconds)


FAMILY = {
    "ring": "cp",
    "ulysses": "cp",
    "etp_ep": "ep",
    "dp_shard": "dp",
    "dp_replicate": "dp",
    "zero": "dp",
    "edp_shard": "edp",
    "edp_replicate": "edp",
}
"""The axis under which seconds and bytes of a sub-axis are reported."""


def hidden(communication: Number, beside: Number) -> Number:
    """Seconds added by communication that runs beside ``beside`` seconds of work: what does not fit, and the slowing."""
    fits = np.minimum(communication, beside)
    return communication - fits + INTERFERENCE * fits


def paired(layout: Layout) -> bool:
    """Whether the schedule itself runs one microbatch's forward beside another's backward."""
    return layout.schedule in ("dualpipe", "dualpipe-v")


def _behind(op: Collective, which: Pass) -> bool:
    """Whether Megatron hides this TP collective in backward: all but the gather of the output gradient, which its products
    await."""
    return which == "backward_weight" or (which == "backward_input" and op.kind in ("reduce_scatter", "all_reduce"))


def seconds_of(network: Priced, collectives: Iterable[Collective]) -> Number:
    """Seconds of ``collectives``, one after the other."""
    return sum(network.seconds(op.kind, op.axis, op.bytes, op.count) for op in collectives)


def bytes_by_link(network: Network, operations: Iterable[Operation]) -> dict[str, dict[str, float]]:
    """Wire bytes of the busiest rank for one run of ``operations``: axis -> level name -> bytes."""
    out: dict[str, dict[str, float]] = {}
    add_sent(out, network, operations)
    return out


def add_sent(
    total: dict[str, dict[str, float]], network: Network, operations: Iterable[Operation], times: float = 1.0
) -> None:  # fmt: skip
    """Add the wire bytes of ``times`` runs of ``operations``."""
    for op in operations:
        if isinstance(op, Collective):
            add_bytes(total, FAMILY.get(op.axis, op.axis), network.sent(op.kind, op.axis, op.bytes, op.count), times)


def add_bytes(total: dict[str, dict[str, float]], axis: str, sent: Mapping[str, float], times: float = 1.0) -> None:
    """Add ``times`` x ``sent`` (level name -> bytes) under ``axis``."""
    if sent:
        here = total.setdefault(axis, {})
        for level, size in sent.items():
            here[level] = here.get(level, 0.0) + size * times


def stragglers(nodes: int) -> float:
    """Factor by which a step of ``nodes`` nodes takes longer than its average rank: everyone waits for the slowest."""
    return 1.0 + STRAGGLERS * max(0, nodes - 1).bit_length()
