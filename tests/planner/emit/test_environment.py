"""Shared environment: the allocator's rule table (cases.md I06), and nothing invented about the network."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import job_of, plan_of
from starts import NEEDED, commands

from cost_models.execution import load_execution
from planner.emit.core import EmitSettings, emit
from planner.emit.environment import Facts, allocator, capability, network, shared, skypilot_name
from planner.plan import Plan
from profiles.errors import InputError

ON, OFF, REGISTER = "expandable_segments:True", "expandable_segments:False", ("NCCL_GRAPH_REGISTER", "0")
RULES = [
    (Facts("megatron", 9), [ON]),
    (Facts("megatron", 9, cuda_graphs=True), [ON, REGISTER]),
    (Facts("megatron", 10, cuda_graphs=True), [ON]),
    (Facts("megatron", None, cuda_graphs=True), [ON, REGISTER]),
    (Facts("torchtitan", 9, cp=2, cuda_graphs=True), [OFF]),
    (Facts("torchtitan", 9, cp=2), [ON]),
    (Facts("torchtitan", 9, cuda_graphs=True), [ON, REGISTER]),
    (Facts("megatron", 9, uccl_ep=True), [OFF]),
    (Facts("deepspeed", 0), []),
]


@pytest.mark.parametrize(("facts", "wanted"), RULES)
def test_expandable_segments_where_nothing_breaks_with_them(facts: Facts, wanted: list[object]) -> None:
    found = [v.value if v.name == "PYTORCH_CUDA_ALLOC_CONF" else (v.name, v.value) for v in allocator(facts)]
    assert found == wanted
    assert all(len(v.reason) > 20 for v in allocator(facts))


def test_interfaces_are_suggested_in_comments_and_never_set() -> None:
    site = [v for v in network(Facts("megatron", 9, nodes=4)) if v.name.startswith(("NCCL_SOCKET", "NCCL_IB"))]
    assert {v.how for v in site} == {"suggest"}
    assert all(line.startswith("#") for v in site for line in v.shell().splitlines())
    assert not [v for v in network(Facts("megatron", 9, nodes=1)) if v.how == "suggest"]


def test_a_cpu_has_no_cuda_environment() -> None:
    job = job_of("llama-tiny", "cpu:1x2", "axisplan", seq_len=64, global_batch=8, precision="fp32")
    assert [v.name for v in shared(plan_of(job, "tp=2,zero=1"), "axisplan")] == ["OMP_NUM_THREADS"]


def test_every_built_in_gpu_is_known() -> None:
    from importlib import resources

    names = [f.name[:-5] for f in (resources.files("profiles") / "data" / "gpus").iterdir() if f.name.endswith(".yaml")]
    assert [n for n in names if not n.startswith("cpu") and capability(n) is None] == []
    assert (capability("h100-sxm-80gb"), capability("b200-sxm-180gb"), capability("mine")) == (9, 10, None)
    assert (skypilot_name("h100-sxm-80gb"), skypilot_name("mine")) == ("H100", None)


def launch_script(
    tmp_path: Path, target: str, model: str, layout: str, facts: dict[str, str] | None = None, **settings: Any
) -> str:
    job = replace(job_of(model, "h100-sxm:8x8", target), execution=load_execution(target, facts or {}))
    emit(plan_of(job, layout), target, "torchrun", tmp_path / "launch", EmitSettings(**settings))
    return (tmp_path / "launch" / "launch.sh").read_text()


@pytest.mark.parametrize(
    ("target", "model", "layout", "facts", "options", "lines"),
    [
        ("megatron", "llama-3.1-8b", "tp=2", {"graphs": "partial"}, {}, [f'"${{PYTORCH_CUDA_ALLOC_CONF:={ON}}}"', "export NCCL_GRAPH_REGISTER=0"]),
        ("torchtitan", "llama-3.1-8b", "cp=2,cp_kind=allgather,zero=3", {"graphs": "full"}, {}, [f"export PYTORCH_CUDA_ALLOC_CONF={OFF}"]),
        ("megatron", "qwen3-30b-a3b", "ep=8,etp=1,dispatcher=deepep", {}, {"deepep": "uccl"}, [f"export PYTORCH_CUDA_ALLOC_CONF={OFF}"]),
        ("megatron", "qwen3-30b-a3b", "ep=8,etp=1,dispatcher=deepep", {}, {}, [f'"${{PYTORCH_CUDA_ALLOC_CONF:={ON}}}"']),
        ("torchtitan", "qwen3-30b-a3b", "ep=8,zero=3,dispatcher=deepep", {}, {"deepep": "uccl"}, [f"export PYTORCH_CUDA_ALLOC_CONF={OFF}"]),
        ("deepspeed", "qwen3-30b-a3b", "ep=8,zero=1,dispatcher=deepep", {}, {"deepep": "uccl"}, [f"export PYTORCH_CUDA_ALLOC_CONF={OFF}"]),
    ],
)  # fmt: skip
def test_each_row_of_the_allocators_table_reaches_launch_sh(
    tmp_path: Path, target: str, model: str, layout: str, facts: dict[str, str], options: dict[str, str], lines: list[str]
) -> None:
    """cases.md I06."""
    script = launch_script(tmp_path, target, model, layout, facts, options=options)
    assert [line for line in lines if line not in script] == []


def test_variables_are_passed_through_inert_with_a_reason_and_recorded_in_the_plan(tmp_path: Path, invoke: Any) -> None:
    """cases.md I05."""
    hostile = "$(touch pwned) 'x' \"y\"\nz"
    given = {"CUDA_LAUNCH_BLOCKING": "1", "MINE": hostile}
    launch_script(tmp_path, "megatron", "llama-3.1-8b", "tp=2", environment=given)
    assert Plan.load(tmp_path / "launch" / "plan.json").environment == given
    made = tmp_path / "bin"
    commands(made)
    (made / "torchrun").write_text('#!/bin/bash\nprintf %s "$CUDA_LAUNCH_BLOCKING$MINE"\n')
    env = {**NEEDED, "PATH": f"{made}:/usr/bin:/bin", "NODE_RANK": "0"}
    done = subprocess.run(["bash", str(tmp_path / "launch" / "launch.sh")], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1" + hostile
    assert not list(tmp_path.rglob("pwned"))
    assert (
        "# Passed through (emit --env), after all others.\nexport CUDA_LAUNCH_BLOCKING=1\n"
        in (tmp_path / "launch" / "launch.sh").read_text()
    )


@pytest.mark.parametrize("name", ["1A", "A B", "A;id", "$(id)", ""])
def test_what_is_no_name_of_a_variable_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--env"):
        launch_script(tmp_path, "megatron", "llama-3.1-8b", "tp=2", environment={name: "1"})
    assert not list(tmp_path.iterdir())


def test_the_command_passes_variables_through(tmp_path: Path, invoke: Any) -> None:
    plan_of(job_of(cluster="h100-sxm:1x8"), "tp=2").save(tmp_path / "plan.json")
    arguments = ["emit", str(tmp_path / "plan.json"), "--out", str(tmp_path / "out"), "--env"]
    assert invoke(*arguments, "A=b=c")[0] == 0
    assert Plan.load(tmp_path / "out" / "plan.json").environment == {"A": "b=c"}
    code, _, error = invoke(*arguments, "A")
    assert (code, error.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("target", "graphs", "layout", "rule"),
    [
        ("axisplan", "partial", "tp=2", "runtime_captures_graphs"), ("deepspeed", "full", "zero=1", "runtime_captures_graphs"),
        ("accelerate", "full", "zero=3", "runtime_captures_graphs"), ("torchtitan", "partial", "zero=3", "runtime_captures_graphs"),
        ("torchtitan", "full", "pp=2,zero=2", "graphs_suit_the_layout"), ("megatron", "partial", "tp=2,recompute=full", "graphs_suit_the_layout"),
    ],
)  # fmt: skip
def test_graphs_that_a_target_does_not_capture_are_refused(
    target: str, graphs: str, layout: str, rule: str, tmp_path: Path
) -> None:
    job = replace(job_of("llama-3.1-8b", "h100-sxm:8x8", target), execution=load_execution(target, {"graphs": graphs}))
    with pytest.raises(InputError, match=rule):
        emit(plan_of(job, layout, legal=False), target, "torchrun", tmp_path / "x")


def test_graphs_of_megatron_have_their_flags(tmp_path: Path) -> None:
    partial = launch_script(tmp_path, "megatron", "qwen3-30b-a3b", "ep=8,etp=1", {"graphs": "partial"})
    assert "  --cuda-graph-impl transformer_engine\n  --cuda-graph-modules attn moe_router\n" in partial
    full = launch_script(tmp_path, "megatron", "llama-3.1-8b", "tp=2,recompute=full", {"graphs": "full"})
    assert "  --cuda-graph-impl full_iteration\n  --no-check-for-nan-in-loss-and-grad\n" in full
