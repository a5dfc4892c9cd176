"""Multi-token-prediction modules: all that the formula says of the stage that holds them is what the program does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
from planner.dryrun.report import dry_run
from planner.plan import Plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout", "modules"),
    [
        ("deepseek", "tp=2,ep=4", 2),
        ("dense", "tp=2,pp=2,zero=1", 1),
        ("deepseek", "ep=4,recompute=full", 1),
        ("dense", "pp=2,zero=3", 1),
        ("dense", "zero=3,recompute=full", 1),
        ("dense", "zero=3", 2),
        ("deepseek", "zero=3,ep=4,recompute=full", 1),
    ],
)
def test_what_modules_add_is_in_the_formula(make_plan: Callable[..., Plan], kind: str, layout: str, modules: int) -> None:
    plan = make_plan(kind, 8, layout, global_batch=16, model={"mtp": modules})
    run = dry_run(plan, stage=plan.layout_object.pp - 1)
    assert [f"{d.what}: {d.formula:.0f} {d.trace:.0f} {d.named}" for d in run.disagreements] == []
