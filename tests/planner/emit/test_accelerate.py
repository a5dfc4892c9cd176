"""Accelerate: the YAML, the environment of launch.sh, what is refused, and that Accelerate's own launcher agrees."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from plans import job_of, plan_of, renamed

from planner.emit.accelerate import config, exported, program
from planner.emit.core import EmitSettings, emit
from planner.legality import read_layout, violations
from profiles.errors import InputError


def test_zero_3_is_fsdp2_that_reshards_and_zero_2_one_that_does_not() -> None:
    job = job_of(execution="accelerate")
    for zero, reshards in ((3, True), (2, False)):
        made = config(job, read_layout(job, f"zero={zero}"))
        assert made["distributed_type"] == "FSDP"
        assert made["fsdp_config"]["fsdp_version"] == 2
        assert made["fsdp_config"]["fsdp_reshard_after_forward"] is reshards


def test_plain_data_parallelism_has_neither_fsdp_nor_a_parallelism_config() -> None:
    job = job_of(execution="accelerate")
    made = config(job, read_layout(job, "zero=0"))
    assert made["distributed_type"] == "MULTI_GPU"
    assert "parallelism_config" not in made
    assert exported(made) == {"ACCELERATE_MIXED_PRECISION": "bf16"}


def test_the_degrees_are_the_plans_and_fill_the_world() -> None:
    job = job_of(execution="accelerate")
    degrees = config(job, read_layout(job, "tp=4,cp=2,dp_replicate=2,dp_shard=4,zero=3"))["parallelism_config"]
    sizes = [degrees[f"parallelism_config_{axis}_size"] for axis in ("tp", "cp", "dp_replicate", "dp_shard")]
    assert sizes == [4, 2, 2, 4]
    assert degrees["parallelism_config_cp_comm_strategy"] == "alltoall"


REFUSED = [
    ("pp=2", "no axis pp"),
    ("tp=64,zero=0", "TP only beside FSDP2"),
    ("tp=4,dp_replicate=16,dp_shard=1,zero=0", "needs dp_shard > 1"),
    ("cp=4,cp_kind=ulysses,zero=3", "ring, allgather"),
    ("tp=4,sp=true,zero=3", "without sequence parallelism"),
    ("zero=1", "ZeRO 0, 2, 3"),
    ("recompute=selective(op),zero=3", "recomputes none, full"),
    ("tp=16,zero=3", "KV|kv|key"),
]


@pytest.mark.parametrize(("layout", "reason"), REFUSED)
def test_what_accelerate_cannot_run_is_refused_with_the_reason(layout: str, reason: str) -> None:
    import re

    job = job_of(execution="accelerate")
    read = read_layout(job, layout)
    assert re.search(reason, " ".join(v.line() for v in violations(job, read)))
    with pytest.raises(InputError, match=reason):
        program(plan_of(job, read, legal=False), EmitSettings())


def test_experts_are_refused() -> None:
    job = job_of("qwen3-30b-a3b", execution="accelerate")
    with pytest.raises(InputError, match="no axis ep"):
        program(plan_of(job, read_layout(job, "ep=8,zero=3"), legal=False), EmitSettings())


def test_the_folder_is_whole_clean_and_inert(tmp_path: Path) -> None:
    hostile = "x: $(touch pwned)'\"`\n- touch pwned"
    job = job_of(renamed("llama-3.1-8b", hostile), execution="accelerate")
    out = tmp_path / "a b"
    emit(plan_of(job, "zero=3,tp=2"), "accelerate", "torchrun", out, EmitSettings())
    found = yaml.safe_load((out / "accelerate.yaml").read_text())
    assert found["num_processes"] == 64
    compile((out / "train.py").read_text(), "train.py", "exec")
    assert subprocess.run(["shellcheck", "-S", "warning", out / "launch.sh"], capture_output=True, text=True).stdout == ""
    ran = subprocess.run(
        ["bash", out / "launch.sh"], capture_output=True, text=True, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, check=False
    )
    assert ran.returncode == 1
    assert "set MODEL to" in ran.stderr
    assert not list(tmp_path.rglob("pwned"))


def test_every_variable_of_launch_sh_has_a_reason() -> None:
    job = job_of(execution="accelerate")
    made = program(plan_of(job, "zero=3,tp=2,cp=2"), EmitSettings())
    assert [v.name for v in made.environment if len(v.reason) < 10] == []
