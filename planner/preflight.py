"""``launch.sh --check``: is the cluster the one the plan was made for? A minute at most, before thousands of GPUs start.

Every rank says where it is, times a matrix product and memory traffic on its device, and the collective of each mesh axis in its
own groups while all other groups do the same. What is slower than the plan's profile (everywhere) or than the other ranks (in
places) by more than ``tolerance`` is a problem, as is a tensor-parallel group that leaves its node. The exit code is 1 when there is
one, so that a launch script stops.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cost_models.job import Job
from cost_models.layout import Layout
from planner.placement import host_map, misplaced
from planner.plan import Plan
from planner.screen import seconds as shown
from profiles.errors import AxisplanError, InputError
from profiles.hardware import ClusterSpec
from profiles.operations import Collective

SECONDS = 30.0
TOLERANCE = 0.3
MOST = 20
"""Problems of one kind that are printed."""
KINDS = {"tp": "all_reduce", "cp": "all_gather", "dp": "all_reduce", "ep": "all_to_all", "edp": "all_reduce", "pp": "send_recv"}
"""The collective that stands for an axis."""


@dataclass(frozen=True)
class Axis:
    """A mesh axis to measure: the collective over ``ranks`` ranks ``stride`` apart, and what the plan's profile says it takes."""

    name: str
    op: Collective
    ranks: int
    expected: float


@dataclass
class Findings:
    """What was measured. ``hosts`` by rank; ``devices``: sample -> seconds by rank; ``axes``: axis -> (group's first rank, seconds)
    by rank; ``pairs``: (rank, neighbour) -> seconds of an axis that was slow."""

    hosts: list[str]
    devices: dict[str, list[float | str]] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)
    axes: dict[str, list[tuple[int, float | str]]] = field(default_factory=dict)
    pairs: dict[str, dict[tuple[int, int], float]] = field(default_factory=dict)


# -- what to measure ---------------------------------------------------------------------------------------------------------


def axes_of(job: Job, layout: Layout) -> list[Axis]:
    """The axes of more than one rank, with the plan's own prices."""
    cluster = job.cluster
    size = 4 << 20 if cluster.gpu.is_host else 64 << 20
    out = []
    for name, kind in KINDS.items():
        group = group_of(layout, 0, name)
        if len(group) < 2:
            continue
        bytes = -(-size // (4 * len(group))) * 4 * len(group)
        stride = group[1] - group[0]
        level = cluster.level_of(len(group), stride)
        sharing = layout.world // len(group) if level.link.shared else 1
        expected = float(cluster.collective_seconds(kind, bytes, len(group), stride, sharing))
        out.append(Axis(name, Collective(kind, name, bytes), len(group), expected))
    return out


def group_of(layout: Layout, rank: int, axis: str) -> tuple[int, ...]:
    """The rank's group along ``axis``; one rank where experts are not spread."""
    if axis in ("ep", "edp") and layout.ep * layout.etp == 1:
        return (rank,)
    return layout.group(rank, axis)


# -- what it means -----------------------------------------------------------------------------------------------------------


def problems_of(findings: Findings, axes: Sequence[Axis], tolerance: float) -> list[str]:
    """Everything that is wrong, worst kind first, one sentence each."""
    found = []
    for name, times in findings.devices.items():
        found += _slow_ranks(name, times, findings.expected[name], findings.hosts, tolerance)
    for axis in axes:
        found += _slow_groups(axis, findings.axes.get(axis.name, []), findings.hosts, tolerance)
        found += _slow_pairs(axis, findings.pairs.get(axis.name, {}), findings.hosts, tolerance)
    return found


def _slow_ranks(name: str, times: Sequence[float | str], expected: float, hosts: Sequence[str], tolerance: float) -> list[str]:
    good = [t for t in times if isinstance(t, float)]
    out = [f"rank {r} on {hosts[r]} cannot run {name}: {t}" for r, t in enumerate(times) if isinstance(t, str)][:MOST]
    if not good:
        return out
    middle = statistics.median(good)
    if middle > (1 + tolerance) * expected:
        out.append(f"{name} takes {shown(middle)}, {middle / expected:.2f} x the plan's {shown(expected)}, on the median rank")
    slow = [(t, r) for r, t in enumerate(times) if isinstance(t, float) and t > (1 + tolerance) * middle]
    for t, r in sorted(slow, reverse=True)[:MOST]:
        out.append(f"slow: rank {r} on {hosts[r]}: {name} takes {shown(t)}, {t / middle:.2f} x the median rank's")
    return out


def _slow_groups(axis: Axis, times: Sequence[tuple[int, float | str]], hosts: Sequence[str], tolerance: float) -> list[str]:
    what = f"{axis.name} {axis.op.kind} of {axis.op.bytes / 2**20:.0f} MiB over {axis.ranks}"
    broken = [(r, t) for r, (_, t) in enumerate(times) if isinstance(t, str)]
    if broken:
        rank, why = broken[0]
        return [f"{what} fails on rank {rank} on {hosts[rank]}: {why}"]
    groups: dict[int, float] = {}
    for first, t in times:
        groups[first] = max(groups.get(first, 0.0), float(t))
    if not groups:
        return []
    middle = statistics.median(groups.values())
    out = []
    if middle > (1 + tolerance) * axis.expected:
        out.append(
            f"{what} takes {shown(middle)}, {middle / axis.expected:.2f} x the plan's {shown(axis.expected)}, in the median group"
        )
    slow = sorted(((t, first) for first, t in groups.items() if t > (1 + tolerance) * middle), reverse=True)
    for t, first in slow[:MOST]:
        members = list(dict.fromkeys(hosts[r] for r, (g, _) in enumerate(times) if g == first))
        where = ", ".join(members[:4]) + (f" and {len(members) - 4} more hosts" if len(members) > 4 else "")
        out.append(f"slow: {what} in the group of rank {first} ({where}) takes {shown(t)}, {t / middle:.2f} x the median group's")
    return out


def _slow_pairs(axis: Axis, pairs: Mapping[tuple[int, int], float], hosts: Sequence[str], tolerance: float) -> list[str]:
    """The links that stand out; a host whose every pair is slow is named alone."""
    between: dict[tuple[str, str], float] = {}
    for (a, b), t in pairs.items():
        if hosts[a] != hosts[b]:
            key = (min(hosts[a], hosts[b]), max(hosts[a], hosts[b]))
            between[key] = max(between.get(key, 0.0), t)
    if len(between) < 3:
        return []
    middle = statistics.median(between.values())
    slow = {key: t for key, t in between.items() if t > (1 + tolerance) * middle}
    out, named = [], set()
    for host in sorted({h for key in slow for h in key}):
        own = [key for key in between if host in key]
        if len(own) > 1 and all(key in slow for key in own):
            named.add(host)
            worst = max(slow[key] for key in own)
            out.append(
                f"slow node: {host}: every exchange with it ({axis.name}) takes up to {worst / middle:.2f} x the median pair's"
            )
    for key, t in sorted(slow.items()):
        if not named & set(key):
            out.append(f"slow link: {key[0]} to {key[1]} ({axis.name}): {t / middle:.2f} x the median pair's")
    return out[:MOST]


# -- the run -------------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """One rank of the check, under torchrun. Returns 0, 1 with problems; rank 0 prints. Raises InputError for a plan of another
    size than this world."""
    parser = argparse.ArgumentParser("launch.sh --check", description="Measures GPUs and links against the plan.")
    parser.add_argument("plan")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long to measure, start-up aside (at most 60)")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="what counts as slow: 0.3 is 1.3 x as long")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments, _ = parser.parse_known_args(list(argv))
    plan = Plan.load(arguments.plan)
    layout = plan.layout_object
    world = int(os.environ.get("WORLD_SIZE", "0"))
    if world != layout.world:
        raise InputError("world", world, f"the plan is for {layout.world} ranks; start it through launch.sh --check", layout.world)
    import torch.distributed as dist

    findings, axes, problems = examine(plan, min(arguments.seconds, 60.0), arguments.tolerance)
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(_document(findings, axes, problems)) if arguments.json else _text(findings, axes, problems), flush=True)
    dist.barrier()  # torchrun ends all ranks when the first one fails: not before rank 0 has spoken
    dist.destroy_process_group()
    return 1 if problems else 0


def examine(plan: Plan, seconds: float, tolerance: float) -> tuple[Findings, list[Axis], list[str]]:
    """Measure, in step with all ranks; every rank gets the same answer. Raises AxisplanError when ranks cannot meet."""
    from profiles.measure import brief
    from profiles.measure.plan import product
    from profiles.measure.samples import Sample
    from profiles.measure.together import Workers
    from profiles.measure.worker import device_of_worker, join
    from profiles.operations import Pointwise

    job, layout = plan.job(), plan.layout_object
    device = device_of_worker(None)
    try:
        join(device, timeout_seconds=60.0)
    except RuntimeError as error:
        raise AxisplanError(f"check: the {layout.world} ranks could not meet: {str(error).splitlines()[0][:200]}") from None
    together = Workers()
    places = together.gather(brief.where_am_i(device))
    findings = Findings([place["host"] for place in places])
    axes = axes_of(job, layout)
    problems = misplaced(layout, job.cluster, findings.hosts) + _other_devices(places, job.cluster)
    if not problems:
        cpu = device.type == "cpu"
        side, traffic = (512, 8 << 20) if cpu else (8192, 256 << 20)
        dtype = "fp32" if cpu or job.precision == "fp32" else job.precision if job.precision == "fp16" else "bf16"
        samples: list[Sample[Any]] = [product(dtype, side, side, side), Sample(Pointwise(traffic, 1), form="add")]
        names = [f"{dtype} product {side} x {side} x {side}", f"memory traffic of {traffic >> 20} MiB"]
        part = seconds / (2 + 2 * len(axes))
        times = together.gather(brief.time_devices(samples, device, together, 2 * part))
        for index, name in enumerate(names):
            findings.devices[name] = [row[index] for row in times]
            findings.expected[name] = float(job.cluster.gpu.seconds(samples[index].operation))
        for axis in axes:
            group = group_of(layout, together.rank, axis.name)
            taken = brief.time_collective(axis.op, group, device, together, part)
            findings.axes[axis.name] = together.gather((group[0], taken))
            if _slow_groups(axis, findings.axes[axis.name], findings.hosts, tolerance):
                own = brief.time_pairs(int(axis.op.bytes), group, device, together, part)
                pairs = together.gather({(together.rank, peer): t for peer, t in own.items()})
                findings.pairs[axis.name] = {key: t for row in pairs for key, t in row.items()}
        problems = problems_of(findings, axes, tolerance)
    return findings, axes, problems


def _other_devices(places: Sequence[Mapping[str, Any]], cluster: ClusterSpec) -> list[str]:
    """Ranks whose device is another than most ranks', or has less memory than the plan's."""
    if cluster.gpu.is_host or cluster.pools:
        return []
    usual = statistics.mode(place["device"] for place in places)
    least = 0.95 * cluster.gpu.memory_bytes
    out = [
        f"rank {r} on {p['host']} has a {p['device']}, the others a {usual}" for r, p in enumerate(places) if p["device"] != usual
    ]
    small = [r for r, p in enumerate(places) if p["memory"] < least]
    if small:
        first = places[small[0]]
        who, wanted = f"{len(small)} ranks (first: {small[0]} on {first['host']})", cluster.gpu.memory_bytes
        out.append(f"{who} have {first['memory'] / 2**30:.0f} GiB a device, the plan's GPU {float(wanted) / 2**30:.0f}")
    return out[:MOST]


def _document(findings: Findings, axes: Sequence[Axis], problems: Sequence[str]) -> dict[str, Any]:
    return {
        "ok": not problems,
        "problems": list(problems),
        "hosts": host_map(findings.hosts),
        "devices": {name: {"seconds": times, "expected": findings.expected[name]} for name, times in findings.devices.items()},
        "axes": {a.name: {"kind": a.op.kind, "bytes": a.op.bytes, "ranks": a.ranks, "seconds": [t for _, t in findings.axes.get(a.name, [])],
                          "expected": a.expected} for a in axes},
    }  # fmt: skip


def _text(findings: Findings, axes: Sequence[Axis], problems: Sequence[str]) -> str:
    lines = []
    for name, times in findings.devices.items():
        good = [t for t in times if isinstance(t, float)]
        if good:
            lines.append(
                f"{name}: median rank {shown(statistics.median(good))}, slowest {shown(max(good))}, plan {shown(findings.expected[name])}"
            )
    for axis in axes:
        good = [t for _, t in findings.axes.get(axis.name, []) if isinstance(t, float)]
        if good:
            what = f"{axis.name} {axis.op.kind} of {axis.op.bytes / 2**20:.0f} MiB over {axis.ranks}"
            lines.append(
                f"{what}: median {shown(statistics.median(good))}, slowest {shown(max(good))}, plan {shown(axis.expected)}"
            )
    lines += [f"PROBLEM {problem}" for problem in problems]
    if problems:
        lines += host_map(findings.hosts)
        lines.append(f"check: {len(problems)} problems; nothing was started")
    else:
        lines.append(f"check: {len(findings.hosts)} ranks on {len(set(findings.hosts))} hosts are as the plan expects")
    return "\n".join(lines)


def run(argv: Sequence[str]) -> int:
    """``main`` as a worker process: one line on stderr for what goes wrong."""
    try:
        return main(argv)
    except AxisplanError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"axisplan: {error}", file=sys.stderr)
        return error.exit_code
