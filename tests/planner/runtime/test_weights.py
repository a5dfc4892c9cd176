"""Hugging Face checkpoints: the runtime computes what transformers computes, and gives back the tensors it was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch


@pytest.mark.parametrize("family", sorted(families.CONFIGS))
def test_logits_equal_those_of_transformers(processes: Callable[..., list[Any]], tmp_path: Path, family: str) -> None:
    model = families.save(family, tmp_path)
    ids = np.arange(32).reshape(2, 16) * 7 % 61
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    layouts = {1: "micro_batch=2", 2: "tp=2,ep=2,micro_batch=2" if "moe" in family or family == "mixtral" else "tp=2,micro_batch=2"}
    for world, layout in layouts.items():
        processes(world, "logits", folder=str(tmp_path), layout=layout, ids=ids.tolist(), path=str(tmp_path / "out.npy"))
        got = np.load(tmp_path / "out.npy")
        assert np.abs(got - expected).max() <= 1e-5


SAVED = {
    "gpt2": "pp=2", "deepseek_v3": "dp=2,ep=2,zero=3", "mixtral": "tp=2,etp=2", "llama": "tp=2", "qwen2": "dp=2,zero=3", "qwen3": "tp=2",
    "mistral": "pp=2", "qwen2_moe": "tp=2,ep=2", "qwen3_moe": "dp=2,ep=2,zero=2", "deepseek_v2": "tp=2,ep=2", "olmo2": "tp=2",
    "olmoe": "dp=2,ep=2,zero=1",
}  # fmt: skip
"""Family -> the layout that it is read and saved under."""
FAMILIES = [pytest.param(*case, marks=[] if number < 3 else pytest.mark.slow) for number, case in enumerate(SAVED.items())]


@pytest.mark.parametrize(("family", "layout"), FAMILIES)
def test_export_gives_back_every_tensor(processes: Callable[..., list[Any]], tmp_path: Path, family: str, layout: str) -> None:
    from safetensors.torch import load_file

    families.save(family, tmp_path / "in")
    processes(2, "export", folder=str(tmp_path / "in"), layout=layout, work=str(tmp_path / "work"), out=str(tmp_path / "out"))
    expected = load_file(tmp_path / "in" / "model.safetensors")
    got = {n: t for f in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(f).items()}
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1, "written in more than one file"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_transformers_and_the_runtime_read_what_was_saved_in_several_files(
    processes: Callable[..., list[Any]], tmp_path: Path, family: str
) -> None:
    import transformers

    model = families.save(family, tmp_path / "in")
    processes(
        2, "export", folder=str(tmp_path / "in"), layout=SAVED[family], work=str(tmp_path / "work"), out=str(tmp_path / "out")
    )
    (tmp_path / "out" / "config.json").write_text((tmp_path / "in" / "config.json").read_text())
    ids = np.arange(32).reshape(2, 16) * 7 % 61
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    processes(
        2, "logits", folder=str(tmp_path / "out"), layout="tp=2,micro_batch=2", ids=ids.tolist(), path=str(tmp_path / "out.npy")
    )
    with torch.no_grad():
        expected, theirs = (one(torch.from_numpy(ids)).logits.numpy() for one in (model, again))
    assert np.array_equal(theirs, expected)
    assert np.abs(np.load(tmp_path / "out.npy") - expected).max() <= 1e-5
