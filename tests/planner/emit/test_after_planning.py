"""No target refuses what was planned for it: random tiny jobs, planned and emitted."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from planner.emit.core import EmitSettings, emit
from planner.legality import limits_of
from planner.solve import PlanRequest, solve
from profiles.errors import DoesNotFit, InputError
from profiles.model import ModelSpec
from tests.planner.jobs import decoder, job

TARGETS = ("axisplan", "megatron", "megatron-bridge", "torchtitan", "deepspeed", "accelerate")
FLAVOURS = ("llama-3.2-1b", "qwen3-0.6b", "qwen3-1.7b", "deepseek-v2-lite")
"""TorchTitan has no models of other shapes."""
PINS = ("zero=3", "zero=0", "pp>=2", "ep>=2", "dp_replicate>=2", "tp=2", "cp>=2", "schedule=zb-v|dualpipe-v|zb-h1")


def small(rng: random.Random) -> ModelSpec:
    experts = rng.choice([0, 0, 4])
    return decoder(
        layers=rng.choice([2, 3, 4, 6]), hidden=256, heads=4, kv_heads=rng.choice([2, 4]), width=512, vocab=rng.choice([512, 1000]),
        experts=experts, dense_first=rng.choice([0, 1]) if experts else 0, tied=rng.random() < 0.5,
    )  # fmt: skip


def request(seed: int, target: str) -> PlanRequest:
    """A job of 1 to 8 GPUs for ``target``, in a precision and with an optimizer that it has, every third with a wish."""
    rng = random.Random(f"{seed} {target}")
    gpus = rng.choice([1, 2, 4, 6, 8])
    model = rng.choice(FLAVOURS) if target == "torchtitan" else small(rng)
    plain = job(model, f"h100-sxm:1x{gpus}", rng.choice([512, 1024]), gpus * rng.choice([2, 4]), target)
    limits = limits_of(plain)
    precisions = [p for p in ("bf16", "bf16", "fp8", "fp16") if p in (limits.trains or plain.execution.precisions)]
    optimizers = [o for o in ("adamw", "adamw", "sgd", "muon") if o in (limits.optimizers or plain.execution.optimizers)]
    of = replace(plain, precision=rng.choice(precisions), optimizer=rng.choice(optimizers))
    wish = rng.choice(PINS) if rng.random() < 1 / 3 else ""
    return PlanRequest(of, pins=wish, top=0, tie=rng.choice([0.0, 0.01]), offload=bool(limits.offload) and rng.random() < 0.3)


def emitted(seed: int, target: str, out: Path) -> bool:
    """Whether there is a plan, as there must be unless a wish was in vain or a model of full size does not fit; emitting it must not raise."""
    asked = request(seed, target)
    try:
        plan = solve(asked)
    except (InputError, DoesNotFit) as error:
        if not asked.pins and not (isinstance(error, DoesNotFit) and asked.job.model.name in FLAVOURS):
            raise
        return False
    emit(plan, target, "torchrun", out / f"{target}-{seed}", EmitSettings())
    return True


@pytest.mark.parametrize("target", TARGETS)
def test_a_few_random_plans_are_emitted(target: str, tmp_path: Path) -> None:
    assert sum(emitted(seed, target, tmp_path) for seed in range(4)) >= 3


def test_a_plan_for_a_target_that_does_not_build_the_model_says_so_before_it_is_emitted(invoke) -> None:
    arguments = [
        "plan",
        "mamba2-2.7b",
        "--cluster",
        "h100-sxm:1x2",
        "--seq-len",
        "1k",
        "--global-batch",
        "8",
        "--top",
        "0",
        "--json",
    ]
    code, out, said = invoke(*arguments, "--execution", "megatron", "--pin", "tp=1,pp=1")
    assert code == 0
    assert said.startswith(
        "warning, before planning: axisplan emit has no files for it: cannot run this plan: mamba2-2.7b has layers with"
    )
    assert any("no files for it" in w and "state space" in w for w in json.loads(out)["warnings"])
    code, out, said = invoke(*[*arguments[:1], "llama-3.2-1b", *arguments[2:]], "--execution", "megatron", "--pin", "tp=1,pp=1")
    assert (json.loads(out)["warnings"], said) == ([], "")


@pytest.mark.parametrize(
    ("model", "execution", "field", "reason"),
    [
        ("deepseek-v2-lite", "megatron-bridge", "model", "does not run latent attention"),
        ("nemotron-4-15b", "megatron-bridge", "model", "does not run squared ReLU"),
        ("gpt3-175b", "megatron-bridge", "seq_len", "learns as many positions as the sequence has tokens"),
        ("mamba2-2.7b", "axisplan", "model", "does not run state-space layers"),
    ],
)
def test_what_a_target_cannot_express_is_refused_before_planning(
    invoke, model: str, execution: str, field: str, reason: str
) -> None:
    arguments = ["plan", model, "--cluster", "h100-sxm:8x8", "--seq-len", "1k", "--global-batch", "64", "--execution", execution]
    code, out, error = invoke(*arguments)
    assert (code, out) == (2, "")
    assert error.startswith(f"axisplan: {field}")
    assert reason in error


@pytest.mark.verify
@pytest.mark.parametrize("target", TARGETS)
def test_eighty_random_plans_are_emitted(target: str, tmp_path: Path) -> None:
    assert sum(emitted(seed, target, tmp_path) for seed in range(4, 84)) >= 60
