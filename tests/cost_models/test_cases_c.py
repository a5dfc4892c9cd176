"""Group C of the field's cases, and E03: which layout is faster, by the sign that users measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.memory import stage_memory
from cost_models.step import StepEstimate, estimate
from profiles.hardware import load_cluster
from profiles.huggingface import load_model
from profiles.model import Attention, Layer, Mlp, ModelSpec, Moe, uniform


def gpt(hidden: int, layers: int, heads: int, vocab: int = 50432, **fields: object) -> ModelSpec:
    layer = Layer(mixer=Attention(heads=heads, kv_heads=heads, head_dim=hidden // heads), ffn=Mlp(width=4 * hidden, gated=False))
    return uniform("gpt", layer, layers, hidden=hidden, vocab=vocab, **fields)


def step(job: Job, text: str) -> StepEstimate:
    return estimate(job, Layout.parse(text, job.cluster.gpus), detail=False)


def seconds(job: Job, text: str) -> float:
    return step(job, text).step_seconds


def test_c01_pipeline_beats_tensor_parallelism_in_a_node_only_with_many_microbatches() -> None:
    # Megatron-LM #258: BERT 8B, one DGX A100, PP 8 over 30 % faster than TP 8 with large gradient accumulation
    bert = gpt(3072, 72, 32, 30522)
    for microbatches, faster in ((128, True), (8, False)):
        job = Job(bert, load_cluster("a100-sxm:1x8"), load_execution("megatron-2021"), 512, 16 * microbatches, "fp16")
        tensor, pipeline = seconds(job, "tp=8,micro_batch=16"), seconds(job, "pp=8,dp=1,micro_batch=16")
        assert (tensor > 1.3 * pipeline) if faster else (tensor < pipeline)


@pytest.mark.parametrize("execution", ["megatron-2021", "deepspeed", "megatron"])
def test_c02_a_20b_model_on_large_gpus_runs_faster_without_a_pipeline(execution: str) -> None:
    # gpt-neox #903: 128 GPUs, sequence 4096, PP 4 x MP 2 at 33 TFLOP/s, PP 1 x MP 2 at 170 (a network fault suspected: the sign
    # counts)
    job = Job(gpt(6144, 44, 64), load_cluster("a100-sxm:16x8"), load_execution(execution), 4096, 256, "fp16")
    assert seconds(job, "tp=2,pp=1") < 0.9 * seconds(job, "tp=2,pp=4")


def test_c05_fewer_stages_and_larger_microbatches_win_on_b300_and_more_so_in_low_precision() -> None:
    # Megatron-Bridge #3385: DeepSeek-V3, PP 16 MBS 1 -> PP 8 MBS 2 with partial graphs: BF16 +3 %, FP8 +11 %, NVFP4 +30 %
    gains = []
    for precision in ("bf16", "fp8", "nvfp4"):
        job = Job(
            load_model("deepseek-v3"),
            load_cluster("b300:32x8"),
            load_execution("megatron-2025-bridge"),
            4096,
            4096,
            precision,
            moe_imbalance=1.0,
        )
        graphs = replace(job, execution=load_execution("megatron-2025-bridge", {"graphs": "partial"}))
        gains.append(seconds(job, "pp=16,ep=8,micro_batch=1") / seconds(graphs, "pp=8,ep=8,micro_batch=2"))
    assert 1.0 < gains[0] < gains[1] < gains[2]


def moe(experts: int) -> ModelSpec:
    layer = Layer(mixer=Attention(heads=32, kv_heads=8, head_dim=128), ffn=Moe(experts=experts, top_k=8, width=1024))
    return uniform("moe", layer, 32, hidden=4096, vocab=128256)


def test_c07_expert_parallelism_pays_for_512_experts_and_not_for_64() -> None:
    # marin #7332: GB200 x64, 512 experts top-8: EP 1 6 % MFU, EP 8 12.6, EP 16 13.7, EP 64 14.4; with 64 experts the order is
    # reversed
    times = {}
    for experts in (64, 512):
        job = Job(moe(experts), load_cluster("gb200-nvl72:1x64"), load_execution("fsdp"), 4096, 256, moe_imbalance=1.0)
        times[experts] = [seconds(job, f"dp=64,zero=3,ep={ep},micro_batch=4") for ep in (1, 8, 16, 64)]
    assert times[64][0] == min(times[64])
    assert times[512][0] > 1.8 * times[512][1]
    assert times[512][1] > 0.99 * times[512][2]


@pytest.mark.parametrize("ep", [4, 8])
def test_c10_in_one_node_a_plain_all_to_all_beats_deepep(ep: int) -> None:
    # Megatron-LM #1456: DeepEP slower than all-to-all at EP 4 PP 2 in one node
    job = Job(load_model("mixtral-8x7b"), load_cluster("h100-sxm:1x8"), load_execution("megatron"), 4096, 128, moe_imbalance=1.0)
    assert seconds(job, f"ep={ep},dp=8,dispatcher=alltoall") < seconds(job, f"ep={ep},dp=8,dispatcher=deepep")


def test_c10_small_experts_and_small_top_k_stay_with_all_to_all_even_at_ep_64() -> None:
    # Megatron-Bridge #3561: GPT-OSS-120B EP 64 on GB200: all-to-all 423.6 against HybridEP 406.6 TFLOP/s
    job = Job(
        load_model("gpt-oss-120b"),
        load_cluster("gb200-nvl72:1x64"),
        load_execution("megatron-2025-bridge"),
        4096,
        1280,
        moe_imbalance=1.0,
    )
    plain, hybrid = (seconds(job, f"dp=64,ep=64,micro_batch=4,dispatcher={d}") for d in ("alltoall", "hybridep"))
    assert plain < hybrid < 1.08 * plain


@pytest.mark.parametrize("ep", [32, 64])
def test_c10_deepep_wins_across_nodes_with_a_large_top_k(ep: int) -> None:
    job = Job(load_model("deepseek-v3"), load_cluster("h100-sxm:32x8"), load_execution("megatron"), 4096, 4096, moe_imbalance=1.0)
    assert seconds(job, f"pp=4,ep={ep},dispatcher=deepep") < seconds(job, f"pp=4,ep={ep},dispatcher=alltoall")


@pytest.mark.parametrize("cluster", ["h100-sxm:1x4", "h100-pcie:1x4", "rtx-4090:1x4"])
def test_c13_a_1b_model_on_four_gpus_is_replicated_not_sharded(cluster: str) -> None:
    # OLMo #762: 1B on 4 GPUs, micro batch 2: DDP 8,034 tokens/s, FSDP 1,747
    layer = Layer(mixer=Attention(heads=16, kv_heads=8, head_dim=128), ffn=Mlp(width=8192))
    model = uniform("1b", layer, 16, hidden=2048, vocab=50304)
    job = Job(model, load_cluster(cluster), load_execution("fsdp"), 2048, 64)
    sharded = seconds(job, "dp_shard=4,zero=3,micro_batch=2")
    assert seconds(job, "dp_shard=1,dp_replicate=4,zero=0,micro_batch=2") < sharded
    assert seconds(job, "dp_shard=4,zero=1,micro_batch=2") < sharded


def test_c13_fsdp_communicates_every_microbatch_unless_it_keeps_the_gradients() -> None:
    # cosmos-framework #161: HSDP over Ethernet, accumulation 4 takes four times as long; pytorch PR #126166: without the reduction
    # the unsharded gradients stay in memory
    job = Job(gpt(2048, 16, 16), load_cluster("a100-sxm:2x8"), load_execution("fsdp"), 2048, 64)
    once = replace(job, execution=load_execution("fsdp", {"accumulates_unsharded": "true"}))
    sent = [sum(step(j, "dp=16,zero=3,micro_batch=1").bytes_sent["dp"].values()) for j in (job, once)]
    parameters = job.model.parameters.total
    layout = Layout.parse("dp=16,zero=3,micro_batch=1", 16)
    more = stage_memory(once, layout)[0].peak_allocated - stage_memory(job, layout)[0].peak_allocated
    assert more == pytest.approx(4 * parameters, rel=0.2)
    assert sent[0] - sent[1] == pytest.approx(3 * job.execution.reduce_bytes * parameters * 15 / 16, rel=0.01)


def test_c16_fp8_carries_its_casts_and_its_copies() -> None:
    # TransformerEngine (ROCm) #79, lingua #56: fp8 is not always faster or smaller
    job = Job(load_model("llama-3-8b"), load_cluster("h100-sxm:1x8"), load_execution("fsdp"), 8192, 64)
    low = replace(job, precision="fp8")
    text = "dp=8,zero=3,micro_batch=2"
    assert step(low, text).seconds["pointwise"] > 1.1 * step(job, text).seconds["pointwise"]
    layout = Layout.parse(text, 8)
    saved = [stage_memory(j, layout)[0].activations for j in (job, low)]
    assert saved[1] > 0.6 * saved[0]


@pytest.mark.parametrize("cluster", ["h100-sxm:1x8", "a100-sxm:1x8"])
@pytest.mark.parametrize("length", [8192, 16384])
def test_e03_ulysses_then_hybrid_then_ring_on_nvlink(cluster: str, length: int) -> None:
    # long-context-attention #40: Ulysses 8 60 ms, ring 8 over 100 ms; EasyContext #37: Ulysses about 15 % faster
    layer = Layer(mixer=Attention(heads=32, kv_heads=32, head_dim=128), ffn=Mlp(width=11008))
    job = Job(uniform("7b", layer, 8, hidden=4096, vocab=32000), load_cluster(cluster), load_execution("torchtitan"), length, 4)
    ulysses, hybrid, ring = (seconds(job, f"cp=8,cp_kind={kind},micro_batch=2") for kind in ("ulysses", "ring2xulysses4", "ring"))
    assert ulysses < hybrid < ring
    assert 1.05 < ring / ulysses < 2


def test_e03_a_ring_wins_over_pcie_with_few_kv_heads() -> None:
    layer = Layer(mixer=Attention(heads=32, kv_heads=8, head_dim=128), ffn=Mlp(width=11008))
    job = Job(
        uniform("7b", layer, 8, hidden=4096, vocab=32000), load_cluster("rtx-4090:1x2"), load_execution("torchtitan"), 16384, 4
    )
    assert seconds(job, "cp=2,cp_kind=ring,micro_batch=2") < seconds(job, "cp=2,cp_kind=ulysses,micro_batch=2")
