"""What a run measured, as a row of the measured-runs table that ``axisplan regress`` and ``calibrate`` read (docs/runs.md).

Beside the columns of that table the row holds what the plan predicted and the busy seconds of each stage, measured and predicted;
nothing reads those for judging.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from planner.emit.logs import GIB, Measured, row_of

if TYPE_CHECKING:
    from planner.plan import Plan

WARM_SHARE = 0.25
"""Share of the steps, at the start, that warms up caches and allocators and is not judged."""


def row(plan: Plan, records: Sequence[dict[str, Any]], name: str = "run") -> dict[str, str]:
    """One row: what ran, its median step after warm-up, its peak, and the prediction. ``records`` as ``loop.run`` makes them."""
    warm = judged(records)
    host = plan.job().cluster.gpu.is_host
    blocks = plan.environment.get("CUDA_LAUNCH_BLOCKING", os.environ.get("CUDA_LAUNCH_BLOCKING")) == "1"
    measured = Measured(
        "axisplan (blocking launches)" if blocks else "axisplan", statistics.median(r["seconds"] for r in warm), len(warm),
        len(records) - len(warm), max(r["peak_bytes"] for r in records), "tensors allocated" if host else "torch max allocated",
        records[0]["loss"], records[-1]["loss"],
    )  # fmt: skip
    worst = max((m["peak_allocated"] for m in plan.estimate.get("memory", [])), default=None)
    predicted = {
        "predicted_step_s": f"{plan.step_seconds:.6g}",
        "predicted_tokens_per_s_per_gpu": f"{plan.job().tokens / plan.step_seconds / plan.layout_object.world:.6g}",
        "predicted_peak_mem_GiB": f"{worst / GIB:.6g}" if worst else "",
        "stage_seconds": ";".join(f"{s:.6g}" for s in _stages(warm)),
        "predicted_stage_seconds": ";".join(f"{s:.6g}" for s in plan.estimate.get("stage_seconds", ()))
        if len(plan.stages) > 1
        else "",
    }
    return {**row_of(plan, measured, identity=f"axisplan-{name}", source="axisplan run"), **predicted}


def judged(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records after warm-up whose allocations were not watched, which slows a step; all of them where none is left."""
    warm = list(records)[int(len(records) * WARM_SHARE) :]
    return [r for r in warm if not r.get("watched")] or warm or list(records)


def _stages(records: Sequence[dict[str, Any]]) -> list[float]:
    """Median busy seconds of each pipeline stage."""
    every = [r["stage_seconds"] for r in records if "stage_seconds" in r]
    return [statistics.median(column) for column in zip(*every, strict=True)] if every else []
