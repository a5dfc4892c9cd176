"""Multi-token-prediction modules: the formula's products, collectives and states are those of the program."""

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
    ],
)
def test_what_modules_add_is_in_the_formula(make_plan: Callable[..., Plan], kind: str, layout: str, modules: int) -> None:
    plan = make_plan(kind, 8, layout, global_batch=16)
    plan = plan.model_copy(update={"model": {**plan.model, "mtp": modules}})
    run = dry_run(plan, stage=plan.layout_object.pp - 1)
    lines = [d for d in run.disagreements if d.what not in ("activations", "peak")]
    assert [f"{d.what}: {d.formula:.0f} {d.trace:.0f} {d.named}" for d in lines] == []
