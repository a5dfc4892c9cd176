"""What ``gpu_checks.py`` found beside what was expected: ``python benchmarks/gpu_report.py PLANS RESULTS [--gpu h200-sxm]``.

Prints one line a comparison and exits with 1 when one is over its limit: the shipped curve against the fresh one (median difference of
each kind of operation at most 10 %), the traced peak of each job against ``torch.cuda.max_memory_allocated`` (3 %), each job's step within
its predicted 80 % interval, its predicted peak (10 %), fp32 losses of device and CPU (1e-4), operations against fp64
(``OPERATIONS``). A part that has no results is said to be missing, and counts as over.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.hardware import GpuProfile, load_gpu
from profiles.measure.judging import differences
from profiles.measure.samples import load_samples

CURVE, TRACED, PEAK, LOSS = 0.10, 0.03, 0.10, 1e-4
OPERATIONS = {"float32": 1e-3, "bfloat16": 1e-2}
"""Relative error against fp64 by type: rounding of fp32 with tf32 products allowed nowhere, and of bf16."""


@dataclass(frozen=True)
class Line:
    """A comparison: what was expected, what was found, and how far apart they may be; ``found`` None: there is no result."""

    what: str
    expected: float
    found: float | None
    limit: float
    off: float

    @property
    def good(self) -> bool:
        return self.found is not None and self.off <= self.limit

    def __str__(self) -> str:
        if self.found is None:
            return f"MISSING  {self.what}"
        verdict = "good   " if self.good else "OVER   "
        return (
            f"{verdict}  {self.what}: expected {self.expected:.4g}, found {self.found:.4g}: off {self.off:.2%} of {self.limit:.2%}"
        )


def relative(what: str, expected: float, found: float | None, limit: float) -> Line:
    return Line(what, expected, found, limit, abs(expected / found - 1) if found else float("inf"))


def inside(what: str, expected: float, found: float | None, low: float, high: float) -> Line:
    """Whether ``found`` lies between ``low`` and ``high``, said as shares of what was expected."""
    limit = (high if found is not None and found > expected else low) / expected - 1
    return Line(what, expected, found, abs(limit), abs(found / expected - 1) if found else float("inf"))


def curve_lines(results: Path, known: GpuProfile) -> Iterator[Line]:
    """The shipped curve beside the fresh samples: the median difference of each kind of operation."""
    path = results / "gpu.samples.json"
    if not path.exists():
        yield Line(f"{known.name}: a fresh profile", 0, None, CURVE, float("inf"))
        return
    for kind, found in differences(known, *load_samples(path)).items():
        yield Line(f"{known.name} {kind}, known / measured ({found.count})", 1.0, found.ratio, CURVE, found.median)


def job_lines(expected: dict[str, Any], results: Path) -> Iterator[Line]:
    """Each job's traced peak, and the matrix library's workspaces, beside the allocator's peak (whose blocks are multiples of 512
    bytes); the step's seconds inside the predicted interval."""
    found = read(results / "jobs.json")
    for name, of in expected.items():
        job = found.get(name, {})
        traced = of["traced"]["peak_bytes"] + job.get("workspace_bytes", 0)
        yield relative(f"{name}: traced peak, bytes", traced, job.get("max_memory_allocated"), TRACED)
        yield relative(f"{name}: predicted peak, bytes", of["memory"]["peak_allocated"], job.get("max_memory_allocated"), PEAK)
        seconds = statistics.median(job["step_seconds"]) if job.get("step_seconds") else None
        yield inside(f"{name}: step, s", of["step_seconds"], seconds, of["step_seconds_low"], of["step_seconds_high"])


def number_lines(results: Path) -> Iterator[Line]:
    """fp32 losses of device and CPU, and the operations' errors."""
    found = read(results / "numbers.json")
    here, there = found.get("losses on the device"), found.get("losses on the CPU")
    if isinstance(here, list) and isinstance(there, list):
        worst = max(zip(here, there, strict=True), key=lambda pair: abs(pair[0] / pair[1] - 1))
        yield relative("fp32 losses of ten steps, device and CPU (the furthest)", worst[1], worst[0], LOSS)
    else:
        yield Line("fp32 losses of ten steps", 0, None, LOSS, float("inf"))
    for dtype, limit in OPERATIONS.items():
        errors = found.get(f"operations torch.{dtype}", {})
        if not errors or "failed" in errors:
            yield Line(f"operations in {dtype}", 0, None, limit, float("inf"))
            continue
        yield from (Line(f"{name} in {dtype}, worst output", 0.0, max(each), limit, max(each)) for name, each in errors.items())


def read(path: Path) -> dict[str, Any]:
    """A part's results; nothing where it wrote none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def report(plans: Path, results: Path, gpu: str) -> list[Line]:
    """Every comparison."""
    expected = json.loads((plans / "expected.json").read_text(encoding="utf-8"))
    return [*curve_lines(results, load_gpu(gpu)), *job_lines(expected, results), *number_lines(results)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--gpu", default="h200-sxm")
    arguments = parser.parse_args()
    lines = report(arguments.plans, arguments.results, arguments.gpu)
    print("\n".join(map(str, lines)))
    sys.exit(0 if all(line.good for line in lines) else 1)


if __name__ == "__main__":
    main()
