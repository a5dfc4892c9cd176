"""What the planner proposes for this runtime runs: random tiny jobs, each trained for two steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from cost_models.execution import load_execution
from cost_models.job import Job
from planner.solve import PlanRequest, solve
from profiles.errors import DoesNotFit, InputError
from profiles.hardware import load_cluster
from profiles.model import Attention, LatentAttention, Layer, Mlp, ModelSpec, Moe, uniform


def random_job(seed: int) -> tuple[Job, str]:
    """A tiny job for 2, 4 or 8 processes and a pin that makes the planner use more than data parallelism."""
    pick = random.Random(seed)
    world = pick.choice([2, 4, 8])
    heads = pick.choice([4, 8])
    mixer: Attention | LatentAttention = Attention(heads=heads, kv_heads=pick.choice([1, 2, heads]), head_dim=8)
    if pick.random() < 0.25:
        mixer = LatentAttention(heads=heads, q_rank=pick.choice([None, 16]), kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8)
    ffn: Mlp | Moe = Mlp(width=64)
    if pick.random() < 0.4:
        ffn = Moe(experts=8, top_k=pick.choice([1, 2]), width=32, shared_width=pick.choice([0, 32]))
    model: ModelSpec = uniform(
        f"random-{seed}", Layer(mixer=mixer, ffn=ffn), pick.choice([4, 6, 8]), hidden=32, vocab=64, tied=pick.random() < 0.3
    )
    extra = random.Random(1000 + seed)
    if extra.random() < 0.2:
        model = model.model_copy(update={"mtp": 1})
    lora = 4 if extra.random() < 0.2 else 0
    degree = pick.choice([d for d in (2, 4) if d <= world])
    pins = [f"tp={degree}", f"pp={degree}", f"cp={degree}", f"zero={pick.choice([0, 1, 2, 3])}", ""]
    if isinstance(ffn, Moe):
        pins.append(f"ep={degree}")
    execution, length, batch = load_execution("axisplan"), pick.choice([32, 64]), pick.choice([8, 16])
    job = Job(model, load_cluster(f"cpu:1x{world}"), execution, length, batch, "fp32", lora_rank=lora)
    return job, pick.choice(pins)


SEEDS = [pytest.param(s, marks=[] if s == 3 else pytest.mark.slow if s < 6 else pytest.mark.verify) for s in range(30)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_plan_trains(processes: Callable[..., list[Any]], seed: int) -> None:
    job, pin = random_job(seed)
    try:
        plan = solve(PlanRequest(job, pins=pin))
    except (InputError, DoesNotFit):
        job, pin = random_job(seed)
        plan = solve(PlanRequest(job))
    settings = {
        "seq_len": job.seq_len,
        "global_batch": job.global_batch,
        "precision": job.precision,
        "steps": 2,
        "lora_rank": job.lora_rank,
    }
    world = plan.layout_object.world
    got = processes(world, "train_spec", spec=job.model.model_dump(mode="json"), layout=plan.layout_text, settings=settings)
    assert all(0 < loss < 10 for loss in got[0]), plan.layout_text
    assert all(rank == got[0] for rank in got)
