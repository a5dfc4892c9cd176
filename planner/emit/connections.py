"""CUDA_DEVICE_MAX_CONNECTIONS: what Megatron demands by architecture and features, and what helps TorchTitan (cases.md I01)."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.job import Job
from cost_models.layout import Layout
from planner.emit.core import Variable
from planner.emit.environment import BLACKWELL, capability

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class Streams:
    """What the rules look at. ``capability``: CUDA's major number, None where not known, 0 for other makers; ``fsdp``: ZeRO 2 or 3."""

    capability: int | None
    tp: int = 1
    cp: int = 1
    fsdp: bool = False
    ep_overlap: bool = False

    @classmethod
    def of(cls, job: Job, layout: Layout) -> Streams:
        overlap = job.execution.ep_overlap and layout.ep > 1
        return cls(capability(job.cluster.gpu.name), layout.tp, layout.cp, layout.zero >= 2, overlap)


def megatron(facts: Streams) -> tuple[Variable, ...]:
    """1 for tp and cp before Blackwell, never 1 for FSDP, a note where overlapped experts want the opposite of tp and cp."""
    if facts.capability == 0:
        return ()
    if facts.fsdp:
        return (Variable(NAME, None, "Megatron-FSDP refuses the value 1: its gathers must run beside compute."),)
    blackwell = facts.capability is not None and facts.capability >= BLACKWELL
    if facts.tp * facts.cp == 1 or blackwell:
        return ()
    if facts.ep_overlap:
        why = "Conflict before Blackwell: tp and cp want 1, overlapped expert exchange wants many; 32 favours the experts, 1 tp and cp."
        return (Variable(NAME, "32", why),)
    return (
        Variable(
            NAME, "1", "Before Blackwell, Megatron's tp and cp collectives start in time only when launches keep their order."
        ),
    )


def torchtitan(facts: Streams) -> tuple[Variable, ...]:
    """Many connections where FSDP and tp run their collectives beside each other."""
    if facts.capability == 0 or not (facts.fsdp and facts.tp > 1):
        return ()
    why = "FSDP and tp use many streams; with too few connections their collectives wait for each other."
    return (Variable(NAME, "32", why, "default"),)
