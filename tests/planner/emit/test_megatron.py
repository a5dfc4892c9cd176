"""What the Megatron-LM target says, and what it refuses (targets.md 1.1 to 1.4; cases.md I01, I06, B03, B05, B06)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from plans import job_of, plan_of, renamed

from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import even_split
from planner.emit import connections
from planner.emit.connections import Streams
from planner.emit.core import EmitSettings, Program, emit
from planner.emit.megatron.layout import layout_string
from planner.emit.megatron.program import program
from planner.emit.megatron.reading import layers_of
from profiles.errors import InputError
from profiles.huggingface import load_model
from profiles.model import Attention, Layer, Mlp, Moe, uniform


def flags(made: Program) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    name = ""
    for word in made.words[1:]:
        if word.text.startswith("--"):
            name = word.text
            out[name] = []
        else:
            out[name].append(word.text)
    return out


def emitted(model: str, layout: str, cluster: str = "h100-sxm:8x8", legal: bool = True, **job: object) -> dict[str, list[str]]:
    return flags(program(plan_of(job_of(model, cluster, **job), layout, legal=legal), EmitSettings()))  # type: ignore[arg-type]


def test_degrees_are_written_and_expert_tensor_parallelism_always() -> None:
    dense = emitted("llama-3.1-8b", "tp=4,pp=2,cp=2")
    assert dense["--tensor-model-parallel-size"] == ["4"]
    assert dense["--pipeline-model-parallel-size"] == ["2"]
    assert dense["--context-parallel-size"] == ["2"]
    assert dense["--expert-tensor-parallel-size"] == ["1"]
    moe = emitted("qwen3-30b-a3b", "tp=4,ep=8,etp=2")
    assert (moe["--expert-model-parallel-size"], moe["--expert-tensor-parallel-size"]) == (["8"], ["2"])
    assert dense["--sequence-parallel"] == []


def test_head_width_latent_attention_and_experts_are_written_out() -> None:
    qwen = emitted("qwen3-4b", "tp=2")
    assert qwen["--kv-channels"] == ["128"]
    assert qwen["--num-query-groups"] == ["8"]
    assert "--qk-layernorm" in qwen
    assert "--untie-embeddings-and-output-weights" not in qwen
    deepseek = emitted("deepseek-v3", "tp=2,pp=16,ep=64,etp=1", "h100-sxm:256x8", seq_len=4096, global_batch=8192)
    assert deepseek["--kv-lora-rank"] == ["512"]
    assert deepseek["--q-lora-rank"] == ["1536"]
    assert (deepseek["--qk-head-dim"], deepseek["--qk-pos-emb-head-dim"], deepseek["--v-head-dim"]) == (["128"], ["64"], ["128"])
    assert deepseek["--moe-layer-freq"] == ["([0]*3+[1]*58)"]
    assert deepseek["--moe-shared-expert-intermediate-size"] == ["2048"]
    assert deepseek["--moe-router-topk-scaling-factor"] == ["2.5"]
    assert (deepseek["--moe-router-num-groups"], deepseek["--moe-router-group-topk"]) == (["8"], ["4"])
    assert deepseek["--mtp-num-layers"] == ["1"]
    assert deepseek["--pipeline-model-parallel-layout"][0].endswith("mL")
    assert "--group-query-attention" not in deepseek


def test_rotary_scaling_is_written_in_megatrons_terms() -> None:
    llama = emitted("llama-3.1-8b", "tp=2")
    assert "--use-rope-scaling" in llama
    assert llama["--rope-scaling-factor"] == ["8"]
    deepseek = emitted("deepseek-v3", "tp=2,pp=16,ep=64,etp=1", "h100-sxm:256x8", seq_len=4096, global_batch=8192)
    assert (deepseek["--rotary-scaling-factor"], deepseek["--mscale"], deepseek["--mscale-all-dim"]) == (["40"], ["1"], ["1"])
    oss = emitted("gpt-oss-20b", "tp=2,ep=4,etp=1")
    assert (oss["--position-embedding-type"], oss["--yarn-original-max-position-embeddings"], oss["--mscale"]) == (
        ["yarn"],
        ["4096"],
        ["1"],
    )
    assert "--use-rope-scaling" not in emitted("llama-2-7b", "tp=2", seq_len=4096)


def test_windows_biases_and_sinks_of_gpt_oss() -> None:
    made = emitted("gpt-oss-20b", "tp=2,ep=4,etp=1")
    assert made["--window-size"] == ["127,0"]
    assert made["--window-attn-skip-freq"] == ["(" + "+".join(["[1]*1", "[0]*1"] * 12) + ")"]
    assert made["--softmax-type"] == ["learnable"]
    assert "--quick-geglu" in made
    assert "--disable-bias-linear" not in made


@pytest.mark.parametrize(
    ("layout", "flag", "values"),
    [
        ("cp=4,cp_kind=ring", "--cp-comm-type", ["p2p"]),
        ("cp=4,cp_kind=ulysses", "--cp-comm-type", ["a2a"]),
        ("cp=4,cp_kind=allgather", "--cp-comm-type", ["all_gather"]),
        ("cp=8,cp_kind=ring4xulysses2", "--hierarchical-context-parallel-sizes", ["2", "4"]),
        ("tp=2,zero=1,dp_replicate=4", "--num-distributed-optimizer-instances", ["4"]),
        ("zero=3", "--data-parallel-sharding-strategy", ["optim_grads_params"]),
        ("zero=2", "--data-parallel-sharding-strategy", ["optim_grads"]),
        ("zero=3", "--ckpt-format", ["fsdp_dtensor"]),
        ("tp=4,pp=4,vpp=2", "--num-virtual-stages-per-pipeline-rank", ["2"]),
        ("tp=4,recompute=full", "--recompute-method", ["uniform"]),
        ("tp=4,recompute=selective(core_attn,layernorm)", "--recompute-modules", ["core_attn", "layernorm"]),
        ("tp=4,pp=2,recompute=0-2:full/16-18:full", "--recompute-num-layers", ["3"]),
        ("tp=4,pp=2,order=tp-cp-pp-dp", "--use-tp-pp-dp-mapping", []),
        ("tp=4,pp=2,order=tp-cp-pp-dp", "--expert-tensor-parallel-size", ["4"]),
        ("tp=4,offload=optimizer", "--optimizer-offload-fraction", ["1.0"]),
    ],
)
def test_each_choice_of_a_layout_has_its_flag(layout: str, flag: str, values: list[str]) -> None:
    assert emitted("llama-3.1-8b", layout)[flag] == values


@pytest.mark.parametrize(("layers", "chunks"), [(30, 4), (61, 16), (126, 16), (32, 5), (7, 7), (80, 12)])
def test_a_layout_string_holds_every_layer_once(layers: int, chunks: int) -> None:
    counts = even_split(layers, chunks)
    text = layout_string(counts, 1)
    assert layers_of(text) == counts
    assert (text[0], text[-2:], text.count("m"), text.count("E"), text.count("L")) == ("E", "mL", 1, 1, 1)
    assert sum(layers_of(text)) == layers


def test_thirty_layers_over_four_stages_lose_none() -> None:
    model = uniform(
        "thirty", Layer(mixer=Attention(heads=8, kv_heads=8, head_dim=64), ffn=Mlp(width=2048)), 30, hidden=512, vocab=32000
    )
    made = flags(program(plan_of(job_of(model), "tp=2,pp=4"), EmitSettings()))
    assert layers_of(made["--pipeline-model-parallel-layout"][0]) == (7, 8, 8, 7)


def test_the_layout_string_of_the_note_is_read_as_megatron_reads_it() -> None:
    assert layers_of("Et*3|(t*4|)*6t*5L") == (3, 4, 4, 4, 4, 4, 4, 5)


@pytest.mark.parametrize(
    ("facts", "value"),
    [
        (Streams(9, tp=4), "1"), (Streams(8, cp=2), "1"), (Streams(9, tp=2, fsdp=True), "unset"), (Streams(9, fsdp=True), "unset"),
        (Streams(10, tp=8), ""),
        (Streams(9), ""), (Streams(9, tp=2, ep_overlap=True), "32"), (Streams(9, ep_overlap=True), ""), (Streams(0, tp=8), ""),
        (Streams(None, tp=8), "1"),
    ],
)  # fmt: skip
def test_connections_that_megatron_demands_by_architecture_and_features(facts: Streams, value: str) -> None:
    made = connections.megatron(facts)
    assert (["unset" if v.value is None else v.value for v in made] or [""]) == [value]
    if facts.ep_overlap and facts.tp > 1:
        assert "Conflict" in made[0].reason


@pytest.mark.parametrize(
    ("facts", "value"), [(Streams(9, tp=2, fsdp=True), "32"), (Streams(9, fsdp=True), ""), (Streams(9, tp=2), "")]
)
def test_torchtitan_with_fsdp_and_tp_has_many_connections(facts: Streams, value: str) -> None:
    assert [v.value for v in connections.torchtitan(facts)] == ([value] if value else [])


# -- what Megatron-LM's parser lets pass and we refuse (targets.md 1.4) ------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout", "job", "rule"),
    [
        ("llama-3.1-8b", "tp=4,pp=4,vpp=3,stages=8|8|8|8|8|8|8|8|8|8|8|8", {}, "stages_hold_all_layers"),
        ("llama-3.1-8b", "tp=4,pp=4,vpp=2", {"global_batch": 24}, "microbatches_in_groups"),
        ("llama-3.1-8b", "tp=4,pp=4,vpp=2", {"global_batch": 8}, "enough_microbatches"),
        ("qwen3-30b-a3b", "tp=4,ep=8,etp=1,sp=false", {}, "experts_need_sequence"),
        ("llama-3.1-8b", "tp=2,cp=8,cp_kind=ulysses", {}, "kv_heads_divide_ulysses"),
        ("llama-3.1-8b", "tp=4", {"seq_len": 8190}, "sequence_divides"),
        ("llama-3.1-8b", "pp=2,zero=3", {}, "zero_and_pipeline"),
        ("llama-3.1-8b", "pp=4,schedule=zb-v", {}, "schedule_is_expressible"),
        ("deepseek-v3", "tp=8,cp=2,cp_kind=ulysses,ep=8,etp=1", {}, "latent_attention_and_ulysses"),
        ("qwen3-30b-a3b", "tp=4,ep=24,etp=1", {}, "experts_divide_ep"),
        ("gpt-oss-20b", "tp=2,ep=4,etp=2", {}, "expert_bias_and_etp"),
        ("llama-3.1-8b", "tp=4,recompute=0-3:selective/4-5:full", {}, "recompute_is_expressible"),
    ],
)
def test_what_the_parser_lets_pass_is_refused_with_its_rule(model: str, layout: str, job: dict[str, int], rule: str) -> None:
    with pytest.raises(InputError) as error:
        emitted(model, layout, legal=False, **job)
    assert error.value.field == "--target"
    assert rule in str(error.value)


def test_a_width_that_tp_does_not_divide_is_refused() -> None:
    layer = Layer(mixer=Attention(heads=32, kv_heads=8, head_dim=128), ffn=Mlp(width=14335))
    job = job_of(uniform("odd", layer, 32, hidden=4096, vocab=128256))
    with pytest.raises(InputError, match="14335"):
        program(plan_of(job, "tp=4", legal=False), EmitSettings())


@pytest.mark.parametrize(
    ("model", "layout", "reason"),
    [
        ("falcon-40b", "tp=4", "in parallel"), ("gemma-2-9b", "tp=4", "4 norms"), ("olmo-2-7b", "tp=4", "norms"),
        ("bloom-176b", "tp=8", "norm after"),
        ("llama-4-scout", "tp=4,etp=1", "chunked"), ("mamba2-2.7b", "tp=4", "state space"),
        ("qwen3-next-80b-a3b", "tp=2,etp=1", "linear attention"),
        ("gemma-2b", "tp=1", "gelu"), ("opt-13b", "tp=4", "relu"), ("minimax-m2", "tp=4,etp=1", "query-key norms"),
        ("glm-4-32b", "tp=2", "norms"),
    ],
)  # fmt: skip
def test_models_that_megatrons_gpt_does_not_build_are_refused_with_the_reason(model: str, layout: str, reason: str) -> None:
    job = job_of(model, seq_len=2048, global_batch=512)
    with pytest.raises(InputError, match=reason) as error:
        program(plan_of(job, layout, legal=False), EmitSettings())
    assert error.value.field == "--target"


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("tp=2,ep=16,etp=1,dp_replicate=8", "replicas_divide_expert_replicas"),
        ("tp=2,pp=2,ep=1,etp=1,order=tp-cp-pp-dp", "edp = "),
        ("tp=2,ep=8,etp=1,dispatcher=allgather,capacity=1.5", "capacity"),
        ("tp=2,ep=8,etp=1,recompute=selective(shared_experts)", "shared_experts"),
        ("tp=2,ep=8,etp=1,recompute=selective(mla_up_proj)", "mla_up_proj"),
    ],
)
def test_combinations_that_no_flag_expresses_are_refused(layout: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        emitted("qwen3-30b-a3b", layout, legal=False)


def test_a_plan_made_for_another_execution_is_looked_at_under_megatrons_limits() -> None:
    job = job_of("llama-3.1-8b", execution="axisplan")
    assert flags(program(plan_of(job, "tp=4,pp=2"), EmitSettings()))["--tensor-model-parallel-size"] == ["4"]
    with pytest.raises(InputError, match="made for --execution axisplan") as error:
        program(plan_of(job, "tp=4,pp=2,schedule=zb-h1"), EmitSettings())
    assert "schedule_is_expressible" in str(error.value)


def test_routers_of_mixtures_are_told_apart() -> None:
    mixtral, switch = load_model("mixtral-8x7b"), load_model("mixtral-8x7b")
    layer = switch.kinds[0]
    assert isinstance(layer.ffn, Moe)
    raw = switch.model_copy(
        update={"kinds": (layer.model_copy(update={"ffn": layer.ffn.model_copy(update={"normalise_top_k": False})}),)}
    )
    normalised = flags(program(plan_of(job_of(mixtral), "tp=2,ep=8,etp=1"), EmitSettings()))
    plain = flags(program(plan_of(job_of(raw), "tp=2,ep=8,etp=1"), EmitSettings()))
    assert "--moe-router-pre-softmax" not in normalised
    assert "--moe-router-pre-softmax" in plain


@pytest.mark.parametrize(
    ("precision", "flag", "value"),
    [
        ("fp8", "--fp8-format", "hybrid"),
        ("mxfp8", "--fp8-recipe", "mxfp8"),
        ("nvfp4", "--fp4-recipe", "nvfp4"),
        ("fp16", "--fp16", None),
    ],
)
def test_precisions(precision: str, flag: str, value: str | None) -> None:
    made = emitted("llama-3.1-8b", "tp=2", "b200:4x8", precision=precision)
    assert made[flag] == ([value] if value else [])


def test_the_folder_says_what_to_set_and_how_to_compare(tmp_path: Path) -> None:
    job = job_of(renamed("llama-3.1-8b", "mine"))
    paths = emit(plan_of(job, "tp=4,pp=2"), "megatron", "torchrun", tmp_path / "launch", EmitSettings(steps=50))
    assert {p.name for p in paths} >= {"plan.json", "launch.sh", "README.md"}
    script, readme = (tmp_path / "launch" / "launch.sh").read_text(), (tmp_path / "launch" / "README.md").read_text()
    assert "MEGATRON_PATH" in script
    assert "  --tensor-model-parallel-size 4\n" in script
    assert "axisplan measure" in readme
    assert "a step (80 % interval" in readme


def test_the_vocabulary_is_padded_to_more_than_tp_alone() -> None:
    """cases.md B10: never divisor 1 beside tp."""
    odd = replace(job_of("gpt2", "h100-sxm:1x8", seq_len=1024), execution=load_execution("megatron", {"vocab_multiple": "1"}))
    assert flags(program(plan_of(odd, "tp=1"), EmitSettings()))["--make-vocab-size-divisible-by"] == ["1"]
    with pytest.raises(InputError, match="vocab_multiple = 1 beside tp"):
        program(plan_of(odd, "tp=2", legal=False), EmitSettings())
    assert emitted("gpt2", "tp=2", "h100-sxm:1x8", seq_len=1024)["--make-vocab-size-divisible-by"] == ["128"]


def overlapped() -> Job:
    execution = load_execution("megatron", {"tp_overlap": "userbuffers"})
    return replace(job_of(), execution=execution)


def test_overlapped_tensor_parallelism_is_written_where_the_execution_has_it() -> None:
    def has(job: Job, layout: str) -> bool:
        return "--tp-comm-overlap" in flags(program(plan_of(job, layout), EmitSettings()))

    assert [has(overlapped(), "tp=4"), has(overlapped(), "dp=64"), has(job_of(), "tp=4")] == [True, False, False]
    with pytest.raises(InputError, match="sequence parallelism"):
        program(plan_of(overlapped(), "tp=4,sp=false", legal=False), EmitSettings())
