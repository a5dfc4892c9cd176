"""solve: equal to exhaustive enumeration with the simulator; bounds and memory cuts are sound."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pulp
import pytest

from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import even_split
from cost_models.memory import stage_memory
from cost_models.step import estimate
from planner.columns import Column, modes_of, prefix_counts
from planner.fitting import Fitting
from planner.legality import violations
from planner.paths import PathStore
from planner.plan import Plan
from planner.search import Search
from planner.solve import PlanRequest, solve
from planner.solve_column import solve_column
from planner.solver import run
from planner.space import Space, read_wishes
from profiles.errors import DoesNotFit
from tests.planner.enumeration import columns, exhaustive, small_job
from tests.planner.jobs import decoder, job


def check_against_enumeration(seed: int, *, every: bool = False) -> None:
    """The plan of a small job, and of its pipelines alone, is the best of all enumerated."""
    j = small_job(seed)
    found = exhaustive(j, every=every)
    best_is(j, "", found.best, found.columns)
    if found.piped_columns:
        best_is(j, "pp>=2", found.piped, found.piped_columns)


def best_is(j: Job, pins: str, best: float, columns: int) -> None:
    request = PlanRequest(j, pins=pins, tie=0.0, prove=True, top=0)
    if best == float("inf"):
        with pytest.raises(DoesNotFit):
            solve(request)
        return
    plan = solve(request)
    c = plan.certificate
    assert c.columns_legal == columns == c.cut_by_memory + c.cut_by_bound + c.cut_by_dominance + c.solved + c.unexplored
    assert best * (1 - 1e-9) <= plan.step_seconds <= best * (1 + 1e-4)
    assert c.best_bound_seconds <= best * (1 + 1e-9)
    assert c.proved


SMALL = list(range(40))
QUICK = (0, 1, 2, 5, 6, 7, 8, 9, 11)


@pytest.mark.parametrize("seed", QUICK)
def test_the_plan_of_a_small_job_is_the_best_of_all_enumerated(seed: int) -> None:
    check_against_enumeration(seed, every=True)


@pytest.mark.verify
@pytest.mark.parametrize("seed", [s for s in SMALL if s not in QUICK])
def test_more_small_jobs_equal_enumeration(seed: int) -> None:
    check_against_enumeration(seed)


@pytest.mark.verify
@pytest.mark.parametrize("seed", range(40, 500))
def test_five_hundred_small_jobs_equal_enumeration(seed: int) -> None:
    check_against_enumeration(seed)


def test_the_column_of_the_planner_is_the_estimate_and_the_memory_model() -> None:
    j = job("llama-3-8b", "h100-sxm:2x8", 4096, 64)
    space = Space(j, read_wishes("tp=2,pp=4,dp_shard=2,zero=1,micro_batch=1,order=tp-cp-dp-pp"))
    modes = modes_of(j, space.limits)
    for batch in space.batches(2, 1, 4, 2):
        prefix = space.prefixes[0]
        shard = space.columns_of(prefix, batch)[0]
        column = Column(j, space.layout(prefix, batch, shard), modes, PathStore())
        fitting = Fitting(column)
        stages = [32 // column.chunks] * column.chunks
        if sum(stages) != 32:
            continue
        mixes = [((n // 2, 0, 0, n - n // 2),) for n in stages]
        layout = column.layout_of(stages, mixes)
        assert column.step(column.simulate(mixes).seconds) == pytest.approx(
            estimate(j, layout, detail=False).step_seconds, rel=1e-12
        )
        for rank, memory in enumerate(stage_memory(j, layout)):
            held = fitting.held(rank)
            spans = [(sum(stages[:c]), sum(stages[: c + 1])) for c in held]
            assert fitting.needed(rank, spans, [mixes[c] for c in held]) == pytest.approx(memory.needed, rel=1e-12)


def random_layouts(j: Job, number: int, seed: int = 0) -> Iterator:
    space, rng = Space(j), random.Random(seed)
    modes = modes_of(j, space.limits)
    found = 0
    while found < number:
        prefix = rng.choice(space.prefixes)
        batch = rng.choice(space.batches(prefix.tp, prefix.cp, prefix.pp, prefix.dp))
        shards = space.columns_of(prefix, batch)
        if not shards:
            continue
        found += 1
        mode = rng.choice(modes)
        name = f"{mode.mode}({','.join(mode.modules)})" if mode.modules else mode.mode
        chunks = prefix.pp * batch.vpp
        uneven = chunks > 1 and space.limits.uneven_stages and rng.random() < 0.5
        stages = random_split(rng, j.model.num_layers, chunks) if uneven else ()
        yield prefix, batch, space.layout(prefix, batch, rng.choice(shards), stages, name)


def random_split(rng: random.Random, layers: int, chunks: int) -> tuple[int, ...]:
    """Counts near even: a few layers moved from one chunk to another."""
    counts = list(even_split(layers, chunks))
    for _ in range(rng.randint(1, 4)):
        a, b = rng.sample(range(chunks), 2)
        if counts[a] > 1:
            counts[a], counts[b] = counts[a] - 1, counts[b] + 1
    return tuple(counts)


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-30b-a3b"])
def test_bounds_of_rows_are_sound_and_the_space_is_legal(model: str) -> None:
    j = job(model, "h100-sxm:2x8", 4096, 64)
    search = Search(j, Space(j))
    at = {(r.prefix, r.micro_batch): i for i, r in enumerate(search.rows)}
    for prefix, batch, layout in random_layouts(j, 120):
        assert violations(j, layout) == []
        i = at[prefix, batch.micro_batch]
        cost = estimate(j, layout)
        if batch.schedule not in ("dualpipe", "dualpipe-v"):
            assert search.row_bounds[i] <= cost.step_seconds * (1 + 1e-9)
        assert search.row_bytes[i] <= max(s.needed for s in cost.memory) * (1 + 1e-9)


@pytest.mark.parametrize("execution", ["axisplan", "megatron", "torchtitan", "deepspeed", "fsdp", "accelerate"])
def test_arrays_of_rows_say_what_the_space_and_the_bounds_say_one_by_one(execution: str) -> None:
    j = job("qwen3-30b-a3b", "a100-sxm:1x8", 8192, 96, execution)
    search = Search(j, Space(j))
    rows = search.rows
    for i in random.Random(0).sample(range(len(rows)), 40):
        row = rows[i]
        assert rows.counts[i] == sum(len(search.space.columns_of(row.prefix, b)) for b in row.batches)
        assert {b.micro_batch for b in row.batches} == {row.micro_batch} == {rows.table[i, 5]}
    assert rows.fit.any()


def none_is_faster(j: Job, number: int, seed: int, *, prove: bool = False) -> int:
    """How many of ``number`` random legal layouts fit; none may be faster than the plan, nor beat its bound."""
    plan = solve(PlanRequest(j, tie=0.0, top=0, prove=prove))
    fitted = 0
    for _, _, layout in random_layouts(j, number, seed):
        cost = estimate(j, layout)
        if max(s.needed for s in cost.memory) <= j.limit_bytes:
            fitted += 1
            assert plan.step_seconds <= cost.step_seconds * (1 + 1e-9), layout.text()
            assert plan.certificate.best_bound_seconds <= cost.step_seconds * (1 + 1e-9), layout.text()
    return fitted


def test_no_random_legal_layout_that_fits_is_faster() -> None:
    assert none_is_faster(job("llama-3-8b", "h100-sxm:1x8", 4096, 64), 300, 1) >= 20


LARGER = (
    ("llama-3-8b", "h100-sxm:1x8", 8192, 128, "fsdp"),
    ("llama-3-8b", "h100-sxm:4x8", 8192, 256, "axisplan"),
    ("llama-3-70b", "h100-sxm:8x8", 8192, 512, "axisplan"),
    ("llama-3-70b", "a100-sxm:16x8", 4096, 512, "megatron"),
    ("mixtral-8x7b", "h100-sxm:8x8", 4096, 256, "axisplan"),
    ("qwen3-30b-a3b", "h100-sxm:2x8", 4096, 256, "megatron"),
    ("qwen3-30b-a3b", "h200-sxm:4x8", 4096, 256, "torchtitan"),
    ("gpt3-175b", "a100-sxm:32x8", 2048, 512, "megatron"),
    ("deepseek-v3", "h800-sxm:128x8", 4096, 4096, "axisplan"),
    ("llama-3.1-405b", "h100-sxm:128x8", 8192, 1024, "axisplan"),
)


@pytest.mark.verify
@pytest.mark.parametrize(("model", "cluster", "seq_len", "batch", "execution"), LARGER, ids=lambda v: str(v))
def test_none_of_two_thousand_random_legal_layouts_is_faster(
    model: str, cluster: str, seq_len: int, batch: int, execution: str
) -> None:
    assert none_is_faster(job(model, cluster, seq_len, batch, execution), 2000, 2) > 0


def test_pins_and_exclusions_are_honoured_and_plans_are_the_same_bytes() -> None:
    j = job("llama-tiny", "cpu:1x4", 256, 16, precision="fp32")
    first = solve(PlanRequest(j, pins="tp=2,pp=2"))
    assert (first.layout["tp"], first.layout["pp"]) == (2, 2)
    assert first.text() == solve(PlanRequest(j, pins="tp=2,pp=2")).text()
    assert isinstance(first, Plan)
    other = solve(PlanRequest(j, pins="tp<=2", exclude=("pp=1", "tp=2,pp=2")))
    assert other.layout["pp"] > 1 and (other.layout["tp"], other.layout["pp"]) != (2, 2)


@pytest.mark.parametrize("execution", ["axisplan", "torchtitan"])
def test_stages_that_are_to_be_even_are_and_the_best_of_those_is_planned(execution: str) -> None:
    model = decoder(layers=6, hidden=512, heads=4, width=1024, vocab=32000, head_dim=64)
    j = job(model, "h100-sxm:1x2", 1024, 8, execution, margin=0.0)
    j = replace(j, execution=load_execution(execution, {"uneven_stages": "false"}))
    best = float("inf")
    for column, fitting, some in columns(j):
        size = 6 // column.chunks
        if column.layout.pp == 1:
            continue
        for policy in some:
            one = list(policy.mixes(fitting.counts(0, size), len(column.modes)))
            for mixes in itertools.product(one, repeat=column.chunks):
                seconds = column.step(column.simulate(mixes).seconds)
                if seconds < best and fitting.fits((size,) * column.chunks, mixes):
                    best = seconds
    plan = solve(PlanRequest(j, pins="pp=2", tie=0.0, prove=True, top=0))
    assert violations(j, plan.layout_object) == [] and len(set(plan.layout["stages"])) == 1
    assert plan.step_seconds == pytest.approx(best, rel=1e-9) and plan.certificate.proved


def test_runners_up_differ_in_degrees_or_in_what_is_sharded_unless_similar_ones_are_asked_for() -> None:
    j = job("llama-tiny", "cpu:1x4", 256, 16, precision="fp32")

    def kind(layout: dict) -> tuple:
        return (*(layout[k] for k in ("tp", "cp", "cp_kind", "pp", "ep", "etp")), layout["zero"] == 3)

    apart, alike = solve(PlanRequest(j, top=4)), solve(PlanRequest(j, top=4, similar=True))
    for plan in (apart, alike):
        seconds = [r.estimate["step_seconds"] for r in plan.runners_up]
        assert len(seconds) == 4 and seconds == sorted(seconds)
        assert all(
            0 <= r.chance_faster <= 1 and r.slower == pytest.approx(s / plan.step_seconds - 1)
            for r, s in zip(plan.runners_up, seconds, strict=True)
        )
        assert all(
            sum(r.loses.values()) == pytest.approx(s - plan.step_seconds, abs=1e-9)
            for r, s in zip(plan.runners_up, seconds, strict=True)
        )
    kinds = [kind(p) for p in (apart.layout, *(r.layout for r in apart.runners_up))]
    assert len(set(kinds)) == 5
    assert len({kind(p) for p in (alike.layout, *(r.layout for r in alike.runners_up))}) < 5


def test_a_solver_that_ran_out_of_nodes_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an answer in its nodes a column's bound stays what was known before: no better than the best of the column."""
    checked = 0
    for column, fitting, some in columns(small_job(6)):
        if column.chunks < 2:
            continue
        totals = prefix_counts(column.job)[-1]
        best = solve_column(column, fitting, some, float("inf"), 0.0, totals)
        with monkeypatch.context() as patch:
            patch.setattr("planner.solver.run", lambda *_, **__: "unknown")
            stopped = solve_column(column, fitting, some, float("inf"), 0.0, totals)
        if best.answer is None or not best.programs:
            continue
        checked += 1
        assert stopped.bound <= best.answer.seconds * (1 + 1e-9)
        if checked == 6:
            break
    assert checked


def test_an_impossible_program_is_told_from_one_that_is_not_finished() -> None:
    impossible = pulp.LpProblem("impossible", pulp.LpMinimize)
    x = pulp.LpVariable("x", cat="Binary")
    impossible += x
    impossible += x >= 2
    assert run(impossible, nodes=10) is None


def test_a_search_says_how_far_it_is_and_never_goes_back() -> None:
    told: list[tuple[float, str]] = []
    solve(PlanRequest(job("llama-3-8b", "h100-sxm:1x8", 4096, 64), top=0, report=lambda share, what: told.append((share, what))))
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1
    assert told[-1][1].startswith("best ")
