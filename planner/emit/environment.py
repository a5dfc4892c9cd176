"""Environment that every target shares: the allocator (cases.md I06), NCCL, threads. Each variable has its reason.

What only the site knows (network interfaces, NICs, RoCE classes) is suggested in a comment and never invented.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from planner.emit.core import Variable
from planner.emit.options import Option, read_options
from planner.plan import Plan
from profiles.files import read_shipped

BLACKWELL = 10
DEEPEP = {
    "deepep": Option(r"deepep|uccl", "is deepep or uccl: which of them the dispatcher deepep is installed as", "uccl", "deepep")
}
"""UCCL-EP has DeepEP's interface and takes its place; a plan cannot know which of them is installed."""


@dataclass(frozen=True)
class Facts:
    """What the rules look at. ``capability``: CUDA's major number, None where the GPU is not known, 0 for other makers."""

    target: str
    capability: int | None
    cp: int = 1
    cuda_graphs: bool = False
    uccl_ep: bool = False
    nodes: int = 1


def shared(plan: Plan, target: str, options: Mapping[str, str] | None = None) -> tuple[Variable, ...]:
    """The variables of ``target`` that do not depend on its own arguments; empty of CUDA matters on a CPU."""
    job, layout = plan.job(), plan.layout_object
    if job.cluster.gpu.is_host:
        return (Variable("OMP_NUM_THREADS", "1", "One thread a process: the processes share the cores.", "default"),)
    uccl = layout.ep > 1 and layout.dispatcher == "deepep" and read_options(options or {}, DEEPEP)["deepep"] == "uccl"
    graphs = job.execution.graphs != "none"
    facts = Facts(target, capability(job.cluster.gpu.name), layout.cp, graphs, uccl, job.cluster.hosts)
    return (*threads(), *allocator(facts), *network(facts))


def threads() -> tuple[Variable, ...]:
    return (Variable("OMP_NUM_THREADS", "8", "torchrun would set 1; data loading and the CPU optimizer use more.", "default"),)


def allocator(facts: Facts) -> tuple[Variable, ...]:
    """Expandable segments where nothing breaks with them (cases.md I06)."""
    name, on = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
    if facts.capability == 0:
        return ()
    if facts.uccl_ep:
        return (Variable(name, "expandable_segments:False", "UCCL-EP cannot register buffers in expandable segments."),)
    if facts.target == "torchtitan" and facts.cp > 1 and facts.cuda_graphs:
        why = "Context parallelism under CUDA graphs hangs in TorchTitan with expandable segments (torchtitan issue 3306)."
        return (Variable(name, "expandable_segments:False", why),)
    variables = [
        Variable(name, on, "Segments that grow instead of fragmenting: cures out-of-memory with memory still free.", "default")
    ]
    if facts.cuda_graphs and (facts.capability is None or facts.capability < BLACKWELL):
        why = "Before Blackwell, NCCL may not register buffers in CUDA graphs when segments are expandable (Megatron-LM refuses)."
        variables.append(Variable("NCCL_GRAPH_REGISTER", "0", why))
    return tuple(variables)


def network(facts: Facts) -> tuple[Variable, ...]:
    """NCCL: errors are shown and end the job; the site's interfaces are suggested on several nodes."""
    variables = [
        Variable("NCCL_DEBUG", "WARN", "NCCL says what failed.", "default"),
        Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "A rank that lost a peer ends instead of hanging.", "default"),
    ]
    if facts.nodes > 1:
        variables += [
            Variable(
                "NCCL_SOCKET_IFNAME",
                "<interface>",
                "The interface the nodes reach each other over; NCCL guesses otherwise.",
                "suggest",
            ),
            Variable(
                "NCCL_IB_HCA",
                "<adapters>",
                "The InfiniBand or RoCE adapters of the compute network, storage's left out.",
                "suggest",
            ),
            Variable("NCCL_IB_GID_INDEX", "<index>", "RoCE only: the RoCE v2 entry of `show_gids`.", "suggest"),
            Variable("NCCL_IB_TC", "<traffic class>", "RoCE only: the lossless traffic class of your switches.", "suggest"),
        ]
    return tuple(variables)


# -- what is known of a GPU ---------------------------------------------------------------------------------------------------


@cache
def _gpus() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = read_shipped(Path(__file__).parents[1] / "data" / "gpus.yaml")
    return table


def capability(gpu: str) -> int | None:
    """CUDA's major compute capability of a built-in GPU (0: another maker's); None for a GPU of the user's own."""
    value = _gpus().get(gpu, {}).get("capability")
    return None if value is None else int(value)


def skypilot_name(gpu: str) -> str | None:
    """The GPU's name in SkyPilot's catalogue; None where it is not known to have one."""
    return _gpus().get(gpu, {}).get("skypilot")
