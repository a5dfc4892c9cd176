"""Whole gradients that ZeRO-2 gathers in flat buckets before it reduces them (``Execution.gradient_bucket_bytes``).

A bucket holds matrices of one layer, or of one end of the model, that are reduced over the same ranks, in the order of the model and
up to its size; a tensor that is larger has one of its own. It exists from its first gradient to its last, and gradients come in the
reverse of that order. Norms and biases of a chunk have a bucket together. Source: planner/runtime/data_parallel.py, traced by the
dry run (docs/dry-run.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cost_models.arrays import maximum, where
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.stage_states import adapters, tensors
from cost_models.state_bytes import shards
from cost_models.states import Weight
from cost_models.units import Unit, microbatch_key
from profiles.operations import Number

Member = tuple[str, Number]
"""The ranks that a tensor is reduced over, by name, and its bytes."""


@dataclass(frozen=True)
class Buckets:
    """Bytes of buckets on one rank. 0 where gradients are not gathered so."""

    job: Job
    degrees: Any

    def of(self, unit: Unit) -> Number:
        """The most of a unit's whole gradients that exists at once."""
        if not self._gathers:
            return 0
        if isinstance(self.degrees, Layout):
            return self._where_sharded(_remembered(self.job, microbatch_key(self.degrees), unit))
        return self._where_sharded(self.degrees.remember(("buckets", unit), lambda d: bucket_bytes(self.job, d, unit)))

    def of_vectors(self, units: Iterable[tuple[Unit, int]]) -> Number:
        """The bucket of norms and biases of ``units``, so many of each."""
        if not self._gathers:
            return 0
        each = self.job.reduced_element
        return self._where_sharded(sum(each * count * _vectors(self.job, unit) for unit, count in units))

    @property
    def _gathers(self) -> bool:
        return self.degrees.zero == 2 and self.job.execution.gradient_bucket_bytes > 0

    def _where_sharded(self, size: Number) -> Number:
        ways, _ = shards(self.degrees)
        return where(ways > 1, size, 0)


@lru_cache(maxsize=8192)
def _remembered(job: Job, key: Layout, unit: Unit) -> Number:
    return bucket_bytes(job, key, unit)


def bucket_bytes(job: Job, degrees: Any, unit: Unit) -> Number:
    """The most of a unit's whole gradients that exists at once where they are gathered in buckets."""
    pieces = [
        (weight, job.reduced_element * size)
        for weight in trained_matrices(job, unit)
        for size in _pieces(job, weight, weight.local(degrees, job.execution))
    ]
    limit = job.execution.gradient_bucket_bytes
    together = most_alive([("expert" if w.split == "expert" else "dense", size) for w, size in pieces], limit)
    apart = most_alive([(_reduced_over(w), size) for w, size in pieces], limit)
    return where(degrees.tp > 1, apart, together)


def trained_matrices(job: Job, unit: Unit) -> Iterable[Weight]:
    """A unit's weights that have gradients and are no vectors, adapters included, in the order of the model."""
    weights = tensors(job).units[unit]
    yield from (w for w in weights if job.trains(w.part) and w.columns > 1)
    if job.lora_rank:
        yield from adapters(job, weights)


def _vectors(job: Job, unit: Unit) -> int:
    return sum(w.elements for w in tensors(job).units[unit] if job.trains(w.part) and w.columns == 1)


def _pieces(job: Job, weight: Weight, size: Number) -> Sequence[Number]:
    return (size / 2, size / 2) if weight.gated and not job.execution.fused_gate_up else (size,)


def _reduced_over(weight: Weight) -> str:
    """Experts have shards of their own; what TP does not split is summed over TP first."""
    return "expert" if weight.split == "expert" else "whole" if weight.split in ("none", "mtp") else "split"


def most_alive(members: Sequence[Member], limit: float) -> Number:
    """The most bytes of buckets at once while the gradients of ``members`` come in reverse order."""
    begins, totals = _cut(members, limit)
    names = dict.fromkeys(name for name, _ in members)
    most: Number = 0
    for at, (name, _) in enumerate(members):
        alive = totals[at]
        for other in names:
            if other == name:
                continue
            after = next((i for i in range(at + 1, len(members)) if members[i][0] == other), None)
            if after is not None:  # open: it began with a gradient after this one, and waits for one before
                alive = alive + where(begins[after] > 0, totals[after], 0)
        most = maximum(most, alive)
    return most


def _cut(members: Sequence[Member], limit: float) -> tuple[list[Number], list[Number]]:
    """Of each member: the bytes before it in its bucket, and its bucket's in all."""
    begins: list[Number] = [0] * len(members)
    totals: list[Number] = [0] * len(members)
    for name in dict.fromkeys(name for name, _ in members):
        places = [i for i, (own, _) in enumerate(members) if own == name]
        filled: Number = 0
        for i in places:
            begins[i] = where(filled + members[i][1] > limit, 0, filled)
            filled = begins[i] + members[i][1]
        following: Number = 0
        total: Number = 0
        for i in reversed(places):
            total = where(following > 0, total, begins[i] + members[i][1])
            totals[i], following = total, begins[i]
    return begins, totals
