"""The commands: documents, exit codes, bad input in one line, a user's module."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from planner.dryrun.report import alike_stages
from planner.plan import Plan

Invoke = Callable[..., tuple[int, str, str]]
MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Choosy(Net):
    def forward(self, x):
        return super().forward(x)[x[:, 0].nonzero().flatten()]


def build():
    return Net(), torch.empty(8, 64)


def choosy():
    return Choosy(), torch.empty(8, 64)
"""


@pytest.fixture
def saved(make_plan: Callable[..., Plan], tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    make_plan("dense", 8, "tp=2,pp=2", layers=2, seq_len=256).save(path)
    return path


def test_the_document_holds_program_formula_and_no_difference(saved: Path, tmp_path: Path, invoke: Invoke) -> None:
    trace = tmp_path / "step.json"
    code, out, err = invoke("dry-run", str(saved), "--json", "--rank", "0", "--trace", str(trace))
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["rank"] == 0
    assert {"peak_bytes", "peak_at", "bytes", "flops", "collectives", "formula", "differences"} <= set(document)
    assert sum(document["bytes"].values()) == document["peak_bytes"]
    sends = next(c for c in document["collectives"] if c["axis"] == "pp")
    assert (sends["kind"], sends["count"], sends["bytes"]) == ("send_recv", 4, 4 * 256 // 2 * 512 * 2)
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"memory", "F0.0", "BW0.3", "optimizer", "tp all_gather"} <= names


@pytest.mark.parametrize(("options", "said"), [
    (("--rank", "8"), "ranks 0 to 7"), (("--stage", "2"), "stages 0 to 1"), (("--rank", "0", "--stage", "0"), "not both"),
    (("--module", "nowhere"), "package.module:function"), (("--module", "nowhere:build"), "cannot be imported"),
])  # fmt: skip
def test_bad_input_is_one_line(options: tuple[str, ...], said: str, saved: Path, invoke: Invoke) -> None:
    code, _, err = invoke("dry-run", str(saved), *options)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_a_plan_for_another_target_is_refused_by_name(make_plan: Callable[..., Plan], tmp_path: Path, invoke: Invoke) -> None:
    path = tmp_path / "megatron.json"
    make_plan("dense", 8, "tp=4", execution="megatron").save(path)
    code, _, err = invoke("dry-run", str(path))
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert "megatron" in err


def test_verify_says_what_a_launch_would_find(saved: Path, invoke: Invoke) -> None:
    code, out, _ = invoke("verify", str(saved), "--json")
    document = json.loads(out)
    assert code == document["exit_code"]
    assert document["legal"]
    assert document["fits"]
    assert document["dry_run"]["stage"] in (0, 1)
    saved.write_text("{}")
    code, _, err = invoke("verify", str(saved))
    assert (code, len(err.strip().splitlines())) == (2, 1)


def test_a_users_module_runs_under_the_plans_sharding(
    make_plan: Callable[..., Plan], tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_for_dry_run.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    make_plan("dense", 8, "zero=3", layers=2, seq_len=256).save(tmp_path / "plan.json")

    def run(name: str) -> tuple[int, dict[str, Any], str]:
        code, out, err = invoke("dry-run", "--module", f"mine_for_dry_run:{name}", "--plan", "plan.json", "--json")
        return code, json.loads(out) if out else {}, err

    code, document, _ = run("build")
    assert (code, document["parameters"], document["parallel"]) == (0, 2 * 64 * 64, ["dp_shard"])
    assert document["flops"]["matmul"] == 2 * 8 * 64 * 64 * 5
    assert document["most_bytes"]["parameters"] == 2 * 64 * 64 * 4 // 8
    code, _, err = run("choosy")
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert "nonzero" in err


def test_stages_with_one_program_are_traced_once(make_plan: Callable[..., Plan]) -> None:
    gpipe = make_plan("dense", 8, "pp=4,schedule=gpipe", layers=4)
    assert alike_stages(gpipe.job(), gpipe.layout_object) == [(0,), (1, 2), (3,)]
    one = make_plan("dense", 8, "pp=4,schedule=1f1b", layers=4)
    assert alike_stages(one.job(), one.layout_object) == [(0,), (1,), (2,), (3,)]
