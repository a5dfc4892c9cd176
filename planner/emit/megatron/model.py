"""ModelSpec -> the flags that describe the model; what Megatron's GPT cannot build is refused with the reason."""

from __future__ import annotations

import math
from typing import Any

from cost_models.job import Job
from planner.emit.core import refuse
from planner.emit.megatron.flags import Flags, number, pattern, switch
from profiles.model import Attention, LatentAttention, Layer, Mlp, ModelSpec, Moe

ACTIVATIONS = {"gelu": (), "gelu_new": (), "gelu_fast": (), "gelu_pytorch_tanh": (), "relu2": ("--squared-relu",)}
"""Activations without a gate, and their flags."""


def model_flags(job: Job, target: str = "megatron") -> Flags:
    """Flags of the model's shape. Raises InputError (``refuse``) for a shape that Megatron's GPT model does not have."""
    model = job.model
    _possible(model, target)
    flags: Flags = {
        "--num-layers": (str(model.num_layers),),
        "--hidden-size": (str(model.hidden),),
        "--seq-length": (str(job.seq_len),),
        "--max-position-embeddings": (str(model.learned_positions or max(job.seq_len, model.max_seq_len)),),
    }
    flags |= (
        _norms(model) | _biases(model, target) | _feed_forward(model, target) | _mixer(model, target) | _positions(model, target)
    )
    if model.moe is not None:
        flags |= _experts(model, model.moe, target)
    if model.mtp:
        flags |= {"--mtp-num-layers": (str(model.mtp),)}
    flags["--make-vocab-size-divisible-by"] = (str(job.execution.vocab_multiple),)
    if not model.tied:
        flags |= switch("--untie-embeddings-and-output-weights")
    return flags


def _possible(model: ModelSpec, target: str) -> None:
    """Raise for what no flag expresses."""
    for layer in model.kinds:
        if not isinstance(layer.mixer, (Attention, LatentAttention)) or layer.beside is not None:
            mixers = [m.kind.replace("_", " ") for m in (layer.mixer, layer.beside) if m is not None]
            what = " beside ".join(mixers) or "no mixer"
            raise refuse(target, f"{model.name} has layers with {what}; pretrain_gpt.py builds softmax and latent attention")
        if layer.ffn is None:
            raise refuse(target, f"{model.name} has layers without a feed-forward")
        if layer.parallel:
            raise refuse(
                target,
                f"{model.name} runs attention and feed-forward in parallel (one residual); Megatron's layers run one after the other",
            )
        if layer.norms != 2 or layer.post_norm:
            raise refuse(
                target,
                f"{model.name} has {layer.norms} norms a layer{' behind the blocks' if layer.post_norm else ''}; Megatron has 2 before them",
            )
    lacking = {
        "a norm after the embedding": model.embedding_norm, "an embedding of another width": model.embedding_width not in (None, model.hidden),
        "a bias of the output layer": model.head_bias, "norms without weights": not model.norm_weight, "no final norm": not model.final_norm,
        "LayerNorm without bias": model.norm == "layer" and not model.norm_bias,
    }  # fmt: skip
    for what, has in lacking.items():
        if has:
            raise refuse(target, f"{model.name} has {what}, which pretrain_gpt.py does not build")


def _norms(model: ModelSpec) -> Flags:
    return {"--normalization": ("RMSNorm" if model.norm == "rms" else "LayerNorm",), "--norm-epsilon": (number(model.norm_eps),)}


def _biases(model: ModelSpec, target: str) -> Flags:
    """One switch holds for every linear layer, another for Q, K and V alone."""
    mixers = [layer.mixer for layer in model.kinds]
    qkv = {m.qkv_bias if isinstance(m, Attention) else m.bias for m in mixers if isinstance(m, (Attention, LatentAttention))}
    rest = {m.output_bias if isinstance(m, Attention) else m.bias for m in mixers if isinstance(m, (Attention, LatentAttention))}
    rest |= {layer.ffn.bias for layer in model.kinds if layer.ffn is not None}
    moe = model.moe
    if qkv == {True} and rest == {True} and (moe is None or (moe.router_bias and not moe.shared_width)):
        return {}
    if rest == {False} and len(qkv) == 1 and not (moe is not None and moe.router_bias):
        return switch("--disable-bias-linear", *(("--add-qkv-bias",) if True in qkv else ()))
    raise refuse(
        target, f"{model.name} has biases in some linear layers only; Megatron has them in all, in none, or in Q, K and V alone"
    )


def _feed_forward(model: ModelSpec, target: str) -> Flags:
    widths = {layer.ffn.width for layer in model.kinds if isinstance(layer.ffn, Mlp)}
    if len(widths) > 1:
        raise refuse(
            target, f"{model.name} has feed-forwards of widths {sorted(widths)}; Megatron has one width for all dense layers"
        )
    kinds = {(f.activation, f.gated) for layer in model.kinds if (f := layer.ffn) is not None}
    if len(kinds) > 1:
        raise refuse(target, f"{model.name} has feed-forwards of several kinds {sorted(kinds)}; Megatron has one")
    moe = model.moe
    width = next(iter(widths)) if widths else moe.width if moe else 0
    flags: Flags = {"--ffn-hidden-size": (str(width),)}
    activation, gated = next(iter(kinds))
    if model.family == "gpt_oss":
        return flags | switch("--quick-geglu") | {"--glu-linear-offset": ("1.0",), "--activation-func-clamp-value": ("7.0",)}
    if gated and activation in ("silu", "swish"):
        return flags | switch("--swiglu")
    if not gated and activation in ACTIVATIONS:
        return flags | switch(*ACTIVATIONS[activation])
    raise refuse(target, f"{model.name} uses {'gated ' if gated else ''}{activation}, for which pretrain_gpt.py has no flag")


def _mixer(model: ModelSpec, target: str) -> Flags:
    if any(getattr(layer.mixer, "chunk", None) for layer in model.kinds):
        raise refuse(target, f"{model.name} has chunked attention, which pretrain_gpt.py does not build")
    bare = {_without_window(layer) for layer in model.kinds}
    if len(bare) > 1:
        raise refuse(
            target, f"{model.name} has attention of several shapes; Megatron has one (sliding windows and skipped rotation apart)"
        )
    first = model.attention
    if isinstance(first, LatentAttention):
        return _latent(model, first, target)
    assert first is not None
    lacking = {
        f"query-key norms of kind {first.qk_norm!r}": first.qk_norm in ("full", "per_head"),
        "value heads of another width": first.value_width != first.head_dim,
    }
    for what, has in lacking.items():
        if has:
            raise refuse(target, f"{model.name} has {what}, which pretrain_gpt.py does not build")
    flags: Flags = {"--num-attention-heads": (str(first.heads),)}
    if first.kv_heads != first.heads:
        flags |= switch("--group-query-attention") | {"--num-query-groups": (str(first.kv_heads),)}
    flags["--kv-channels"] = (str(first.head_dim),)
    if first.qk_norm == "head":
        flags |= switch("--qk-layernorm")
    if first.output_gate:
        flags |= switch("--attention-output-gate")
    if first.sinks:
        flags |= {"--softmax-type": ("learnable",)}
    return flags | _windows(model, target)


def _without_window(layer: Layer) -> Any:
    mixer = layer.mixer
    return (
        mixer.model_copy(update={"window": None, **({"rotary": True} if isinstance(mixer, Attention) else {})}) if mixer else None
    )


def _latent(model: ModelSpec, mixer: LatentAttention, target: str) -> Flags:
    if mixer.index_heads:
        raise refuse(
            target, f"{model.name} picks tokens with an indexer (sparse attention); only dense latent attention is emitted"
        )
    if any(getattr(layer.mixer, "window", None) for layer in model.kinds):
        raise refuse(target, f"{model.name} has latent attention with sliding windows, which pretrain_gpt.py does not build")
    flags: Flags = {"--num-attention-heads": (str(mixer.heads),)} | switch("--multi-latent-attention")
    if mixer.q_rank is not None:
        flags["--q-lora-rank"] = (str(mixer.q_rank),)
    return flags | {
        "--kv-lora-rank": (str(mixer.kv_rank),),
        "--qk-head-dim": (str(mixer.nope_dim),),
        "--qk-pos-emb-head-dim": (str(mixer.rope_dim),),
        "--v-head-dim": (str(mixer.value_dim),),
    } | switch("--qk-layernorm")  # fmt: skip


def _windows(model: ModelSpec, target: str) -> Flags:
    """A window of w tokens, the query included, is (w - 1, 0) in Transformer Engine's terms."""
    windows = [getattr(model.layer(i).mixer, "window", None) for i in range(model.num_layers)]
    sizes = {w for w in windows if w is not None}
    if not sizes:
        return {}
    if len(sizes) > 1:
        raise refuse(target, f"{model.name} has windows of {sorted(sizes)} tokens; Megatron has one size")
    flags: Flags = {"--window-size": (f"{sizes.pop() - 1},0",)}
    if None in windows:
        flags["--window-attn-skip-freq"] = (pattern(int(w is not None) for w in windows),)
    return flags


def _positions(model: ModelSpec, target: str) -> Flags:
    if model.learned_positions:
        return {"--position-embedding-type": ("learned_absolute",)}
    rotated = [getattr(model.layer(i).mixer, "rotary", True) for i in range(model.num_layers)]
    if not any(rotated):
        raise refuse(target, f"{model.name} has neither rotary nor learned positions (ALiBi or none), which is not emitted")
    flags: Flags = {"--position-embedding-type": ("rope",), "--rotary-base": (number(model.rope_theta),)}
    if not model.rope_theta.is_integer():
        raise refuse(target, f"{model.name} has a rotary base of {model.rope_theta}; --rotary-base takes a whole number")
    if model.rope_fraction != 1.0:
        flags["--rotary-percent"] = (number(model.rope_fraction),)
    if not all(rotated):
        flags["--no-rope-freq"] = (pattern(int(not r) for r in rotated),)
    return flags | _scaling(model, target)


def _scaling(model: ModelSpec, target: str) -> Flags:
    """Longer rotary frequencies. YaRN's mscale is what its attention factors follow from: 0.1 m ln(factor) + 1."""
    scaling = model.rope_scaling
    if scaling is None:
        return {}
    factor = number(scaling.factor)
    if scaling.kind == "llama3":
        if (scaling.low, scaling.high, scaling.original) != (1.0, 4.0, 8192):
            raise refuse(
                target,
                f"{model.name} scales its rotary frequencies from {scaling.original} positions; --use-rope-scaling does from 8192",
            )
        return switch("--use-rope-scaling") | {"--rope-scaling-factor": (factor,)}
    if scaling.kind == "linear":
        if not scaling.factor.is_integer():
            raise refuse(
                target,
                f"{model.name} stretches its positions by {factor}; --rotary-seq-len-interpolation-factor takes a whole number",
            )
        return {"--rotary-seq-len-interpolation-factor": (factor,)}
    steps = 0.1 * math.log(scaling.factor)
    if isinstance(model.attention, LatentAttention):
        if scaling.original not in (0, 4096):
            raise refuse(
                target,
                f"{model.name} scales its rotary frequencies from {scaling.original} positions; latent attention's YaRN does from 4096",
            )
        softmax = math.sqrt(scaling.latent_attention)
        both = [number(round((share - 1) / steps, 6)) for share in (scaling.attention * softmax, softmax)]
        return {"--rotary-scaling-factor": (factor,), "--mscale": (both[0],), "--mscale-all-dim": (both[1],)}
    return {
        "--position-embedding-type": ("yarn",), "--rotary-scaling-factor": (factor,), "--yarn-beta-fast": (number(scaling.fast),),
        "--yarn-original-max-position-embeddings": (str(scaling.original),), "--yarn-beta-slow": (number(scaling.slow),),
        "--mscale": (number(round((scaling.attention - 1) / steps, 6)),), "--mscale-all-dim": ("0",),
    }  # fmt: skip


def _experts(model: ModelSpec, moe: Moe, target: str) -> Flags:
    kinds = {layer.ffn for layer in model.kinds if isinstance(layer.ffn, Moe)}
    if len(kinds) > 1:
        raise refuse(target, f"{model.name} has mixtures of experts of several shapes; Megatron has one")
    if moe.shared_bias:
        raise refuse(target, f"{model.name} has biases in its shared experts, which Megatron does not build")
    if moe.router == "sigmoid" and moe.top_k > 1 and not moe.normalise_top_k:
        raise refuse(target, f"{model.name} does not normalise its sigmoid gates; Megatron does")
    flags: Flags = {
        "--num-experts": (str(moe.experts),),
        "--moe-ffn-hidden-size": (str(moe.width),),
        "--moe-router-topk": (str(moe.top_k),),
        "--moe-router-score-function": (moe.router,),
        "--moe-router-dtype": ("fp32",),
        "--moe-router-load-balancing-type": ("seq_aux_loss" if moe.selection_bias else "aux_loss",),
        "--moe-aux-loss-coeff": ("0.0001" if moe.selection_bias else "0.001",),
    }
    sparse = [int(isinstance(model.layer(i).ffn, Moe)) for i in range(model.num_layers)]
    if not all(sparse):
        flags["--moe-layer-freq"] = (pattern(sparse),)
    if moe.router == "softmax" and (not moe.normalise_top_k or moe.top_k == 1):
        flags |= switch("--moe-router-pre-softmax")
    if moe.groups > 1:
        flags |= {"--moe-router-num-groups": (str(moe.groups),), "--moe-router-group-topk": (str(moe.top_groups),)}
    if moe.scaling != 1.0:
        flags["--moe-router-topk-scaling-factor"] = (number(moe.scaling),)
    if moe.selection_bias:
        if moe.router != "sigmoid":
            raise refuse(
                target, f"{model.name} selects experts with a bias on softmax scores; Megatron allows it on sigmoid scores"
            )
        flags |= switch("--moe-router-enable-expert-bias") | {"--moe-router-bias-update-rate": ("0.001",)}
    if moe.shared_width:
        flags["--moe-shared-expert-intermediate-size"] = (str(moe.shared_width),)
        if moe.shared_gate:
            flags |= switch("--moe-shared-expert-gate")
    return flags
