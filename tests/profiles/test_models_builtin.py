"""The built-in models at their published sizes (test_models_exact.py compares them with transformers)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiles.huggingface import load_model, model_names
from profiles.parameters import PARTS

DATA = Path(__file__).parents[2] / "profiles" / "data" / "models"
BILLION = 1e9

EXACT = {
    "llama-2-7b": 6738415616, "llama-2-13b": 13015864320, "llama-2-70b": 68976648192, "llama-3-8b": 8030261248,
    "llama-3.1-8b": 8030261248, "llama-3.1-70b": 70553706496, "llama-3.1-405b": 405853388800, "llama-3.2-1b": 1235814400,
    "llama-3.2-3b": 3212749824, "mistral-7b": 7241732096, "mistral-nemo-12b": 12247782400, "mixtral-8x7b": 46702792704,
    "qwen2.5-0.5b": 494032768, "qwen2.5-1.5b": 1543714304, "qwen2.5-3b": 3085938688, "qwen2.5-7b": 7615616512,
    "qwen2.5-14b": 14770033664, "qwen2.5-32b": 32763876352, "qwen2.5-72b": 72706203648, "qwen3-4b": 4022468096,
    "qwen3-8b": 8190735360, "qwen3-14b": 14768307200, "qwen3-32b": 32762123264, "qwen3-30b-a3b": 30532122624,
    "qwen3-235b-a22b": 235093634560, "qwen1.5-moe-a2.7b": 14315784192, "deepseek-v2": 235741434880, "deepseek-v2-lite": 15706484224,
    "deepseek-v3": 671026404352, "gpt-oss-20b": 20914757184, "gpt-oss-120b": 116829156672, "gpt2": 124439808, "gpt2-xl": 1557611200,
    "gpt-neox-20b": 20554567680, "gpt-j-6b": 6050882784, "bloom-176b": 176247271424, "falcon-7b": 6921720704,
    "falcon-40b": 41303293952,
    "gemma-2b": 2506172416, "gemma-7b": 8537680896, "gemma-2-2b": 2614341888, "gemma-2-9b": 9241705984, "gemma-2-27b": 27227128320,
    "phi-2": 2779683840, "phi-3-mini": 3821079552, "phi-4": 14659507200, "olmo-7b": 6888095744, "olmo-2-7b": 7298617344,
    "olmoe-1b-7b": 6919161856, "smollm3-3b": 3075098624, "jamba-v0.1": 51570323328, "command-r": 34980831232, "dbrx": 131596523520,
    "stablelm-3b": 2795443200, "starcoder2-3b": 3030371328, "mamba2-2.7b": 2702599680, "phi-3.5-moe": 41873153344,
}  # fmt: skip
"""Totals of the released checkpoints, tied weights once."""

ROUNDED = {
    "grok-1": (314, 3), "kimi-k2": (1027, 3), "minimax-text-01": (456, 1), "minimax-m2": (229, 1), "gpt3-175b": (175, 1),
    "llama-4-scout": (107.8, 0.1), "llama-4-maverick": (400.7, 0.1), "glm-4.5": (355, 3), "glm-4.5-air": (106.9, 0.2),
    "qwen2-57b-a14b": (57.41, 0.01), "qwen3-next-80b-a3b": (79.7, 0.1), "qwen3-coder-480b-a35b": (480, 1),
    "mixtral-8x22b": (140.6, 0.05), "nemotron-4-15b": (15.6, 0.05), "nemotron-4-340b": (341, 0.5), "nemotron-h-8b": (8.1, 0.05),
    "nemotron-h-56b": (56.3, 0.1), "nemotron-3-nano-30b-a3b": (31.6, 0.1), "falcon-h1-7b": (7.59, 0.01),
    "granite-3.1-8b": (8.17, 0.01), "granite-3.1-3b-a800m": (3.30, 0.01), "granite-4.0-h-small": (32.2, 0.1),
    "ernie-4.5-21b-a3b": (21.8, 0.1), "ernie-4.5-300b-a47b": (300, 1), "command-r-plus": (104, 0.5), "stablelm-2-12b": (12.1, 0.1),
    "seed-oss-36b": (36.2, 0.1), "mistral-large-123b": (122.6, 0.1), "mistral-small-24b": (23.6, 0.1), "opt-66b": (66, 0.5),
    "opt-175b": (175, 0.5), "falcon-180b": (180, 1.5), "mpt-7b": (6.65, 0.01), "mpt-30b": (30.0, 0.1),
    "llama-7b": (6.7, 0.05), "llama-13b": (13.0, 0.05),
    "llama-30b": (32.5, 0.05), "llama-65b": (65.2, 0.1), "gemma-3-27b": (27.0, 0.1),
}  # fmt: skip
"""Billions of parameters as published, and how far rounding (or what the publisher counts, such as MTP) may lie from ours."""

ACTIVE = {
    "deepseek-v3": (37, 1), "mixtral-8x7b": (12.9, 0.1), "qwen3-235b-a22b": (22, 0.5), "qwen3-30b-a3b": (3.3, 0.1), "dbrx": (36, 1),
    "kimi-k2": (32, 1), "llama-4-maverick": (17, 0.5), "deepseek-v2": (21, 0.5), "jamba-v0.1": (12, 0.5),
    "minimax-text-01": (45.9, 3),
    "mixtral-8x22b": (39, 0.5), "olmoe-1b-7b": (1.3, 0.05),
}  # fmt: skip
"""Billions of active parameters as published."""


def test_there_are_at_least_forty_built_in_models_each_with_its_source() -> None:
    assert len(model_names()) >= 40
    for name in model_names():
        assert json.loads((DATA / f"{name}.json").read_text())["_source"], name


@pytest.mark.parametrize("name", model_names())
def test_parts_sum_to_the_total_and_active_is_no_more(name: str) -> None:
    parameters = load_model(name).parameters
    assert sum(getattr(parameters, part) for part in PARTS) == parameters.total
    assert 0 < parameters.active <= parameters.total


@pytest.mark.parametrize(("name", "total"), EXACT.items())
def test_the_total_equals_the_released_checkpoints(name: str, total: int) -> None:
    assert load_model(name).parameters.total == total


@pytest.mark.parametrize("name", ROUNDED)
def test_the_total_equals_the_published_billions(name: str) -> None:
    published, tolerance = ROUNDED[name]
    assert load_model(name).parameters.total / BILLION == pytest.approx(published, abs=tolerance)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_equal_the_published_billions(name: str) -> None:
    published, tolerance = ACTIVE[name]
    assert load_model(name).parameters.active / BILLION == pytest.approx(published, abs=tolerance)


def test_deepseek_v3s_mtp_module_is_counted_apart_and_holds_11_5_billion() -> None:
    """The weights' README: 11.5 B unique parameters of the MTP module, embedding and head shared with the model."""
    parameters = load_model("deepseek-v3").parameters
    assert parameters.mtp / BILLION == pytest.approx(11.5, abs=0.15)
    assert load_model("deepseek-v3").mtp == 1
