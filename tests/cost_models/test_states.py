"""Weights by shape, and bytes of states: against parameter counts, the ZeRO paper, and figures from public threads."""

import json

import pytest
from click.testing import CliRunner

import cli
from cost_models.execution import Execution, load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.stage_states import stage_holding, stage_states, stage_units, tensors
from cost_models.state_bytes import adapter_weights, bytes_per_parameter, states, table
from cost_models.states import Holding, embedding_weights, head_weights, hold, layer_weights, mtp_weights
from profiles.errors import InputError
from profiles.families.registry import read_config
from profiles.hardware import load_cluster
from profiles.huggingface import load_model, model_names
from profiles.parameters import layer_parameters

GIB = 2**30
CLUSTER = load_cluster("h100-sxm:8x8")


def job(name: str, execution: Execution | str = "megatron", precision: str = "bf16", **more: object) -> Job:
    facts = load_execution(execution) if isinstance(execution, str) else execution
    return Job(load_model(name), CLUSTER, facts, 4096, 512, precision, **more)


INDEXED = {
    "hidden_size": 96, "intermediate_size": 40, "moe_intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_experts_per_tok": 3, "vocab_size": 101, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2,
    "q_lora_rank": 19, "kv_lora_rank": 17, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12, "index_head_dim": 10,
    "index_n_heads": 3,
}  # fmt: skip


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_the_indexer_of_sparse_attention_is_held_by_every_rank(family: str) -> None:
    model = read_config({"model_type": family, **INDEXED}, family)
    for layer in model.kinds:
        weights = layer_weights(model, layer)
        assert sum(w.elements for w in weights) == sum(layer_parameters(model, layer).values())
        indexer = [w for w in weights if w.name.startswith("index_")]
        assert sum(w.elements for w in indexer) == 19 * 30 + 96 * 10 + 2 * 10 + 96 * 3
        assert all(w.split == "none" for w in indexer)


@pytest.mark.parametrize("name", model_names())
def test_weights_add_up_to_the_models_parameters(name: str) -> None:
    model = load_model(name)
    total = sum(w.elements for w in (*embedding_weights(model), *head_weights(model, shares_embedding=model.tied)))
    for kind, layer in enumerate(model.kinds):
        size = sum(w.elements for w in layer_weights(model, layer))
        assert size == sum(layer_parameters(model, layer).values())
        total += size * model.pattern.count(kind)
    assert total == model.parameters.total
    if model.mtp:
        assert model.mtp * sum(w.elements for w in mtp_weights(model)) == model.parameters.mtp


def test_attention_and_shared_experts_follow_tp_and_routed_experts_etp_times_ep() -> None:
    """Case A05, Megatron-LM#4050: three buckets, not all by TP."""
    model = load_model("qwen3-30b-a3b")
    held = {
        text: hold(layer_weights(model, model.layer(0)), Layout.parse(text, 8), Execution())
        for text in ("tp=4,ep=1,etp=1", "tp=4,ep=8,etp=1", "tp=1,ep=8", "tp=4,etp=4")
    }
    expert = 128 * 3 * 2048 * 768
    assert [h.expert for h in held.values()] == [expert, expert // 8, expert // 8, expert // 4]
    assert held["tp=4,ep=1,etp=1"].dense == held["tp=4,ep=8,etp=1"].dense < held["tp=1,ep=8"].dense
    assert len({h.all for h in held.values()}) == 4
    v3 = load_model("deepseek-v3")
    shared = [w for w in layer_weights(v3, v3.layer(10)) if w.part == "shared"]
    assert sum(w.local(Layout(tp=4, etp=2), Execution()) for w in shared) * 4 == sum(w.elements for w in shared)


@pytest.mark.parametrize(
    ("execution", "precision", "optimizer", "zero", "shards", "bytes_each"),
    [
        ("megatron", "bf16", "adamw", 0, 1, 18),
        ("megatron", "bf16", "adamw", 1, 2, 6 + 12 / 2),
        ("megatron", "bf16", "adamw", 1, 64, 6 + 12 / 64),
        ("deepspeed", "fp16", "adamw", 2, 8, 2 + 18 / 8),
        ("deepspeed", "fp16", "adamw", 3, 4, 18 / 4),
        ("fsdp", "bf16", "adamw", 3, 128, 16 / 128),
        ("fsdp", "bf16", "adamw", 2, 8, 2 + 16 / 8),
        ("torchtitan", "fp8", "adamw", 3, 8, 16 / 8),
        ("megatron", "fp32", "adamw", 0, 1, 16),
        ("megatron", "fp8", "adamw", 0, 1, 2 + 4 + 12),
        ("megatron", "mxfp8", "adamw", 0, 1, 2 * (1 + 1 / 32) + 4 + 12),
        ("megatron", "nvfp4", "adamw", 0, 1, 2 + 2 * (1 / 2 + 1 / 16) + 4 + 12),
        ("megatron", "bf16", "sgd", 0, 1, 14),
        ("megatron", "bf16", "muon", 0, 1, 14),
        ("megatron", "bf16", "adamw8bit", 0, 1, 10 + 2 * (1 + 4 / 256)),
    ],
)
def test_bytes_per_parameter(execution: str, precision: str, optimizer: str, zero: int, shards: int, bytes_each: float) -> None:
    assert bytes_per_parameter(load_execution(execution), precision, optimizer, zero, shards) == pytest.approx(bytes_each)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [(0, 16.0), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)],
)
def test_zero_stages_hold_what_the_paper_says(stage: int, expected: float) -> None:
    """ZeRO (arXiv:1910.02054), figure 1: 2 + 2 + 12 bytes, N = 64: 120 GB -> 31.4 -> 16.6 -> 1.9 for 7.5 B parameters."""
    paper = Execution(gradient_bytes=2)
    found = bytes_per_parameter(paper, "fp16", "adamw", stage, 64)
    assert found == pytest.approx(expected)
    assert 7.5 * found == pytest.approx({0: 120, 1: 31.4, 2: 16.6, 3: 1.9}[stage], abs=0.05)


def test_zero_2_of_deepspeed_is_11_28_gib_with_fp32_gradients_and_9_96_without() -> None:
    """Case A09, DeepSpeed PR#5099: 2,851 M parameters, 8 GPUs."""
    for extra, gib in ((4.0, 11.28), (0.0, 9.96)):
        execution = load_execution("deepspeed").with_(optimizer_gradient_bytes=extra)
        assert 2851e6 * bytes_per_parameter(execution, "fp16", "adamw", 2, 8) / GIB == pytest.approx(gib, abs=0.01)


def test_zero_3_estimates_are_model_states_alone_in_gib() -> None:
    """Case A08, DeepSpeed#4527: 6,805 M parameters, largest layer 131 M, 4 GPUs: 29.01, 3.66 with the optimizer offloaded, 0.49 with both."""
    execution = load_execution("deepspeed")
    gathered = 131e6 * (execution.gather_bytes + execution.gradient_bytes)
    for offload, gib in (((), 29.01), (("optimizer",), 3.66), (("optimizer", "parameters"), 0.49)):
        each = bytes_per_parameter(execution, "fp16", "adamw", 3, 4, offload)
        assert (6805e6 * each + gathered) / GIB == pytest.approx(gib, abs=0.01)


def test_megatrons_weights_and_optimizer_are_46_983_mib_for_4_1055_b_parameters_at_dp_2() -> None:
    """Case A26, FlagScale PR#454: 6 + 12/2 bytes."""
    each = bytes_per_parameter(load_execution("megatron"), "bf16", "adamw", 1, 2)
    assert 4.1055e9 * each / 2**20 == pytest.approx(46_983, abs=2)


def test_optimizer_state_is_divided_by_data_parallelism_under_the_distributed_optimizer() -> None:
    """Case A27, aicb PR#36: TP 8, 32 GPUs, DP 4."""
    work = job("llama-2-7b")
    whole, sharded = (stage_states(work, Layout.parse(f"tp=8,zero={z}", 32), 0) for z in (0, 1))
    assert sharded.optimizer * 4 == whole.optimizer
    assert (sharded.parameters, sharded.gradients) == (whole.parameters, whole.gradients)


def test_expert_states_are_sharded_over_expert_data_parallelism() -> None:
    model = load_model("qwen3-30b-a3b")
    layout = Layout.parse("tp=2,ep=8,etp=1", 64)
    held = hold(layer_weights(model, model.layer(0)), layout, Execution())
    found = states(job("qwen3-30b-a3b", Execution()), layout, Holding(expert=held.expert))
    assert layout.edp_shard == 8
    assert found.optimizer == 12 * held.expert / 8


def test_context_parallel_ranks_share_the_optimizer_too() -> None:
    work = job("llama-3.1-8b")
    plain, long = (stage_states(work, Layout.parse(text, 32), 0) for text in ("tp=2", "tp=2,cp=4"))
    assert plain.total == long.total


def test_tied_embeddings_stand_at_both_ends_of_a_pipeline() -> None:
    """F05: V x h at each end, once without a pipeline."""
    model = load_model("llama-3.2-1b")
    assert model.tied
    tokens = model.vocab * model.hidden
    work = job("llama-3.2-1b", Execution())
    whole, _ = stage_holding(work, Layout(), 0)
    first, last = (stage_holding(work, Layout(pp=2), rank)[0] for rank in (0, 1))
    assert whole.dense == model.parameters.total
    assert first.dense + last.dense == whole.dense + tokens


def test_the_head_of_a_256k_vocabulary_weighs_more_than_two_layers() -> None:
    """qlora-pipe#46: layer equivalents of the output layer."""
    model = load_model("llama-3.1-8b").model_copy(update={"vocab": 256_000, "hidden": 8192})
    head = sum(w.elements for w in head_weights(model, shares_embedding=False))
    layer = sum(w.elements for w in layer_weights(model, model.layer(0)))
    assert head / layer > 2


@pytest.mark.parametrize("text", ["pp=4", "pp=4,vpp=2", "pp=4,schedule=zb-v", "pp=4,stages=7|9|9|7"])
def test_stages_hold_every_layer_once_and_the_ends(text: str) -> None:
    work = job("llama-3.1-8b")
    layout = Layout.parse(text)
    units = [u for rank in range(4) for u in stage_units(work, layout, rank)]
    assert sum(n for u, n in units if u == 0) == 32
    assert sorted(str(u) for u, _ in units if u != 0) == ["embedding", "head"]


def test_dualpipe_holds_two_copies_of_the_layers() -> None:
    work = job("llama-3.1-8b")
    once, twice = (sum(stage_states(work, Layout(pp=4, schedule=s), r).parameters for r in range(4)) for s in ("1f1b", "dualpipe"))
    assert twice == 2 * once


def test_frozen_parts_have_no_gradient_and_no_state() -> None:
    work = job("llama-3.1-8b", Execution(), frozen=("attention", "mlp", "norm"))
    found = stage_states(work, Layout(), 0)
    ends = 2 * 128_256 * 4096
    assert found.parameters == 2 * work.model.parameters.total
    assert (found.gradients, found.optimizer) == (4 * ends, 12 * ends)


def test_lora_trains_rank_times_inputs_plus_outputs_of_each_linear_layer() -> None:
    """arXiv:2106.09685, section 4.1."""
    work = job("llama-3.1-8b", Execution(), lora_rank=16)
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (2 * 14336, 4096), (4096, 14336)]
    trained = 32 * sum(16 * (rows + columns) for rows, columns in shapes)
    assert sum(w.elements for w in adapter_weights(tensors(work).units[0], 16)) * 32 == trained
    found = stage_states(work, Layout(), 0)
    assert found.gradients == 4 * trained
    assert found.parameters == 2 * (work.model.parameters.total + trained)


def test_muon_deals_whole_matrices_out_to_ranks() -> None:
    """A rank holds no less than the largest matrix, however many share."""
    work = job("llama-3.1-8b", Execution(), optimizer="muon")
    few, many = (stage_states(work, Layout(dp_shard=n), 0) for n in (1, 4096))
    linear = stage_holding(work, Layout(), 0)[0].dense_linear
    rest = work.model.parameters.total - linear
    assert few.optimizer == 4 * work.model.parameters.total + 8 * rest + 4 * linear
    assert many.optimizer == pytest.approx((4 * work.model.parameters.total + 8 * rest) / 4096 + 4 * 2 * 14336 * 4096)


def test_offloaded_optimizer_states_live_on_the_host() -> None:
    work = job("llama-3.1-8b")
    here, away = (stage_states(work, Layout(dp_shard=4, offload=o), 0) for o in ((), ("optimizer",)))
    assert away.optimizer == 0
    assert away.host == here.optimizer


def test_the_table_states_every_stage_of_every_optimizer() -> None:
    rows = table(load_execution("deepspeed"), ("bf16",), ("adamw", "sgd"), 8)
    assert len(rows) == 8
    assert (rows[2].parameters, rows[2].gradients, rows[2].optimizer_state) == ("2", "2/8", "16/8")
    assert rows[2].total == 2 + 18 / 8


def test_an_unknown_optimizer_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="optimizer"):
        bytes_per_parameter(Execution(), "bf16", "adafactor", 1, 8)


def test_weights_that_megatron_cuts_below_a_kv_head_and_at_a_prediction_module_s_entry() -> None:
    """Qwen3-30B-A3B has 4 KV heads: at TP 8 Megatron-Core holds an eighth of K and V, the own runtime a whole head."""
    work = {name: job("qwen3-30b-a3b", load_execution(name)) for name in ("megatron", "axisplan")}
    key = next(w for w in layer_weights(work["megatron"].model, work["megatron"].model.layer(0)) if w.name == "k")
    assert [key.local(Layout(tp=8), w.execution) for w in work.values()] == [4 * 128 * 2048 // 8, 128 * 2048]
    model = load_model("deepseek-v3")
    entry = next(w for w in mtp_weights(model) if w.name == "mtp_projection")
    held = [entry.local(Layout(tp=4), load_execution(name)) for name in ("megatron", "axisplan")]
    assert held == [2 * 7168**2 // 4, 2 * 7168**2]


def test_explain_prints_the_bytes_per_parameter_of_every_stage() -> None:
    """Megatron's distributed optimizer over 64 ranks, DeepSpeed's ZeRO-2 2 + 18/N and ZeRO-3 18/N (cases A05-A08)."""
    known = {
        "megatron": {("adamw", 0): 18, ("adamw", 1): 6 + 12 / 64, ("sgd", 1): 6 + 8 / 64},
        "deepspeed": {("adamw", 2): 2 + 18 / 64, ("adamw", 3): 18 / 64},
        "fsdp": {("adamw", 2): 2 + 16 / 64, ("adamw", 3): 16 / 64},
    }
    for execution, expected in known.items():
        command = ["explain", "--bytes-per-parameter", "--execution", execution, "--ranks", "64"]
        rows = json.loads(CliRunner().invoke(cli.cli, [*command, "--json"]).output)
        found = {(r["optimizer"], r["zero"]): r["total"] for r in rows if r["precision"] == "bf16"}
        printed = CliRunner().invoke(cli.cli, command).output
        for key, total in expected.items():
            assert found[key] == pytest.approx(total)
            assert f"{total:.4g}" in printed
