"""What the targets' own parsers let pass (targets.md 0, 1.2 to 1.4, 2, 4, 5, 6) is said of a configuration that is imported, a test each.

That plans of ours never hold it is tested beside each target's emission.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.emit.imported import Imported, read_configuration

LLAMA = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 "
    "--seq-length 8192 --vocab-size 128256 --micro-batch-size 1 --bf16 --use-distributed-optimizer"
)
QWEN = (
    "--num-layers 48 --hidden-size 2048 --num-attention-heads 32 --num-query-groups 4 --kv-channels 128 --num-experts 128 "
    "--moe-router-topk 8 --moe-ffn-hidden-size 768 --seq-length 8192 --vocab-size 151936 --micro-batch-size 1 --bf16 "
    "--use-distributed-optimizer --expert-tensor-parallel-size 1"
)


def read(source: str, text: str, tmp_path: Path, gpus: int | None = 64) -> Imported:
    (tmp_path / "file").write_text(text)
    return read_configuration(source, tmp_path / "file", gpus)


MEGATRON = [
    ("1.4 (1)", f"{LLAMA} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3 --global-batch-size 128",
     r"--num-virtual-stages-per-pipeline-rank 3: 32 layers do not divide by pp \* it = 12"),
    ("1.4 (2)", f"{LLAMA} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
     "--sequence-parallel --global-batch-size 12", "microbatches_in_groups"),
    ("1.4 (2), B05", f"{LLAMA} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
     "--sequence-parallel --global-batch-size 4", "enough_microbatches"),
    ("1.4 (3)", f"{QWEN} --expert-model-parallel-size 8 --moe-layer-freq ([0]*1+[1]*46) --global-batch-size 128",
     r"--moe-layer-freq .* is for 47 layers, the model has 48"),
    ("1.4 (4)", f"{QWEN} --tensor-model-parallel-size 4 --expert-model-parallel-size 8 --global-batch-size 128", "experts_need_sequence"),
    ("1.4 (5)", f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 8 --cp-comm-type a2a "
     "--global-batch-size 128", "kv_heads_divide_ulysses"),
    ("1.4 (5), a2a+p2p", f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 16 --cp-comm-type a2a+p2p "
     "--hierarchical-context-parallel-sizes 8 2 --global-batch-size 128", "kv_heads_divide_ulysses"),
    ("1.4 (6)", f"{LLAMA} --pipeline-model-parallel-size 4 --recompute-granularity full --recompute-method block --recompute-num-layers 9 "
     "--global-batch-size 128", "--recompute-num-layers 9 is more than the 8 layers of a stage"),
    ("1.4 (9), sequence", f"{LLAMA.replace('8192', '8190')} --tensor-model-parallel-size 4 --sequence-parallel --global-batch-size 128",
     "sequence_divides"),
    ("1.4 (9), width", f"{LLAMA.replace('14336', '14335')} --tensor-model-parallel-size 4 --sequence-parallel --global-batch-size 128",
     "widths_divide_tp"),
    ("9", f"{LLAMA} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --pipeline-model-parallel-size 2 "
     "--global-batch-size 128", "zero_and_pipeline"),
    ("B15", f"{LLAMA} --multi-latent-attention --kv-lora-rank 512 --context-parallel-size 2 --cp-comm-type a2a --global-batch-size 128",
     "latent_attention_and_ulysses"),
    ("6, c10d", f"torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint head:1 pretrain_gpt.py {LLAMA} "
     "--global-batch-size 128", "numbers nodes as they arrive"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "text", "problem"), MEGATRON, ids=[line for line, _, _ in MEGATRON])
def test_what_megatrons_parser_lets_pass_is_a_problem(line: str, text: str, problem: str, tmp_path: Path) -> None:
    found = read("megatron", text.replace("(", "'(").replace(")", ")'") if "moe-layer-freq" in text else text, tmp_path)
    assert [p for p in found.problems if re.search(problem, p)], found.problems


def test_multi_token_prediction_before_the_last_stage_is_refused(tmp_path: Path) -> None:
    """1.4 (7)."""
    layout = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*16|t*15m|tL|'"
    with pytest.raises(Exception, match="before the last stage"):
        read("megatron", f"{LLAMA} {layout}", tmp_path)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--sequence-parallel", "turns it off without a word"),  # 1.2 (13)
        ("--multi-latent-attention", "Megatron-LM's command line takes 32"),  # 1.1
    ],
)
def test_what_megatron_takes_silently_is_noted(flags: str, note: str, tmp_path: Path) -> None:
    assert any(note in n for n in read("megatron", f"{LLAMA} {flags}", tmp_path).notes)


def test_a_sound_command_line_has_no_problem(tmp_path: Path) -> None:
    for text in (
        f"{LLAMA} --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 --global-batch-size 128",
        f"{QWEN} --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 --global-batch-size 128",
        "--num-layers 32 --tensor-model-parallel-size 4 --sequence-parallel --micro-batch-size 1",
    ):
        assert read("megatron", text, tmp_path).problems == ()


def test_a_field_that_is_added_to_bridges_configuration_is_a_problem(tmp_path: Path) -> None:
    """3: ``+key=`` is taken silently."""
    found = read(
        "megatron-bridge",
        "model.num_layers=32 model.tensor_model_parallel_size=2 +model.no_such=1 train.micro_batch_size=1",
        tmp_path,
    )
    assert found.layout.tp == 2
    assert [p.split(",")[0] for p in found.problems] == ["model.no_such is added with +"]


TITAN = "ParallelismConfig({})\nTrainingConfig(local_batch_size=8, global_batch_size=512, seq_len=8192)\nmodel_registry({})\n"


@pytest.mark.parametrize(
    ("parallel", "registry", "problem"),
    [
        ("data_parallel_replicate_degree=8, data_parallel_shard_degree=8, expert_parallel_degree=16", "'30B-A3B'", "experts_inside_a_replica"),
        ("tensor_parallel_degree=8", "'30B-A3B'", "kv_heads_divide_tp"),  # B01
        ("pipeline_parallel_degree=8, pipeline_parallel_schedule='1F1B', pipeline_parallel_microbatch_size=16", "'8B'", "enough_microbatches"),
    ],
)  # fmt: skip
def test_what_torchtitans_parser_lets_pass_is_a_problem(parallel: str, registry: str, problem: str, tmp_path: Path) -> None:
    found = read("torchtitan", TITAN.format(parallel, registry), tmp_path)
    assert any(problem in p for p in found.problems), found


def test_a_layer_that_no_torchtitan_stage_names_is_refused(tmp_path: Path) -> None:
    parts = "[['tok_embeddings', 'layers.0'], ['layers.2', 'norm', 'lm_head']]"
    with pytest.raises(Exception, match="drops what is not named"):
        read("torchtitan", f"ParallelismConfig(pipeline_parallel_degree=2, module_fqns_per_model_part={parts})", tmp_path)


SOUND = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
DEEPSPEED: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimisation": {"stage": 3}}, "zero_optimisation is no key that deepspeed reads, and it does not say so; nearest: zero_optimization"),
    ({"expert_parallel": {"enabled": True, "ep_size": 8}}, "expert_parallel.ep_size is no key that deepspeed reads"),
    ({"tensor_parallel": {"autotp_size": 4}, "train_batch_size": 32}, "checked against every GPU instead of GPUs / 4"),
    ({"tensor_parallel": {"autotp_size": 4}, "zero_optimization": {"stage": 3}}, "zero_and_tensor"),  # B18
    ({"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}, "tensor_and_ulysses"),
    ({"expert_parallel": {"enabled": True, "autoep_size": 8}, "sequence_parallel_size": 2, "zero_optimization": {"stage": 3}},
     "AutoEP with ZeRO 3 excludes Ulysses"),
    ({"expert_parallel": {"enabled": True, "autoep_size": 8}, "tensor_parallel": {"autotp_size": 2},
      "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "no offload under AutoTP with AutoEP"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "problem"), DEEPSPEED)
def test_what_deepspeeds_parser_lets_pass_is_a_problem(document: dict[str, Any], problem: str, tmp_path: Path) -> None:
    found = read("deepspeed", json.dumps({**SOUND, **document}), tmp_path)
    assert any(problem in p for p in found.problems), found.problems


def test_a_sound_deepspeed_file_has_no_problem(tmp_path: Path) -> None:
    for extra in ({}, {"tensor_parallel": {"autotp_size": 4}}, {"zero_optimization": {"stage": 3}}, {"wall_clock_breakdown": True}):
        assert read("deepspeed", json.dumps({**SOUND, **extra}), tmp_path).problems == ()


DEGREES = {"parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 32}
ACCELERATE: list[tuple[dict[str, Any], str]] = [
    ({"distributed_type": "MULTI_GPU", "parallelism_config": DEGREES}, "beside distributed_type MULTI_GPU has no effect"),
    ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}, "parallelism_config": DEGREES}, "beside fsdp_version 1 has no effect"),
    ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard": True}},
     "fsdp_config.fsdp_reshard is no key that accelerate reads"),
    ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": {**DEGREES, "parallelism_config_pp_size": 2}},
     "parallelism_config.parallelism_config_pp_size is no key"),
    ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2},
      "parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_dp_replicate_size": 32}}, "replication_needs_sharding"),  # B12
]  # fmt: skip


@pytest.mark.parametrize(("document", "problem"), ACCELERATE)
def test_what_accelerates_loader_lets_pass_is_a_problem(document: dict[str, Any], problem: str, tmp_path: Path) -> None:
    found = read("accelerate", yaml.safe_dump({"num_processes": 64, "mixed_precision": "bf16", **document}), tmp_path, None)
    assert any(problem in p for p in found.problems), found.problems


def test_degrees_that_do_not_fill_the_processes_are_refused(tmp_path: Path) -> None:
    document = {"num_processes": 8, "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": DEGREES}
    with pytest.raises(Exception, match="8"):
        read("accelerate", yaml.safe_dump(document), tmp_path, None)


def test_the_command_prints_problems_apart_from_notes(tmp_path: Path, invoke: Any) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**SOUND, "zero_optimisation": {"stage": 3}}))
    code, out, err = invoke("import", "--from", "deepspeed", str(tmp_path / "ds.json"), "--gpus", "8")
    assert code == 0
    assert out.startswith("tp=1")
    assert "problem: zero_optimisation is no key" in err
    assert "note: recompute is the model's" in err
    code, out, _ = invoke("import", "--from", "deepspeed", str(tmp_path / "ds.json"), "--gpus", "8", "--json")
    assert [p.split(" is ")[0] for p in json.loads(out)["problems"]] == ["zero_optimisation"]
