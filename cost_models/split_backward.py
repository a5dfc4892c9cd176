"""Memory of a chunk whose backward runs in two passes, as PyTorch splits it (``Execution.split_backward_keeps_graph``).

The input-gradient pass frees nothing: at its end everything saved but what lies above the last weights (the loss's tensors, the
experts' results) is there, and the gradients of all linear outputs. The weight-gradient pass goes through the weights in the
module's order, first layer to last, and a tied head (the embedding) before them: a weight's gradient is made while its output's
gradient is there, which then goes; all weight gradients wait until the last is made. Source: torch.distributed.pipelining._backward
(2.13), traced by the dry run (docs/dry-run.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cost_models.arrays import maximum
from cost_models.job import Job
from cost_models.layer_cost import LOSS, LayerCost, Local
from cost_models.stage_states import unit_holding
from profiles.operations import GroupedMatmul, Matmul, Number


@dataclass(frozen=True, slots=True)
class Unit:
    """``count`` units in a row of a weight-gradient pass: bytes that go as each one's gradients are made (``frees``), of these gradients
    (``own``), the most by which they are more than what went meanwhile (``within``), of the bucket that they are taken into under
    ZeRO-2."""

    count: int
    frees: Number
    own: Number
    within: Number
    bucket: Number


def above_weights(cost: LayerCost) -> Number:
    """Of what a unit saves, that which lies above its last weight: no weight-gradient pass needs it where no weight follows."""
    names = LOSS if any(s.name.endswith("_post_norm_input") for s in cost.saved) else (*LOSS, "experts_output")
    return sum(s.bytes for s in cost.saved if s.name in names)


def outlasting(cost: LayerCost) -> Number:
    """Of what a unit holds for its weight-gradient pass, that which no weight's own node keeps: it goes with the whole graph, when the
    pass is over. Attention keeps its output too."""
    by_weights = [s.name for s in cost.saved if (s.held_for_weight and s.name != "attention_output") or s.module == "norm"]
    return sum(s.bytes for s in cost.saved if s.name not in (*LOSS, *by_weights))


def joining_gradients(job: Job, degrees: Any) -> Number:
    """The most that an input-gradient pass needs for itself: two gradients of a layer's input and their sum, over TP."""
    local = Local(job, degrees)
    return (1 if job.execution.fused_qkv else 3) * local.tokens * job.model.hidden * local.bytes


def within(job: Job, cost: LayerCost) -> Number:
    """The most by which a unit's weight gradients are more than the outputs' gradients that have gone meanwhile."""
    each = _gradient_bytes(job)
    most: Number = 0
    made: Number = 0
    gone: Number = 0
    for op in reversed(cost.backward_weight):
        if isinstance(op, Matmul):
            made, output = made + each * op.m * op.n, 2 * op.k * op.n
        elif isinstance(op, GroupedMatmul):
            made, output = made + each * op.groups * op.n * op.k, 2 * op.tokens * op.n
        else:
            continue
        most = maximum(most, made - gone)
        gone = gone + output
    return most


def weight_pass_peak(units: Sequence[Unit], held: Number) -> Number:
    """The most beyond what a chunk has ``held`` for its weight-gradient pass; ``units`` in the order of the pass. When it is over, the
    gradients alone are there, and go into their buckets one after the other."""
    most: Number = 0
    beyond: Number = 0
    for unit in units:
        most = maximum(most, beyond + unit.within)
        most = maximum(most, beyond + (unit.count - 1) * (unit.own - unit.frees) + unit.within)
        beyond = beyond + unit.count * (unit.own - unit.frees)
    most = maximum(most, beyond)
    beyond = sum(unit.count * unit.own for unit in units) - held
    for unit in units:
        most = maximum(most, beyond + unit.bucket)
        beyond = beyond - unit.count * unit.own
    return most


def own_gradients(job: Job, degrees: Any, unit: int | str) -> Number:
    """Bytes of the gradients that autograd makes for a unit's weights."""
    return _gradient_bytes(job) * unit_holding(job, degrees, unit)[1].all


def _gradient_bytes(job: Job) -> float:
    """Bytes an element of the gradient that autograd makes."""
    return job.execution.weight_gradient_bytes * (2 if job.precision == "fp32" else 1)
