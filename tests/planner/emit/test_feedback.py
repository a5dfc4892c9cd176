"""What a run of axisplan measured comes back as the same job and layout, judges the cost model and calibrates a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plans import job_of, plan_of

from cost_models.calibrate import scaled
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.runs import load_runs, read_rows
from cost_models.step import estimate
from planner.emit.logs import append_row
from planner.plan import Plan
from planner.runtime.feedback import judged, row

LAYOUTS = [
    "tp=8,micro_batch=1", "tp=2,sp=false,zero=3,micro_batch=1", "pp=4,schedule=zb-h1,micro_batch=1,stages=9|8|8|7",
    "cp=4,cp_kind=ulysses,zero=2,micro_batch=1,recompute=0-3:full/4-31:none", "pp=2,vpp=2,schedule=zb-v,micro_batch=1",
    "dp_replicate=2,dp_shard=4,zero=3,micro_batch=1,recompute=full",
]  # fmt: skip


def records(seconds: float, stages: int = 1) -> list[dict[str, Any]]:
    """Eight steps: two watched and slow, then even ones with one hiccup."""
    times = [9.0, 8.0, *(seconds for _ in range(5)), 5.0]
    out = [{"step": i + 1, "loss": 5.0 - i, "seconds": s, "peak_bytes": (40 + i) << 30} for i, s in enumerate(times)]
    for line in out[:2]:
        line["watched"] = True
    for line in out if stages > 1 else ():
        line["stage_seconds"] = [0.5 * line["seconds"]] * stages
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_is_the_same_job_and_layout_whatever_the_schedule(layout: str) -> None:
    made = plan_of(job_of("llama-3.1-8b", "h100-sxm:1x8", "axisplan"), layout)
    runs, skipped = load_runs([row(made, records(2.0, len(made.stages)), "x")])
    assert not skipped
    assert runs[0].layout == made.layout_object
    assert runs[0].job.model == made.job().model
    assert (runs[0].seconds, runs[0].memory_gib, runs[0].memory_figure) == (2.0, 47.0, "allocated")


def test_a_row_holds_the_stages_beside_what_was_predicted() -> None:
    made = plan_of(job_of("llama-3.1-8b", "h100-sxm:1x8", "axisplan"), "pp=4,micro_batch=1")
    got = row(made, records(2.0, 4))
    assert got["stage_seconds"] == "1;1;1;1"
    assert [float(s) for s in got["predicted_stage_seconds"].split(";")] == pytest.approx(made.estimate["stage_seconds"], rel=1e-5)
    assert float(got["predicted_step_s"]) == pytest.approx(made.step_seconds, rel=1e-5)


def test_a_run_of_ours_with_blocking_launches_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """cases.md I05."""
    made = plan_of(job_of("llama-3.1-8b", "h100-sxm:1x8", "axisplan"), LAYOUTS[0])
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    assert row(made, records(2.0))["time_ok"] == "yes"
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert row(made, records(2.0))["time_ok"] == "no"


def test_watched_and_warming_steps_are_not_judged_unless_nothing_else_is_left() -> None:
    lines = records(2.0)
    assert [r["step"] for r in judged(lines)] == [3, 4, 5, 6, 7, 8]
    assert [r["step"] for r in judged(lines[:2])] == [1, 2]


def test_runs_of_several_layouts_judge_the_model_and_calibrate_the_cluster(tmp_path: Path, invoke: Any) -> None:
    """Six runs that a cluster of 0.8 times the compute speed would give: the fit finds it."""
    path = tmp_path / "runs.csv"
    for layout in LAYOUTS:
        job = job_of("llama-3.1-8b", "h100-sxm:1x8", "axisplan")
        made: Plan = plan_of(job, layout)
        slower = Job(job.model, scaled(job.cluster, {"compute": 0.8}), job.execution, job.seq_len, job.global_batch, job.precision)
        seconds = estimate(slower, Layout.parse(layout, job.cluster.gpus), detail=False).step_seconds
        append_row(path, row(made, records(seconds), layout))
    assert len(read_rows(path)) == len(LAYOUTS)
    code, text, _ = invoke("regress", str(path), "--json")
    assert code == 0
    assert json.loads(text)["step_time"]["bias"] < -0.05
    code, text, error = invoke("calibrate", str(path), "--cluster", "h100-sxm:1x8", "--out", str(tmp_path / "mine.yaml"), "--json")
    assert code == 0, error
    assert json.loads(text)["factors"]["compute"] == pytest.approx(0.8, rel=0.05)
