"""Parameter counts equal those of the model that transformers builds from the same config, in total and by part.

The comparison is that of ``benchmarks/model_exactness.py``, whose table is kept and shown. The cases (model_cases.json) are each family at its class defaults and at odd sizes: biases on and off, tied or not, uneven MoE
steps, odd head widths. One odd-sized case of a dozen families runs in the default tier, all of them in the slow one.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from profiles.families.registry import ALIASES, NO_CLASS, READERS, checked_against, read_config
from profiles.huggingface import load_model, model_names
from profiles.parameters import PARTS
from tests.scripts import script

EXACTNESS: Any = script("model_exactness")
CASES: dict[str, list[dict[str, Any]]] = EXACTNESS.CASES
SAMPLE = {
    "llama", "qwen2", "qwen2_moe", "qwen3_moe", "gemma3_text", "gpt2", "falcon", "deepseek_v3", "gpt_oss", "llama4_text",
    "nemotron_h", "qwen3_next", "falcon_h1",
}  # fmt: skip


def cases() -> list[Any]:
    found = []
    for family, overrides in CASES.items():
        for number, override in enumerate(overrides):
            quick = family in SAMPLE and override and number == len(overrides) - 1
            found.append(pytest.param(family, number, id=f"{family}-{number}", marks=() if quick else pytest.mark.slow))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gemma3", "llama4", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
)
def test_the_text_part_of_a_multimodal_model_counts_as_the_wrapper_builds_it(family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family)
    with torch.device("meta"):
        built = transformers.AutoModelForImageTextToText.from_config(config)
    text = [p for name, p in built.named_parameters() if not any(word in name for word in ("vision", "visual", "multi_modal"))]
    spec = read_config(json.loads(json.dumps(config.to_dict(), default=str)), family)
    assert spec.parameters.total == sum(parameter.numel() for parameter in text)
    assert "text part" in spec.notes[0]


@pytest.mark.parametrize(("family", "number"), cases())
def test_parameters_equal_those_transformers_builds(family: str, number: int) -> None:
    pytest.importorskip("transformers")
    config, built = EXACTNESS.build({"model_type": family, **CASES[family][number]})
    whole, shortened = json.loads(json.dumps(config.to_dict(), default=str)), json.loads(config.to_json_string(use_diff=True))
    row = EXACTNESS.compared(family, "", whole, built)
    assert (row.difference, row.differing) == (0, "")
    assert sum(row.parts) == row.total
    assert read_config(whole, family) == read_config(shortened, family)


KEPT = {(row.config, row.sizes): row for row in EXACTNESS.load()}
OF_THE_TABLE = ("qwen3-0.6b", "gemma-3-27b", "mixtral-8x22b", "deepseek-v3", "mamba2-2.7b", "minimax-m2")


def test_the_table_has_every_built_in_model_and_every_family_and_nothing_that_differs() -> None:
    assert {config for config, sizes in KEPT if sizes == "released"} == set(model_names())
    assert {row.model_type for row in KEPT.values()} >= set(READERS)
    assert not [row.config for row in KEPT.values() if EXACTNESS.wrong(row)]
    assert EXACTNESS.PAGE.read_text() == EXACTNESS.page(list(KEPT.values()))


@pytest.mark.parametrize("name", model_names())
def test_a_row_of_the_table_is_what_is_counted_today(name: str) -> None:
    counted = load_model(name).parameters
    row = KEPT[name, "released"]
    assert (row.total, row.active, row.mtp) == (counted.total, counted.active, counted.mtp)
    assert row.parts == tuple(getattr(counted, part) for part in PARTS)


@pytest.mark.parametrize("name", OF_THE_TABLE)
def test_a_sample_of_the_table_is_still_what_transformers_builds(name: str) -> None:
    pytest.importorskip("transformers")
    assert EXACTNESS.released(name) == KEPT[name, "released"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in model_names() if name not in OF_THE_TABLE])
def test_a_released_config_counts_as_transformers_builds_it(name: str) -> None:
    """In total and by part, at the released size; where there is no class, the published total."""
    pytest.importorskip("transformers")
    row = EXACTNESS.released(name)
    assert row == KEPT[name, "released"]
    if row.model_type in NO_CLASS:
        assert abs(row.difference) < 0.03 * row.reference
    else:
        assert (row.difference, row.differing) == (0, "")


def test_models_without_a_class_are_those_that_transformers_does_not_know() -> None:
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES as known

    assert not NO_CLASS & set(known)
    renamed = {"RefinedWeb", "RefinedWebModel", "kimi_vl", "stablelm_epoch"}  # older names of families that it has
    assert {*READERS, *ALIASES} - set(known) - renamed == NO_CLASS


@pytest.mark.parametrize(
    ("name", "against"), [("grok-1", "published total"), ("kimi-k2", "published total"), ("llama-3.1-8b", "transformers")]
)
def test_a_model_says_what_its_counts_were_compared_with(name: str, against: str) -> None:
    spec = load_model(name)
    assert checked_against(spec) == against
    assert any("published total" in note for note in spec.notes) is (against == "published total")
    assert checked_against(spec.model_copy(update={"family": "custom", "notes": ()})) == "nothing"
