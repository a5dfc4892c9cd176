"""Which layers hold a mixture of experts, and of what sizes, family by family.

Each rule takes the fields, the layer's index, the number of layers and the facts of the family, and gives that layer's
feed-forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from profiles.errors import InputError
from profiles.families.fields import Fields
from profiles.model import FeedForward, Mlp, Moe


class FfnFacts(NamedTuple):
    """What a family's config does not say of its feed-forwards."""

    gated: bool = True
    bias: bool = False
    activation: str = "silu"


def dense(fields: Fields, index: int, layers: int, facts: FfnFacts) -> FeedForward:
    """An MLP of width intermediate_size in every layer."""
    return mlp(fields.count("intermediate_size"), facts)


def mlp(width: int, facts: FfnFacts) -> Mlp:
    return Mlp(width=width, gated=facts.gated, bias=facts.bias, activation=facts.activation)


def moe(fields: Fields, width: int, facts: FfnFacts, **more: Any) -> Moe:
    """num_experts experts of ``width``, num_experts_per_tok of them for each token."""
    experts, top_k = fields.count("num_experts"), fields.count("num_experts_per_tok")
    if top_k > experts:
        raise InputError(fields.where + fields.spelled("num_experts_per_tok")[0], top_k, f"exceeds {experts} experts", experts)
    given = {"gated": facts.gated, "bias": facts.bias, "activation": facts.activation, **more}
    return Moe(experts=experts, top_k=top_k, width=width, **given)


def mixtral(fields: Fields, index: int, layers: int, facts: FfnFacts) -> FeedForward:
    """Every layer; intermediate_size is an expert's width (Mixtral, OLMoE, Phi-MoE, MiniMax-01)."""
    normalise = fields.flag("norm_topk_prob", True)
    return moe(fields, fields.count("intermediate_size"), facts, normalise_top_k=normalise)


def gpt_oss(fields: Fields, index: int, layers: int, facts: FfnFacts) -> FeedForward:
    """Every layer; router and experts have biases."""
    return moe(fields, fields.count("intermediate_size"), facts, bias=True, router_bias=True)


def minimax_m2(fields: Fields, index: int, layers: int, facts: FfnFacts) -> FeedForward:
    """Every layer; sigmoid routing with a selecting bias."""
    return moe(fields, fields.count("intermediate_size"), facts, router="sigmoid", selection_bias=True)


def granite(fields: Fields, index: int, layers: int, facts: FfnFacts) -> FeedForward:
    """Every layer; shared_intermediate_size, where given, is an MLP beside the experts, or the only one without experts."""
    shared = fields.count("shared_intermediate_size", 0, least=0)
    if fields.count("num_experts", least=0) == 0:
        return mlp(fields.count("shared_intermediate_size"), facts)
    return moe(fields, fields.count("intermediate_size"), facts, shared_width=shared)


def qwen(fields: Fields, index: int, layers: int, facts: FfnFacts) -> FeedForward:
    """Every decoder_sparse_step-th layer that is not in mlp_only_layers; a gated shared expert where its width is given."""
    step = fields.count("decoder_sparse_step", 1)
    sparse = index not in (fields.items("mlp_only_layers") or []) and (index + 1) % step == 0
    if not sparse or fields.count("num_experts", least=0) == 0:
        return mlp(fields.count("intermediate_size"), facts)
    shared = fields.count("shared_expert_intermediate_size", 0, least=0)
    normalise = fields.flag("norm_topk_prob", False)
    width = fields.count("moe_intermediate_size")
    return moe(fields, width, facts, shared_width=shared, shared_gate=shared > 0, normalise_top_k=normalise)


def deepseek(fields: Fields, index: int, layers: int, facts: FfnFacts) -> FeedForward:
    """Dense in the first first_k_dense_replace layers, then every moe_layer_freq-th; or as mlp_layer_types says."""
    kinds = fields.per_layer("mlp_layer_types", layers)
    frequency = fields.raw.get("moe_layer_freq")
    if kinds is not None:
        sparse = kinds[index] == "sparse"
    elif isinstance(frequency, list):
        sparse = bool((fields.per_layer("moe_layer_freq", layers) or [])[index])
    else:
        sparse = index >= fields.count("first_k_dense_replace", 0, least=0) and index % fields.count("moe_layer_freq", 1) == 0
    if not sparse or not fields.count("num_experts", 0, least=0):
        return mlp(fields.count("intermediate_size"), facts)
    width = fields.count("moe_intermediate_size")
    sigmoid = fields.text("scoring_func", "softmax") == "sigmoid"
    return moe(
        fields, width, facts, bias=False, shared_bias=facts.bias,
        shared_width=width * fields.count("n_shared_experts", 0, least=0),
        router="sigmoid" if sigmoid else "softmax", selection_bias=sigmoid,
        normalise_top_k=fields.flag("norm_topk_prob", sigmoid), scaling=fields.number("routed_scaling_factor", 1.0),
        groups=fields.count("n_group", 1), top_groups=fields.count("topk_group", 1),
    )  # fmt: skip


def llama4(fields: Fields, index: int, layers: int, facts: FfnFacts) -> FeedForward:
    """Experts in moe_layers, or every interleave_moe_layer_step-th layer; one shared expert of an expert's width."""
    step = fields.count("interleave_moe_layer_step", 1, least=0)
    chosen = fields.items("moe_layers")
    sparse = index in chosen if chosen is not None else step > 0 and (index + 1) % step == 0
    if not sparse:
        return mlp(fields.count("intermediate_size_mlp"), facts)
    width = fields.count("intermediate_size")
    return moe(fields, width, facts, router="sigmoid", normalise_top_k=False, shared_width=width)


def ernie(fields: Fields, index: int, layers: int, facts: FfnFacts) -> FeedForward:
    """Experts from moe_layer_start_index to moe_layer_end_index, every moe_layer_interval-th layer."""
    start, step = fields.count("moe_layer_start_index", 1, least=0), fields.count("moe_layer_interval", 1)
    end = fields.count("moe_layer_end_index", -1, least=-1)
    end = layers - 1 if end == -1 else end
    if not (start <= index <= end and (index + 1) % step == 0):
        return mlp(fields.count("intermediate_size"), facts)
    width = fields.count("moe_intermediate_size")
    return moe(
        fields, width, facts, bias=False, shared_bias=facts.bias,
        shared_width=width * fields.count("n_shared_experts", 0, least=0),
        selection_bias=True, selection_bias_stored=True,
    )  # fmt: skip


def jamba(fields: Fields, index: int, layers: int, facts: FfnFacts) -> FeedForward:
    """Experts where index mod expert_layer_period is expert_layer_offset; intermediate_size is every width."""
    period, offset = fields.count("expert_layer_period", 2), fields.count("expert_layer_offset", 1, least=0)
    width, experts = fields.count("intermediate_size"), fields.count("num_experts", 16)
    if index % period != offset or experts == 1:
        return mlp(width, facts)
    return moe(fields, width, facts, normalise_top_k=False)
