"""What looks fast: estimates by arrays beside the answers they stand for, and beside brute force."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest

from planner.column_costs import Costs
from planner.core_costs import CoreCosts
from planner.heuristic import quick
from planner.hopes import _fullest, hopes
from planner.search import Search
from planner.space import Space
from tests.planner.jobs import job


def costs_of(each: float, embedding: float, head: float, quicker: float) -> Costs:
    """One column whose layer takes ``each`` seconds, a leading one ``quicker`` less."""
    nothing: dict[str, Any] = {name: np.zeros(1) for name in Costs.__dataclass_fields__}
    third, ahead = each / 3, (each - quicker) / 3
    return Costs(**{
        **nothing, "f": np.array([third]), "b": np.array([third]), "w": np.array([third]), "hidden": np.zeros((1, 2)),
        "embedding": np.array([[embedding, 0.0, 0.0]]), "head": np.array([[head, 0.0, 0.0]]), "ahead": np.full((1, 3), ahead),
    })  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_the_fullest_rank_has_least_of_all_ways_to_deal_whole_layers(seed: int) -> None:
    rng = random.Random(seed)
    pp, layers, folded = rng.randint(2, 4), rng.randint(5, 11), rng.random() < 0.4
    each, embedding, head = rng.uniform(0.5, 2.0), rng.uniform(0.0, 1.0), rng.uniform(0.0, 3.0)
    ends = [embedding, *[0.0] * (pp - 2), head] if not folded else [embedding + head, *[0.0] * (pp - 1)]
    ways = (way for way in product(range(1, layers), repeat=pp) if sum(way) == layers)
    best = min(max(n * each + end for n, end in zip(way, ends, strict=True)) for way in ways)
    found = _fullest(costs_of(each, embedding, head, 0.0), pp, layers, 0, folded=folded)
    assert found[0] == pytest.approx(best, rel=1e-9)


def test_leading_layers_that_are_quicker_make_the_first_rank_lighter() -> None:
    """9 layers of 1 s on 3 ranks, 2 leading ones of 0.5 s: 4 on the first rank take no longer than 3 elsewhere, and the head finds room."""
    assert _fullest(costs_of(1.0, 0.0, 1.0, 0.5), 3, 9, 2, folded=False)[0] == pytest.approx(3.0)
    assert _fullest(costs_of(1.0, 0.0, 1.0, 0.0), 3, 9, 0, folded=False)[0] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "execution"),
    [("llama-3-8b", "h100-sxm:1x8", 128, "axisplan"), ("deepseek-v2-lite", "h100-sxm:2x8", 128, "megatron")],
)
def test_hopes_are_near_the_answers_of_their_columns(model: str, cluster: str, batch: int, execution: str) -> None:
    j = job(model, cluster, 4096, batch, execution)
    search = Search(j, Space(j))
    some = hopes(CoreCosts(search.rows), np.arange(len(search.rows)))
    seconds = [hope.seconds for hope in some]
    assert seconds == sorted(seconds) and len(some) > 50
    ratios = []
    for hope in some[:60]:
        for shard in search._columns_of(hope)[:1]:
            prefix = search.rows[hope.row].prefix
            column, fitting = search.column(prefix, hope.batch, shard)
            answer = quick(column, fitting, search.policies(hope.batch, prefix))
            if answer is not None:
                ratios.append(search.step(hope.seconds) / answer.seconds)
    assert len(ratios) >= 20
    assert 0.85 < np.median(ratios) < 1.02
    assert max(ratios) < 1.1
