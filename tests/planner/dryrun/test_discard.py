"""Recomputing a module's output frees that output: by its size, to the byte, in the trace of the program."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
from planner.dryrun.rank import trace
from planner.plan import Plan

TOKENS, LAYERS, BF16 = 1024, 4, 2
NORM = TOKENS * 512 * BF16
SIZES = [
    ("dense", "tp=1", "mlp_act", TOKENS * 1024 * BF16), ("dense", "tp=1", "layernorm", 2 * NORM),
    ("dense", "tp=2", "layernorm", 2 * NORM),  # gathered over tp
    ("moe", "ep=1", "moe_act", 2 * TOKENS * 256 * BF16), ("mla", "tp=1", "mla_up_proj", TOKENS * 16 * (48 + 48 + 32) * BF16),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "layout", "module", "size"),
    [pytest.param(*case, marks=[] if case[2] == "mlp_act" else pytest.mark.slow) for case in SIZES],
)
def test_recomputing_an_output_frees_its_bytes_in_every_layer(
    make_plan: Callable[..., Plan], kind: str, layout: str, module: str, size: int
) -> None:
    kept = {}
    for rule in ("none", f"selective({module})"):
        plan = make_plan(kind, 8, f"{layout},recompute={rule}", global_batch=8, layers=LAYERS)
        kept[rule] = trace(plan.job(), plan.layout_object, 0).record.kept
    freed = kept["none"] - kept[f"selective({module})"]
    assert freed == LAYERS * size
