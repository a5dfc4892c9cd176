"""Parameters that one rank holds of a layer, the embedding or the head, before ZeRO shards them: what gradient reduction, parameter
gathering and the optimizer work on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cost_models.job import Job
from cost_models.layer_cost import LOW_PRECISION
from cost_models.layout import Layout
from profiles.parameters import layer_parameters

REPLICATED = ("norm", "router")
"""Parts that TP does not split."""


@dataclass(frozen=True, slots=True)
class Weights:
    """``dense`` parameters (sharded over dp_shard x cp), ``expert`` parameters (over edp_shard), and how many of the dense ones are
    weights of linear layers, which an 8-bit precision may store in one byte."""

    dense: float = 0.0
    expert: float = 0.0
    linear: float = 0.0

    def times(self, factor: float) -> Weights:
        return Weights(self.dense * factor, self.expert * factor, self.linear * factor)

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.dense + other.dense, self.expert + other.expert, self.linear + other.linear)

    def gather_bytes(self, job: Job) -> tuple[float, float]:
        """Bytes of the gathered (dense, expert) parameters."""
        execution = job.execution
        wide = 4.0 if job.precision == "fp32" else execution.gather_bytes
        narrow = 1.0 if job.precision in LOW_PRECISION and job.precision != "nvfp4" and execution.fp8_parameters else wide
        return wide * (self.dense - self.linear) + narrow * self.linear, narrow * self.expert


@lru_cache(maxsize=4096)
def kind_parameters(job: Job, kind: int) -> tuple[float, float, float]:
    """(split over TP, replicated over TP, routed experts) of one layer kind, unsharded."""
    parts = layer_parameters(job.model, job.model.kinds[kind])
    expert = parts.get("routed_experts", 0)
    replicated = sum(parts.get(name, 0) for name in REPLICATED)
    return float(sum(parts.values()) - expert - replicated), float(replicated), float(expert)


def unit_weights(job: Job, layout: Layout, unit: int) -> Weights:
    """Weights of a layer kind, or of the embedding (-1) or head (-2), on one rank."""
    model = job.model
    if unit < 0:
        rows = model.vocab / (layout.tp if job.execution.vocab_parallel else 1)
        width = model.embedding_width or model.hidden
        if unit == -1:
            return Weights(rows * width + model.learned_positions * model.hidden)
        shared = model.tied and layout.pp == 1
        return Weights((0.0 if shared else rows * width) + model.hidden * model.final_norm)
    split, replicated, expert = kind_parameters(job, unit)
    return Weights(split / layout.tp + replicated, expert / (layout.ep * layout.etp), split / layout.tp)
