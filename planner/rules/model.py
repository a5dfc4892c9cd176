"""Rules that come from the model's shapes: heads, widths, experts, vocabulary, layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from cost_models.layout import divisors
from planner.rules.core import Break, Case, listed, rule
from profiles.model import Attention, LatentAttention, LinearAttention, Mlp, ModelSpec, Moe, StateSpace


@lru_cache(maxsize=64)
def mixers(model: ModelSpec) -> tuple[Attention | LatentAttention | StateSpace | LinearAttention, ...]:
    """The distinct mixers of the model."""
    return tuple(dict.fromkeys(k.mixer for k in model.kinds if k.mixer is not None))


@lru_cache(maxsize=64)
def feed_forwards(model: ModelSpec) -> tuple[Mlp | Moe, ...]:
    return tuple(dict.fromkeys(k.ffn for k in model.kinds if k.ffn is not None))


def attentions(model: ModelSpec) -> list[Attention | LatentAttention]:
    return [m for m in mixers(model) if isinstance(m, (Attention, LatentAttention))]


def padded_vocab(vocab: int, tp: int, multiple: int = 128) -> int:
    """Rows of the embedding when padded to a multiple of ``multiple * tp`` (Megatron); ``multiple`` 0: not padded."""
    unit = multiple * tp
    return vocab if multiple == 0 else math.ceil(vocab / unit) * unit


@rule("model", "tp", "tp divides the attention heads of every layer")
def heads_divide_tp(case: Case) -> Iterator[Break]:
    tp = case.layout.tp
    for mixer in mixers(case.job.model):
        heads = mixer.key_heads if isinstance(mixer, LinearAttention) else mixer.heads
        if heads % tp:
            yield Break("tp", tp, f"{heads} heads do not divide by tp = {tp}; legal tp: {listed(divisors(heads))}")
            return


@rule("model", "tp", "tp divides the KV heads, or is a multiple of them where the target replicates KV heads")
def kv_heads_divide_tp(case: Case) -> Iterator[Break]:
    tp = case.layout.tp
    replicates = case.limits.kv_replication
    for mixer in attentions(case.job.model):
        if isinstance(mixer, LatentAttention):
            continue
        kv = mixer.kv_heads
        if kv % tp and not (replicates and tp % kv == 0):
            also = "" if replicates else f" ({case.limits.target} does not replicate KV heads)"
            yield Break(
                "tp", tp, f"{kv} KV heads do not divide by tp = {tp}{also}; legal tp: {listed(_kv_degrees(mixer, replicates))}"
            )
            return


def _kv_degrees(mixer: Attention, replicates: bool) -> list[int]:
    return [d for d in divisors(mixer.heads) if mixer.kv_heads % d == 0 or (replicates and d % mixer.kv_heads == 0)]


def ulysses_degrees(heads: int, kv_heads: int, tp: int = 1, replicates: bool = True) -> list[int]:
    """Legal degrees of all-to-all context parallelism: heads / tp divides by the degree, and KV heads / tp divides by it or it by them."""
    local = heads // tp
    local_kv = max(1, kv_heads // tp)
    return [d for d in divisors(local) if local_kv % d == 0 or (replicates and d % local_kv == 0)]


@rule("model", "tp cp cp_kind", "the Ulysses degree divides the query heads of a tensor-parallel rank")
def query_heads_divide_ulysses(case: Case) -> Iterator[Break]:
    degree, tp = case.layout.ulysses, case.layout.tp
    if degree == 1:
        return
    for mixer in mixers(case.job.model):
        if mixer.heads % tp == 0 and (mixer.heads // tp) % degree:
            yield Break("cp", case.layout.cp, f"{mixer.heads} query heads / tp {tp} do not divide by the Ulysses degree {degree}")
            return


@rule("model", "tp cp cp_kind", "the Ulysses degree divides the KV heads of a tensor-parallel rank, or is a multiple of them")
def kv_heads_divide_ulysses(case: Case) -> Iterator[Break]:
    degree, tp = case.layout.ulysses, case.layout.tp
    if degree == 1:
        return
    replicates = case.limits.ulysses_kv_replication
    for mixer in attentions(case.job.model):
        if isinstance(mixer, LatentAttention):
            continue
        local = max(1, mixer.kv_heads // tp)
        if local % degree and not (replicates and degree % local == 0):
            yield Break("cp", case.layout.cp, f"{mixer.kv_heads} KV heads / tp {tp} = {local}: neither divides the Ulysses degree {degree}"
                        " nor is divided by it" + ("" if replicates else f" ({case.limits.target} does not repeat KV heads)"))  # fmt: skip
            return


@rule("model", "cp cp_kind", "a recurrent mixer is split over context parallelism by heads (ulysses), not by a ring")
def recurrent_mixers_need_ulysses(case: Case) -> Iterator[Break]:
    if case.layout.ring > 1 and any(isinstance(m, (StateSpace, LinearAttention)) for m in mixers(case.job.model)):
        yield Break(
            "cp_kind", case.layout.cp_kind, "state-space and linear-attention layers carry a state along the sequence", ("ulysses",)
        )


@rule("model", "tp", "tp divides the width of every dense and shared feed-forward")
def widths_divide_tp(case: Case) -> Iterator[Break]:
    tp = case.layout.tp
    for ffn in feed_forwards(case.job.model):
        width = ffn.width if isinstance(ffn, Mlp) else ffn.shared_width
        if width % tp:
            name = "feed-forward" if isinstance(ffn, Mlp) else "shared-expert"
            yield Break("tp", tp, f"{name} width {width} does not divide by tp = {tp}")
            return


@rule("model", "tp", "tp divides the state-space groups, or is a multiple of them")
def state_space_groups(case: Case) -> Iterator[Break]:
    tp = case.layout.tp
    for mixer in mixers(case.job.model):
        if isinstance(mixer, StateSpace) and mixer.groups % tp and tp % mixer.groups:
            yield Break("tp", tp, f"{mixer.groups} state-space groups and tp = {tp}: neither divides the other")
            return


@rule("model", "etp", "etp divides the width of an expert")
def expert_width_divides_etp(case: Case) -> Iterator[Break]:
    moe, etp = case.job.model.moe, case.layout.etp
    if moe is not None and moe.width % etp:
        yield Break("etp", etp, f"expert width {moe.width} does not divide by etp = {etp}")


@rule("model", "ep", "ep divides the number of experts")
def experts_divide_ep(case: Case) -> Iterator[Break]:
    moe, ep = case.job.model.moe, case.layout.ep
    if moe is not None and moe.experts % ep:
        yield Break("ep", ep, f"{moe.experts} experts do not divide by ep = {ep}")


@rule("model", "ep etp", "expert parallelism needs experts")
def expert_axes_need_experts(case: Case) -> Iterator[Break]:
    if case.job.model.moe is None:
        for field in ("ep", "etp"):
            degree = getattr(case.layout, field)
            if degree > 1:
                yield Break(field, degree, f"{case.job.model.name} has no experts", (1,))


@rule("model", "tp", "tp divides the vocabulary where the target does not pad it")
def vocabulary_divides_tp(case: Case) -> Iterator[Break]:
    tp, vocab = case.layout.tp, case.job.model.vocab
    if case.limits.pads_vocab == 0 and vocab % tp:
        yield Break("tp", tp, f"vocabulary {vocab} does not divide by tp = {tp}, and {case.limits.target} does not pad it")


@rule("model", "pp", "tied embeddings may not be split by a pipeline where the target cannot tie across stages")
def tied_embeddings_and_pipeline(case: Case) -> Iterator[Break]:
    if case.layout.pp > 1 and case.job.model.tied and not case.limits.tied_pipeline:
        yield Break(
            "pp",
            case.layout.pp,
            f"{case.job.model.name} ties its embeddings, which {case.limits.target} cannot split over stages",
            (1,),
        )


@rule("model", "pp vpp", "every chunk of the pipeline has a layer")
def layers_fill_chunks(case: Case) -> Iterator[Break]:
    chunks, layers = case.layout.pp * case.layout.vpp, case.job.model.num_layers
    if chunks > layers and not (case.limits.empty_stages and chunks <= layers + 2):
        field = "pp" if case.layout.pp > layers or case.layout.vpp == 1 else "vpp"
        yield Break(field, getattr(case.layout, field), f"pp*vpp = {chunks} chunks for {layers} layers")


@rule("model", "pp vpp stages", "the stages hold all layers of the model once")
def stages_hold_all_layers(case: Case) -> Iterator[Break]:
    layout, layers = case.layout, case.job.model.num_layers
    if not layout.stages:
        return
    shown = "|".join(map(str, layout.stages))
    if len(layout.stages) != layout.pp * layout.vpp:
        yield Break("stages", shown, f"needs pp*vpp = {layout.pp * layout.vpp} counts, has {len(layout.stages)}", ())
    elif sum(layout.stages) != layers:
        yield Break("stages", shown, f"the stages hold {sum(layout.stages)} layers, the model has {layers}", ())
    empty = [i for i, n in enumerate(layout.stages) if n == 0]
    if empty and not case.limits.empty_stages:
        yield Break("stages", shown, f"stage {empty[0]} is empty", ())
    if not case.limits.uneven_stages and len(set(layout.stages)) > 1:
        yield Break("stages", shown, f"{case.limits.target} splits layers evenly", ())


@rule("model", "pp vpp", "the layers divide over the chunks where the target splits them evenly")
def layers_divide_over_even_chunks(case: Case) -> Iterator[Break]:
    layout, layers = case.layout, case.job.model.num_layers
    chunks = layout.pp * layout.vpp
    if not case.limits.uneven_stages and layers % chunks:
        field = "vpp" if layout.vpp > 1 else "pp"
        message = f"{layers} layers do not divide over pp*vpp = {chunks} even chunks (execution.uneven_stages is false)"
        yield Break(field, getattr(layout, field), message)


@rule("model", "ep etp", "experts with a bias need etp 1 where the target says so")
def expert_bias_and_etp(case: Case) -> Iterator[Break]:
    moe = case.job.model.moe
    if case.layout.etp > 1 and moe is not None and moe.bias and case.limits.expert_bias_needs_etp_1:
        yield Break("etp", case.layout.etp, f"{case.limits.target}: experts with a bias need etp 1", (1,))


@rule("model", "cp cp_kind", "the target's ring can split sliding-window attention")
def windows_and_ring(case: Case) -> Iterator[Break]:
    windowed = any(getattr(m, "window", None) for m in mixers(case.job.model))
    if windowed and case.layout.ring > 1 and case.layout.cp_kind != "allgather" and not case.limits.window_ring:
        yield Break(
            "cp_kind",
            case.layout.cp_kind,
            f"{case.limits.target}: a p2p ring does not support sliding windows",
            ("allgather", "ulysses"),
        )


@rule("model", "cp cp_kind", "the target can split latent attention by heads")
def latent_attention_and_ulysses(case: Case) -> Iterator[Break]:
    latent = any(isinstance(m, LatentAttention) for m in mixers(case.job.model))
    if latent and case.layout.ulysses > 1 and not case.limits.mla_ulysses:
        yield Break(
            "cp_kind",
            case.layout.cp_kind,
            f"{case.limits.target}: MLA with all-to-all context parallelism is not supported",
            ("ring",),
        )
