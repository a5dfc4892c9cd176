"""Memory beside states and kept activations: gathered parameters, buffers, communicators, and the building of the model."""

from __future__ import annotations

from functools import cache
from typing import Any

from cost_models.arrays import maximum, where
from cost_models.fully_sharded import by_unit, keeps_gathered
from cost_models.job import Job
from cost_models.layer_cost import Local
from cost_models.stage_states import stage_units, tensors, unit_holding
from cost_models.state_bytes import States, shards
from cost_models.states import Holding, Split, Weight
from profiles.operations import Number

Shape = tuple[int, int, Split]
HOST_COMMUNICATOR_BYTES = 4.0 * 2**20
"""Of a gloo communicator: socket buffers in the process, no channels on a device (an estimate)."""
ENDS = ("embedding", "tokens", "head", "tied head")
"""Units that ZeRO-3 gathers together (``stage_states.Tensors``)."""


def gathered_buffers(job: Job, layout: Any, rank: int) -> tuple[Number, Number]:
    """(at the loss, in the backward of a layer): whole parameters and gradients under ZeRO-2 and 3.

    ZeRO-3 gathers the ends' unit (embedding, final norm, head) for the step, one layer at the loss and ``gathered_units`` in the
    backward, or keeps every layer of the rank under a pipeline that does not reshard; where it goes unit by unit, the chunk's
    own backward has it all (``fully_sharded``). In the backward the head's gradient waits
    for the ends' unit, and the gradients of ``unsharded_gradient_units`` layers exist before they are reduced; where a pipeline
    reduces once a step, those of the whole stage. Buckets of ZeRO-2 are a chunk's own (``activations.assemble``).
    """
    if layout.zero < 2 or by_unit(job, layout) or (layout.zero == 2 and job.execution.gradient_bucket_bytes):
        return 0, 0
    wide, reduced = job.gathered_element, job.reduced_element
    largest: Number = 0
    every: Number = 0
    ends: Number = 0
    head: Number = 0
    for unit, times in stage_units(job, layout, rank):
        size = unit_holding(job, layout, unit)[0].all
        if unit in ENDS:
            ends = ends + size * times
            head = head + (size * times if unit == "head" else 0)
        else:
            largest = maximum(largest, size)
            every = every + size * times
    loss: Number = 0
    backward = gathered_layers(job, layout, largest, every)
    if layout.zero == 3:
        root, root_gradient = (wide * ends, wide * head) if job.execution.gathered_root else (0, 0)
        backward = backward + root + root_gradient + (reduced * ends if _waits_whole(job, layout) else 0)
        loss = root + wide * (every if keeps_gathered(job, layout) else largest)
    ways, _ = shards(layout)
    return where(ways > 1, loss, 0), where(ways > 1, backward, 0)


def gathered_layers(job: Job, degrees: Any, largest: Number, every: Number) -> Number:
    """What layers are whole of in a layer's backward under ZeRO-2 and 3: ``largest`` elements of one layer, ``every`` of all of a rank."""
    execution = job.execution
    wide, reduced = job.gathered_element, job.reduced_element
    out: Number = execution.unsharded_gradient_units * largest * maximum(wide, reduced)
    if degrees.zero == 3:
        out = out + wide * where(keeps_gathered(job, degrees), every, execution.gathered_units * largest)
        out = out + reduced * where(_waits_whole(job, degrees), every, 0)
    return out


def _waits_whole(job: Job, degrees: Any) -> Any:
    """Whether all gradients of a rank exist before they are reduced."""
    execution = job.execution
    once = not execution.reduce_every_microbatch
    return where(keeps_gathered(job, degrees), execution.accumulates_unsharded or once, execution.accumulates_unsharded)


def lasting_buffers(job: Job, layout: Any, rank: int) -> Number:
    """Buffers that live through the step: pipeline sends and receives, Transformer Engine's dummy weight gradients."""
    total: Number = message_buffers(job, layout) if layout.pp > 1 else 0
    if job.execution.dummy_weight_gradients:
        total = total + dummy_gradients(job, layout, rank)
    return total


def message_buffers(job: Job, degrees: Any) -> Number:
    """Buffers of a pipeline's sends and receives."""
    local = Local(job, degrees)
    return job.execution.p2p_buffers * local.split_tokens * job.model.hidden * local.bytes


def dummy_gradients(job: Job, layout: Any, rank: int) -> Number:
    """One 16-bit gradient for each distinct shape of a linear layer's weight on the rank (Q, K and V are one where fused)."""
    held = tuple(sorted({str(unit) for unit, _ in stage_units(job, layout, rank)}))
    if hasattr(layout, "remember"):
        found: Number = layout.remember(("dummies", held), lambda d: _dummies(job, d, held))
        return found
    return _dummies(job, layout, held)


def _dummies(job: Job, degrees: Any, held: tuple[str, ...]) -> Number:
    units = {str(name): weights for name, weights in tensors(job).units.items()}
    shapes = {shape for name in held for shape in fused_shapes(units[name], job.execution.fused_qkv)}
    return 2 * sum(Weight("", "", rows, columns, 1, split).local(degrees, job.execution) for rows, columns, split in shapes)


@cache
def fused_shapes(weights: tuple[Weight, ...], fused_qkv: bool) -> tuple[Shape, ...]:
    """(rows, columns, split) of the linear layers' weights as the framework stores them."""
    out: list[Shape] = []
    qkv: list[Weight] = []
    for w in weights:
        if not w.linear:
            continue
        if w.name in ("q", "k", "v") and fused_qkv:
            qkv.append(w)
        else:
            out.append((w.rows, w.columns, w.split))
    if qkv:
        out.append((sum(w.rows for w in qkv), qkv[0].columns, "tp"))
    return tuple(out)


def optimizer_temporary(job: Job, layout: Any, holding: Holding) -> Number:
    """Temporaries of the optimizer step, on the rank's share of the state."""
    per = job.execution.optimizer_temporary_bytes
    if not per:
        return 0
    dense, expert = shards(layout)
    if layout.zero < 1:
        dense = expert = 1
    return per * (holding.dense / dense + holding.expert / expert)


def communicators(job: Job, layout: Any) -> Number:
    """Device memory of the communicators, by the axes that have more than one rank; all-to-all costs a channel to each peer.

    Grows with the number of communicators, not with the world (cases.md A22: about 0.5 GiB a group of two, 0.65 of more; all-to-all
    adds gigabytes).
    """
    execution = job.execution
    if job.cluster.gpu.is_host:
        each, exchange = HOST_COMMUNICATOR_BYTES, 0.0
    else:
        each, exchange = execution.communicator_bytes, execution.all_to_all_bytes
    total: Number = 0
    axes = (layout.tp, layout.ring * layout.ulysses, layout.pp, layout.dp, layout.ep, layout.etp)
    for degree in axes:
        total = total + where(degree > 1, each, 0)
    total = total + where((layout.ep > 1) & (layout.edp > 1), each, 0)
    spread = where(layout.ep > 1, 1, 0) if layout.dispatcher != "allgather" else 0
    return total + exchange * (spread + where(layout.ulysses > 1, 1, 0))


def graph_pool(job: Job, activations: Number) -> Number:
    """Private pools of CUDA graphs: they hold the captured modules' activations of every microbatch in flight once more."""
    return job.execution.graph_pool_ratio * activations


def initial_bytes(job: Job, holding: Holding, states: States) -> Number:
    """Allocated bytes at the fullest moment of building: what is built before it is cast and sharded (the rank's part, or the whole
    model where the framework splits it afterwards), beside the parameters made from it."""
    execution = job.execution
    built = job.model.parameters.total if execution.initial_whole_model else holding.all
    return execution.initial_copies_bytes * built + states.parameters
