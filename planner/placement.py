"""Which ranks must sit together, and whether they do."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.layout import Layout
from profiles.hardware import ClusterSpec


def group_place(tp: int, per_host: int, domain: int) -> str:
    """What must hold a tensor-parallel group: its ``node``, its ``rack`` (an NVLink domain of several hosts), or nothing (``any``:
    the plan itself spreads it further)."""
    if tp <= per_host and per_host % tp == 0:
        return "node"
    return "rack" if tp <= domain else "any"


def per_host(cluster: ClusterSpec) -> int:
    """Ranks that one torchrun starts."""
    return cluster.gpus // cluster.hosts


def domain(cluster: ClusterSpec) -> int:
    """Ranks of the largest domain without a network: a node, or an NVLink rack."""
    return max((level.size for level in cluster.levels if not level.link.network), default=per_host(cluster))


def misplaced(layout: Layout, cluster: ClusterSpec, hosts: Sequence[str]) -> list[str]:
    """What is wrong with ranks 0, 1, ... on ``hosts``: one sentence a problem, with ranks and hosts. Empty when it fits the plan."""
    size = per_host(cluster)
    problems = []
    counts: dict[str, int] = {}
    for host in hosts:
        counts[host] = counts.get(host, 0) + 1
    problems += [f"host {host} has {n} ranks, the plan has {size} a host" for host, n in counts.items() if n != size]
    within = group_place(layout.tp, size, domain(cluster))
    if within == "node":
        for first in range(0, layout.world, layout.tp):
            group = layout.group(first, "tp") if layout.axes[0][0] != "tp" else range(first, first + layout.tp)
            found = list(dict.fromkeys(hosts[r] for r in group))
            if len(found) > 1:
                where = " and ".join(found[:3])
                problems.append(
                    f"tensor-parallel group of ranks {group[0]} to {group[-1]} spans {where}; it must lie inside a node"
                )
    return problems


def host_map(hosts: Sequence[str]) -> list[str]:
    """Lines ``ranks 0-7: host``, runs of ranks on one host together."""
    lines, first = [], 0
    for rank in range(1, len(hosts) + 1):
        if rank == len(hosts) or hosts[rank] != hosts[first]:
            lines.append(f"ranks {first}-{rank - 1}: {hosts[first]}")
            first = rank
    return lines
