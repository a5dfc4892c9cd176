"""Pins and exclusions of recompute: one choice for every layer, tried as said; stages are not pinned."""

from __future__ import annotations

import pytest

from planner.solve import PlanRequest, solve
from profiles.errors import InputError
from tests.planner.jobs import job


def planned(pins: str = "", *exclude: str, execution: str = "axisplan") -> str:
    j = job("llama-tiny", "cpu:1x1", 64, 4, execution, precision="fp32")
    return solve(PlanRequest(j, pins=pins, exclude=exclude, top=0)).layout_text.rsplit("recompute=", 1)[1]


@pytest.mark.parametrize("choice", ["none", "full", "selective(mlp)", "selective(mlp_act)"])
def test_a_pinned_choice_is_taken(choice: str) -> None:
    assert planned(f"recompute={choice}") == choice


def test_an_excluded_choice_is_not() -> None:
    assert planned("recompute!=none") == planned("", "recompute=none") != "none"


def test_several_choices_leave_the_fastest_of_them() -> None:
    assert planned("recompute!=none", "recompute=selective(layernorm,mlp_act)") in ("selective(mlp)", "full")


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ("recompute=0-3:full", "one choice for every layer"),
        ("recompute=selective(moe_act)", "the target recomputes"),
        ("stages=2|6,pp=2", "stages are what the program chooses"),
    ],
)
def test_what_the_program_chooses_or_the_target_has_not_is_refused(pins: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        planned(pins, execution="torchtitan" if "moe_act" in pins else "axisplan")


def test_nothing_left_is_said() -> None:
    with pytest.raises(InputError, match="leaves no recompute choice"):
        planned("recompute=none,recompute!=none")
