"""A cluster: GPUs, the domains they sit in, and what a collective over any regular group of ranks costs.

Ranks are numbered node by node; a group is ``ranks`` ranks ``stride`` apart, aligned. ``levels`` are nested domains, innermost
first: NVLink (or PCIe, or shared memory), then the network, which may itself be several (pods behind an oversubscribed spine).
Files and names: ``profiles.catalogue``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from profiles.errors import InputError
from profiles.gpu import STRICT, Constant, GpuProfile
from profiles.links import Link
from profiles.operations import Number, larger, smaller, wire_bytes

Way = tuple[Number, list[tuple[Number, Number]]]
"""One algorithm: its latency in seconds, and for each level (seconds a byte of the full buffer, seconds a square root of one)."""


def seconds_of_ways(ways: Sequence[Way], bytes: Number) -> Number:
    """Seconds of a collective of full buffer ``bytes`` by the fastest of some algorithms. Arrays welcome."""
    root = np.sqrt(bytes) if isinstance(bytes, np.ndarray) else math.sqrt(bytes)
    best: Number = None
    for alpha, terms in ways:
        slowest: Number = 0.0
        for rate, c in terms:
            slowest = larger(slowest, rate * bytes + c * root)
        best = alpha + slowest if best is None else smaller(best, alpha + slowest)
    return best


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Level:
    """``size`` ranks that reach one another over ``link``; the last level spans the cluster.

    ``oversubscription``: bandwidth below this level over bandwidth through it (2 = half). ``rail_optimised``: GPUs of equal index
    in their node meet at one switch; where false, ``off_rail`` multiplies the achieved rate (colliding flows).
    """

    name: str
    size: int = Field(ge=1)
    link: Link
    oversubscription: float = Field(default=1.0, ge=1)
    rail_optimised: bool = True
    off_rail: float = Field(default=0.85, gt=0, le=1)

    @property
    def slowing(self) -> float:
        """By what the link's bandwidth is divided at this level."""
        return self.oversubscription / (1.0 if self.rail_optimised or not self.link.network else self.off_rail)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Pool:
    """Part of a mixed cluster: ``gpus`` of one type, which are consecutive ranks."""

    gpu: GpuProfile
    gpus: int = Field(ge=1)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ClusterSpec:
    """GPUs and links. ``gpus_per_node``: GPUs of one node as the user counts them (a rack, for NVL72); ``gpus_per_host``: those one
    operating system sees (what torchrun starts on). ``pools`` is empty unless the GPUs differ; ``gpu`` is then the first pool's.
    ``host_memory_bytes`` is per host; ``price_per_gpu_hour`` in US dollars."""

    name: str
    gpu: GpuProfile
    gpus: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    levels: tuple[Level, ...] = Field(min_length=1)
    gpus_per_host: int = Field(ge=1)
    host_memory_bytes: Constant
    price_per_gpu_hour: Constant
    pools: tuple[Pool, ...] = ()
    kind: str = ""
    """The built-in cluster this one is an instance of; empty for a file."""
    date: str = ""
    host: str = ""

    def __hash__(self) -> int:
        return hash((self.name, self.gpus, self.gpus_per_node, self.gpu.name, self.kind))

    def __post_init__(self) -> None:
        sizes = [level.size for level in self.levels]
        if any(small >= large for small, large in pairwise(sizes)):
            raise ValueError(f"levels must grow outwards: {sizes}")
        if sizes[-1] < self.gpus:
            raise ValueError(f"the last level holds {sizes[-1]} of {self.gpus} GPUs: it must span the cluster")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(f"{self.gpus} GPUs are not whole nodes of {self.gpus_per_node}")
        if self.pools and sum(pool.gpus for pool in self.pools) != self.gpus:
            raise ValueError(f"the pools hold {sum(pool.gpus for pool in self.pools)} GPUs, the cluster {self.gpus}")
        if self.host_memory_bytes.value <= 0 or self.price_per_gpu_hour.value < 0:
            raise ValueError("host_memory_bytes must be positive and price_per_gpu_hour not negative")

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_node)

    @property
    def hosts(self) -> int:
        """Operating systems: torchrun agents, Slurm nodes."""
        return math.ceil(self.gpus / self.gpus_per_host)

    def with_gpus(self, gpus: int) -> ClusterSpec:
        """The same kind of cluster with ``gpus`` GPUs: inner domains keep their size, the outermost spans them all."""
        if gpus < 1:
            raise InputError("gpus", gpus, "at least one GPU", 1)
        if self.pools:
            raise InputError("gpus", gpus, "a mixed cluster has the GPUs of its pools; change them in its file", self.gpus)
        if gpus > self.gpus_per_node and gpus % self.gpus_per_node:
            down = gpus // self.gpus_per_node * self.gpus_per_node
            up = down + self.gpus_per_node
            raise InputError("gpus", gpus, f"whole nodes of {self.gpus_per_node}", down if up * down > gpus * gpus else up)
        per_node = min(self.gpus_per_node, gpus)
        if self.kind:
            from profiles.catalogue import shaped_levels

            own = {level.name: level for level in self.levels}
            shaped = shaped_levels(self.kind, gpus // per_node, per_node)
            levels = tuple(replace(own.get(level.name, level), size=level.size) for level in shaped)
            name = f"{self.kind}:{gpus // per_node}x{per_node}"
        else:
            inner = tuple(level for level in self.levels[:-1] if level.size < gpus)
            name, levels = self.name, (*inner, replace(self.levels[len(inner)], size=gpus))
        host = min(self.gpus_per_host, gpus)
        return replace(self, name=name, gpus=gpus, gpus_per_node=per_node, gpus_per_host=host, levels=levels)

    def with_network(self, bytes_per_second_per_gpu: float, source: str) -> ClusterSpec:
        """The same cluster with NICs of this line rate, one direction, each GPU's share; unchanged where there is no network."""
        if bytes_per_second_per_gpu <= 0:
            raise InputError("bytes_per_second_per_gpu", bytes_per_second_per_gpu, "must be positive", None)
        levels = tuple(
            replace(level, link=level.link.at_peak(bytes_per_second_per_gpu, source)) if level.link.network else level
            for level in self.levels
        )
        return replace(self, levels=levels)

    def to_yaml(self) -> str:
        """The whole cluster, GPU and links included, as a file that ``load_cluster`` reads back to an equal one."""
        from profiles.catalogue import to_yaml

        return to_yaml(self)

    def spread(self, ranks: Number, stride: Number = 1) -> list[Number]:
        """How many ranks of such a group share one domain of each level, innermost first (the last entry is ``ranks``)."""
        sizes = [level.size for level in self.levels[:-1]]
        if isinstance(ranks, np.ndarray) or isinstance(stride, np.ndarray):
            return [*(np.clip(size // np.maximum(stride, 1), 1, ranks) for size in sizes), ranks]
        return [*(min(max(size // max(stride, 1), 1), ranks) for size in sizes), ranks]

    def level_of(self, ranks: int, stride: int = 1) -> Level:
        """The innermost level whose domain holds the whole group."""
        for level, inside in zip(self.levels, self.spread(ranks, stride), strict=True):
            if inside >= ranks:
                return level
        return self.levels[-1]

    def collective_seconds(self, kind: str, bytes: Number, ranks: Number, stride: Number = 1, sharing: Number = 1) -> Number:
        """Seconds of a collective of full buffer ``bytes`` over ``ranks`` ranks ``stride`` apart, alone on its GPUs.

        Within a domain: the link's own curve. Across domains the rings are pipelined, so latencies add and the slowest level sets
        the rest: ``sum_l alpha_l + max_l(S/(n_l B_l) + c_l sqrt(S))``, where n_l ranks of the group sit in one domain below level l
        and each brings its own NIC. An all-reduce takes the faster of ring and tree; an all-to-all sends each level's part over
        that level. ``sharing``: groups that use one NIC (or one shared bus) at once. A send_recv is priced between the two
        neighbours that are furthest apart. Zero for one rank. Arrays welcome everywhere.
        """
        if isinstance(ranks, np.ndarray) or isinstance(stride, np.ndarray) or isinstance(sharing, np.ndarray):
            return seconds_of_ways(self.ways(kind, ranks, stride, sharing), bytes)
        key = (kind, ranks, stride, sharing)
        found = self._known.get(key)
        ways = found if found is not None else self._known.setdefault(key, self.ways(kind, ranks, stride, sharing))
        return seconds_of_ways(ways, bytes)

    def choice(self, kind: str, bytes: float, ranks: int, stride: int = 1) -> tuple[str, str]:
        """(algorithm, protocol) that NCCL takes for such a collective, as it is priced here: ``ring`` or ``tree``, with ``NVLS`` where an
        all-reduce is reduced in the switch of its domains, or ``direct``; ``LL`` or ``Simple``, empty where no switch was measured."""
        level, inside = self.level_of(ranks, stride), self.spread(ranks, stride)
        first = next((k for k, here in enumerate(inside) if here > 1), 0)
        own = self.levels[first].link
        if kind in ("all_to_all", "send_recv"):
            return "direct", level.link.protocol(kind, bytes, ranks)
        seconds = [
            alpha + max(rate * bytes + c * math.sqrt(bytes) for rate, c in terms) for alpha, terms in self.ways(kind, ranks, stride)
        ]
        shape = "tree" if len(seconds) > 1 and seconds[1] < seconds[0] else "ring"
        reduced = kind == "all_reduce" and not own.network and own.in_switch(int(inside[first]))
        if level is self.levels[first]:
            return "NVLS" if reduced else "ring", own.protocol(kind, bytes, ranks)
        return f"NVLS {shape}" if reduced else shape, own.protocol(kind, bytes, int(inside[first]))

    @cached_property
    def _known(self) -> dict[tuple[str, Number, Number, Number], list[Way]]:
        return {}

    def ways(self, kind: str, ranks: Number, stride: Number = 1, sharing: Number = 1) -> list[Way]:
        """Each algorithm that such a collective may run by (``seconds_of_ways`` prices it): what does not depend on its bytes."""
        inside = self.spread(ranks, stride)
        if kind == "send_recv":
            ways = [self._neighbours(ranks, inside, sharing)]
        elif kind == "all_to_all":
            ways = [self._exchange(ranks, inside, sharing)]
        else:
            ways = [
                self._passes(kind, ranks, inside, sharing, tree) for tree in ([False, True] if kind == "all_reduce" else [False])
            ]
        if any(isinstance(x, np.ndarray) for x in (ranks, stride, sharing)):
            return ways
        return [(float(alpha), [(float(rate), float(c)) for rate, c in terms]) for alpha, terms in ways]

    def _passes(self, kind: str, ranks: Number, inside: list[Number], sharing: Number, tree: bool) -> Way:
        """Ring or tree: every level carries the whole wire traffic."""
        wire = wire_bytes(kind, 1.0, ranks)
        latency: Number = 0.0
        terms: list[tuple[Number, Number]] = []
        below: Number = 1
        for level, here in zip(self.levels, inside, strict=True):
            link, domains = level.link, here / below
            used = np.asarray(here) > below
            if link.network:
                alpha, inverse, c = link.curve(kind, domains)
                inverse = inverse * sharing * level.slowing / link.spreading(below)
                if tree:
                    alpha, inverse = alpha + link.tree_hops(domains), inverse * link.tree_slowing(domains)
                    halved = np.maximum(ranks / 2 / np.maximum(ranks - 1, 1), 0.5)
                    inverse = inverse * np.where((np.asarray(domains) <= 2) & (np.asarray(ranks) > 2), halved, 1.0)
                else:
                    alpha = alpha + link.hops(kind, domains)
            else:
                steps = domains if tree else (ranks - ranks / here) / below + 1
                _, inverse, c = link.curve(kind, here)
                alpha = link.curve(kind, steps)[0]
                inverse = inverse * level.slowing * (sharing if link.shared else 1)
            latency = latency + used * alpha
            terms.append((used * inverse * wire, used * c * np.sqrt(wire)))
            below = here
        return latency, terms

    def _neighbours(self, ranks: Number, inside: list[Number], sharing: Number) -> Way:
        latency, rate, root = 0.0, 0.0, 0.0
        reached: Number = np.asarray(ranks) <= 1
        for level, here in zip(self.levels, inside, strict=True):
            link = level.link
            alpha, inverse, c = link.curve("send_recv", 2)
            here_first = (np.asarray(here) >= ranks) & ~reached
            share = sharing if link.network or link.shared else 1
            latency = latency + here_first * alpha
            rate, root = rate + here_first * inverse * level.slowing * share, root + here_first * c
            reached = reached | here_first
        return latency, [(rate, root)]

    def _exchange(self, ranks: Number, inside: list[Number], sharing: Number) -> Way:
        """All-to-all: what goes to the ranks of a domain goes over that domain's link, all levels at once."""
        latency: Number = 0.0
        terms: list[tuple[Number, Number]] = []
        below: Number = 1
        for level, here in zip(self.levels, inside, strict=True):
            link = level.link
            used = np.asarray(here) > below
            part = (here - below) / ranks
            alpha, inverse, c = link.curve("all_to_all", here / below if link.network else here)
            share = sharing if link.network or link.shared else 1
            latency = latency + used * (alpha + (link.hops("all_to_all", here - below + 1) if link.network else 0.0))
            terms.append((used * part * inverse * level.slowing * share, used * c * np.sqrt(part)))
            below = here
        return latency, terms
