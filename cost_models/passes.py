"""Seconds of one microbatch through one layer, embedding or head on one rank: forward, recompute, input gradient, weight gradient.

What a layer costs depends on few of a layout's degrees (``layer_key``), so that ten thousand layouts share a few hundred prices:
``unit_seconds`` is cached on them. A unit is a layer kind by its index in the model, ``EMBEDDING``, ``HEAD``
or ``MTP``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from cost_models.communication import Exchange, Network, Pass, add_bytes, bytes_by_link, exposed, hidden, paired
from cost_models.compute import Compute, floats, host_seconds, in_ring_blocks, is_host, price, with_activation
from cost_models.execution import Execution
from cost_models.job import Job
from cost_models.layer_cost import LayerCost
from cost_models.layers import embedding_operations, head_operations, layer_operations, mtp_operations
from cost_models.layout import Layout, RecomputeRule
from cost_models.measured import alone, measured_pace, rows_of
from cost_models.moe_ops import expected_distinct
from cost_models.recompute import recomputed
from cost_models.stage_states import adapters
from cost_models.states import Holding, Weight, embedding_weights, head_weights, hold, layer_weights, mtp_weights
from profiles.model import Layer, Moe
from profiles.operations import Number, Operation, Pointwise

EMBEDDING, HEAD, MTP = -1, -2, -3
"""Units that are not layers of the pattern."""
NO_RECOMPUTE = RecomputeRule(0, None, "none")


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """One pass: compute by kind, exposed communication by axis, and what the host adds beyond both."""

    compute: Compute = field(default_factory=Compute)
    exposed: Mapping[str, float] = field(default_factory=dict)
    host: float = 0.0

    @property
    def seconds(self) -> float:
        return float(self.compute.seconds) + sum(self.exposed.values()) + self.host


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """A unit's passes for one microbatch, seconds; wire bytes by axis and link; FLOPs of its recomputed operations.

    ``paired_saving``: (forward, backward) seconds that an overlapped forward-and-backward pair hides (DualPipe).
    ``gather`` and ``reduce``: its FSDP collectives alone, for what no layer hides (the first gather, the last reduction).
    """

    forward: PassSeconds
    recompute: PassSeconds
    backward_input: PassSeconds
    backward_weight: PassSeconds
    sent: Mapping[str, Mapping[str, float]]
    recomputed_flops: float = 0.0
    paired_saving: tuple[float, float] = (0.0, 0.0)
    gather: float = 0.0
    reduce: float = 0.0
    f: float = 0.0
    b: float = 0.0
    w: float = 0.0
    """Sums: forward; recompute and input gradient; weight gradient."""


def layer_key(job: Job, layout: Layout) -> Layout:
    """``layout`` with everything set aside that a layer's own passes do not depend on; layouts of equal key share prices."""
    fields: dict[str, object] = {"vpp": 1, "stages": (), "recompute": "none"}
    if not paired(layout):
        fields["schedule"] = "1f1b"
    if layout.zero not in (2, 3):
        fields["zero"] = 1
        if layout.order.endswith("pp"):
            inner = layout.tp * layout.cp
            fields |= {"pp": 1, "dp_replicate": 1, "dp_shard": max(1, -(-layout.ep * layout.etp // inner))}
    elif layout.order.endswith("pp") and job.execution.reshard_with_pipeline and job.execution.reduce_every_microbatch:
        fields["pp"] = 1
    return layout.with_(**fields)


def kind_of(job: Job, unit: int) -> Layer:
    """The layer of a unit: an empty one for embedding and head, the model's last for MTP."""
    if unit == MTP:
        return job.model.layer(job.model.num_layers - 1)
    return job.model.kinds[unit] if unit >= 0 else Layer(norms=0)


def unit_seconds(job: Job, layout: Layout, unit: int, rule: RecomputeRule = NO_RECOMPUTE) -> UnitSeconds:
    """Seconds of ``unit`` (a layer kind's index, EMBEDDING or HEAD) under recompute ``rule``, for one microbatch."""
    return _unit(job, layer_key(job, layout), unit, RecomputeRule(0, None, rule.mode, rule.modules))


@lru_cache(maxsize=4096)
def unit_cost(job: Job, key: Layout, unit: int) -> LayerCost:
    """The operations of a unit under ``key``."""
    if unit == EMBEDDING:
        return embedding_operations(job, key)
    if unit == HEAD:
        return head_operations(job, key)
    if unit == MTP:
        return mtp_operations(job, key)
    return layer_operations(job, key, job.model.kinds[unit])


def tensors(job: Job, layout: Layout, unit: int) -> tuple[Weight, ...]:
    """The weights of a unit, as tensors with their full shapes."""
    model = job.model
    if unit == EMBEDDING:
        return embedding_weights(model)
    if unit == HEAD:
        return head_weights(model, shares_embedding=model.tied and layout.pp == 1)
    return mtp_weights(model) if unit == MTP else layer_weights(model, model.kinds[unit])


@lru_cache(maxsize=4096)
def held_weights(job: Job, layout: Layout, unit: int) -> Holding:
    """What one rank holds of a unit's weights before ZeRO shards them."""
    return hold(tensors(job, layout, unit), layout, job.execution)


@lru_cache(maxsize=4096)
def unit_weights(job: Job, layout: Layout, unit: int) -> Holding:
    """The trained ones among them (all but frozen parts; with LoRA the adapters only): what is reduced, updated and gathered."""
    weights = tensors(job, layout, unit)
    if job.lora_rank:
        weights = adapters(job, weights)
    elif job.frozen:
        weights = tuple(w for w in weights if w.part not in job.frozen)
    else:
        return held_weights(job, layout, unit)
    return hold(weights, layout, job.execution)


def gather_bytes(job: Job, held: Holding) -> tuple[float, float]:
    """Bytes of the gathered (dense, expert) parameters: linear layers' in one byte where the framework stores them so."""
    wide = 4.0 if job.precision == "fp32" else job.execution.gather_bytes
    narrow = 1.0 if job.precision in ("fp8", "mxfp8") and job.execution.fp8_parameters else wide
    return (
        wide * (held.dense - held.dense_linear) + narrow * held.dense_linear,
        wide * (held.expert - held.expert_linear) + narrow * held.expert_linear,
    )


@lru_cache(maxsize=16384)
def _unit(job: Job, key: Layout, unit: int, rule: RecomputeRule) -> UnitSeconds:
    cost = with_activations(job, unit, unit_cost(job, key, unit))
    network = Network(job.cluster, key, exchange_of(job, key, unit))
    execution = job.execution
    again = operations_again(execution, cost, rule)
    host = host_part(job, unit, key.tp)
    launch, blocking, sync = float(host.launch), host.blocking, host.sync
    weights = cost.backward_weight
    share = launches(weights) / max(1.0, launches(weights) + launches(cost.backward_input))
    whole = rule.mode == "full"
    ahead, back = _pace(job, key, unit, cost.forward, cost.backward_input, weights)
    forward = _pass(job, network, cost.forward, "forward", launch, blocking + sync, ahead)
    backward_input = _pass(job, network, cost.backward_input, "backward_input", launch * (1 - share), blocking, back)
    backward_weight = _pass(job, network, weights, "backward_weight", launch * share, pace=back)
    recompute = _pass(job, network, again, "forward", launch if whole else 0.0, blocking + sync if whole else 0.0, ahead)
    if job.execution.ep_overlap and not paired(key):
        forward, recompute, backward_input, backward_weight = _beside_each_other(
            forward, recompute, backward_input, backward_weight
        )
    gather, scatter = sharded_collectives(job, network, unit)
    if key.zero in (2, 3):
        forward, backward_input = _with_sharding(
            job, network, unit, forward, recompute, backward_input, backward_weight, gather, scatter
        )
    sent = bytes_by_link(network, cost.operations() + again)
    _add_sharded_bytes(job, network, unit, sent)
    flops = float(sum(op.flops for op in again))
    f, b, w = forward.seconds, recompute.seconds + backward_input.seconds, backward_weight.seconds
    saving = _paired_saving(job, network, forward, recompute, backward_input, backward_weight)
    return UnitSeconds(forward, recompute, backward_input, backward_weight, sent, flops, saving, gather, scatter, f, b, w)


class HostPart(NamedTuple):
    """Host seconds of a unit's pass: to launch it (work that is longer hides them), and on top of it (``blocking``; ``sync``: where
    experts' sizes are awaited)."""

    launch: Number
    blocking: float
    sync: float


def host_part(job: Job, unit: int, tp: Number) -> HostPart:
    """``HostPart`` of a unit under ``tp``-way tensor parallelism (a number or an array)."""
    execution = job.execution
    if unit < 0 and unit != MTP:
        return HostPart(0.0, 0.0, 0.0)
    waits = isinstance(kind_of(job, unit).ffn, Moe) and not is_host(job.cluster.gpu) and execution.graphs != "full"
    sync = execution.moe_sync_seconds if waits else 0.0
    return HostPart(host_seconds(job.cluster.gpu, execution, tp), execution.blocking_launch_seconds, sync)


def operations_again(execution: Execution, cost: LayerCost, rule: RecomputeRule) -> tuple[Operation, ...]:
    """What ``rule`` runs again in backward; nothing where no gradient goes through the unit."""
    regathers = execution.keeps_gathered_input and execution.discards_outputs
    return recomputed(cost.forward, rule, execution.recompute_stops_early, regathers=regathers) if cost.backward_input else ()


def _pace(
    job: Job, key: Layout, unit: int, forward: tuple[Operation, ...], backward_input: tuple[Operation, ...], weights: tuple[Operation, ...]
) -> tuple[float, float]:  # fmt: skip
    """Measured over analytic compute seconds of (forward, backward) where the unit's kind was measured, else 0 (``measured``)."""
    if not rows_of(job, unit):
        return 0.0, 0.0
    ahead, back = measured_pace(job, key, unit, *both_ways(job, forward, backward_input, weights), mean_pace(job, unit))
    return float(ahead), float(back)


def both_ways(job: Job, *passes: tuple[Operation, ...]) -> tuple[Number, Number]:
    """(forward, backward) analytic compute seconds of the three passes of a unit."""
    forward, inputs, weights = (price(job.cluster.gpu, job.execution, operations).seconds for operations in passes)
    return forward, inputs + weights


@lru_cache(maxsize=256)
def mean_pace(job: Job, kind: int) -> tuple[float, float]:
    """Geometric mean of measured over analytic compute seconds, (forward, backward), over a layer kind's measured rows."""
    ratios = []
    for row in rows_of(job, kind):
        cost = with_activations(job, kind, unit_cost(job, alone(row), kind))
        ahead, back = both_ways(job, cost.forward, cost.backward_input, cost.backward_weight)
        ratios.append((math.log(row.forward / ahead), math.log(row.backward / back)))
    first, second = (math.exp(sum(column) / len(ratios)) for column in zip(*ratios, strict=True))
    return first, second


def with_activations(job: Job, unit: int, cost: LayerCost) -> LayerCost:
    """``cost`` with the feed-forward's activation as the framework runs it (``TimeFacts.unfused_activations``)."""
    ffn, execution = kind_of(job, unit).ffn, job.execution
    if ffn is None or not execution.unfused_activations:
        return cost
    name = "clamped_swiglu" if job.model.family == "gpt_oss" else ffn.activation
    return replace(
        cost,
        forward=with_activation(cost.forward, name, execution),
        backward_input=with_activation(cost.backward_input, name, execution, backward=True),
    )


def exchange_of(job: Job, layout: Layout, unit: int) -> Exchange | None:
    """How this unit's tokens travel: DeepEP and HybridEP send one copy of a token to each node that holds one of its experts."""
    moe = kind_of(job, unit).ffn
    if not isinstance(moe, Moe) or layout.ep == 1:
        return None
    execution = job.execution
    if layout.dispatcher not in ("deepep", "hybridep"):
        return Exchange(execution.exchange_efficiency, execution.exchange_seconds)
    tokens = layout.micro_batch * job.seq_len / layout.cp / (layout.tp if layout.sp else 1)
    overhead = execution.exchange_seconds + execution.deduplicated_token_seconds * tokens
    nodes = -(-layout.ep * layout.etp // job.cluster.gpus_per_node)
    if nodes == 1:
        racks = job.cluster.levels[0].size > job.cluster.gpus_per_host
        return Exchange(1.0 if racks else execution.deduplicated_efficiency, overhead)
    outside = min(1.0, nodes_reached(moe, nodes) / float(expected_distinct(moe.experts, moe.top_k, layout.ep)))
    return Exchange(
        execution.deduplicated_efficiency,
        overhead,
        outside,
        execution.deduplicated_network_efficiency,
        True,
    )


def nodes_reached(moe: Moe, nodes: int) -> float:
    """Expected number of the ``nodes`` of an expert-parallel group that a token's experts lie on, its own included; group-limited
    routing (DeepSeek-V3, arXiv:2412.19437 section 2.1.2) chooses from ``top_groups`` of ``groups`` groups."""
    if moe.groups == 1:
        return float(expected_distinct(moe.experts, moe.top_k, nodes))
    if nodes <= moe.groups:
        return float(expected_distinct(moe.groups, moe.top_groups, nodes))
    chosen = max(1, moe.top_k // moe.top_groups)
    return moe.top_groups * float(expected_distinct(moe.experts // moe.groups, chosen, nodes / moe.groups))


def _pass(
    job: Job,
    network: Network,
    operations: tuple[Operation, ...],
    which: Pass,
    launch: float = 0.0,
    extra: float = 0.0,
    pace: float = 0.0,
) -> PassSeconds:
    """One pass of one unit. ``launch``: host seconds to launch it, which may be longer than the work; ``extra``: host seconds on
    top; ``pace``: where it was measured, its seconds over those of its compute, the host's part included."""
    execution, layout = job.execution, network.layout
    if not operations:
        return PassSeconds()
    if layout.ring > 1 and layout.cp_kind != "allgather":
        operations = in_ring_blocks(operations, layout.ring, execution.ring_merge_bytes)
    compute = floats(price(job.cluster.gpu, execution, operations))
    if pace:
        compute = compute.times(pace)
        return PassSeconds(compute, exposed(network, execution, operations, which, compute), 0.0)
    exposures = exposed(network, execution, operations, which, compute)
    host = extra + max(0.0, launch - compute.seconds - sum(exposures.values()))
    if is_host(job.cluster.gpu):
        host += execution.host_kernel_seconds * launches(operations)
    return PassSeconds(compute, exposures, host)


def launches(operations: Iterable[Operation]) -> float:
    """Kernels and collectives that the host launches for ``operations``."""
    return float(sum(op.kernels if isinstance(op, Pointwise) else 1 for op in operations))


def sharded_collectives(job: Job, network: Network, unit: int) -> tuple[float, float]:
    """(gather, reduce) seconds of a unit's parameters and gradients over the ranks that shard them (ZeRO-2 and 3)."""
    layout = network.layout
    if layout.zero not in (2, 3):
        return 0.0, 0.0
    weights = unit_weights(job, layout, unit)
    execution = job.execution
    gather = gather_bytes(job, held_weights(job, layout, unit))
    grad = execution.reduce_bytes
    g = network.seconds("all_gather", "zero", gather[0]) + network.seconds("all_gather", "edp_shard", gather[1])
    r = network.seconds("reduce_scatter", "zero", grad * weights.dense) + network.seconds(
        "reduce_scatter", "edp_shard", grad * weights.expert
    )
    shards, expert_shards = layout.dp_shard * layout.cp, layout.edp_shard
    r += network.seconds("all_reduce", "dp_replicate", grad * weights.dense / shards)
    r += network.seconds("all_reduce", "edp_replicate", grad * weights.expert / expert_shards)
    return (g if layout.zero == 3 else 0.0), r


def _add_sharded_bytes(job: Job, network: Network, unit: int, sent: dict[str, dict[str, float]]) -> None:
    """Wire bytes of one microbatch's gathers and reduction (ZeRO-2 and 3)."""
    layout, execution = network.layout, job.execution
    if layout.zero not in (2, 3):
        return
    weights = unit_weights(job, layout, unit)
    gathered = gather_bytes(job, held_weights(job, layout, unit))
    gathers = 0.0 if layout.zero == 2 or gathers_once(job, layout) else execution.gathers_per_microbatch
    shards, expert_shards = layout.dp_shard * layout.cp, layout.edp_shard
    for axis, count, wire, group, replicas, parts in (
        ("dp", weights.dense, gathered[0], "zero", "dp_replicate", shards),
        ("edp", weights.expert, gathered[1], "edp_shard", "edp_replicate", expert_shards),
    ):
        add_bytes(sent, axis, network.sent("all_gather", group, wire), gathers)
        if not reduces_once(job, layout):
            size = execution.reduce_bytes * count
            add_bytes(sent, axis, network.sent("reduce_scatter", group, size))
            add_bytes(sent, axis, network.sent("all_reduce", replicas, size / parts))


def _with_sharding(
    job: Job, network: Network, unit: int,
    forward: PassSeconds, recompute: PassSeconds, backward_input: PassSeconds, backward_weight: PassSeconds, gather: float,
    scatter: float,
) -> tuple[PassSeconds, PassSeconds]:  # fmt: skip
    """Forward and backward with the unit's gathers and reduction: beside its work where the framework prefetches. Copying into and
    out of their buffers takes memory bandwidth from the work, so it is never hidden."""
    layout, execution = network.layout, job.execution
    copy_out, copy_in = _buffer_copies(job, layout, unit)
    if gathers_once(job, layout):
        gather = copy_out = 0.0
    if reduces_once(job, layout):
        scatter = copy_in = 0.0
    again = execution.gathers_per_microbatch - 1
    before, after = gather, gather * again + scatter
    work = recompute.seconds + backward_input.seconds + backward_weight.seconds
    if execution.fsdp_prefetch and not is_host(job.cluster.gpu):
        before, after = hidden(before, forward.seconds), hidden(after, work)
    return _add(forward, "dp", before + copy_out), _add(backward_input, "dp", after + copy_out * again + copy_in)


def _buffer_copies(job: Job, layout: Layout, unit: int) -> tuple[float, float]:
    """Seconds of copying a unit's parameters out of their gathered buffer (ZeRO-3), and its gradients into the one reduced."""
    execution, rate = job.execution, job.cluster.gpu.memory_bytes_per_second
    gathered = float(sum(gather_bytes(job, held_weights(job, layout, unit)))) if layout.zero == 3 else 0.0
    reduced = float(unit_weights(job, layout, unit).all)
    return execution.gather_copies * gathered / rate, execution.reduce_copy_bytes * reduced / rate


def reduces_once(job: Job, layout: Layout) -> bool:
    """Whether gradients are reduced with the last microbatch only; ZeRO-2 and 3 otherwise reduce with every one."""
    pipelined = layout.pp > 1 and not job.execution.reduce_every_microbatch
    return layout.zero < 2 or job.execution.accumulates_unsharded or pipelined


def gathers_once(job: Job, layout: Layout) -> bool:
    """Whether ZeRO-3 keeps parameters gathered from the first to the last microbatch (pipeline without resharding)."""
    return layout.pp > 1 and not job.execution.reshard_with_pipeline


def _add(one: PassSeconds, axis: str, seconds: float) -> PassSeconds:
    if not seconds:
        return one
    exposures = dict(one.exposed)
    exposures[axis] = exposures.get(axis, 0.0) + seconds
    return PassSeconds(one.compute, exposures, one.host)


def _beside_each_other(*passes: PassSeconds) -> tuple[PassSeconds, PassSeconds, PassSeconds, PassSeconds]:
    """The passes where one microbatch's forward runs beside another's backward (Megatron's all-to-all overlap): all their exchanges
    together hide behind all their compute together. What is left is shared by length."""
    total = sum(one.exposed.get("ep", 0.0) for one in passes)
    if total:
        share = hidden(total, sum(float(one.compute.seconds) for one in passes)) / total
        passes = tuple(
            PassSeconds(one.compute, {axis: t * (share if axis == "ep" else 1.0) for axis, t in one.exposed.items()}, one.host)
            for one in passes
        )
    return passes[0], passes[1], passes[2], passes[3]


def _paired_saving(
    job: Job,
    network: Network,
    forward: PassSeconds,
    recompute: PassSeconds,
    backward_input: PassSeconds,
    backward_weight: PassSeconds,
) -> tuple[float, float]:
    """Seconds an overlapped pair hides: each half's all-to-all beside the other half's compute."""
    if not (paired(network.layout) and job.execution.ep_overlap):
        return 0.0, 0.0
    back = recompute.exposed.get("ep", 0.0) + backward_input.exposed.get("ep", 0.0) + backward_weight.exposed.get("ep", 0.0)
    front = forward.exposed.get("ep", 0.0)
    work = float(recompute.compute.seconds + backward_input.compute.seconds + backward_weight.compute.seconds)
    return front - hidden(front, work), back - hidden(back, float(forward.compute.seconds))


__all__ = ["EMBEDDING", "HEAD", "NO_RECOMPUTE", "PassSeconds", "UnitSeconds", "layer_key", "unit_cost", "unit_seconds"]
