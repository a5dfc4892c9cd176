"""A mixture of experts: routing, exchange of tokens over EP, the experts (split over ETP), shared experts."""

from __future__ import annotations

import math

import numpy as np

from cost_models.arrays import ceil_div, maximum, where
from cost_models.builder import Builder, Entry, Gradients
from cost_models.job import Job
from cost_models.layer_cost import LayerCost, Local
from cost_models.layout import DEDUPLICATED
from cost_models.mlp_ops import activation, activation_gradients, projections
from profiles.model import Moe
from profiles.operations import Number

EXPERT_VARIATION = 0.2
"""Standard deviation / mean of single experts' tokens under a load-balancing loss, where no routing is given (an estimate)."""
PERMUTE_BYTES = 7
"""Bytes read and written per 16-bit element to sort tokens by expert, or back: copy 4, and the sort by local expert; forward and
backward alike (modelling-notes.md, section 2.13: 14 for both)."""


def expected_distinct(experts: int, top_k: int, groups: Number) -> Number:
    """Expected number of distinct groups (ranks or nodes) among the ``top_k`` of ``experts`` chosen uniformly for a token, with the
    experts spread evenly over ``groups``: ``G (1 - C(E - E/G, k) / C(E, k))``.
    """
    per_group = experts / groups
    none = 1.0
    for i in range(top_k):
        none = none * maximum(experts - per_group - i, 0.0) / (experts - i)
    return groups * (1 - none)


def imbalance(job: Job, ep: Number, moe: Moe, capacity: Number = 0.0) -> Number:
    """Tokens of the busiest EP rank over their mean: what the job's ``routing`` says of that ep, else its ``moe_imbalance``, else the
    expected maximum of ``ep`` sums of ``experts / ep`` loads that vary by ``EXPERT_VARIATION``; with a capacity factor its padded size.
    1 where ep = 1."""
    if job.routing:
        degrees, factors = np.array(job.routing).T
        at = np.minimum(np.searchsorted(degrees, ep), len(degrees) - 1)
        guess: Number = factors[at] if isinstance(ep, np.ndarray) else float(factors[at])
    elif job.moe_imbalance is not None:
        guess = job.moe_imbalance
    else:
        spread = np.sqrt(2 * np.log(maximum(ep, 1)) * ep / moe.experts)
        guess = 1 + EXPERT_VARIATION * (spread if isinstance(ep, np.ndarray) else float(spread))
    return where(capacity > 0, capacity, where(ep > 1, guess, 1.0))


def imbalance_of(loads: tuple[float, ...], owners: tuple[int, ...]) -> float:
    """Max / mean tokens of a rank, from tokens per expert and the rank that holds each expert."""
    ranks = [0.0] * (max(owners) + 1)
    for load, owner in zip(loads, owners, strict=True):
        ranks[owner] += load
    return max(ranks) * len(ranks) / math.fsum(ranks)


def moe_operations(local: Local, ffn: Moe, *, entry: Entry, post_norm: bool) -> LayerCost:
    """Router, dispatch, experts, combine, shared experts (GShard, arXiv:2006.16668; Megatron-Core's token dispatchers).

    Each rank routes its own (SP-split) tokens. All-to-all: ``top_k`` rows a token leave and, balanced, as many arrive; with ETP the
    arriving rows are gathered over the group and the partial outputs reduce-scattered. All-gather: every rank of the etp x ep group
    sees all of the group's tokens. Rows of the busiest rank carry the imbalance: in compute, memory and traffic.
    """
    model, execution, degrees = local.model, local.execution, local.degrees
    b = Builder(local, "moe")
    h, size = model.hidden, local.bytes
    mine = own_tokens(local)
    factor = imbalance(local.job, degrees.ep, ffn, degrees.capacity)
    rows = mine * ffn.top_k * factor * degrees.etp
    width = ffn.width // degrees.etp

    _entry(b, ffn, entry)
    whole = where(degrees.sp, 0, local.tokens * h * size)
    b.collective("backward_input", "all_gather", "tp", whole, "moe_own")
    _router(b, ffn, mine)
    if ffn.shared_width:
        _shared(b, ffn)

    sent = mine * ffn.top_k * h
    permute = PERMUTE_BYTES * sent * size / 2
    b.pointwise("permute", permute, permute, 2 if execution.permute_fusion else 5)
    _exchange(b, ffn, factor, "dispatch")
    b.keep("experts_input", rows * h * local.input_bytes, weight=True)
    moved = where(degrees.ep * degrees.etp > 1, rows, 0)
    b.keep("experts_route", execution.route_bytes * (2 * mine * ffn.top_k + moved))
    _experts(b, ffn, rows, width)
    if not execution.expert_weight_on_input:
        b.keep("experts_output", mine * ffn.top_k * h * size)
    _exchange(b, ffn, factor, "combine")
    b.pointwise("unpermute", permute, permute, 2 if execution.permute_fusion else 5)
    b.collective("forward", "all_gather", "tp", whole, "moe_all")
    gradients = _backward_peak(b, ffn, rows, width, sent * size)
    return b.residual("moe", post_norm=post_norm, gradients=gradients, reduce=False)


def _backward_peak(b: Builder, ffn: Moe, rows: Number, width: Number, sent: Number) -> Gradients:
    """The most bytes of gradients alive in the backward beyond what was saved: weighing the results (the gradient of ``sent`` bytes and
    copies of it), bringing them to the experts, the experts' last, middle and first layer. Kept results are free after the first.
    Where gradients wait, the experts' are reduced apart: that moment comes after the first layer's.
    """
    local, execution, h = b.local, b.local.execution, b.local.model.hidden
    size = local.bytes
    free = 0 if execution.expert_weight_on_input else sent
    up = 2 if ffn.gated else 1
    pieces = 1 if execution.fused_gate_up else up
    matrix = maximum(ffn.experts // local.degrees.ep, 1) * h * width
    shared = {s.name: s.bytes for s in b.saved if s.name.startswith("shared_")}
    weigh = (1 + execution.moe_buffers) * sent + shared.get("shared_input", 0)  # in a recomputation the shared experts come after
    normed = 0 if _input_kept(b, ffn) else local.split_tokens * h * size
    bring = (1 + execution.moe_buffers) * rows * h * size - free + normed
    last = rows * (h + width) * size + b.weight_gradient(matrix) - free
    middle = activation_gradients(local, rows, width, gated=ffn.gated) - free
    inputs = rows * h if pieces == 1 else maximum(rows * h, 2 * rows * h - rows * width)
    first = (inputs - rows * width) * size - free
    beside = 0
    if ffn.shared_width:  # its backward comes first: its saved tensors are free, its input's gradient waits
        done = ("shared_input", "shared_hidden", "shared_product")
        beside = local.split_tokens * h * size - sum(shared.get(name, 0) for name in done)
    after = maximum(middle, first + b.weight_gradient(matrix * up // pieces))
    begun = maximum(last - rows * h * size, after)  # what the last layer's gradients were made of is gone
    most = maximum(maximum(weigh, bring), maximum(last, after))

    dense = b.weight_gradient(b.weights - (1 + up) * matrix)
    gathered, reduced = (
        (1 + up) * matrix * (4 if size == 4 else each) for each in (execution.gather_bytes, execution.reduce_bytes)
    )
    every = b.weight_gradient((1 + up) * matrix)
    inner = sum(s.bytes for s in b.saved if s.name in ("experts_input", "experts_hidden", "experts_product"))
    reducing = rows * h * size - free - inner + every + reduced - gathered
    waiting = maximum(maximum(weigh, bring), maximum(last, middle + b.weight_gradient(matrix)))
    waiting = maximum(waiting, maximum(first + every, reducing)) + beside + (dense if ffn.shared_width else 0)
    return Gradients(most + beside, (most if ffn.shared_width else begun) + beside, waiting, dense + reduced - gathered)


def own_tokens(local: Local) -> Number:
    """Tokens a rank routes: its own part, also where the norm region is not split over TP."""
    return ceil_div(local.tokens, local.degrees.tp)


def _entry(b: Builder, ffn: Moe, entry: Entry) -> None:
    """The norm before the router. Its output is kept for the router, unless that runs on an fp32 copy, and for shared experts,
    unless they keep it gathered."""
    local = b.local
    if entry == "norm":
        b.norm("moe_norm", local.split_tokens, local.model.hidden, output=_input_kept(b, ffn))
    elif _input_kept(b, ffn):
        b.linear_input("moe_input", local.split_tokens * local.model.hidden, kept=False)


def _input_kept(b: Builder, ffn: Moe) -> bool:
    execution = b.local.execution
    by_shared = ffn.shared_width > 0 and not execution.keeps_gathered_input
    return not execution.router_fp32 or by_shared or ffn.shared_gate


def _router(b: Builder, ffn: Moe, mine: Number) -> None:
    local, execution, degrees, h = b.local, b.local.execution, b.local.degrees, b.local.model.hidden
    b.linear("router", mine, ffn.experts, h, dtype="fp32" if execution.router_fp32 else local.dtype)
    b.pointwise("router_probabilities", 12 * mine * ffn.experts, 12 * mine * ffn.experts, 4)
    b.keep("router_probabilities", mine * (4 * ffn.experts + 14 * ffn.top_k + 4))
    if execution.router_fp32 and local.bytes < 4:
        if local.job.trains("router"):
            b.keep("router_input", 4 * mine * h, weight=True)
        b.keep("router_weight", 4 * ffn.experts * h)
    if execution.router_collectives:
        b.collective("forward", "all_to_all", "ep", 8 * ffn.experts, "route_counts")
        b.collective("forward", "all_gather", "etp", 8 * ffn.experts * degrees.etp, "route_counts")
        for axis in ("tp", "cp"):
            b.collective("forward", "all_reduce", axis, 4 * degrees.micro_batch * ffn.experts, "router_balance")


def _experts(b: Builder, ffn: Moe, rows: Number, width: Number) -> None:
    local, h = b.local, b.local.model.hidden
    groups = maximum(ffn.experts // local.degrees.ep, 1)
    up = 2 * width if ffn.gated else width
    b.grouped("experts_up", rows, up, h, groups, pieces=1 if local.execution.fused_gate_up or not ffn.gated else 2)
    activation(b, "experts", rows * width, gated=ffn.gated)
    b.grouped("experts_down", rows, h, width, groups)


def _shared(b: Builder, ffn: Moe) -> None:
    """Shared experts: a dense feed-forward beside the routed ones, split over TP (never over ETP)."""
    local, h = b.local, b.local.model.hidden
    b.enter_tensor_parallel("shared_in", local.tokens * h)
    if local.execution.keeps_gathered_input:
        b.keep("shared_input", local.tokens * h * local.input_bytes, weight=True)
    projections(b, "shared", local.tokens, h, ffn.shared_width // local.degrees.tp, gated=ffn.gated)
    b.leave_tensor_parallel("shared_out", local.tokens * h)
    if ffn.shared_gate:
        b.linear("shared_gate", local.split_tokens, 1, h, dtype=local.dtype)
        b.keep("shared_output", local.split_tokens * h * local.bytes)


def _exchange(b: Builder, ffn: Moe, factor: Number, name: str) -> None:
    """One exchange of tokens (dispatch or combine) forward, and its gradient's exchange backward.

    Bytes of an all-to-all: copies a token sends (``top_k``; or the expected distinct ranks or nodes where the Execution sends one
    copy to each) times its row, on the busiest rank. A combine carries partial sums where dispatch is deduplicated.
    """
    local, degrees, execution = b.local, b.local.degrees, b.local.execution
    mine, h = own_tokens(local), local.model.hidden
    row = h * (execution.dispatch_bytes if name == "dispatch" else 2.0) * local.bytes / 2
    back = h * local.bytes
    if degrees.dispatcher == "allgather":
        group = degrees.etp * degrees.ep
        there, here = ("all_gather", "reduce_scatter") if name == "dispatch" else ("reduce_scatter", "all_gather")
        b.collective("forward", there, "etp_ep", mine * group * h * local.bytes, name)
        b.collective("backward_input", here, "etp_ep", mine * group * h * local.bytes, name)
        return
    copies = dispatched_copies(local, ffn)
    gathered = mine * ffn.top_k * factor * degrees.etp * h * local.bytes
    if name == "dispatch":
        b.collective("forward", "all_to_all", "ep", mine * copies * factor * row, name)
        b.collective("forward", "all_gather", "etp", gathered, name)
        b.collective("backward_input", "all_to_all", "ep", mine * copies * factor * back, name)
        b.collective("backward_input", "reduce_scatter", "etp", gathered, name)
    else:
        b.collective("forward", "reduce_scatter", "etp", gathered, name)
        b.collective("forward", "all_to_all", "ep", mine * copies * factor * row, name)
        b.collective("backward_input", "all_gather", "etp", gathered, name)
        b.collective("backward_input", "all_to_all", "ep", mine * copies * factor * back, name)


def dispatched_copies(local: Local, ffn: Moe) -> Number:
    """Copies of a token that leave a rank in a dispatch, those to itself included."""
    degrees = local.degrees
    way = "per_rank" if degrees.dispatcher in DEDUPLICATED else local.execution.dispatch
    if way == "per_expert":
        return ffn.top_k
    if way == "per_rank":
        return expected_distinct(ffn.experts, ffn.top_k, degrees.ep)
    return expected_distinct(ffn.experts, min(ffn.top_k, ffn.experts), node_groups(local))


def node_groups(local: Local) -> Number:
    """Nodes that an EP group spans, EP ranks lying ``etp`` apart (at least 1)."""
    ranks = local.degrees.ep * local.degrees.etp
    return maximum(-(-ranks // local.job.cluster.gpus_per_node), 1)
