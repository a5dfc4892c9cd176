"""Multi-token prediction: DeepSeek-V3's modules, as the report defines them, under every axis, and in the hub's checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import test_layouts as layouts
import torch

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "prediction_programs.py"


@pytest.mark.parametrize("model", ["mtp-plain", "mtp-tied"])
def test_losses_and_gradients_are_those_of_the_equations(
    processes: Callable[..., list[Any]], gradients: Callable[..., dict[str, Any]], tmp_path: Path, model: str
) -> None:
    """arXiv:2412.19437, equations 21 to 25, written out position by position."""
    path = tmp_path / "plain.npz"
    loss, later = processes(1, "plain", file=PROGRAMS, path=str(path), model=model, weight=0.3)[0]
    assert processes(1, "step_losses", file=PROGRAMS, layout="micro_batch=8", model=model)[0] == pytest.approx(
        [loss, later], rel=1e-12
    )
    got = gradients(1, "micro_batch=8", model=model)
    assert got["loss"] == pytest.approx(loss, rel=1e-12)
    with np.load(path) as expected:
        assert set(expected.files) | {"loss"} == set(got)
        for name in expected.files:
            assert np.abs(got[name] - expected[name]).max() <= 1e-9 * np.abs(expected[name]).max(), name


CASES = [
    (2, "pp=2,schedule=zb-h1", "mtp"), (2, "cp=2", "mtp"), (2, "tp=2", "mtp"), (2, "tp=2,sp=false", "mtp"), (2, "pp=2", "mtp-tied"),
    (2, "pp=2,schedule=zb-v", "mtp-tied"), (2, "pp=2,schedule=dualpipe-v", "mtp"), (2, "dp=2,zero=3", "mtp"), (2, "dp=2,ep=2,zero=2", "mtp"),
    (4, "tp=2,pp=2,ep=2", "mtp"), (4, "pp=2,dp=2,zero=3,recompute=full", "mtp"), (4, "pp=2,vpp=2,schedule=interleaved,dp=2", "mtp-plain"),
    (4, "cp=2,pp=2,cp_kind=ulysses,schedule=zb-h1", "mtp-plain"), (4, "tp=2,pp=2,schedule=zb-h1,zero=1", "mtp-plain"),
]  # fmt: skip
MATRIX = [pytest.param(*case, marks=[] if number < 2 else pytest.mark.slow) for number, case in enumerate(CASES)]


@pytest.mark.parametrize(("world", "layout", "model"), MATRIX)
def test_every_axis_computes_what_one_process_computes(
    gradients: Callable[..., dict[str, Any]], world: int, layout: str, model: str
) -> None:
    layouts.compare(gradients, world, layout, model)


@pytest.mark.slow
def test_no_module_looks_past_the_end_of_a_document(gradients: Callable[..., dict[str, Any]]) -> None:
    layouts.compare(gradients, 4, "cp=2,pp=2", "mtp-plain", source={"documents": True, "mask": "random"})


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp=2,micro_batch=2", "tp=2,ep=2,micro_batch=2"])
def test_the_hubs_module_weights_are_read_and_given_back(processes: Callable[..., list[Any]], tmp_path: Path, layout: str) -> None:
    """transformers saves no module, so what the hub holds beside its layers is laid beside them here, under the hub's names."""
    from safetensors.torch import load_file, save_file

    families.save("deepseek_v3", tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    stored = load_file(tmp_path / "in" / "model.safetensors")
    last, at = f"model.layers.{config['num_hidden_layers'] - 1}.", f"model.layers.{config['num_hidden_layers']}."
    hidden = config["hidden_size"]
    torch.manual_seed(1)
    own = {at + n.removeprefix(last): torch.randn_like(t) for n, t in stored.items() if n.startswith(last)}
    own |= {f"{at}{n}.weight": torch.randn(hidden) for n in ("enorm", "hnorm", "shared_head.norm")}
    own |= {f"{at}eh_proj.weight": torch.randn(hidden, 2 * hidden), f"{at}embed_tokens.weight": stored["model.embed_tokens.weight"].clone(),
            f"{at}shared_head.head.weight": stored["lm_head.weight"].clone()}  # fmt: skip
    expected = {**stored, **own}
    save_file(expected, tmp_path / "in" / "model.safetensors")
    processes(2, "export", folder=str(tmp_path / "in"), layout=layout, work=str(tmp_path / "work"), out=str(tmp_path / "out"))
    got = {n: t for f in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(f).items()}
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
