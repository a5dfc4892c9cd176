"""Megatron-Bridge overrides: the plan's facts as fields of the generic recipe, in Hydra's grammar."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from oracles import Oracle, refused
from plans import job_of, plan_of
from samples import layouts

from planner.emit.core import EmitSettings
from planner.emit.megatron.bridge import program
from profiles.errors import InputError

MODELS = [
    ("llama-3.1-8b", "h100-sxm:8x8"),
    ("gpt3-175b", "a100-sxm:32x8"),
    ("qwen3-30b-a3b", "h100-sxm:8x8"),
    ("glm-4.5-air", "h100-sxm:16x8"),
]


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
        ("nemotron-4-15b", "tp=8", "squared-relu"),
    ],
)
def test_what_the_generic_recipe_lacks_is_refused(model: str, layout: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as error:
        program(plan_of(job_of(model, seq_len=4096), layout, legal=False), EmitSettings())
    assert error.value.field == "--target"


@pytest.fixture(scope="module")
def hydra() -> Iterator[Oracle]:
    oracle = Oracle("bridge_overrides.py", "AXISPLAN_ORACLE_BRIDGE", "AXISPLAN_MEGATRON_BRIDGE", "AXISPLAN_MEGATRON")
    yield oracle
    oracle.close()


@pytest.mark.slow
def test_hydra_parses_every_override_and_every_field_exists(hydra: Oracle) -> None:
    answers = []
    for model, cluster in MODELS:
        job = job_of(model, cluster, seq_len=2048, global_batch=1536)
        for layout in itertools.islice(layouts(job, 3), 12):
            try:
                made = program(plan_of(job, layout, legal=False), EmitSettings(data=("a b",)))
            except InputError:
                continue
            given = [w.text for w in made.words[5:]]
            answer = hydra.ask({"overrides": given})
            answers.append((f"{model} {layout}", answer))
            if answer["ok"]:
                assert answer["values"]["model.tensor_model_parallel_size"] == layout.tp
                assert answer["values"]["dataset.blend"] == [["a b"], None]
    assert len(answers) > 30
    assert not refused(answers)
