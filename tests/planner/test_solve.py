"""solve: equal to exhaustive enumeration with the simulator, and to one monolithic program; bounds and memory cuts are sound."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cost_models.job import Job
from cost_models.memory import stage_memory
from cost_models.step import estimate
from planner.bulk import lower_bytes
from planner.columns import Column, PathStore, modes_of
from planner.fitting import Fitting, Policy, policies
from planner.legality import violations
from planner.plan import Plan
from planner.program import Block, Pattern, Program
from planner.search import Search
from planner.solve import PlanRequest, solve
from planner.space import Space, read_wishes
from profiles.errors import DoesNotFit
from tests.planner.jobs import decoder, job

EXECUTIONS = ("axisplan", "megatron", "torchtitan")


def small_job(seed: int) -> Job:
    """A job small enough to enumerate: 1 to 4 GPUs, 2 to 5 layers, dense or MoE, memory sometimes tight."""
    rng = random.Random(seed)
    experts = rng.choice([0, 0, 4])
    layers = rng.choice([2, 3, 4, 5])
    dense_first = rng.choice([0, 1]) if experts else 0
    model = decoder(
        layers=layers, hidden=rng.choice([256, 512, 1024]), heads=rng.choice([2, 4]), width=rng.choice([512, 1024]), vocab=rng.choice([512, 4096]),
        experts=experts, dense_first=dense_first, head_dim=64,
    )  # fmt: skip
    gpus = rng.choice([1, 2, 2, 4])
    batch = gpus * rng.choice([2, 4])
    j = job(model, f"h100-sxm:1x{gpus}", rng.choice([512, 2048]), batch, rng.choice(EXECUTIONS), margin=0.0)
    if rng.random() < 0.5:
        roomy = estimate(j, Space(j).layout(*first_column(j)))
        peak = max(s.needed for s in roomy.memory)
        j = replace(j, memory_limit_bytes=peak * rng.uniform(0.9, 1.05))
    return j


def first_column(j: Job):
    space = Space(j)
    prefix = space.prefixes[-1]
    batch = space.batches(prefix.tp, prefix.cp, prefix.pp, prefix.dp)[0]
    return prefix, batch, space.columns_of(prefix, batch)[0]


def columns(j: Job) -> Iterator[tuple[Column, Fitting, list[Policy]]]:
    space, store = Space(j), PathStore()
    modes = modes_of(j, space.limits)
    for prefix in space.prefixes:
        for batch in space.batches(prefix.tp, prefix.cp, prefix.pp, prefix.dp):
            for shard in space.columns_of(prefix, batch):
                column = Column(j, space.layout(prefix, batch, shard), modes, store)
                longest = -(-j.model.num_layers // column.chunks) + 2
                yield column, Fitting(column), policies(space.limits.recompute, modes, longest)


def compositions(layers: int, chunks: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, layers), chunks - 1):
        edges = (0, *cuts, layers)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def exhaustive(j: Job) -> tuple[float, int]:
    """(least seconds over every column, split and mix that fits, columns)."""
    best, number = float("inf"), 0
    for column, fitting, some in columns(j):
        number += 1
        for stages in compositions(column.layers, column.chunks):
            starts = [sum(stages[:c]) for c in range(len(stages))]
            for policy in some:
                choices = [
                    list(policy.mixes(fitting.counts(s, s + n), len(column.modes))) for s, n in zip(starts, stages, strict=True)
                ]
                for mixes in itertools.product(*choices):
                    seconds = column.step(column.simulate(mixes).seconds)
                    if seconds < best and fitting.fits(stages, mixes):
                        best = seconds
    return best, number


def check_against_enumeration(seed: int) -> None:
    j = small_job(seed)
    best, number = exhaustive(j)
    request = PlanRequest(j, tie=0.0, prove=True, top=0)
    if best == float("inf"):
        with pytest.raises(DoesNotFit):
            solve(request)
        return
    plan = solve(request)
    c = plan.certificate
    assert c.columns_legal == number == c.cut_by_memory + c.cut_by_bound + c.cut_by_dominance + c.solved
    assert plan.step_seconds <= best * (1 + 1e-4)
    assert c.best_bound_seconds <= best * (1 + 1e-9)
    assert c.proved


SMALL = list(range(40))
QUICK = (0, 1, 2, 5, 6, 7, 8, 9, 11)


@pytest.mark.parametrize("seed", QUICK)
def test_the_plan_of_a_small_job_is_the_best_of_all_enumerated(seed: int) -> None:
    check_against_enumeration(seed)


@pytest.mark.verify
@pytest.mark.parametrize("seed", [s for s in SMALL if s not in QUICK])
def test_more_small_jobs_equal_enumeration(seed: int) -> None:
    check_against_enumeration(seed)


@pytest.mark.verify
@pytest.mark.parametrize("seed", range(40, 500))
def test_five_hundred_small_jobs_equal_enumeration(seed: int) -> None:
    check_against_enumeration(seed)


@pytest.mark.parametrize("seed", [3, 7])
def test_one_program_over_all_columns_finds_the_same(seed: int) -> None:
    j = replace(small_job(seed), execution=job("llama-tiny", "cpu:1x1", 64, 1).execution)
    best, _ = exhaustive(j)
    blocks = []
    for column, fitting, some in columns(j):
        for policy in some:
            patterns = []
            for chunk in range(column.chunks):
                last = chunk == column.chunks - 1
                here = [
                    Pattern(start, stop, mix)
                    for start in ([0] if chunk == 0 else range(chunk, column.layers))
                    for stop in ([column.layers] if last else range(start + 1, column.layers))
                    for mix in policy.mixes(fitting.counts(start, stop), len(column.modes))
                ]
                patterns.append(here)
            if all(patterns):
                blocks.append(Block(column, fitting, policy, patterns))
    answer = Program(blocks, float("inf")).solve(rounds=200)
    if best == float("inf"):
        assert answer is None
        return
    assert answer is not None
    assert answer.seconds == pytest.approx(best, rel=1e-6)


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
    for _ in range(number):
        prefix = rng.choice(space.prefixes)
        batch = rng.choice(space.batches(prefix.tp, prefix.cp, prefix.pp, prefix.dp))
        shards = space.columns_of(prefix, batch)
        if not shards:
            continue
        mode = rng.choice(modes)
        name = f"{mode.mode}({','.join(mode.modules)})" if mode.modules else mode.mode
        yield prefix, batch, space.layout(prefix, batch, rng.choice(shards), recompute=name)


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


@pytest.mark.parametrize("execution", ["axisplan", "megatron"])
def test_arrays_of_rows_say_what_the_space_and_the_bounds_say_one_by_one(execution: str) -> None:
    j = job("qwen3-30b-a3b", "a100-sxm:1x8", 8192, 96, execution)
    search = Search(j, Space(j))
    rows = search.rows
    for i in random.Random(0).sample(range(len(rows)), 40):
        row = rows[i]
        assert rows.counts[i] == sum(len(search.space.columns_of(row.prefix, b)) for b in row.batches)
        assert {b.micro_batch for b in row.batches} == {row.micro_batch} == {rows.table[i, 5]}
    direct = lower_bytes(j, search.space.limits, rows.table, search.modes, offload=False)[0]
    assert (rows.bytes[0] <= direct * (1 + 1e-12)).all()
    assert (rows.fit == (direct <= j.limit_bytes)).all()
    assert not rows.fit.all()


def test_no_random_legal_layout_that_fits_is_faster() -> None:
    j = job("llama-3-8b", "h100-sxm:1x8", 4096, 64)
    plan = solve(PlanRequest(j, tie=0.0, top=0))
    for _, _, layout in random_layouts(j, 300, seed=1):
        cost = estimate(j, layout)
        if cost.fits and max(s.needed for s in cost.memory) <= j.limit_bytes:
            assert plan.step_seconds <= cost.step_seconds * (1 + 1e-9)
            assert plan.certificate.best_bound_seconds <= cost.step_seconds * (1 + 1e-9)


def test_pins_and_exclusions_are_honoured_and_plans_are_the_same_bytes() -> None:
    j = job("llama-tiny", "cpu:1x4", 256, 16, precision="fp32")
    first = solve(PlanRequest(j, pins="tp=2,pp=2"))
    assert (first.layout["tp"], first.layout["pp"]) == (2, 2)
    assert first.text() == solve(PlanRequest(j, pins="tp=2,pp=2")).text()
    assert isinstance(first, Plan)
    other = solve(PlanRequest(j, pins="tp<=2", exclude=("pp=1", "tp=2,pp=2")))
    assert other.layout["pp"] > 1 and (other.layout["tp"], other.layout["pp"]) != (2, 2)
