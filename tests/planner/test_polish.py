"""Recompute moved between the chunks of a rank: against every mix of a column's chunks."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from planner.core_costs import Pipeline
from planner.heuristic import splits, spread
from planner.polish import polished
from planner.program import Answer, Block, Pattern, Program
from planner.search import Search
from planner.space import Space
from planner.wishes import read_wishes
from tests.planner.jobs import decoder, job

PIPELINES = [("interleaved", 2, 2), ("interleaved", 2, 3), ("zb-v", 2, 2), ("zb-v", 3, 2)]


def first_polished_best(pipeline: Pipeline, seed: int) -> tuple[float, float, float]:
    """Seconds of a random column's loads in little memory: with the least recompute that fits, polished, and of the program's best."""
    schedule, pp, vpp = pipeline
    rng = random.Random(f"{pipeline} {seed}")
    model = decoder(
        layers=2 * pp * vpp - rng.choice([0, 1]), hidden=512, heads=4, width=1024, vocab=rng.choice([2048, 16384]), head_dim=64
    )
    wishes = read_wishes(f"pp={pp},vpp={vpp},schedule={schedule},micro_batch=1")
    j = job(model, f"h100-sxm:1x{pp}", 1024, rng.choice([2 * pp, 4 * pp]), "axisplan", margin=0.0)

    def opened(limit: float | None) -> Search:
        limited = replace(j, memory_limit_bytes=limit)
        return Search(limited, Space(limited, wishes))

    search = opened(None)
    row = search.rows[0]
    shard = search.space.columns_of(row.prefix, row.batches[0])[0]
    column, fitting = search.column(row.prefix, row.batches[0], shard)
    (policy,) = search.policies(row.batches[0], row.prefix)
    stages = splits(column)[0]
    starts = [sum(stages[:c]) for c in range(len(stages) + 1)]
    menus = [list(policy.mixes(fitting.counts(*s), len(column.modes))) for s in itertools.pairwise(starts)]
    light, heavy = ([max(some, key=lambda m: sign * fitting.chunk(c, m).kept) for c, some in enumerate(menus)] for sign in (1, -1))
    spans = [[(starts[c], starts[c + 1]) for c in fitting.held(r)] for r in range(pp)]
    most, least = (
        max(fitting.needed(r, s, [some[c] for c in fitting.held(r)]) for r, s in enumerate(spans)) for some in (light, heavy)
    )

    search = opened(least + rng.uniform(0.2, 0.9) * (most - least))
    column, fitting = search.column(row.prefix, row.batches[0], shard)
    mixes = spread(column, fitting, stages, policy)
    assert mixes is not None
    first = Answer(column.step(column.simulate(mixes).seconds), stages, tuple(mixes), column, 0.0)
    found = polished(column, fitting, policy, first, 0.0)
    assert found.stages == stages and fitting.fits(found.stages, found.mixes)
    assert found.seconds == pytest.approx(column.step(column.simulate(found.mixes).seconds), rel=1e-12)
    assert polished(column, fitting, policy, first, first.seconds) is first
    patterns = [[Pattern(*span, m) for m in some] for span, some in zip(itertools.pairwise(starts), menus, strict=True)]
    best = Program([Block(column, fitting, policy, patterns)], float("inf")).solve()
    assert best is not None and best.seconds <= best.bound * (1 + 1e-4)
    return first.seconds, found.seconds, best.seconds


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: "-".join(map(str, p)))
def test_recompute_moved_between_chunks_finds_what_the_program_finds(pipeline: Pipeline) -> None:
    for first, found, best in (first_polished_best(pipeline, seed) for seed in range(8)):
        assert found <= first
        assert found == pytest.approx(best, rel=1e-7)


def test_the_least_recompute_alone_may_be_slower() -> None:
    found = [first_polished_best(("interleaved", 2, 3), seed) for seed in range(8)]
    assert sum(polished < first * (1 - 1e-5) for first, polished, _ in found) >= 2
