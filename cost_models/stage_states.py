"""What a pipeline rank holds: its chunks' weights, the embedding and head at the ends, and their states."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cost_models.job import Job
from cost_models.state_bytes import States, adapter_weights, states
from cost_models.states import Holding, Weight, embedding_weights, head_weights, hold, layer_weights, mtp_weights


def ranks_chunks(layout: Any, rank: int) -> tuple[int, ...]:
    """Chunks whose weights a pipeline rank holds (DualPipe holds two copies of the model, one in each direction)."""
    if layout.schedule == "dualpipe":
        return (rank, layout.pp - 1 - rank)
    return tuple(layout.chunks_of_rank(rank))


def stage_weights(job: Job, layout: Any, rank: int) -> list[tuple[tuple[Weight, ...], int]]:
    """The weights of a rank as (tensors, times): its layers by kind, the embedding with chunk 0, the head and MTP with the last.

    A tied embedding stands at both ends of a pipeline; MTP modules bring a copy of the embedding to the last stage.
    """
    model, out = job.model, []
    for chunk in ranks_chunks(layout, rank):
        counts: dict[int, int] = {}
        for layer in layout.layers_of_chunk(chunk, model.num_layers):
            counts[model.pattern[layer]] = counts.get(model.pattern[layer], 0) + 1
        out += [(_layer(job, kind), count) for kind, count in counts.items()]
        if chunk == 0:
            out.append((embedding_weights(model), 1))
        if chunk == layout.chunks - 1:
            out.append((head_weights(model, shares_embedding=model.tied and 0 in ranks_chunks(layout, rank)), 1))
            if model.mtp:
                out.append((mtp_weights(model), model.mtp))
                if not model.tied and 0 not in ranks_chunks(layout, rank):
                    out.append((embedding_weights(model)[:1], 1))
    return out


@lru_cache(maxsize=64)
def _layers(job: Job) -> tuple[tuple[Weight, ...], ...]:
    return tuple(layer_weights(job.model, kind) for kind in job.model.kinds)


def _layer(job: Job, kind: int) -> tuple[Weight, ...]:
    return _layers(job)[kind]


def stage_holding(job: Job, layout: Any, rank: int) -> Holding:
    """What one rank of pipeline rank ``rank`` holds before ZeRO, adapters included."""
    return _held(job, layout, rank)[0]


def stage_states(job: Job, layout: Any, rank: int) -> States:
    """Parameters, gradients and optimizer state of one rank of pipeline rank ``rank``."""
    held, trained = _held(job, layout, rank)
    return states(job, layout, held, trained)


def _held(job: Job, layout: Any, rank: int) -> tuple[Holding, Holding]:
    """(everything held, what is trained of it)."""
    held, trained = Holding(), Holding()
    for weights, times in stage_weights(job, layout, rank):
        base = hold(weights, layout, job.execution)
        if job.lora_rank:
            extra = hold(adapter_weights(weights, job.lora_rank), layout, job.execution)
            held, trained = held + base.times(times) + extra.times(times), trained + extra.times(times)
            continue
        held = held + base.times(times)
        if job.frozen:
            base = hold((w for w in weights if w.part not in job.frozen), layout, job.execution)
        trained = trained + base.times(times)
    return held, trained


