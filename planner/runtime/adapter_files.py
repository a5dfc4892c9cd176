"""Adapters as Hugging Face PEFT keeps them: ``adapter_model.safetensors`` and ``adapter_config.json``, from a checkpoint of any layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.runtime import checkpoint
from planner.runtime.adapters import is_adapter
from planner.runtime.weights import place
from profiles.errors import InputError
from profiles.files import write_text
from profiles.model import ModelSpec

PREFIX = "base_model.model."


def export_adapters(path: Path, out: Path, dtype: torch.dtype) -> list[Path]:
    """Write the adapters of the checkpoint at ``path`` under ``out``; returns the files. One process, without torch.distributed.

    Raises InputError for a family that stores several of our projections as one (gpt2), beside which PEFT has one adapter.
    """
    from safetensors.torch import save_file

    facts = checkpoint.read_facts(path)
    model, trained = ModelSpec.model_validate(facts["model"]), facts["trained"]
    tensors = {name: value.to(dtype).contiguous() for name, value in _tensors(path, model)}
    out.mkdir(parents=True, exist_ok=True)
    partial = out / ".adapter_model.safetensors"
    save_file(tensors, partial, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": trained["lora_rank"], "lora_alpha": trained["lora_alpha"] or trained["lora_rank"],
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "base_model_name_or_path": None,
        "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors}),
    }  # fmt: skip
    write_text(out / "adapter_config.json", json.dumps(config, indent=1))
    return [partial.rename(out / "adapter_model.safetensors"), out / "adapter_config.json"]


def _tensors(path: Path, model: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    sizes = checkpoint.shapes(path)
    for full in sorted(sizes):
        part, _, name = full.partition("/")
        if part != "parameter" or not is_adapter(name):
            continue
        layer, _, half = name.rpartition("lora_")
        where = place(model.family, layer.removesuffix("_") if layer.endswith("_") else f"{layer}weight")
        if where.parts > 1 or where.transposed:
            raise InputError(
                "checkpoint", path, f"{model.family} stores {where.name} for several projections: no PEFT file stands for them"
            )
        stored = f"{PREFIX}model.{where.name.removesuffix('.weight')}.lora_{half.upper()}.weight"
        whole = checkpoint.read_whole(path, full, sizes[full])
        if "{expert}" in stored:
            yield from ((stored.format(expert=e), one.clone()) for e, one in enumerate(whole))
        else:
            yield stored, whole


def trained_of(path: Path) -> dict[str, Any]:
    """What the run of a checkpoint trained: empty where everything."""
    found: dict[str, Any] = checkpoint.read_facts(path).get("trained", {})
    return found
