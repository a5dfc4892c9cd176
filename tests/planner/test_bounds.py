"""Bounds by arrays: what a microbatch takes is what it takes one by one; no layout is done sooner than its class may be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cost_models.activations import chunk_memory
from cost_models.job import Job
from cost_models.layout import V_SHAPED
from cost_models.memory import fixed_part, stage_memory
from cost_models.step import estimate
from planner.bulk_bytes import states_of
from planner.column_costs import Costs
from planner.columns import prefix_counts, units
from planner.core_costs import CoreCosts
from planner.cores import Cores, Key
from planner.dealing import ways
from planner.heuristic import quick
from planner.loads import best_loads
from planner.search import Search
from planner.space import Batch, Prefix, Shard, Space, read_wishes
from planner.splits import Splits
from tests.planner.jobs import decoder, job

JOBS: dict[str, tuple[Any, ...]] = {
    "adapters": ("llama-3-8b", "h100-sxm:2x8", 4096, 64, "axisplan", {"lora_rank": 16}),
    "frozen parts in megatron": ("llama-3-8b", "h100-sxm:2x8", 4096, 64, "megatron", {"frozen": ("embedding", "mlp")}),
    "adapters in torchtitan": ("llama-3-8b", "h100-sxm:1x8", 8192, 64, "torchtitan", {"lora_rank": 16}),
    "dense": ("llama-3-8b", "h100-sxm:2x8", 4096, 64, "axisplan"),
    "dense in megatron": ("llama-3-8b", "h100-sxm:2x8", 4096, 64, "megatron"),
    "dense in torchtitan": ("llama-3-8b", "h100-sxm:1x8", 8192, 64, "torchtitan"),
    "a tied embedding": ("llama-3.2-1b", "h100-sxm:1x8", 8192, 64, "axisplan"),
    "experts": ("qwen3-30b-a3b", "h100-sxm:2x8", 4096, 64, "axisplan"),
    "dense layers first": ("deepseek-v3", "h800-sxm:8x8", 4096, 256, "axisplan"),
    "dense layers first in megatron": ("deepseek-v3", "h800-sxm:8x8", 4096, 256, "megatron"),
    "two kinds of experts": ("gpt-oss-20b", "h100-sxm:2x8", 8192, 64, "megatron"),
    "dense layers between experts": ("llama-4-maverick", "h100-sxm:16x8", 8192, 128, "megatron"),
    "two kinds of attention": ("gemma-2-9b", "h100-sxm:1x8", 8192, 64, "axisplan"),
    "experts in deepspeed": ("mixtral-8x7b", "a100-sxm:4x8", 4096, 64, "deepspeed"),
}


def made(name: str) -> Job:
    *arguments, last = JOBS[name]
    return job(*arguments, **last) if isinstance(last, dict) else job(*arguments, last)


def cores_of(j: Job) -> tuple[Search, Cores]:
    search = Search(j, Space(j))
    return search, Cores(search.rows, np.arange(len(search.rows)), search.store)


@pytest.mark.parametrize("name", ["dense", "experts", "dense layers first"])
def test_passes_by_arrays_are_those_of_the_estimate(name: str) -> None:
    j = made(name)
    search = cores_of(j)[0]
    rows = search.rows
    for i in random.Random(0).sample(range(len(rows)), 12):
        row = rows[i]
        layout = search.space.layout(row.prefix, row.batches[0], Shard(1, row.prefix.dp, 1, "tp-cp-dp-pp", "alltoall"))
        one, many = units(j, layout, search.modes), search.rows.bulk.take(search.rows.key[[i]])
        assert many.f[0] == pytest.approx(one.f, rel=1e-9)
        assert many.w[0] == pytest.approx(one.w, rel=1e-9)
        assert many.b[0] == pytest.approx(one.b, rel=1e-9)
        assert many.embedding[0] == pytest.approx(one.embedding, rel=1e-9)


def test_prediction_modules_take_no_less_than_their_bound_under_any_dispatcher() -> None:
    j = made("dense layers first in megatron")
    search = cores_of(j)[0]
    rows, quickest = search.rows, set()
    for i in random.Random(1).sample(range(len(rows)), 20):
        row, ways = rows[i], {}
        for dispatcher in search.space.limits.dispatchers:
            shard = Shard(1, row.prefix.dp, 1, "tp-cp-dp-pp", dispatcher)
            one = units(j, search.space.layout(row.prefix, row.batches[0], shard), search.modes)
            ways[dispatcher] = sum(one.least_head)
        least = min(ways, key=ways.__getitem__)
        quickest.add(least)
        assert search.rows.bulk.take(search.rows.key[[i]]).head.sum() <= ways[least] * (1 + 1e-9)
    assert len(quickest) > 1


@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 1), ("1f1b", 3), ("zb-v", 1)])
@pytest.mark.parametrize("name", ["dense", "a tied embedding", "dense layers first"])
def test_what_the_models_ends_hold_is_what_their_ranks_hold_beside_layers(name: str, schedule: str, zero: int) -> None:
    j = replace(made(name), memory_limit_bytes=1e15)
    search, cores = cores_of(j)
    row = next(i for i, r in enumerate(search.rows) if r.prefix.pp == 2 and r.prefix.dp > 1 and r.microbatches > 8)
    prefix, batches = search.rows[row].prefix, search.rows[row].batches
    batch = next(b for b in batches if b.schedule == schedule)
    shard = next(s for s in search.space.columns_of(prefix, batch) if s.zero == zero and s.dp_shard == prefix.dp)
    stages = (5,) * (2 * batch.vpp - 1)
    stages = (*stages, j.model.num_layers - sum(stages))
    layout = search.space.layout(prefix, batch, shard, stages)
    held = [fixed_part(j, layout, rank).states.total for rank in range(2)]
    split = Splits.of(search.rows, np.array([row]), zero, np.array([prefix.dp]))
    layers, totals = np.zeros((2, len(cores.main.totals))), prefix_counts(j)
    for chunk, size in enumerate(stages):
        start = sum(stages[:chunk])
        layers[layout.rank_of_chunk(chunk)] += totals[start + size] - totals[start]
    ends = np.array([held[rank] - layers[rank] @ split.state[0] for rank in range(2)])
    expected = (
        [split.embedding[0] + split.head[0], 0.0] if schedule == "zb-v" else [split.embedding[0], split.head[0] + split.twice[0]]
    )
    assert ends == pytest.approx(expected, rel=1e-9, abs=1e-6 * held[0])


@pytest.mark.parametrize("name", ["dense", "a tied embedding", "dense layers first", "dense layers first in megatron"])
def test_the_end_of_a_model_that_recomputes_all_keeps_what_its_bound_says(name: str) -> None:
    j = made(name)
    search = cores_of(j)[0]
    row = next(i for i, r in enumerate(search.rows) if r.prefix.pp == 2 and r.microbatches > 8)
    prefix = search.rows[row].prefix
    batch = next(b for b in search.rows[row].batches if b.schedule == "1f1b")
    kept, key, pattern = search.rows.kept, search.rows.key[row], j.model.pattern
    found = []
    for dispatcher in search.space.limits.dispatchers:  # the bound is the one of the dispatcher that needs least
        layout = search.space.layout(prefix, batch, Shard(1, prefix.dp, 1, "tp-cp-dp-pp", dispatcher), recompute="full")
        found.append(chunk_memory(j, layout, 1).kept)
    layers = sum(kept.kept[key, pattern[i], -1] for i in layout.layers_of_chunk(1, len(pattern)))
    assert min(found) == pytest.approx(layers + kept.tail[key], rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_consecutive_layers_fall_below_as_many_mean_ones_by_no_more_than_is_said(seed: int) -> None:
    rng = random.Random(seed)
    pattern = tuple(rng.randrange(3) for _ in range(rng.randint(1, 14)))
    totals = np.array([pattern.count(kind) for kind in range(3)])
    main = SimpleNamespace(pattern=pattern, totals=totals, layers=len(pattern))
    each = np.array([[rng.uniform(0.0, 2.0) for _ in range(3)]])
    mean = float(each[0] @ totals) / len(pattern)
    windows = (pattern[i:j] for i in range(len(pattern)) for j in range(i, len(pattern) + 1))
    most = max(sum(mean - each[0][kind] for kind in window) for window in windows)
    assert CoreCosts._below(cast(CoreCosts, SimpleNamespace(main=main)), each)[0] == pytest.approx(most, abs=1e-12)


def test_a_single_microbatchs_gradients_are_missed_only_where_layers_reduce_theirs_one_by_one() -> None:
    for name in ("dense", "dense in megatron"):
        j, prefix = made(name), np.array([[1, 1, 1, 1, 1, 0, 1, 16]])
        steady, once = (states_of(j, prefix, np.array([16]), 3, offload=False, once=once)[0] for once in (False, True))
        assert (once < steady).all() == j.execution.reduces_by_unit
        assert j.execution.reduces_by_unit or (once == steady).all()


def uneven(rng: random.Random, layers: int, schedule: str, pp: int, vpp: int) -> tuple[int, ...] | None:
    """A split of the declared space: loads near even, dealt to a rank's chunks in one of the ways there are."""
    chunks = pp * vpp
    loads = [layers // pp + (r < layers % pp) for r in range(pp)]
    for _ in range(rng.choice([0, 1, 2, 5]) if pp > 1 else 0):
        a, b = rng.sample(range(pp), 2)
        loads[a], loads[b] = loads[a] - 1, loads[b] + 1
    if min(loads) < vpp:
        return None
    out = [0] * chunks
    for rank, load in enumerate(loads):
        held = [rank, 2 * pp - 1 - rank] if schedule in V_SHAPED else [rank + k * pp for k in range(vpp)]
        for chunk, size in zip(held, rng.choice(ways(load, vpp, tail=held[-1] == chunks - 1)), strict=True):
            out[chunk] = size
    return tuple(out)


def drawn(search: Search, rng: random.Random) -> tuple[Prefix, Batch, Shard, str, tuple[int, ...]] | None:
    """A random layout of the declared space, recompute included."""
    space, layers = search.space, search.job.model.num_layers
    prefix = rng.choice(space.prefixes)
    batch = rng.choice(space.batches(prefix.tp, prefix.cp, prefix.pp, prefix.dp))
    shards = space.columns_of(prefix, batch)
    stages = uneven(rng, layers, batch.schedule, prefix.pp, batch.vpp)
    if not shards or stages is None:
        return None
    mode = rng.choice(search.modes)
    text = f"{mode.mode}({','.join(mode.modules)})" if mode.modules else mode.mode
    if text != "none" and space.limits.recompute == "layer" and rng.random() < 0.5:
        text = f"0-{rng.randrange(layers)}:{text}"
    return prefix, batch, rng.choice(shards), text, stages if prefix.pp > 1 else ()


def no_class_is_slower_than_its_layouts(name: str, number: int, seed: int) -> None:
    """In memory that a random layout just fills, its class may be done in its time."""
    j = made(name)
    search, cores = cores_of(j)
    rows, rng = search.rows, random.Random(seed)
    at = {(rows.prefixes[rows.at[i]], int(rows.table[i, 5])): i for i in range(len(rows))}
    room, once, checked = rows.held.room, rows.held_once, 0
    while checked < number:
        found = drawn(search, rng)
        if found is None:
            continue
        prefix, batch, shard, recompute, stages = found
        cost = estimate(j, search.space.layout(prefix, batch, shard, stages, recompute))
        need = max(s.needed for s in cost.memory) * (1 + 1e-9)
        for name_of, held in (("held", rows.held), ("held_once", once)):
            rows.__dict__[name_of] = replace(held, room=room + (need - j.limit_bytes) / j.execution.slack)
        key = (batch.schedule, prefix.pp, batch.vpp, batch.microbatches)
        seconds = search.pipeline(cost.step_seconds) * (1 + 1e-9)
        row, which = at[prefix, batch.micro_batch], f"{prefix} {batch} {shard} {recompute} {stages}"
        may_be_done(cores, key, row, shard, seconds, which)
        if checked < PASSED_OVER:
            rows_left, least = Cores(rows, np.arange(len(rows)), search.store).left(key[:3], np.array([row]), 2 * seconds)
            assert rows_left.tolist() == [row] and least <= seconds, which
        checked += 1


PASSED_OVER = 3
"""Layouts of a job whose core is passed over as the search does without effort left: its bound is not above the layout's time."""


def may_be_done(cores: Cores, key: Key, row: int, shard: Shard, seconds: float, which: str) -> None:
    """No step of the bounds says that a column takes longer than ``seconds`` of pipeline, or does not fit."""
    split = Splits.of(cores.rows, np.array([row]), shard.zero, np.array([shard.dp_shard]))
    costs, layers = cores.costs(split, key[:3]), cores.job.model.num_layers
    assert split.work[0] <= seconds, which
    assert split.roomy(cores.rows)[0], which
    assert len(cores.glance(key[:3], split, costs, seconds)), which
    assert cores._recomputing(key[:3], split, costs, np.array([seconds]))[0], which
    assert costs.roomy(cores.flying(key[:3], split.row), key[2], layers, cores.main.first)[0], which
    assert cores.shape(key).holds(costs, seconds, layers, memory=True)[0], which


@pytest.mark.parametrize("name", sorted(JOBS))
def test_a_class_may_be_done_in_the_time_of_each_of_its_layouts(name: str) -> None:
    no_class_is_slower_than_its_layouts(name, 12, 0)


@pytest.mark.verify
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(JOBS))
def test_a_class_may_be_done_in_the_time_of_five_hundred_of_its_layouts(name: str) -> None:
    no_class_is_slower_than_its_layouts(name, 500, 1)


@pytest.mark.parametrize("stages", [(8, 9, 9, 6), (12, 7, 7, 6), (8, 8, 8, 8)])
def test_a_first_look_lets_1f1b_pass_whose_heavy_rank_is_ahead_by_its_first_forwards(stages: tuple[int, ...]) -> None:
    j = replace(made("dense in torchtitan"), memory_limit_bytes=1e12)
    search, cores = cores_of(j)
    prefix, micro = Prefix(1, 1, "ring", 4, 2, 1, 1, False), 2
    i = next(i for i, row in enumerate(search.rows) if (row.prefix, row.micro_batch) == (prefix, micro))
    batch = next(b for b in search.rows[i].batches if b.schedule == "1f1b")
    layout = search.space.layout(prefix, batch, Shard(1, 2, 2, "tp-cp-dp-pp", "alltoall"), stages)
    seconds = search.pipeline(estimate(j, layout, detail=False).step_seconds) * (1 + 1e-9)
    key = (batch.schedule, 4, 1, batch.microbatches)
    split = Splits.of(search.rows, np.array([i]), 1, np.array([2]))
    costs = cores.costs(split, key[:3])
    assert len(cores.glance(key[:3], split, costs, seconds)) == 1
    assert len(cores.glance(key[:3], split, costs, 0.7 * seconds)) == 0


PIPED = sorted(set(JOBS) - {"experts in deepspeed"})
"""Jobs that have pipelines: DeepSpeed's experts have none."""


def test_deepspeeds_experts_have_no_pipeline() -> None:
    space = cores_of(made("experts in deepspeed"))[0].space
    batches = ((p, b) for p in space.prefixes if p.pp > 1 for b in space.batches(p.tp, p.cp, p.pp, p.dp))
    assert not any(space.columns_of(*both) for both in batches)


def no_class_is_slower_than_its_tight_answers(name: str, number: int, seed: int) -> None:
    """In memory between what all recompute and none need, where every rank recomputes as it must, a class may be done in its answer's
    time."""
    whole, rng = made(name), random.Random(seed)
    space = Search(whole, Space(whole)).space
    checked = 0
    while checked < number:
        prefix = rng.choice([p for p in space.prefixes if p.pp > 1])
        batch = rng.choice(space.batches(prefix.tp, prefix.cp, prefix.pp, prefix.dp))
        shards = space.columns_of(prefix, batch)
        if not shards or batch.schedule == "dualpipe" or whole.model.num_layers < prefix.pp * batch.vpp:
            continue
        shard = rng.choice(shards)
        least, most = (
            max(m.needed for m in stage_memory(whole, space.layout(prefix, batch, shard, recompute=text)))
            for text in ("full", "none")
        )
        j = replace(whole, memory_limit_bytes=least + rng.random() * (most - least), margin=0.0)
        search = Search(j, Space(j))
        column, fitting = search.column(prefix, batch, shard)
        answer = quick(column, fitting, search.policies(batch, prefix))
        if answer is None:
            continue
        rows = search.rows
        row = np.array(
            [i for i in range(len(rows)) if (rows.prefixes[rows.at[i]], rows.table[i, 5]) == (prefix, batch.micro_batch)]
        )
        cores, key = Cores(rows, row, search.store), (batch.schedule, prefix.pp, batch.vpp, batch.microbatches)
        seconds = search.pipeline(answer.seconds) * (1 + 1e-9)
        may_be_done(cores, key, int(row[0]), shard, seconds, f"{prefix} {batch} {shard} {answer.stages} {answer.mixes}")
        checked += 1


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_a_class_may_be_done_in_the_time_of_answers_whose_ranks_recompute_apart(name: str) -> None:
    no_class_is_slower_than_its_tight_answers(name, 8, 0)


@pytest.mark.verify
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PIPED)
def test_a_class_may_be_done_in_the_time_of_two_hundred_answers_whose_ranks_recompute_apart(name: str) -> None:
    no_class_is_slower_than_its_tight_answers(name, 200, 1)


def declared(ranks: Any, stages: Sequence[int]) -> bool:
    """Whether every rank's layers lie in its chunks in one of the ways of the declared space."""
    sizes, last = np.asarray(stages), ranks[-1]
    held = {rank: sizes[ranks == rank] for rank in set(ranks.tolist())}
    return all(tuple(some) in ways(int(some.sum()), len(some), tail=rank == last) for rank, some in held.items())


@pytest.mark.parametrize(
    ("schedule", "vpp", "tight"), [("interleaved", 2, 0.0), ("zb-v", 2, 0.0), ("dualpipe-v", 2, 0.0), ("interleaved", 3, 0.9)]
)
def test_loads_of_a_column_are_the_best_of_all_splits_of_the_declared_space(schedule: str, vpp: int, tight: float) -> None:
    from tests.planner.enumeration import compositions

    j = job(decoder(layers=9, hidden=512, heads=4, width=2048, vocab=16384, head_dim=64), "h100-sxm:1x2", 2048, 16, margin=0.0)
    wishes = f"pp=2,vpp={vpp},schedule={schedule},micro_batch=2,order=tp-cp-dp-pp,cp=1"
    search = Search(j, Space(j, read_wishes(wishes)))
    row = search.rows[0]
    shard = search.space.columns_of(row.prefix, row.batches[0])[0]
    column, fitting = search.column(row.prefix, row.batches[0], shard)
    some = [s for s in compositions(9, column.chunks) if declared(column.paths.ranks, s)]
    plain = [[tuple(tuple(n if m == 0 else 0 for m in range(len(search.modes))) for n in [size]) for size in s] for s in some]
    if tight:
        need = min(
            max(fitting.needed(r, _spans(s, fitting.held(r)), [m[c] for c in fitting.held(r)]) for r in range(2))
            for s, m in zip(some, plain, strict=True)
        )
        j = replace(j, memory_limit_bytes=need * tight)
        search = Search(j, Space(j, read_wishes(wishes)))
        column, fitting = search.column(row.prefix, row.batches[0], shard)
    cores = Cores(search.rows, np.arange(1), search.store)
    one = next(
        c for _, c in cores.within((schedule, 2, vpp), np.arange(1), 1e3) if (c.zero, c.shard) == (shard.zero, shard.dp_shard)
    )
    exact: Costs = cores.exact(one, [column])
    found = best_loads(column, fitting, search.policies(row.batches[0], row.prefix), cores.shape(one.key), exact, 1e3, 1e-6, 500)
    assert found is not None and found[0] is not None
    best = min(_seconds(column, fitting, s, m) for s, m in zip(some, plain, strict=True))
    assert found[1] <= found[0].seconds * (1 + 1e-9)
    if tight:
        assert fitting.fits(found[0].stages, found[0].mixes) and found[0].seconds > best
    else:
        assert found[0].seconds == pytest.approx(best, rel=1e-6)
        assert found[1] == pytest.approx(best, rel=1e-3)


def _spans(stages: tuple[int, ...], held: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(sum(stages[:c]), sum(stages[: c + 1])) for c in held]


def _seconds(column: object, fitting: object, stages: tuple[int, ...], mixes: list[object]) -> float:
    return column.step(column.simulate(mixes).seconds)  # type: ignore[attr-defined]
