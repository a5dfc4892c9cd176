"""Objectives other than step time."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest

from planner.goodput import goodput
from planner.objectives import (
    Failures,
    Goal,
    answer,
    counts_between,
    gpu_counts,
    nearest_legal,
    read_batches,
    read_deadline,
    read_tokens,
    run_seconds,
)
from planner.solve import PlanRequest, solve
from profiles.errors import DoesNotFit, InputError
from tests.planner.jobs import job

COUNTS = (1, 2, 4)
EVERY = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def request_() -> PlanRequest:
    return PlanRequest(job("llama-3.2-1b", "h100-sxm:1x4", 2048, 16), top=0)


@pytest.fixture(scope="module")
def seconds() -> dict[int, float]:
    """The step on 1, 2 and 4 GPUs, planned one by one."""
    return {n: solve(PlanRequest(job("llama-3.2-1b", f"h100-sxm:1x{n}", 2048, 16), top=0)).step_seconds for n in EVERY}


def test_the_fewest_gpus_are_the_fewest_that_meet_the_deadline(request_, seconds):
    for deadline in (seconds[1] * 1.01, seconds[1] * 0.99, seconds[2] * 0.99, seconds[3] * 0.99):
        plan = answer(request_, Goal("fewest-gpus", deadline_seconds=deadline))
        assert plan.layout_object.world == min(n for n in EVERY if seconds[n] <= deadline)
        assert plan.certificate.objective == "fewest-gpus"
    with pytest.raises(DoesNotFit, match="deadline"):
        answer(request_, Goal("fewest-gpus", deadline_seconds=seconds[4] * 0.9))


def test_a_token_budget_is_steps_times_seconds_and_failures_lengthen_it(request_, seconds):
    tokens = 1e9
    plan = answer(request_, Goal(tokens=tokens))
    steps = math.ceil(tokens / (2048 * 16))
    assert plan.goodput is not None
    assert plan.goodput["run_seconds"] == pytest.approx(steps * plan.step_seconds)
    assert plan.goodput["gpu_hours"] == pytest.approx(4 * steps * plan.step_seconds / 3600)
    failing = Goal(tokens=tokens, failures=Failures(50.0, 30, 600))
    more = answer(request_, failing).goodput
    assert more is not None
    found = goodput(1, 50.0, 30, 600, step_seconds=plan.step_seconds)
    assert more["run_seconds"] == pytest.approx(steps * plan.step_seconds / (found.useful_fraction * found.availability))
    assert more["run_seconds"] > plan.goodput["run_seconds"]
    assert run_seconds(plan, Goal()) == plan.step_seconds


def test_gpu_hours_are_least_over_the_counts_that_meet_the_deadline(request_, seconds):
    best = min(COUNTS, key=lambda n: n * seconds[n])
    assert answer(request_, Goal("gpu-hours", tokens=1e9)).layout_object.world == best
    steps = math.ceil(1e9 / (2048 * 16))
    hurried = answer(request_, Goal("cost", tokens=1e9, deadline_seconds=steps * seconds[2] * 0.99))
    assert hurried.layout_object.world == 4
    assert any("dollars" in note for note in hurried.certificate.notes)


def test_the_front_over_gpus_holds_the_counts_that_no_other_beats(request_, seconds):
    front = answer(request_, Goal("pareto-gpus")).front
    assert [p["gpus"] for p in front] == [n for n in COUNTS if all(seconds[n] < seconds[m] for m in COUNTS if m < n)]
    assert [p["step_seconds"] for p in front] == [seconds[p["gpus"]] for p in front]


def test_the_memory_front_trades_time_for_room_and_each_point_is_the_fastest_below_the_last():
    plan = answer(PlanRequest(job("llama-3.2-1b", "h100-sxm:1x2", 2048, 16), top=0), Goal("pareto-memory"))
    front = plan.front
    assert len(front) >= 3
    for one, next_ in itertools.pairwise(front):
        assert next_["device_bytes"] < one["device_bytes"]
        assert next_["headroom_bytes"] > one["headroom_bytes"]
        assert next_["step_seconds"] >= one["step_seconds"] * 0.99
    assert front[0]["layout"] == plan.layout_text


def test_a_batch_that_may_vary_is_the_one_with_most_tokens_a_second(request_):
    batches = read_batches("8k..64k", 2048, 4)
    assert batches == (4, 8, 12, 16, 20, 24, 28, 32)
    plan = answer(request_, Goal("tokens-per-second-per-gpu", batches=(8, 16)))
    each = {b: solve(PlanRequest(job("llama-3.2-1b", "h100-sxm:1x4", 2048, b), top=0)).step_seconds / b for b in (8, 16)}
    assert plan.job_settings.global_batch == min(each, key=lambda b: each[b])
    assert any("8, 16" in note for note in plan.certificate.notes)


def test_ranges_give_batches_that_many_layouts_divide():
    assert read_batches("512", 8192, 64) == (512,)
    found = read_batches("4M..16M", 8192, 16384)
    assert all(512 <= b <= 2048 and b % 256 == 0 for b in found)
    assert 4 <= len(found) <= 8
    assert read_batches("8k..8k", 8192, 8) == (1,)


@pytest.mark.parametrize(
    ("text", "nearest"), [("1k..2k", "1k..8192"), ("17000..17001", "16384..17001"), ("16k..", "8192..16384"), ("..16", None)]
)
def test_a_range_that_holds_no_batch_names_one_near_it(text: str, nearest: str | None):
    with pytest.raises(InputError) as caught:
        read_batches(text, 8192, 8)
    assert caught.value.field == "--global-batch" and caught.value.value == text
    near = str(caught.value.nearest).replace("1k", "1024")
    assert read_batches(near, 8192, 8) and (nearest is None or near == nearest.replace("1k", "1024"))


def test_between_the_usual_counts_every_legal_one_is_bisected():
    """12 nodes of 2: the usual counts go from 12 to 16 GPUs; 14 is tried where 12 are too slow and 14 are not."""
    of = PlanRequest(job("llama-3.2-1b", "h100-sxm:12x2", 2048, 336), pins="tp=1,cp=1,pp=1", top=0)
    assert gpu_counts(of.job) == (1, 2, 4, 6, 8, 12, 16, 24)
    assert counts_between(of.job, 12, 16) == [14]
    assert counts_between(of.job, 1, 8) == [2, 4, 6]
    assert counts_between(job("llama-tiny", "h100-sxm:1x8", 512, 8), 1, 8) == [2, 3, 4, 5, 6, 7]
    fourteen = solve(replace(of, job=replace(of.job, cluster=of.job.cluster.with_gpus(14)))).step_seconds
    twelve = solve(replace(of, job=replace(of.job, cluster=of.job.cluster.with_gpus(12)))).step_seconds
    assert fourteen < twelve
    plan = answer(of, Goal("fewest-gpus", deadline_seconds=(fourteen + twelve) / 2))
    assert plan.layout_object.world == 14
    assert "between 12 and 16" in plan.certificate.notes[1]
    assert nearest_legal(of, Goal(), [14]) == 14
    odd = replace(of, job=replace(of.job, global_batch=64))
    assert nearest_legal(odd, Goal(), [14, 18, 22]) is None


def test_counts_are_parts_of_a_node_and_then_whole_nodes():
    assert gpu_counts(job("llama-tiny", "h100-sxm:12x8", 128, 8)) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)


@pytest.mark.parametrize(("text", "value"), [("30d", 2_592_000), ("12h", 43_200), ("15m", 900), ("90s", 90), ("0.5", 0.5)])
def test_deadlines_are_read_in_their_units(text, value):
    assert read_deadline(text) == value


def test_token_counts_are_decimal():
    assert [read_tokens(t) for t in ("15T", "300B", "2e9", "7")] == [15e12, 300e9, 2e9, 7]


@pytest.mark.parametrize(
    "arguments",
    [("--objective", "speed"), ("--objective", "cost"), ("--objective", "fewest-gpus"), ("--deadline", "soon"), ("--tokens", "-1"),
     ("--tokens", "1.2.3"), ("--mtbf", "0"), ("--global-batch", "1..2"), ("--deadline", "30d"), ("--spare", "1"),
     ("--moe-imbalance", "1.3")],
)  # fmt: skip
def test_goals_that_cannot_be_are_refused_in_one_line(invoke, arguments):
    base = ["plan", "llama-tiny", "--cluster", "cpu:1x2", "--seq-len", "128"]
    batch = [] if arguments[0] == "--global-batch" else ["--global-batch", "8"]
    code, _, err = invoke(*base, *batch, *arguments)
    assert code == 2
    assert len(err.strip().splitlines()) == 1


def test_the_command_stores_goodput_and_budget_in_the_plan(invoke):
    code, out, _ = invoke("plan", "llama-tiny", "--cluster", "cpu:1x2", "--seq-len", "128", "--global-batch", "8", "--mtbf", "1000",
                          "--spare", "1", "--tokens", "1M", "--json", "--top", "0")  # fmt: skip
    assert code == 0
    found = json.loads(out)["goodput"]
    assert found["spare_nodes"] == 1
    assert 0 < found["overall"] < found["useful_fraction"] <= 1
    assert found["steps"] == math.ceil(1e6 / (128 * 8))
