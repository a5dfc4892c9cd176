"""Fixtures of the dry run's tests: plans of given layouts, and real processes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cost_models.job import Job
from planner.legality import read_layout
from planner.plan import Plan
from profiles.model import Attention, LatentAttention, Layer, Mlp, ModelSpec, Moe, uniform

TESTS = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs.py"


def _load(name: str, path: Path) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


plans = _load("axisplan_tests_plans", TESTS / "planner" / "emit" / "plans.py")
GQA = Attention(heads=16, kv_heads=4, head_dim=32)
MLA = LatentAttention(heads=16, q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, value_dim=32)
EXPERTS = Moe(experts=16, top_k=2, width=256)
KINDS: dict[str, Layer] = {
    "dense": Layer(mixer=GQA, ffn=Mlp(width=1024)),
    "moe": Layer(mixer=GQA, ffn=EXPERTS),
    "shared": Layer(mixer=GQA, ffn=EXPERTS.model_copy(update={"shared_width": 256})),
    "mla": Layer(mixer=MLA, ffn=Mlp(width=1024)),
    "deepseek": Layer(mixer=MLA, ffn=EXPERTS.model_copy(update={"shared_width": 256, "router": "sigmoid", "selection_bias": True})),
}


def model_of(kind: str, layers: int = 4) -> ModelSpec:
    return uniform(kind, KINDS[kind], layers, hidden=512, vocab=1024)


def job_of(kind: str, world: int, global_batch: int = 8, seq_len: int = 1024, layers: int = 4, execution: str = "axisplan") -> Job:
    cluster = f"h100-sxm:{world // 8}x8" if world % 8 == 0 else f"h100-sxm:1x{world}"
    job: Job = plans.job_of(model_of(kind, layers), cluster, execution, seq_len, global_batch)
    return replace(job, moe_imbalance=1.0)


def plan_of(
    kind: str, world: int, layout: str, told: dict[str, Any] | None = None, trained: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None, **facts: Any,
) -> Plan:  # fmt: skip
    """``told``: facts of the execution that the formulas are given instead of the runtime's; ``trained``: the job's fields that say
    what is trained; ``model``: fields of the model."""
    job = replace(job_of(kind, world, **facts), **(trained or {}))
    job = replace(job, model=job.model.model_copy(update=model or {}))
    job = replace(job, execution=job.execution.with_(**(told or {})))
    plan: Plan = plans.plan_of(job, read_layout(job, layout))
    return plan


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    return plan_of


@pytest.fixture(scope="session")
def processes() -> Callable[..., list[Any]]:
    """Run a function of programs.py in ``world`` processes."""
    distributed = _load("axisplan_tests_distributed", TESTS / "distributed.py")

    def call(world: int, function: str, timeout: float = 240.0, **arguments: Any) -> list[Any]:
        answers: list[Any] = distributed.pool(world).call(PROGRAMS, function, timeout, **arguments)
        return answers

    return call
