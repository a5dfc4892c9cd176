"""Units of a model: a layer kind by its index, or what stands at its ends by name; their operations, remembered."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cost_models.job import Job
from cost_models.layer_cost import LayerCost
from cost_models.layers import embedding_operations, head_operations, layer_operations, mtp_operations
from cost_models.layout import Layout
from profiles.model import Layer

Unit = int | str
EMBEDDING, HEAD, MTP = "embedding", "head", "mtp"


def kind_of(job: Job, unit: Unit) -> Layer:
    """The layer of a unit: an empty one for embedding and head, the model's last for MTP."""
    if unit == MTP:
        return job.model.layer(job.model.num_layers - 1)
    return job.model.kinds[unit] if isinstance(unit, int) else Layer(norms=0)


def unit_cost(job: Job, degrees: Any, unit: Unit) -> LayerCost:
    """The operations of a unit: remembered by the fields of a ``Layout`` that matter to them, or by arrays of degrees themselves."""
    if isinstance(degrees, Layout):
        return _cost(job, microbatch_key(degrees), unit)
    found: LayerCost = degrees.remember(("cost", unit), lambda d: _operations(job, d, unit))
    return found


@lru_cache(maxsize=8192)
def _cost(job: Job, key: Layout, unit: Unit) -> LayerCost:
    return _operations(job, key, unit)


def _operations(job: Job, degrees: Any, unit: Unit) -> LayerCost:
    if unit == EMBEDDING:
        return embedding_operations(job, degrees)
    if unit == HEAD:
        return head_operations(job, degrees)
    if unit == MTP:
        return mtp_operations(job, degrees, *(unit_cost(job, degrees, part) for part in (EMBEDDING, job.model.pattern[-1], HEAD)))
    return layer_operations(job, degrees, job.model.kinds[int(unit)])


def microbatch_key(layout: Layout) -> Layout:
    """``layout`` without what the operations of one microbatch do not depend on."""
    return _microbatch_key(
        layout.tp,
        layout.cp,
        layout.cp_kind,
        layout.ep,
        layout.etp,
        layout.sp,
        layout.micro_batch,
        layout.dispatcher,
        layout.capacity,
    )


@lru_cache(maxsize=16384)
def _microbatch_key(
    tp: int, cp: int, cp_kind: str, ep: int, etp: int, sp: bool, micro_batch: int, dispatcher: str, capacity: float
) -> Layout:
    return Layout(
        tp=tp, cp=cp, cp_kind=cp_kind, ep=ep, etp=etp, sp=sp, micro_batch=micro_batch, dispatcher=dispatcher, capacity=capacity
    )
