"""Group A of the cases from practice: memory estimates against reality. Each test names the public thread its figures come from."""

from pathlib import Path

import pytest

from cost_models.attention_ops import causal_pairs
from cost_models.execution import Execution, load_execution
from cost_models.job import Job
from cost_models.layers import head_operations, layer_operations
from cost_models.layout import Layout, RecomputeRule
from cost_models.memory import StageMemory, fits, stage_memory
from cost_models.overheads import communicators
from cost_models.recompute import kept_bytes
from cost_models.runs import load_runs, read_rows
from cost_models.step import estimate
from cost_models.unit_memory import unit_memory
from profiles.hardware import load_cluster
from profiles.huggingface import load_model
from profiles.model import Attention, Layer, Mlp, ModelSpec, uniform

GIB = 2**30


def worst(job: Job, layout: Layout) -> StageMemory:
    return max(stage_memory(job, layout), key=lambda s: s.needed)


@pytest.fixture(scope="module")
def titan(data: Path) -> dict[str, tuple[Job, Layout]]:
    rows = [r for r in read_rows(data / "runs.csv") if r["id"].startswith("titan-table")]
    return {run.id: (run.job, run.layout) for run in load_runs(rows)[0]}


def test_a03_fsdp_over_more_ranks_frees_states_and_float8_frees_almost_nothing(titan: dict[str, tuple[Job, Layout]]) -> None:
    few, many = (worst(*titan[f"titan-table{n}-FSDP+torch.compile"]) for n in (1, 3))
    assert 13.5 <= (few.peak_reserved - many.peak_reserved) / GIB <= 16
    fp8 = worst(*titan["titan-table1-FSDP+torch.compile+Float8"])
    assert abs(few.peak_reserved - fp8.peak_reserved) < GIB


def test_a03_the_eager_recipe_does_not_fit_80_gb_and_fits_the_96_gb_part(titan: dict[str, tuple[Job, Layout]]) -> None:
    job, layout = titan["titan-table1-FSDP"]
    small = Job(job.model, load_cluster("h100-sxm:1x8"), job.execution, job.seq_len, job.global_batch, job.precision)
    assert not fits(small, layout)[0]
    assert fits(job, layout)[0]


def test_a12_a_recipe_for_141_gb_runs_out_of_80_gb_until_the_microbatch_shrinks() -> None:
    """NeMo Automodel PR#2673: 70B SFT, PP 8 x DP 4, packed 1,024, microbatch 4, FSDP2 (resharding), bf16 Adam: 17.5 GB."""
    halves = {"parameter_bytes": 2, "moment_bytes": 2, "gradient_bytes": 2, "reduce_bytes": 2}
    execution = load_execution("torchtitan").with_(reshard_with_pipeline=True, **halves)
    model, found = load_model("llama-3.1-70b"), {}
    for cluster in ("h200-sxm:4x8", "h100-sxm:4x8"):
        for micro_batch in (4, 1):
            job = Job(model, load_cluster(cluster), execution, 1024, 128)
            assert stage_memory(job, Layout.parse("pp=8,zero=3", 32))[3].states / 1e9 == pytest.approx(17.5, rel=0.03)
            found[cluster[:4], micro_batch] = fits(job, Layout.parse(f"pp=8,zero=3,micro_batch={micro_batch}", 32))[0]
    assert found == {("h200", 4): True, ("h200", 1): True, ("h100", 4): False, ("h100", 1): True}
    assert load_cluster("h100-sxm:1x8").gpu.usable_bytes / GIB == pytest.approx(79.1, abs=0.05)


@pytest.mark.parametrize(("tp", "limit"), [(2, 107e9), (4, 119e9)])
def test_a15_lora_activations_depend_on_recompute(tp: int, limit: float) -> None:
    """OpenPipe/ART#913: 64 layers, hidden 5,120, LoRA, packed 32.7 k tokens; selective recompute ran out at these limits."""
    layer = Layer(mixer=Attention(heads=64, kv_heads=8, head_dim=128), ffn=Mlp(width=17408))
    model = uniform("27b", layer, 64, hidden=5120, vocab=248320)
    job = Job(model, load_cluster("h200-sxm:1x8"), load_execution("megatron"), 32704, 8 // tp, lora_rank=16)
    none, selective, full = (worst(job, Layout.parse(f"tp={tp},recompute={r}", 8)) for r in ("none", "selective", "full"))
    assert none.device > selective.device > full.device
    assert selective.device > limit
    assert full.device < 0.5 * selective.device


def gpt2() -> ModelSpec:
    layer = Layer(mixer=Attention(heads=25, kv_heads=25, head_dim=64, rotary=False), ffn=Mlp(width=6400, gated=False))
    return uniform("gpt2-xl", layer, 48, hidden=1600, vocab=50304, norm="layer", tied=True)


def test_a16_selective_recompute_saves_the_quadratic_term_only_where_it_is_stored() -> None:
    """Megatron-LM#1225: 25.52 -> 24.94 GB, not 30 %."""
    model, cluster = gpt2(), load_cluster("a100-sxm:1x8")
    peaks = {}
    for kernel in ("cudnn", "unfused"):
        execution = load_execution("megatron").with_(attention=kernel, attention_dropout=True, hidden_dropout=True)
        job = Job(model, cluster, execution, 1024, 8, "fp16")
        peaks[kernel] = [worst(job, Layout.parse(f"tp=1,recompute={r}", 8)).activations for r in ("none", "selective")]
    flash, plain = peaks["cudnn"], peaks["unfused"]
    assert 1 - flash[1] / flash[0] < 0.03
    assert plain[0] - plain[1] == pytest.approx(48 * 5 * 25 * 1024**2, rel=1e-3)


def test_a19_logits_live_on_the_last_stage_alone_and_a_chunked_loss_divides_them() -> None:
    job = Job(load_model("qwen3-8b"), load_cluster("h100-sxm:1x8"), Execution(logit_saved_bytes=4, logit_peak_bytes=4), 8192, 16)
    stages = stage_memory(job, Layout.parse("pp=4", 8))
    assert [s.peak_at == "loss" for s in stages] == [False, False, False, True]
    assert unit_memory(job, Layout(), "head").kept / GIB > 4.637
    chunked = Job(job.model, job.cluster, job.execution.with_(loss_chunk_tokens=1024), 8192, 16)
    plain, short = (head_operations(j, Layout()) for j in (job, chunked))
    logits = 8192 * 151936 * 4
    assert plain.saved_bytes - short.saved_bytes == logits - 8192 * 4096 * 2


def test_a22_memory_outside_the_allocator_grows_with_communicators_not_with_the_world() -> None:
    """nccl#964 and others: about 0.5 GiB a group, gigabytes for all-to-all."""
    model = load_model("qwen3-30b-a3b")

    def outside(text: str, gpus: int) -> float:
        job = Job(model, load_cluster(f"h100-sxm:{gpus // 8}x8"), load_execution("megatron"), 4096, 4096)
        stage = stage_memory(job, Layout.parse(text, gpus))[0]
        assert stage.peak_allocated < stage.peak_reserved < stage.device
        return (stage.device - stage.peak_reserved) / GIB

    growing = [outside(t, 64) for t in ("zero=0", "tp=2", "tp=2,pp=2", "tp=2,pp=2,cp=2", "tp=2,pp=2,cp=2,ep=4")]
    assert growing == sorted(growing)
    assert len(set(growing)) == 5
    assert growing[0] <= 1.5
    assert growing[-1] >= 3
    assert outside("zero=0", 2048) == growing[0]


def test_a28_qwen3_235b_on_32_gpus_needs_its_optimizer_on_the_host() -> None:
    """slime#280: infeasible on the GPUs alone; with offload 12 bytes a parameter in host memory: 705 GB a node of eight."""
    job = Job(load_model("qwen3-235b-a22b"), load_cluster("h100-sxm:4x8"), load_execution("megatron"), 4096, 256)
    for text in ("tp=4,ep=8,pp=4", "tp=2,ep=8,pp=4", "tp=1,ep=32", "tp=4,ep=32,zero=3"):
        assert not fits(job, Layout.parse(f"{text},recompute=full", 32))[0]
    offloaded = Layout.parse("tp=4,ep=8,pp=4,recompute=full,offload=optimizer", 32)
    ok, stage = fits(job, offloaded)
    assert ok
    assert stage.optimizer == 0
    assert 705e9 <= estimate(job, offloaded).to_json()["host_bytes_per_node"] < 760e9
    assert "host_bytes_per_node" not in estimate(job, offloaded.with_(offload=())).to_json()


def test_a34_unfused_attention_needs_32_gib_of_scores_even_under_full_recompute() -> None:
    """ColossalAI#4537: 16 x 32 heads x 4,096^2 x 4 bytes."""
    cluster, layer = load_cluster("a100-sxm:1x8"), load_model("llama-2-7b").layer(0)
    model = uniform("attention", Layer(mixer=layer.mixer, norms=1), 32, hidden=4096, vocab=32000)
    temporary = {}
    for kernel in ("unfused", "fa2"):
        execution = load_execution("fsdp").with_(attention=kernel, kv_repeated=False)
        cost = layer_operations(Job(model, cluster, execution, 4096, 128), Layout(micro_batch=16), model.layer(0))
        temporary[kernel] = cost.transient
        assert kept_bytes(cost, RecomputeRule(0, None, "full")) == 2 * 16 * 4096 * 4096
    assert (temporary["unfused"] - temporary["fa2"]) / GIB == pytest.approx(32.0)


def test_a35_states_alone_refuse_one_layout_and_building_the_whole_model_the_other() -> None:
    """ColossalAI#5068: 70B on 32 A100: TP 4 ZeRO-1 is 32 + 32 + 24 GB of states; TP 8 PP 2 is 40, and ran out when built."""
    model, cluster = load_model("llama-2-70b"), load_cluster("a100-sxm:4x8")
    lazy = Execution(gradient_bytes=2)
    refused = worst(Job(model, cluster, lazy, 1024, 16), Layout.parse("tp=4,zero=1", 32))
    assert refused.states / 1e9 == pytest.approx(88 * 69 / 64, rel=0.03)
    job = Job(model, cluster, lazy, 1024, 16)
    layout = Layout.parse("tp=8,pp=2,zero=1", 32)
    ok, stage = fits(job, layout)
    assert ok
    assert stage.states / 1e9 == pytest.approx(40 * 69 / 64, rel=0.03)
    eager = Job(model, cluster, lazy.with_(initial_copies_bytes=2, initial_whole_model=True), 1024, 16)
    ok, stage = fits(eager, layout)
    assert not ok
    assert stage.init_peak > eager.limit_bytes > stage.device


def test_a37_captured_graphs_hold_their_activations_once_more() -> None:
    model, cluster = load_model("llama-3.1-8b"), load_cluster("h200-sxm:1x8")
    plain, graphs = (Job(model, cluster, load_execution("megatron").with_(graph_pool_ratio=r), 8192, 64) for r in (0.0, 1.0))
    layout = Layout.parse("tp=2,pp=2", 8)
    for without, captured in zip(stage_memory(plain, layout), stage_memory(graphs, layout), strict=True):
        assert captured.device - without.device >= without.activations


def test_a38_states_fall_with_data_parallel_ranks_and_activations_do_not() -> None:
    """DeepSpeed#4093 and others: GPT-J-6B, ZeRO-3, 2 and 4 GPUs."""
    mixer = Attention(heads=16, kv_heads=16, head_dim=256)
    model = uniform(
        "gpt-j-6b", Layer(mixer=mixer, ffn=Mlp(width=16384, gated=False), norms=1, parallel=True), 28, hidden=4096, vocab=50400
    )
    two, four = (
        stage_memory(
            Job(model, load_cluster(f"a100-sxm:1x{n}"), load_execution("deepspeed"), 2048, 4 * n), Layout.parse("zero=3", n)
        )[0]
        for n in (2, 4)
    )
    assert four.states * 2 == pytest.approx(two.states)
    assert (four.activations, four.temporary) == (two.activations, two.temporary)


def test_e02_memory_depends_on_tokens_a_rank_alone() -> None:
    """Megatron-LM PR#7220: CP 2 with microbatch 4 is CP 1 with microbatch 2, and half of CP 1 with 4."""
    layer = Layer(mixer=Attention(heads=8, kv_heads=8, head_dim=64), ffn=Mlp(width=2048, gated=False))
    model = uniform("small", layer, 4, hidden=512, vocab=50304)
    job = Job(model, load_cluster("h100-sxm:1x8"), load_execution("megatron"), 2048, 64)
    both, half, whole = (
        worst(job, Layout.parse(t, 8)).peak_allocated for t in ("cp=2,micro_batch=4", "micro_batch=2", "micro_batch=4")
    )
    assert both == pytest.approx(half, rel=0.01)
    assert half < 0.65 * whole


def test_e06_the_peak_counts_the_optimizer_state_that_the_first_step_makes() -> None:
    """axolotl PR#2412: out of memory on the second step."""
    job = Job(load_model("llama-3.2-1b"), load_cluster("h100-sxm:1x1"), load_execution("fsdp"), 4096, 1)
    stage = stage_memory(job, Layout())[0]
    assert stage.optimizer == 8 * job.model.parameters.total
    assert stage.peak_allocated > stage.optimizer + stage.parameters + stage.gradients


def test_e07_a_sliding_window_counts_the_tokens_it_sees_itself_included() -> None:
    assert causal_pairs(4, window=2) == 1 + 2 + 2 + 2


def test_a22_communicators_count_axes() -> None:
    job = Job(load_model("llama-3.1-8b"), load_cluster("h100-sxm:8x8"), load_execution("megatron"), 4096, 256)
    each = job.execution.communicator_bytes
    assert communicators(job, Layout.parse("tp=2,pp=2", 64)) == 3 * each
    assert communicators(job, Layout(dp_shard=1)) == 0
