"""Parameters of a model, by part: exact counts from the shapes of profiles.model.

The parts are those of ``axisplan inspect``. Norms *inside* a mixer (query/key norms, the ranks of MLA, a state-space block's
gated norm) belong to that mixer; ``norm`` holds the norms of hidden width around the blocks, the final norm and BLOOM's
embedding norm. Linear-attention mixers are counted under ``state_space``. A shared expert's gate is a shared expert's weight.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

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


class Projection(NamedTuple):
    """One weight matrix that every token (of its expert) is multiplied by."""

    inputs: int
    outputs: int
    bias: bool = False

    @property
    def parameters(self) -> int:
        return (self.inputs + self.bias) * self.outputs

    @property
    def flops(self) -> int:
        """Forward FLOPs of one token: a multiply and an add per weight."""
        return 2 * self.inputs * self.outputs


def attention_projections(mixer: Attention, hidden: int) -> list[Projection]:
    """Query (twice as wide with an output gate), key, value, output."""
    query = mixer.heads * mixer.head_dim * (2 if mixer.output_gate else 1)
    key, value = mixer.kv_heads * mixer.head_dim, mixer.kv_heads * mixer.value_width
    inputs = [Projection(hidden, width, mixer.qkv_bias) for width in (query, key, value)]
    return [*inputs, Projection(mixer.heads * mixer.value_width, hidden, mixer.output_bias)]


def latent_projections(mixer: LatentAttention, hidden: int) -> list[Projection]:
    """MLA (arXiv:2405.04434, section 2.1): queries and keys/values compressed and expanded, then the output.

    ``bias`` puts one on the two compressing projections and on the output, as transformers' DeepSeek classes do.
    """
    query = mixer.heads * mixer.head_dim
    if mixer.q_rank is None:
        queries = [Projection(hidden, query)]
    else:
        queries = [Projection(hidden, mixer.q_rank, mixer.bias), Projection(mixer.q_rank, query)]
    index = [(mixer.q_rank or hidden, mixer.index_heads * mixer.index_dim), (hidden, mixer.index_dim), (hidden, mixer.index_heads)]
    return [
        *queries,
        *(Projection(*shape) for shape in index if mixer.index_heads),
        Projection(hidden, mixer.kv_rank + mixer.rope_dim, mixer.bias),
        Projection(mixer.kv_rank, mixer.heads * (mixer.nope_dim + mixer.value_dim)),
        Projection(mixer.heads * mixer.value_dim, hidden, mixer.bias),
    ]


def state_space_projections(mixer: StateSpace, hidden: int) -> list[Projection]:
    """Mamba-1 (arXiv:2312.00752, section 3.4) or Mamba-2 (arXiv:2405.21060, section 8)."""
    inner, state = mixer.inner, mixer.state
    output = Projection(inner, hidden, mixer.bias if mixer.output_bias is None else mixer.output_bias)
    if mixer.version == 1:
        steps = [Projection(inner, mixer.dt_rank + 2 * state), Projection(mixer.dt_rank, inner, True)]
        return [Projection(hidden, 2 * inner, mixer.bias), *steps, output]
    return [Projection(hidden, inner + convolved_channels(mixer) + mixer.heads, mixer.bias), output]


def linear_attention_projections(mixer: LinearAttention, hidden: int) -> list[Projection]:
    """Gated delta rule (Qwen3-Next: arXiv:2412.06464) or lightning attention (MiniMax-01: arXiv:2501.08313): query, key, value
    and output gate, the decays of the delta rule, the output."""
    key, value = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
    decays = [Projection(hidden, 2 * mixer.value_heads)] if mixer.form == "gated_delta" else []
    return [Projection(hidden, 2 * key + value), Projection(hidden, value), *decays, Projection(value, hidden)]


def convolved_channels(mixer: StateSpace | LinearAttention) -> int:
    """Channels of the short causal convolution."""
    if mixer.kind == "linear_attention":
        return 2 * mixer.key_heads * mixer.key_dim + mixer.value_heads * mixer.value_dim
    return mixer.inner if mixer.version == 1 else mixer.inner + 2 * mixer.groups * mixer.state


def projections(mixer: Mixer, hidden: int) -> list[Projection]:
    """The weight matrices of a mixer."""
    if mixer.kind == "attention":
        return attention_projections(mixer, hidden)
    if mixer.kind == "latent_attention":
        return latent_projections(mixer, hidden)
    if mixer.kind == "state_space":
        return state_space_projections(mixer, hidden)
    return linear_attention_projections(mixer, hidden)


def mixer_extras(mixer: Mixer) -> int:
    """Parameters of a mixer that are no projection: norms inside it, sinks, convolutions, decays."""
    if mixer.kind == "attention":
        query, key = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        norms = {"none": 0, "head": 2 * mixer.head_dim, "full": query + key, "per_head": query + key}[mixer.qk_norm]
        return norms * (1 + mixer.qk_norm_bias) + mixer.heads * mixer.sinks
    if mixer.kind == "latent_attention":
        return (mixer.q_rank or 0) + mixer.kv_rank + 2 * mixer.index_dim * (mixer.index_heads > 0)
    channels = convolved_channels(mixer)
    if mixer.kind == "linear_attention":
        if mixer.form == "lightning":
            return mixer.value_heads * mixer.value_dim
        return channels * mixer.convolution + 2 * mixer.value_heads + mixer.value_dim
    convolution = channels * (mixer.convolution + mixer.convolution_bias)
    if mixer.version == 1:
        return convolution + mixer.inner * (mixer.state + 1) + (mixer.dt_rank + 2 * mixer.state) * mixer.inner_norms
    return convolution + 3 * mixer.heads + mixer.inner * mixer.gated_norm


def mixer_parameters(mixer: Mixer, hidden: int) -> tuple[str, int]:
    """(part, count) of one mixer."""
    part = "attention" if mixer.kind in ("attention", "latent_attention") else "state_space"
    return part, sum(p.parameters for p in projections(mixer, hidden)) + mixer_extras(mixer)


def mlp_projections(width: int, hidden: int, gated: bool, bias: bool) -> list[Projection]:
    """A feed-forward of inner width ``width``: one or two input projections and one output projection; none of width 0."""
    if width == 0:
        return []
    return [Projection(hidden, width, bias)] * (1 + gated) + [Projection(width, hidden, bias)]


def expert_projections(moe: Moe, hidden: int) -> list[Projection]:
    """One routed expert."""
    return mlp_projections(moe.width, hidden, moe.gated, moe.bias)


def shared_projections(moe: Moe, hidden: int) -> list[Projection]:
    """The shared experts and, where there is one, their gate."""
    gate = [Projection(hidden, 1)] if moe.shared_gate else []
    return [*mlp_projections(moe.shared_width, hidden, moe.gated, moe.shared_bias), *gate]


def feed_forward_parameters(ffn: FeedForward, hidden: int) -> dict[str, int]:
    """Counts of one feed-forward by part."""
    if ffn.kind == "mlp":
        return {"dense_mlp": sum(p.parameters for p in mlp_projections(ffn.width, hidden, ffn.gated, ffn.bias))}
    return {
        "routed_experts": ffn.experts * sum(p.parameters for p in expert_projections(ffn, hidden)),
        "router": Projection(hidden, ffn.experts, ffn.router_bias).parameters + ffn.experts * ffn.selection_bias_stored,
        "shared_experts": sum(p.parameters for p in shared_projections(ffn, hidden)),
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
    return model.mtp * (layer + 2 * model.hidden**2 + 3 * norm_width(model))


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
            expert = sum(p.parameters for p in expert_projections(layer.ffn, model.hidden))
            idle += copies * (layer.ffn.experts - layer.ffn.top_k) * expert
    total = sum(parts.values())
    return Parameters(**parts, mtp=mtp_parameters(model), total=total, active=total - idle)
