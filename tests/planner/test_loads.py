"""A column's loads, closed by the program, against every split and mix of it: pipelines of one chunk a rank (tests/planner/test_bounds.py has those of several)."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from planner.core_costs import Pipeline
from planner.cores import Cores
from planner.loads import best_loads
from planner.search import Search
from planner.space import Space
from planner.wishes import read_wishes
from tests.planner.enumeration import compositions
from tests.planner.jobs import decoder, job

TARGETS = {"1f1b": ("axisplan", "megatron", "torchtitan"), "gpipe": ("axisplan", "torchtitan"), "zb-h1": ("axisplan",)}


def closed_as_enumerated(pipeline: Pipeline, seed: int) -> str:
    """What happened to one random column: '' where memory was never the question."""
    schedule, pp, vpp = pipeline
    rng = random.Random(f"{pipeline} {seed}")
    experts, layers = rng.choice([0, 4]), pp * vpp + rng.choice([0, 1, 2, 3])
    model = decoder(
        layers=layers, hidden=512, heads=4, width=1024, vocab=rng.choice([2048, 16384]), head_dim=64,
        experts=experts, dense_first=min(rng.choice([0, 1, 2]), layers - 1) if experts else 0,
    )  # fmt: skip
    j = job(model, f"h100-sxm:1x{pp}", 1024, rng.choice([pp, 2 * pp, 3 * pp]), rng.choice(TARGETS[schedule]), margin=0.0)
    wishes = read_wishes(f"pp={pp},vpp={vpp},schedule={schedule},micro_batch=1")

    def opened(limit: float | None) -> tuple[Search, object, object]:
        search = Search(replace(j, memory_limit_bytes=limit), Space(replace(j, memory_limit_bytes=limit), wishes), prove=True)
        row = search.rows[0]
        shard = search.space.columns_of(row.prefix, row.batches[0])[0]
        return search, row, shard

    search, row, shard = opened(None)
    column, fitting = search.column(row.prefix, row.batches[0], shard)
    some = search.policies(row.batches[0], row.prefix)
    every = []
    for stages in compositions(layers, column.chunks):
        starts = [sum(stages[:c]) for c in range(len(stages))]
        for policy in some:
            choices = [list(policy.mixes(fitting.counts(s, s + n), len(column.modes))) for s, n in zip(starts, stages, strict=True)]
            every += [(stages, mixes) for mixes in itertools.product(*choices)]
    needs = [
        max(fitting.needed(r, _spans(s, fitting.held(r)), [m[c] for c in fitting.held(r)]) for r in range(pp)) for s, m in every
    ]
    limit = min(needs) + rng.choice([0.02, 0.2, 0.6, 1.1]) * (max(needs) - min(needs))
    fit = [one for one, need in zip(every, needs, strict=True) if need <= limit]
    best = min(column.step(column.simulate(mixes).seconds) for _, mixes in fit)

    search, row, shard = opened(limit)
    column, fitting = search.column(row.prefix, row.batches[0], shard)
    cores = Cores(search.rows, np.arange(1), search.store)
    one = next(c for _, c in cores.within(pipeline, np.arange(1), 1e3) if (c.zero, c.shard) == (shard.zero, shard.dp_shard))
    exact, gap = cores.exact(one, [column]), 1e-4
    answer, bound = best_loads(column, fitting, some, cores.shape(one.key), exact, 1e3, gap, 200, prove=True, programs=64)
    assert answer is not None and fitting.fits(answer.stages, answer.mixes)
    assert bound <= best * (1 + 1e-9) and best <= answer.seconds * (1 + 1e-9)
    assert answer.seconds == pytest.approx(best, rel=2 * gap)
    assert bound == pytest.approx(best, rel=2 * gap)
    return "" if len(fit) == len(every) else "tight"


def _spans(stages: tuple[int, ...], held: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(sum(stages[:c]), sum(stages[: c + 1])) for c in held]


ONE_CHUNK = [("1f1b", 2, 1), ("1f1b", 3, 1), ("gpipe", 2, 1), ("zb-h1", 2, 1), ("zb-h1", 3, 1)]


@pytest.mark.parametrize("pipeline", ONE_CHUNK, ids=lambda p: f"{p[0]}-{p[1]}")
def test_columns_of_one_chunk_a_rank_are_closed_as_enumerated(pipeline: Pipeline) -> None:
    assert "tight" in [closed_as_enumerated(pipeline, seed) for seed in range(4)]


@pytest.mark.verify
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pipeline", ONE_CHUNK, ids=lambda p: f"{p[0]}-{p[1]}")
def test_a_hundred_columns_of_one_chunk_a_rank_are_closed_as_enumerated(pipeline: Pipeline) -> None:
    assert sum(closed_as_enumerated(pipeline, seed) == "tight" for seed in range(6, 106)) > 40
