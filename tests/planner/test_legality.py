"""Every rule of planner/rules: a passing and a failing case with its nearest legal value; repairs repair."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.execution import Execution, load_execution
from cost_models.job import Job
from cost_models.layout import SCHEDULES, Layout
from planner.legality import RULES, check, limits_of, read_layout, repaired, require, targets, violations
from planner.rules.core import Case
from planner.solve import PlanRequest, solve
from planner.space import SHARD_FIELDS
from profiles.errors import InputError
from profiles.hardware import load_cluster
from profiles.huggingface import load_model
from profiles.model import Attention, Layer, Mlp, ModelSpec, StateSpace, uniform

ROOT = Path(__file__).resolve().parents[2]


def attention(heads: int, kv_heads: int) -> Attention:
    return Attention(heads=heads, kv_heads=kv_heads, head_dim=64)


OWN = {
    "narrow": uniform("narrow", Layer(mixer=attention(16, 16), ffn=Mlp(width=1026)), 8, hidden=1024, vocab=1024),
    "twelve-heads": uniform("twelve-heads", Layer(mixer=attention(12, 12), ffn=Mlp(width=1152)), 8, hidden=768, vocab=1024),
    "wide-groups": uniform("wide-groups", Layer(mixer=attention(12, 4), ffn=Mlp(width=1152)), 8, hidden=768, vocab=1024),
    "grouped": uniform(
        "grouped", Layer(mixer=StateSpace(heads=16, head_dim=64, state=64, groups=6), ffn=None), 8, hidden=1024, vocab=1024
    ),
}


@cache
def job(text: str) -> Job:
    """``MODEL CLUSTER SEQ_LEN GLOBAL_BATCH EXECUTION [PRECISION]``."""
    model, cluster, seq_len, batch, execution, *precision = text.split()
    spec: ModelSpec = OWN[model] if model in OWN else load_model(model)
    runs = Execution(name="any") if execution == "any" else load_execution(execution)
    return Job(spec, load_cluster(cluster), runs, int(seq_len), int(batch), *precision)


CASES = yaml.safe_load((Path(__file__).parent / "legality_cases.yaml").read_text(encoding="utf-8"))


def changed(of: Job, text: str) -> tuple[Job, str]:
    *fields, layout = text.split()
    for field in fields:
        key, value = field.split("=")
        if key.startswith("execution."):
            of = replace(of, execution=load_execution(of.execution.name, {key.removeprefix("execution."): value}))
            continue
        of = replace(of, **{"seq_len": int(value)} if key == "seq" else {key: value})
    return of, layout


@pytest.mark.parametrize("case", CASES, ids=[f"{c['rule']}-{c['field']}" for c in CASES])
def test_a_rule_lets_a_legal_layout_pass_and_names_field_and_repair_of_an_illegal_one(case):
    legal = job(case["job"])
    assert violations(legal, read_layout(legal, case["good"])) == []
    of, layout = changed(legal, case["bad"])
    found = {v.rule: v for v in violations(of, read_layout(of, layout))}
    assert case["rule"] in found
    assert (found[case["rule"]].field, found[case["rule"]].nearest) == (case["field"], case["nearest"])


def test_every_rule_has_a_case_a_sentence_and_fields_that_exist():
    assert {c["rule"] for c in CASES} | {"stages_inside_a_pool", "pools_need_the_pipeline_outermost"} == set(RULES)
    known = {*Layout.__dataclass_fields__, "dp"}
    for rule in RULES.values():
        assert rule.reads <= known, rule.name
        assert len(rule.sentence) > 10
        assert rule.sentence[0].islower() or rule.sentence[0].isdigit() or rule.sentence.startswith("DualPipe")


def test_the_space_asks_every_rule_but_those_of_the_job_and_of_what_a_column_leaves_open():
    """A rule that reads a field no stage of the enumeration knows would never cut a column."""
    first = [{"tp", "sp"}, {"cp", "cp_kind"}, {"pp", "dp"}, {"ep", "etp"}, set(SHARD_FIELDS)]
    stages = [(set().union(*first[:i]), new) for i, new in enumerate(first)]
    stages += [({"cp", "pp", "dp"}, {"micro_batch"}), ({"cp", "pp", "dp", "micro_batch"}, {"schedule", "vpp"})]
    open_fields = {"stages", "recompute", "capacity"}
    for rule in RULES.values():
        asked = any(rule.reads <= known | new and rule.reads & new for known, new in stages)
        crossing = rule.reads & {"micro_batch", "schedule", "vpp"} and rule.reads & set(SHARD_FIELDS)
        assert asked or crossing or rule.reads & open_fields or not rule.reads, rule.name


@pytest.mark.parametrize(
    ("execution", "changes", "field", "nearest"),
    [("torchtitan", {"precision": "fp16"}, "precision", "bf16"), ("deepspeed", {"optimizer": "adamw8bit"}, "optimizer", "adamw"),
     ("accelerate", {"optimizer": "muon"}, "optimizer", "adamw")],
)  # fmt: skip
def test_a_plan_is_refused_where_no_layout_can_mend_the_job(execution, changes, field, nearest):
    of = replace(job(f"llama-3.2-1b h100-sxm:1x2 2048 16 {execution}"), **changes)
    with pytest.raises(InputError) as refused:
        solve(PlanRequest(of))
    assert (refused.value.field, refused.value.nearest) == (field, nearest)


def test_stages_lie_in_one_pool_of_a_mixed_cluster():
    base = job("llama-3-8b h100-sxm:1x8 4096 64 any")
    from profiles.cluster import Pool

    mixed = replace(
        base.cluster, kind="", pools=(Pool(gpu=base.cluster.gpu, gpus=6), Pool(gpu=load_cluster("a100-sxm:1x2").gpu, gpus=2))
    )
    of = replace(base, cluster=mixed)
    found = {v.rule: v for v in violations(of, Layout(pp=2, tp=4, sp=True))}
    assert (found["stages_inside_a_pool"].field, found["stages_inside_a_pool"].nearest) == ("pp", None)
    assert violations(of, Layout(pp=4, tp=2, sp=True)) == []
    inner = {v.rule: v for v in violations(of, Layout(pp=4, dp_shard=2, order="tp-pp-dp"))}
    assert inner["pools_need_the_pipeline_outermost"].nearest == "tp-cp-dp-pp"


def test_all_broken_rules_come_at_once():
    of = job("llama-3-8b h100-sxm:1x8 4095 63 megatron")
    names = {v.rule for v in violations(of, read_layout(of, "tp=2,pp=3,ep=2,schedule=zb-h1"))}
    assert {"degrees_fill_the_world", "expert_axes_need_experts", "schedule_is_expressible", "sequence_divides"} <= names
    with pytest.raises(InputError, match=r"expert.*\|"):
        require(of, read_layout(of, "tp=2,pp=3,ep=2,schedule=zb-h1"))


def test_where_two_rules_blame_one_field_the_nearest_value_mends_both():
    """8,208 tokens would divide by 2*cp*tp = 16 and leave 8-bit products a ragged tile; 8,192 suits both."""
    of = job("llama-3-8b h100-sxm:1x8 8200 64 axisplan fp8")
    assert {v.nearest for v in violations(of, read_layout(of, "tp=2,cp=4"))} == {8192}


MODELS = ("llama-3-8b", "qwen2.5-14b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite", "mamba2-2.7b", "gpt2")
degree = st.sampled_from((1, 2, 3, 4, 5, 6, 8, 12, 16))


@st.composite
def cases(draw):
    execution = draw(st.sampled_from(("any", "axisplan", "megatron", "torchtitan", "deepspeed", "accelerate", "fsdp")))
    text = (
        f"{draw(st.sampled_from(MODELS))} {draw(st.sampled_from(('h100-sxm:1x8', 'h100-sxm:2x8', 'h100-sxm:3x4')))}"
        f" {draw(st.sampled_from((512, 1000, 1024)))} {draw(st.sampled_from((12, 48, 60, 64)))} {execution}"
    )
    layout = Layout(
        tp=draw(degree), pp=draw(degree), vpp=draw(st.sampled_from((1, 1, 2, 3))), cp=draw(degree), ep=draw(degree),
        cp_kind=draw(st.sampled_from(("ring", "ulysses", "allgather", "ring2xulysses2"))), etp=draw(st.sampled_from((1, 1, 2))),
        dp_replicate=draw(st.sampled_from((1, 1, 2))), dp_shard=draw(degree), zero=draw(st.integers(0, 3)),
        order=draw(st.sampled_from(("tp-cp-dp-pp", "tp-cp-pp-dp", "tp-pp-dp"))), sp=draw(st.booleans()), micro_batch=draw(degree),
        schedule=draw(st.sampled_from(SCHEDULES)), recompute=draw(st.sampled_from(("none", "full", "selective", "0-1:full"))),
        offload=draw(st.sampled_from(((), ("optimizer",), ("activations",)))),
    )  # fmt: skip
    return job(text), layout


@settings(max_examples=120, deadline=None, derandomize=True)
@given(cases())
def test_a_repaired_field_no_longer_breaks_the_rule_and_breaks_none_that_held(case):
    of, layout = case
    broken = violations(of, layout)
    names = {v.rule for v in broken}
    for violation in broken[:4]:
        if violation.nearest is None:
            continue
        after = repaired(of, layout, violation.field, violation.nearest)
        assert after is not None
        now = {v.rule for v in violations(*after)}
        assert violation.rule not in now
        assert now <= names


def test_a_layout_is_checked_before_it_is_costed():
    of = job("llama-3-8b h100-sxm:1x8 4096 64 axisplan")
    assert check(of, "tp=16")["fits"] is None
    fine = check(of, "tp=8,recompute=full")
    assert (fine["legal"], fine["fits"], fine["violations"]) == (True, True, [])
    over = check(job("llama-3-70b h100-sxm:1x8 4096 64 axisplan"), "tp=8")
    assert over["legal"]
    assert not over["fits"]
    assert over["binding"]["over_bytes"] > 0


def test_activations_are_offloaded_only_where_no_target_limits_the_execution() -> None:
    of = job("llama-3-8b h100-sxm:1x8 4096 64 axisplan")
    may = {}
    for file in sorted((ROOT / "cost_models" / "data" / "executions").glob("*.yaml")):
        own = replace(of, execution=load_execution(file.stem))
        found = [v.rule for v in violations(own, Layout.parse("dp_shard=8,zero=1,offload=activations"))]
        may[file.stem] = "offload_is_expressible" not in found
    assert [name for name, yes in may.items() if yes] == ["simumax"]
    assert "`simumax` alone" in (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")


def test_limits_are_narrowed_by_the_facts_of_the_execution():
    assert "megatron" in targets()
    assert limits_of(job("llama-3-8b h100-sxm:1x8 4096 64 megatron")).target == "megatron"
    assert "pp" not in limits_of(job("llama-3-8b h100-sxm:1x8 4096 64 deepspeed")).axes
    for rule in RULES.values():
        assert (
            rule.breaks(
                Case(
                    job("llama-3-8b h100-sxm:1x8 4096 64 any"),
                    Layout(dp_shard=8),
                    limits_of(job("llama-3-8b h100-sxm:1x8 4096 64 any")),
                )
            )
            == []
        )
