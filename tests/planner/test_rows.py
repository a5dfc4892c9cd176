"""Rows by arrays: what is priced on grids, what is counted for many prefixes at once."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import numpy as np
import pytest

from cost_models.arrays import distinct
from planner import bulk
from planner.bulk import lower_seconds
from planner.bulk_bytes import kept_of
from planner.search import Search
from planner.space import Space, read_wishes
from tests.planner.jobs import decoder, job

JOBS: dict[str, tuple[Any, ...]] = {
    "experts after dense layers": ("deepseek-v3", "h800-sxm:8x8", 4096, 256, "megatron", {"precision": "fp8"}),
    "experts in every layer": ("mixtral-8x7b", "h100-sxm:2x8", 4096, 64, "torchtitan", {}),
    "packed documents": ("llama-3-8b", "h100-sxm:2x8", 4096, 64, "axisplan", {"documents": ((512, 100), (4096, 20))}),
    "experts without shared kernels": (decoder(8, experts=8, dense_first=2), "a100-sxm:2x8", 1024, 64, "deepspeed", {}),
}


def search_of(name: str) -> Search:
    *arguments, more = JOBS[name]
    j = job(*arguments, **more)
    return Search(j, Space(j))


@pytest.mark.parametrize("name", JOBS)
def test_a_grid_says_of_a_key_what_the_key_says_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_of(name)
    keys, modes = search.rows.keys, search.modes

    def arrays(at: slice) -> list[Any]:
        seconds, bytes_ = lower_seconds(search.job, keys[at], modes), kept_of(search.job, keys[at], modes, offload=False)
        return list(chain(vars(seconds).values(), vars(bytes_).values()))

    whole = arrays(slice(None))
    monkeypatch.setattr(bulk, "SMALL", 0)
    assert all(np.array_equal(*pair) for pair in zip(whole, arrays(slice(None)), strict=True))
    for i in random.Random(1).sample(range(len(keys)), min(12, len(keys))):
        at = slice(i, i + 1)
        for among, alone in zip(whole, arrays(at), strict=True):
            np.testing.assert_allclose(among[at], alone, rtol=1e-12)


@pytest.mark.parametrize("name", JOBS)
def test_the_columns_of_a_row_are_those_that_complete_its_cores(name: str) -> None:
    search = search_of(name)
    rows, space = search.rows, Space(search.job)
    for i in random.Random(2).sample(range(len(rows)), min(60, len(rows))):
        row = rows[i]
        assert rows.counts[i] == sum(len(space.columns_of(row.prefix, batch)) for batch in row.batches)


def test_columns_are_counted_one_by_one_where_an_exclusion_names_several_fields() -> None:
    j = job("mixtral-8x7b", "h100-sxm:1x8", 4096, 16)
    search = Search(j, Space(j, excluded=[read_wishes("cp_kind=ulysses,zero=1")]))
    free = Search(j, Space(j))
    ulysses = [i for i, row in enumerate(search.rows) if row.prefix.cp_kind == "ulysses"]
    others = [i for i, row in enumerate(search.rows) if row.prefix.cp_kind != "ulysses"]
    assert (search.rows.counts[others] == free.rows.counts[others]).all()
    assert (search.rows.counts[ulysses] < free.rows.counts[ulysses]).all()


@pytest.mark.parametrize("most", [3, 1 << 40])
def test_distinct_rows_are_those_of_a_sort(most: int) -> None:
    table = np.random.default_rng(4).integers(0, most, (500, 3))
    table[250:] = table[:250][::-1]
    first, at = distinct(table)
    rows, index, inverse = np.unique(table, axis=0, return_index=True, return_inverse=True)
    assert np.array_equal(table[first], rows)
    assert np.array_equal(first, index)
    assert np.array_equal(at, inverse.reshape(-1))
    assert [len(part) for part in distinct(np.zeros((0, 3), np.int64))] == [0, 0]
