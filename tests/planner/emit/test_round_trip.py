"""emit -> import gives the plan back, and what is read is never run."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from plans import job_of, plan_of
from samples import layouts

from cost_models.job import Job
from cost_models.layout import Layout, even_split
from planner.emit.core import EmitSettings, emit
from planner.emit.imported import read_configuration
from planner.plan import Plan
from planner.rules.cluster import same_placement
from profiles.errors import InputError


def canonical(job: Job, layout: Layout) -> dict[str, Any]:
    """What a layout means: two that train in the same way are equal here."""
    counts = (layout.stages or even_split(job.model.num_layers, layout.chunks)) if layout.pp > 1 else ()
    sharded = layout.zero >= 1
    default = same_placement(layout, layout.order, "tp-cp-dp-pp")
    return {
        "degrees": (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp, layout.dp), "ring": (layout.ring, layout.ulysses),
        "gathered": layout.cp > 1 and layout.cp_kind == "allgather",
        "zero": layout.zero if layout.dp_shard * layout.cp > 1 or layout.zero == 1 else 0,
        "shards": layout.dp_shard if sharded and layout.zero else 1, "default_order": default, "sp": layout.sp,
        "micro_batch": layout.micro_batch,
        "schedule": layout.schedule if layout.pp > 1 else "", "counts": counts, "offload": layout.offload, "capacity": layout.capacity,
        "recompute": [(r.mode, r.modules) for r in map(layout.recompute_rules.of, range(job.model.num_layers))],
        "dispatcher": layout.dispatcher if layout.ep > 1 else "",
    }  # fmt: skip


FILES = {
    "megatron": "launch.sh", "megatron-bridge": "launch.sh", "torchtitan": "axisplan_config.py", "deepspeed": "ds_config.json",
    "accelerate": "accelerate.yaml",
}  # fmt: skip


@pytest.mark.parametrize("target", FILES)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_what_is_emitted_is_read_back_as_the_same_plan(target: str, model: str, tmp_path: Path) -> None:
    job = job_of(model, execution=target, seq_len=4096, global_batch=1536)
    for index, layout in enumerate(itertools.islice(layouts(job, 5), 20)):
        out = tmp_path / str(index)
        emit(plan_of(job, layout, legal=False), target, "torchrun", out, EmitSettings())
        found = read_configuration(target, out / FILES[target], layout.world)
        assert canonical(job, found.layout) == canonical(job, layout), str(layout)
        assert found.job == {"seq_len": 4096, "global_batch": 1536, "precision": "bf16", "optimizer": "adamw"}
        assert (found.execution, found.problems) == (target, ())


def test_a_plan_for_our_own_runtime_is_in_its_folder_as_it_is(tmp_path: Path) -> None:
    plan = plan_of(job_of(execution="axisplan"), "tp=2,pp=2,zero=1")
    emit(plan, "axisplan", "torchrun", tmp_path / "launch", EmitSettings())
    assert Plan.load(tmp_path / "launch" / "plan.json") == plan


@pytest.mark.parametrize("target", FILES)
def test_what_would_be_faster_than_what_runs_today_is_answered_by_the_commands_that_import_names(
    target: str, tmp_path: Path, invoke: Any
) -> None:
    """estimate of the imported layout, the fastest plan, and why the layout is not it: as printed, with model and cluster filled in."""
    job = job_of("llama-3.2-1b", "h100-sxm:1x8", target, 4096, 64)
    today = "tp=2,zero=2" if target in ("torchtitan", "accelerate") else "tp=2,zero=1"
    emit(plan_of(job, today), target, "torchrun", tmp_path / "launch", EmitSettings())
    code, layout, said = invoke("import", "--from", target, str(tmp_path / "launch" / FILES[target]), "--gpus", "8")
    assert code == 0
    commands = [line.partition("axisplan ")[2] for line in said.splitlines() if "axisplan " in line]
    filled = [c.replace("MODEL", "llama-3.2-1b").replace("--cluster C", "--cluster h100-sxm:1x8") for c in commands]
    words = [[w.replace("plan.json", str(tmp_path / "plan.json")) for w in shlex.split(c)] for c in filled]
    assert [w[0] for w in words] == ["estimate", "plan", "explain"]
    seconds = []
    for command in words:
        code, out, error = invoke(*command, "--json")
        assert code == 0, error
        seconds.append(json.loads(out))
    fastest = seconds[1]["estimate"]["step_seconds"]
    assert fastest < seconds[0]["step_seconds"]
    assert seconds[2]["why_not"]["slower"] == pytest.approx(seconds[0]["step_seconds"] / fastest - 1)
    assert layout.strip() in " ".join(words[2])


def test_a_script_with_arrays_variables_and_continuations_is_read(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        """#!/bin/bash
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-4}
TP=4; export PP=2
: "${MBS:=2}"
MODEL_ARGS=(
    --num-layers 32   # the depth
    --hidden-size 4096 --num-attention-heads 32 --seq-length 4096
    --max-position-embeddings 4096
)
PARALLEL="--tensor-model-parallel-size ${TP} --pipeline-model-parallel-size $PP --sequence-parallel"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \\
    ${MODEL_ARGS[@]} $PARALLEL --micro-batch-size ${MBS} --global-batch-size 256 \\
    --use-distributed-optimizer --bf16 --recompute-granularity full --recompute-method block --recompute-num-layers 2 2>&1 | tee log
"""
    )
    found = read_configuration("megatron", script)
    assert found.layout.text() == Layout.parse(
        "tp=4,pp=2,dp=4,micro_batch=2,recompute=0-1:full/16-17:full", 32
    ).text()  # fmt: skip
    assert found.job["global_batch"] == 256
    assert found.model == {"layers": 32, "hidden": 4096, "heads": 32}


def test_expert_tensor_parallelism_left_out_is_megatrons_default_and_said(tmp_path: Path) -> None:
    file = tmp_path / "args"
    file.write_text(
        "--num-layers 4 --num-experts 8 --tensor-model-parallel-size 4 --expert-model-parallel-size 2 --micro-batch-size 1"
    )
    found = read_configuration("megatron", file, 8)
    assert found.layout.etp == 4
    assert any("expert-tensor" in note for note in found.notes)


@pytest.mark.parametrize(
    "text",
    [
        "--tensor-model-parallel-size $(touch {path})", "`touch {path}` --num-layers 4", "--num-layers '$(touch {path})' --micro-batch-size 1",
        "eval 'touch {path}'; --micro-batch-size 1 --num-layers x",
    ],
)  # fmt: skip
def test_nothing_in_a_script_is_run(text: str, tmp_path: Path) -> None:
    mark, file = tmp_path / "ran", tmp_path / "train.sh"
    file.write_text(text.format(path=mark))
    with contextlib.suppress(InputError):
        read_configuration("megatron", file, 8)
    assert not mark.exists()


def test_nothing_in_a_torchtitan_configuration_is_run(tmp_path: Path) -> None:
    mark, file = tmp_path / "ran", tmp_path / "config.py"
    file.write_text(
        f"open({str(mark)!r}, 'w')\nParallelismConfig(tensor_parallel_degree=2, pipeline_parallel_degree=__import__('os').getpid())\n"
    )
    found = read_configuration("torchtitan", file, 8)
    assert not mark.exists()
    assert found.layout.tp == 2
    assert any("pipeline_parallel_degree is computed" in note for note in found.notes)


@pytest.mark.parametrize(
    ("source", "text", "field"),
    [
        ("megatron", "nothing here", "FILE"),
        ("megatron", "--num-layers 4 --tensor-model-parallel-size two", "--tensor-model-parallel-size"),
        ("megatron", "--num-layers 4 --context-parallel-size 2 --cp-comm-type p2p a2a", "--cp-comm-type"),
        (
            "megatron",
            "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|t|tL'",
            "--pipeline-model-parallel-layout",
        ),
        ("torchtitan", "def f(:", "FILE"),
        ("torchtitan", "x = 1", "FILE"),
        ("torchtitan", "ParallelismConfig(tensor_parallel_degree='2')", "parallelism.tensor_parallel_degree"),
        (
            "torchtitan",
            "ParallelismConfig(pipeline_parallel_degree=2, module_fqns_per_model_part=[['tok_embeddings', 'layers.0'], ['layers.2', 'norm']])",
            "parallelism.module_fqns_per_model_part",
        ),
    ],
)
def test_what_cannot_be_understood_is_named(source: str, text: str, field: str, tmp_path: Path) -> None:
    file = tmp_path / "configuration"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        read_configuration(source, file, 8)
    assert error.value.field == field


def test_the_number_of_gpus_is_asked_for_where_the_file_does_not_say(tmp_path: Path) -> None:
    file = tmp_path / "args"
    file.write_text("--num-layers 4 --tensor-model-parallel-size 2 --micro-batch-size 1")
    with pytest.raises(InputError, match="--gpus"):
        read_configuration("megatron", file)
