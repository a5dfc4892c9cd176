"""What depends on how tokens are grouped, Switch's auxiliary loss and capacities, against a plain mixture that groups them the same way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from planner.runtime.expert import grouped_linear

PROGRAMS = Path(__file__).resolve().parent / "routing_programs.py"
SWITCH: dict[str, Any] = {"balance": "switch", "balance_coefficient": 0.1}
SEQUENCE: dict[str, Any] = {"balance": "sequence", "balance_coefficient": 0.1}
CASES = [
    (1, "micro_batch=2", 2, 1, 1, SWITCH, 0.0), (2, "dp=2,ep=2,micro_batch=2", 2, 1, 1, SWITCH, 1.0),
    (2, "tp=2,ep=2,micro_batch=4", 4, 1, 2, SWITCH, 1.25), (2, "cp=2,ep=2,micro_batch=2", 2, 2, 1, SWITCH, 1.0),
    (2, "dp=2,ep=1,zero=2,micro_batch=4", 4, 1, 1, SWITCH, 0.5), (2, "tp=2,etp=2,sp=false,micro_batch=8", 8, 1, 2, SEQUENCE, 1.0),
    (2, "pp=2,micro_batch=2", 2, 1, 1, SWITCH, 1.0), (4, "tp=2,cp=2,ep=4,micro_batch=2", 2, 2, 2, SWITCH, 1.0),
    (4, "dp=2,cp=2,ep=2,etp=2,micro_batch=2", 2, 2, 1, SEQUENCE, 0.75), (4, "dp=4,ep=4,zero=3,micro_batch=1", 1, 1, 1, SWITCH, 1.0),
]  # fmt: skip
MATRIX = [pytest.param(*case, marks=[] if number < 2 else pytest.mark.slow) for number, case in enumerate(CASES)]


@pytest.mark.parametrize(("world", "layout", "micro_batch", "cp", "tp", "balance", "capacity"), MATRIX)
def test_grouped_losses_and_dropped_tokens_are_those_of_a_plain_mixture(
    processes: Callable[..., list[Any]], gradients: Callable[..., dict[str, Any]], tmp_path: Path, world: int, layout: str,
    micro_batch: int, cp: int, tp: int, balance: dict[str, Any], capacity: float,
) -> None:  # fmt: skip
    path = tmp_path / "plain.npz"
    arguments = {"path": str(path), "micro_batch": micro_batch, "cp": cp, "tp": tp, "capacity": capacity, **balance}
    loss, auxiliary = processes(1, "plain", file=PROGRAMS, **arguments)[0]
    assert auxiliary > 0.1
    got = gradients(world, f"{layout},capacity={capacity}" if capacity else layout, model="moe", settings=balance)
    assert got["loss"] == pytest.approx(loss, rel=1e-12)
    with np.load(path) as expected:
        for name in expected.files:
            assert np.abs(got[name] - expected[name]).max() <= 1e-9 * np.abs(expected[name]).max(), name


def test_capacities_drop_choices_in_these_cases(processes: Callable[..., list[Any]], tmp_path: Path) -> None:
    """The comparison above is of something: with capacity 1 the loss is another one."""
    facts = {"path": str(tmp_path / "plain.npz"), "micro_batch": 2, "cp": 1, "tp": 1, **SWITCH}
    free, tight = (processes(1, "plain", file=PROGRAMS, capacity=c, **facts)[0][0] for c in (0.0, 1.0))
    assert abs(free - tight) > 1e-5


@pytest.mark.parametrize("layout", ["dp=2,ep=2", "tp=2,ep=2", "cp=2,ep=1"])
def test_imbalance_is_the_busiest_experts_tokens_over_the_mean(processes: Callable[..., list[Any]], layout: str) -> None:
    """Three of eight experts do all: 1 / (3 / 8) of the mean."""
    assert processes(2, "imbalance", layout=layout) == pytest.approx([8 / 3] * 2)


def test_one_grouped_product_is_the_products_of_the_experts_one_by_one() -> None:
    """bf16 takes the grouped kernel, other types the loop; an expert without a row is among them."""
    rows, generator = [5, 0, 4, 3], torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((12, 16), (4, 24, 16), (12, 24)))
    found = []
    for product in (grouped_linear, lambda x, w, n: torch.cat([part @ one.T for part, one in zip(x.split(n), w, strict=True)])):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = product(*leaves, rows)
        out.backward(grad)
        found.append((out.detach(), *(leaf.grad for leaf in leaves)))
    for grouped, alone in zip(*found, strict=True):
        torch.testing.assert_close(grouped, alone, rtol=2e-2, atol=2e-2)
    assert found[0][2][1].abs().max() == 0
