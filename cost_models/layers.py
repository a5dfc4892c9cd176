"""A layer under a layout, written down once: ``layer_operations`` gives the operations of forward, input gradient and weight
gradient, the collectives in their places, and the tensors kept; FLOPs, time, memory and communication interpret that list.

Everything is for one microbatch on one rank. Degrees may be a ``Layout`` or arrays (``layer_cost.Degrees``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, reduce
from operator import add

from cost_models.arrays import where
from cost_models.attention_ops import attention_operations, latent_attention_operations
from cost_models.builder import Builder, Entry
from cost_models.head_ops import embedding_operations as _embedding
from cost_models.head_ops import head_operations as _head
from cost_models.job import Job
from cost_models.layer_cost import Degrees, LayerCost, Local, Saved, axis_ranks
from cost_models.mlp_ops import mlp_operations
from cost_models.moe_ops import moe_operations
from cost_models.recurrent_ops import linear_attention_operations, state_space_operations
from cost_models.states import layer_weights
from profiles.model import Attention, LatentAttention, Layer, Mixer, Moe, StateSpace
from profiles.operations import GroupedMatmul, Matmul, Operation

__all__ = [
    "Degrees", "LayerCost", "Local", "Saved", "axis_ranks", "embedding_operations", "head_operations", "layer_operations",
    "mtp_operations",
]  # fmt: skip


def layer_operations(job: Job, degrees: Degrees, layer: Layer) -> LayerCost:
    """One layer: its mixers, then its feed-forward (either may be absent).

    Blocks that read one input (``parallel`` layers with one norm, mixers beside each other) keep and gather it once; where the
    Execution adds their partial sums first, they are reduced over TP once.
    """
    local = Local(job, degrees)
    post = layer.post_norm or layer.norms >= 4
    own: Entry = "input" if layer.post_norm else "norm"
    one_norm = layer.parallel and layer.norms == 1
    one_region = layer.parallel and job.execution.parallel_is_one_region and not isinstance(layer.ffn, Moe)
    parts: list[LayerCost] = []
    for index, mixer in enumerate(layer.mixers):
        last = index == len(layer.mixers) - 1 and not (one_region and layer.ffn)
        parts.append(_mixer(local, mixer, "shared" if parts else own, post, last))
    if isinstance(layer.ffn, Moe):
        parts.append(moe_operations(local, layer.ffn, entry=own, post_norm=post))
    elif layer.ffn is not None:
        again: Entry = "shared" if one_region else "again"
        parts.append(mlp_operations(local, layer.ffn, entry=again if one_norm and parts else own, post_norm=post))
    cost = reduce(add, parts)
    return (
        cost
        if backward_reaches(job)
        else replace(cost, backward_input=(), backward_weight=(), saved=(), transient=0, waiting=0, left=0)
    )


@lru_cache(maxsize=1024)
def backward_reaches(job: Job) -> bool:
    """Whether the backward pass goes into the layers at all: not where nothing before the head is trained."""
    if job.lora_rank or not job.frozen or "embedding" not in job.frozen:
        return True
    return any(w.part not in job.frozen for kind in job.model.kinds for w in layer_weights(job.model, kind))


READS_THE_INPUT = ("qkv", "q", "k", "v", "q_down", "kv_down", "in_proj", "mlp_up", "experts_up", "shared_up", "router")
"""Linear layers on the input of their block."""


def first_layer(job: Job, cost: LayerCost) -> LayerCost:
    """``cost`` as the model's first layer: where neither the embedding nor the layer's norm is trained, its input has no gradient.
    Then nothing runs backward, and the norm keeps nothing, before the first weights that learn; of the products on their own
    input only the weight gradients run (and those through an adapter's second half)."""
    if job.trains("embedding") or job.trains("norm"):
        return cost
    learns = {op.name.split(".")[0] for op in cost.backward_weight if isinstance(op, (Matmul, GroupedMatmul))}
    kept: list[Operation] = []
    reached = past = False
    for op in reversed(cost.backward_input):
        name = op.name.split(".")[0]
        reached = reached or name in learns
        by_input = False
        if name in READS_THE_INPUT and not past and isinstance(op, (Matmul, GroupedMatmul)):
            by_input = op.n == job.model.hidden or not op.name.endswith(".adapter")  # B's side has n = the rank
        if reached and not by_input:
            kept.append(op)
        past = past or (reached and name.endswith("_residual"))
    norm = next((s.name.removesuffix("_input") for s in cost.saved if s.module == "norm"), "")
    gone = (f"{norm}_input", f"{norm}_statistics", f"{norm}_normalised")
    saved = tuple(s for s in cost.saved if s.module != "norm" or s.name not in gone)
    return replace(cost, backward_input=tuple(reversed(kept)), saved=saved)


def _mixer(local: Local, mixer: Mixer, entry: Entry, post_norm: bool, leave: bool) -> LayerCost:
    if isinstance(mixer, Attention):
        return attention_operations(local, mixer, entry=entry, post_norm=post_norm, leave=leave)
    if isinstance(mixer, LatentAttention):
        return latent_attention_operations(local, mixer, entry=entry, post_norm=post_norm)
    if isinstance(mixer, StateSpace):
        return state_space_operations(local, mixer, entry=entry, post_norm=post_norm, leave=leave)
    return linear_attention_operations(local, mixer, entry=entry, post_norm=post_norm, leave=leave)


def embedding_operations(job: Job, degrees: Degrees) -> LayerCost:
    """Token embedding; its lookup has no input gradient."""
    return _embedding(Local(job, degrees))


def head_operations(job: Job, degrees: Degrees) -> LayerCost:
    """Final norm, output projection, loss."""
    return _head(Local(job, degrees))


def mtp_operations(job: Job, degrees: Degrees, embedding: LayerCost, layer: LayerCost, head: LayerCost) -> LayerCost:
    """One multi-token-prediction module (DeepSeek-V3, arXiv:2412.19437 section 2.2): ``embedding`` of the next token, two norms, a
    projection of twice the hidden width, a ``layer`` like the model's last, and the shared ``head`` with its own loss."""
    local = Local(job, degrees)
    b = Builder(local, "mtp")
    rows, h = local.split_tokens, job.model.hidden
    b.norm("mtp_embedding_norm", rows, h, output=False)
    b.norm("mtp_hidden_norm", rows, h, output=False)
    if local.execution.keeps_gathered_input:  # what it norms, the head before it keeps already, unless gathered over TP
        b.keep("mtp_hidden_norm_shared", -rows * h * local.bytes * where(local.sp > 1, 0, 1))
    b.keep("mtp_projection_input", rows * 2 * h * local.input_bytes, weight=True)
    b.linear("mtp_projection", rows, h, 2 * h)
    return embedding + b.done(rows * h * local.bytes) + layer + head
