"""Formula against trace: what should be equal, by how much it differs, and under which name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from planner.dryrun.formula import StepFormula
from planner.dryrun.rank import Trace

EXACT, ACTIVATIONS, PEAK = 1e-12, 0.01, 0.02
"""Tolerances: FLOPs, collectives and states; activations; the peak."""

OF_STATES = {
    "parameters": ("bucket padding",),
    "gradients": ("gradient padding",),
    "optimizer": ("master padding", "step counters", "shorter shards"),
}
"""Named bytes that lie in a state: padding of flat buckets; AdamW's count of steps; what a rank's shards are shorter than the first
rank's (negative), where rows do not divide."""


@dataclass(frozen=True)
class Line:
    """One comparison: figures in bytes (or FLOPs), ``named`` the part of the trace that has a name of its own and is not in the
    formula, ``relative`` what is left of the difference over the formula."""

    what: str
    formula: float
    trace: float
    named: dict[str, float]
    tolerance: float

    @property
    def relative(self) -> float:
        rest = self.trace - sum(self.named.values()) - self.formula
        return abs(rest) / max(abs(self.formula), 1.0)

    @property
    def agrees(self) -> bool:
        return self.relative <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "relative": self.relative, "agrees": self.agrees}


def compare(formula: StepFormula, trace: Trace) -> list[Line]:
    """Every comparison of a rank's step, in the order of the report."""
    memory, record = formula.memory, trace.record
    named = {k: float(v) for k, v in trace.named.items() if v}
    states = {"parameters": memory.parameters, "gradients": memory.gradients, "optimizer": memory.optimizer}
    lines = [
        Line(what, size, record.most[what], {k: named[k] for k in OF_STATES[what] if k in named}, EXACT)
        for what, size in states.items()
    ]
    lines.append(Line("activations", formula.kept, record.kept, {}, ACTIVATIONS))
    lines.append(Line("peak", memory.peak_allocated, record.peak_bytes, named, PEAK))
    traced = Counter({"products": record.flops["matmul"] + record.flops["grouped_matmul"], "attention": record.flops["attention"]})
    lines += [Line(f"flops: {kind}", float(formula.flops[kind]), traced[kind], {}, EXACT) for kind in ("products", "attention")]
    sent: Counter[tuple[str, str]] = Counter()
    for call in record.calls:
        sent[call.axis, call.kind] += call.bytes
    expected = canonical(formula.sent, trace.axes)
    for key in sorted(set(sent) | {k for k, v in expected.items() if v}):
        extra = trace.padded.get(key, 0.0)
        lines.append(Line(f"sent: {key[0]} {key[1]}", expected[key], sent[key], {"padding": extra} if extra else {}, EXACT))
    return lines


def canonical(sent: Mapping[tuple[str, str], float], axes: Mapping[str, str]) -> dict[tuple[str, str], float]:
    """Bytes by the names that the trace gives to groups; axes of one rank are left out."""
    out: dict[tuple[str, str], float] = defaultdict(float)
    for (axis, kind), size in sent.items():
        if axis in axes:
            out[axes[axis], kind] += size
    return out
