"""Memory of ten thousand layouts at once: ``cost_models.memory`` with arrays for the degrees.

Layouts that share everything but their degrees (``LayoutArrays``) are costed together; what a microbatch costs is shared by all of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.arrays import most
from cost_models.job import Job
from cost_models.layout import Layout, Recompute
from cost_models.memory import ranks_memory
from cost_models.schedules import settled

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
            flying = settled(x.schedule, x.pp, x.vpp, x.microbatches(job.global_batch))
            key = (x.pp, x.vpp, x.zero, x.schedule, x.recompute, x.stages, x.offload, flying)
            parts.setdefault(key, []).append(index)
        for key, indices in parts.items():
            at = [places[i] for i in indices]
            out.append((whole.part(np.array(indices), layouts[at[0]]), at, key[-1]))
    return out


def device_bytes(job: Job, layouts: Sequence[Layout]) -> Floats:
    """Device bytes that the worst rank of each layout needs: ``max(s.needed for s in stage_memory(job, layout))``."""
    out = np.zeros(len(layouts))
    for arrays, places, microbatches in grouped(job, layouts):
        out[places] = most(stage.needed for stage in ranks_memory(job, arrays, microbatches))
    return out


def _take(value: Any, at: Any) -> Any:
    """The same value for the layouts at ``at``."""
    if isinstance(value, np.ndarray):
        return value[at]
    if isinstance(value, tuple):
        taken = (_take(v, at) for v in value)
        return type(value)(*taken) if hasattr(value, "_fields") else tuple(taken)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(_take(getattr(value, f.name), at) for f in fields(value)))
    return value
