"""Seconds of one microbatch through one layer, embedding or head on one rank: forward, recompute, input gradient, weight gradient.

What a layer costs depends on few of a layout's degrees (``layer_key``), so that ten thousand layouts share a few hundred prices:
``unit_seconds`` is cached on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from cost_models.arrays import always_one, maximum, plain, where
from cost_models.communication import Exchange, Network, Pass, Priced, add_sent, bytes_by_link, exposed, hidden, paired
from cost_models.compute import Compute, Known, host_seconds, is_host, price, price_in_ring, ring_launches, with_activation
from cost_models.execution import Execution
from cost_models.job import Job
from cost_models.layer_cost import LayerCost
from cost_models.layout import DEDUPLICATED, Layout, RecomputeRule
from cost_models.measured import alone, measured_pace, rows_of
from cost_models.moe_ops import expected_distinct
from cost_models.recompute import recomputed
from cost_models.sharding import beside, each_microbatch, gathers, gathers_once, reduces_once, reductions
from cost_models.stage_states import unit_holding
from cost_models.states import Holding
from cost_models.units import EMBEDDING, HEAD, Unit, kind_of, unit_cost
from profiles.model import Moe
from profiles.operations import Attend, Collective, Number, Operation, Pointwise

NO_RECOMPUTE = RecomputeRule(0, None, "none")


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """One pass: compute by kind, exposed communication by axis, and what the host adds beyond both; numbers or arrays."""

    compute: Compute = field(default_factory=Compute)
    exposed: Mapping[str, Number] = field(default_factory=dict)
    host: Number = 0.0

    @property
    def seconds(self) -> Number:
        return self.compute.seconds + sum(self.exposed.values()) + self.host


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """A unit's passes for one microbatch, seconds; wire bytes by axis and link; FLOPs of its recomputed operations.

    ``paired_saving``: (forward, backward) seconds that an overlapped forward-and-backward pair hides (DualPipe).
    """

    forward: PassSeconds
    recompute: PassSeconds
    backward_input: PassSeconds
    backward_weight: PassSeconds
    sent: Mapping[str, Mapping[str, float]]
    recomputed_flops: float = 0.0
    paired_saving: tuple[float, float] = (0.0, 0.0)
    f: float = 0.0
    b: float = 0.0
    w: float = 0.0
    """Sums: forward; recompute and input gradient; weight gradient."""


@lru_cache(maxsize=16384)
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
        fields["pp"] = 1 if layout.pp == 1 or not job.model.tied else 2  # a pipeline gathers a tied head apart from its embedding
    return layout.with_(**fields)


def unit_seconds(job: Job, layout: Layout, unit: Unit, rule: RecomputeRule = NO_RECOMPUTE) -> UnitSeconds:
    """Seconds of ``unit`` (a layer kind's index, EMBEDDING or HEAD) under recompute ``rule``, for one microbatch."""
    return _unit(job, layer_key(job, layout), unit, RecomputeRule(0, None, rule.mode, rule.modules))


@lru_cache(maxsize=4096)
def held_weights(job: Job, layout: Layout, unit: Unit) -> Holding:
    """What one rank holds of a unit's weights before ZeRO shards them."""
    return _weights(job, layout, unit)[0]


@lru_cache(maxsize=4096)
def unit_weights(job: Job, layout: Layout, unit: Unit) -> Holding:
    """The trained ones among them (all but frozen parts; with LoRA the adapters only): what is reduced and updated."""
    return _weights(job, layout, unit)[1]


def _weights(job: Job, layout: Layout, unit: Unit) -> tuple[Holding, Holding]:
    return unit_holding(job, layout, "tied head" if unit == HEAD and job.model.tied and layout.pp == 1 else unit)


@lru_cache(maxsize=16384)
def _unit(job: Job, key: Layout, unit: Unit, rule: RecomputeRule) -> UnitSeconds:
    work, sent = _work(job, key, unit)
    network, (again, recompute) = work.network, work.again(rule)
    forward, backward_input, backward_weight = work.forward, work.backward_input, work.backward_weight
    if job.execution.ep_overlap and not paired(key):
        forward, recompute, backward_input, backward_weight = _beside_each_other(
            forward, recompute, backward_input, backward_weight
        )
    sent = {axis: dict(links) for axis, links in sent.items()}
    add_sent(sent, network, again)
    if key.zero in (2, 3):
        held, trained = held_weights(job, key, unit), unit_weights(job, key, unit)
        work_seconds = recompute.seconds + backward_input.seconds + backward_weight.seconds
        before, after = beside(job, each_microbatch(job, network, held, trained), forward.seconds, work_seconds)
        forward, backward_input = _add(forward, "dp", before), _add(backward_input, "dp", after)
        _add_sharded_bytes(job, network, held, trained, sent)
    flops = float(sum(op.flops for op in again))
    f, b = float(forward.seconds), float(recompute.seconds + backward_input.seconds)
    saving = _paired_saving(job, network, forward, recompute, backward_input, backward_weight)
    return UnitSeconds(
        forward, recompute, backward_input, backward_weight, sent, flops, saving, f, b, float(backward_weight.seconds)
    )


@lru_cache(maxsize=8192)
def _work(job: Job, key: Layout, unit: Unit) -> tuple[Work[Network], dict[str, dict[str, float]]]:
    """A unit's passes before any recompute, and the wire bytes of its operations."""
    network = Network(job.cluster, key, exchange_of(job, key, unit))
    work = unit_work(job, network, unit)
    return work, bytes_by_link(network, work.cost.operations())


N = TypeVar("N", bound=Priced)


@dataclass(frozen=True, slots=True)
class Work(Generic[N]):
    """One microbatch through a unit under the layout of ``network`` (numbers or arrays of degrees), without what ZeRO adds: its operations,
    their three passes, and what prices those that run again: the host's part, the pace of a measured forward, and known prices."""

    job: Job
    network: N
    cost: LayerCost
    forward: PassSeconds
    backward_input: PassSeconds
    backward_weight: PassSeconds
    host: HostPart
    pace: Number | None
    known: Known

    def again(self, rule: RecomputeRule) -> tuple[tuple[Operation, ...], PassSeconds]:
        """(the operations that run again under a recompute rule, their pass)."""
        operations = operations_again(self.job.execution, self.cost, rule)
        launch, extra = (self.host.launch, self.host.blocking + self.host.sync) if rule.mode == "full" else (0.0, 0.0)
        return operations, _pass(self.job, self.network, operations, "forward", launch, extra, self.pace, self.known)


def unit_work(job: Job, network: N, unit: Unit) -> Work[N]:
    """The passes of ``unit``."""
    cost = with_activations(job, unit, unit_cost(job, network.layout, unit))
    host = host_part(job, unit, network.layout.tp)
    weights = cost.backward_weight
    share = launches(weights) / maximum(1.0, launches(weights) + launches(cost.backward_input))
    ahead, back = _pace(job, network.layout, unit, cost)
    known: Known = network.layout.remember("prices", lambda _: {}) if hasattr(network.layout, "remember") else {}
    forward = _pass(job, network, cost.forward, "forward", host.launch, host.blocking + host.sync, ahead, known)
    back_launch = host.launch * (1 - share)
    inputs = _pass(job, network, cost.backward_input, "backward_input", back_launch, host.blocking, back, known)
    return Work(
        job, network, cost, forward, inputs, _pass(job, network, weights, "backward_weight", host.launch * share, 0.0, back, known),
        host, ahead, known,
    )  # fmt: skip


class HostPart(NamedTuple):
    """Host seconds of a unit's pass: to launch it (work that is longer hides them), and on top of it (``blocking``; ``sync``: where
    experts' sizes are awaited)."""

    launch: Number
    blocking: float
    sync: float


def host_part(job: Job, unit: Unit, tp: Number) -> HostPart:
    """``HostPart`` of a unit under ``tp``-way tensor parallelism (a number or an array)."""
    execution = job.execution
    if unit in (EMBEDDING, HEAD):
        return HostPart(0.0, 0.0, 0.0)
    waits = isinstance(kind_of(job, unit).ffn, Moe) and not is_host(job.cluster.gpu) and execution.graphs != "full"
    sync = execution.moe_sync_seconds if waits else 0.0
    return HostPart(host_seconds(job.cluster.gpu, execution, tp), execution.blocking_launch_seconds, sync)


def operations_again(execution: Execution, cost: LayerCost, rule: RecomputeRule) -> tuple[Operation, ...]:
    """What ``rule`` runs again in backward; nothing where no gradient goes through the unit."""
    regathers = execution.keeps_gathered_input and execution.discards_outputs
    return recomputed(cost.forward, rule, execution.recompute_stops_early, regathers=regathers) if cost.backward_input else ()


def _pace(job: Job, degrees: Any, unit: Unit, cost: LayerCost) -> tuple[Number | None, Number | None]:
    """Measured over analytic compute seconds of (forward, backward) where the unit's kind was measured (``measured``), else None."""
    if not rows_of(job, unit):
        return None, None
    analytic = both_ways(job, cost.forward, cost.backward_input, cost.backward_weight)
    ahead, back = measured_pace(job, degrees, unit, *analytic, mean_pace(job, unit))
    return plain(ahead), plain(back)


def both_ways(job: Job, *passes: tuple[Operation, ...]) -> tuple[Number, Number]:
    """(forward, backward) analytic compute seconds of the three passes of a unit."""
    forward, inputs, weights = (price(job.cluster.gpu, job.execution, operations).seconds for operations in passes)
    return forward, inputs + weights


@lru_cache(maxsize=256)
def mean_pace(job: Job, kind: Unit) -> tuple[float, float]:
    """Geometric mean of measured over analytic compute seconds, (forward, backward), over a layer kind's measured rows."""
    ratios = []
    for row in rows_of(job, kind):
        cost = with_activations(job, kind, unit_cost(job, alone(row), kind))
        ahead, back = both_ways(job, cost.forward, cost.backward_input, cost.backward_weight)
        ratios.append((math.log(row.forward / ahead), math.log(row.backward / back)))
    first, second = (math.exp(sum(column) / len(ratios)) for column in zip(*ratios, strict=True))
    return first, second


def with_activations(job: Job, unit: Unit, cost: LayerCost) -> LayerCost:
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


def exchange_of(job: Job, degrees: Any, unit: Unit) -> Exchange | None:
    """How this unit's tokens travel: DeepEP and HybridEP send one copy of a token to each node that holds one of its experts."""
    moe = kind_of(job, unit).ffn
    if not isinstance(moe, Moe) or always_one(degrees.ep):
        return None
    execution, cluster = job.execution, job.cluster
    if degrees.dispatcher not in DEDUPLICATED:
        return Exchange(execution.exchange_efficiency, execution.exchange_seconds)
    tokens = degrees.micro_batch * job.seq_len / degrees.cp / where(degrees.sp, degrees.tp, 1)
    nodes = -(-degrees.ep * degrees.etp // cluster.gpus_per_node)
    racks = cluster.levels[0].size > cluster.gpus_per_host
    return Exchange(
        where(nodes == 1, 1.0 if racks else execution.deduplicated_efficiency, execution.deduplicated_efficiency),
        execution.exchange_seconds + execution.deduplicated_token_seconds * tokens,
        _outside(moe, nodes, degrees.ep),
        where(nodes == 1, 1.0, execution.deduplicated_network_efficiency),
        nodes > 1,
    )


def _outside(moe: Moe, nodes: Number, ep: Number) -> Number:
    """Copies of a token that go to other nodes over those that go to ranks: 1 where the group lies in one node."""
    if isinstance(nodes, np.ndarray):
        pairs = list(zip(nodes.ravel().tolist(), np.broadcast_to(ep, nodes.shape).ravel().tolist(), strict=True))
        known = {pair: _outside(moe, *pair) for pair in {*pairs}}
        return np.array([known[pair] for pair in pairs]).reshape(nodes.shape)
    return 1.0 if nodes == 1 else min(1.0, nodes_reached(moe, nodes) / float(expected_distinct(moe.experts, moe.top_k, ep)))


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
    network: Priced,
    operations: tuple[Operation, ...],
    which: Pass,
    launch: Number,
    extra: float,
    pace: Number | None,
    known: Known,
) -> PassSeconds:
    """One pass of one unit. ``launch``: host seconds to launch it, which may be longer than the work; ``extra``: host seconds on
    top; ``pace``: where it was measured, its seconds over those of its compute, the host's part included."""
    execution, gpu, degrees = job.execution, job.cluster.gpu, network.layout
    if not operations:
        return PassSeconds()
    ring = 1 if degrees.cp_kind == "allgather" else degrees.ring
    compute = price_in_ring(gpu, execution, operations, ring, known)
    if pace is not None:
        compute = compute.times(pace)
        return PassSeconds(compute, exposed(network, execution, operations, which, compute))
    exposures = exposed(network, execution, operations, which, compute)
    host = extra + maximum(0.0, launch - compute.seconds - sum(exposures.values()))
    if is_host(gpu):
        host = host + execution.host_kernel_seconds * launches(operations, ring)
    return PassSeconds(compute, exposures, host)


def launches(operations: Iterable[Operation], ring: Number = 1) -> Number:
    """Kernels and collectives that the host launches for ``operations``, fused attention in a ``ring`` of ranks."""
    total: Number = 0.0
    for op in operations:
        if isinstance(op, Collective):
            total = total + (op.bytes > 0)
        elif isinstance(op, Pointwise):
            total = total + op.kernels
        else:
            total = total + (ring_launches(ring) if isinstance(op, Attend) and op.fused else 1)
    return total


def _add_sharded_bytes(
    job: Job, network: Network, held: Holding, trained: Holding, sent: dict[str, dict[str, float]]
) -> None:  # fmt: skip
    """Wire bytes of one microbatch's gathers and reduction (ZeRO-2 and 3)."""
    layout = network.layout
    if layout.zero == 3 and not gathers_once(job, layout):
        add_sent(sent, network, gathers(job, held), job.execution.gathers_per_microbatch)
    if not reduces_once(job, layout):
        for reduction in reductions(job, layout, trained):
            add_sent(sent, network, reduction)


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


__all__ = ["NO_RECOMPUTE", "PassSeconds", "UnitSeconds", "layer_key", "unit_seconds"]
