"""How a rank's layers lie in its chunks, and the rows of loads that no path makes too long: against all rows there are."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from planner import load_rows
from planner.cores import Cores
from planner.dealing import dealt, ways
from planner.load_rows import LoadRows
from planner.loads import best_loads
from planner.search import Search
from planner.space import Space, read_wishes
from tests.planner.jobs import decoder, job


def test_of_two_chunks_either_holds_the_layer_more_the_last_one_first() -> None:
    assert ways(7, 2, tail=False) == ((3, 4), (4, 3))
    assert ways(7, 2, tail=True) == ((4, 3), (3, 4))
    assert ways(8, 2, tail=True) == ((4, 4),)


def test_of_more_chunks_the_last_ones_do_and_the_models_own_last_after_the_others() -> None:
    assert ways(13, 5, tail=False) == ((2, 2, 3, 3, 3),)
    assert ways(13, 5, tail=True) == ((2, 3, 3, 3, 2),)
    assert ways(14, 5, tail=True) == ((3, 3, 3, 3, 2),)


def test_loads_are_dealt_to_every_chunk() -> None:
    interleaved, folded = np.array([0, 1, 0, 1, 0, 1]), np.array([0, 1, 1, 0])
    assert dealt(interleaved, [4, 4], 3) == (1, 1, 1, 2, 2, 1)
    assert dealt(folded, [3, 4], 2) == (2, 2, 2, 1)
    assert dealt(folded, [3, 4], 2, 1) == (1, 2, 2, 2)


def rows_of(schedule: str, vpp: int, layers: int) -> LoadRows:
    """The rows of a column whose two ranks may hold up to two layers more or fewer than half."""
    j = job(decoder(layers=layers, hidden=512, heads=4, width=2048, vocab=16384, head_dim=64), "h100-sxm:1x2", 2048, 16)
    search = Search(j, Space(j, read_wishes(f"pp=2,vpp={vpp},schedule={schedule},micro_batch=2,order=tp-cp-dp-pp,cp=1")))
    row = search.rows[0]
    shard = search.space.columns_of(row.prefix, row.batches[0])[0]
    column, fitting = search.column(row.prefix, row.batches[0], shard)
    cores: Any = Cores(search.rows, np.arange(1), search.store)
    key = (schedule, 2, vpp, row.microbatches)
    one = next(c for _, c in cores.within(key[:3], np.arange(1), 1e3) if (c.zero, c.shard) == (shard.zero, shard.dp_shard))
    low, high = np.full(2, max(vpp, layers // 2 - 2)), np.full(2, layers // 2 + 2)
    return LoadRows(
        column, fitting, search.policies(row.batches[0], row.prefix), cores.shape(key), cores.exact(one, [column]), low, high
    )


def seconds_of(rows: LoadRows) -> dict[tuple[int, ...], float]:
    """By row that holds all layers: the longest of the kept paths."""
    prices = [rows._price(rank) for rank in range(2)]
    out = {}
    for row in product(*(range(len(some)) for some in rows.options)):
        if sum(rows.options[rank][o].layers for rank, o in enumerate(row)) == rows.column.layers:
            out[row] = float((rows._fixed() + prices[0][:, row[0]] + prices[1][:, row[1]]).max())
    return out


CASES = [("interleaved", 2, 9), ("interleaved", 4, 15), ("zb-v", 2, 9), ("dualpipe-v", 2, 11)]


@pytest.mark.parametrize(("schedule", "vpp", "layers"), CASES)
def test_rows_below_a_time_are_those_of_all_rows_whose_longest_path_is(schedule: str, vpp: int, layers: int) -> None:
    rows = rows_of(schedule, vpp, layers)
    every = seconds_of(rows)
    for top in (min(every.values()), np.median(list(every.values())), max(every.values()) * 1.01):
        found, beyond = rows.below(float(top))
        assert {tuple(r) for r in found.tolist()} == {row for row, seconds in every.items() if seconds < top}
        assert beyond == float("inf")
        assert [every[tuple(r)] for r in found.tolist()] == sorted(every[tuple(r)] for r in found.tolist())


@pytest.mark.parametrize(("schedule", "vpp", "layers"), CASES)
def test_where_rows_are_too_many_what_is_left_out_takes_at_least_what_is_said(
    schedule: str, vpp: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(schedule, vpp, layers)
    every = seconds_of(rows)
    monkeypatch.setattr(load_rows, "MOST", 2)
    monkeypatch.setattr(load_rows, "LIKELY", 1)
    top = max(every.values()) * 1.01
    found, beyond = rows.below(top)
    kept = {tuple(r) for r in found.tolist()}
    assert len(kept) < len(every) and np.isfinite(beyond)
    assert all(seconds >= beyond for row, seconds in every.items() if row not in kept)


@pytest.mark.parametrize("likely", [1, 2, 4])
@pytest.mark.parametrize(("schedule", "vpp", "layers"), CASES)
def test_a_column_whose_rows_are_too_many_is_bounded_by_no_more_than_its_best(
    schedule: str, vpp: int, layers: int, likely: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(schedule, vpp, layers)
    args = (rows.column, rows.fitting, rows.policies, rows.shape, rows.costs, 1e3, 1e-6)
    whole, least = best_loads(*args, 500)
    assert whole is not None and least <= whole.seconds * (1 + 1e-9)
    for name, value in (("MOST", likely), ("LIKELY", likely), ("TIMES", 1)):
        monkeypatch.setattr(load_rows, name, value)
    for rounds in (0, 1, 8):
        found, bound = best_loads(*args, rounds)
        assert bound <= whole.seconds * (1 + 1e-9)
        assert found is None or found.seconds >= whole.seconds * (1 - 1e-9)


@pytest.mark.parametrize(("schedule", "vpp", "layers"), CASES)
def test_rows_that_were_kept_are_looked_at_where_others_were_left_out(
    schedule: str, vpp: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(schedule, vpp, layers)
    args = (rows.column, rows.fitting, rows.policies, rows.shape, rows.costs, 1e3, 1e-6, 500)
    whole = best_loads(*args)
    assert whole[0] is not None
    left_out = 0.9e3  # so much take those left out at least: what bounds the column are the rows that were kept
    monkeypatch.setattr(LoadRows, "few", lambda self, top, gap: (self.below(top)[0], left_out, None))
    found, bound = best_loads(*args)
    assert found is not None and found.seconds == pytest.approx(whole[0].seconds)
    assert bound == pytest.approx(whole[1])
