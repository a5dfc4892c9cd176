"""DeepSpeed: what the JSON says, what is refused with the reason, and that DeepSpeedConfig takes it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracles import Oracle
from plans import job_of, plan_of, renamed

from planner.emit.core import EmitSettings, emit
from planner.emit.deepspeed import config, program
from planner.legality import read_layout, violations
from profiles.errors import InputError


def made(layout: str, model: str = "llama-3.1-8b", **job: Any) -> dict[str, Any]:
    optimizer = job.pop("optimizer", "adamw")
    work = replace(job_of(model, execution="deepspeed", **job), optimizer=optimizer)
    return config(work, plan_of(work, layout, legal=False).layout_object)


def test_the_batch_identity_is_written_out() -> None:
    found = made("zero=3,micro_batch=2")
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (128, 2, 1)
    assert found["zero_optimization"] == {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
    assert found["bf16"] == {"enabled": True}


def test_autotp_leaves_out_the_batch_size_that_deepspeed_would_check_against_every_gpu() -> None:
    found = made("tp=4,zero=1,micro_batch=2")
    assert "train_batch_size" not in found
    assert found["tensor_parallel"]["autotp_size"] == 4
    assert found["gradient_accumulation_steps"] == 128 // (2 * 16)


def test_ulysses_and_autoep() -> None:
    assert made("cp=8,zero=2")["sequence_parallel_size"] == 8
    experts = made("ep=8,zero=2", "qwen3-30b-a3b")["expert_parallel"]
    assert experts == {"enabled": True, "autoep_size": 8, "expert_tensor_parallel_size": 1, "comm_backend": "comm"}


def test_stochastic_gradient_descent_keeps_the_moment_that_the_plan_counts() -> None:
    assert made("zero=1", optimizer="sgd")["optimizer"] == {
        "type": "SGD",
        "params": {"lr": 3e-4, "weight_decay": 0.1, "momentum": 0.9},
    }


def test_offload_and_precision() -> None:
    found = made("zero=2,offload=optimizer", precision="fp16")
    assert found["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert found["fp16"] == {"enabled": True}
    assert "bf16" not in found


REFUSED = [
    ("llama-3.1-8b", "pp=4", "no axis pp"),
    ("llama-3.1-8b", "cp=4,cp_kind=ring", "ulysses"),
    ("llama-3.1-8b", "tp=4,sp=true", "without sequence parallelism"),
    ("llama-3.1-8b", "zero=1,dp_shard=8,dp_replicate=8", "ZeRO shards over all replicas"),
    ("llama-3.1-8b", "tp=4,zero=3", "ZeRO 0, 1 and 2"),
    ("llama-3.1-8b", "recompute=selective(core_attn)", "recomputes none, full"),
    ("llama-3.1-8b", "tp=2,cp=2,zero=1", "no Ulysses beside tensor"),
    ("llama-3.1-8b", "zero=0,offload=optimizer", "ZeRO-Offload needs ZeRO 1"),
    ("qwen3-30b-a3b", "ep=8,etp=2,tp=2,zero=1", "no axis etp"),
    ("qwen3-30b-a3b", "ep=8,cp=2,zero=3", "AutoEP with ZeRO 3 excludes Ulysses"),
    ("qwen3-30b-a3b", "tp=4,zero=1", "needs ep > 1"),
    ("qwen3-30b-a3b", "ep=8,tp=2,zero=1,offload=optimizer", "no offload under AutoTP"),
    ("qwen3-30b-a3b", "ep=8,capacity=1.0,zero=1", "drops no tokens"),
    ("llama-3.1-8b", "tp=16,zero=1", "key-value heads|KV heads|kv"),
]


@pytest.mark.parametrize(("model", "layout", "reason"), REFUSED)
def test_what_deepspeed_cannot_run_is_refused_with_the_reason_before_planning_and_at_emission(
    model: str, layout: str, reason: str
) -> None:
    import re

    job = job_of(model, execution="deepspeed")
    read = read_layout(job, layout)
    found = " ".join(v.line() for v in violations(job, read))
    assert re.search(reason, found), found
    with pytest.raises(InputError, match=re.compile(reason)):
        program(plan_of(job, read, legal=False), EmitSettings())


def test_a_precision_or_an_optimizer_it_lacks_is_refused() -> None:
    with pytest.raises(InputError, match="fp8"):
        program(plan_of(job_of(execution="deepspeed", precision="fp8"), "zero=1", legal=False), EmitSettings())


def test_a_megatron_plan_is_refused_with_every_broken_rule() -> None:
    plan = plan_of(job_of(execution="megatron"), "tp=4,pp=2,micro_batch=1")
    with pytest.raises(InputError) as error:
        program(plan, EmitSettings())
    assert "no axis pp" in str(error.value)
    assert "sequence parallelism" in str(error.value)
    assert "plan with --execution deepspeed" in str(error.value)


def test_the_folder_is_whole_clean_and_inert(tmp_path: Path) -> None:
    hostile = "x$(touch pwned)'\"`\n; touch pwned"
    job = job_of(renamed("llama-3.1-8b", hostile), execution="deepspeed")
    out = tmp_path / "a b"
    emit(plan_of(job, "zero=3"), "deepspeed", "torchrun", out, EmitSettings(steps=7, data=("$(touch pwned).npy",)))
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md",
        "ds_config.json",
        "launch.sh",
        "plan.json",
        "train.json",
        "train.py",
    ]
    assert json.loads((out / "train.json").read_text())["steps"] == 7
    compile((out / "train.py").read_text(), "train.py", "exec")
    assert subprocess.run(["shellcheck", "-S", "warning", out / "launch.sh"], capture_output=True, text=True).stdout == ""
    ran = subprocess.run(
        ["bash", out / "launch.sh"], capture_output=True, text=True, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, check=False
    )
    assert ran.returncode == 1
    assert "set MODEL to" in ran.stderr
    assert not list(tmp_path.rglob("pwned"))


# -- the real parser -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deepspeed() -> Iterator[Oracle]:
    oracle = Oracle("deepspeed_config.py", "AXISPLAN_ORACLE_DEEPSPEED")
    yield oracle
    oracle.close()


@pytest.mark.slow
def test_the_parser_itself_refuses_a_broken_batch_and_we_see_an_unknown_key(deepspeed: Oracle) -> None:
    good = made("zero=3")
    assert not deepspeed.ask({"world": 64, "replicas": None, "sp": 1, "config": {**good, "train_batch_size": 60}})["ok"]
    assert deepspeed.ask({"world": 64, "replicas": None, "sp": 1, "config": {**good, "no_such_axisplan_key": 1}})["unread"] == [
        "no_such_axisplan_key"
    ]
