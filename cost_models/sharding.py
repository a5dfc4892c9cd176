"""What ZeRO adds to work: the collectives that gather parameters and reduce gradients, how often they run, and what they cost.

Dense weights are sharded over dp_shard x cp (the ``zero`` group), experts over ``edp_shard``; each shard is replicated over
``dp_replicate`` or ``edp_replicate``. Degrees are numbers or arrays. Source of the stages: ZeRO (arXiv:1910.02054).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cost_models.arrays import where
from cost_models.communication import Priced, hidden, seconds_of
from cost_models.compute import is_host
from cost_models.job import Job
from cost_models.state_bytes import shards
from cost_models.states import Holding
from profiles.operations import Collective, Number

Reduction = tuple[Collective, Collective]
"""Gradients over the ranks that shard them, then over the replicas."""
FP32_COPY = 8.0
"""Bytes read and written to lay out a gradient element where it is fp32 before and after."""


def gather_bytes(job: Job, held: Holding) -> tuple[Number, Number]:
    """Bytes of the gathered (dense, expert) parameters: linear layers' in one byte where the framework stores them so."""
    wide = job.gathered_element
    narrow = 1.0 if job.precision in ("fp8", "mxfp8") and job.execution.fp8_parameters else wide
    return (
        wide * (held.dense - held.dense_linear) + narrow * held.dense_linear,
        wide * (held.expert - held.expert_linear) + narrow * held.expert_linear,
    )


def gathers(job: Job, held: Holding) -> tuple[Collective, Collective]:
    """The collectives that make (dense, expert) parameters whole."""
    dense, expert = gather_bytes(job, held)
    return Collective("all_gather", "zero", dense, "gather"), Collective("all_gather", "edp_shard", expert, "gather")


def reductions(job: Job, degrees: Any, trained: Holding) -> tuple[Reduction, Reduction]:
    """The collectives that sum the gradients of (dense, expert) weights over all replicas."""
    dense, expert = shards(degrees)
    return (
        _reduction(degrees.zero, "zero", "dp_replicate", job.reduced_element * trained.dense, dense),
        _reduction(degrees.zero, "edp_shard", "edp_replicate", job.reduced_element * trained.expert, expert),
    )


def _reduction(zero: int, sharded: str, replicas: str, size: Number, ways: Number) -> Reduction:
    if zero == 0:
        return Collective("all_reduce", sharded, size, "reduce"), Collective("all_reduce", replicas, size, "reduce")
    return Collective("reduce_scatter", sharded, size, "reduce"), Collective("all_reduce", replicas, size / ways, "reduce")


def reduces_once(job: Job, degrees: Any) -> Any:
    """Whether gradients are reduced with the last microbatch only; ZeRO-2 and 3 otherwise reduce with every one."""
    execution = job.execution
    return (degrees.zero < 2) | execution.accumulates_unsharded | (degrees.pp > 1) & (not execution.reduce_every_microbatch)


def gathers_once(job: Job, degrees: Any) -> Any:
    """Whether parameters are gathered once a step: after the update, or under a pipeline that keeps them from the first to the last
    microbatch (ZeRO-3 without resharding)."""
    if degrees.zero == 3:
        return (degrees.pp > 1) & (not job.execution.reshard_with_pipeline)
    return degrees.zero in (1, 2)


class Copies(NamedTuple):
    """Seconds of copying parameters out of their gathered buffer once, and gradients into the one that is reduced."""

    out: Number
    into: Number


def copies(job: Job, degrees: Any, held: Holding, trained: Holding) -> Copies:
    """The ``Copies`` of some weights under ZeRO-2 and 3, on one rank as on many (torch 2.13, ``_fsdp_param_group.py``); they take memory
    bandwidth from the work, so nothing hides them."""
    execution, rate = job.execution, job.cluster.gpu.memory_bytes_per_second
    each = FP32_COPY if job.precision == "fp32" and execution.reduce_copy_bytes else execution.reduce_copy_bytes
    gathered = execution.gather_copies * sum(gather_bytes(job, held)) if degrees.zero == 3 else 0.0
    return Copies(gathered / rate, each * trained.all / rate if degrees.zero >= 2 else 0.0)


class EachMicrobatch(NamedTuple):
    """What ZeRO-2 and 3 run for each microbatch of a unit: seconds of its gather, alone, and of its reduction, alone; its copies."""

    gather: Number
    reduce: Number
    copies: Copies


def each_microbatch(job: Job, network: Priced, held: Holding, trained: Holding) -> EachMicrobatch:
    """``EachMicrobatch`` of a unit; what runs once a step is left to its ends (``update``)."""
    degrees = network.layout
    every = degrees.zero == 3
    gathering, reducing = gathers_once(job, degrees), reduces_once(job, degrees)
    gather = seconds_of(network, gathers(job, held)) if every else 0.0
    reduce = sum(seconds_of(network, one) for one in reductions(job, degrees, trained))
    moved = copies(job, degrees, held, trained)
    return EachMicrobatch(
        where(gathering, 0.0, gather),
        where(reducing, 0.0, reduce),
        Copies(where(gathering, 0.0, moved.out), where(reducing, 0.0, moved.into)),
    )


def beside(job: Job, each: EachMicrobatch, forward: Number, work: Number) -> tuple[Number, Number]:
    """Seconds that ``each`` adds to a unit's ``forward`` and to its backward ``work`` (recompute included): beside them where the
    framework prefetches."""
    execution = job.execution
    again = execution.gathers_per_microbatch - 1
    before, after = each.gather, each.gather * again + each.reduce
    if execution.fsdp_prefetch and not is_host(job.cluster.gpu):
        before, after = hidden(before, forward), hidden(after, work)
    return before + each.copies.out, after + each.copies.out * again + each.copies.into
