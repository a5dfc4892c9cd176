"""Families whose configs have names and habits of their own: GPT-2, GPT-J, GPT-NeoX, OPT, BLOOM, Falcon, MPT, Phi-1/2, DBRX."""

from __future__ import annotations

from typing import Any

from profiles.families.decoder import assemble
from profiles.families.experts import FfnFacts, moe
from profiles.families.fields import Fields
from profiles.model import Attention, Layer, Mlp, ModelSpec


def attention(fields: Fields, **facts: Any) -> Attention:
    """Plain multi-head attention; ``facts`` override what the fields say."""
    heads = fields.heads()
    hidden = fields.count("hidden_size")
    fields.divides("num_attention_heads", heads, "hidden_size", hidden)
    return Attention(**{"heads": heads, "kv_heads": heads, "head_dim": hidden // heads, **facts})


def repeat(fields: Fields, layer: Layer, name: str, family: str, **facts: Any) -> ModelSpec:
    """``num_hidden_layers`` equal layers with LayerNorms that have a bias, unless ``facts`` say otherwise."""
    given: dict[str, Any] = {
        "hidden": fields.count("hidden_size"), "vocab": fields.count("vocab_size"), "norm": "layer", "norm_bias": True,
        "norm_eps": fields.number("norm_eps", 1e-5), "max_seq_len": fields.count("max_position_embeddings", 0, least=0),
    }  # fmt: skip
    return assemble([layer] * fields.layers(), name=name, family=family, **{**given, **facts})


def width(fields: Fields, times: int = 4) -> int:
    """intermediate_size (n_inner, ffn_dim, ffn_hidden_size); absent or null means ``times`` the hidden width."""
    return fields.count("intermediate_size", times * fields.count("hidden_size"))


def activation(fields: Fields, default: str) -> str:
    return fields.text("hidden_act", default)


def gpt2(fields: Fields, name: str, family: str) -> ModelSpec:
    mlp = Mlp(width=width(fields), gated=False, bias=True, activation=activation(fields, "gelu_new"))
    layer = Layer(mixer=attention(fields, qkv_bias=True, output_bias=True, rotary=False), ffn=mlp)
    positions = fields.count("max_position_embeddings", 1024)
    return repeat(fields, layer, name, family, tied=fields.tied(True), learned_positions=positions, max_seq_len=positions)


def gptj(fields: Fields, name: str, family: str) -> ModelSpec:
    mixer = attention(fields)
    mlp = Mlp(width=width(fields), gated=False, bias=True, activation=activation(fields, "gelu_new"))
    rotary = fields.count("rotary_dim", 64) / mixer.head_dim
    layer = Layer(mixer=mixer, ffn=mlp, norms=1, parallel=True)
    return repeat(fields, layer, name, family, tied=fields.tied(False), head_bias=True, rope_fraction=rotary)


def gpt_neox(fields: Fields, name: str, family: str) -> ModelSpec:
    bias = fields.flag("attention_bias", True)
    mlp = Mlp(width=fields.count("intermediate_size"), gated=False, bias=True, activation=activation(fields, "gelu"))
    parallel = fields.flag("use_parallel_residual", True)
    layer = Layer(mixer=attention(fields, qkv_bias=bias, output_bias=bias), ffn=mlp, norms=2, parallel=parallel)
    fields = Fields(fields.raw, fields.where, {"rotary_pct": 0.25})
    theta, share = fields.rope()
    return repeat(fields, layer, name, family, tied=fields.tied(False), rope_theta=theta, rope_fraction=share)


def opt(fields: Fields, name: str, family: str) -> ModelSpec:
    bias, affine = fields.flag("enable_bias", True), fields.flag("layer_norm_elementwise_affine", True)
    mlp = Mlp(width=fields.count("intermediate_size"), gated=False, bias=bias, activation=activation(fields, "relu"))
    before = fields.flag("do_layer_norm_before", True)
    layer = Layer(mixer=attention(fields, qkv_bias=bias, output_bias=bias, rotary=False), ffn=mlp, post_norm=not before)
    positions = fields.count("max_position_embeddings")
    return repeat(
        fields, layer, name, family, tied=fields.tied(True), learned_positions=positions + 2, max_seq_len=positions,
        embedding_width=fields.count("word_embed_proj_dim", fields.count("hidden_size")), norm_weight=affine, norm_bias=affine,
        final_norm=before and not fields.flag("_remove_final_layer_norm", False),
    )  # fmt: skip


def bloom(fields: Fields, name: str, family: str) -> ModelSpec:
    mlp = Mlp(width=4 * fields.count("hidden_size"), gated=False, bias=True, activation="gelu")
    layer = Layer(mixer=attention(fields, qkv_bias=True, output_bias=True, rotary=False), ffn=mlp)
    return repeat(fields, layer, name, family, tied=fields.tied(True), embedding_norm=True, max_seq_len=0)


def falcon(fields: Fields, name: str, family: str) -> ModelSpec:
    """7B (one norm, multi-query), 40B/180B (new_decoder_architecture: grouped queries, two norms) and RW (sequential, biased)."""
    new, bias = fields.flag("new_decoder_architecture", False), fields.flag("bias", False)
    parallel = new or fields.flag("parallel_attn", True)
    heads = fields.heads()
    if new:
        kv = fields.kv_heads(heads)
        norms = fields.count("num_ln_in_parallel_attn", 2)
    else:
        kv = 1 if fields.flag("multi_query", True) else heads
        norms = 1 if parallel else 2
    rotary = not fields.flag("alibi", False)
    mixer = attention(fields, kv_heads=kv, qkv_bias=bias, output_bias=bias, rotary=rotary)
    mlp = Mlp(width=width(fields), gated=False, bias=bias, activation=activation(fields, "gelu"))
    layer = Layer(mixer=mixer, ffn=mlp, norms=norms, parallel=parallel)
    theta, share = fields.rope()
    return repeat(fields, layer, name, family, tied=fields.tied(True), rope_theta=theta, rope_fraction=share)


def mpt(fields: Fields, name: str, family: str) -> ModelSpec:
    """As transformers builds it whatever no_bias and expansion_ratio say: no biases, an MLP four times as wide, ALiBi."""
    mlp = Mlp(width=4 * fields.count("hidden_size"), gated=False, activation="gelu")
    layer = Layer(mixer=attention(fields, rotary=False), ffn=mlp)
    ratio = fields.number("expansion_ratio", 4)
    notes = (f"expansion_ratio {ratio:g} is read as 4, as transformers does",) if ratio != 4 else ()
    return repeat(fields, layer, name, family, norm_bias=False, tied=fields.tied(True), notes=notes)


def phi(fields: Fields, name: str, family: str) -> ModelSpec:
    heads = fields.heads()
    qk = "head" if fields.flag("qk_layernorm", False) else "none"
    mixer = attention(fields, kv_heads=fields.kv_heads(heads), qkv_bias=True, output_bias=True, qk_norm=qk, qk_norm_bias=True)
    mlp = Mlp(width=width(fields), gated=False, bias=True, activation=activation(fields, "gelu_new"))
    fields = Fields(fields.raw, fields.where, {"partial_rotary_factor": 0.5})
    theta, share = fields.rope()
    layer = Layer(mixer=mixer, ffn=mlp, norms=1, parallel=True)
    return repeat(fields, layer, name, family, tied=fields.tied(False), head_bias=True, rope_theta=theta, rope_fraction=share)


def dbrx(fields: Fields, name: str, family: str) -> ModelSpec:
    """Grouped queries and experts described in attn_config and ffn_config."""
    inner = fields.inside("attn_config")
    outer = fields.inside("ffn_config")
    heads = fields.heads()
    kv = inner.count("num_key_value_heads", 1)
    inner.divides("num_key_value_heads", kv, "n_heads", heads)
    act = outer.inside("ffn_act_fn").text("name", "silu")
    experts = Fields({"num_experts": 4, "num_experts_per_tok": 1, **_known(outer)}, outer.where)
    ffn = moe(experts, outer.count("intermediate_size", 3584), FfnFacts(activation=act))
    return repeat(
        fields, Layer(mixer=attention(fields, kv_heads=kv), ffn=ffn), name, family, norm_bias=False, tied=fields.tied(False),
        rope_theta=inner.number("rope_theta", 10000.0),
    )  # fmt: skip


def _known(outer: Fields) -> dict[str, Any]:
    """DBRX's expert counts under the usual names."""
    names = {"moe_num_experts": "num_experts", "moe_top_k": "num_experts_per_tok"}
    return {usual: outer.raw[own] for own, usual in names.items() if outer.raw.get(own) is not None}


CLASSIC = {
    "gpt2": gpt2, "gptj": gptj, "gpt_neox": gpt_neox, "opt": opt, "bloom": bloom, "falcon": falcon, "mpt": mpt, "phi": phi,
    "dbrx": dbrx,
}  # fmt: skip
