"""The plan artefact: round trip, determinism, refusals, migration, atomic files."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from cost_models.execution import load_execution
from cost_models.job import Job
from planner.plan import FORMAT, Plan, schema
from planner.solve import PlanRequest, solve
from profiles.errors import AxisplanError, InputError
from profiles.hardware import load_cluster
from profiles.huggingface import load_model


def tiny() -> Job:
    return Job(load_model("llama-tiny"), load_cluster("cpu:1x2"), load_execution("axisplan"), 128, 8, "fp32")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(PlanRequest(tiny()))


@pytest.fixture
def document(plan) -> dict:
    return copy.deepcopy(plan.to_json())


def test_a_plan_read_back_is_the_plan_and_gives_back_job_and_layout(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.job() == tiny()
    assert again.layout_object.text() == plan.layout_text
    assert again.text() == plan.text()


def test_the_same_input_gives_the_same_bytes(plan):
    assert solve(PlanRequest(tiny())).text() == plan.text()


def test_the_certificates_counts_add_up(plan):
    c = plan.certificate
    assert c.columns_legal == c.cut_by_memory + c.cut_by_bound + c.cut_by_dominance + c.solved + c.unexplored
    assert c.best_bound_seconds <= c.fastest_seconds <= c.proposed_seconds * (1 + 1e-12)
    assert c.gap == pytest.approx(max(0.0, 1 - c.best_bound_seconds / c.fastest_seconds))
    assert c.proved == (c.gap <= 1e-4)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [("model", "vocab", 999), ("cluster", "gpus_per_node", 1), ("execution", "name", "megatron"), ("job_settings", "seq_len", 256)],
)
def test_a_plan_altered_after_planning_is_refused_and_names_what_was_altered(document, part, key, value):
    """G05: a loaded plan must not keep old timings for another sequence length, model or machine."""
    document[part][key] = value
    with pytest.raises(InputError):
        Plan.read(document)


@pytest.mark.parametrize(
    "broken",
    [
        [],
        {},
        {"version": 1},
        {"version": "1", "layout": {}},
        {"version": FORMAT + 1, "layout": {}},
        {"version": 1, "layout": {"tp": 1}},
    ],
)
def test_what_is_no_plan_is_refused(broken):
    with pytest.raises(InputError):
        Plan.read(broken)


def test_files_that_are_no_plans_are_refused_in_one_line(tmp_path):
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for path in ("missing.json", "text.json", "bytes.json", "."):
        with pytest.raises(InputError) as refused:
            Plan.load(tmp_path / path)
        assert "\n" not in str(refused.value)


def test_an_unknown_key_is_refused_by_name(document):
    document["layout"]["xp"] = 2
    with pytest.raises(InputError, match="xp"):
        Plan.read(document)


def test_a_draft_of_version_0_is_migrated(document, plan):
    document["version"] = 0
    del document["warnings"]
    assert Plan.read(document).version == FORMAT
    assert Plan.read(document).layout_text == plan.layout_text


def test_a_plan_is_refused_for_another_model_or_cluster(plan):
    plan.require_same(load_model("llama-tiny"), load_cluster("cpu:1x2"))
    with pytest.raises(InputError, match="gpt2"):
        plan.require_same(model=load_model("gpt2"))
    with pytest.raises(InputError, match="cpu:1x4"):
        plan.require_same(cluster=load_cluster("cpu:1x4"))


def test_a_plan_is_written_whole_or_not_at_all(plan, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    plan.save(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(AxisplanError, match="No space left"):
        plan.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.json"]


def test_the_schema_in_the_docs_is_the_plans(plan):
    assert set(schema()["properties"]) == set(plan.to_json())
    stands = Path(__file__).resolve().parents[2] / "docs" / "plan.schema.json"
    if stands.exists():
        assert json.loads(stands.read_text(encoding="utf-8")) == schema()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ("llama-3-70b --cluster h100-sxm:2x8 --seq-len 4k --global-batch 64 --top 0", 29.3),
        ("qwen3-30b-a3b --cluster h100-sxm:1x8 --seq-len 4k --global-batch 64 --pin schedule=interleaved", 4.81),
    ],
)
def test_where_memory_is_tight_the_plan_is_as_fast_as_the_proved_one(words: str, seconds: float, invoke: Any) -> None:
    certificate = json.loads(invoke("plan", *words.split(), "--json")[1])["certificate"]
    assert certificate["fastest_seconds"] < seconds and certificate["gap"] < 0.015
