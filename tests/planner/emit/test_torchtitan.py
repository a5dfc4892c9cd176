"""What the TorchTitan target says, and what it refuses (targets.md 2.1 and 2.2; cases.md B01, B04, B06)."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from plans import job_of, plan_of, renamed

from cost_models.job import Job
from planner.emit.core import EmitSettings
from planner.emit.imported import read_configuration
from planner.emit.torchtitan.program import flavour_of, program
from profiles.errors import InputError
from profiles.huggingface import load_model


def source(layout: str, job: Job | None = None, legal: bool = True, **settings: Any) -> str:
    made = program(plan_of(job or job_of(execution="torchtitan"), layout, legal=legal), EmitSettings(**settings))
    return made.files["axisplan_config.py"]


def fields(text: str, name: str) -> dict[str, Any]:
    calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name]
    return {k.arg: ast.literal_eval(k.value) for k in calls[0].keywords if k.arg}


def test_every_layer_stands_in_one_part_and_in_order() -> None:
    text = source("tp=2,pp=4,stages=7|9|9|7,zero=2")
    parts = fields(text, "ParallelismConfig")["module_fqns_per_model_part"]
    assert [len([m for m in p if m.startswith("layers.")]) for p in parts] == [7, 9, 9, 7]
    assert [m for p in parts for m in p] == ["tok_embeddings", *(f"layers.{i}" for i in range(32)), "norm", "lm_head"]


@pytest.mark.parametrize(
    ("layout", "schedule", "parts"),
    [
        ("pp=4,zero=2", "1F1B", 4), ("pp=4,zero=2,schedule=gpipe", "GPipe", 4), ("pp=4,vpp=2,zero=2", "Interleaved1F1B", 8),
        ("pp=4,zero=2,schedule=zb-v", "ZBVZeroBubble", 8), ("pp=4,zero=2,schedule=dualpipe-v", "DualPipeV", 8),
    ],
)  # fmt: skip
def test_schedules_and_their_parts(layout: str, schedule: str, parts: int) -> None:
    made = fields(source(layout), "ParallelismConfig")
    assert made["pipeline_parallel_schedule"] == schedule
    assert len(made["module_fqns_per_model_part"]) == parts


def test_a_pipeline_takes_its_microbatches_as_one_local_batch() -> None:
    text = source("tp=2,pp=4,micro_batch=2,zero=2")
    assert fields(text, "TrainingConfig") == {
        "local_batch_size": 16, "global_batch_size": 128, "seq_len": 8192, "steps": 100, "disable_cuda_graphs": True,
    }  # fmt: skip
    assert fields(text, "ParallelismConfig")["pipeline_parallel_microbatch_size"] == 2
    assert fields(source("tp=2,micro_batch=2,zero=3"), "TrainingConfig")["local_batch_size"] == 2


@pytest.mark.parametrize(("layout", "policy"), [("zero=3", "default"), ("zero=2", "never"), ("zero=0,dp_replicate=64", "default")])
def test_resharding_follows_zero(layout: str, policy: str) -> None:
    assert fields(source(layout), "ParallelismConfig")["fsdp_reshard_after_forward"] == policy


@pytest.mark.parametrize(
    ("recompute", "text"),
    [("none", "activation_checkpoint=None"), ("full", "FullAC.Config()"), ("selective(op)", "SelectiveAC.Config()")],
)
def test_activation_checkpointing(recompute: str, text: str) -> None:
    assert text in source(f"zero=3,recompute={recompute}")


@pytest.mark.parametrize(
    ("model", "layout", "reason"),
    [
        ("qwen3-30b-a3b", "tp=8,zero=3", "KV heads"),
        ("llama-3.1-8b", "tp=16,zero=3", "KV heads"),
        ("llama-3.1-8b", "tp=3,zero=3", "divide"),
        ("qwen3-30b-a3b", "tp=2,etp=2,zero=3", "no axis etp"),
        ("qwen3-4b", "pp=2,zero=2", "ties its embeddings"),
        ("llama-3.1-8b", "pp=2,zero=1", "ZeRO"),
        ("llama-3.1-8b", "pp=8,schedule=zb-h1,zero=2", "runs"),
        ("llama-3.1-8b", "pp=4,zero=3,schedule=zb-v", "resharded"),
        ("llama-3.1-8b", "cp=2,cp_kind=ring,zero=3", "allgather"),
        ("qwen3-30b-a3b", "tp=2,ep=16,dp_shard=4,dp_replicate=8,zero=3", "replica"),
        ("qwen3-30b-a3b", "ep=8,dp_shard=1,dp_replicate=64,zero=0", "must divide tp[*]cp[*]dp_shard"),
        ("llama-3.1-8b", "zero=3,recompute=0-3:full", "one choice for the whole model"),
        ("llama-3.1-8b", "pp=16,zero=2,dp=4,micro_batch=4", "microbatches"),
        ("mixtral-8x7b", "tp=2,zero=3", "no model of the shape"),
        ("deepseek-v3", "pp=2,ep=8,zero=2", "multi-token"),
        ("qwen3-30b-a3b", "tp=2,ep=8,zero=3,dispatcher=allgather", "allgather"),
        ("qwen3-30b-a3b", "tp=2,ep=8,zero=3,capacity=1.25", "capacity"),
    ],
)
def test_what_torchtitan_cannot_run_is_refused_with_the_reason(model: str, layout: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as error:
        source(layout, job_of(model, execution="torchtitan", seq_len=4096), legal=False)
    assert error.value.field == "--target"


def test_a_sequence_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(InputError, match="positions"):
        source("zero=3", job_of("qwen3-8b", execution="torchtitan", seq_len=65536), legal=False)


def test_a_model_of_the_users_own_is_taken_for_a_flavour_by_its_shape() -> None:
    assert flavour_of(renamed("llama-3.1-8b", "our-llama")) == ("llama3", "8B")
    assert flavour_of(load_model("deepseek-v2-lite")) == ("deepseek_v3", "16B")
    with pytest.raises(InputError, match=r"no model of the shape of llama-3-8b.*; nearest: llama-3.1-8b$"):
        flavour_of(load_model("llama-3-8b"))


@pytest.mark.parametrize(("precision", "converter"), [("fp8", "Float8LinearConverter"), ("mxfp8", "MXFP8LinearConverter")])
def test_low_precision_is_a_converter_of_the_model(precision: str, converter: str) -> None:
    text = source("tp=2,zero=3", job_of(cluster="b200:8x8", execution="torchtitan", precision=precision))
    assert f"from torchtitan.components.quantization import {converter}\n" in text
    assert f"converters=[{converter}.Config(" in text


def test_main_counts_the_batch_in_tokens() -> None:
    text = source("tp=2,pp=4,micro_batch=2,zero=2", options={"release": "main"})
    assert fields(text, "TrainingConfig") == {
        "num_tokens_per_microbatch_per_dp_rank": 2 * 8192, "num_tokens_per_train_step": 128 * 8192, "max_context_length": 8192,
        "steps": 100, "disable_cuda_graphs": True,
    }  # fmt: skip
    made = fields(text, "ParallelismConfig")
    assert made["num_pp_microbatches"] == 128 // 8 // 2
    assert "pipeline_parallel_microbatch_size" not in made
    assert "GrainDataLoader.Config(dataset=ConcatThenSplitPackingConfig(dataset=DATASETS['c4']))" in text


def test_an_unknown_release_is_refused() -> None:
    with pytest.raises(InputError, match="main") as error:
        source("zero=3", options={"release": "0.2"})
    assert error.value.field == "--set release"


@pytest.mark.parametrize("release", ["0.3", "main"])
@pytest.mark.parametrize("layout", ["tp=2,pp=4,micro_batch=2,zero=2", "tp=2,micro_batch=2,zero=3"])
def test_both_releases_are_read_back(layout: str, release: str, tmp_path: Path) -> None:
    job = job_of(execution="torchtitan")
    (tmp_path / "config.py").write_text(source(layout, job, options={"release": release}))
    found = read_configuration("torchtitan", tmp_path / "config.py", 64)
    assert found.layout == plan_of(job, layout).layout_object
    assert (found.job["seq_len"], found.job["global_batch"]) == (8192, 128)


def test_tokens_that_are_no_whole_sequences_are_refused(tmp_path: Path) -> None:
    text = "TrainingConfig(max_context_length=4096, num_tokens_per_microbatch_per_dp_rank=5000)"
    (tmp_path / "config.py").write_text(text)
    with pytest.raises(InputError, match="whole sequences") as error:
        read_configuration("torchtitan", tmp_path / "config.py", 8)
    assert error.value.nearest == 4096
