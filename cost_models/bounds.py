"""Lower bounds of the step time of many layouts at once: the same operations and prices, on arrays of degrees.

A bound counts what no stage split, schedule, recompute choice or ZeRO stage can avoid: the compute of forward and backward (or the
host's launches where they take longer) on the busiest stage, which holds at least the mean; one microbatch's way through all
stages; the optimizer step of the mean stage; the step's fixed cost and stragglers. Communication, recompute and bubbles are left
out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.communication import STRAGGLERS
from cost_models.compute import host_seconds, is_host, price
from cost_models.job import Job
from cost_models.layers import embedding_operations, head_operations, layer_operations, mtp_operations
from cost_models.measured import measured_pace, rows_of
from cost_models.passes import kind_of, mean_pace, with_activations
from cost_models.update import OPTIMIZER_SHARE
from profiles.operations import Collective, Operation

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ArrayDegrees:
    """Degrees of many layouts, arrays of one shape, as ``layer_cost.Degrees``."""

    tp: Any
    pp: Any
    micro_batch: Any
    dp: Any
    ring: Any
    ulysses: Any
    ep: Any
    etp: Any
    capacity: Any
    sp: Any
    cp_kind: str = "ring"
    dispatcher: str = "alltoall"


def bulk_lower_bounds(
    job: Job, *, tp: Any, pp: Any, micro_batch: Any, dp: Any, cp: Any = 1, ep: Any = 1, etp: Any = 1, capacity: Any = 0.0,
    cp_kind: str = "ring"
) -> Floats:  # fmt: skip
    """Seconds below which ``step.estimate`` of no layout with these degrees lies, whatever it leaves open. Arrays broadcast."""
    arrays = np.broadcast_arrays(*(np.asarray(x) for x in (tp, pp, micro_batch, dp, cp, ep, etp, capacity)))
    t, p, b, d, c, e, et, cap = arrays
    one = np.ones_like(c)
    ulysses = cp_kind == "ulysses"
    degrees = ArrayDegrees(t, p, b, d, one if ulysses else c, c if ulysses else one, e, et, cap, t > 1, cp_kind)
    microbatches = job.global_batch // (b * d)
    forward, backward, weight = _model_seconds(job, degrees)
    busiest = microbatches * (forward + backward + weight) / p
    through = forward + backward
    step = np.maximum(busiest, through) + _optimizer(job, degrees) + job.execution.step_overhead_seconds
    nodes = job.cluster.nodes if job.cluster.gpus > 1 else 1
    return np.asarray(step * (1.0 + STRAGGLERS * max(0, nodes - 1).bit_length()), np.float64)


def _model_seconds(job: Job, degrees: ArrayDegrees) -> tuple[Any, Any, Any]:
    """(forward, input gradient, weight gradient) seconds of one microbatch through the whole model on one rank of each stage."""
    model = job.model
    units: list[tuple[int, int]] = sorted(Counter(model.pattern).items())
    totals: list[Any] = [0.0, 0.0, 0.0]
    costs = [
        (with_activations(job, kind, layer_operations(job, degrees, kind_of(job, kind))), count, True) for kind, count in units
    ]
    costs += [(embedding_operations(job, degrees), 1, False), (head_operations(job, degrees), 1, False)]
    if model.mtp:
        costs.append((with_activations(job, -3, mtp_operations(job, degrees)), model.mtp, True))
    for place, (cost, count, floored) in enumerate(costs):
        passes = (cost.forward, cost.backward_input, cost.backward_weight)
        seconds = [_seconds(job, operations) for operations in passes]
        if floored:
            _floor(job, degrees, seconds, bool(passes[1] or passes[2]))
        if place < len(units) and rows_of(job, units[place][0]):
            seconds = _measured(job, degrees, units[place][0], passes)
        totals = [total + count * one for total, one in zip(totals, seconds, strict=True)]
    return totals[0], totals[1], totals[2]


def _floor(job: Job, degrees: ArrayDegrees, seconds: list[Any], backward: bool) -> None:
    """The host's launches, where they take longer than a layer's forward, or than its ``backward`` (where it has one) however that is
    split in two."""
    launch, blocking = host_seconds(job.cluster.gpu, job.execution, degrees.tp), job.execution.blocking_launch_seconds
    forward, inputs, weights = seconds
    seconds[0] = np.maximum(forward, launch) + blocking
    if not backward:
        return
    seconds[1] = inputs + blocking
    seconds[2] = np.maximum(inputs + weights, launch) - inputs


def _measured(job: Job, degrees: ArrayDegrees, kind: int, passes: tuple[tuple[Operation, ...], ...]) -> list[Any]:
    """The seconds of each pass of a layer kind that was measured."""
    work = [price(job.cluster.gpu, job.execution, operations).seconds for operations in passes]
    ahead, back = measured_pace(job, degrees, kind, work[0], work[1] + work[2], mean_pace(job, kind))
    return [one * pace for pace, one in zip((ahead, back, back), work, strict=True)]


def _seconds(job: Job, operations: tuple[Operation, ...]) -> Any:
    if not operations:
        return 0.0
    compute = price(job.cluster.gpu, job.execution, operations)
    if not is_host(job.cluster.gpu):
        return compute.seconds
    return compute.seconds + job.execution.host_kernel_seconds * (
        compute.kernels + sum(isinstance(op, Collective) for op in operations)
    )


def _optimizer(job: Job, degrees: ArrayDegrees) -> Any:
    """Seconds of the optimizer on the mean stage when every rank of a stage shares its states; nothing where weights are frozen."""
    if job.lora_rank or job.frozen:
        return 0.0
    ranks = degrees.tp * degrees.ring * degrees.ulysses * degrees.dp * degrees.pp
    traffic = job.execution.optimizer_traffic * OPTIMIZER_SHARE[job.optimizer] * job.model.parameters.total
    return traffic / ranks / job.cluster.gpu.memory_bytes_per_second


__all__ = ["ArrayDegrees", "bulk_lower_bounds"]
