"""Replanning after losing nodes."""

from __future__ import annotations

import json

import pytest

from planner.plan import Plan
from planner.replan import checkpoint_rules, kept_fields, nearest_batches, replan
from planner.rules.core import targets
from planner.solve import PlanRequest, solve
from profiles.errors import InputError
from tests.planner.jobs import job


@pytest.fixture(scope="module")
def old() -> Plan:
    return solve(PlanRequest(job("llama-3.2-1b", "h100-sxm:4x2", 1024, 64), top=0))


def test_the_global_batch_is_kept_where_it_divides_and_the_changes_are_named(old):
    found = replan(old, 4)
    assert found.plan.job_settings.global_batch == 64
    assert found.plan.layout_object.world == 4
    changes = {c.field: (c.before, c.after) for c in found.changes}
    assert changes["gpus"] == (8, 4)
    assert "global_batch" not in changes
    assert changes["step_seconds"] == (old.step_seconds, found.plan.step_seconds)
    assert found.plan.job().cluster.gpu == old.job().cluster.gpu


def test_the_new_plan_is_the_best_for_the_gpus_that_are_left(old):
    there = solve(PlanRequest(job("llama-3.2-1b", "h100-sxm:2x2", 1024, 64), top=3))
    assert replan(old, 4).plan.layout_text == there.layout_text


def test_a_batch_that_no_layout_divides_becomes_the_nearest_and_it_is_said():
    one = job("llama-tiny", "cpu:1x8", 128, 8)
    plan = solve(PlanRequest(one, pins="pp=1,tp=1,cp=1", top=0))
    found = replan(plan, 3, pins="pp=1,tp=1,cp=1")
    assert found.plan.job_settings.global_batch == 9
    said = found.plan.warnings[0]
    assert "from 8 to 9 sequences (+12.5% tokens a step)" in said and "--keep-batch" in said and "takes another (6, 12, 3)" in said
    assert {c.field: (c.before, c.after) for c in found.changes}["global_batch"] == (8, 9)
    asked = replan(plan, 3, global_batch=12, pins="pp=1,tp=1,cp=1").plan
    assert asked.job_settings.global_batch == 12 and not any("global batch changes" in w for w in asked.warnings)
    with pytest.raises(InputError, match="micro_batch"):
        replan(plan, 3, keep_batch=True, pins="pp=1,tp=1,cp=1")
    with pytest.raises(InputError, match="exclude each other"):
        replan(plan, 3, keep_batch=True, global_batch=12)


def test_nearest_batches_divide_over_the_data_parallelism_that_is_left(old):
    of = old.job()
    layout = old.layout_object.with_(tp=1, pp=1, cp=1, dp_shard=8, dp_replicate=1)
    assert nearest_batches(of, layout, 6)[:2] == [66, 60]
    assert nearest_batches(of, layout, 4)[:2] == [68, 60]


def test_every_target_has_a_word_on_its_checkpoints_and_deepspeeds_keep_their_degrees():
    assert set(checkpoint_rules()) == set(targets())
    of = job("llama-3.2-1b", "h100-sxm:1x4", 1024, 64, "deepspeed")
    plan = solve(PlanRequest(of, top=0))
    kept = kept_fields(of, plan.layout_object)
    assert set(kept) == {"tp", "pp", "ep", "zero"}
    found = replan(plan, 2)
    assert {name: getattr(found.plan.layout_object, name) for name in kept} == kept
    assert "universal" in found.notes[0]


def test_megatron_is_told_when_the_padded_vocabulary_changes():
    of = job("gpt2", "h100-sxm:1x4", 1024, 64, "megatron")
    plan = solve(PlanRequest(of, pins="tp=4", top=0))
    found = replan(plan, 2)
    assert found.plan.layout_object.tp != 4
    assert any("padded" in note for note in found.notes)


def test_gpus_that_are_no_whole_nodes_are_refused_with_the_nearest(old):
    with pytest.raises(InputError) as refused:
        replan(old, 7)
    assert refused.value.field == "gpus"
    assert refused.value.nearest in (6, 8)


def test_the_command_shows_changes_and_writes_the_plan(old, invoke, tmp_path):
    path, new = tmp_path / "plan.json", tmp_path / "new.json"
    old.save(path)
    code, out, _ = invoke("replan", str(path), "--gpus", "4", "--out", str(new))
    assert code == 0
    assert "what changes" in out
    assert Plan.load(new).layout_object.world == 4
    code, out, _ = invoke("replan", str(path), "--gpus", "4", "--json")
    assert {c["field"] for c in json.loads(out)["changes"]} >= {"gpus", "step_seconds"}
