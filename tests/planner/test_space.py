"""The declared space is every legal layout, once: compared with all combinations of degrees, each asked of the rules one by one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import cache

import pytest

from cost_models.job import Job
from cost_models.layout import SCHEDULES, Layout, divisors
from cost_models.step import estimate
from planner.columns import placement
from planner.legality import RULES, limits_of
from planner.rules.cluster import same_placement
from planner.rules.core import Case
from planner.space import Space, read_wishes
from profiles.errors import InputError
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
            context_kinds(cp), divisors(world) if moe else [1], sorted({1, tp}) if moe else [1], divisors(dp), range(4),
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


def test_many_virtual_stages_are_even_ones_unless_pinned_and_experts_are_whole_or_split_as_the_dense_layers() -> None:
    j = job("llama-3-70b", "h100-sxm:8x8", 8192, 512)  # 80 layers on 4 stages: 2 a chunk at vpp 10, 1 at 20
    assert {b.vpp for b in Space(j, read_wishes("schedule=interleaved")).batches(8, 1, 4, 2)} == {*range(2, 9), 10, 20}
    assert {b.vpp for b in Space(j, read_wishes("schedule=interleaved,vpp>=2")).batches(8, 1, 4, 2)} == set(range(2, 21))
    experts = Space(job("mixtral-8x7b", "h100-sxm:1x8", 4096, 64), read_wishes("tp=8"))
    assert {p.etp for p in experts.prefixes} == {1, 8}
    beyond = Space(job("mixtral-8x7b", "h100-sxm:1x8", 4096, 64), read_wishes("tp=1,etp=4"))
    assert {(p.tp, p.etp) for p in beyond.prefixes} == {(1, 4)}


def found(pins: str, execution: str = "axisplan", *, excluded: str = "") -> Space:
    return Space(job(EXPERTS, "h100-sxm:1x4", 512, 4, execution), read_wishes(pins), [read_wishes(excluded)] if excluded else ())


@cache
def unpinned() -> list[str]:
    return listed(found(""))


WISHES = {
    "tp=2": lambda x: x.tp == 2, "cp<=2": lambda x: x.cp <= 2, "cp_kind=ulysses": lambda x: x.cp == 1 or x.cp_kind == "ulysses",
    "pp>=2": lambda x: x.pp >= 2, "vpp=2": lambda x: x.vpp == 2, "ep!=1": lambda x: x.ep != 1, "etp<=1": lambda x: x.etp == 1,
    "dp=2": lambda x: x.dp == 2, "dp_replicate=2": lambda x: x.dp_replicate == 2, "dp_shard=2": lambda x: x.dp_shard == 2,
    "zero=1|2": lambda x: x.zero in (1, 2), "micro_batch=2": lambda x: x.micro_batch == 2,
    "schedule=zb-v": lambda x: x.schedule == "zb-v", "schedule=1f1b": lambda x: x.schedule == "1f1b", "sp=true": lambda x: x.sp,
}  # fmt: skip


@pytest.mark.parametrize("wish", WISHES)
def test_a_pin_leaves_the_layouts_that_have_it_and_an_exclusion_the_others(wish: str) -> None:
    every, pinned = unpinned(), listed(found(wish))
    meets = WISHES[wish]
    assert pinned and set(pinned) == {text for text in every if meets(Layout.parse(text))}
    if "=" in wish.replace("<=", "").replace(">=", "").replace("!=", "") and not wish.startswith(("schedule", "cp_kind")):
        assert set(listed(found("", excluded=wish))) == set(every) - set(pinned)


def test_a_pinned_order_or_expert_degree_beyond_tp_is_planned_with() -> None:
    assert {Layout.parse(text).order for text in listed(found("order=tp-pp-dp"))} == {"tp-pp-dp"}
    assert {(x.tp, x.etp) for x in map(Layout.parse, listed(found("etp=2")))} == {(1, 2), (2, 2), (4, 2)}


def test_an_exclusion_of_several_fields_leaves_out_what_has_all_of_them_and_nothing_else() -> None:
    every, left = unpinned(), found("", excluded="tp=2,pp=2")
    both = {text for text in every if (Layout.parse(text).tp, Layout.parse(text).pp) == (2, 2)}
    assert both and set(listed(left)) == set(every) - both
    assert sum(left.count(p, b) for p in left.prefixes for b in left.batches(p.tp, p.cp, p.pp, p.dp)) == len(every) - len(both)


@pytest.mark.parametrize(
    ("pins", "excluded", "says"),
    [
        ("capacity=1.25", "", "a capacity factor changes what is trained"),
        ("sp=false", "", "sequence parallelism goes with tp"),
        ("", "tp=2,recompute=full", "it is left out alone"),
        ("stages=2|2", "", "stages are what the program chooses"),
    ],
)
def test_a_wish_about_what_the_space_does_not_choose_is_refused(pins: str, excluded: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        found(pins, excluded=excluded)


@pytest.mark.parametrize("execution", ["axisplan", "megatron"])
def test_layouts_that_differ_in_rank_order_cost_the_same_where_all_groups_lie_as_near(execution: str) -> None:
    j = job("mixtral-8x7b", "h100-sxm:4x8", 4096, 128, execution)
    space, rng, alike, apart = Space(j), random.Random(0), 0, 0
    while alike < 12 or apart < 6:
        prefix = rng.choice(space.prefixes)
        batch = rng.choice(space.batches(prefix.tp, prefix.cp, prefix.pp, prefix.dp))
        split = rng.choice(space.columns_of(prefix, batch) or [None])
        if split is None:
            continue
        layout = space.layout(prefix, batch, split)
        cost = estimate(j, layout, detail=False).step_seconds
        for order in {s.order for s in space.columns_of(prefix, batch)} - {split.order}:
            other = layout.with_(order=order)
            seconds = estimate(j, other, detail=False).step_seconds
            if placement(j.cluster, layout) == placement(j.cluster, other):
                alike += 1
                assert seconds == pytest.approx(cost, rel=1e-12)
            else:
                apart += seconds != cost
