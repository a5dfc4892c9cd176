"""LoRA and frozen parts: what is trained is exact under every axis, and nothing else has gradients, states or a place in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import test_layouts as layouts
import torch

from planner.runtime.adapters import Trained, part_of
from planner.runtime.checkpoint import shapes
from planner.runtime.parameter import Block, fill

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


IDS = (np.arange(32).reshape(2, 16) * 7 % 61).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2,micro_batch=2", "dp=2,zero=3"])
def test_exported_adapters_laid_over_the_base_give_the_logits_of_the_run(
    processes: Callable[..., list[Any]], tmp_path: Path, layout: str
) -> None:
    """PEFT's files: W + alpha / rank B A, module by module, in transformers' own model."""
    import json

    from safetensors.torch import load_file

    from planner.runtime.adapter_files import export_adapters

    model = families.save("llama", tmp_path / "base")
    settings = {**LORA, "learning_rate": 0.05, "seed": 5}
    facts = {"folder": str(tmp_path / "base"), "work": str(tmp_path / "work"), "ids": IDS, "path": str(tmp_path / "logits.npy")}
    processes(2, "fine_tune", layout=layout, settings=settings, **facts)
    export_adapters(tmp_path / "work" / "step-00000002", tmp_path / "out", torch.float32)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (4, 8.0, 7)
    with torch.no_grad():
        before = model(torch.tensor(IDS)).logits
        for name in [n for n in tensors if n.endswith("lora_A.weight")]:
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            module.weight += 2.0 * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        after = model(torch.tensor(IDS)).logits
    assert (after - before).abs().max() > 0.01
    if layout.startswith("tp"):
        assert np.abs(np.load(tmp_path / "logits.npy") - after.numpy()).max() <= 2e-5


@pytest.mark.slow
def test_a_run_with_frozen_parts_is_exported_whole_with_its_base(processes: Callable[..., list[Any]], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from planner.runtime.weights import export

    families.save("qwen3_moe", tmp_path / "base")
    settings = {"frozen": ["embedding", "experts", "norm"], "learning_rate": 0.05}
    facts = {"folder": str(tmp_path / "base"), "work": str(tmp_path / "work"), "ids": IDS, "path": str(tmp_path / "logits.npy")}
    processes(2, "fine_tune", layout="tp=2,ep=2,micro_batch=2", settings=settings, **facts)
    export(tmp_path / "work" / "step-00000002", tmp_path / "out", torch.float32, base=tmp_path / "base")
    base = load_file(tmp_path / "base" / "model.safetensors")
    got = {n: t for f in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(f).items()}
    assert set(got) == set(base)
    frozen = Trained(frozen=tuple(settings["frozen"]))  # type: ignore[arg-type]
    changed = {n for n, t in got.items() if not torch.equal(t, base[n])}
    names = {n for n in base if frozen.trains(n.removeprefix("model.").replace("block_sparse_moe", "mlp"))}
    assert changed == names
