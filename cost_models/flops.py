"""FLOPs of a token, from the shapes of a model: what MFU divides by, and what `axisplan inspect` shows.

A projection costs ``2 inputs outputs``; backward costs twice the forward, so training is three times it (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1; Narayanan et al. 2021, arXiv:2104.04473, appendix). A mixture of experts costs its router, its
shared experts and ``top_k`` of its experts (Fedus et al. 2021, arXiv:2101.03961, section 2). Attention scores cost
``2 (query-key width + value width) heads`` a query-key pair, and the pairs are counted exactly. Looking up embeddings, norms,
activations and rotary embedding count nothing, as in PyTorch's FlopCounterMode.

The two attention conventions in print (`convention`):

* ``causal``: the pairs a causal mask leaves, each query with itself and what precedes it in its window or chunk.
* ``full``: no discount for the causal mask: every query with as many keys as the longest window, chunk or the sequence holds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from profiles.errors import InputError
from profiles.families.registry import checked_against
from profiles.model import Attention, FeedForward, LatentAttention, Layer, LinearAttention, Mixer, ModelSpec, StateSpace
from profiles.parameters import (
    Projection,
    convolved_channels,
    expert_projections,
    layer_parameters,
    mlp_projections,
    projections,
    shared_projections,
)

if TYPE_CHECKING:
    from cost_models.job import Job

Convention = Literal["causal", "full"]


@dataclass(frozen=True, slots=True)
class LayerFlops:
    """Forward FLOPs a token of one kind of layer. ``linear`` is everything but attention scores."""

    kind: int
    count: int
    mixer: float
    ffn: float
    attention_causal: float
    attention_full: float

    @property
    def linear(self) -> float:
        return self.mixer + self.ffn

    @property
    def forward(self) -> float:
        """With causal attention."""
        return self.linear + self.attention_causal


@dataclass(frozen=True, slots=True)
class FlopsPerToken:
    """FLOPs of one token at one sequence length, over the whole model, MTP modules apart."""

    forward: float
    """Projections, experts, state-space recurrences, head, and attention scores under the causal convention."""
    training: float
    """Three times ``forward``: forward, input gradients, weight gradients; nothing recomputed."""
    attention_causal: float
    """Of ``forward``: attention scores (queries by keys, and probabilities by values)."""
    attention_full: float
    """Attention scores without the causal discount."""
    head: float
    """Of ``forward``: the head (and OPT-350M's projections between widths)."""
    mtp: float
    """Forward FLOPs of the multi-token-prediction modules, apart from ``forward``."""
    layers: tuple[LayerFlops, ...]
    """By kind of layer, in the order of ModelSpec.kinds."""


def pairs(seq_len: int, window: int | None = None, chunk: int | None = None) -> int:
    """Query-key pairs of one causal sequence: each query sees itself and earlier tokens, in its window or chunk.

    8 tokens: 36. A window w: ``w S - w (w - 1) / 2``; a chunk c: ``c (c + 1) / 2`` each, and what is left over.
    """
    if chunk is not None and chunk < seq_len:
        whole, rest = divmod(seq_len, chunk)
        return whole * pairs(chunk) + pairs(rest)
    span = seq_len if window is None else min(window, seq_len)
    return span * seq_len - span * (span - 1) // 2


def attention_per_token(mixer: Mixer, seq_len: int) -> tuple[float, float]:
    """(causal, full) forward attention-score FLOPs a token of one mixer; zero for mixers without scores."""
    if not isinstance(mixer, (Attention, LatentAttention)):
        return 0.0, 0.0
    chunk = mixer.chunk if isinstance(mixer, Attention) else None
    a_pair = 2.0 * mixer.heads * (mixer.head_dim + mixer.value_width)
    longest = min(seq_len, mixer.window or seq_len, chunk or seq_len)
    return a_pair * pairs(seq_len, mixer.window, chunk) / seq_len, a_pair * longest


def recurrence_per_token(mixer: Mixer) -> float:
    """FLOPs a token of the short convolution and the recurrence, as the recurrence is written (chunked kernels do more).

    State space: 7 a state element and channel: decay, input outer product and add, read-out (Megatron-LM's
    ``mamba_layer_flops``; Dao & Gu 2024, arXiv:2405.21060). Gated delta rule: 7 a key-value pair of a head: decay, prediction,
    correction, read-out (Yang et al. 2024, arXiv:2412.06464, eq. 10). Lightning attention: 5, it has no prediction
    (arXiv:2501.08313, section 2.2).
    """
    if isinstance(mixer, StateSpace):
        return 2.0 * mixer.convolution * convolved_channels(mixer) + 7.0 * mixer.inner * mixer.state
    if isinstance(mixer, LinearAttention):
        a_pair = 7.0 if mixer.form == "gated_delta" else 5.0
        return 2.0 * mixer.convolution * convolved_channels(mixer) + a_pair * mixer.value_heads * mixer.key_dim * mixer.value_dim
    return 0.0


def mixer_per_token(mixer: Mixer, hidden: int) -> float:
    """Forward FLOPs a token of a mixer's projections and recurrence, attention scores apart."""
    return float(sum(p.flops for p in projections(mixer, hidden))) + recurrence_per_token(mixer)


def ffn_per_token(ffn: FeedForward | None, hidden: int) -> float:
    """Forward FLOPs a token of a feed-forward: of a mixture, the router, the shared experts and top_k experts."""
    if ffn is None:
        return 0.0
    if ffn.kind == "mlp":
        return float(sum(p.flops for p in mlp_projections(ffn.width, hidden, ffn.gated, ffn.bias)))
    router = Projection(hidden, ffn.experts).flops
    shared = sum(p.flops for p in shared_projections(ffn, hidden))
    return float(router + shared + ffn.top_k * sum(p.flops for p in expert_projections(ffn, hidden)))


def layer_per_token(layer: Layer, hidden: int, seq_len: int, kind: int = 0, count: int = 1) -> LayerFlops:
    """Forward FLOPs a token of one layer."""
    attention = [attention_per_token(mixer, seq_len) for mixer in layer.mixers]
    return LayerFlops(
        kind=kind, count=count, ffn=ffn_per_token(layer.ffn, hidden),
        mixer=sum(mixer_per_token(mixer, hidden) for mixer in layer.mixers),
        attention_causal=sum(causal for causal, _ in attention), attention_full=sum(full for _, full in attention),
    )  # fmt: skip


def head_per_token(model: ModelSpec) -> float:
    """Forward FLOPs a token of the head, and of the projections in and out where embeddings have a width of their own."""
    width = model.embedding_width or model.hidden
    between = 2 * Projection(width, model.hidden).flops if width != model.hidden else 0
    return float(Projection(width, model.vocab).flops + between)


def flops_per_token(model: ModelSpec, seq_len: int) -> FlopsPerToken:
    """FLOPs a token of ``model`` in sequences of ``seq_len`` tokens. Raises InputError for a length below 1."""
    if seq_len < 1:
        raise InputError("seq_len", seq_len, "must be at least 1", 1)
    used = sorted(Counter(model.pattern).items())
    layers = tuple(layer_per_token(model.kinds[kind], model.hidden, seq_len, kind, count) for kind, count in used)
    head = head_per_token(model)
    causal = sum(layer.count * layer.attention_causal for layer in layers)
    full = sum(layer.count * layer.attention_full for layer in layers)
    forward = sum(layer.count * layer.linear for layer in layers) + head + causal
    last = next(layer for layer in layers if layer.kind == model.pattern[-1])
    mtp = model.mtp * (last.forward + Projection(2 * model.hidden, model.hidden).flops + head)
    return FlopsPerToken(forward, 3 * forward, causal, full, head, mtp, layers)


@lru_cache(maxsize=256)
def training_per_token(job: Job) -> float:
    """Training FLOPs a token of ``job``: ``FlopsPerToken.training``, attention scores inside documents only where sequences are packed,
    no weight gradients for frozen parts, and six FLOPs a token for each adapter weight that it meets (forward, input gradient,
    weight gradient, 2 each).
    """
    from cost_models.layers import backward_reaches
    from cost_models.packing import packing
    from cost_models.state_bytes import adapter_weights
    from cost_models.states import layer_weights

    model, each = job.model, flops_per_token(job.model, job.seq_len)
    share = packing(job.documents, job.seq_len).share if job.documents else 1.0
    attention = each.attention_causal * (1 - share)
    layers = Counter(model.pattern)
    total = each.training - 3 * attention
    if not backward_reaches(job):
        inside = each.forward - each.head - attention
        return total - 2 * inside - (0 if job.trains("head") else each.head)
    total -= 0 if job.trains("head") else each.head
    for kind, count in layers.items():
        layer = model.kinds[kind]
        total -= count * sum(flops for part, flops in _by_part(layer, model.hidden).items() if not job.trains(part))
        if job.lora_rank:
            adapted = tuple(w for w in layer_weights(model, layer) if job.adapts(w.part))
            active = layer.ffn.top_k / layer.ffn.experts if layer.ffn is not None and layer.ffn.kind == "moe" else 1.0
            for w in adapter_weights(adapted, job.lora_rank, fused_gate_up=job.execution.fused_gate_up):
                total += count * 6 * w.elements * (active if w.part == "experts" else 1.0)
    return float(total)


def _by_part(layer: Layer, hidden: int) -> dict[str, float]:
    """Forward FLOPs a token of a layer's projections by the part of the model they belong to (``states.Weight.part``)."""
    out: defaultdict[str, float] = defaultdict(float)
    for mixer in layer.mixers:
        part = "attention" if isinstance(mixer, (Attention, LatentAttention)) else "state_space"
        out[part] += sum(p.flops for p in projections(mixer, hidden))
    ffn = layer.ffn
    if ffn is not None and ffn.kind == "mlp":
        out["mlp"] += ffn_per_token(ffn, hidden)
    elif ffn is not None:
        out["router"] += Projection(hidden, ffn.experts).flops
        out["shared"] += sum(p.flops for p in shared_projections(ffn, hidden))
        out["experts"] += ffn.top_k * sum(p.flops for p in expert_projections(ffn, hidden))
    return out


def model_flops(model: ModelSpec, seq_len: int, tokens: float, convention: Convention = "causal") -> float:
    """Training FLOPs of ``tokens`` tokens, the numerator of MFU, under the attention convention a source uses."""
    each = flops_per_token(model, seq_len)
    if convention not in ("causal", "full"):
        raise InputError("convention", convention, "is causal or full", "causal")
    return tokens * (each.training + (3 * (each.attention_full - each.attention_causal) if convention == "full" else 0.0))


USUAL_SEQ_LEN = 4096


def inspect_model(model: ModelSpec, seq_len: int | None = None) -> dict[str, Any]:
    """What ``axisplan inspect --json`` prints: parameters, FLOPs a token, and the layers as groups of equal ones.

    ``seq_len`` None: ``USUAL_SEQ_LEN`` tokens, or as many as the model has positions for where those are fewer (a note says so).
    """
    longest, notes = model.max_seq_len or USUAL_SEQ_LEN, list(model.notes)
    if seq_len is None and longest < USUAL_SEQ_LEN:
        notes.append(f"sequences of {longest:,} tokens, the longest this model has positions for; --seq-len takes another length")
    elif seq_len is not None and model.max_seq_len and seq_len > longest:
        notes.append(f"sequences of {seq_len:,} tokens are longer than the {longest:,} positions this model was made for")
    seq_len = seq_len if seq_len is not None else min(longest, USUAL_SEQ_LEN)
    flops = flops_per_token(model, seq_len)
    by_kind = {layer.kind: layer for layer in flops.layers}
    groups, first = [], 0
    for kind, count in model.groups:
        layer, cost = model.kinds[kind], by_kind[kind]
        groups.append(
            {
                "first": first, "count": count, "kind": kind, "parameters": sum(layer_parameters(model, layer).values()),
                "mixer": None if layer.mixer is None else layer.mixer.model_dump(),
                "beside": None if layer.beside is None else layer.beside.model_dump(),
                "ffn": None if layer.ffn is None else layer.ffn.model_dump(),
                "norms": layer.norms, "parallel": layer.parallel, "post_norm": layer.post_norm,
                "flops_per_token": {"forward": cost.forward, "attention_causal": cost.attention_causal,
                                    "attention_full": cost.attention_full},
            }
        )  # fmt: skip
        first += count
    return {
        "name": model.name, "family": model.family, "seq_len": seq_len, "hidden": model.hidden, "vocab": model.vocab,
        "tied": model.tied, "num_layers": model.num_layers, "max_seq_len": model.max_seq_len,
        "parameters": model.parameters.as_dict(),
        "flops_per_token": {name: value for name, value in asdict(flops).items() if name != "layers"},
        "layers": groups, "notes": notes, "checked_against": checked_against(model),
    }  # fmt: skip
