"""Group A of the cases, and C13 and C16, as a user of the commands meets them: what is said, chosen and refused."""

from __future__ import annotations

import json

import pytest

from cost_models.execution import Execution, execution_names, load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.memory import fits, stage_memory
from planner.legality import check
from planner.solve import PlanRequest, solve
from profiles.errors import DoesNotFit
from tests.planner.jobs import decoder, job

GIB = 2**30


def test_a08_states_are_one_column_of_several_and_units_are_gib(invoke):
    """DeepSpeed#4527: 0.49 of an estimator was model states alone; 21.3 GiB were needed."""
    arguments = ["llama-7b", "--cluster", "a100-sxm:1x4", "--seq-len", "2k", "--global-batch", "4", "--execution", "deepspeed"]
    arguments += ["--layout", "zero=3,offload=optimizer"]
    code, out, _ = invoke("estimate", *arguments)
    assert code == 0
    assert "memory by stage in GiB" in out
    for word in ("param", "activ", "temp", "comm", "allocated", "device"):
        assert word in out
    code, out, _ = invoke("estimate", *arguments, "--json")
    stage = json.loads(out)["memory"][0]
    states = stage["parameters"] + stage["gradients"] + stage["optimizer"]
    assert states / GIB == pytest.approx(6.74e9 * 2 / 4 / GIB, rel=0.01)
    assert stage["temporary"] > 0
    assert stage["device"] > stage["peak_reserved"] > stage["peak_allocated"] > 1.5 * states


def test_a12_the_repair_of_a_recipe_for_larger_gpus_is_a_smaller_microbatch(invoke):
    facts = ("parameter_bytes=2", "moment_bytes=2", "gradient_bytes=2", "reduce_bytes=2", "reshard_with_pipeline=true")
    arguments = ["llama-3.1-70b", "--seq-len", "1024", "--global-batch", "128", "--execution", "torchtitan"]
    arguments += [word for fact in facts for word in ("--set", f"execution.{fact}")] + ["--layout", "pp=8,zero=3,micro_batch=4"]
    code, out, _ = invoke("check", *arguments, "--cluster", "h100-sxm:4x8")
    assert code == 3
    assert "binding  stage 0, activations" in out
    assert "remedy   any of: micro_batch=2" in out
    assert invoke("check", *arguments, "--cluster", "h200-sxm:4x8")[0] == 0


def test_a35_a_model_that_a_script_builds_whole_is_warned_of_and_its_peak_refuses_it(invoke):
    """ColossalAI#5068: the layout fits, and ran out while weights were made."""
    arguments = ["llama-2-70b", "--cluster", "a100-sxm:4x8", "--seq-len", "1k", "--global-batch", "32", "--execution", "deepspeed"]
    arguments += ["--layout", "zero=3,recompute=full"]
    code, out, _ = invoke("check", *arguments)
    assert code == 0
    assert "warning  the whole model takes 128.5 GiB and a rank may use 72.8: build it in place" in out
    whole = ("--set", "execution.initial_whole_model=true", "--set", "execution.initial_copies_bytes=2")
    code, out, _ = invoke("check", *arguments, *whole)
    assert code == 3
    assert "initialisation" in out
    code, out, _ = invoke("check", *[a.replace("deepspeed", "megatron").replace("zero=3", "tp=8,pp=2") for a in arguments])
    assert code == 0
    assert "warning" not in out


def test_a37_graphs_are_off_unless_asked_for_and_their_pool_counts_against_the_limit():
    """TransformerEngine#2543: 40 % full without graphs, out of memory with them."""
    assert {load_execution(name).graphs for name in execution_names()} == {"none"}
    layout = Layout.parse("tp=2,pp=2", 8)
    plain = job("llama-3.1-8b", "h200-sxm:1x8", 8192, 64, "megatron")
    pooled = Job(plain.model, plain.cluster, plain.execution.with_(graphs="partial", graph_pool_ratio=1.0), 8192, 64)
    needed = max(stage.device for stage in stage_memory(plain, layout))
    tight = {"memory_limit_bytes": needed + GIB, "margin": 0.0}
    assert fits(Job(plain.model, plain.cluster, plain.execution, 8192, 64, **tight), layout)[0]
    assert not fits(Job(plain.model, plain.cluster, pooled.execution, 8192, 64, **tight), layout)[0]


@pytest.mark.parametrize(("execution", "zero"), [("fsdp", 0), ("axisplan", 1), ("megatron", 1)])
def test_c13_a_1b_model_on_four_gpus_is_planned_replicated_or_with_zero_1(execution, zero):
    """OLMo#762: DDP 8,034 tokens/s, FSDP 1,747."""
    model = decoder(layers=16, hidden=2048, heads=16, kv_heads=8, width=8192, vocab=50304)
    plan = solve(PlanRequest(job(model, "l40s:1x4", 2048, 64, execution), pins="tp=1,pp=1,cp=1,micro_batch=2", tie=0.0, top=0))
    assert plan.layout["zero"] <= zero


def test_c16_precision_is_the_user_s_choice_and_a_plan_keeps_a_margin_in_8_bits_too():
    """lingua#56: fp8 at 87 % of memory and retries."""
    model = decoder(layers=8, hidden=4096, heads=32, kv_heads=8, width=14336, vocab=128256)
    for precision in ("bf16", "fp8"):
        of = job(model, "h100-sxm:1x8", 8192, 64, "fsdp", precision=precision)
        plan = solve(PlanRequest(of, pins="tp=1,pp=1,cp=1", tie=0.0, top=0))
        assert plan.job_settings.precision == precision
        worst = max(stage["device"] for stage in plan.estimate["memory"])
        assert worst <= (1 - 0.08) * of.cluster.gpu.usable_bytes


@pytest.mark.slow
def test_a28_32_gpus_train_qwen3_235b_with_the_optimizer_in_host_memory_only():
    """slime#280: 18 bytes a parameter do not fit on 32 x 80 GB; the script that ran kept the optimizer on the hosts."""
    of = job("qwen3-235b-a22b", "h100-sxm:4x8", 4096, 256, "megatron")
    with pytest.raises(DoesNotFit, match="no feasible layout"):
        solve(PlanRequest(of, top=0))
    plan = solve(PlanRequest(of, offload=True, top=0))
    assert plan.layout_object.offload == ("optimizer",)
    assert max(stage["device"] for stage in plan.estimate["memory"]) <= plan.estimate["limit_bytes"]


def test_the_leanest_layout_of_what_does_not_fit_has_the_smallest_micro_batch():
    with pytest.raises(DoesNotFit, match=r"of the leanest one .*micro_batch=1,"):
        solve(PlanRequest(job("deepseek-v3", "h100-sxm:1x8", 4096, 64), pins="tp=1,pp=1,cp=1", top=0))


def test_a_layout_that_does_not_fit_names_the_single_changes_after_which_it_does():
    of = job("llama-3-8b", "h100-sxm:1x8", 8192, 64, "megatron")
    found = check(of, "tp=2,zero=1,micro_batch=4")
    assert found["fits"] is False
    assert found["would_fit"]
    layout = Layout.parse("tp=2,zero=1,micro_batch=4", 8)
    for change in found["would_fit"]:
        key, value = change.split("=")
        changed = layout.with_(**{key: int(value) if value.isdigit() else (value,) if key == "offload" else value})
        assert fits(of, changed)[0]
    assert "warnings" not in check(of, "tp=2,zero=1,recompute=full")
    assert Execution().builds_in_place
