"""Logs of each framework in figures, the row of runs.csv, and the way back from the row to the same job and layout."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import job_of, plan_of

from cost_models.runs import to_run
from planner.emit.logs import COLUMNS, append_row, measure, read_log, row_of
from planner.plan import Plan
from planner.screen import step_line
from profiles.errors import InputError
from profiles.hardware import load_cluster, to_yaml


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(job_of(), "tp=4,pp=2,micro_batch=1,recompute=selective(core_attn)")


MEGATRON = """\
> building model ...
[Rank 0] (after 1 iterations) memory (MB) | allocated: 20000.00 | max allocated: 40960.00 | reserved: 42000.00 | max reserved: 45056.00
[Rank 8] (after 1 iterations) memory (MB) | allocated: 20000.00 | max allocated: 51200.00 | reserved: 52000.00 | max reserved: 55000.00
""" + "".join(
    f" [2026-06-01 12:00:{i:02d}.000000] iteration {i:8d}/     100 | consumed samples: {i * 128:12d} | elapsed time per iteration"
    f" (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 400.1 | learning rate: 3.0E-04 | "
    f"global batch size:   128 | lm loss: {8 - i / 10:.6E} | loss scale: 1.0 |\n"
    for i, ms in enumerate([30000.0, 2600.0, 2500.0, 2500.0, 2510.0, 2490.0], 1)
)
TORCHTITAN = "".join(
    f"\x1b[36m[titan] 2026-06-01 12:00:00,000 - root - INFO - \x1b[31mstep: {i:2}  \x1b[32mloss: {8 - i / 10:8.5f}  "
    f"\x1b[38;2;180;60;0mgrad_norm:  2.3000  "
    f"\x1b[39mmemory: 47.50GiB(60.01%)  \x1b[34mtps: {tps:,}  \x1b[36mtflops: 380.00  \x1b[35mmfu: 38.00%\x1b[39m\n"
    for i, tps in enumerate([300, 8192, 8192, 8192], 1)
)
DEEPSPEED = "".join(
    f"[2026-06-01 12:00:00,000] [INFO] [timer.py:264:stop] epoch=0/micro_step={i * 2}/global_step={i}, RunningAvgSamplesPerSec=100.0, "
    f"CurrSamplesPerSec={128 * 4 / s}, MemAllocated=20.5GB, MaxMemAllocated=61.25GB\n"
    for i, s in enumerate([9.0, 2.0, 2.0, 2.0], 1)
)
PIPELINE = "".join(
    f"steps: {i} loss: {8 - i / 10:0.4f} iter time (s): {s:0.3f} samples/sec: 64.000\n"
    for i, s in enumerate([9.0, 2.0, 2.0, 2.0], 1)
)
OURS = "".join(
    json.dumps({"step": i, "loss": 8 - i / 10, "grad_norm": 1.0, "seconds": s, "tokens_per_second": 1.0, "peak_bytes": 3 << 30})
    + "\n"
    for i, s in enumerate([9.0, 2.0, 2.0, 2.1])
)


@pytest.mark.parametrize(
    ("form", "text", "seconds", "memory", "counter"),
    [
        ("megatron", MEGATRON, 2.5, 50.0, "torch max allocated"),
        ("torchtitan", TORCHTITAN, 128 * 8192 / (8192 * 64), 47.5, "torch max reserved"),
        ("deepspeed", DEEPSPEED, 2.0, 61.25, "torch max allocated"),
        ("deepspeed", PIPELINE, 2.0, None, ""),
        ("axisplan", OURS, 2.0, 3.0, "torch max allocated"),
        ("axisplan", "".join(step_line(json.loads(line)) + "\n" for line in OURS.splitlines()), 2.0, 3.0, "torch max allocated"),
    ],
)
def test_each_frameworks_lines_are_read(
    plan: Plan, form: str, text: str, seconds: float, memory: float | None, counter: str
) -> None:
    found = read_log("some noise {\n" + text + "more noise\n", plan)
    assert found.form == form
    assert found.seconds == pytest.approx(seconds, rel=1e-6)
    assert (found.memory / 2**30 if found.memory else None) == memory
    assert found.counter == counter


def test_warm_up_is_left_out_and_can_be_chosen(plan: Plan) -> None:
    assert read_log(MEGATRON, plan).skipped == 2
    assert read_log(MEGATRON, plan, warmup=0).counted == 6
    with pytest.raises(InputError, match="--warmup"):
        read_log(MEGATRON, plan, warmup=6)


def test_losses_are_kept(plan: Plan) -> None:
    found = read_log(MEGATRON, plan)
    assert (found.first_loss, found.last_loss) == (pytest.approx(7.9), pytest.approx(7.4))


def test_a_log_without_steps_is_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no line of a step"):
        read_log("Traceback (most recent call last):\n", plan)
    with pytest.raises(InputError, match="cannot be read"):
        measure(tmp_path / "none.log", plan)


@pytest.mark.parametrize(
    ("model", "execution", "layout"),
    [
        ("llama-3.1-8b", "megatron", "tp=4,pp=2,micro_batch=2,recompute=selective(core_attn)"),
        ("qwen3-30b-a3b", "megatron", "tp=2,ep=8,micro_batch=1,recompute=full"),
        ("llama-3.1-8b", "torchtitan", "tp=4,zero=3,micro_batch=1"),
        ("llama-3.1-8b", "deepspeed", "zero=3,micro_batch=2,recompute=full"),
        ("llama-3.1-8b", "accelerate", "zero=3,tp=2,micro_batch=2"),
        ("llama-3.1-8b", "axisplan", "tp=4,pp=4,vpp=2,schedule=interleaved,micro_batch=1"),
    ],
)
def test_the_row_maps_back_to_the_same_job_and_layout(model: str, execution: str, layout: str) -> None:
    made = plan_of(job_of(model, execution=execution), layout)
    run = to_run(row_of(made, read_log(OURS, made), identity="x", source="axisplan measure"))
    job, wanted = made.job(), made.layout_object
    assert run.seconds == pytest.approx(2.0)
    assert (run.job.seq_len, run.job.global_batch, run.job.precision) == (job.seq_len, job.global_batch, job.precision)
    assert run.job.execution.name == execution
    assert run.layout.with_(recompute="none") == wanted.with_(recompute="none")
    assert run.layout.recompute_rules == wanted.recompute_rules
    assert (run.memory_gib, run.memory_figure) == (3.0, "allocated")
    assert run.job.model.parameters.total == pytest.approx(job.model.parameters.total, rel=1e-3)
    assert run.judged


def test_the_columns_are_those_of_the_published_table(data: Path) -> None:
    with (data / "runs.csv").open(newline="") as file:
        assert tuple(next(csv.reader(file))) == COLUMNS


def test_rows_are_added_and_replaced_by_id(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    row = row_of(plan, read_log(MEGATRON, plan), identity="a", source="test")
    assert append_row(path, row) == 1
    assert append_row(path, {**row, "id": 'b "quoted", with comma\nand line'}) == 2
    assert append_row(path, {**row, "measured_step_s": "3"}) == 2
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {r["id"]: r["measured_step_s"] for r in rows}["a"] == "3"


def test_a_run_with_blocking_launches_is_not_judged(plan: Plan, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("CUDA_LAUNCH_BLOCKING=1\n" + MEGATRON)
    row, _ = measure(log, plan)
    assert row["time_ok"] == "no"
    assert "CUDA_LAUNCH_BLOCKING=1" in row["notes"]


def test_a_plan_that_passes_blocking_launches_through_is_not_judged_whatever_its_log_says(plan: Plan, tmp_path: Path) -> None:
    """cases.md I05."""
    (tmp_path / "log").write_text(MEGATRON)
    blocking = plan.model_copy(update={"environment": {"CUDA_LAUNCH_BLOCKING": "1"}})
    assert [measure(tmp_path / "log", p)[0]["time_ok"] for p in (plan, blocking)] == ["yes", "no"]


def test_the_command_writes_a_row_that_regress_reads(plan: Plan, tmp_path: Path, invoke: Any) -> None:
    plan.save(tmp_path / "plan.json")
    (tmp_path / "log.txt").write_text(MEGATRON)
    out = tmp_path / "runs.csv"
    code, text, error = invoke("measure", str(tmp_path / "log.txt"), "--plan", str(tmp_path / "plan.json"), "--out", str(out))
    assert (code, error) == (0, "")
    assert "2.5 s a step (median of 4, megatron log); predicted" in text
    code, text, _ = invoke("regress", str(out), "--json")
    assert code == 0
    assert json.loads(text)["rows"] == 1
    code, _, error = invoke("measure", str(tmp_path / "plan.json"), "--plan", str(tmp_path / "plan.json"))
    assert (code, error.count("\n")) == (2, 1)


def test_a_cluster_file_is_known_to_the_row_by_its_gpu(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(to_yaml(replace(load_cluster("h100-sxm:8x8"), name="our-cluster", kind="")))
    job = job_of(cluster=str(tmp_path / "ours.yaml"))
    assert (job.cluster.name, job.cluster.kind) == ("our-cluster", "")
    (tmp_path / "log").write_text(MEGATRON)
    row, _ = measure(tmp_path / "log", plan_of(job, "tp=4,pp=2"))
    assert row["gpu"] == job.cluster.gpu.name == "h100-sxm-80gb"
    assert to_run(row).job.cluster.kind == "h100-sxm"
