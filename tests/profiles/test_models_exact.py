"""Parameter counts equal those of the model that transformers builds from the same config, in total and by part.

The cases (model_cases.json) are each family at its class defaults and at odd sizes: biases on and off, tied or not, uneven MoE
steps, odd head widths. One odd-sized case of a dozen families runs in the default tier, all of them in the slow one.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from profiles.families.registry import read_config
from profiles.parameters import PARTS

CASES: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent / "model_cases.json").read_text())
SAMPLE = {
    "llama", "qwen2", "qwen2_moe", "qwen3_moe", "gemma3_text", "gpt2", "falcon", "deepseek_v3", "gpt_oss", "llama4_text",
    "nemotron_h", "qwen3_next", "falcon_h1",
}  # fmt: skip
SMALL = {"gpt2", "mpt", "opt", "bloom", "mamba"}
"""Families whose class defaults are cheap enough to build."""


def cases() -> list[Any]:
    found = []
    for family, overrides in CASES.items():
        for number, override in enumerate(overrides):
            quick = family in SAMPLE and override and number == len(overrides) - 1
            found.append(pytest.param(family, override, id=f"{family}-{number}", marks=() if quick else pytest.mark.slow))
    return found


def build(family: str, override: dict[str, Any]) -> tuple[Any, Any]:
    """(config, model on the meta device)."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(family, **override)
    with torch.device("meta"):
        return config, transformers.AutoModelForCausalLM.from_config(config)


STATE_SPACE = ("A_log", "D", "dt_bias", "conv1d", "in_proj", "out_proj", "norm", "x_proj", "dt_proj", "qkv_proj", "output_gate")


def part_of(name: str, lightning: set[str], has_experts: bool) -> str:
    """The part a transformers parameter belongs to, from its name alone."""
    words = name.split(".")
    if any(
        w in words
        for w in ("embed_tokens", "wte", "wpe", "embed_in", "word_embeddings", "embed_positions", "embeddings", "project_in")
    ):
        return "embedding"
    if "lm_head" in words or "project_out" in words:
        return "head"
    if "router" in words or "gate" in words:
        return "router"
    if "shared_mlp" in words:
        return "shared_experts" if has_experts else "dense_mlp"
    if any(w.startswith("shared_expert") for w in words):
        return "shared_experts"
    if "experts" in words:
        return "routed_experts"
    if "mamba" in words or "linear_attn" in words or name.rsplit(".self_attn.", 1)[0] in lightning:
        inside = ".mamba." in name or ".linear_attn." in name or ".self_attn." in name
        if inside:
            return "state_space"
    if "mixer" in words:
        rest = words[words.index("mixer") + 1]
        if rest in STATE_SPACE:
            return "state_space"
        return "attention" if rest in ("q_proj", "k_proj", "v_proj", "o_proj") else "dense_mlp"
    if any(w in words for w in ("self_attn", "attn", "attention", "self_attention")):
        return "attention"
    if any("norm" in w or w.startswith("ln_") for w in words):
        return "norm"
    if any(w in words for w in ("mlp", "ffn", "feed_forward", "fc1", "fc2")):
        return "dense_mlp"
    raise AssertionError(f"no part for {name}")


def parts_of(model: Any) -> Counter[str]:
    names = dict(model.named_parameters())
    lightning = {n.rsplit(".self_attn.", 1)[0] for n in names if n.endswith("self_attn.output_gate.weight")}
    experts = any(".experts." in n for n in names)
    found: Counter[str] = Counter()
    for name, parameter in names.items():
        found[part_of(name, lightning, experts)] += parameter.numel()
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


@pytest.mark.parametrize(("family", "override"), cases())
def test_parameters_equal_those_transformers_builds(family: str, override: dict[str, Any]) -> None:
    config, built = build(family, override)
    whole, shortened = json.loads(json.dumps(config.to_dict(), default=str)), json.loads(config.to_json_string(use_diff=True))
    spec = read_config(whole, family)
    counted = spec.parameters.as_dict()
    expected = parts_of(built)
    assert {part: counted[part] for part in PARTS} == {part: expected[part] for part in PARTS}
    assert counted["total"] == sum(p.numel() for p in built.parameters()) == sum(expected.values())
    assert spec == read_config(shortened, family)
