"""One integer program over all columns of a small job, as DESIGN.md states it, against every column, split and mix simulated."""

from __future__ import annotations

import pytest

from tests.planner.enumeration import exhaustive, monolithic, small_job

MOST = 2_000
"""Patterns of a program that is built."""


def one_program_is_best(seed: int, nodes: int = 20_000) -> bool:
    """Equal where the program is solved to its end, which is said; where its nodes ran out its answer is no better, and its bound no worse."""
    j = small_job(seed)
    answer, ended = monolithic(j, nodes, MOST)
    if answer is None and not ended:
        return False
    best = exhaustive(j).best
    if answer is None:
        assert best == float("inf")
        return True
    assert best * (1 - 1e-6) <= answer.seconds
    assert answer.bound <= best * (1 + 1e-6)
    if ended:
        assert answer.seconds == pytest.approx(best, rel=1e-6)
    return ended


@pytest.mark.parametrize("seed", [7, 13])
def test_one_program_over_all_columns_finds_the_same(seed: int) -> None:
    assert one_program_is_best(seed)


@pytest.mark.verify
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group", range(25))
def test_one_program_over_all_columns_of_twenty_jobs_finds_the_same(group: int) -> None:
    """Five hundred jobs in all; of some the program is too large, or its nodes run out."""
    assert sum(one_program_is_best(seed, nodes=300) for seed in range(20 * group, 20 * group + 20)) >= 10
