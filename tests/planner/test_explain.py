"""Explain: what binds a step's time, why not another layout, and every term with its numbers."""

from __future__ import annotations

import json

import pytest

from cost_models.step import estimate
from planner.explain import binding, bytes_table, explain, time_remedy, vocabulary, why_not
from planner.legality import read_layout
from planner.plan import Plan
from tests.planner.jobs import decoder, job


@pytest.fixture(scope="module")
def plan(make_plan) -> Plan:
    return make_plan("llama-3-8b", "h100-sxm:1x8", "tp=2,recompute=full", "tp=4,recompute=full")


BIG = {"layers": 8, "hidden": 2048, "heads": 16, "width": 8192}


@pytest.mark.parametrize(
    ("cause", "word"),
    [("bubble", "microbatches"), ("recompute", "memory"), ("optimizer", "ZeRO-1"), ("host", "CUDA graphs"), ("matmul", "precision"),
     ("communication.tp", "tp axis")],
)  # fmt: skip
def test_each_cause_of_time_has_a_remedy(cause, word):
    assert word in time_remedy(cause)


def test_where_memory_is_free_the_largest_cause_of_time_binds():
    of = job(decoder(**BIG), "h100-sxm:1x8", 2048, 16)
    layout = read_layout(of, "pp=8,micro_batch=8,dp=1,schedule=gpipe")
    found = binding(of, estimate(of, layout))
    assert found["says"].startswith("time binds, not memory")
    assert found["largest_causes"][0]["cause"] == "bubble"
    assert "microbatches" in found["remedy"]


def test_why_not_says_illegal_too_large_or_slower_and_on_what(plan):
    of, chosen = plan.job(), estimate(plan.job(), plan.layout_object)
    illegal = why_not(of, chosen, read_layout(of, "tp=16"))
    assert illegal["says"].startswith("it is not legal: ")
    large = why_not(of, chosen, read_layout(of, "zero=0,micro_batch=8"))
    assert large["says"].startswith("it does not fit: stage 0 needs")
    assert large["remedy"]
    slower = why_not(of, chosen, read_layout(of, "tp=8,recompute=full"))
    assert slower["slower"] > 0
    assert sum(slower["loses"].values()) == pytest.approx(slower["step_seconds"] - chosen.step_seconds)
    assert next(iter(slower["loses"])) in ("communication.tp", "host")
    assert "% slower: " in slower["says"]
    assert 0 <= slower["chance_faster"] <= 0.5


def test_the_document_holds_every_term_and_its_source(plan):
    found = explain(plan)
    peak = max(s["peak_allocated"] for s in plan.estimate["memory"])
    parts = ("parameters", "gradients", "optimizer", "activations", "temporary")
    assert sum(f["value"] for f in found["memory_formulas"] if f["name"] in parts) == pytest.approx(peak)
    assert all(f["source"] for f in found["memory_formulas"])
    assert sum(found["seconds"].values()) == pytest.approx(found["step_seconds"])
    assert [r["layout_text"] for r in found["runners_up"]] == [r.layout_text for r in plan.runners_up]
    assert {"field", "value", "unit", "origin", "source"} == set(found["constants"][0])


def test_states_fall_with_data_parallel_ranks_and_activations_do_not(plan):
    falls = {f["name"]: f["falls_with_data_parallel"] for f in explain(plan)["memory_formulas"]}
    assert falls["optimizer"]
    assert not falls["activations"]


def test_bytes_a_parameter_are_the_documents():
    rows = {(r["precision"], r["optimizer"], r["zero"]): r["total"] for r in bytes_table("deepspeed", 8)}
    assert rows["bf16", "adamw", 2] == pytest.approx(2 + 18 / 8)
    assert rows["bf16", "adamw", 3] == pytest.approx(18 / 8)
    megatron = {(r["precision"], r["optimizer"], r["zero"]): r["total"] for r in bytes_table("megatron", 8)}
    assert megatron["bf16", "adamw", 1] == pytest.approx(6 + 12 / 8)
    assert megatron["bf16", "adamw", 0] == pytest.approx(18)


def test_the_command_explains_a_plan_another_layout_and_the_table(plan, invoke, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    code, out, _ = invoke("explain", str(path), "--why", "tp=8,recompute=full")
    assert code == 0
    for word in ("binding", "remedy", "why not", "formula", "runners-up", "datasheet"):
        assert word in out
    code, out, _ = invoke("explain", str(path), "--json")
    assert json.loads(out)["binding"]["says"]
    code, out, _ = invoke("explain", "--bytes-per-parameter", "--execution", "megatron", "--json")
    assert {r["zero"] for r in json.loads(out)} == {0, 1, 2, 3}
    assert "ZeRO" in invoke("explain", "--bytes-per-parameter")[1]
    code, _, err = invoke("explain")
    assert (code, "plan" in err) == (2, True)
    assert invoke("explain", str(path), "--why", "xp=2")[0] == 2


@pytest.mark.parametrize(
    ("vocab", "tp", "padded", "rows"), [(151_669, 4, 152_064, 38_016), (128_256, 8, 129_024, 16_128), (32_000, 2, 32_000, 16_000)]
)
def test_the_vocabulary_is_shown_with_its_padding_and_rows_a_rank(vocab: int, tp: int, padded: int, rows: int) -> None:
    of = job(decoder(heads=8, vocab=vocab), "h100-sxm:1x8", 512, 16, "megatron")
    shown = vocabulary(of, read_layout(of, f"tp={tp}"))["value"]
    assert shown == f"{vocab} rows, {padded} with padding, {rows} a rank"
