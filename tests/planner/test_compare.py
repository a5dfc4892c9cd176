"""Comparing plans with plans, and plans with runs."""

from __future__ import annotations

import json

import pytest

from planner.compare import compare_plans, compare_run
from planner.plan import Plan


@pytest.fixture(scope="module")
def first(make_plan) -> Plan:
    return make_plan("llama-3-8b", "h100-sxm:1x8", "tp=2,recompute=full")


@pytest.fixture(scope="module")
def second(make_plan) -> Plan:
    return make_plan("llama-3-8b", "h100-sxm:1x8", "tp=4,recompute=full")


def test_a_plan_compared_with_itself_differs_in_nothing(first):
    found = compare_plans(first, first)
    assert found.differences == ()
    assert found.verdict == "the same plan"


def test_layouts_differ_in_the_keys_that_differ_and_seconds_come_largest_first(first, second):
    found = compare_plans(first, second)
    assert {d.field for d in found.differences if d.section == "layout"} == {"tp", "dp_shard"}
    seconds = [abs(d.second - d.first) for d in found.differences if d.section == "seconds"]
    assert seconds == sorted(seconds, reverse=True)
    assert len(seconds) > 2
    step = next(d for d in found.differences if d.field == "step_seconds")
    assert step.change_percent == pytest.approx(100 * (second.step_seconds / first.step_seconds - 1))
    assert "layout: pp" in found.same


def test_plans_for_different_jobs_are_said_to_be(make_plan, first):
    other = make_plan("llama-3-8b", "h100-sxm:1x8", "tp=2,recompute=full", batch=128)
    found = compare_plans(first, other)
    assert "different inputs (job)" in found.verdict
    assert [d.field for d in found.differences if d.section == "input"] == ["global_batch"]


def test_a_run_is_held_against_the_plan_after_its_warm_up(first):
    step = first.step_seconds
    records = [{"step": i, "seconds": step * (5 if i == 0 else 1.01), "peak_bytes": 2**30} for i in range(8)]
    found = compare_run(first, records)
    by_field = {d.field: d for d in found.differences}
    assert by_field["step_seconds"].second == pytest.approx(1.01 * step)
    assert by_field["step_seconds"].change_percent == pytest.approx(1.0)
    assert by_field["peak_allocated"].second == 2**30
    assert "inside the 80 % interval" in found.verdict


def test_the_command_takes_the_run_on_either_side(first, tmp_path, invoke):
    plan, run = tmp_path / "plan.json", tmp_path / "run.jsonl"
    first.save(plan)
    run.write_text('{"step": 1, "seconds": 1.0}\n\n{"step": 2, "seconds": 1.2}\n')
    documents = []
    for pair in ((plan, run), (run, plan)):
        code, out, err = invoke("compare", *map(str, pair), "--json")
        assert (code, err) == (0, "")
        documents.append(json.loads(out))
    assert documents[0] == documents[1]
    code, out, _ = invoke("compare", str(plan), str(run))
    assert code == 0
    assert "measured" in out


@pytest.mark.parametrize("bad", ["", "{}", "[]", '{"step": 1, "seconds": 1}\nnonsense\n', '{"step": 1, "seconds": -1}', "\x00"])
def test_what_is_neither_a_plan_nor_a_run_is_refused(first, tmp_path, invoke, bad):
    plan, other = tmp_path / "plan.json", tmp_path / "other"
    first.save(plan)
    other.write_text(bad)
    code, _, err = invoke("compare", str(plan), str(other))
    assert code == 2
    assert err.count("\n") == 1


def test_the_folder_of_a_run_stands_for_its_metrics(first, tmp_path, invoke):
    plan, run = tmp_path / "plan.json", tmp_path / "run"
    first.save(plan)
    assert invoke("compare", str(plan), str(tmp_path))[0] == 2
    run.mkdir()
    records = [{"step": i, "seconds": first.step_seconds, "peak_bytes": 2**30} for i in range(4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    of_folder, of_file = (invoke("compare", str(plan), str(side), "--json") for side in (run, run / "metrics.jsonl"))
    assert of_folder == of_file
    assert of_folder[0] == 0


def test_what_is_the_same_is_listed_by_section(first, second, tmp_path, invoke):
    first.save(tmp_path / "a.json")
    second.save(tmp_path / "b.json")
    code, out, _ = invoke("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    same = [line.split(maxsplit=1) for line in out.split("\nsame\n")[1].splitlines()]
    assert code == 0
    assert dict(same)["input"].startswith("model, cluster, execution")
    assert "pp, vpp, cp" in dict(same)["layout"]
