"""A hundred plans: the cost models against the program of one rank, traced. What must be equal is equal to the byte and the FLOP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")
from planner.dryrun.report import DryRun, all_stages, dry_run
from planner.plan import Plan

QUICK = [
    ("dense", 1, "tp=1"), ("dense", 8, "tp=2,zero=1"), ("dense", 8, "tp=2,pp=2,zero=2,recompute=full"),
    ("moe", 8, "tp=2,ep=4,etp=2"), ("mla", 16384, "tp=4,pp=4,zero=1"), ("dense", 8, "cp=2,zero=0"),
    ("dense", 8, "zero=3,recompute=full"),
    ("dense", 8, "pp=4,schedule=1f1b"),
]  # fmt: skip
REST = [
    ("dense", 8, "zero=0"), ("dense", 8, "zero=1"), ("dense", 8, "zero=2"), ("dense", 8, "tp=8"), ("dense", 8, "tp=4,sp=false"),
    ("dense", 8, "zero=3,dp_replicate=2,dp_shard=4"), ("dense", 8, "zero=1,dp_replicate=2,dp_shard=4"),
    ("dense", 8, "zero=2,dp_replicate=2,dp_shard=4"), ("dense", 8, "cp=4"), ("dense", 8, "cp=4,cp_kind=ulysses"),
    ("dense", 8, "cp=4,cp_kind=ring2xulysses2"), ("dense", 8, "tp=2,cp=2,zero=2"), ("dense", 8, "tp=2,cp=2,pp=2"), ("dense", 2, "tp=2"),
    ("dense", 8, "pp=2,schedule=gpipe"), ("dense", 8, "pp=2,schedule=gpipe,zero=2"), ("dense", 8, "pp=4,schedule=zb-h1"),
    ("dense", 8, "pp=2,vpp=2,schedule=interleaved"), ("dense", 4, "tp=2,pp=2,schedule=zb-h1"), ("dense", 8, "pp=2,schedule=zb-v"),
    ("dense", 8, "pp=2,schedule=dualpipe-v"), ("dense", 8, "pp=2,schedule=dualpipe-v,zero=2"), ("dense", 8, "pp=2,schedule=zb-h1,zero=2"),
    ("dense", 8, "pp=2,schedule=zb-v,zero=0"), ("dense", 8, "pp=2,schedule=zb-v,zero=2"), ("dense", 8, "pp=2,zero=3"),
    ("dense", 8, "pp=2,vpp=2,schedule=interleaved,zero=3"), ("dense", 8, "tp=2,zero=3"), ("dense", 8, "cp=2,zero=3"),
    ("dense", 512, "zero=3,recompute=full"), ("dense", 8, "recompute=full"), ("dense", 8, "tp=2,recompute=selective(core_attn)"),
    ("dense", 8, "tp=2,recompute=selective(mlp)"), ("dense", 8, "recompute=selective(mlp_act)"),
    ("dense", 8, "tp=2,recompute=selective(layernorm)"), ("dense", 8, "recompute=0-1:full/2-3:none"),
    ("dense", 8, "pp=2,zero=3,recompute=full"), ("dense", 64, "tp=8,pp=2,micro_batch=2"), ("dense", 16384, "tp=8,pp=4,zero=1"),
    ("dense", 16384, "tp=8,pp=4,zero=3"), ("dense", 1024, "tp=4,cp=4,pp=2,zero=1"), ("moe", 8, "tp=1"), ("moe", 8, "ep=8"),
    ("moe", 8, "ep=4,zero=2"), ("moe", 8, "ep=4,zero=3"), ("moe", 8, "ep=8,zero=3"), ("moe", 1024, "ep=16,zero=3"),
    ("moe", 8, "ep=4,zero=0"), ("moe", 8, "tp=2,ep=4"), ("moe", 8, "tp=2,ep=2,sp=false"), ("moe", 8, "pp=2,ep=2,recompute=full"),
    ("moe", 8, "pp=2,ep=4,schedule=zb-v"), ("moe", 8, "ep=2,recompute=selective(moe_act)"), ("moe", 8, "ep=2,recompute=selective(moe)"),
    ("moe", 2048, "tp=2,pp=4,ep=16"), ("shared", 8, "ep=4"), ("shared", 8, "tp=2,ep=4,recompute=full"), ("shared", 8, "cp=2,ep=4"),
    ("shared", 8, "tp=2,ep=4,recompute=selective(shared_experts)"), ("shared", 8, "tp=2,ep=4,recompute=selective(moe)"),
    ("shared", 8, "tp=2,ep=4,zero=3"), ("mla", 8, "tp=1"), ("mla", 8, "tp=2"), ("mla", 8, "cp=2"), ("mla", 8, "pp=2,recompute=full"),
    ("mla", 8, "tp=2,recompute=selective(mla_up_proj)"), ("mla", 8, "pp=2,schedule=zb-h1"), ("mla", 8, "zero=3"),
    ("mla", 1024, "tp=2,pp=2,zero=3"), ("deepseek", 8, "ep=4"), ("deepseek", 8, "ep=4,zero=3"), ("deepseek", 8, "tp=2,ep=4"),
    ("deepseek", 2048, "pp=4,ep=16,recompute=full"), ("deepseek", 8, "pp=2,ep=4,schedule=dualpipe-v"),
]  # fmt: skip


def differences(run: DryRun) -> list[str]:
    return [f"stage {run.stage} {d.what}: {d.formula:.0f} {d.trace:.0f} {d.named}" for d in run.disagreements]


TIED, LARGE, PREDICTS = {"vocab": 16000, "tied": True}, {"vocab": 16000}, {"vocab": 16000, "mtp": 1}
TIED_PREDICTS, PREDICTS_TWICE = {**TIED, "mtp": 1}, {**LARGE, "mtp": 2}
ENDS = [
    ("dense", "pp=2,zero=2", TIED), ("dense", "pp=2,schedule=zb-h1", PREDICTS),
    ("dense", "zero=2", LARGE), ("dense", "zero=2", {"vocab": 32000}), ("dense", "tp=2,zero=2", TIED), ("dense", "zero=2,recompute=full", TIED),
    ("moe", "ep=4,zero=2", LARGE), ("shared", "ep=4,zero=2", LARGE), ("mla", "tp=2,pp=2,schedule=zb-v,zero=2,stages=1|3|3|1", TIED),
    ("dense", "pp=2,zero=2", {**LARGE, "hidden": 4096}), ("shared", "ep=2,zero=2", {**LARGE, "hidden": 2048}),
    ("dense", "pp=2,schedule=zb-v,stages=1|3|3|1", TIED), ("dense", "pp=2,vpp=2,schedule=interleaved,stages=1|3|3|1", TIED),
    ("dense", "pp=2,schedule=zb-v,stages=1|3|3|1", LARGE), ("dense", "pp=2,schedule=zb-v,stages=2|2|3|1,micro_batch=2", TIED),
    ("dense", "pp=2,schedule=zb-h1,stages=5|3,micro_batch=2", TIED), ("dense", "pp=4,schedule=zb-h1,stages=1|3|3|1", TIED),
    ("dense", "zero=3,recompute=full", TIED), ("dense", "zero=1,recompute=full", TIED),
    ("dense", "pp=2,schedule=dualpipe-v,stages=1|3|3|1", TIED), ("dense", "pp=2,schedule=dualpipe-v,stages=3|1|2|2,micro_batch=2", LARGE),
    ("moe", "pp=2,schedule=zb-v,stages=1|3|3|1,ep=4", TIED), ("moe", "pp=2,schedule=zb-h1,stages=5|3,ep=2,micro_batch=2", LARGE),
    ("deepseek", "pp=2,schedule=dualpipe-v,ep=4,micro_batch=2", LARGE), ("dense", "pp=2,stages=5|3,recompute=full", TIED),
    ("dense", "zero=3", PREDICTS), ("dense", "zero=3,recompute=full", PREDICTS), ("deepseek", "pp=2,ep=4,recompute=full", PREDICTS),
    ("dense", "tp=2,pp=2", PREDICTS), ("dense", "zero=2", PREDICTS), ("dense", "pp=2,zero=2", PREDICTS), ("dense", "pp=2,zero=2", TIED_PREDICTS),
    ("dense", "pp=2,zero=1", PREDICTS_TWICE), ("dense", "pp=2,zero=2", PREDICTS_TWICE), ("dense", "zero=2", {**PREDICTS_TWICE, "tied": True}),
    ("deepseek", "pp=2,ep=4,zero=2,recompute=full", PREDICTS), ("deepseek", "zero=3,ep=4,recompute=full", PREDICTS),
    ("dense", "pp=2,schedule=zb-v", PREDICTS), ("dense", "pp=2,schedule=dualpipe-v", PREDICTS),
    ("dense", "pp=2,schedule=zb-v,zero=2", PREDICTS), ("dense", "pp=2,schedule=zb-h1,zero=2", PREDICTS),
    ("dense", "pp=2,schedule=zb-v", TIED_PREDICTS), ("dense", "pp=2,schedule=zb-h1", TIED_PREDICTS),
    *(("deepseek", f"pp=2,ep=4,schedule={schedule}", PREDICTS) for schedule in ("zb-v", "zb-h1", "dualpipe-v")),
]  # fmt: skip
"""Vocabularies as large beside a layer as those of small released models, tied or not; uneven stages; microbatches of two sequences
in split backwards; prediction modules under every schedule that splits the backward. Every stage is compared."""
AGAIN = [
    ("dense", "pp=2,schedule=zb-v,recompute=full"), ("dense", "pp=2,schedule=zb-h1,recompute=full"),
    ("dense", "pp=2,schedule=dualpipe-v,recompute=full"), ("dense", "pp=2,schedule=dualpipe-v,recompute=selective(mlp_act)"),
    ("dense", "pp=2,schedule=zb-v,recompute=selective(core_attn)"), ("dense", "tp=2,pp=2,schedule=zb-h1,recompute=selective(mlp)"),
]  # fmt: skip
"""A layer that is recomputed runs again once, however many passes its backward has."""


def quick_first(cases: Sequence[Any], quick: int) -> list[Any]:
    """The first so many in the quick tier, the rest with ``make verify``."""
    return [*cases[:quick], *(pytest.param(*case, marks=pytest.mark.verify) for case in cases[quick:])]


@pytest.mark.parametrize(("kind", "layout", "model"), quick_first(ENDS, 3))
def test_formula_and_program_agree_on_every_stage_where_the_ends_are_large(
    kind: str, layout: str, model: dict[str, Any], make_plan: Callable[..., Plan]
) -> None:
    batch, layers = 32 if "micro_batch=2" in layout else 16, 8 if "stages" in layout else 4
    plan = make_plan(kind, 8, layout, global_batch=batch, seq_len=512, layers=layers, model=model)
    assert [line for run in all_stages(plan) for line in differences(run)] == []


@pytest.mark.parametrize(("kind", "layout"), quick_first(AGAIN, 1))
def test_what_is_recomputed_under_a_split_backward_runs_again_once(kind: str, layout: str, make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(kind, 8, layout, global_batch=32, seq_len=512)
    assert [line for run in all_stages(plan) for line in differences(run)] == []


LORA, FROZEN = {"lora_rank": 16}, {"frozen": ("embedding", "attention")}
PARTLY = [
    ("dense", "tp=2,zero=1", LORA), ("dense", "zero=3", LORA), ("dense", "pp=2", LORA), ("deepseek", "tp=2,ep=4", LORA),
    ("dense", "tp=2,zero=1", FROZEN), ("dense", "zero=3", FROZEN), ("dense", "pp=2", FROZEN), ("deepseek", "ep=4", FROZEN),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "layout", "trained"), quick_first(PARTLY, 3))
def test_of_a_job_that_trains_a_part_formula_and_program_agree(
    kind: str, layout: str, trained: dict[str, Any], make_plan: Callable[..., Plan]
) -> None:
    assert differences(dry_run(make_plan(kind, 8, layout, global_batch=16, trained=trained))) == []


@pytest.mark.parametrize("trained", [LORA, FROZEN], ids=["lora", "frozen"])
def test_of_a_step_of_one_microbatch_that_trains_a_part_formula_and_program_agree(
    trained: dict[str, Any], make_plan: Callable[..., Plan]
) -> None:
    assert differences(dry_run(make_plan("dense", 8, "zero=3", global_batch=8, trained=trained))) == []


@pytest.mark.parametrize(("kind", "world", "layout"), quick_first([*QUICK, *REST], len(QUICK)))
def test_formula_and_program_agree(kind: str, world: int, layout: str, make_plan: Callable[..., Plan]) -> None:
    pp = 4 if "pp=4" in layout else 2
    plan = make_plan(kind, world, layout, global_batch=max(world, 8) * (2 if "pp" in layout else 1), layers=2 * pp)
    assert differences(dry_run(plan)) == []
