"""Document C, expert parallelism: its worked examples on two processes (shared/documents.md, section C)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.runtime.mesh import Axis
from planner.runtime.moe import Router
from planner.runtime.tensor import TensorParallel
from profiles.model import Moe

PROGRAMS = Path(__file__).resolve().parent / "document_programs.py"
A1, A2, B1, B2 = 1.0, 2.0, 3.0, 4.0


def test_top_1_tokens_travel_to_their_experts_and_come_back_in_order(processes: Callable[..., list[Any]]) -> None:
    """A1->E0, A2->E2 on rank 0; B1->E1, B2->E2 on rank 1: A2 travels to rank 1, B1 to rank 0, E2 works on A2 and B2."""
    zero, one = processes(2, "dispatch", file=PROGRAMS, experts=[[[0], [2]], [[1], [2]]], rows=[[A1, A2], [B1, B2]])
    assert zero["arrived"] == [[0, A1], [1, B1]]
    assert one["arrived"] == [[2, A2], [2, B2]]
    assert zero["results"] == [[A1 + 10], [A2 + 30]]
    assert one["results"] == [[B1 + 20], [B2 + 30]]


def test_top_2_results_are_combined_on_the_source_with_the_routers_weights(processes: Callable[..., list[Any]]) -> None:
    """y(A2) = 0.7 u0 + 0.3 u2 with u0 local and u2 remote."""
    zero, _ = processes(2, "dispatch", file=PROGRAMS, experts=[[[0, 2]], [[3, 1]]], rows=[[A2], [B1]])
    u0, u2 = zero["results"][0]
    assert (u0, u2) == (A2 + 10, A2 + 30)
    assert 0.7 * u0 + 0.3 * u2 == pytest.approx(0.7 * 12 + 0.3 * 32)


def test_uneven_loads_give_two_rows_to_one_rank_and_six_to_the_other(processes: Callable[..., list[Any]]) -> None:
    """8 tokens, 4 experts: E0 gets A1, E1 gets B1, E2 the other six. Equal expert counts are not equal work."""
    zero, one = processes(
        2, "dispatch", file=PROGRAMS, experts=[[[0], [2], [2], [2]], [[1], [2], [2], [2]]], rows=[[1, 2, 3, 4], [5, 6, 7, 8]]
    )
    assert (len(zero["arrived"]), len(one["arrived"])) == (2, 6)
    assert zero["sent"] == [1, 3]
    assert one["received"] == [3, 3]
    assert max(2, 6) / ((2 + 6) / 2) == 1.5


def test_a_rank_without_a_token_and_one_without_work_do_not_hang(processes: Callable[..., list[Any]]) -> None:
    """Case D01: rank 1 has no token, and no token chose its experts."""
    zero, one = processes(2, "dispatch", file=PROGRAMS, experts=[[[0], [1]], []], rows=[[A1, A2], []])
    assert one["arrived"] == []
    assert zero["results"] == [[A1 + 10], [A2 + 20]]


def test_a_selection_bias_selects_and_does_not_weigh() -> None:
    spec = Moe(experts=4, top_k=1, width=8, router="sigmoid", selection_bias=True)
    router = Router(spec, 4, TensorParallel(Axis("tp"), False), torch.float64, torch.device("cpu"))
    torch.nn.init.eye_(router.weight)
    x = torch.tensor([[3.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    assert router(x)[0].tolist() == [[0]]
    router.e_score_correction_bias[1] = 1.0
    experts, weights, scores = router(x)
    assert experts.tolist() == [[1]]
    assert weights.tolist() == [[1.0]], "normalised top-1"
    assert scores.argmax() == 0
