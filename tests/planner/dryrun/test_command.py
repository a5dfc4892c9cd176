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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Split(Net):
    parallel_plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}


class Choosy(Net):
    def forward(self, x):
        return super().forward(x)[x[:, 0].nonzero().flatten()]


class Narrow(Net):
    def forward(self, x):
        return super().forward(x[:, :32])


class Tabled(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(100, 64))

    def forward(self, x):
        return super().forward(x + self.table[:8])


def build():
    return Net(), torch.empty(8, 64)


def tabled():
    return Tabled(), torch.empty(8, 64)


def split():
    return Split(), torch.empty(8, 64)


def choosy():
    return Choosy(), torch.empty(8, 64)


def narrow():
    return Narrow(), torch.empty(8, 64)
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


def test_a_stage_a_rank_and_every_stage_are_traced_as_asked(make_plan: Callable[..., Plan], tmp_path: Path, invoke: Invoke) -> None:
    path = tmp_path / "plan.json"
    make_plan("dense", 8, "pp=4,schedule=gpipe", layers=4, seq_len=256).save(path)
    one = json.loads(invoke("dry-run", str(path), "--stage", "2", "--json")[1])
    assert (one["rank"], one["stage"], one["stages_alike"]) == (4, 2, [1, 2])
    trace = tmp_path / "step.json"
    every = json.loads(invoke("dry-run", str(path), "--all-stages", "--json", "--trace", str(trace))[1])["stages"]
    assert [(run["rank"], run["stage"], run["stages_alike"]) for run in every] == [(0, 0, [0]), (2, 1, [1, 2]), (6, 3, [3])]
    assert every[1]["peak_bytes"] == one["peak_bytes"]
    assert every[1]["flops"] == one["flops"]
    code, out, _ = invoke("dry-run", str(path), "--stage", "2")
    assert code == 0
    assert "rank 4, stage 2 (as stages 1, 2): peak" in out
    events = json.loads(trace.read_text())["traceEvents"]
    peaks = {e["pid"]: max(sum(o["args"].values()) for o in events if o["ph"] == "C" and o["pid"] == e["pid"]) for e in events}
    for run in every:  # the curve is drawn where memory changes by half a percent
        assert peaks[run["rank"]] == pytest.approx(run["peak_bytes"], rel=0.005)
        sent = [e["args"]["bytes"] for e in events if e.get("cat") == "collective" and e["pid"] == run["rank"]]
        assert (len(sent), sum(sent)) == (sum(c["count"] for c in run["collectives"]), sum(c["bytes"] for c in run["collectives"]))


def test_the_first_step_reaches_its_peak_before_it_has_moments(saved: Path, invoke: Invoke) -> None:
    first, second = (json.loads(invoke("dry-run", str(saved), "--json", "--steps", n)[1]) for n in ("1", "2"))
    masters, counters = first["bytes"]["optimizer"], second["named_bytes"]["step counters"]
    assert second["bytes"]["optimizer"] == 3 * masters + counters
    assert first["flops"] == second["flops"]
    assert invoke("dry-run", str(saved), "--steps", "0")[0] == 2


def test_memory_over_the_step_is_drawn(saved: Path, tmp_path: Path, invoke: Invoke) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.svg"
    code, _, err = invoke("dry-run", str(saved), "--json", "--rank", "0", "--plot", str(path))
    drawn = path.read_text()
    assert (code, err) == (0, "")
    assert drawn.startswith("<?xml")
    assert invoke("dry-run", str(saved), "--plot", str(tmp_path / "memory.nothing"))[0] == 2


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


def test_verify_ends_with_3_where_the_plan_does_not_fit(make_plan: Callable[..., Plan], tmp_path: Path, invoke: Invoke) -> None:
    path = tmp_path / "plan.json"
    make_plan("dense", 2, "tp=2", trained={"memory_limit_bytes": 1e6}, layers=2, seq_len=256, global_batch=2).save(path)
    code, out, _ = invoke("verify", str(path), "--json")
    document = json.loads(out)
    assert (code, document["legal"], document["fits"]) == (3, True, False)


def test_verify_ends_with_2_where_a_rule_is_broken(saved: Path, invoke: Invoke) -> None:
    document = json.loads(saved.read_text())
    document["layout"]["micro_batch"] = 3
    saved.write_text(json.dumps(document))
    assert invoke("verify", str(saved), "--json")[0] == 2


@pytest.fixture
def module(
    make_plan: Callable[..., Plan], tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], tuple[int, dict[str, Any], str]]:
    """Run a function of MODULE under a layout of 8 ranks."""
    (tmp_path / "mine_for_dry_run.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)

    def run(name: str, layout: str) -> tuple[int, dict[str, Any], str]:
        make_plan("dense", 8, layout, layers=2, seq_len=256).save(tmp_path / "plan.json")
        code, out, err = invoke("dry-run", "--module", f"mine_for_dry_run:{name}", "--plan", "plan.json", "--json")
        return code, json.loads(out) if out else {}, err

    return run


@pytest.mark.parametrize(("name", "layout", "applied", "ways"), [
    ("build", "zero=3", ["dp_shard"], {"dp_shard": 8}), ("split", "tp=2,zero=1", ["tp"], {"tp": 2}),
    ("split", "tp=2,zero=3", ["tp", "dp_shard"], {"tp": 2, "dp_shard": 4}),
    ("split", "tp=2,zero=3,dp_replicate=2,dp_shard=2", ["tp", "dp_shard"], {"tp": 2, "dp_shard": 2, "dp_replicate": 2}),
])  # fmt: skip
def test_a_users_module_runs_under_the_plans_axes(
    name: str, layout: str, applied: list[str], ways: dict[str, int], module: Callable[..., tuple[int, dict[str, Any], str]]
) -> None:
    code, document, err = module(name, layout)
    assert (code, err, document["parallel"], document["parameters"]) == (0, "", applied, 2 * 64 * 64)
    tp, shard = ways.get("tp", 1), ways.get("dp_shard", 1)
    assert document["flops"]["matmul"] == 2 * 8 * 64 * 64 * 5 // tp  # the input takes no gradient
    assert document["most_bytes"]["parameters"] == 2 * 64 * 64 * 4 // (tp * shard)
    assert (
        document["most_bytes"]["optimizer"] == 2 * 2 * 64 * 64 * 4 // (tp * shard) + 2 * 4
    )  # two moments, and each weight's count
    calls = {(c["axis"], c["kind"]): (c["ranks"], c["bytes"]) for c in document["collectives"]}
    assert {axis for axis, _ in calls} == set(ways)
    assert {
        ranks for (axis, _), (ranks, _) in calls.items() for known, ways_of in ways.items() if axis == known and ranks != ways_of
    } == set()
    if shard > 1:
        gathered = 2 * (2 * 64 * 64 // tp) * 2  # bf16, forward and backward
        assert calls["dp_shard", "all_gather"] == (shard, gathered)
        assert calls["dp_shard", "reduce_scatter"] == (shard, 2 * 64 * 64 // tp * 4)
    if tp > 1:  # the output's partial sums; the first layer's input takes no gradient, and nothing comes back
        assert calls["tp", "all_reduce"] == (2, 8 * 64 * (2 if shard > 1 else 4))


def test_a_users_buffers_and_inputs_are_counted_and_what_the_plan_asks_in_vain_is_said(
    module: Callable[..., tuple[int, dict[str, Any], str]],
) -> None:
    _, document, _ = module("tabled", "pp=2,cp=2,zero=2,recompute=full")
    assert document["most_bytes"]["buffers"] == (100 * 64 + 8 * 64) * 4
    assert sum(document["bytes"].values()) == document["peak_bytes"]
    assert (document["parallel"], document["not_applied"]) == ([], ["pp=2", "cp=2", "zero=2", "recompute=full"])


@pytest.mark.parametrize(("name", "layout", "said"), [
    ("choosy", "zero=3", "nonzero"), ("narrow", "zero=3", "operation mm could not be traced"), ("build", "tp=2", "parallel_plan"),
])  # fmt: skip
def test_a_module_that_cannot_be_traced_is_one_line_with_the_operation(
    name: str, layout: str, said: str, module: Callable[..., tuple[int, dict[str, Any], str]], capfd: pytest.CaptureFixture[str]
) -> None:
    code, _, err = module(name, layout)
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert said in err
    assert "Traceback" not in "".join(capfd.readouterr())


def test_strict_ends_with_1_where_formula_and_program_differ(
    make_plan: Callable[..., Plan], tmp_path: Path, invoke: Invoke
) -> None:
    """The formula is told that the loss keeps a logit in eight bytes: the program keeps it in two."""
    path = tmp_path / "plan.json"
    make_plan("dense", 2, "tp=2", layers=2, seq_len=256, global_batch=2).save(path)
    assert invoke("dry-run", str(path), "--strict", "--json")[0] == 0
    make_plan("dense", 2, "tp=2", {"logit_saved_bytes": 8.0}, layers=2, seq_len=256, global_batch=2).save(path)
    code, out, _ = invoke("dry-run", str(path), "--strict", "--json")
    assert code == 1
    assert "activations" in [line["what"] for line in json.loads(out)["differences"]]
    assert invoke("dry-run", str(path), "--json")[0] == 0
    assert invoke("verify", str(path))[0] == 1


def test_stages_with_one_program_are_traced_once(make_plan: Callable[..., Plan]) -> None:
    gpipe = make_plan("dense", 8, "pp=4,schedule=gpipe", layers=4)
    assert alike_stages(gpipe.job(), gpipe.layout_object) == [(0,), (1, 2), (3,)]
    one = make_plan("dense", 8, "pp=4,schedule=1f1b", layers=4)
    assert alike_stages(one.job(), one.layout_object) == [(0,), (1,), (2,), (3,)]
