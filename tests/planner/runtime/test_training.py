"""Training: the same losses under every layout, step after step; the schedule of the rate; precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import test_layouts as layouts

from planner.runtime.optimizer import Schedule

LAYOUTS = [
    (4, "tp=2,pp=2,micro_batch=2", "gpt"), (4, "dp=4,zero=3", "llama"), (4, "dp=2,cp=2,zero=2", "llama"),
    (4, "pp=2,dp=2,zero=1,schedule=zb-h1", "gpt"), (4, "tp=2,dp=2,ep=4", "moe"), (2, "pp=2,schedule=dualpipe-v", "mla-lite"),
    (4, "dp=4,ep=2,zero=3", "moe-v3"),
]  # fmt: skip
MATRIX = [*layouts.DENSE[::2], *layouts.CONTEXT[::2], *layouts.EXPERTS[::2], *layouts.LATENT, *layouts.EIGHT]
EVERYWHERE = [case for case in MATRIX if case not in LAYOUTS]
"""Of the layouts whose gradients are compared: half of those of one kind of model, all that mix many axes."""
CASES = [
    *(pytest.param(*case, marks=[] if number % 3 == 0 else pytest.mark.slow) for number, case in enumerate(LAYOUTS)),
    *(pytest.param(*case, marks=pytest.mark.verify) for case in EVERYWHERE),
]


@pytest.fixture(scope="module")
def alone(processes: Callable[..., list[Any]]) -> Callable[[str], list[Any]]:
    """(loss, gradient norm) of twenty steps of one process, made once a model."""

    @cache
    def of(model: str) -> list[Any]:
        steps: list[Any] = processes(1, "losses", layout="micro_batch=8", steps=20, model=model)[0]
        return steps

    return of


@pytest.mark.parametrize(("world", "layout", "model"), CASES)
def test_twenty_steps_give_the_losses_of_one_process(
    processes: Callable[..., list[Any]], alone: Callable[[str], list[Any]], world: int, layout: str, model: str
) -> None:
    expected = alone(model)
    for got in processes(world, "losses", layout=layout, steps=20, model=model):
        for (loss, norm), (wanted, wanted_norm) in zip(got, expected, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-9)
            assert norm == pytest.approx(wanted_norm, rel=1e-6), (
                "a norm that has become small shows the rounding of twenty steps first"
            )


def test_one_process_trains_as_pytorchs_own_loss_clipping_optimizer_and_schedule(processes: Callable[..., list[Any]]) -> None:
    """What every layout is compared with, itself compared: weight decay on matrices alone, every step clipped."""
    settings = {"decay": "linear", "final_rate": 0.2, "clip": 0.3, "weight_decay": 0.3}
    got = processes(1, "losses", layout="micro_batch=8", steps=6, settings=settings)[0]
    expected = processes(1, "plain_training", model="llama", steps=6, settings=settings)[0]
    assert expected[0][1] > 2 * settings["clip"]
    for step, wanted in zip(got, expected, strict=True):
        assert step == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,tp=2,zero=2",
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in (
                "tp=2,pp=2,micro_batch=2",
                "pp=2,dp=2,zero=3",
                "cp=2,dp=2,zero=1",
                "pp=2,dp=2,schedule=zb-h1",
                "tp=2,dp=2,ep=4",
            )
        ),
    ],
)
def test_bf16_keeps_wide_masters_and_follows_the_fp32_losses(processes: Callable[..., list[Any]], layout: str) -> None:
    """A bf16 forward carries 8 bits: losses agree to about a percent, and fall as they do in fp32."""
    model = "moe" if "ep=" in layout else "llama"
    wide = processes(1, "losses", layout="micro_batch=8", steps=6, model=model, settings={"precision": "fp32"})[0]
    got = processes(4, "losses", layout=layout, steps=6, model=model, settings={"precision": "bf16"})[0]
    for (loss, _), (wanted, _) in zip(got, wide, strict=True):
        assert loss == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("layout", ["dp=2,zero=1", *(pytest.param(f"dp=2,zero={z}", marks=pytest.mark.slow) for z in (0, 2, 3))])
def test_under_bf16_gradients_masters_and_moments_are_fp32(processes: Callable[..., list[Any]], layout: str) -> None:
    """Under ZeRO-3 what is kept is the masters; FSDP2 gathers them in bf16."""
    for found in processes(2, "dtypes", layout=layout, precision="bf16"):
        stored = [] if "zero=3" not in layout else ["torch.float32"]
        assert found.pop("computed") == ["torch.bfloat16", *stored]
        assert found == {what: ["torch.float32"] for what in ("gradient", "parameter", "exp_avg", "exp_avg_sq")}


def test_the_rate_warms_up_then_follows_half_a_cosine_to_its_floor() -> None:
    rate = Schedule(peak=1.0, warmup=4, steps=14, shape="cosine", floor=0.1)
    assert [rate.at(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate.at(9) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert rate.at(14) == pytest.approx(0.1)
