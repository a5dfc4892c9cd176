"""What a step moves: each gradient is reduced once, and nothing is copied that need not be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).resolve().parent / "movement_programs.py"
Processes = Callable[..., list[Any]]


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("world", "layout", "model"),
    [
        (2, "dp=2,zero=1", "llama"), slow(2, "dp=2,zero=0", "llama"), slow(2, "dp=2,ep=2,zero=1", "moe"), slow(2, "cp=2,zero=1", "llama"),
        slow(4, "pp=2,dp=2,zero=1", "gpt"), slow(4, "tp=2,dp=2,zero=0", "mqa"),
    ],
)  # fmt: skip
def test_gradients_of_many_microbatches_are_reduced_as_often_as_those_of_one(
    processes: Processes, world: int, layout: str, model: str
) -> None:
    """Collectives that reduce or publish: over the ranks that hold the same parameters. What a layer calls is in each microbatch."""
    one, four = (processes(world, "collectives", file=PROGRAMS, layout=f"{layout},micro_batch={m}", model=model)[0] for m in (4, 1))
    once = {name for name in four if name.split()[1] in ("all_reduce", "reduce_scatter") and name.split()[0].startswith(DATA)}
    assert once
    assert {name: four[name] for name in once} == {name: one[name] for name in once}


DATA = ("dp_", "ring", "edp", "ends", "kv", "world")
"""Axes over which a layer calls neither an all-reduce nor a reduce-scatter."""


def test_only_zero_2_and_3_scatter_every_microbatch_and_only_zero_3_gathers_parameters_again(processes: Processes) -> None:
    """Rank 0's (reduce-scatters, all-gathers) of one and of four microbatches."""
    found = {}
    for zero in (1, 2, 3):
        for microbatches in (1, 4):
            layout = f"dp=2,zero={zero},micro_batch={4 // microbatches}"
            calls = processes(2, "collectives", file=PROGRAMS, layout=layout)[0]
            found[zero, microbatches] = (calls["dp_shard reduce_scatter"], calls["dp_shard all_gather"])
    assert found[1, 4] == found[1, 1]
    assert found[2, 4] == (4 * found[2, 1][0], found[2, 1][1])
    assert found[3, 4] == (4 * found[3, 1][0], 4 * found[3, 1][1])


LAYERS, QUERIES, KEYS = 4, 64 * 64, 64 * 32
"""Of the model: layers, and elements of q and of k in one sequence."""
EXCHANGED = 8 * LAYERS * (QUERIES + 2 * KEYS) // 2, 8 * LAYERS * QUERIES // 2


@pytest.mark.parametrize(
    ("layout", "copied"),
    [
        ("tp=2,sp=false", {}), slow("pp=2", {}), slow("cp=2,zero=0", {}),
        (
            "dp=2,zero=0,micro_batch=4",
            {"axisplan::attend_backward": 4 * LAYERS * (QUERIES + 2 * KEYS),
             "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 4 * LAYERS * QUERIES},
        ),
        slow(
            "cp=2,cp_kind=ulysses,zero=0",
            {"_HeadsForTokens": EXCHANGED[0], "_TokensForHeads": EXCHANGED[1],
             "autograd::engine::evaluate_function: _TokensForHeadsBackward": EXCHANGED[1],
             "autograd::engine::evaluate_function: _HeadsForTokensBackward": EXCHANGED[0]},
        ),
    ],
)  # fmt: skip
def test_a_step_copies_what_it_must(processes: Processes, layout: str, copied: dict[str, int]) -> None:
    """Gradients widened for their norm; where a microbatch has several sequences, attention's gradients turned from the kernel's order
    (and by the kernel); under Ulysses each tensor laid out for its exchange. Ring, pipeline and tensor parallelism copy nothing."""
    got = processes(2, "copies", file=PROGRAMS, layout=layout)[0]
    assert got.pop("aten::to") <= got.pop("gradients")
    assert got == copied
