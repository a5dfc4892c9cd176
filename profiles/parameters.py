"""Parameters of a model, by part: exact counts from the shapes of profiles.model.

The parts are those of ``axisplan inspect``. Norms *inside* a mixer (query/key norms, the ranks of MLA, a state-space block's
gated norm) belong to that mixer; ``norm`` holds the norms of hidden width around the blocks, the final norm and BLOOM's
embedding norm. Linear-attention mixers are counted under ``state_space``. A shared expert's gate is a shared expert's weight.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from profiles.model import Attention, FeedForward, LatentAttention, Layer, LinearAttention, Mixer, ModelSpec, Moe, StateSpace

PARTS = (
    "embedding", "attention", "dense_mlp", "routed_experts", "shared_experts", "router", "norm", "head", "state_space", "other",
)  # fmt: skip
"""The parts that sum to ``total``; ``mtp`` stands apart."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters. The parts without ``mtp`` sum to ``total``; tied weights are counted once, under ``embedding``."""

    embedding: int = 0
    attention: int = 0
    dense_mlp: int = 0
    routed_experts: int = 0
    shared_experts: int = 0
    router: int = 0
    norm: int = 0
    head: int = 0
    state_space: int = 0
    mtp: int = 0
    """Multi-token-prediction modules without the embedding and head they share with the model."""
    other: int = 0
    total: int = 0
    active: int = 0
    """Parameters a token meets: ``total`` without the routed experts that are not chosen for it."""

    def as_dict(self) -> dict[str, int]:
        """Every field by name: the ``parameters`` of ``inspect --json``."""
        return asdict(self)


def linear(inputs: int, outputs: int, bias: bool = False) -> int:
    """Parameters of one projection."""
    return inputs * outputs + outputs * bias


def attention_parameters(mixer: Attention, hidden: int) -> int:
    """Softmax attention: q, k, v and output projections, query/key norms, sinks."""
    query, key, value = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim, mixer.kv_heads * mixer.value_width
    wide = 2 * query if mixer.output_gate else query
    count = sum(linear(hidden, width, mixer.qkv_bias) for width in (wide, key, value))
    count += linear(mixer.heads * mixer.value_width, hidden, mixer.output_bias)
    norms = {"none": 0, "head": 2 * mixer.head_dim, "full": query + key, "per_head": query + key}[mixer.qk_norm]
    return count + norms * (1 + mixer.qk_norm_bias) + mixer.heads * mixer.sinks


def latent_parameters(mixer: LatentAttention, hidden: int) -> int:
    """MLA (arXiv:2405.04434, section 2.1): compressed and expanded queries and keys/values, their norms, the output projection.

    ``bias`` puts one on the two compressing projections and on the output, as transformers' DeepSeek classes do.
    """
    query = mixer.heads * mixer.head_dim
    if mixer.q_rank is None:
        count = linear(hidden, query)
    else:
        count = linear(hidden, mixer.q_rank, mixer.bias) + mixer.q_rank + linear(mixer.q_rank, query)
    count += linear(hidden, mixer.kv_rank + mixer.rope_dim, mixer.bias) + mixer.kv_rank
    count += linear(mixer.kv_rank, mixer.heads * (mixer.nope_dim + mixer.value_dim))
    return count + linear(mixer.heads * mixer.value_dim, hidden, mixer.bias)


def state_space_parameters(mixer: StateSpace, hidden: int) -> int:
    """Mamba-1 (arXiv:2312.00752, section 3.4) or Mamba-2 (arXiv:2405.21060, section 8)."""
    inner, state = mixer.inner, mixer.state
    out_bias = mixer.bias if mixer.output_bias is None else mixer.output_bias
    count = linear(inner, hidden, out_bias)
    if mixer.version == 1:
        count += linear(hidden, 2 * inner, mixer.bias) + inner * (mixer.convolution + mixer.convolution_bias)
        count += linear(inner, mixer.dt_rank + 2 * state) + linear(mixer.dt_rank, inner, True)
        count += inner * state + inner
        return count + (mixer.dt_rank + 2 * state) * mixer.inner_norms
    mixed = inner + 2 * mixer.groups * state
    count += linear(hidden, inner + mixed + mixer.heads, mixer.bias) + mixed * (mixer.convolution + mixer.convolution_bias)
    return count + 3 * mixer.heads + inner * mixer.gated_norm


def linear_attention_parameters(mixer: LinearAttention, hidden: int) -> int:
    """Gated delta rule (Qwen3-Next: arXiv:2412.06464) or lightning attention (MiniMax-01: arXiv:2501.08313)."""
    key, value = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
    if mixer.form == "lightning":
        return linear(hidden, 2 * key + value) + linear(hidden, value) + linear(value, hidden) + value
    count = linear(hidden, 2 * key + 2 * value) + linear(hidden, 2 * mixer.value_heads) + linear(value, hidden)
    return count + (2 * key + value) * mixer.convolution + 2 * mixer.value_heads + mixer.value_dim


def mixer_parameters(mixer: Mixer, hidden: int) -> tuple[str, int]:
    """(part, count) of one mixer."""
    if mixer.kind == "attention":
        return "attention", attention_parameters(mixer, hidden)
    if mixer.kind == "latent_attention":
        return "attention", latent_parameters(mixer, hidden)
    if mixer.kind == "state_space":
        return "state_space", state_space_parameters(mixer, hidden)
    return "state_space", linear_attention_parameters(mixer, hidden)


def feed_forward_width(width: int, hidden: int, gated: bool, bias: bool) -> int:
    """A feed-forward of inner width ``width``: one or two input projections and one output projection."""
    return (1 + gated) * linear(hidden, width, bias) + linear(width, hidden, bias)


def expert_parameters(moe: Moe, hidden: int) -> int:
    """One routed expert."""
    return feed_forward_width(moe.width, hidden, moe.gated, moe.bias)


def feed_forward_parameters(ffn: FeedForward, hidden: int) -> dict[str, int]:
    """Counts of one feed-forward by part."""
    if ffn.kind == "mlp":
        return {"dense_mlp": feed_forward_width(ffn.width, hidden, ffn.gated, ffn.bias)}
    router = linear(hidden, ffn.experts, ffn.router_bias) + ffn.experts * ffn.selection_bias_stored
    shared = feed_forward_width(ffn.shared_width, hidden, ffn.gated, ffn.shared_bias) if ffn.shared_width else 0
    return {
        "routed_experts": ffn.experts * expert_parameters(ffn, hidden),
        "router": router,
        "shared_experts": shared + hidden * ffn.shared_gate,
    }


def norm_width(model: ModelSpec) -> int:
    """Parameters of one norm of hidden width."""
    return model.hidden * (model.norm_weight + model.norm_bias)


def layer_parameters(model: ModelSpec, layer: Layer) -> dict[str, int]:
    """Counts of one layer by part."""
    parts: Counter[str] = Counter(norm=layer.norms * norm_width(model))
    for mixer in layer.mixers:
        part, count = mixer_parameters(mixer, model.hidden)
        parts[part] += count
    if layer.ffn is not None:
        parts.update(feed_forward_parameters(layer.ffn, model.hidden))
    return dict(parts)


def mtp_parameters(model: ModelSpec) -> int:
    """MTP modules (DeepSeek-V3, arXiv:2412.19437, section 2.2): a projection of twice the hidden width, a layer like the last
    one, and three norms each (of the embedding, of the hidden state, before the shared head)."""
    layer = sum(layer_parameters(model, model.layer(model.num_layers - 1)).values())
    return model.mtp * (layer + linear(2 * model.hidden, model.hidden) + 3 * norm_width(model))


def count_parameters(model: ModelSpec) -> Parameters:
    """All parameters of ``model``, by part (see the module's docstring for what each part holds)."""
    width = model.embedding_width or model.hidden
    projected = width != model.hidden
    parts: Counter[str] = Counter(
        embedding=model.vocab * width + model.learned_positions * model.hidden + projected * width * model.hidden,
        head=(0 if model.tied else model.vocab * width) + model.vocab * model.head_bias + projected * width * model.hidden,
        norm=norm_width(model) * (model.final_norm + model.embedding_norm),
    )
    idle = 0
    for kind, copies in Counter(model.pattern).items():
        layer = model.kinds[kind]
        for part, count in layer_parameters(model, layer).items():
            parts[part] += count * copies
        if layer.ffn is not None and layer.ffn.kind == "moe":
            idle += copies * (layer.ffn.experts - layer.ffn.top_k) * expert_parameters(layer.ffn, model.hidden)
    total = sum(parts.values())
    return Parameters(**parts, mtp=mtp_parameters(model), total=total, active=total - idle)
