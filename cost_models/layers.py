"""A layer under a layout, written down once: ``layer_operations`` gives the operations of forward, input gradient and weight
gradient, the collectives in their places, and the tensors kept; FLOPs, time, memory and communication interpret that list.

Everything is for one microbatch on one rank. Degrees may be a ``Layout`` or arrays (``layer_cost.Degrees``).
"""

from __future__ import annotations

from cost_models.attention_ops import attention_operations, latent_attention_operations
from cost_models.head_ops import embedding_operations as _embedding
from cost_models.head_ops import head_operations as _head
from cost_models.job import Job
from cost_models.layer_cost import Degrees, LayerCost, Local, Saved, axis_ranks
from cost_models.mlp_ops import mlp_operations
from profiles.model import Attention, LatentAttention, Layer, Mlp

__all__ = ["LayerCost", "Local", "Saved", "axis_ranks", "embedding_operations", "head_operations", "layer_operations"]


def layer_operations(job: Job, degrees: Degrees, layer: Layer) -> LayerCost:
    """One layer: mixer, then feed-forward (either may be absent)."""
    local = Local(job, degrees)
    post = layer.post_norm or layer.norms >= 4
    pre = not layer.post_norm
    shared = layer.parallel and job.execution.parallel_shares_reduce
    parts: list[LayerCost] = []
    if isinstance(layer.mixer, Attention):
        parts.append(attention_operations(local, layer.mixer, norm=pre, post_norm=post))
    elif isinstance(layer.mixer, LatentAttention):
        parts.append(latent_attention_operations(local, layer.mixer, norm=pre, post_norm=post))
    if isinstance(layer.ffn, Mlp):
        own_norm = pre and not (layer.parallel and layer.norms == 1)
        enter = own_norm or not layer.parallel
        parts.append(mlp_operations(local, layer.ffn, norm=own_norm, post_norm=post, enter=enter, leave=not shared))
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    return whole


def embedding_operations(job: Job, degrees: Degrees) -> LayerCost:
    return _embedding(Local(job, degrees))


def head_operations(job: Job, degrees: Degrees) -> LayerCost:
    """Final norm, output projection, loss."""
    return _head(Local(job, degrees))
