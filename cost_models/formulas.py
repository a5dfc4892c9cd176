"""The formulas behind a memory figure, with their numbers and sources, as ``axisplan explain`` prints them."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.memory import StageMemory, stage_memory
from cost_models.stage_states import stage_holding
from cost_models.state_bytes import bytes_of, shards

ZERO = "ZeRO, arXiv:1910.02054"


@dataclass(frozen=True, slots=True)
class Formula:
    """``text`` with numbers put in gives ``value`` bytes. ``falls_with_data_parallel``: whether more data-parallel ranks shrink it."""

    name: str
    text: str
    value: float
    source: str
    falls_with_data_parallel: bool = False


def memory_formulas(job: Job, layout: Layout, rank: int = 0) -> tuple[Formula, ...]:
    """The terms of one pipeline rank's memory; their allocated parts add to ``peak_allocated``."""
    stage: StageMemory = stage_memory(job, layout)[rank]
    held, trained = stage_holding(job, layout, rank)
    each = bytes_of(job.execution, job.precision, job.optimizer, layout.zero)
    dense, expert = shards(layout)
    zero = layout.zero

    def over(split: bool, per: float, counts: tuple[float, float]) -> str:
        parts = [(counts[0], dense, "dense"), (counts[1], expert, "expert")]
        shown = [f"{per:g} B x {n:,.0f} {name}{f' / {ways}' if split and ways > 1 else ''}" for n, ways, name in parts if n]
        return " + ".join(shown) or "0"

    weights, grads = (float(held.dense), float(held.expert)), (float(trained.dense), float(trained.expert))
    execution = job.execution
    slack = execution.slack
    return (
        Formula("parameters", over(zero == 3, each.weight, weights), stage.parameters, ZERO, zero == 3),
        Formula("gradients", over(zero >= 2, each.gradient, grads), stage.gradients, ZERO, zero >= 2),
        Formula(
            "optimizer",
            over(zero >= 1, each.optimizer, grads),
            stage.optimizer,
            f"{ZERO}; {job.optimizer}: master {each.master:g}, moments {each.moments:g}, gradient copy {each.extra:g} B",
            zero >= 1,
        ),
        Formula(
            "activations",
            "kept tensors of each layer x microbatches in flight",
            stage.activations,
            "cost_models.layers (Korthikanti et al. 2022, arXiv:2205.05198, section 4) x schedules.in_flight",
        ),
        Formula("temporary", f"fullest at: {stage.peak_at}", stage.temporary, "cost_models.layers, cost_models.overheads"),
        Formula(
            "allocator slack",
            f"allocated x {slack - 1:g} + {execution.workspace_bytes / 2**20:g} MiB workspaces",
            stage.peak_reserved - stage.peak_allocated,
            execution.source_of("reserved_ratio"),
        ),
        Formula("context", "CUDA context", job.cluster.gpu.context_bytes, "GPU profile"),
        Formula(
            "communication",
            f"{execution.communicator_bytes / 2**30:g} GiB a communicator, {execution.all_to_all_bytes / 2**30:g} more for all-to-all",
            stage.communication,
            execution.source_of("communicator_bytes"),
        ),
    )
