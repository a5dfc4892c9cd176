"""TorchTitan's own ConfigManager, ParallelDims and Trainer accept what is emitted, and build what was planned."""

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
from planner.emit.torchtitan.program import program
from profiles.errors import InputError

DENSE = [("llama-3.1-8b", "h100-sxm:8x8"), ("qwen3-8b", "h100-sxm:2x8"), ("llama-3.1-405b", "h100-sxm:64x8")]
MOE = [("qwen3-30b-a3b", "h100-sxm:8x8"), ("deepseek-v2-lite", "h100-sxm:4x8"), ("gpt-oss-20b", "b200:4x8")]


@pytest.fixture(scope="module")
def torchtitan() -> Iterator[Oracle]:
    oracle = Oracle("torchtitan_build.py", "AXISPLAN_ORACLE_TORCHTITAN")
    yield oracle
    oracle.close()


def cases(
    models: list[tuple[str, str]], count: int, seed: int, built: bool = False
) -> Iterator[tuple[Job, Layout, dict[str, str]]]:
    """Layouts that the target emits; where they are built, without cp (the backend that has it needs a newer torch)."""
    jobs = [job_of(m, c, "torchtitan", seq_len=4096, global_batch=1024) for m, c in models]
    streams = [emitted(job, seed + i, built) for i, job in enumerate(jobs)]
    for k in itertools.islice(itertools.cycle(range(len(jobs))), count):
        layout, files = next(streams[k])
        yield jobs[k], layout, files


def emitted(job: Job, seed: int, built: bool) -> Iterator[tuple[Layout, dict[str, str]]]:
    for layout in layouts(job, seed):
        if built:
            if layout.cp > 1:
                continue
            layout = layout.with_(dispatcher="alltoall")  # the others want a newer torch
        try:
            yield layout, program(plan_of(job, layout, legal=False), EmitSettings()).files
        except InputError as error:
            if not any(word in str(error) for word in ("cp_kind", "ep =", "dispatcher", "nothing")):
                raise


def case(layout: Layout, files: dict[str, str], rank: int, build: bool) -> dict[str, Any]:
    arguments = ["--parallelism.spmd_backend=partial_dtensor"] if build else []
    return {"world": layout.world, "rank": rank, "files": files, "build": build, "arguments": arguments}


def accepted(torchtitan: Oracle, pairs: Iterator[tuple[Job, Layout, dict[str, str]]]) -> None:
    answers = []
    for job, layout, files in pairs:
        answer = torchtitan.ask(case(layout, files, 0, False))
        name = f"{job.model.name} {layout}"
        answers.append((name, answer))
        if answer["ok"]:
            assert answer["dims"] == {axis: getattr(layout, axis) for axis in answer["dims"]}, name
    assert not refused(answers)


@pytest.mark.slow
@pytest.mark.parametrize("models", [DENSE, MOE], ids=["dense", "moe"])
def test_twenty_random_plans_are_accepted_with_the_degrees_of_the_layout(torchtitan: Oracle, models: list[tuple[str, str]]) -> None:
    accepted(torchtitan, cases(models, 20, 1))


@pytest.mark.verify
@pytest.mark.parametrize("models", [DENSE, MOE], ids=["dense", "moe"])
def test_two_hundred_random_plans_are_accepted(torchtitan: Oracle, models: list[tuple[str, str]]) -> None:
    accepted(torchtitan, cases(models, 200, 11))


@pytest.mark.slow
@pytest.mark.parametrize("models", [DENSE[:2], MOE], ids=["dense", "moe"])
def test_the_parameters_that_torchtitan_builds_on_a_rank_are_the_plans(torchtitan: Oracle, models: list[tuple[str, str]]) -> None:
    for i, (job, layout, files) in enumerate(cases(models, 20, 23, built=True)):
        pp_rank = i % layout.pp
        answer = torchtitan.ask(case(layout, files, layout.rank_at({"pp": pp_rank}), True))
        assert answer["ok"], (str(layout), answer)
        whole, _ = stage_holding(job, layout.with_(tp=1, ep=1, sp=False), pp_rank)
        assert answer["parameters"]["whole"] == whole.all, (job.model.name, str(layout))
        local, _ = stage_holding(job, layout, pp_rank)
        dense = layout.dp_shard * layout.cp
        experts = layout.tp * layout.cp * layout.dp_shard / layout.ep
        expected = local.dense / dense + local.expert / experts
        assert answer["parameters"]["local"] == pytest.approx(expected, rel=0.01), (job.model.name, str(layout))
