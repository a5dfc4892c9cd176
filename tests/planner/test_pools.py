"""Clusters of two GPU types: stages stand on pools with uneven layers, within each pool's memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from cost_models.chunks import stage_limit
from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.memory import fits, stage_memory
from cost_models.step import estimate
from planner.columns import mode_text, modes_of, recompute_text
from planner.legality import limits_of, violations
from planner.plan import Plan
from planner.pools import PAIRED
from planner.solve import PlanRequest, solve
from planner.space import Space
from profiles.cluster import ClusterSpec, Pool
from profiles.errors import DoesNotFit, InputError
from profiles.hardware import load_cluster, load_gpu
from tests.planner.jobs import decoder, job

FAST, SLOW = "h100-sxm-80gb", "a100-sxm-80gb"


def mixed(like: str, *pools: tuple[str, int]) -> ClusterSpec:
    """The network of a built-in cluster with other GPUs in it."""
    made = tuple(Pool(gpu=load_gpu(name), gpus=number) for name, number in pools)
    return replace(load_cluster(like), kind="", name="mixed", pools=made, gpu=made[0].gpu)


def small(**more: object) -> Job:
    model = decoder(layers=6, hidden=1024, heads=8, width=4096, vocab=2048)
    return replace(job(model, "h100-sxm:1x4", 2048, 16), **{"cluster": mixed("h100-sxm:2x2", (SLOW, 2), (FAST, 2)), **more})


def enumerated(of: Job) -> float:
    """The least seconds over both orders of the pools, every column, split, and the two lightest recompute modes of each stage."""
    best = float("inf")
    for pools in itertools.permutations(of.cluster.pools):
        there = replace(of, cluster=replace(of.cluster, pools=pools, gpu=pools[0].gpu))
        space = Space(there)
        modes = [mode_text(m) for m in modes_of(there, limits_of(there))]
        for prefix in space.prefixes:
            for batch in space.batches(prefix.tp, prefix.cp, prefix.pp, prefix.dp):
                if batch.schedule in PAIRED or prefix.pp * batch.vpp > 4:
                    continue
                for shard in space.columns_of(prefix, batch):
                    base = space.layout(prefix, batch, shard)
                    for cuts in itertools.combinations(range(1, 6), base.chunks - 1):
                        edges = (0, *cuts, 6)
                        counts = tuple(b - a for a, b in itertools.pairwise(edges))
                        for chosen in itertools.product(modes[:2], repeat=prefix.pp):
                            text = [chosen[base.rank_of_chunk(c)] for c, n in enumerate(counts) for _ in range(n)]
                            layout = base.with_(stages=counts, recompute=recompute_text(text))
                            seconds = estimate(there, layout, detail=False).step_seconds
                            if seconds < best and fits(there, layout)[0]:
                                best = seconds
    return best


@pytest.mark.verify
@pytest.mark.parametrize("limit", [None, 2.35])
def test_a_mixed_plan_is_within_three_per_cent_of_every_split_enumerated_and_its_bound_holds(limit: float | None) -> None:
    of = small() if limit is None else small(memory_limit_bytes=limit * 2**30, margin=0.0)
    best = enumerated(of)
    plan = solve(PlanRequest(of, tie=0.0, top=0))
    assert plan.step_seconds <= best * 1.03
    assert plan.certificate.best_bound_seconds <= best * (1 + 1e-9)
    assert plan.certificate.gap == pytest.approx(1 - plan.certificate.best_bound_seconds / plan.step_seconds)


def test_the_faster_pool_holds_more_layers_and_both_together_beat_the_faster_alone(tmp_path: Path) -> None:
    of = small(global_batch=64)
    plan = solve(PlanRequest(of, top=1))
    layers = {pool: sum(last - first + 1 for s in plan.stages if s.pool == pool for first, last in s.layers) for pool in (0, 1)}
    names = [p.gpu.name for p in plan.job().cluster.pools]
    assert sum(layers.values()) == 6
    assert layers[names.index(FAST)] > layers[names.index(SLOW)] >= 1
    alone = solve(PlanRequest(replace(of, cluster=load_cluster("h100-sxm:1x2")), top=0))
    slow = solve(PlanRequest(replace(of, cluster=load_cluster("a100-sxm:1x4")), top=0))
    assert plan.step_seconds < min(alone.step_seconds, slow.step_seconds)
    c = plan.certificate
    assert c.columns_legal == c.cut_by_memory + c.cut_by_bound + c.cut_by_dominance + c.solved + c.unexplored
    assert any("list the hosts in this order" in w for w in plan.warnings)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").stages == plan.stages


def test_every_stage_lies_in_one_pool_and_tensor_parallelism_in_one_type() -> None:
    for gpus in (2, 4):
        cluster = mixed(f"h100-sxm:2x{gpus}", (FAST, gpus), (SLOW, gpus))
        of = replace(job(decoder(layers=8, hidden=1024, heads=8), "h100-sxm:1x8", 1024, 32), cluster=cluster)
        plan = solve(PlanRequest(of, pins="tp>=2", top=0))
        layout = plan.layout_object
        assert layout.tp > 1 and violations(plan.job(), layout) == []
        first = plan.job().cluster.pools[0].gpus
        for stage in range(layout.pp):
            ranks = [r for r in range(layout.world) if layout.coordinates(r)["pp"] == stage]
            assert len({r < first for r in ranks}) == 1
            assert plan.stages[stage].pool == int(ranks[0] >= first)


def test_each_stage_is_held_to_the_memory_of_its_own_gpu() -> None:
    """24 GiB beside 80: the small GPUs get few layers, whatever their speed."""
    cluster = mixed("h100-sxm:2x2", ("rtx-4090", 2), (FAST, 2))
    of = replace(job("llama-3.2-1b", "h100-sxm:1x4", 4096, 16), cluster=cluster)
    plan = solve(PlanRequest(of, top=0))
    there, layout = plan.job(), plan.layout_object
    limits = [stage_limit(there, layout, s) for s in range(layout.pp)]
    assert {round(x / 2**30) for x in limits} == {round(p.gpu.usable_bytes * 0.92 / 2**30) for p in cluster.pools}
    for stage in stage_memory(there, layout):
        assert stage.needed <= limits[stage.stage]
    assert fits(there, layout)[0] and plan.estimate["fits"]


def test_pools_that_no_stage_divides_and_models_that_do_not_fit_are_refused() -> None:
    of = small(cluster=mixed("h100-sxm:1x5", (FAST, 3), (SLOW, 2)))
    with pytest.raises(InputError, match="one of the pools"):
        solve(PlanRequest(of, pins="pp=2"))
    with pytest.raises(DoesNotFit, match="no feasible layout"):
        solve(PlanRequest(small(memory_limit_bytes=2**27)))


def test_pins_of_recompute_even_stages_and_a_time_limit_are_obeyed() -> None:
    full = solve(PlanRequest(small(), pins="recompute=full", top=0))
    assert full.layout["recompute"] == "full"
    even = small(execution=load_execution("axisplan", {"uneven_stages": "false"}))
    plan = solve(PlanRequest(even, pins="pp>=2", top=0))
    assert len(set(plan.layout["stages"])) == 1 and violations(plan.job(), plan.layout_object) == []
    hurried = solve(PlanRequest(small(), top=0, time_limit=1e-3))
    assert hurried.certificate.solved <= 4 < full.certificate.solved and hurried.certificate.gap > 0
