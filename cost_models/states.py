"""Weights by shape, and what a rank holds of them before ZeRO shards it.

``layer_weights`` lists every tensor of a layer with its full shape and how it is split; what a rank holds, Muon's whole matrices,
Transformer Engine's dummy gradients and LoRA's adapters follow from that one list (``cost_models.state_bytes``). Its sum is the
count of ``profiles.parameters``: a test.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cost_models.arrays import ceil_div, maximum
from cost_models.execution import Execution
from profiles.model import Attention, LatentAttention, Layer, LinearAttention, Mixer, Mlp, ModelSpec, Moe, StateSpace
from profiles.operations import Number

Split = Literal["none", "tp", "kv", "groups", "expert", "vocab", "mtp"]


class Weight(NamedTuple):
    """A parameter tensor: ``rows`` x ``columns`` (1 for a vector), ``copies`` of it (experts), and the way it is split:
    ``tp``; ``kv`` (TP, but never below ``whole`` rows, one KV head, unless the framework cuts heads); ``groups`` (the same for
    state-space groups); ``expert`` (copies over EP, the matrix over ETP); ``vocab`` (padded rows over TP); ``mtp`` (over TP where the
    framework splits the entry of a prediction module)."""

    name: str
    part: str
    rows: int
    columns: int = 1
    copies: int = 1
    split: Split = "none"
    whole: int = 1
    linear: bool = False
    """The matrix of a linear layer, which an 8-bit precision may store in one byte and Muon updates as a whole."""
    gated: bool = False
    """Gate and up projection together: two tensors where the framework does not fuse them."""

    @property
    def elements(self) -> int:
        return self.rows * self.columns * self.copies

    @property
    def by_input(self) -> bool:
        """Whether TP splits a linear layer's matrix by its columns."""
        return self.name in ("o", "out_proj") or self.name.endswith("_down")

    def local(self, degrees: Any, execution: Execution) -> Number:
        """Elements on one rank before ZeRO."""
        if self.split == "none" or (self.split == "mtp" and not execution.splits_mtp_projection):
            return self.elements
        if self.split == "expert":
            return ceil_div(self.copies, degrees.ep) * (self.rows * self.columns // degrees.etp)
        if self.split == "vocab":
            if not execution.vocab_parallel:
                return self.elements
            return ceil_div(self.rows, execution.vocab_multiple * degrees.tp) * execution.vocab_multiple * self.columns
        rows = ceil_div(self.rows * self.columns, degrees.tp)
        cut = self.split != "groups" and (self.split != "kv" or execution.splits_kv_heads)
        return rows if cut else maximum(rows, self.whole * self.columns)

    def padded(self, degrees: Any, execution: Execution, ways: Number) -> Number:
        """``local`` with the rows that FSDP2 adds to each tensor so that ``ways`` ranks hold equally many; experts are its rows."""
        here = self.local(degrees, execution)
        if self.split == "expert":
            rows = ceil_div(self.copies, degrees.ep)
        elif self.by_input:
            rows = self.rows
        else:
            rows = here // self.columns // (2 if self.gated and not execution.fused_gate_up else 1)
        return here // rows * (ceil_div(rows, ways) * ways)


def layer_weights(model: ModelSpec, layer: Layer) -> tuple[Weight, ...]:
    """Every weight of one layer."""
    out = [w for mixer in layer.mixers for w in _mixer(model.hidden, mixer)]
    if isinstance(layer.ffn, Mlp):
        out += _feed_forward(model.hidden, "mlp", layer.ffn.width, layer.ffn.gated, layer.ffn.bias, "tp")
    elif isinstance(layer.ffn, Moe):
        out += _moe(model.hidden, layer.ffn)
    return (*out, *_norm(model, layer.norms))


def embedding_weights(model: ModelSpec) -> tuple[Weight, ...]:
    """Token and position embeddings, the projection behind a narrow embedding, the norm behind it."""
    width = model.embedding_width or model.hidden
    out = [Weight("embedding", "embedding", model.vocab, width, split="vocab")]
    if model.learned_positions:
        out.append(Weight("positions", "embedding", model.learned_positions, model.hidden))
    if width != model.hidden:
        out.append(Weight("embedding_projection", "embedding", model.hidden, width, linear=True))
    return (*out, *(_norm(model, 1) if model.embedding_norm else ()))


def head_weights(model: ModelSpec, *, shares_embedding: bool) -> tuple[Weight, ...]:
    """Final norm and output projection; the projection is left out where it is the embedding on the same rank."""
    width = model.embedding_width or model.hidden
    out = list(_norm(model, 1) if model.final_norm else ())
    if not shares_embedding:
        out.append(Weight("head", "head", model.vocab, width, split="vocab"))
    if model.head_bias:
        out.append(Weight("head_bias", "head", model.vocab, split="vocab"))
    if width != model.hidden:
        out.append(Weight("head_projection", "head", width, model.hidden, linear=True))
    return tuple(out)


def mtp_weights(model: ModelSpec) -> tuple[Weight, ...]:
    """One multi-token-prediction module without the shared embedding and head."""
    layer = layer_weights(model, model.layer(model.num_layers - 1))
    projection = Weight("mtp_projection", "mtp", model.hidden, 2 * model.hidden, split="mtp", linear=True)
    return (*layer, projection, *_norm(model, 3))


def _norm(model: ModelSpec, count: int) -> tuple[Weight, ...]:
    vectors = int(model.norm_weight) + int(model.norm_bias)
    return tuple(Weight("norm", "norm", model.hidden) for _ in range(count * vectors))


def _matrix(
    name: str, part: str, rows: int, columns: int, bias: bool, split: Split, *, whole: int = 1, bias_split: Split | None = None
) -> list[Weight]:
    out = [Weight(name, part, rows, columns, split=split, whole=whole, linear=True)]
    if bias:
        out.append(Weight(f"{name}_bias", part, rows, split=split if bias_split is None else bias_split, whole=whole))
    return out


def _feed_forward(hidden: int, name: str, width: int, gated: bool, bias: bool, split: Split) -> list[Weight]:
    up = _matrix(f"{name}_up", name, (2 if gated else 1) * width, hidden, bias, split)
    up = [w._replace(gated=gated) for w in up]
    return up + _matrix(f"{name}_down", name, hidden, width, bias, split, bias_split="none")


def _moe(hidden: int, ffn: Moe) -> list[Weight]:
    up = (2 if ffn.gated else 1) * ffn.width
    out = [
        Weight("experts_up", "experts", up, hidden, ffn.experts, "expert", linear=True, gated=ffn.gated),
        Weight("experts_down", "experts", hidden, ffn.width, ffn.experts, "expert", linear=True),
        Weight("router", "router", ffn.experts, hidden),
    ]
    if ffn.bias:
        out.append(Weight("experts_up_bias", "experts", up, 1, ffn.experts, "expert"))
        out.append(Weight("experts_down_bias", "experts", hidden, 1, ffn.experts, "expert"))
    out += [Weight("router_bias", "router", ffn.experts)] * (ffn.router_bias + ffn.selection_bias_stored)
    if ffn.shared_width:
        out += _feed_forward(hidden, "shared", ffn.shared_width, ffn.gated, ffn.shared_bias, "tp")
    if ffn.shared_gate:
        out.append(Weight("shared_gate", "shared", 1, hidden))
    return out


def _mixer(hidden: int, mixer: Mixer) -> list[Weight]:
    if isinstance(mixer, Attention):
        return _attention(hidden, mixer)
    if isinstance(mixer, LatentAttention):
        return _latent(hidden, mixer)
    return _state_space(hidden, mixer) if isinstance(mixer, StateSpace) else _linear_attention(hidden, mixer)


def _attention(hidden: int, mixer: Attention) -> list[Weight]:
    query, key, value = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim, mixer.kv_heads * mixer.value_width
    out = _matrix("q", "attention", query * (2 if mixer.output_gate else 1), hidden, mixer.qkv_bias, "tp")
    out += _matrix("k", "attention", key, hidden, mixer.qkv_bias, "kv", whole=mixer.head_dim)
    out += _matrix("v", "attention", value, hidden, mixer.qkv_bias, "kv", whole=mixer.value_width)
    out += _matrix("o", "attention", hidden, mixer.heads * mixer.value_width, mixer.output_bias, "tp", bias_split="none")
    if mixer.qk_norm != "none":
        wide = mixer.qk_norm != "head"
        for _ in range(1 + mixer.qk_norm_bias):
            out.append(Weight("q_norm", "attention", query if wide else mixer.head_dim, split="tp" if wide else "none"))
            split: Split = "kv" if wide else "none"
            out.append(Weight("k_norm", "attention", key if wide else mixer.head_dim, split=split, whole=mixer.head_dim))
    if mixer.sinks:
        out.append(Weight("sinks", "attention", mixer.heads, split="tp"))
    return out


def _latent(hidden: int, mixer: LatentAttention) -> list[Weight]:
    query = mixer.heads * mixer.head_dim
    if mixer.q_rank is None:
        out = _matrix("q", "attention", query, hidden, False, "tp")
    else:
        out = _matrix("q_down", "attention", mixer.q_rank, hidden, mixer.bias, "none")
        out += [Weight("q_latent_norm", "attention", mixer.q_rank), *_matrix("q_up", "attention", query, mixer.q_rank, False, "tp")]
    out += _matrix("kv_down", "attention", mixer.kv_rank + mixer.rope_dim, hidden, mixer.bias, "none")
    out.append(Weight("kv_latent_norm", "attention", mixer.kv_rank))
    out += _matrix("kv_up", "attention", mixer.heads * (mixer.nope_dim + mixer.value_dim), mixer.kv_rank, False, "tp")
    if mixer.index_heads:  # every rank scores all tokens: the indexer is not split (DeepSeek-V3.2, GLM-5)
        out += _matrix("index_q", "attention", mixer.index_heads * mixer.index_dim, mixer.q_rank or hidden, False, "none")
        out += _matrix("index_k", "attention", mixer.index_dim, hidden, False, "none")
        out.append(Weight("index_norm", "attention", mixer.index_dim, 2))
        out += _matrix("index_weights", "attention", mixer.index_heads, hidden, False, "none")
    return out + _matrix("o", "attention", hidden, mixer.heads * mixer.value_dim, mixer.bias, "tp", bias_split="none")


def _state_space(hidden: int, mixer: StateSpace) -> list[Weight]:
    inner, state, part = mixer.inner, mixer.state, "state_space"
    out_bias = mixer.bias if mixer.output_bias is None else mixer.output_bias
    out = _matrix("out_proj", part, hidden, inner, out_bias, "tp", bias_split="none")
    taps = mixer.convolution + mixer.convolution_bias
    if mixer.version == 1:
        out += _matrix("in_proj", part, 2 * inner, hidden, mixer.bias, "tp")
        out.append(Weight("convolution", part, inner, taps, split="tp"))
        out += _matrix("x_proj", part, mixer.dt_rank + 2 * state, inner, False, "tp")
        out += _matrix("dt_proj", part, inner, mixer.dt_rank, True, "tp")
        out.append(Weight("decay", part, inner, state + 1, split="tp"))
        if mixer.inner_norms:
            out.append(Weight("inner_norms", part, mixer.dt_rank + 2 * state))
        return out
    grouped = 2 * mixer.groups * state
    out += _matrix("in_proj", part, 2 * inner + mixer.heads, hidden, mixer.bias, "tp")
    out += _matrix("in_proj_groups", part, grouped, hidden, mixer.bias, "groups", whole=2 * state)
    out.append(Weight("convolution", part, inner, taps, split="tp"))
    out.append(Weight("convolution_groups", part, grouped, taps, split="groups", whole=2 * state))
    out.append(Weight("head_scalars", part, 3 * mixer.heads, split="tp"))
    if mixer.gated_norm:
        out.append(Weight("gated_norm", part, inner, split="tp"))
    return out


def _linear_attention(hidden: int, mixer: LinearAttention) -> list[Weight]:
    key, value, part = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim, "state_space"
    out = _matrix("out_proj", part, hidden, value, False, "tp")
    out += _matrix("in_proj", part, 2 * key + 2 * value, hidden, False, "tp")
    if mixer.form == "lightning":
        return [*out, Weight("gated_norm", part, value, split="tp")]
    out += _matrix("step_proj", part, 2 * mixer.value_heads, hidden, False, "tp")
    out.append(Weight("convolution", part, 2 * key + value, mixer.convolution, split="tp"))
    return [*out, Weight("head_scalars", part, 2 * mixer.value_heads, split="tp"), Weight("gated_norm", part, mixer.value_dim)]


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds of some weights before ZeRO shards them, in elements: ``dense`` (sharded over dp_shard x cp), ``expert``
    (over edp_shard), the linear-layer matrices among each, and the largest single matrix."""

    dense: Number = 0
    expert: Number = 0
    dense_linear: Number = 0
    expert_linear: Number = 0
    largest: Number = 0

    def __add__(self, other: Holding) -> Holding:
        return Holding(
            self.dense + other.dense, self.expert + other.expert, self.dense_linear + other.dense_linear,
            self.expert_linear + other.expert_linear, maximum(self.largest, other.largest),
        )  # fmt: skip

    def times(self, count: int) -> Holding:
        return Holding(self.dense * count, self.expert * count, self.dense_linear * count, self.expert_linear * count, self.largest)

    @property
    def all(self) -> Number:
        return self.dense + self.expert


def hold(weights: Iterable[Weight], degrees: Any, execution: Execution, ways: tuple[Number, Number] | None = None) -> Holding:
    """What a rank holds of ``weights``; with ``ways``, the ranks that shard (dense, expert) ones, their padding included."""
    dense: Number = 0
    expert: Number = 0
    dense_linear: Number = 0
    expert_linear: Number = 0
    largest: Number = 0
    for weight in weights:
        if ways is None:
            here = weight.local(degrees, execution)
        else:
            here = weight.padded(degrees, execution, ways[weight.split == "expert"])
        if weight.split == "expert":
            expert = expert + here
            expert_linear = expert_linear + here * weight.linear
        else:
            dense = dense + here
            dense_linear = dense_linear + here * weight.linear
        if weight.linear:
            largest = maximum(largest, here // ceil_div(weight.copies, degrees.ep) if weight.split == "expert" else here)
    return Holding(dense, expert, dense_linear, expert_linear, largest)
