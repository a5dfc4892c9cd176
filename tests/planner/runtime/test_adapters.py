"""LoRA and frozen parts: what is trained is exact under every axis, and nothing else has gradients, states or a place in checkpoints."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from planner.runtime.adapters import Trained, part_of
from planner.runtime.checkpoint import shapes
from planner.runtime.parameter import Block, fill

_spec = importlib.util.spec_from_file_location("layouts", Path(__file__).resolve().parent / "test_layouts.py")
assert _spec is not None
assert _spec.loader is not None
layouts = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layouts)

LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8.0}
EXPERTS = {**LORA, "lora_targets": ["experts", "attention"]}
FROZEN = {"frozen": ["embedding", "attention", "router"]}
HEAD_ALONE = {"frozen": ["embedding", "attention", "mlp", "norm", "experts", "shared", "router"]}
CASES = [
    (2, "tp=2", "llama", LORA), (2, "pp=2", "moe-v3", FROZEN), (2, "tp=2,sp=false", "mla", LORA), (2, "tp=2", "mqa", LORA),
    (2, "pp=2", "llama", LORA), (2, "pp=2,schedule=zb-h1", "mla", LORA), (2, "dp=2,zero=3", "llama", LORA), (2, "cp=2", "mtp", LORA),
    (2, "dp=2,ep=2,zero=2", "moe-v3", LORA), (2, "tp=2,etp=2", "moe", EXPERTS), (2, "pp=2,schedule=zb-v", "llama", HEAD_ALONE),
    (2, "dp=2,zero=3", "moe-v3", FROZEN), (4, "tp=2,pp=2,zero=1", "gpt", LORA), (4, "pp=2,dp=2,zero=3,recompute=full", "mla", LORA),
    (4, "tp=2,dp=2,ep=2,etp=2", "moe-v3", EXPERTS), (4, "dp=2,tp=2,zero=1", "moe-qwen2", {"frozen": ["shared", "norm"]}),
]  # fmt: skip
MATRIX = [pytest.param(*case, marks=[] if number < 2 else pytest.mark.slow) for number, case in enumerate(CASES)]


@pytest.mark.parametrize(("world", "layout", "model", "settings"), MATRIX)
def test_what_is_trained_is_exact_and_nothing_else_has_a_gradient(
    gradients: Callable[..., dict[str, Any]], world: int, layout: str, model: str, settings: dict[str, Any]
) -> None:
    """After two steps of training, so that no half of an adapter is zero."""
    layouts.compare(gradients, world, layout, model, settings=settings, after=2)
    kinds = Trained(settings.get("lora_rank", 0), tuple(settings.get("lora_targets", ())), 0.0, tuple(settings.get("frozen", ())))
    names = set(gradients(1, layouts.ONE, model=model, settings=settings, after=2)) - {"loss"}
    assert names
    assert all(kinds.trains(name) for name in names)
    if kinds.rank:
        assert all(kinds.adapts(name) for name in names)


def test_an_adapters_gradient_is_its_layers_gradient_seen_through_the_other_half(gradients: Callable[..., dict[str, Any]]) -> None:
    """At B = 0 the model is the frozen one: dB = alpha / rank * dW A^T, and A has none (arXiv:2106.09685, section 4.1)."""
    whole = gradients(1, layouts.ONE, model="llama")
    got = gradients(1, layouts.ONE, model="llama", settings=LORA)
    assert got["loss"] == pytest.approx(whole["loss"], rel=1e-12)
    adapted = [n.removesuffix(".lora_b") for n in got if n.endswith(".lora_b")]
    assert len(adapted) == 4 * 7  # q, k, v, o; gate, up, down
    for name in adapted:
        weight = whole[f"{name}.weight"]
        a = torch.empty(4, weight.shape[1], dtype=torch.float64)
        box = Block(tuple(a.shape), (0, 0), tuple(a.shape), std=weight.shape[1] ** -0.5)
        fill(a, f"{name}.lora_a", box, seed=3)
        expected = 2.0 * weight @ a.numpy().T
        assert np.abs(got[f"{name}.lora_b"] - expected).max() <= 1e-9 * np.abs(expected).max(), name
        assert np.abs(got[f"{name}.lora_a"]).max() == 0


@pytest.mark.parametrize(
    ("layout", "precision"), [("dp=2,zero=3", "bf16"), *[pytest.param("tp=2", "bf16", marks=pytest.mark.slow)]]
)
def test_adapters_learn_in_bf16_beside_a_base_without_masters(
    processes: Callable[..., list[Any]], layout: str, precision: str
) -> None:
    settings = {**LORA, "precision": precision, "learning_rate": 3e-2}
    wide = processes(1, "losses", layout="micro_batch=8", steps=6, settings={**settings, "precision": "fp32"})[0]
    got = processes(2, "losses", layout=layout, steps=6, settings=settings)[0]
    for (loss, _), (wanted, _) in zip(got, wide, strict=True):
        assert loss == pytest.approx(wanted, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [LORA, {"frozen": ["embedding", "mlp"]}])
def test_a_checkpoint_holds_only_what_is_trained_and_any_layout_continues_it(
    processes: Callable[..., list[Any]], tmp_path: Path, settings: dict[str, Any]
) -> None:
    facts = {"folder": str(tmp_path), "steps": 2, "more": 2, "settings": settings}
    expected = processes(2, "train_and_save", layout="dp=2,zero=1", **facts)[0]
    assert processes(2, "load_and_train", layout="tp=2", **facts)[0] == pytest.approx(expected, rel=1e-9)
    assert processes(2, "load_and_train", layout="pp=2,zero=0", **facts)[0] == pytest.approx(expected, rel=1e-9)
    names = {n.partition("/")[2] for n in shapes(tmp_path / "step-00000002")}
    kinds = Trained(settings.get("lora_rank", 0), (), 0.0, tuple(settings.get("frozen", ())))
    assert names
    assert all(kinds.trains(name) for name in names)


def test_parts_are_those_the_cost_models_count() -> None:
    parts = {
        "embed_tokens.weight": "embedding", "embed_positions": "embedding", "embed_norm.weight": "norm", "lm_head.weight": "head",
        "norm.weight": "norm", "layers.3.input_layernorm.weight": "norm", "layers.3.self_attn.q_norm.weight": "attention",
        "layers.3.self_attn.kv_a_layernorm.weight": "attention", "layers.3.mlp.gate.weight": "router", "layers.3.mlp.gate_proj.weight": "mlp",
        "layers.3.mlp.experts.up_proj": "experts", "layers.3.mlp.shared_experts.up_proj.weight": "shared",
        "layers.3.mlp.shared_expert_gate": "shared", "layers.61.eh_proj.weight": "mtp", "layers.61.shared_head.norm.weight": "norm",
    }  # fmt: skip
    assert {name: part_of(name) for name in parts} == parts
