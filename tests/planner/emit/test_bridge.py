"""Megatron-Bridge overrides: the plan's facts as fields of the generic recipe, in Hydra's grammar."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from judges import Case, bridge_question
from oracles import Oracle
from plans import job_of, plan_of

from cost_models.layout import Layout
from planner.emit.core import EmitSettings
from planner.emit.megatron.bridge import program, quoted, unquoted
from profiles.errors import InputError


def overrides(model: str, layout: str, cluster: str = "h100-sxm:8x8", **settings: object) -> list[str]:
    words = program(plan_of(job_of(model, cluster), layout), EmitSettings(**settings)).words  # type: ignore[arg-type]
    return [w.text for w in words if "=" in w.text]


def test_fields_have_the_configurations_names() -> None:
    made = overrides("qwen3-30b-a3b", "tp=2,pp=2,ep=8,etp=1,cp=2,stages=23|25,recompute=selective(moe_act)")
    assert "model.tensor_model_parallel_size=2" in made
    assert "model.num_moe_experts=128" in made
    assert "model.expert_tensor_parallel_size=1" in made
    assert 'model.pipeline_model_parallel_layout="Et*23|t*25L"' in made
    assert "model.recompute_modules=[moe_act]" in made
    assert "model.cp_comm_type=p2p" in made
    assert {"model.seq_length=8192", "dataset.seq_length=8192"} <= set(made)
    assert {"model.gated_linear_unit=true", "model.activation_func=silu"} <= set(made)
    assert "mixed_precision=bf16_mixed" in made


def test_lists_are_written_out_and_text_is_quoted() -> None:
    made = overrides("glm-4.5-air", "ep=8", "h100-sxm:16x8", data=('a "b" $(c)',))
    assert "model.moe_layer_freq=[0," + ",".join(["1"] * 45) + "]" in made
    assert r'dataset.blend=[["a \"b\" $(c)"],null]' in made


@pytest.mark.parametrize(
    ("model", "layout", "reason"),
    [
        ("deepseek-v3", "tp=8,ep=64,etp=1", "latent attention"),
        ("gpt-oss-20b", "tp=2,ep=4,etp=1", "rotary"),
        ("nemotron-4-15b", "tp=8", "squared ReLU"),
    ],
)
def test_what_the_generic_recipe_lacks_is_refused(model: str, layout: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as error:
        program(plan_of(job_of(model, seq_len=4096), layout, legal=False), EmitSettings())
    assert error.value.field == "--target"


@pytest.fixture(scope="module")
def bridge() -> Iterator[Oracle]:
    oracle = Oracle("bridge_config.py", "AXISPLAN_ORACLE_BRIDGE", "AXISPLAN_MEGATRON_BRIDGE", "AXISPLAN_MEGATRON")
    yield oracle
    oracle.close()


@pytest.mark.slow
def test_the_recipe_takes_a_plan_and_refuses_what_is_broken_in_it(bridge: Oracle) -> None:
    """So that what the other tests call accepted means something."""
    good = bridge_question(Case("megatron-bridge", job_of(execution="megatron-bridge"), Layout.parse("tp=4,pp=2", 64)))
    assert bridge.ask(good)["ok"]
    broken = [
        "model.tensor_model_parallel_size=3", "model.pipeline_model_parallel_size=3", "model.no_such_field=1", "dataset.seq_length=4096",
        "train.global_batch_size=130",
    ]  # fmt: skip
    for override in broken:
        assert not bridge.ask({**good, "overrides": [*good["overrides"], override]})["ok"], override


HARD = ('a "b" $(c)', "d\\e", 'f\\"g', "h\\", "i,[j]={k}", "l 'm'")


@pytest.mark.slow
def test_data_with_spaces_quotes_and_backslashes_reach_the_recipe_as_they_are(bridge: Oracle) -> None:
    made = overrides("llama-3.1-8b", "tp=2", data=HARD)
    answer = bridge.ask(
        {"world": 64, "overrides": made, "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "values": ["dataset.blend"]}
    )
    assert answer["ok"], answer
    assert answer["values"]["dataset.blend"] == [[*HARD], None]


@pytest.mark.parametrize("text", HARD)
def test_text_that_is_quoted_is_read_back(text: str) -> None:
    assert unquoted(quoted(text)) == text
