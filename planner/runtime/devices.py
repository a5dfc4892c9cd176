"""Which devices a run computes on: those the plan was made for, or what the ``device`` setting says instead.

A plan for GPUs is not run on processors unasked (it would crawl, and its row of measurements would be of another machine), nor one for
processors on GPUs. ``check`` needs torch only where GPUs are to be counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from profiles.errors import InputError

if TYPE_CHECKING:
    import torch

    from profiles.cluster import ClusterSpec

Kind = Literal["cpu", "cuda"]
GIB = 2**30
ENOUGH = 0.95
"""Share of the plan's device memory that a device must have: drivers take some of what a datasheet says."""


def kind_of(cluster: ClusterSpec, wish: str) -> Kind:
    """What ``wish`` (plan, cpu, cuda) means for a plan made for ``cluster``."""
    if wish == "plan":
        return "cpu" if cluster.gpu.is_host else "cuda"
    return "cuda" if wish == "cuda" else "cpu"


def as_planned(cluster: ClusterSpec, wish: str) -> bool:
    """Whether a run computes on the kind of device that its plan is for: what it measures is then of that cluster."""
    return kind_of(cluster, wish) == kind_of(cluster, "plan")


def check(cluster: ClusterSpec, wish: str, processes: int, *, alone: bool) -> list[str]:
    """Whether this machine has the devices for ``processes`` of a plan, which are all of it where ``alone``; what is worth saying.

    Raises InputError naming ``--device``, what the plan was made for and what is here.
    """
    hosts = cluster.hosts
    asked = f"the plan is for {cluster.gpus} x {cluster.gpu.name} on {hosts} machine{'s' if hosts > 1 else ''}"
    if alone and hosts > 1 and wish == "plan":
        rule = f"{asked} and axisplan run starts the processes of one; emit it and start launch.sh on each, or run all of it here"
        raise InputError("--device", wish, rule, "cpu")
    said = [] if as_planned(cluster, wish) else [f"{asked}, not on {wish}: no MFU, and no row of measurements"]
    if kind_of(cluster, wish) == "cpu":
        return said
    import torch

    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if here < processes:
        found = f"{here} CUDA device{'s' if here != 1 else ''}" if here else "no CUDA device"
        raise InputError("--device", wish, f"{asked}, {processes} processes start here, and this machine has {found}", "cpu")
    least = min(torch.cuda.get_device_properties(n).total_memory for n in range(processes))
    if not cluster.gpu.is_host and least < ENOUGH * cluster.gpu.memory_bytes:
        name, wanted = torch.cuda.get_device_name(0), float(cluster.gpu.memory_bytes)
        said.append(f"{asked} of {wanted / GIB:.0f} GiB, here are {name} of {least / GIB:.0f} GiB: it may not fit")
    return said


def device_of_rank(kind: Kind, local_rank: int) -> torch.device:
    """``cuda:local_rank``, or the CPU."""
    import torch

    return torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")


def backend_of(device: torch.device) -> str:
    """NCCL for GPUs, gloo for CPUs."""
    return "nccl" if device.type == "cuda" else "gloo"
