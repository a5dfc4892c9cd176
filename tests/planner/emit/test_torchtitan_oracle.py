"""TorchTitan's own Trainer builds what was planned: parameters of a rank, whole and in shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from judges import KINDS, Case, cases, torchtitan_question
from oracles import Oracle

from cost_models.stage_states import stage_holding


@pytest.fixture(scope="module")
def torchtitan() -> Iterator[Oracle]:
    oracle = Oracle("torchtitan_build.py", "AXISPLAN_ORACLE_TORCHTITAN")
    yield oracle
    oracle.close()


def built(kind: str, count: int, seed: int) -> Iterator[Case]:
    """Plans without cp (the backend that has it needs a newer torch), their dispatchers plain for the same reason, without
    offload (it pins host memory, which wants a GPU)."""
    drawn = (case for case in cases(("torchtitan",), kind, 1000, seed) if case.layout.cp == 1)
    for case in itertools.islice(drawn, count):
        yield replace(case, layout=case.layout.with_(dispatcher="alltoall", offload=()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_that_torchtitan_builds_on_a_rank_are_the_plans(torchtitan: Oracle, kind: str) -> None:
    for i, case in enumerate(built(kind, 20, 23)):
        job, layout, pp_rank = case.job, case.layout, i % case.layout.pp
        answer = torchtitan.ask(torchtitan_question(case, layout.rank_at({"pp": pp_rank}), build=True))
        assert answer["ok"], (case.name, answer)
        whole, _ = stage_holding(job, layout.with_(tp=1, ep=1, sp=False), pp_rank)
        assert answer["parameters"]["whole"] == whole.all, case.name
        local, _ = stage_holding(job, layout, pp_rank)
        dense = layout.dp_shard * layout.cp
        experts = layout.tp * layout.cp * layout.dp_shard / layout.ep
        expected = local.dense / dense + local.expert / experts
        assert answer["parameters"]["local"] == pytest.approx(expected, rel=0.01), case.name
