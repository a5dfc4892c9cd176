"""Megatron-LM's own model on the meta device is what was planned, and its rules hold where ours say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from judges import KINDS, Case, cases, megatron_question
from oracles import Oracle
from plans import job_of

from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.stage_states import stage_holding
from profiles.model import LatentAttention


@pytest.fixture(scope="module")
def megatron() -> Iterator[Oracle]:
    oracle = Oracle("megatron_cli.py", "AXISPLAN_ORACLE_MEGATRON", "AXISPLAN_MEGATRON")
    yield oracle
    oracle.close()


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_that_megatron_builds_on_a_rank_are_the_plans(megatron: Oracle, kind: str) -> None:
    for i, drawn in enumerate(cases(("megatron",), kind, 20, 23)):
        case = replace(drawn, layout=drawn.layout.with_(dispatcher="alltoall"))  # the others want their kernels
        pp_rank = i % case.layout.pp
        answer = megatron.ask(megatron_question(case, case.layout.rank_at({"pp": pp_rank}), build=True))
        assert answer["ok"], (case.name, answer)
        holding, _ = stage_holding(case.job, case.layout, pp_rank)
        expected = holding.all - split_by_the_local_layers(case.job, case.layout, pp_rank)
        assert sum(answer["parameters"]["all"]) == expected, (case.name, pp_rank)


@pytest.mark.slow
def test_what_megatron_refuses_without_our_variables_it_accepts_with_them(megatron: Oracle) -> None:
    good = megatron_question(Case("megatron", job_of(), Layout.parse("tp=4,pp=2", 64)))
    assert megatron.ask(good)["ok"]
    bad = megatron.ask({**good, "environment": {}})
    assert not bad["ok"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in bad["error"]
