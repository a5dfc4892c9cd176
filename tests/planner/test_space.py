"""The declared space is every legal layout, once: compared with all combinations of degrees, each asked of the rules one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from cost_models.job import Job
from cost_models.layout import SCHEDULES, Layout, divisors
from planner.legality import RULES, limits_of
from planner.rules.cluster import same_placement
from planner.rules.core import Case
from planner.space import Space, read_wishes
from tests.planner.jobs import decoder, job

DENSE = decoder(layers=4, hidden=256, heads=4, width=512, head_dim=64)
EXPERTS = decoder(layers=4, hidden=256, heads=4, width=512, experts=4, head_dim=64)


def context_kinds(cp: int) -> list[str]:
    if cp == 1:
        return ["ring"]
    return ["ring", "ulysses", "allgather", *(f"ring{r}xulysses{cp // r}" for r in divisors(cp)[1:-1])]


def combinations(j: Job) -> Iterator[Layout]:
    """Layouts of all degrees that fill the world, whatever the rules say of them; expert tensor parallelism up to tp."""
    world, space = j.cluster.gpus, Space(j)
    moe = j.model.moe is not None
    for tp, cp, pp in itertools.product(divisors(world), repeat=3):
        if world % (tp * cp * pp):
            continue
        dp = world // (tp * cp * pp)
        schedules = [s for s in SCHEDULES if s not in space.limits.costed] if pp > 1 else ["1f1b"]
        for kind, ep, etp, shard, zero, micro, schedule in itertools.product(
            context_kinds(cp), divisors(world) if moe else [1], divisors(tp) if moe else [1], divisors(dp), range(4),
            divisors(j.global_batch), schedules,
        ):  # fmt: skip
            if (zero == 0) != (shard * cp == 1) and not (zero == 0 and shard == 1):
                continue  # ZeRO 0 replicates; without ranks to shard over there is nothing to shard
            base = Layout(
                tp=tp, cp=cp, cp_kind=kind, pp=pp, ep=ep, etp=etp, dp_replicate=dp // shard, dp_shard=shard, zero=zero,
                micro_batch=micro, schedule=schedule, sp=tp > 1 and space.limits.sequence_parallel,
            )  # fmt: skip
            chunks = range(1, j.model.num_layers // pp + 1) if pp > 1 else [1]
            ways = space.limits.dispatchers if ep > 1 else ["alltoall"]
            seen: list[str] = []
            for order in space.limits.orders:
                if any(same_placement(base, order, other) for other in seen):
                    continue
                seen.append(order)
                for vpp, way in itertools.product(chunks, ways):
                    yield base.with_(vpp=vpp, order=order, dispatcher=way)


def legal_for(j: Job, layout: Layout) -> bool:
    case = Case(j, layout, limits_of(j))
    return not any(rule.breaks(case) for rule in RULES.values())


def listed(space: Space) -> list[str]:
    return [
        space.layout(p, b, s).text()
        for p in space.prefixes
        for b in space.batches(p.tp, p.cp, p.pp, p.dp)
        for s in space.columns_of(p, b)
    ]  # fmt: skip


@pytest.mark.parametrize("execution", ["axisplan", "megatron", "torchtitan", "deepspeed", "accelerate"])
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_space_is_every_legal_combination_of_degrees_once(model, execution: str) -> None:
    j = job(model, "h100-sxm:1x4", 512, 4, execution)
    legal = {layout.text() for layout in combinations(j) if legal_for(j, layout)}
    space = Space(j)
    found = listed(space)
    assert (
        len(found)
        == len(set(found))
        == sum(space.count(p, b) for p in space.prefixes for b in space.batches(p.tp, p.cp, p.pp, p.dp))
    )
    assert set(found) == legal
    assert legal


def test_virtual_stages_go_up_to_one_layer_a_chunk_and_experts_split_by_every_divisor_of_tp() -> None:
    j = job("llama-3-70b", "h100-sxm:8x8", 8192, 512)
    assert {b.vpp for b in Space(j, read_wishes("schedule=interleaved")).batches(8, 1, 4, 2)} == set(range(2, 21))
    experts = Space(job("mixtral-8x7b", "h100-sxm:1x8", 4096, 64), read_wishes("tp=8"))
    assert {p.etp for p in experts.prefixes} == {1, 2, 4, 8}
    beyond = Space(job("mixtral-8x7b", "h100-sxm:1x8", 4096, 64), read_wishes("tp=1,etp=4"))
    assert {(p.tp, p.etp) for p in beyond.prefixes} == {(1, 4)}
