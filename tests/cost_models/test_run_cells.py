"""Runs from files nobody prepared: GPUs, precisions, frameworks and recompute modes as people spell them."""

from __future__ import annotations

import itertools

import pytest

from cost_models.accuracy import predict
from cost_models.flops import flops_per_token
from cost_models.run_cells import domain_of, gpu_cluster, precision_of, recompute_of, zero_of
from cost_models.runs import Run, load_runs, to_run
from profiles.errors import InputError

LLAMA = {
    "id": "r", "model_name": "llama3-8b", "layers": "32", "hidden": "4096", "ffn_hidden": "14336", "heads": "32", "kv_heads": "8",
    "vocab": "128256", "seq_len": "8192", "gpus": "64", "global_batch": "128", "micro_batch": "1", "gpu": "H100-80GB-SXM",
}  # fmt: skip
DEEPSEEK = {
    "id": "d", "model_name": "DeepSeek-V3", "layers": "61", "hidden": "7168", "ffn_hidden": "18432", "heads": "128", "vocab": "129280",
    "experts": "256", "topk": "8", "moe_ffn_hidden": "2048", "shared_expert_ffn": "2048", "first_dense_layers": "3", "mla": "1",
    "seq_len": "4096", "gpus": "256", "global_batch": "2048", "micro_batch": "1", "pp": "4", "vp": "4", "ep": "64",
}  # fmt: skip


def mfu(run: Run) -> float:
    gpu = run.job.cluster.gpu
    peak = gpu.peak_flops("bf16" if "bf16" in gpu.peaks else "fp16") * run.job.cluster.gpus
    return flops_per_token(run.job.model, run.job.seq_len).training * run.job.tokens / (predict(run).seconds * peak)


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("GB300", "gb300-nvl72"), ("GB300-NVL72", "gb300-nvl72"), ("NVIDIA GB200", "gb200-nvl72"), ("B300-270GB", "b300"),
        ("B200-192GB-SXM", "b200"), ("H200-141GB-SXM", "h200-sxm"), ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("H100 SXM5", "h100-sxm"),
        ("H100-80GB-PCIe", "h100-pcie"), ("H100-96GB-SXM-500W", "h100-sxm-96gb-500w"), ("GH200-96GB", "h100-sxm"), ("H20", "h20-sxm"),
        ("A100-SXM4-40GB", "a100-sxm-40gb"), ("A100-PCIE-40GB", "a100-pcie-40gb"), ("A100", "a100-sxm"), ("A800-80GB-SXM", "a800-sxm"),
        ("AMD Instinct MI300X", "mi300x"), ("MI300X-192GB-OAM", "mi300x"), ("MI325X", "mi325x"), ("MI355X", "mi355x"),
        ("V100-32GB", "v100-sxm"), ("RTX 4090", "rtx-4090"), ("h1000", "h1000"), ("Gaudi2", "Gaudi2"),
    ],
)  # fmt: skip
def test_a_gpu_is_known_however_it_is_written(text: str, cluster: str) -> None:
    guessed: list[str] = []
    assert gpu_cluster(text, guessed) == cluster
    assert bool(guessed) == (text == "GH200-96GB")


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("BF16", "bf16"), ("bfloat16", "bf16"), ("bf16-mixed", "bf16"), ("FP8-CS", "fp8"), ("float8 rowwise", "fp8"),
        ("fp8 hybrid", "fp8"), ("bf16/fp8", "fp8"), ("FP8-MX", "mxfp8"), ("MXFP8", "mxfp8"), ("NVFP4", "nvfp4"), ("fp4", "nvfp4"),
        ("float16", "fp16"), ("FP32", "fp32"), ("bf16 (fp32 accumulate)", "bf16"), ("", "bf16"),
    ],
)  # fmt: skip
def test_a_precision_is_known_however_it_is_written(text: str, precision: str) -> None:
    assert precision_of(text, []) == precision


def test_mixed_precision_alone_is_the_16_bits_that_the_gpu_has_and_says_so() -> None:
    guessed: list[str] = []
    assert precision_of("mixed precision", guessed) == "bf16"
    assert precision_of("fp16 mixed", guessed) == "fp16"
    assert precision_of("mixed", guessed, ("fp16", "fp32")) == "fp16"
    assert guessed == ["precision mixed precision is bf16", "precision fp16 mixed is fp16", "the GPU has no bf16 products: fp16"]


def test_a_precision_that_the_gpu_lacks_runs_in_the_next_wider_one_and_says_so() -> None:
    guessed: list[str] = []
    assert precision_of("fp8", guessed, ("fp16", "bf16", "fp32")) == "bf16"
    assert precision_of("mxfp8", guessed, ("fp8", "bf16")) == "fp8"
    assert guessed == ["the GPU has no fp8 products: bf16", "the GPU has no mxfp8 products: fp8"]
    with pytest.raises(InputError, match="fp7"):
        precision_of("fp7", guessed)


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("ZeRO-1", 1),
        ("distributed optimizer", 1),
        ("ddp", 0),
        ("FULL_SHARD", 3),
        ("SHARD_GRAD_OP", 2),
        ("fsdp2", 3),
        ("3.0", 3),
        ("zero 1 (no fsdp)", 1),
        ("no fsdp", 0),
        ("ZeRO 0", 0),
    ],
)
def test_a_zero_stage_is_known_however_it_is_written(text: str, stage: int) -> None:
    assert zero_of(text, []) == stage


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("", "none"), ("no", "none"), ("full", "full"), ("full:uniform", "full"), ("True", "full"), ("selective", "selective(core_attn)"),
        ("selective:op", "selective(op)"), ("selective:attention-core", "selective(core_attn)"),
        ("selective:mla_up_proj+mlp", "selective(mla_up_proj,mlp)"), ("selective: layernorm, moe_act", "selective(layernorm,moe_act)"),
        ("selective:layer", "0:full/2:full/4:full/6:full"), ("full:1", "0-0:full/4-4:full"), ("block 2", "0-1:full/4-5:full"),
        ("full:9", "full"), ("full:uniform:1", "full"), ("full, 1 layer per chunk", "full"), ("witchcraft", "none"),
    ],
)  # fmt: skip
def test_a_recompute_mode_is_known_however_it_is_written(text: str, choice: str) -> None:
    guessed: list[str] = []
    assert recompute_of(text, 8, guessed, stages=2) == choice
    assert (text == "witchcraft") == any("not known" in g for g in guessed)


def test_a_rack_is_filled_by_64_and_odd_counts_find_their_domain() -> None:
    guessed: list[str] = []
    assert [domain_of("gb300-nvl72", n, 4, guessed) for n in (8, 64, 72, 256, 576)] == [8, 64, 72, 64, 64]
    assert domain_of("h100-sxm", 12, 8, guessed) == 6
    assert guessed == ["domains of 6 GPUs: 12 are no multiple of 8"]


GPUS = ("GB300", "B300", "GB200", "B200", "H200-141GB-SXM", "H800-80GB-SXM", "MI300X", "MI325X", "MI355X", "A100-80GB-SXM", "H20")
FRAMEWORKS = (
    ("torchtitan", {"zero": "fsdp"}), ("Megatron-Bridge (NeMo 26.02)", {"zero": "1", "tp": "2", "sp": "1"}), ("MaxText", {"zero": "fsdp"}),
    ("KempnerForge (FSDP2)", {"zero": "hsdp"}), ("Primus (Megatron)", {"tp": "2", "pp": "2"}), ("InternEvo", {"zero": "1", "tp": "4"}),
    ("DeepSpeed", {"zero": "3"}), ("transformers + FSDP", {"zero": "FULL_SHARD"}), ("a framework of tomorrow", {}),
)  # fmt: skip


def test_any_gpu_under_any_framework_gets_a_step_time_between_a_tenth_and_the_peak() -> None:
    """A run of a dense 8B model with 8k tokens is neither below 10 % of the 16-bit peak nor, in 8 bits, above 1.4 times it (an H20's
    8-bit products are twice as fast as its 16-bit ones, and it is short of nothing else)."""
    for gpu, (framework, cells), precision in itertools.product(GPUS, FRAMEWORKS, ("bf16", "fp8")):
        run = to_run({**LLAMA, "gpu": gpu, "framework": framework, "precision": precision, "recompute": "none", **cells})
        found = mfu(run)
        assert 0.10 < found < (0.85 if run.job.precision == "bf16" else 1.4), (gpu, framework, precision, found)


@pytest.mark.parametrize(
    ("framework", "cells", "execution"),
    [
        ("LLM Foundry (Composer)", {"zero": "FULL_SHARD"}, "fsdp-2023-composer"),
        ("Megatron-DeepSpeed", {"tp": "4", "pp": "2", "zero": "1"}, "megatron-2022-vtrain"),
        ("Colossal-AI (Gemini)", {"tp": "2"}, "megatron"),
        ("Nanotron", {"tp": "4", "pp": "2"}, "megatron"),
        ("GPT-NeoX", {"tp": "2", "zero": "1"}, "megatron"),
        ("Levanter (JAX)", {"zero": "fsdp"}, "fsdp-2024-jax"),
        ("MaxText-like XLA trainer in JAX", {"zero": "3"}, "fsdp-2024-jax"),
        ("veScale", {"zero": "fsdp"}, "torchtitan"),
        ("fairseq", {"zero": "fsdp"}, "fsdp"),
        ("OLMo-core", {"zero": "hsdp"}, "fsdp"),
        ("Primus-TorchTitan", {"zero": "fsdp"}, "torchtitan-2024"),
        ("Primus (Megatron-LM)", {"tp": "1", "zero": "1"}, "megatron"),
        ("NeMo 25.09", {"tp": "2"}, "megatron-2025-nemo"),
        ("NeMo 24.07", {"tp": "2"}, "megatron-2024-nemo"),
        ("Megatron-Bridge (NeMo 26.08)", {"tp": "2"}, "megatron-2025-bridge"),
        ("Hugging Face Accelerate", {"zero": "fsdp"}, "accelerate"),
        ("in-house", {"zero": "fsdp"}, "torchtitan"),
        ("in-house", {"tp": "8"}, "megatron"),
        ("", {}, "megatron"),
    ],
)  # fmt: skip
def test_frameworks_that_no_published_row_names_get_a_preset_and_what_was_assumed(
    framework: str, cells: dict[str, str], execution: str
) -> None:
    run = to_run({**LLAMA, "gpu": "H200-141GB-SXM", "framework": framework, **cells})
    assert run.job.execution.name == execution
    known = (
        "LLM Foundry",
        "Megatron-Bridge",
        "NeMo",
        "Levanter",
        "MaxText",
        "OLMo",
        "Megatron-DeepSpeed",
        "Hugging Face",
        "Primus",
    )
    assert any("assumed" in g or "as " in g for g in run.guessed) or framework.startswith(known)
    found = predict(run)
    assert 0.1 < mfu(run) < 0.85
    assert 1.02 < found.high / found.seconds < 1.35


@pytest.mark.parametrize("gpu", ["B200", "GB200", "MI300X"])
def test_torchtitan_on_a_gpu_of_2025_is_that_of_2025(gpu: str) -> None:
    run = to_run({**LLAMA, "gpu": gpu, "framework": "torchtitan", "zero": "fsdp"})
    assert (run.job.execution.name, run.job.execution.attention) == ("torchtitan", "cudnn")
    assert "TorchTitan of mid-2025 or later" in run.guessed


@pytest.mark.parametrize("gpu", ["GB300", "B300", "GB200", "B200", "H200-141GB-SXM", "MI300X"])
def test_a_newer_gpu_trains_a_dense_model_faster_than_an_a100(gpu: str) -> None:
    cells = {"framework": "Megatron-Bridge (NeMo 26.02)", "zero": "1", "tp": "2", "pp": "2", "sp": "1"}
    times = {g: predict(to_run({**LLAMA, "gpu": g, **cells})).seconds for g in (gpu, "A100-80GB-SXM")}
    assert 1.7 < times["A100-80GB-SXM"] / times[gpu] < 8


def test_experts_over_nodes_are_slow_where_the_domain_is_eight_and_fast_in_a_rack() -> None:
    """64-way expert parallelism: all-to-all over NVLink in a rack of 72, over NICs between nodes of 8."""
    rack, nodes = (
        predict(to_run({**DEEPSEEK, "gpu": g, "framework": "Megatron-Bridge (NeMo 26.02)"})).seconds for g in ("GB300", "B300")
    )
    assert nodes > 1.5 * rack


def test_four_bits_of_a_gpu_without_a_table_are_borrowed_from_its_sibling_not_from_its_peak() -> None:
    times = {
        g: predict(
            to_run({**LLAMA, "gpu": g, "framework": "Megatron-Bridge (NeMo 26.02)", "precision": "fp4", "zero": "1"})
        ).seconds
        for g in ("B300", "GB300", "B200")
    }
    assert times["GB300"] < times["B300"] < times["B200"]


def test_packed_short_samples_and_adapters_are_known_from_what_a_row_says() -> None:
    cells = {**LLAMA, "framework": "NeMo", "zero": "1", "seq_len": "4096"}
    plain, tuned, adapted = (to_run({**cells, "notes": notes}) for notes in ("", "SFT on packed SQuAD", "PEFT LoRA"))
    assert plain.job.documents == ()
    assert tuned.job.documents == ((170, 1),)
    assert adapted.job.lora_rank == 32
    for notes in ("no LoRA", "PEFT comparison: full fine-tuning", "without LoRA"):
        assert to_run({**cells, "notes": notes}).job.lora_rank == 0
    seconds = [predict(run).seconds for run in (plain, tuned, adapted)]
    assert seconds[0] > seconds[1] > seconds[2]


def test_sequence_parallel_is_assumed_where_a_recipe_always_has_it() -> None:
    run = to_run({**LLAMA, "framework": "Megatron-Core", "tp": "4"})
    assert run.layout.sp
    assert "sequence parallel" in run.guessed
    assert not to_run({**LLAMA, "framework": "Megatron-Core", "tp": "4", "sp": "0"}).layout.sp


def test_only_hardware_that_is_not_known_is_refused() -> None:
    runs, skipped = load_runs([{**LLAMA, "gpu": "TPU v5p"}, {**LLAMA, "gpus": "60", "global_batch": "120"}])
    assert [s.why.split(":")[0] for s in skipped] == ["cluster"]
    assert runs[0].job.cluster.gpus == 60
