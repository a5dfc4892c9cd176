"""Small jobs that the planner's tests share."""

from __future__ import annotations

from typing import Any

from cost_models.execution import load_execution
from cost_models.job import Job
from profiles.hardware import load_cluster
from profiles.huggingface import load_model
from profiles.model import Attention, Layer, Mlp, ModelSpec, Moe


def job(model: str | ModelSpec, cluster: str, seq_len: int, global_batch: int, execution: str = "axisplan", **more: Any) -> Job:
    spec = load_model(model) if isinstance(model, str) else model
    return Job(spec, load_cluster(cluster), load_execution(execution), seq_len, global_batch, **more)


def decoder(
    layers: int = 4, hidden: int = 64, heads: int = 4, kv_heads: int | None = None, width: int = 256, vocab: int = 512,
    experts: int = 0, dense_first: int = 0, **fields: Any,
) -> ModelSpec:  # fmt: skip
    """A small decoder; with ``experts`` its layers after ``dense_first`` are mixtures of experts, top 2."""
    mixer = Attention(heads=heads, kv_heads=kv_heads or heads, head_dim=fields.pop("head_dim", max(8, hidden // heads)))
    dense = Layer(mixer=mixer, ffn=Mlp(width=width))
    kinds = [dense]
    pattern = [0] * layers
    if experts:
        kinds.append(Layer(mixer=mixer, ffn=Moe(experts=experts, top_k=2, width=fields.pop("expert_width", width))))
        pattern = [0] * dense_first + [1] * (layers - dense_first)
    if experts and not dense_first:
        kinds, pattern = [kinds[1]], [0] * layers
    return ModelSpec(name="small", hidden=hidden, vocab=vocab, kinds=tuple(kinds), pattern=tuple(pattern), **fields)
