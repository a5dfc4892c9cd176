"""Cases of group F (cases.md): uneven pipelines, embeddings, the loss stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.memory import stage_memory
from cost_models.passes import HEAD, unit_seconds
from cost_models.states import layer_weights
from cost_models.step import estimate
from planner.legality import read_layout, violations
from planner.solve import PlanRequest, solve
from profiles.errors import DoesNotFit
from tests.planner.jobs import decoder, job


@pytest.fixture(scope="module")
def heavy_head():
    """A vocabulary of 128,000 beside small layers: the head outweighs several of them."""
    return job(decoder(layers=16, hidden=1024, heads=8, width=4096, vocab=128_000), "h100-sxm:1x4", 2048, 64)


def test_f02_a_zero_bubble_schedule_is_taken_only_where_what_it_keeps_fits(heavy_head):
    """ZB-H1 holds weight-gradient inputs: 9.6 GiB where 1F1B needs 5.1 on the third stage."""
    needs = {
        s: [x.needed for x in stage_memory(heavy_head, read_layout(heavy_head, f"pp=4,schedule={s},micro_batch=4"))]
        for s in ("1f1b", "zb-h1")
    }
    assert all(a <= b + 1 for a, b in zip(needs["1f1b"], needs["zb-h1"], strict=True))
    limit = (max(needs["1f1b"]) + max(needs["zb-h1"])) / 2
    tight = replace(heavy_head, memory_limit_bytes=limit, margin=0.0)
    pins = "pp=4,tp=1,cp=1,micro_batch=4,recompute=none"
    plan = solve(PlanRequest(tight, pins=f"{pins},schedule=1f1b|zb-h1", top=0))
    assert max(s["device"] for s in plan.estimate["memory"]) <= limit
    for action in ("parameters", "gradients", "optimizer", "activations", "temporary"):
        assert all(s[action] >= 0 for s in plan.estimate["memory"])


def test_f02_no_schedule_is_forced_into_memory_it_does_not_have(heavy_head):
    tiny = replace(heavy_head, memory_limit_bytes=0.7 * 2**30, margin=0.0)
    with pytest.raises(DoesNotFit):
        solve(PlanRequest(tiny, pins="pp=4,schedule=zb-h1", top=0))


def test_f03_a_heavy_head_takes_layers_off_the_last_stage(heavy_head):
    plan = solve(PlanRequest(heavy_head, pins="pp=4,vpp=1,schedule=1f1b,tp=1,cp=1", top=0))
    stages = plan.layout_object.stages
    assert sum(stages) == 16
    assert stages[-1] < min(stages[:-1])
    even = estimate(heavy_head, plan.layout_object.with_(stages=(4, 4, 4, 4)))
    assert plan.step_seconds < 0.95 * even.step_seconds


def test_f03_a_head_of_256k_rows_weighs_and_lasts_as_long_as_two_layers_and_more():
    """Command R: hidden 8192, 256,000 rows, MLP of 22,528: V h over a layer's parameters is 2.55."""
    spec = decoder(layers=40, hidden=8192, heads=64, head_dim=128, width=22_528, vocab=256_000, tied=True)
    layer = sum(w.elements for w in layer_weights(spec, spec.layer(0)))
    assert 256_000 * 8192 / layer == pytest.approx(2.55, abs=0.01)
    of = job(spec, "h100-sxm:1x8", 4096, 64)
    head, one = (unit_seconds(of, read_layout(of, "pp=8"), unit) for unit in (HEAD, 0))
    assert 2 < (head.f + head.b + head.w) / (one.f + one.b + one.w) < 4


def test_f04_every_layer_stands_on_one_stage_and_the_ends_carry_embedding_and_head(heavy_head):
    plan = solve(PlanRequest(heavy_head, pins="pp=4,vpp=1,schedule=1f1b,tp=1,cp=1", top=0))
    held = [i for stage in plan.stages for first, last in stage.layers for i in range(first, last + 1)]
    assert held == list(range(16))
    assert [s.embedding for s in plan.stages] == [True, False, False, False]
    assert [s.head for s in plan.stages] == [False, False, False, True]


def test_f05_tied_embeddings_stand_at_both_ends_and_are_summed_each_step():
    tied, apart = (
        job(decoder(layers=8, tied=t, vocab=32_000, hidden=1024, heads=8, width=4096), "h100-sxm:1x2", 512, 8, "megatron")
        for t in (True, False)
    )
    layout = read_layout(tied, "pp=2")
    ends = [[s.parameters for s in stage_memory(j, layout)] for j in (tied, apart)]
    assert ends[0] == ends[1]
    one, other = estimate(tied, layout), estimate(apart, layout)
    more = one.bytes_sent["pp"]["nvlink"] - other.bytes_sent["pp"]["nvlink"]
    assert more == pytest.approx(32_000 * 1024 * 4, rel=0.01)
    assert one.seconds["communication.pp"] > other.seconds["communication.pp"]


def test_f05_torchtitan_plans_tied_models_without_a_pipeline():
    tied = job(decoder(layers=8, tied=True, hidden=1024, heads=8), "h100-sxm:1x4", 512, 16, "torchtitan")
    assert solve(PlanRequest(tied, top=0)).layout_object.pp == 1
    assert {v.rule for v in violations(tied, read_layout(tied, "pp=2"))} == {"tied_embeddings_and_pipeline"}
