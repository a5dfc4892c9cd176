"""Document B, context parallelism: its worked examples (shared/documents.md, section B)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cost_models.layout import Layout
from planner.runtime.attention_blocks import pairs
from planner.runtime.context import spans

PROGRAMS = Path(__file__).resolve().parent / "document_programs.py"
ROW = 2 * 8 * 8
"""Bytes of one token of q, k or v: 2 heads of 8 in fp64."""


def test_a_ring_of_four_passes_three_times_and_rank_0_sees_blocks_0_3_2_1(processes: Callable[..., list[Any]]) -> None:
    ranks = processes(4, "attention", file=PROGRAMS, layout="cp=4", tokens=8)
    assert ranks[0]["seen"] == [0, 3, 2, 1]
    for rank in ranks:
        assert [kind for kind, _ in rank["sent"]] == ["pass"] * 3
        assert rank["error"] < 4e-15


def test_ulysses_of_two_exchanges_q_k_v_and_the_output(processes: Callable[..., list[Any]]) -> None:
    """4 tokens, 2 heads, 2 ranks."""
    for rank in processes(2, "attention", file=PROGRAMS, layout="cp=2,cp_kind=ulysses", tokens=4):
        assert rank["sent"] == [["all_to_all", 2 * ROW]] * 4
        assert rank["error"] < 4e-15


def test_a_ring_moves_keys_and_values_once_a_pass_where_ulysses_moves_four_tensors_once(
    processes: Callable[..., list[Any]],
) -> None:
    tokens = 16
    local = tokens // 2 * ROW
    ring = processes(2, "attention", file=PROGRAMS, layout="cp=2", tokens=tokens)[0]["sent"]
    ulysses = processes(2, "attention", file=PROGRAMS, layout="cp=2,cp_kind=ulysses", tokens=tokens)[0]["sent"]
    assert sum(b for _, b in ring) == (2 - 1) * 2 * local
    assert sum(b for _, b in ulysses) == 4 * local


def test_front_and_back_tokens_balance_the_causal_pairs() -> None:
    """8 tokens over 2 ranks: 10 and 26 pairs when contiguous, 18 and 18 as t0 t1 t6 t7 | t2 t3 t4 t5."""
    everyone = (0, 8)
    assert [pairs((r * 4, 4), everyone) for r in (0, 1)] == [10, 26]
    layout = Layout.parse("cp=2")
    held = [spans(layout, 8, r) for r in (0, 1)]
    assert held == [(0, 2, 6, 2), (2, 2, 4, 2)]
    assert [pairs(h, everyone) for h in held] == [18, 18]


def test_a_query_on_the_second_rank_needs_the_keys_of_the_first() -> None:
    """t0 t1 on rank 0, t2 t3 on rank 1: t3 sees two keys there; the first rank needs none from the second."""
    assert pairs((3, 1), (0, 2)) == 2
    assert pairs((0, 2), (2, 2)) == 0
