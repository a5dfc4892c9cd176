"""Group H of the field's cases: checkpoints, and what happens when the layout changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import pytest

from cost_models.checkpoints import checkpoint_bytes, export_bytes
from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from planner.plan import Plan
from planner.replan import checkpoint_rules
from planner.runtime.checkpoint import latest
from profiles.hardware import load_cluster
from profiles.huggingface import load_model
from tests.planner.runtime.test_launch import folder

SAVING = Path(__file__).resolve().parent / "checkpoint_programs.py"
SAVES = [
    (4, "dp=4,zero=0", "llama8", "fp32"), (4, "dp=4,zero=1", "llama8", "bf16"), (4, "dp_replicate=2,dp_shard=2,zero=3", "llama8", "bf16"),
    (4, "tp=2,pp=2,micro_batch=2", "llama8", "fp32"), (4, "tp=2,dp=2,ep=2,etp=2", "moe", "fp32"), (4, "dp=4,ep=2,zero=2", "moe", "bf16"),
]  # fmt: skip


def changed(processes: Callable[..., list[Any]], path: Path, model: str, before: tuple[int, str], after: tuple[int, str]) -> None:
    """Train under one layout, save, go on under another: the losses of the run that never stopped."""
    facts = {"folder": str(path), "steps": 2, "more": 2, "model": model}
    expected = processes(before[0], "train_and_save", layout=before[1], **facts)[0]
    assert processes(after[0], "load_and_train", layout=after[1], **facts)[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_h01_a_pipeline_of_4_continues_as_expert_parallel_4(processes: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Megatron-LM #1517: save PP 4, load EP 4."""
    changed(processes, tmp_path, "moe", (4, "pp=4"), (4, "dp=4,ep=4"))


def test_h02_whether_another_layout_can_load_is_said_for_every_target() -> None:
    """Megatron-LM PR #7162: only the fully reshardable optimizer format survives a change."""
    said = {target: row["says"] for target, row in checkpoint_rules().items()}
    assert "fully_reshardable" in said["megatron"]
    assert "dp_reshardable keeps the data-parallel grouping" in said["megatron"]
    assert "load under any layout" in said["axisplan"]


def test_h03_a_conversion_holds_one_file_and_one_parameter_never_the_model() -> None:
    """nanotron #106: merging ran out of memory."""
    model = load_model("llama-3.1-405b")
    largest = 128256 * 16384
    assert export_bytes(model) == 4 * 2**30 + (4 + 4 + 2) * largest
    assert export_bytes(model) < 0.04 * 2 * model.parameters.total


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=4", "tp=2,pp=2,micro_batch=2", "cp=4,zero=2", "dp=4,zero=3"])
def test_h04_a_save_and_resume_under_the_same_layout_is_as_if_it_had_not_been(
    processes: Callable[..., list[Any]], tmp_path: Path, layout: str
) -> None:
    """transformers PR #48569: saving on rank 0 alone hung, and the optimizer was silently wrong on resume."""
    changed(processes, tmp_path, "llama", (4, layout), (4, layout))


@pytest.mark.parametrize(
    ("world", "layout", "model", "precision"),
    [pytest.param(*case, marks=[] if i == 2 else pytest.mark.slow) for i, case in enumerate(SAVES)],
)
def test_h06_save_and_load_take_the_host_memory_that_is_stated(
    processes: Callable[..., list[Any]], tmp_path: Path, world: int, layout: str, model: str, precision: str
) -> None:
    """Megatron-LM #1380, pytorch #149640: 2 GB more on rank 0; world x 28 GB of host memory for a 7B model."""
    vocab = 20011  # one parameter is most of the model, and larger than the plans that DCP exchanges
    job = Job(programs.model_of(model, vocab=vocab), load_cluster(f"cpu:1x{world}"), load_execution("axisplan"), 16, 8, precision)
    stated = checkpoint_bytes(job, Layout.parse(layout, world))
    got = processes(
        world, "checkpoint_peaks", file=SAVING, folder=str(tmp_path), layout=layout, model=model, precision=precision, vocab=vocab
    )
    held = [rank["held"] for rank in got]
    assert max(held) <= 1.1 * stated.save_host_rank + 2048, "each rank its part, replicas none twice"
    assert sum(held) == pytest.approx(stated.save_host_node, rel=0.02)
    assert all(rank["saving"] <= rank["held"] + 4096 for rank in got), "nothing but the copy"
    assert all(rank["loading"] <= stated.load_host_rank for rank in got), "one box at a time"
    assert got[0]["files"] >= stated.files


def test_h06_a_replica_copies_only_its_part() -> None:
    job = Job(load_model("llama-3.1-8b"), load_cluster("h100-sxm:1x8"), load_execution("axisplan"), 4096, 64, "bf16")
    total = 12 * job.model.parameters.total
    for layout in ("zero=0", "zero=1", "zero=3", "tp=4,pp=2"):
        found = checkpoint_bytes(job, Layout.parse(layout, 8))
        assert found.files == total
        assert found.save_host_node == pytest.approx(total, rel=0.01)
        assert found.device == 0


def test_h06_the_plan_says_what_a_save_and_a_load_take(tmp_path: Path, invoke: Any) -> None:
    plan = folder(tmp_path, "dp=2", 2) / "plan.json"
    stated = json.loads(invoke("explain", str(plan), "--json")[1])["checkpoint"]
    assert stated["files"] == 12 * Plan.load(plan).job().model.parameters.total
    assert stated["save_host_rank"] == stated["files"] / 2
    said = " ".join(invoke("explain", str(plan))[1].split())
    assert "checkpoint 0.4 MiB; a save copies 0.2 MiB to host memory on the fullest rank, 0.4 MiB on the fullest node" in said


def test_a_checkpoint_that_cannot_be_named_fails_on_every_rank_and_the_last_one_stays(
    processes: Callable[..., list[Any]], tmp_path: Path
) -> None:
    facts = {"folder": str(tmp_path), "layout": "dp=2,zero=1", "steps": 1, "more": 1}
    processes(2, "train_and_save", **facts)
    whole = latest(tmp_path)
    assert whole is not None
    facts_before = json.loads((whole / "axisplan.json").read_text())
    said = processes(2, "save_where_nothing_can_be_named", file=SAVING, folder=str(tmp_path))
    assert all(line.startswith(f"the checkpoint under {tmp_path} could not be written: ") and "latest" in line for line in said)
    assert json.loads((whole / "axisplan.json").read_text()) == facts_before
