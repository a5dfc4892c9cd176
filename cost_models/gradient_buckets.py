"""Whole gradients that ZeRO-2 gathers in flat buckets before it reduces them (``Execution.gradient_bucket_bytes``).

A bucket holds a chunk's weights in the order of the model, up to its size; a tensor that is larger has one of its own. It exists
from its first gradient to its last, so beside the backward of layers lies one of theirs, and the head's or the embedding's as its
own gradient is made. Source: planner/runtime/data_parallel.py, traced by the dry run (docs/dry-run.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cost_models.arrays import maximum, minimum, where
from cost_models.fully_sharded import Units
from cost_models.job import Job
from cost_models.stage_states import tensors
from cost_models.state_bytes import shards
from profiles.operations import Number


@dataclass(frozen=True)
class Buckets:
    """Bytes of the largest bucket of a chunk of layer ``kinds`` (kind, count) on one rank; ``first`` and ``last``: the chunk holds
    the embedding, the head. 0 where gradients are not gathered so."""

    job: Job
    degrees: Any
    kinds: tuple[tuple[int, int], ...]
    first: bool
    last: bool

    @property
    def of_layers(self) -> Number:
        units = Units(self.job, self.degrees, self.first, self.last)
        count: Number = units.trained_ends + sum(units.trained(kind).all * times for kind, times in self.kinds)
        return self._largest(count, (kind for kind, _ in self.kinds))

    @property
    def of_embedding(self) -> Number:
        return self._largest(0, ("embedding",))

    @property
    def of_head(self) -> Number:
        return self._largest(0, ("head",))

    def _largest(self, count: Number, units: Iterable[int | str]) -> Number:
        """Of ``count`` elements that share buckets, and of the ``units``' own tensors."""
        execution = self.job.execution
        if self.degrees.zero != 2 or not execution.gradient_bucket_bytes:
            return 0
        size: Number = minimum(
            self.job.reduced_element * count, execution.unsharded_gradient_units * execution.gradient_bucket_bytes
        )
        for unit in units:
            size = maximum(size, self.job.reduced_element * largest_tensor(self.job, self.degrees, unit))
        ways, _ = shards(self.degrees)
        return where(ways > 1, size, 0)


def largest_tensor(job: Job, degrees: Any, unit: int | str) -> Number:
    """Elements of a unit's largest trained weight on one rank."""
    most: Number = 0
    for weight in tensors(job).units[unit]:
        if job.trains(weight.part):
            pieces = 2 if weight.gated and not job.execution.fused_gate_up else 1
            most = maximum(most, weight.local(degrees, job.execution) / pieces)
    return most
