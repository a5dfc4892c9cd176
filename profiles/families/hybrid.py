"""Families with state-space or linear-attention layers.

Mamba, Mamba-2, Jamba, Nemotron-H, Falcon-H1, Qwen3-Next, MiniMax-01, Granite-4.
"""

from __future__ import annotations

import math
from typing import Any

from profiles.errors import InputError
from profiles.families import experts, windows
from profiles.families.decoder import assemble
from profiles.families.fields import MAX_COUNT, Fields
from profiles.model import Attention, Layer, LinearAttention, Mixer, Mlp, ModelSpec, Moe, StateSpace


def finish(fields: Fields, layers: list[Layer], name: str, family: str, **facts: Any) -> ModelSpec:
    theta, share = fields.rope()
    given = {
        "hidden": fields.count("hidden_size"), "vocab": fields.count("vocab_size"), "tied": fields.tied(False),
        "norm_eps": fields.number("norm_eps", 1e-5), "max_seq_len": fields.count("max_position_embeddings", 0, least=0),
        "rope_theta": theta, "rope_fraction": share,
    }  # fmt: skip
    return assemble(layers, name=name, family=family, **{**given, **facts})


def attention(fields: Fields, **facts: Any) -> Attention:
    heads = fields.heads()
    given = {"heads": heads, "kv_heads": fields.kv_heads(heads), "head_dim": fields.head_dim(heads)}
    return Attention(**{**given, **facts})


def unknown_kind(fields: Fields, kind: object, known: list[str]) -> InputError:
    return InputError(f"{fields.where}layer_types", kind, f"is no layer of this family ({', '.join(known)})", known[0])


def rank(fields: Fields, name: str, hidden: int) -> int:
    """Mamba-1's rank of the step projection: "auto" = hidden / 16, rounded up."""
    return math.ceil(hidden / 16) if fields.raw.get(name, "auto") == "auto" else fields.count(name)


def expanded(fields: Fields, name: str) -> int:
    """The inner width: ``name`` times the hidden width, rounded down."""
    factor, hidden = fields.number(name, 2), fields.count("hidden_size")
    inner = int(factor * hidden)
    if not 1 <= inner <= MAX_COUNT:
        raise InputError(fields.where + name, factor, f"makes no inner width of hidden_size = {hidden}", 2)
    return inner


def mamba(fields: Fields, name: str, family: str) -> ModelSpec:
    hidden = fields.count("hidden_size")
    mixer = StateSpace(
        version=1, heads=expanded(fields, "expand"), head_dim=1, state=fields.count("state_size", 16),
        convolution=fields.count("conv_kernel", 4), dt_rank=rank(fields, "time_step_rank", hidden),
        bias=fields.flag("use_bias", False), convolution_bias=fields.flag("use_conv_bias", True),
    )  # fmt: skip
    return finish(fields, [Layer(mixer=mixer, norms=1)] * fields.layers(), name, family, tied=fields.tied(True))


def mamba2(fields: Fields, name: str, family: str) -> ModelSpec:
    heads, head_dim = fields.count("num_heads"), fields.count("head_dim", 64)
    inner = expanded(fields, "expand")
    if heads * head_dim != inner:
        rule = f"num_heads x head_dim must equal expand x hidden_size = {inner}"
        raise InputError("num_heads", heads, rule, max(1, inner // head_dim))
    mixer = StateSpace(
        heads=heads, head_dim=head_dim, state=fields.count("state_size", 128), groups=fields.count("n_groups", 8),
        convolution=fields.count("conv_kernel", 4), bias=fields.flag("use_bias", False),
        convolution_bias=fields.flag("use_conv_bias", True),
    )  # fmt: skip
    return finish(fields, [Layer(mixer=mixer, norms=1)] * fields.layers(), name, family)


def jamba(fields: Fields, name: str, family: str) -> ModelSpec:
    """Mamba-1 with one attention layer in attn_layer_period; experts every expert_layer_period-th layer."""
    hidden, layers = fields.count("hidden_size"), fields.layers()
    state_space = StateSpace(
        version=1, heads=expanded(fields, "mamba_expand"), head_dim=1, state=fields.count("mamba_d_state", 16),
        convolution=fields.count("mamba_d_conv", 4), dt_rank=rank(fields, "mamba_dt_rank", hidden),
        bias=fields.flag("mamba_proj_bias", False), convolution_bias=fields.flag("mamba_conv_bias", True), inner_norms=True,
    )  # fmt: skip
    softmax = attention(Fields(fields.raw, fields.where, {"num_key_value_heads": 8}), rotary=False)
    period, offset = fields.count("attn_layer_period", 8), fields.count("attn_layer_offset", 4, least=0)
    facts = experts.FfnFacts(activation=fields.text("hidden_act", "silu"))
    mixers = [softmax if i % period == offset else state_space for i in range(layers)]
    built = [Layer(mixer=mixers[i], ffn=experts.jamba(fields, i, layers, facts)) for i in range(layers)]
    return finish(fields, built, name, family)


NEMOTRON_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def nemotron_h(fields: Fields, name: str, family: str) -> ModelSpec:
    """Each entry of layers_block_type (or letter of hybrid_override_pattern) is one mixer *or* one feed-forward."""
    if "hybrid_override_pattern" in fields.raw and not fields.has("layer_types"):
        pattern = fields.text("hybrid_override_pattern")
        names = [NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]
        if fields.has("num_hidden_layers") and fields.layers() != len(names):
            layers = fields.layers()
            raise InputError(
                "hybrid_override_pattern", f"{len(names)} letters", f"contradicts num_hidden_layers = {layers}", layers
            )
    else:
        given = fields.items("layer_types")
        if not given:
            raise InputError("layers_block_type", None, "missing: the list (or hybrid_override_pattern, the text) of layer kinds")
        names = [windows.LEGACY.get(str(kind), str(kind)) for kind in given]
    bias = fields.flag("mamba_proj_bias", False) or fields.flag("use_bias", False)
    makers = {
        "linear_attention": lambda: Layer(norms=1, mixer=StateSpace(
            heads=fields.count("mamba_num_heads", 128), head_dim=fields.count("mamba_head_dim", 64),
            state=fields.count("ssm_state_size", 128), groups=fields.count("n_groups", fields.raw.get("mamba_n_groups") or 8),
            convolution=fields.count("conv_kernel", fields.raw.get("mamba_d_conv") or 4), bias=bias,
            convolution_bias=fields.flag("use_conv_bias", True))),
        "full_attention": lambda: Layer(norms=1, mixer=attention(
            Fields(fields.raw, fields.where, {"head_dim": fields.raw.get("attention_head_dim") or 128, "num_key_value_heads": 8}),
            rotary=False)),
        "mlp": lambda: Layer(norms=1, ffn=Mlp(
            width=fields.count("intermediate_size"), gated=False, bias=fields.flag("mlp_bias", False),
            activation=fields.text("hidden_act", "relu2"))),
        "moe": lambda: Layer(norms=1, ffn=nemotron_experts(fields)),
    }  # fmt: skip
    made: dict[str, Layer] = {}
    for kind in names:
        if kind not in makers:
            raise unknown_kind(fields, kind, sorted(makers))
        if kind not in made:
            made[kind] = makers[kind]()
    return finish(fields, [made[kind] for kind in names], name, family)


def nemotron_experts(fields: Fields) -> Moe:
    if latent := fields.optional("moe_latent_size"):
        rule = "experts behind a projection to a width of their own (LatentMoE) are not modelled; null where the model has none"
        raise InputError(fields.where + "moe_latent_size", latent, rule)
    facts = experts.FfnFacts(gated=False, bias=False, activation=fields.text("hidden_act", "relu2"))
    shared = fields.count("moe_shared_expert_intermediate_size", 0, least=0) * fields.count("n_shared_experts", 1, least=0)
    return experts.moe(
        fields, fields.count("moe_intermediate_size"), facts, router="sigmoid", selection_bias=True, shared_width=shared,
        shared_bias=fields.flag("mlp_bias", False), scaling=fields.number("routed_scaling_factor", 1.0),
        groups=fields.count("n_group", 1), top_groups=fields.count("topk_group", 1),
    )  # fmt: skip


def mamba_beside(fields: Fields, **facts: Any) -> StateSpace:
    """The Mamba-2 block of Falcon-H1, Bamba and Granite-4 (fields mamba_*)."""
    inner = fields.optional("mamba_d_ssm") or expanded(fields, "mamba_expand")
    heads = fields.count("mamba_n_heads", 128)
    if inner % heads:
        fields.divides("mamba_n_heads", heads, "the inner width", inner)
    given = fields.raw.get("mamba_d_head", "auto")
    head_dim = inner // heads if given in ("auto", None) else fields.count("mamba_d_head")
    if head_dim * heads != inner:
        rule = f"contradicts {heads} heads of inner width {inner}"
        raise InputError(fields.where + "mamba_d_head", head_dim, rule, inner // heads)
    return StateSpace(
        heads=heads, head_dim=head_dim, state=fields.count("mamba_d_state", 256), groups=fields.count("mamba_n_groups", 1),
        convolution=fields.count("mamba_d_conv", 4), bias=fields.flag("mamba_proj_bias", False),
        convolution_bias=fields.flag("mamba_conv_bias", True), **facts,
    )  # fmt: skip


def falcon_h1(fields: Fields, name: str, family: str) -> ModelSpec:
    """Attention and a Mamba-2 block side by side, then a gated MLP, in every layer."""
    inner = Fields(fields.raw, fields.where, {"num_key_value_heads": 8})
    bias = fields.flag("attention_bias", False)
    state_space = mamba_beside(
        fields, gated_norm=fields.flag("mamba_rms_norm", False), output_bias=fields.flag("projectors_bias", False)
    )
    width, act = fields.count("intermediate_size"), fields.text("hidden_act", "silu")
    mlp = Mlp(width=width, bias=fields.flag("mlp_bias", False), activation=act)
    layer = Layer(mixer=attention(inner, qkv_bias=bias, output_bias=bias), beside=state_space, ffn=mlp)
    return finish(fields, [layer] * fields.layers(), name, family)


def granite_hybrid(fields: Fields, name: str, family: str) -> ModelSpec:
    """Granite 4: Mamba-2 or attention by layer_types, then experts with a shared MLP (or that MLP alone)."""
    layers = fields.layers()
    bias = fields.flag("attention_bias", False)
    rotary = fields.raw.get("position_embedding_type") == "rope"
    mixers: dict[str, Mixer] = {}
    facts = experts.FfnFacts(activation=fields.text("hidden_act", "silu"))
    ffn = experts.granite(fields, 0, layers, facts)
    built = []
    for kind in windows.kinds(fields, layers, lambda i: "linear_attention"):
        if kind not in mixers:
            if kind not in ("linear_attention", "full_attention"):
                raise unknown_kind(fields, kind, ["linear_attention", "full_attention"])
            softmax = kind == "full_attention"
            mixers[kind] = attention(fields, qkv_bias=bias, output_bias=bias, rotary=rotary) if softmax else mamba_beside(fields)
        built.append(Layer(mixer=mixers[kind], ffn=ffn))
    return finish(fields, built, name, family)


def bamba(fields: Fields, name: str, family: str) -> ModelSpec:
    """Mamba-2 with attention in the layers of attn_layer_indices, a gated MLP in every layer."""
    layers = fields.layers()
    bias = fields.flag("attention_bias", False)
    indices = fields.items("attn_layer_indices") or []
    softmax = attention(Fields(fields.raw, fields.where, {"num_key_value_heads": 8}), qkv_bias=bias, output_bias=bias)
    mixers: list[Mixer] = [softmax if i in indices else mamba_beside(fields) for i in range(layers)]
    width, act = fields.count("intermediate_size"), fields.text("hidden_act", "silu")
    mlp = Mlp(width=width, bias=fields.flag("mlp_bias", False), activation=act)
    return finish(fields, [Layer(mixer=mixer, ffn=mlp) for mixer in mixers], name, family, rope_fraction=0.5)


def qwen3_next(fields: Fields, name: str, family: str) -> ModelSpec:
    """Gated delta rule in three layers of four, gated softmax attention in the fourth. Qwen3.5 too, whose layers are all dense
    (num_experts absent) or all mixtures."""
    fields = Fields(fields.raw, fields.where, {"partial_rotary_factor": 0.25, "head_dim": 256, "num_key_value_heads": 2,
                                               "norm_topk_prob": True})  # fmt: skip
    if family == "qwen3_5_text":
        fields.defaults = {**fields.defaults, "num_key_value_heads": 4, "num_experts": 0}
    layers = fields.layers()
    every = fields.count("full_attention_interval", 4)
    bias = fields.flag("attention_bias", False)
    softmax = attention(fields, output_gate=True, qk_norm="head", qkv_bias=bias, output_bias=bias)
    linear = LinearAttention(
        key_heads=fields.count("linear_num_key_heads", 16), value_heads=fields.count("linear_num_value_heads", 32),
        key_dim=fields.count("linear_key_head_dim", 128), value_dim=fields.count("linear_value_head_dim", 128),
        convolution=fields.count("linear_conv_kernel_dim", 4),
    )  # fmt: skip
    facts = experts.FfnFacts(activation=fields.text("hidden_act", "silu"))
    names = windows.kinds(fields, layers, lambda i: "linear_attention" if (i + 1) % every else "full_attention")
    ffns = [experts.qwen(fields, i, layers, facts) for i in range(layers)]
    mtp = fields.count("num_nextn_predict_layers", 0, least=0)
    return finish(fields, _two_kinds(fields, names, softmax, linear, ffns), name, family, mtp=mtp)


def _two_kinds(fields: Fields, names: list[str], softmax: Mixer, linear: Mixer, ffns: list[Any]) -> list[Layer]:
    mixers = {"full_attention": softmax, "linear_attention": linear}
    for kind in names:
        if kind not in mixers:
            raise unknown_kind(fields, kind, sorted(mixers))
    return [Layer(mixer=mixers[kind], ffn=ffn) for kind, ffn in zip(names, ffns, strict=True)]


def minimax(fields: Fields, name: str, family: str) -> ModelSpec:
    """MiniMax-01: lightning attention, softmax attention where layer_types (or attn_type_list, 1) says; experts everywhere."""
    fields = Fields(fields.raw, fields.where, {"num_key_value_heads": 8})
    layers = fields.layers()
    old = fields.per_layer("attn_type_list", layers)
    softmax = attention(fields, window=fields.optional("sliding_window"))
    heads, width = softmax.heads, softmax.head_dim
    linear = LinearAttention(form="lightning", key_heads=heads, value_heads=heads, key_dim=width, value_dim=width, convolution=0)
    if old is not None and not fields.has("layer_types"):
        names = ["full_attention" if entry == 1 else "linear_attention" for entry in old]
    else:
        names = windows.kinds(fields, layers, lambda i: "full_attention" if (i + 1) % 2 else "linear_attention")
    facts = experts.FfnFacts(activation=fields.text("hidden_act", "silu"))
    ffns = [experts.mixtral(fields, 0, layers, facts)] * layers
    return finish(fields, _two_kinds(fields, names, softmax, linear, ffns), name, family)


HYBRIDS = {
    "mamba": mamba, "mamba2": mamba2, "jamba": jamba, "nemotron_h": nemotron_h, "falcon_h1": falcon_h1, "bamba": bamba,
    "granitemoehybrid": granite_hybrid, "minimax": minimax, "qwen3_next": qwen3_next, "qwen3_5_text": qwen3_next,
    "qwen3_5_moe_text": qwen3_next,
}  # fmt: skip
