"""Megatron-LM's own parse_args, validate_args, TransformerConfig and process groups accept what is emitted, and build what was planned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from oracles import Oracle, refused
from plans import job_of, plan_of
from samples import layouts

from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.stage_states import stage_holding
from planner.emit.core import EmitSettings
from planner.emit.environment import capability
from planner.emit.megatron.program import program
from profiles.errors import InputError
from profiles.model import LatentAttention

LOCAL = (
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion"
)
DENSE = [("llama-3.1-8b", "h100-sxm:8x8"), ("qwen3-4b", "h100-sxm:2x8"), ("gpt3-175b", "a100-sxm:32x8"), ("qwen2.5-7b", "b200:4x8")]
MOE = [
    ("mixtral-8x7b", "h100-sxm:8x8"), ("qwen3-30b-a3b", "h100-sxm:8x8"), ("deepseek-v3", "h100-sxm:64x8"), ("gpt-oss-20b", "b200:4x8"),
    ("glm-4.5-air", "h100-sxm:16x8"),
]  # fmt: skip


@pytest.fixture(scope="module")
def megatron() -> Iterator[Oracle]:
    oracle = Oracle("megatron_cli.py", "AXISPLAN_ORACLE_MEGATRON", "AXISPLAN_MEGATRON")
    yield oracle
    oracle.close()


def case(job: Job, layout: Layout, rank: int = 0, build: bool = False) -> dict[str, Any]:
    made = program(plan_of(job, layout, legal=False), EmitSettings())
    environment = {v.name: v.value for v in made.environment if isinstance(v.value, str) and v.how != "suggest"}
    argv = [w.text for w in made.words[1:]] + (LOCAL.split() if build else [])
    arch = capability(job.cluster.gpu.name) or 9
    return {"world": layout.world, "rank": rank, "argv": argv, "environment": environment, "arch": arch, "build": build}


def cases(models: list[tuple[str, str]], count: int, seed: int) -> Iterator[tuple[Job, Layout]]:
    jobs = [job_of(m, c, seq_len=2048 if m == "gpt3-175b" else 8192, global_batch=1536) for m, c in models]
    streams = [emitted(job, seed + i) for i, job in enumerate(jobs)]
    for k in itertools.islice(itertools.cycle(range(len(jobs))), count):
        yield jobs[k], next(streams[k])


def emitted(job: Job, seed: int) -> Iterator[Layout]:
    """Layouts that the rules allow and the target can be told to run."""
    for layout in layouts(job, seed):
        try:
            program(plan_of(job, layout, legal=False), EmitSettings())
        except InputError as error:
            if not any(word in str(error) for word in ("optimizer instances", "expert data parallelism to equal dp")):
                raise
        else:
            yield layout


def split_by_the_local_layers(job: Job, layout: Layout, pp_rank: int) -> int:
    """Elements that the plan counts whole on every tp rank and that the layers built here split over tp: MLA's projections into its
    ranks (Transformer Engine's layers, which need a GPU, keep them whole)."""
    model, attention = job.model, job.model.attention
    modules = model.mtp if layout.chunks - 1 in layout.chunks_of_rank(pp_rank) else 0
    layers = sum(len(layout.layers_of_chunk(c, model.num_layers)) for c in layout.chunks_of_rank(pp_rank)) + modules
    whole = 0
    if isinstance(attention, LatentAttention):
        whole = layers * model.hidden * ((attention.q_rank or 0) + attention.kv_rank + attention.rope_dim)
    return whole - whole // layout.tp


def groups_of(layout: Layout, rank: int, expert_axes: bool) -> dict[str, list[int]]:
    names = ("tp", "cp", "dp", "pp") + (("ep", "etp", "edp") if expert_axes else ())
    return {name: list(layout.group(rank, name)) for name in names}


def accepted(megatron: Oracle, pairs: Iterator[tuple[Job, Layout]]) -> None:
    """All accepted, with the degrees and the rank groups of the layout."""
    answers = []
    for i, (job, layout) in enumerate(pairs):
        rank = i * 7919 % layout.world
        answer = megatron.ask(case(job, layout, rank))
        name = f"{job.model.name} {layout}"
        answers.append((name, answer))
        if answer["ok"]:
            wanted = groups_of(layout, rank, job.model.moe is not None)
            assert {k: answer["groups"][k] for k in wanted} == wanted, name
            assert answer["dp"] == layout.dp, name
            assert (answer["vpp"] or 1) == layout.vpp, name
            assert answer["sp"] == layout.sp, name
    assert not refused(answers)


@pytest.mark.slow
@pytest.mark.parametrize("models", [DENSE, MOE], ids=["dense", "moe"])
def test_twenty_random_plans_are_accepted_with_the_rank_groups_of_the_layout(
    megatron: Oracle, models: list[tuple[str, str]]
) -> None:
    accepted(megatron, cases(models, 20, 1))


@pytest.mark.verify
@pytest.mark.parametrize("models", [DENSE, MOE], ids=["dense", "moe"])
def test_two_hundred_random_plans_are_accepted(megatron: Oracle, models: list[tuple[str, str]]) -> None:
    accepted(megatron, cases(models, 200, 11))


@pytest.mark.slow
@pytest.mark.parametrize("models", [DENSE, MOE], ids=["dense", "moe"])
def test_the_parameters_that_megatron_builds_on_a_rank_are_the_plans(megatron: Oracle, models: list[tuple[str, str]]) -> None:
    for i, (job, drawn) in enumerate(cases(models, 20, 23)):
        layout = drawn.with_(dispatcher="alltoall")  # the others want their kernels
        pp_rank = i % layout.pp
        rank = layout.rank_at({"pp": pp_rank})
        answer = megatron.ask(case(job, layout, rank, build=True))
        assert answer["ok"], (layout, answer)
        holding, _ = stage_holding(job, layout, pp_rank)
        expected = holding.all - split_by_the_local_layers(job, layout, pp_rank)
        assert sum(answer["parameters"]["all"]) == expected, (job.model.name, str(layout), pp_rank)


@pytest.mark.slow
def test_what_megatron_refuses_without_our_variables_it_accepts_with_them(megatron: Oracle) -> None:
    job = job_of()
    good = case(job, Layout.parse("tp=4,pp=2", 64))
    assert megatron.ask(good)["ok"]
    bad = megatron.ask({**good, "environment": {}})
    assert not bad["ok"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in bad["error"]
