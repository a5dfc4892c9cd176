"""Memory of ten thousand layouts at once: the formulas of ``cost_models.memory`` with arrays for the degrees.

Layouts that share everything but their degrees (``LayoutArrays``) are costed together. ``device_bytes`` equals
``max(stage.needed)`` of ``stage_memory``; ``least_device_bytes`` bounds it from below over all stage splits and recompute choices,
for cutting whole prefixes of a search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.activations import ChunkMemory, assemble, offloaded, runs_of, unit_memory
from cost_models.arrays import maximum
from cost_models.job import Job
from cost_models.layout import Layout, Recompute, RecomputeRule
from cost_models.memory import ZERO_BUBBLE, Snapshot
from cost_models.overheads import (
    communicators,
    gathered_buffers,
    graph_pool,
    initial_bytes,
    lasting_buffers,
    optimizer_temporary,
)  # fmt: skip
from cost_models.schedules import in_flight
from cost_models.stage_states import ranks_chunks, stage_holding, unit_holding
from cost_models.state_bytes import states

Floats = npt.NDArray[np.float64]
DEGREES = ("tp", "ep", "etp", "dp_replicate", "dp_shard", "micro_batch")


@dataclass(frozen=True, eq=False)
class LayoutArrays:
    """Degrees of many layouts that agree in ``like``'s other fields. Stands where a ``Layout`` stands in the formulas."""

    like: Layout
    tp: Any
    ring: Any
    ulysses: Any
    ep: Any
    etp: Any
    dp_replicate: Any
    dp_shard: Any
    micro_batch: Any
    sp: Any
    parent: LayoutArrays | None = None
    at: Any = None
    """Where these layouts stand among the parent's."""
    memo: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> LayoutArrays:
        """Arrays of layouts that agree in everything but degrees and context-parallel split."""
        columns: dict[str, Any] = {name: np.array([getattr(x, name) for x in layouts]) for name in (*DEGREES, "ring", "ulysses")}
        return cls(layouts[0], sp=np.array([bool(x.sp) for x in layouts]), **columns)

    def part(self, at: Any, like: Layout) -> LayoutArrays:
        """The layouts at positions ``at``, which agree in ``like``'s fields; what a microbatch costs is shared with the whole."""
        columns: dict[str, Any] = {name: getattr(self, name)[at] for name in (*DEGREES, "ring", "ulysses", "sp")}
        return LayoutArrays(like, parent=self, at=at, **columns)

    def remember(self, key: Any, compute: Callable[[Any], Any]) -> Any:
        """``compute(self)``, once for all layouts of the parent."""
        if key not in self.memo:
            self.memo[key] = compute(self) if self.parent is None else _take(self.parent.remember(key, compute), self.at)
        return self.memo[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.like, name)

    @property
    def cp(self) -> Any:
        return self.ring * self.ulysses

    @property
    def dp(self) -> Any:
        return self.dp_replicate * self.dp_shard

    @property
    def edp(self) -> Any:
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def edp_shard(self) -> Any:
        return np.maximum(1, self.tp * self.cp * self.dp_shard // (self.etp * self.ep))

    @property
    def chunks(self) -> int:
        return self.like.chunks

    @property
    def recompute_rules(self) -> Recompute:
        return self.like.recompute_rules

    def layers_of_chunk(self, chunk: int, num_layers: int) -> range:
        return self.like.layers_of_chunk(chunk, num_layers)

    def chunks_of_rank(self, rank: int) -> tuple[int, ...]:
        return self.like.chunks_of_rank(rank)


def grouped(job: Job, layouts: Sequence[Layout]) -> list[tuple[LayoutArrays, list[int], int]]:
    """(arrays, positions, microbatches) of the layouts that can be costed together."""
    wholes: dict[Any, list[int]] = {}
    for place, layout in enumerate(layouts):
        gathered = layout.cp_kind == "allgather" and layout.cp > 1
        wholes.setdefault((gathered, layout.dispatcher, layout.capacity), []).append(place)
    out = []
    for places in wholes.values():
        whole = LayoutArrays.of([layouts[i] for i in places])
        parts: dict[Any, list[int]] = {}
        for index, place in enumerate(places):
            x = layouts[place]
            key = (x.pp, x.vpp, x.zero, x.schedule, x.recompute, x.stages, x.offload, x.microbatches(job.global_batch))
            parts.setdefault(key, []).append(index)
        for key, indices in parts.items():
            at = [places[i] for i in indices]
            out.append((whole.part(np.array(indices), layouts[at[0]]), at, key[-1]))
    return out


def device_bytes(job: Job, layouts: Sequence[Layout]) -> Floats:
    """Device bytes that the worst rank of each layout needs: ``max(s.needed for s in stage_memory(job, layout))``."""
    out = np.zeros(len(layouts))
    for arrays, places, microbatches in grouped(job, layouts):
        out[places] = _needed(job, arrays, microbatches)
    return out


def _take(value: Any, at: Any) -> Any:
    """The same value for the layouts at ``at``."""
    if isinstance(value, np.ndarray):
        return value[at]
    if isinstance(value, tuple):
        return tuple(_take(v, at) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(_take(getattr(value, f.name), at) for f in fields(value)))
    return value


def _needed(job: Job, arrays: LayoutArrays, microbatches: int) -> Floats:
    layout, execution = arrays.like, job.execution
    slack = execution.eager_reserved_ratio if execution.elementwise == "eager" else execution.reserved_ratio
    outside = communicators(job, arrays) + job.cluster.gpu.context_bytes
    alike: dict[Any, Any] = {}
    chunk_cache: dict[Any, ChunkMemory] = {}
    worst: Any = 0.0
    for rank, held in enumerate(in_flight(layout.schedule, layout.pp, layout.vpp, microbatches)):
        chunks = {}
        shape = []
        for chunk in ranks_chunks(layout, rank):
            first, last = chunk == 0, chunk == layout.chunks - 1
            key = (runs_of(job, layout, chunk), first, last)
            if key not in chunk_cache:
                chunk_cache[key] = assemble(job, arrays, key[0], first=first, last=last, boundary=not last, once=microbatches == 1)
            chunks[chunk] = chunk_cache[key]
            shape.append(key)
        if tuple(shape) not in alike:
            holding, trained = stage_holding(job, arrays, rank)
            held_states = states(job, arrays, holding, trained)
            lasting = lasting_buffers(job, arrays, rank)
            alike[tuple(shape)] = (
                held_states.total, lasting, gathered_buffers(job, arrays, rank),
                lasting + optimizer_temporary(job, arrays, holding), initial_bytes(job, holding, held_states) * slack,
            )  # fmt: skip
        total, lasting, gathered, update, initial = alike[tuple(shape)]
        activations, fullest = _peak(layout, chunks, held.snapshots, lasting, gathered)
        peak = maximum(fullest, update)
        pool = graph_pool(job, np.where(fullest >= update, activations, 0)) if execution.graph_pool_ratio else 0
        device = (total + peak) * slack + execution.workspace_bytes + outside + pool
        worst = maximum(worst, maximum(device, initial + outside))
    return np.asarray(worst, dtype=float)


def _peak(
    layout: Layout, chunks: dict[int, ChunkMemory], snapshots: tuple[Snapshot, ...], lasting: Any, gathered: tuple[Any, Any]
) -> tuple[Any, Any]:
    """(activations, activations and temporaries) at the fullest moment: ``memory.peak`` for arrays."""
    best_kept: Any = 0.0
    best: Any = -1.0
    for snapshot in snapshots:
        kept: Any = 0.0
        for c, alive, held in snapshot:
            kept = kept + alive * chunks[c].kept + (held * chunks[c].weight_pass if held else 0)
        running = [chunks[c] for c, alive, _ in snapshot if alive] or [chunks[c] for c, _, _ in snapshot]
        split = layout.schedule in ZERO_BUBBLE
        if split:
            beyond = maximum(
                _most([c.left + c.passing for c in running]), gathered[1] + _most([c.left + c.ending for c in running])
            )
        else:
            beyond = gathered[1] + _most([c.backward for c in running])
        losses = [c.loss for c in running if c.loss is not None]
        if losses:
            beyond = maximum(beyond, _most(losses) + gathered[0])
        better = kept + beyond > best
        best_kept, best = np.where(better, kept, best_kept), np.where(better, kept + beyond, best)
    if "activations" in layout.offload:
        stays = offloaded(best_kept, chunks.values())
        return stays, best - best_kept + stays + lasting
    return best_kept, best + lasting


def _most(values: Sequence[Any]) -> Any:
    out = values[0]
    for value in values[1:]:
        out = maximum(out, value)
    return out


def least_device_bytes(job: Job, arrays: LayoutArrays) -> Floats:
    """A lower bound on ``device_bytes`` over every stage split and recompute choice that ``arrays`` could have.

    Three ranks cannot be avoided: one with at least the mean of all states and of full recompute's inputs (one microbatch each);
    one that holds the embedding and the lightest layer; one that holds head, loss and the lightest layer. Each runs a layer's
    backward, during which all that the layer saves exists, whatever is recomputed.
    """
    model, execution, degrees = job.model, job.execution, arrays
    slack = execution.eager_reserved_ratio if execution.elementwise == "eager" else execution.reserved_ratio
    counts = {kind: model.pattern.count(kind) for kind in set(model.pattern)}
    at_device = 0.0 if "activations" in degrees.offload else 1.0
    full = RecomputeRule(0, None, "full")

    def held(unit: int | str) -> Any:
        holding, trained = unit_holding(job, degrees, unit)
        return states(job, degrees, holding, trained).total

    of_kind = {k: held(k) for k in counts}
    each = {k: unit_memory(job, degrees, k, full) for k in counts}
    together = execution.recompute_unit
    lightest = _least([of_kind[k] for k in counts])
    transient = _least([each[k].transient + each[k].saved - each[k].kept for k in counts])
    shares = model.tied and degrees.pp == 1
    embedding, head = held("embedding"), held("tied head" if shares else "head")
    copies = 2 if degrees.schedule == "dualpipe" else 1
    layers = sum(counts[k] * (copies * of_kind[k] + at_device * each[k].kept / together) for k in counts)
    tail = unit_memory(job, degrees, "head")
    mean = (layers + copies * (embedding + head)) / degrees.pp + transient
    first = embedding + degrees.vpp * lightest + transient
    last = head + degrees.vpp * lightest + maximum(at_device * tail.kept + tail.transient, transient)
    allocated = maximum(mean, maximum(first, last))
    outside = communicators(job, degrees) + job.cluster.gpu.context_bytes
    return np.asarray(allocated * slack + execution.workspace_bytes + outside, dtype=float)


def _least(values: Sequence[Any]) -> Any:
    return -_most([-v for v in values])
