"""A fresh measurement beside a profile that is known: how far each kind of operation is from what the profile says of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiles.hardware import GpuProfile
from profiles.measure.samples import Sample
from profiles.operations import Attend, Matmul, Pointwise

SMALLEST_SIDE = 256
"""Of the products that are compared: those that training is made of (``plan.LARGE``)."""


@dataclass(frozen=True)
class Difference:
    """Of one kind of operation: median and 90th percentile of |predicted / measured - 1|, the median of predicted / measured, and
    how many were compared."""

    median: float
    p90: float
    ratio: float
    count: int


def differences(known: GpuProfile, samples: Sequence[Sample], facts: Mapping[str, Any]) -> dict[str, Difference]:
    """``known`` against what was measured: products by dtype (sides of at least ``SMALLEST_SIDE``), attention by direction, traffic
    by form, launch cost, usable memory. Precisions that ``known`` lacks are left out. A short measurement is not a chip that has
    been busy for minutes, so prices are those of a burst (``sustained=False``)."""
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        name = kind_of(sample, known)
        if name and sample.seconds > 0 and not sample.failed:
            ratios[name].append(float(known.seconds(sample.operation, sustained=False)) / sample.seconds)
    if facts.get("launch_seconds"):
        ratios["launch"] = [known.launch_seconds / facts["launch_seconds"]]
    if facts.get("memory_usable_bytes"):
        ratios["usable memory"] = [known.usable_bytes / facts["memory_usable_bytes"]]
    return {name: _difference(values) for name, values in sorted(ratios.items())}


def kind_of(sample: Sample, known: GpuProfile) -> str:
    """What a sample is compared as; empty where it is not."""
    op = sample.operation
    if isinstance(op, Matmul):
        return f"matmul {op.dtype}" if min(op.m, op.n, op.k) >= SMALLEST_SIDE and op.dtype in known.peaks else ""
    if isinstance(op, Attend):
        return f"attention {'backward' if op.backward else 'forward'} {op.dtype}" if op.dtype in known.peaks else ""
    return f"memory {sample.form}" if isinstance(op, Pointwise) else ""


def _difference(ratios: Sequence[float]) -> Difference:
    off = np.abs(np.array(ratios) - 1)
    return Difference(float(np.median(off)), float(np.quantile(off, 0.9)), float(np.median(ratios)), len(ratios))
