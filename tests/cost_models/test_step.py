"""The whole step: sums, causes, properties, published rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.runs import load_runs, read_rows
from cost_models.step import estimate
from profiles.hardware import Pool, load_cluster
from profiles.huggingface import load_model
from profiles.model import Attention, Layer, Mlp, ModelSpec, Moe, uniform
from profiles.operations import Matmul


def job(
    model: str = "llama-3.1-8b", cluster: str = "h100-sxm:1x8", batch: int = 128, execution: str = "megatron", **fields: object
) -> Job:
    return Job(load_model(model), load_cluster(cluster), load_execution(execution), 8192, batch, **fields)  # type: ignore[arg-type]


def small(layers: int = 8, **fields: object) -> ModelSpec:
    layer = Layer(mixer=Attention(heads=16, kv_heads=16, head_dim=128), ffn=Mlp(width=8192))
    return uniform("small", layer, layers, hidden=2048, vocab=32000, **fields)


LAYOUTS = (
    "dp=8", "tp=2,pp=2,vpp=2,dp=2", "tp=8,sp=false", "pp=8,micro_batch=2", "cp=4,dp=2", "cp=4,cp_kind=ulysses,dp=2",
    "dp=8,zero=3", "tp=2,dp=4,zero=2,recompute=full", "pp=4,dp=2,schedule=zb-h1", "pp=2,dp=4,schedule=zb-v",
    "pp=4,dp=2,schedule=gpipe,recompute=selective",
)  # fmt: skip


@pytest.mark.parametrize("text", LAYOUTS)
def test_seconds_by_cause_sum_to_the_step(text: str) -> None:
    found = estimate(job(), Layout.parse(text, 8))
    assert math.fsum(found.seconds.values()) == pytest.approx(found.step_seconds, rel=1e-9)
    assert min(found.seconds.values()) >= 0
    assert found.step_seconds_low < found.step_seconds < found.step_seconds_high
    assert 0 <= found.bubble_fraction < 1


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe-v"])
def test_seconds_sum_where_pairs_overlap(schedule: str) -> None:
    layer = Layer(mixer=Attention(heads=16, kv_heads=16, head_dim=128), ffn=Moe(experts=32, top_k=4, width=1024))
    model = uniform("moe", layer, 16, hidden=2048, vocab=32000)
    execution = load_execution("megatron", {"ep_overlap": "true"})
    spec = Job(model, load_cluster("h100-sxm:4x8"), execution, 4096, 128, moe_imbalance=1.0)
    layout = Layout.parse(f"pp=4,dp=8,ep=8,schedule={schedule}", 32)
    found = estimate(spec, layout)
    assert math.fsum(found.seconds.values()) == pytest.approx(found.step_seconds, rel=1e-9)
    serial = estimate(replace(spec, execution=load_execution("megatron")), layout)
    assert found.step_seconds < serial.step_seconds


def test_the_json_has_the_keys_that_others_read() -> None:
    document = estimate(job(), Layout.parse("tp=2,pp=2,dp=2", 8)).to_json()
    needed = {
        "step_seconds", "step_seconds_low", "step_seconds_high", "tokens_per_second_per_gpu", "mfu", "hfu", "bubble_fraction",
        "seconds",
        "memory", "limit_bytes", "fits", "bytes_sent", "guessed",
    }  # fmt: skip
    assert needed <= set(document)
    stage = {
        "stage", "parameters", "gradients", "optimizer", "activations", "temporary", "communication", "peak_allocated",
        "peak_reserved",
        "device",
    }  # fmt: skip
    assert stage <= set(document["memory"][0])
    assert len(document["memory"]) == 2


def test_tokens_and_mfu_follow_from_the_step() -> None:
    spec, layout = job(), Layout.parse("dp=8", 8)
    found = estimate(spec, layout)
    assert found.tokens_per_second_per_gpu == pytest.approx(128 * 8192 / found.step_seconds / 8)
    assert found.hfu == pytest.approx(found.mfu)
    assert found.mfu < found.mfu_full_attention
    full = estimate(spec, layout.with_(recompute="full"))
    ratio = full.hfu * full.step_seconds / (full.mfu * full.step_seconds)
    assert 1.25 < ratio < 4 / 3


def test_selective_recompute_of_attention_adds_four_b_l_s_squared_h_to_hardware_flops() -> None:
    # C19: Megatron-LM #523, the extra attention forward of an unfused kernel is 4 B L s^2 h
    execution = load_execution("megatron-2022")
    spec = Job(small(), load_cluster("a100-sxm:1x8"), execution, 2048, 32, "fp16")
    none, selective = (estimate(spec, Layout.parse(f"tp=8,recompute={mode}", 8)) for mode in ("none", "selective"))
    flops = [e.hfu * e.step_seconds * 8 * 312e12 for e in (none, selective)]
    assert flops[1] - flops[0] == pytest.approx(4 * 32 * 8 * 2048**2 * 2048)
    assert none.mfu * none.step_seconds == pytest.approx(selective.mfu * selective.step_seconds)


def test_wire_bytes_of_tensor_parallelism_are_those_of_the_closed_form() -> None:
    # Korthikanti et al. 2022, section 4.2.2: four all-gathers and four reduce-scatters' worth of sbh a layer, and one gather more
    # for each of the two weight gradients
    spec = Job(small(8), load_cluster("h100-sxm:1x8"), load_execution("megatron", {"vocab_parallel": "false"}), 4096, 8)
    sent = estimate(spec, Layout.parse("tp=8", 8)).bytes_sent["tp"]
    one = 4096 * 2048 * 2 * 7 / 8
    assert sent["nvlink"] == pytest.approx(8 * 8 * 10 * one)


def test_pipeline_bytes_are_boundary_tensors_each_way() -> None:
    spec = Job(small(8), load_cluster("h100-sxm:1x8"), load_execution("megatron"), 4096, 32)
    sent = estimate(spec, Layout.parse("pp=4,dp=2", 8)).bytes_sent["pp"]
    assert sent["nvlink"] == pytest.approx(16 * 2 * 4096 * 2048 * 2)


def test_zero_3_gathers_twice_and_reduces_every_microbatch() -> None:
    execution = load_execution("fsdp")
    spec = Job(small(8), load_cluster("h100-sxm:1x8"), execution, 4096, 32)
    one = estimate(spec, Layout.parse("dp=8,zero=3,micro_batch=4", 8)).bytes_sent["dp"]["nvlink"]
    four = estimate(spec, Layout.parse("dp=8,zero=3,micro_batch=1", 8)).bytes_sent["dp"]["nvlink"]
    assert four == pytest.approx(4 * one)
    parameters = spec.model.parameters.total
    assert one == pytest.approx((2 * execution.gather_bytes + execution.reduce_bytes) * parameters * 7 / 8, rel=0.01)


def test_a_pipeline_of_one_stage_has_no_bubble_and_more_microbatches_make_it_smaller() -> None:
    assert estimate(job(), Layout.parse("dp=8", 8)).bubble_fraction == pytest.approx(0, abs=1e-2)
    fractions = [estimate(job(batch=b), Layout.parse("pp=4,dp=2", 8)).bubble_fraction for b in (8, 32, 128)]
    assert fractions[0] > fractions[1] > fractions[2]


def test_a_layer_of_its_own_recompute_costs_between_none_and_full() -> None:
    seconds = [estimate(job(), Layout.parse(f"dp=8,recompute={r}", 8)).step_seconds for r in ("none", "0-15:full", "full")]
    assert seconds[0] < seconds[1] < seconds[2]
    assert seconds[1] == pytest.approx((seconds[0] + seconds[2]) / 2, rel=1e-6)


def test_a_tied_embedding_is_reduced_between_the_ends_of_the_pipeline() -> None:
    tied, apart = (Job(small(8, tied=t), load_cluster("h100-sxm:1x8"), load_execution("megatron"), 4096, 32) for t in (True, False))
    layout = Layout.parse("pp=2,dp=4", 8)
    more = estimate(tied, layout).bytes_sent["pp"]["nvlink"] - estimate(apart, layout).bytes_sent["pp"]["nvlink"]
    assert more == 4 * 32000 * 2048  # the embedding's gradient, in fp32


def test_frozen_weights_and_adapters_need_no_weight_gradient() -> None:
    layout = Layout.parse("dp=8", 8)
    whole, lora, frozen = (estimate(job(**f), layout) for f in ({}, {"lora_rank": 16}, {"frozen": ("mlp",)}))
    assert max(lora.step_seconds, frozen.step_seconds) < 0.9 * whole.step_seconds
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + (4096 + 2 * 14336) + (14336 + 4096))  # gate and up as one
    mlp = 32 * 3 * 4096 * 14336
    for found, trained in ((whole, 8_030_261_248), (lora, adapters), (frozen, 8_030_261_248 - mlp)):
        assert found.bytes_sent["dp"]["nvlink"] == pytest.approx((4 + 2) * trained * 7 / 8)  # reduced in fp32, gathered in bf16


def test_an_optimizer_s_step_is_its_traffic_and_muon_s_the_orthogonalising_of_each_matrix_too() -> None:
    layout, gpu = Layout.parse("dp=8", 8), load_cluster("h100-sxm:1x8").gpu
    sgd, adamw, muon = (estimate(job(optimizer=o), layout).seconds["optimizer"] for o in ("sgd", "adamw", "muon"))
    assert adamw == pytest.approx(load_execution("megatron").optimizer_traffic * 8_030_261_248 / 8 / gpu.memory_bytes_per_second)
    assert sgd == pytest.approx(0.45 * adamw)

    def newton_schulz(rows: int, columns: int) -> float:
        small, large = sorted((rows, columns))
        each = (Matmul(small, small, large), Matmul(small, small, small), Matmul(small, large, small))
        return 5 * sum(float(gpu.seconds(op)) for op in each)

    matrices = ((4096 + 2 * 1024, 4096), (4096, 4096), (2 * 14336, 4096), (4096, 14336))
    assert muon == pytest.approx(0.6 * adamw + 32 * sum(newton_schulz(*m) for m in matrices) / 8)


def test_an_offloaded_optimizer_takes_its_way_over_the_host_link_and_its_traffic_in_host_memory() -> None:
    found = estimate(job(), Layout.parse("dp=8,offload=optimizer", 8)).seconds["optimizer"]
    execution, share = load_execution("megatron"), 8_030_261_248 / 8
    assert found == pytest.approx(share * (execution.gradient_bytes + 2 + execution.optimizer_traffic) / 20e9)


def test_the_launch_floor_decides_small_models_and_graphs_remove_it() -> None:
    layer = Layer(mixer=Attention(heads=8, kv_heads=8, head_dim=64), ffn=Mlp(width=1024, gated=False))
    model = uniform("tiny", layer, 12, hidden=512, vocab=1000)
    eager, graphs = (
        Job(model, load_cluster("h100-sxm:1x8"), load_execution("megatron", {"graphs": g}), 512, 64) for g in ("none", "full")
    )
    layout = Layout.parse("dp=8", 8)
    assert estimate(eager, layout).seconds["host"] > 0.5 * estimate(eager, layout).step_seconds
    assert "host" not in estimate(graphs, layout).seconds


def test_a_cpu_cluster_is_priced_by_the_same_code() -> None:
    model = uniform("tiny", Layer(mixer=Attention(heads=8, kv_heads=4, head_dim=32), ffn=Mlp(width=688)), 4, hidden=256, vocab=1000)
    spec = Job(model, load_cluster("cpu:1x4"), load_execution("axisplan"), 128, 16, "fp32")
    for text in ("dp=4,zero=0", "tp=2,dp=2", "pp=2,dp=2", "pp=4"):
        found = estimate(spec, Layout.parse(text, 4))
        assert found.fits
        assert 0.01 < found.step_seconds < 10
        assert found.seconds["host"] > 0


# -- properties -----------------------------------------------------------------------------------------------------------


TEXTS = st.sampled_from(LAYOUTS)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(TEXTS, st.sampled_from(["sustained_matmul_speed", "memory_achieved_bytes_per_second"]), st.floats(1.01, 2.0))
def test_a_faster_gpu_is_never_slower(text: str, fact: str, factor: float) -> None:
    spec, layout = job(), Layout.parse(text, 8)
    gpu = spec.cluster.gpu
    faster = gpu.faster(**{fact: getattr(gpu.facts, fact).value * factor})
    quick = replace(spec, cluster=replace(spec.cluster, gpu=faster, name="faster"))
    assert estimate(quick, layout, detail=False).step_seconds <= estimate(spec, layout, detail=False).step_seconds * (1 + 1e-9)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(TEXTS, st.floats(1.05, 4.0))
def test_more_bandwidth_is_never_slower(text: str, factor: float) -> None:
    spec, layout = job(), Layout.parse(text, 8)
    level = spec.cluster.levels[0]
    curves = {
        kind: tuple(replace(row, bytes_per_second=row.bytes_per_second * factor) for row in rows)
        for kind, rows in level.link.curves.items()
    }
    levels = (replace(level, link=replace(level.link, curves=curves, name="faster")), *spec.cluster.levels[1:])
    quick = replace(spec, cluster=replace(spec.cluster, levels=levels, name="faster links"))
    assert estimate(quick, layout, detail=False).step_seconds <= estimate(spec, layout, detail=False).step_seconds * (1 + 1e-9)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(TEXTS, st.integers(1, 4))
def test_a_larger_batch_takes_longer_but_not_more_per_token(text: str, times: int) -> None:
    one, more = (estimate(job(batch=b), Layout.parse(text, 8), detail=False).step_seconds for b in (64, 64 * times))
    assert one * (1 - 1e-9) <= more <= times * one * (1 + 1e-9)


# -- published runs -------------------------------------------------------------------------------------------------------

GOLDEN = (
    "dgxc-25.02.01-llama3-8b-nemo-bf16-H100x8", "mbridge-25.09-llama3-8b-H100x8-FP8-CS-gbs128", "narayanan21-t1-1.7B-A100x32",
    "narayanan21-t1-145B-A100x1536", "narayanan21-t1-1T-A100x3072", "korthikanti22-t5-175B-selective", "korthikanti22-t5-530B-full",
    "simumax-b200-llama3_70b_l12_tp4_pp1_dp2_mbc8_cef", "simumax-b200-llama3_70b_l12_tp1_pp2_dp4_mbc8_cef",
)  # fmt: skip


def test_published_steps_of_known_programs_are_met_within_fifteen_per_cent(data: Path) -> None:
    runs, _ = load_runs([row for row in read_rows(data / "runs.csv") if row["id"] in GOLDEN])
    assert {run.id for run in runs} == set(GOLDEN)
    for run in runs:
        error = estimate(run.job, run.layout, detail=False).step_seconds / run.seconds - 1
        assert abs(error) < 0.15, (run.id, error)


def test_stages_of_a_mixed_cluster_are_priced_on_their_own_gpus() -> None:
    fast, slow = load_cluster("h100-sxm:1x8"), load_cluster("a100-sxm:1x8")
    mixed = replace(load_cluster("h100-sxm:2x8"), pools=(Pool(gpu=fast.gpu, gpus=8), Pool(gpu=slow.gpu, gpus=8)), name="mixed")
    spec = Job(load_model("llama-3.1-8b"), mixed, load_execution("megatron"), 8192, 64)
    layout = Layout.parse("pp=2,dp=8", 16)
    stages = estimate(spec, layout).stage_seconds
    whole = [
        estimate(replace(spec, cluster=load_cluster(f"{name}:2x8")), layout).stage_seconds for name in ("h100-sxm", "a100-sxm")
    ]
    assert stages[0] == pytest.approx(whole[0][0], rel=0.02)
    assert stages[1] == pytest.approx(whole[1][1], rel=0.02)
    assert math.fsum(estimate(spec, layout).seconds.values()) == pytest.approx(estimate(spec, layout).step_seconds)
