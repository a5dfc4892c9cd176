"""Predicted beside measured, by kind of operation: a fit on the samples kept out of it, a known profile on fresh ones, and how far the
repeats of each kind spread."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiles.fit import Errors
from profiles.hardware import GpuProfile
from profiles.measure.plan import LARGE, LAYER_MIX
from profiles.measure.samples import Sample, save_samples, usable
from profiles.measure.timing import Noise, noise
from profiles.operations import Attend, Collective, Matmul, Pointwise


@dataclass
class Measured:
    """Samples, the facts about the run, the fit's errors on samples that were not fitted (by kind of operation), and how steady the
    machine was."""

    samples: list[Sample]
    facts: dict[str, Any]
    held_out: dict[str, Errors] = field(default_factory=dict, kw_only=True)
    noise: Noise = field(default_factory=lambda: noise([]), kw_only=True)
    interrupted: bool = field(default=False, kw_only=True)

    @property
    def failures(self) -> list[Sample]:
        """Candidates that have no time: out of memory, or no such kernel here."""
        return [s for s in self.samples if s.failed]

    @property
    def spreads(self) -> dict[str, float]:
        """How far repeats spread, by kind of operation."""
        return spreads(self.samples)

    def save_samples(self, path: str | Path) -> None:
        """Writes samples and facts, whole or not at all."""
        save_samples(path, self.samples, **self.facts)


def kind_of(sample: Sample) -> str:
    """What a sample is one of: products by precision, attention by direction and precision, traffic by form, collectives by ranks."""
    op = sample.operation
    if isinstance(op, Matmul):
        return f"matmul {op.dtype}"
    if isinstance(op, Attend):
        return f"attention {'backward' if op.backward else 'forward'} {op.dtype}"
    if isinstance(op, Collective):
        return f"{op.kind} over {sample.ranks}" + (f", {op.axis} and {sample.beside} at once" if sample.beside else "")
    return f"memory {sample.form}"


def spreads(samples: Sequence[Sample]) -> dict[str, float]:
    """Median over a kind's samples of how far the middle half of the repeats spans, as a share of their median."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if not sample.failed:
            found[kind_of(sample)].append(sample.spread)
    return {kind: statistics.median(values) for kind, values in sorted(found.items())}


def held_out_errors(profile: GpuProfile, samples: Sequence[Sample], facts: Mapping[str, Any]) -> dict[str, Errors]:
    """Errors of a fitted profile on what was kept out of the fit: products and attention of shapes it has not seen, memory traffic of
    sizes it has not seen, and the launch cost on operations that it was not taken from."""
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    judges: list[Sample] = [*usable(samples, Matmul, held_out=True), *usable(samples, Attend, held_out=True)]
    for sample in judges:
        if sample.operation.dtype in profile.peaks:
            ratios[kind_of(sample)].append(_predicted(profile, sample) / sample.seconds)
    ratios["memory traffic"] = _traffic(profile, usable(samples, Pointwise, held_out=True))
    if facts.get("launch_judge_seconds"):
        ratios["launch"] = [profile.launch_seconds / facts["launch_judge_seconds"]]
    return {kind: Errors.of(found) for kind, found in ratios.items() if found}


def _traffic(profile: GpuProfile, judges: Sequence[Sample[Pointwise]]) -> list[float]:
    """Predicted over measured, one ratio a size: on a CPU of a layer's mix of forms (what its rate stands for), else of additions."""
    mix = LAYER_MIX if profile.is_host else {"add": 1.0}
    sizes: defaultdict[float, dict[str, Sample[Pointwise]]] = defaultdict(dict)
    for sample in judges:
        sizes[sample.operation.bytes / sample.operation.kernels][sample.form] = sample
    found = []
    for forms in sizes.values():
        if mix.keys() <= forms.keys():
            predicted = sum(share * _predicted(profile, forms[form]) for form, share in mix.items())
            found.append(predicted / sum(share * forms[form].seconds for form, share in mix.items()))
    return found


def differences(known: GpuProfile, samples: Sequence[Sample], facts: Mapping[str, Any]) -> dict[str, Errors]:
    """A ``known`` profile against what was measured: products by precision (sides of at least ``plan.LARGE``, which training is made
    of), attention by direction, traffic by form, launch cost, usable memory. Precisions that ``known`` lacks are left out. A short
    measurement is not a chip that has been busy for minutes, so prices are those of a burst (``sustained=False``)."""
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.seconds > 0 and not sample.failed and _comparable(sample, known):
            ratios[kind_of(sample)].append(_predicted(known, sample) / sample.seconds)
    if facts.get("launch_seconds"):
        ratios["launch"] = [known.launch_seconds / facts["launch_seconds"]]
    if facts.get("memory_usable_bytes"):
        ratios["usable memory"] = [known.usable_bytes / facts["memory_usable_bytes"]]
    return {kind: Errors.of(found) for kind, found in sorted(ratios.items())}


def _comparable(sample: Sample, known: GpuProfile) -> bool:
    op = sample.operation
    if isinstance(op, Matmul):
        return min(op.m, op.n, op.k) >= LARGE and op.dtype in known.peaks
    return isinstance(op, Pointwise) or (isinstance(op, Attend) and op.dtype in known.peaks)


def _predicted(profile: GpuProfile, sample: Sample) -> float:
    return float(profile.seconds(sample.operation, sustained=False))
