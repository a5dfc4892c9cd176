"""The search's effort: what it tries where the gap stays open, and what it knows of what it does not look into."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models.memory import stage_memory
from planner import search
from planner.cores import Cores
from planner.heuristic import quick
from planner.search import Search
from planner.space import Space
from tests.planner.jobs import job

JOBS: dict[str, tuple[Any, ...]] = {
    "dense": ("llama-3-8b", "h100-sxm:2x8", 8192, 32, "axisplan"),
    "experts": ("deepseek-v2-lite", "h100-sxm:1x8", 4096, 32, "megatron"),
}


def factors_of_two(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("far", [1, 2])
def test_rows_near_one_are_those_within_so_many_factors_of_two(far: int) -> None:
    j = job(*JOBS["experts"])
    rows = Search(j, Space(j)).rows
    degrees = [(r.prefix.tp, r.prefix.cp, r.prefix.pp, r.prefix.ep, r.prefix.etp, r.micro_batch) for r in rows]
    for i in range(0, len(rows), 97):
        near = [k for k, other in enumerate(degrees) if factors_of_two(degrees[i], other) <= far]
        assert rows.near(i, far).tolist() == near
        assert rows.of(rows[i].prefix, rows[i].micro_batch) == i
        assert i in near and len(near) > 1


@pytest.mark.parametrize("name", JOBS)
def test_what_is_passed_over_is_bounded_truly_and_better_with_more_effort(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind an answer a third slower than the fastest one, no pipeline looked into: the bound is not above what the fastest takes."""
    j = job(*JOBS[name])
    whole = Search(j, Space(j), prove=True)
    best = whole.run().fastest
    assert best is not None and whole.books.unexplored == 0
    bounds, numbers = [], []
    for effort in (0, 10**12):
        monkeypatch.setattr(search, "BOUNDED", effort)
        some = Search(j, Space(j))
        some.best = replace(best, answer=replace(best.answer, seconds=best.answer.seconds * 4 / 3))
        some.books.legal, some.cores = int(some.rows.counts.sum()), Cores(some.rows, np.arange(len(some.rows)), some.store)
        some._pass_over(list(some.cores.by.items()))
        bounds.append(some.books.weakest)
        numbers.append(some.books.unexplored)
    assert bounds[0] <= bounds[1] <= best.answer.seconds * (1 + 1e-9)
    assert numbers[0] >= numbers[1] > 0
    if name == "dense":  # of experts, a rank without a pipeline has the least bound, which its one path makes no better
        assert bounds[0] < bounds[1] and numbers[0] > numbers[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "seconds", "gap"),
    [
        # columns of several chunks promise more than the best one, whose quick answer is 7 % slower than what its layers allow
        ("glm-4.5-air --cluster h100-sxm:4x8 --seq-len 4k --global-batch 128 --execution megatron", 6.78, 0.06),
        # layers of three kinds take turns, and most must recompute
        ("llama-4-scout --cluster h100-sxm:16x8 --seq-len 8k --global-batch 256", 6.08, 0.02),
    ],
)
def test_where_the_first_answers_are_poor_the_plan_is_not(words: str, seconds: float, gap: float, invoke: Any) -> None:
    found = json.loads(invoke("plan", *words.split(), "--top", "0", "--json")[1])["certificate"]
    assert found["fastest_seconds"] < seconds
    assert found["gap"] < gap


@pytest.mark.slow
def test_a_small_space_in_which_nothing_fits_is_known_to_its_end(invoke: Any) -> None:
    words = "llama-3.1-70b --cluster h100-sxm:2x8 --seq-len 8k --global-batch 32 --pin schedule=interleaved"
    code, _, error = invoke("plan", *words.split())
    assert code == 3 and "no feasible layout:" in error and "unexplored" not in error


TURNS = {
    "state space": "nemotron-h-8b --cluster a100-sxm-40gb:1x8 --seq-len 8k --global-batch 32 --execution megatron --pin tp=2",
    "windows": "gemma-2-9b --cluster a100-sxm-40gb:1x8 --seq-len 8k --global-batch 64 --execution megatron",
    "positions": "smollm3-3b --cluster h100-pcie:2x8 --seq-len 32k --global-batch 32 --pin recompute=full",
}
"""Jobs whose memory is tight, of models whose kinds of layers take turns."""


@pytest.mark.parametrize("words", TURNS.values(), ids=TURNS)
def test_where_kinds_of_layers_take_turns_plans_fit_in_their_order_and_are_legal(words: str, invoke: Any) -> None:
    model, *options = words.split()
    code, out, _ = invoke("plan", model, *options, "--json")
    plan = json.loads(out)
    assert code == 0 and plan["runners_up"]
    for one in (plan, *plan["runners_up"]):
        assert max(stage["device"] for stage in one["estimate"]["memory"]) <= one["estimate"]["limit_bytes"]
    job_options = options[: options.index("--pin")] if "--pin" in options else options
    code, out, error = invoke("check", model, *job_options, "--layout", plan["layout_text"])
    assert code == 0, out + error


@pytest.mark.parametrize(
    ("model", "execution"), [("nemotron-h-8b", "megatron"), ("gpt-oss-20b", "torchtitan"), ("smollm3-3b", "axisplan")]
)
def test_mixes_of_kinds_need_no_more_than_their_layers_in_order(model: str, execution: str) -> None:
    """So that what does not fit as mixes does not fit in their order either (Jamba's four kinds may: docs/limits.md)."""
    j, rng, checked = replace(job(model, "h100-sxm:1x8", 4096, 64, execution), memory_limit_bytes=4e11), random.Random(0), 0
    some = Search(j, Space(j))
    while checked < 20:
        row = some.rows[rng.randrange(len(some.rows))]
        batch = rng.choice([b for b in row.batches if b.schedule != "dualpipe"])
        shards = some.space.columns_of(row.prefix, batch)
        column, fitting = some.column(row.prefix, batch, rng.choice(shards)) if shards else (None, None)
        if column is None or fitting is None:
            continue
        fitting.limit = rng.choice([4e11, 1e11, 6e10])
        answer = quick(column, fitting, some.policies(batch, row.prefix))
        if answer is None:
            continue
        starts, layout = [sum(answer.stages[:c]) for c in range(column.chunks + 1)], column.layout_of(answer.stages, answer.mixes)
        for memory in stage_memory(j, layout):
            held = fitting.held(memory.stage)
            spans = [(starts[c], starts[c + 1]) for c in held]
            assert fitting.needed(memory.stage, spans, [answer.mixes[c] for c in held]) <= memory.needed * (1 + 1e-9)
        checked += 1


def test_what_the_pins_leave_is_told_as_the_leanest_that_does_not_fit(invoke: Any) -> None:
    """Most rows that need least have no column under these pins."""
    words = "granite-4.0-h-small --cluster l40s:2x8 --seq-len 4k --global-batch 64 --execution megatron --pin zero=3"
    code, _, error = invoke("plan", *words.split())
    assert code == 3 and "zero=3" in error and "no feasible layout" in error
