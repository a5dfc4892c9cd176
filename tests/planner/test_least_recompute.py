"""The least recompute with which a rank of many chunks fits, against every combination of their mixes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from planner import least_recompute as module
from planner.fitting import Fitting, Policy
from planner.least_recompute import least_recompute
from planner.search import Search
from planner.space import Space
from planner.wishes import read_wishes
from tests.planner.jobs import decoder, job

CHUNKS = 6


def a_rank(seed: int) -> tuple[Fitting, Policy, int, list[tuple[int, int]], float]:
    """A rank of six chunks of a layer each in memory that only some combinations fit, and the least seconds of those."""
    rng = random.Random(seed)
    rank = rng.randrange(2)
    model = decoder(
        layers=2 * CHUNKS, hidden=512, heads=4, width=rng.choice([1024, 2048]), vocab=rng.choice([2048, 16384]), head_dim=64
    )
    wishes = read_wishes(f"pp=2,vpp={CHUNKS},schedule=interleaved,micro_batch=1")
    j = job(model, "h100-sxm:1x2", 1024, rng.choice([4, 8]), "axisplan", margin=0.0)

    def opened(limit: float | None) -> tuple[Fitting, Policy]:
        limited = replace(j, memory_limit_bytes=limit)
        search = Search(limited, Space(limited, wishes))
        row = search.rows[0]
        _, fitting = search.column(row.prefix, row.batches[0], search.space.columns_of(row.prefix, row.batches[0])[0])
        return fitting, search.policies(row.batches[0], row.prefix)[0]

    fitting, policy = opened(None)
    spans = [(c, c + 1) for c in fitting.held(rank)]
    b = (fitting.column.units.b - fitting.column.units.sb)[0]
    menus = [list(policy.mixes(fitting.counts(*span), len(b))) for span in spans]
    every = [(sum(float(b @ mix[0]) for mix in mixes), fitting.needed(rank, spans, mixes)) for mixes in itertools.product(*menus)]
    lightest = min(need for _, need in every)
    limit = lightest + rng.uniform(0.05, 0.9) * (max(need for _, need in every) - lightest)
    return *opened(limit), rank, spans, min(seconds for seconds, need in every if need <= limit)


@pytest.mark.parametrize("seed", range(6))
def test_the_least_recompute_of_many_chunks_is_that_of_all_combinations(seed: int) -> None:
    fitting, policy, rank, spans, least = a_rank(seed)
    bound, mixes = least_recompute(fitting, policy, rank, spans)
    assert bound == pytest.approx(least, rel=1e-9)
    assert mixes is not None and fitting.needed(rank, spans, mixes) <= fitting.limit
    b = (fitting.column.units.b - fitting.column.units.sb)[0]
    assert sum(float(b @ mix[0]) for mix in mixes) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_where_combinations_are_too_many_a_bound_and_a_good_one_are_found(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    fitting, policy, rank, spans, least = a_rank(seed)
    monkeypatch.setattr(module, "MANY", 0)
    bound, mixes = least_recompute(fitting, policy, rank, spans)
    assert bound <= least * (1 + 1e-9)
    assert mixes is not None and fitting.needed(rank, spans, mixes) <= fitting.limit
    b = (fitting.column.units.b - fitting.column.units.sb)[0]
    seconds = sum(float(b @ mix[0]) for mix in mixes)
    assert least * (1 - 1e-9) <= seconds <= least + 0.1 * (least - CHUNKS * float(b.min())) + 1e-9
