"""A cluster: GPUs, the domains they sit in, and what a collective over any regular group of ranks costs.

Ranks are numbered node by node; a group is ``ranks`` ranks ``stride`` apart, aligned. ``levels`` are nested domains, innermost
first: NVLink (or PCIe, or shared memory), then the network, which may itself be several (pods behind an oversubscribed spine).
Files and names: ``profiles.catalogue``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from profiles.errors import InputError
from profiles.gpu import STRICT, Constant, GpuProfile
from profiles.links import Link
from profiles.operations import Number, wire_bytes


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

            name, levels = f"{self.kind}:{gpus // per_node}x{per_node}", shaped_levels(self.kind, gpus // per_node, per_node)
        else:
            inner = tuple(level for level in self.levels[:-1] if level.size < gpus)
            name, levels = self.name, (*inner, replace(self.levels[len(inner)], size=gpus))
        host = min(self.gpus_per_host, gpus)
        return replace(self, name=name, gpus=gpus, gpus_per_node=per_node, gpus_per_host=host, levels=levels)

    def spread(self, ranks: Number, stride: Number = 1) -> list[Number]:
        """How many ranks of such a group share one domain of each level, innermost first (the last entry is ``ranks``)."""
        inside = [np.clip(level.size // np.maximum(stride, 1), 1, ranks) for level in self.levels[:-1]]
        return [*inside, ranks]

    def level_of(self, ranks: int, stride: int = 1) -> Level:
        """The innermost level whose domain holds the whole group."""
        for level, inside in zip(self.levels, self.spread(ranks, stride), strict=True):
            if inside >= ranks:
                return level
        return self.levels[-1]

    def collective_seconds(self, kind: str, bytes: Number, ranks: Number, stride: Number = 1, sharing: Number = 1) -> Number:
        """Seconds of a collective of full buffer ``bytes`` over ``ranks`` ranks ``stride`` apart, alone on its GPUs.

        Within a domain: the link's own curve. Across domains the rings are pipelined, so the slowest level sets the bandwidth term
        and latencies add: ``sum of alphas + max_l(S/(n_l B_l)) + c sqrt(S)``, where n_l ranks of the group sit in one domain below
        level l and each brings its own NIC. An all-to-all sends each level's part over that level. An all-reduce takes the faster
        of ring and tree. ``sharing``: groups that use one NIC (or one shared bus) at once. A send_recv goes over the level that holds
        both ends, ``stride`` apart. Arrays welcome everywhere.
        """
        if kind == "send_recv":
            return self._send(bytes, ranks, stride, sharing)
        inside = self.spread(ranks, stride)
        if kind == "all_to_all":
            return self._exchange(bytes, ranks, inside, sharing)
        wire = wire_bytes(kind, bytes, ranks)
        ring_alpha, tree_alpha, root = 0.0, 0.0, 0.0
        ring_rate, tree_rate = 0.0, 0.0
        below: Number = 1
        for level, here in zip(self.levels, inside, strict=True):
            link, domains = level.link, here / below
            used = np.asarray(here) > below
            if link.network:
                alpha, inverse, c = link.curve(kind, domains)
                inverse = inverse * sharing * level.slowing / below
                efficiency = link.tree_efficiency.value if link.tree_efficiency is not None else 1.0
                ring_alpha = ring_alpha + used * (alpha + link.hops(kind, domains))
                tree_alpha = tree_alpha + used * (alpha + link.tree_hops(domains))
                tree_rate = np.maximum(tree_rate, used * inverse / efficiency)
            else:
                rest = ranks / here
                _, inverse, c = link.curve(kind, here / below)
                inverse = inverse * level.slowing * (sharing if link.shared else 1)
                ring_alpha = ring_alpha + used * link.curve(kind, (ranks - rest + 1) / below)[0]
                tree_alpha = tree_alpha + used * link.curve(kind, here / below)[0]
                tree_rate = np.maximum(tree_rate, used * inverse)
            ring_rate = np.maximum(ring_rate, used * inverse)
            root = np.maximum(root, used * c)
            below = here
        seconds = ring_alpha + wire * ring_rate
        if kind == "all_reduce":
            seconds = np.minimum(seconds, tree_alpha + wire * tree_rate)
        return seconds + root * np.sqrt(wire)

    def _send(self, bytes: Number, ranks: Number, stride: Number, sharing: Number) -> Number:
        together = (np.asarray(ranks) > 1) * 1.0
        seconds: Number = 0.0
        reached: Number = np.asarray(False)
        for level in self.levels:
            here = (np.asarray(stride) * 2 <= level.size) | (level is self.levels[-1])
            alpha, inverse, c = level.link.curve("send_recv", 2)
            share = sharing if level.link.network or level.link.shared else 1
            cost = alpha + bytes * inverse * level.slowing * share + c * np.sqrt(bytes)
            seconds = seconds + (here & ~reached) * cost
            reached = reached | here
        return seconds * together

    def _exchange(self, bytes: Number, ranks: Number, inside: list[Number], sharing: Number) -> Number:
        alpha, rate, root = 0.0, 0.0, 0.0
        below: Number = 1
        for level, here in zip(self.levels, inside, strict=True):
            link = level.link
            used = np.asarray(here) > below
            part = bytes * (here - below) / ranks
            base, inverse, c = link.curve("all_to_all", here / below)
            share = sharing if link.network or link.shared else 1
            alpha = alpha + used * (base + (link.hops("all_to_all", (here - below) + 1) if link.network else 0.0))
            rate = np.maximum(rate, used * part * inverse * level.slowing * share)
            root = np.maximum(root, used * c * np.sqrt(part))
            below = here
        return alpha + rate + root
