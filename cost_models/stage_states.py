"""What a pipeline rank holds: its chunks' weights, the embedding and head at the ends, and their states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.state_bytes import States, adapter_weights, shards, states
from cost_models.states import Holding, Weight, embedding_weights, head_weights, hold, layer_weights, mtp_weights
from profiles.model import ModelSpec
from profiles.operations import Number


def ranks_chunks(layout: Any, rank: int) -> tuple[int, ...]:
    """Chunks whose weights a pipeline rank holds (DualPipe holds two copies of the model, one in each direction)."""
    if layout.schedule == "dualpipe":
        return (rank, layout.pp - 1 - rank)
    return tuple(layout.chunks_of_rank(rank))


@dataclass(frozen=True)
class Tensors:
    """The weights of a model by unit: layer kinds, ``embedding``, ``head`` (final norm included; without the projection where it
    is ``tied`` to an embedding on the same rank), ``mtp``, and the token embedding alone (``tokens``)."""

    units: dict[int | str, tuple[Weight, ...]]

    @classmethod
    def of(cls, model: ModelSpec) -> Tensors:
        units: dict[int | str, tuple[Weight, ...]] = {k: layer_weights(model, kind) for k, kind in enumerate(model.kinds)}
        units["embedding"] = embedding_weights(model)
        units["tokens"] = units["embedding"][:1]
        units["head"] = head_weights(model, shares_embedding=False)
        units["tied head"] = head_weights(model, shares_embedding=True)
        if model.mtp:
            units["mtp"] = mtp_weights(model)
        return cls(units)


@lru_cache(maxsize=64)
def tensors(job: Job) -> Tensors:
    return Tensors.of(job.model)


Units = tuple[tuple[int | str, int], ...]


def stage_units(job: Job, layout: Any, rank: int) -> Units:
    """What a rank holds as (unit of ``Tensors``, times): layers by kind, the embedding with chunk 0, head and MTP with the last.

    A tied embedding stands at both ends of a pipeline; MTP modules bring a copy of the embedding to the last stage.
    """
    place = (layout.pp, layout.vpp, layout.schedule, layout.stages)
    return _units(job.model.pattern, place, rank, job.model.tied, job.model.mtp)


@lru_cache(maxsize=65536)
def _units(pattern: tuple[int, ...], place: tuple[int, int, str, tuple[int, ...]], rank: int, tied: bool, mtp: int) -> Units:
    layout = Layout(pp=place[0], vpp=place[1], schedule=place[2], stages=place[3])
    out: list[tuple[int | str, int]] = []
    mine = ranks_chunks(layout, rank)
    for chunk in mine:
        counts: dict[int, int] = {}
        for layer in layout.layers_of_chunk(chunk, len(pattern)):
            counts[pattern[layer]] = counts.get(pattern[layer], 0) + 1
        out += counts.items()
        if chunk == 0:
            out.append(("embedding", 1))
        if chunk == layout.chunks - 1:
            out.append(("tied head" if tied and 0 in mine else "head", 1))
            if mtp:
                out.append(("mtp", mtp))
                if not tied and 0 not in mine:
                    out.append(("tokens", 1))
    return tuple(out)


def unit_holding(job: Job, degrees: Any, unit: int | str, *, bare: bool = False) -> tuple[Holding, Holding]:
    """(everything held of a unit, what is trained of it), adapters included, and under ZeRO-3 the padding of shards where the
    framework cuts each tensor by rows (``Execution.reduces_by_unit``), unless ``bare``."""
    padded = degrees.zero == 3 and job.execution.reduces_by_unit and not bare
    if hasattr(degrees, "remember"):
        key = ("holding", unit, padded)
        found: tuple[Holding, Holding] = degrees.remember(key, lambda d: _holding(job, d, unit, shards(d) if padded else None))
        return found
    return _remembered(job, Place(degrees.tp, degrees.ep, degrees.etp), unit, shards(degrees) if padded else None)


class Place(NamedTuple):
    """The degrees that split weights before ZeRO does."""

    tp: int
    ep: int
    etp: int


@lru_cache(maxsize=32768)
def _remembered(job: Job, place: Place, unit: int | str, ways: tuple[int, int] | None) -> tuple[Holding, Holding]:
    return _holding(job, place, unit, ways)


def _holding(job: Job, degrees: Any, unit: int | str, ways: tuple[Number, Number] | None) -> tuple[Holding, Holding]:
    """``ways``: the ranks whose shards are padded."""
    weights = tensors(job).units[unit]
    base = hold(weights, degrees, job.execution, ways)
    if job.lora_rank:
        extra = hold(adapters(job, weights), degrees, job.execution, ways)
        return base + extra, extra
    if job.frozen:
        return base, hold((w for w in weights if w.part not in job.frozen), degrees, job.execution, ways)
    return base, base


def adapters(job: Job, weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """The adapters of a LoRA job beside ``weights``."""
    adapted = tuple(w for w in weights if job.adapts(w.part))
    return adapter_weights(adapted, job.lora_rank, fused_gate_up=job.execution.fused_gate_up)


def stage_holding(job: Job, layout: Any, rank: int) -> tuple[Holding, Holding]:
    """What one rank of pipeline rank ``rank`` holds before ZeRO, adapters included, and what of it is trained."""
    held, trained = Holding(), Holding()
    for unit, times in stage_units(job, layout, rank):
        all_of, trained_of = unit_holding(job, layout, unit)
        held, trained = held + all_of.times(times), trained + trained_of.times(times)
    return held, trained


def stage_states(job: Job, layout: Any, rank: int) -> States:
    """Parameters, gradients and optimizer state of one rank of pipeline rank ``rank``."""
    return states(job, layout, *stage_holding(job, layout, rank))
