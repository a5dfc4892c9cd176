"""ModelSpec: the shapes of what is trained.

A model is an embedding, a list of layers, and a head. A layer is a *mixer* (attention in one of its forms, or a state-space
block) followed by a *feed-forward* (an MLP or a mixture of experts); either may be absent. Distinct layers are written once
(``kinds``) and placed by index (``pattern``), so a model of 126 equal layers costs as much to describe as one of a single layer.

All widths are full (unsharded) sizes in elements; what a rank holds of them is ``cost_models.layers``' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from profiles.parameters import Parameters, count_parameters

MAX_LAYERS = 10_000
Count = Annotated[int, Field(gt=0)]


class Spec(BaseModel):
    """Base of every record here: immutable, hashable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,), defer_build=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with ``update``; what was cached of the original (groups, parameters) is worked out anew."""
        copied = super().model_copy(update=update, deep=deep)
        for name in set(copied.__dict__) - set(type(copied).model_fields):
            del copied.__dict__[name]
        return copied


class Attention(Spec):
    """Softmax attention with ``heads`` query and ``kv_heads`` key/value heads (MHA, GQA and MQA)."""

    kind: Literal["attention"] = "attention"
    heads: Count
    kv_heads: Count
    head_dim: Count
    value_dim: Count | None = None
    """Width of a value head where it differs from ``head_dim``."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "full", "per_head"] = "none"
    """``head``: one norm of head_dim shared by all heads (Qwen3); ``full``: over all heads together (OLMo 2);
    ``per_head``: a weight of its own for each head (Cohere)."""
    qk_norm_bias: bool = False
    window: Count | None = None
    """Sliding window: tokens a query sees, itself included. None = all earlier tokens."""
    chunk: Count | None = None
    """Chunked attention (Llama 4): a query sees earlier tokens of its own chunk only."""
    output_gate: bool = False
    """Qwen3-Next: q_proj is twice as wide and its second half gates the output."""
    sinks: bool = False
    """gpt-oss: one learned sink logit a head."""
    rotary: bool = True

    @property
    def value_width(self) -> int:
        return self.value_dim or self.head_dim


class LatentAttention(Spec):
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434 section 2.1)."""

    kind: Literal["latent_attention"] = "latent_attention"
    heads: Count
    q_rank: Count | None = None
    """Rank of the query compression; None = one full q_proj (V2-Lite)."""
    kv_rank: Count
    nope_dim: Count
    rope_dim: Count
    value_dim: Count
    bias: bool = False
    window: Count | None = None
    index_heads: int = 0
    """Heads of the indexer that picks the tokens to see (DeepSeek-V3.2, GLM-5); 0 = none. Its weights are counted, its sparsity
    is not: attention is costed as dense."""
    index_dim: int = 0

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_dim(self) -> int:
        """Width of a query or key head: the part without and the part with rotary embedding."""
        return self.nope_dim + self.rope_dim

    @property
    def value_width(self) -> int:
        return self.value_dim


class StateSpace(Spec):
    """A Mamba-2 / Mamba-1 style mixer: in_proj, short convolution, selective scan, out_proj."""

    kind: Literal["state_space"] = "state_space"
    version: Literal[1, 2] = 2
    heads: Count
    """Mamba-2 heads; for Mamba-1 the channels (inner width), each a head of width 1."""
    head_dim: Count
    state: Count
    groups: Count = 1
    convolution: Count = 4
    dt_rank: int = 0
    """Mamba-1: rank of the step-size projection."""
    bias: bool = False
    """Biases of in_proj and (unless ``output_bias`` says otherwise) of out_proj."""
    output_bias: bool | None = None
    convolution_bias: bool = True
    gated_norm: bool = True
    inner_norms: bool = False
    """Jamba: norms on dt, B and C."""

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim


class LinearAttention(Spec):
    """Gated delta-rule (Qwen3-Next) or lightning (MiniMax-01) linear attention."""

    kind: Literal["linear_attention"] = "linear_attention"
    form: Literal["gated_delta", "lightning"] = "gated_delta"
    key_heads: Count
    value_heads: Count
    key_dim: Count
    value_dim: Count
    convolution: int = 4

    @property
    def heads(self) -> int:
        return self.value_heads


class Mlp(Spec):
    """A dense feed-forward of inner width ``width``; ``gated``: act(x W_gate) * (x W_up), two input matrices."""

    kind: Literal["mlp"] = "mlp"
    width: Count
    gated: bool = True
    bias: bool = False
    activation: str = "silu"


class Moe(Spec):
    """A mixture of ``experts`` feed-forwards of inner width ``width``, ``top_k`` of them chosen for each token."""

    kind: Literal["moe"] = "moe"
    experts: Count
    top_k: Count
    width: Count
    gated: bool = True
    bias: bool = False
    activation: str = "silu"
    router_bias: bool = False
    """A learned bias of the router's projection (a parameter)."""
    selection_bias: bool = False
    """DeepSeek-V3: a bias that only selects (a buffer, not a parameter)."""
    selection_bias_stored: bool = False
    """ERNIE 4.5: the selection bias is stored among the parameters (and counted there)."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalise_top_k: bool = True
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    """Node-limited routing: experts are chosen from ``top_groups`` of ``groups`` groups."""
    shared_width: int = 0
    """Inner width of the always-active shared expert(s), summed; 0 = none."""
    shared_bias: bool = False
    shared_gate: bool = False
    """Qwen2-MoE: the shared expert's output is scaled by a learned gate (hidden -> 1)."""

    @model_validator(mode="after")
    def _top_k(self) -> Moe:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} exceeds experts {self.experts}")
        return self


Mixer = Annotated[Attention | LatentAttention | StateSpace | LinearAttention, Field(discriminator="kind")]
FeedForward = Annotated[Mlp | Moe, Field(discriminator="kind")]


class Layer(Spec):
    """One layer: ``norms`` normalisations of the hidden width around a mixer and a feed-forward."""

    mixer: Mixer | None = None
    beside: Mixer | None = None
    """A second mixer that reads the same input as ``mixer``; their outputs are added (Falcon-H1: Mamba beside attention)."""
    ffn: FeedForward | None = None
    norms: int = 2
    """Normalisations of hidden width in the layer: 2 usual, 4 Gemma-2/3 and GLM-4, 1 parallel blocks with one norm."""
    parallel: bool = False
    """Mixer and feed-forward read the same residual (GPT-J, NeoX, Falcon, Phi-1/2, Cohere): one TP all-reduce can serve both."""
    post_norm: bool = False
    """The norm follows the block instead of preceding it (OLMo 2)."""

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers present, in order."""
        return tuple(m for m in (self.mixer, self.beside) if m is not None)


class RopeScaling(Spec):
    """Rotary frequencies made longer: ``linear``, ``llama3`` (Llama 3.1), ``yarn`` (arXiv:2309.00071), in transformers' terms."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float = Field(gt=0)
    original: int = 0
    """Positions the unscaled model was made for."""
    low: float = 1.0
    high: float = 4.0
    """llama3: wavelengths above original / low are divided by factor, those below original / high are kept."""
    fast: float = 32.0
    slow: float = 1.0
    """yarn: rotations over ``original`` positions above which a frequency is kept, below which it is divided."""
    attention: float = 1.0
    """What cos and sin are multiplied by."""
    latent_attention: float = 1.0
    """What MLA's softmax scale is multiplied by."""


class ModelSpec(Spec):
    """What is trained. ``pattern[i]`` is the index in ``kinds`` of layer i."""

    name: str
    family: str = "llama"
    """The Hugging Face model_type it came from, for the runtime's and the emitters' naming."""
    hidden: Count
    vocab: Count
    kinds: tuple[Layer, ...]
    pattern: tuple[int, ...]
    """Kind of each layer. Files may write it as text: ``"0*3 1*58"`` is three layers of kind 0, then 58 of kind 1."""
    tied: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_weight: bool = True
    """False: norms without parameters (OLMo 1)."""
    norm_eps: float = 1e-6
    final_norm: bool = True
    embedding_norm: bool = False
    """BLOOM: a norm after the embedding."""
    learned_positions: int = 0
    """Rows of a learned position embedding (GPT-2: 1024, OPT: 2050); 0 = none."""
    embedding_width: int | None = None
    """OPT-350M: tokens are embedded in this width and projected to hidden and back."""
    head_bias: bool = False
    mtp: int = 0
    """Multi-token-prediction modules (DeepSeek-V3), counted apart from ``total``."""
    max_seq_len: int = 0
    """Longest sequence the positions were made for; 0 = not limited."""
    rope_theta: float = 10000.0
    rope_fraction: float = 1.0
    """Share of head_dim that rotates (partial rotary)."""
    rope_scaling: RopeScaling | None = None
    notes: tuple[str, ...] = ()
    """What the reader of the config had to say: text part taken, approximations."""

    @model_validator(mode="after")
    def _pattern(self) -> ModelSpec:
        if not self.pattern:
            raise ValueError("a model needs at least one layer")
        bad = [i for i in self.pattern if not 0 <= i < len(self.kinds)]
        if bad:
            raise ValueError(f"pattern names kind {bad[0]}; there are kinds 0..{len(self.kinds) - 1}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _short_pattern(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("pattern"), str):
            return {**data, "pattern": expand_pattern(data["pattern"])}
        return data

    @property
    def num_layers(self) -> int:
        return len(self.pattern)

    def layer(self, index: int) -> Layer:
        return self.kinds[self.pattern[index]]

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Runs of equal layers in order, as (kind, count)."""
        runs: list[tuple[int, int]] = []
        for kind in self.pattern:
            if runs and runs[-1][0] == kind:
                runs[-1] = (kind, runs[-1][1] + 1)
            else:
                runs.append((kind, 1))
        return tuple(runs)

    @cached_property
    def parameters(self) -> Parameters:
        """Parameters by part, in total and active for a token (profiles.parameters)."""
        return count_parameters(self)

    @cached_property
    def moe(self) -> Moe | None:
        """The first mixture-of-experts feed-forward, None for a dense model."""
        return next((k.ffn for k in self.kinds if isinstance(k.ffn, Moe)), None)

    @cached_property
    def attention(self) -> Attention | LatentAttention | None:
        """The first attention mixer, None for a model without attention."""
        return next((k.mixer for k in self.kinds if isinstance(k.mixer, (Attention, LatentAttention))), None)


def expand_pattern(text: str) -> tuple[int, ...]:
    """``"0*3 1*58"`` -> three zeros and 58 ones. Raises ValueError on other text or on more than ``MAX_LAYERS`` layers."""
    runs = [part.split("*") for part in text.replace(",", " ").split()]
    if not all(len(run) in (1, 2) and all(part.strip().isdigit() and len(part) < 9 for part in run) for run in runs):
        raise ValueError('a pattern is written as "KIND*COUNT KIND*COUNT ...", such as "0*3 1*58"')
    counts = [(int(run[0]), int(run[1]) if len(run) == 2 else 1) for run in runs]
    if sum(count for _, count in counts) > MAX_LAYERS:
        raise ValueError(f"more than {MAX_LAYERS} layers")
    return tuple(kind for kind, count in counts for _ in range(count))


def uniform(name: str, layer: Layer, count: int, **fields: object) -> ModelSpec:
    """A model of ``count`` equal layers."""
    return ModelSpec.model_validate({"name": name, "kinds": (layer,), "pattern": (0,) * count, **fields})
