"""Cases of group D (cases.md): MoE imbalance and expert parallelism."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.layers import layer_operations
from cost_models.layout import Layout
from cost_models.memory import stage_memory
from cost_models.step import estimate
from planner.legality import check, read_layout
from planner.solve import warnings
from profiles.operations import GroupedMatmul
from tests.planner.jobs import decoder, job


def test_d01_experts_in_a_loop_under_zero_3_and_stages_without_experts_are_warned_of():
    loop = job("mixtral-8x7b", "h100-sxm:4x8", 4096, 64, "fsdp")
    layout = read_layout(loop, "zero=3")
    of = replace(loop, execution=replace(loop.execution, grouped_gemm=False))
    assert any("ZeRO-3 with experts in a loop" in w for w in warnings(of, layout, estimate(of, layout)))
    dense_first = job(decoder(layers=8, experts=8, dense_first=3), "h100-sxm:1x4", 64, 16)
    layout = read_layout(dense_first, "pp=4")
    found = warnings(dense_first, layout, estimate(dense_first, layout))
    assert any("stage 0 holds no MoE layer" in w for w in found)
    even = read_layout(dense_first, "pp=2")
    assert warnings(dense_first, even, estimate(dense_first, even)) == []


def test_d03_every_group_of_every_axis_carries_the_users_timeout(monkeypatch):
    pytest.importorskip("torch")
    import torch

    from planner.dryrun.world import fake_rank
    from planner.runtime import mesh as meshes

    given = {}
    monkeypatch.setattr(meshes, "_set_pg_timeout", lambda timeout, group: given.setdefault(id(group), timeout.total_seconds()))
    layout = Layout(tp=2, pp=2, cp=2, ep=4, etp=1, dp_shard=2, dp_replicate=2, zero=1, sp=True)
    model = decoder(layers=4, experts=8, tied=True)
    with fake_rank(0, layout.world):
        mesh = meshes.Mesh(layout, model, torch.device("cpu"), 1234.0)
        groups = {name: axis.group for name, axis in mesh._axes.items() if axis.group is not None}
        assert {"tp", "pp", "dp_shard", "dp_replicate", "ep", "edp", "ends"} <= set(groups)
        assert all(given[id(group)] == 1234.0 for group in groups.values())


def test_d04_routed_activations_and_expert_time_scale_with_the_imbalance():
    base = job("qwen3-30b-a3b", "h100-sxm:1x8", 4096, 64, moe_imbalance=1.0)
    layout = read_layout(base, "ep=8,zero=1")

    def experts(f: float) -> float:
        cost = layer_operations(replace(base, moe_imbalance=f), layout, base.model.layer(0))
        return float(sum(op.flops for op in cost.forward if isinstance(op, GroupedMatmul)))

    def kept(f: float) -> float:
        return stage_memory(replace(base, moe_imbalance=f), layout)[0].activations

    assert experts(1.5) == pytest.approx(1.5 * experts(1.0))
    assert kept(1.5) > kept(1.25) > kept(1.0)
    assert kept(1.5) - kept(1.0) == pytest.approx(2 * (kept(1.25) - kept(1.0)), rel=0.01)
    steps = [estimate(replace(base, moe_imbalance=f), layout, detail=False).step_seconds for f in (1.0, 1.5)]
    assert steps[1] > steps[0]


def test_d04_without_a_figure_the_imbalance_is_between_1_1_and_1_5():
    base = job("qwen3-30b-a3b", "h100-sxm:1x8", 4096, 64)
    layout = read_layout(base, "ep=8,zero=1")

    def grouped(f: float | None) -> float:
        cost = layer_operations(replace(base, moe_imbalance=f), layout, base.model.layer(0))
        return float(sum(op.flops for op in cost.forward if isinstance(op, GroupedMatmul)))

    assert 1.1 <= grouped(None) / grouped(1.0) <= 1.5


def test_d04_a_layout_that_fits_only_when_balanced_is_flagged():
    base = job("qwen3-30b-a3b", "h100-sxm:1x8", 4096, 64, moe_imbalance=1.5)
    layout = read_layout(base, "ep=8,zero=1")
    needs = [max(s.needed for s in stage_memory(replace(base, moe_imbalance=f), layout)) for f in (1.0, 1.5)]
    between = replace(base, memory_limit_bytes=sum(needs) / 2, margin=0.0)
    document = check(between, layout)
    assert document["fits"] is False
    assert document["binding"]["fits_if_balanced"] is True
    tight = check(replace(base, memory_limit_bytes=needs[0] / 2, margin=0.0), layout)
    assert tight["binding"]["fits_if_balanced"] is False


def test_d06_a_capacity_factor_bounds_the_tokens_of_every_expert():
    """factor x top_k x tokens / experts rows an expert, whatever the router does."""
    base = job(decoder(experts=8, hidden=256, width=512), "h100-sxm:1x4", 1024, 16, moe_imbalance=1.5)

    def rows(capacity: float) -> set[float]:
        layout = Layout(ep=4, dp_shard=4, capacity=capacity)
        cost = layer_operations(base, layout, base.model.layer(0))
        return {op.tokens / op.groups for op in cost.forward if isinstance(op, GroupedMatmul)}

    each = 2 * 1024 / 8 * 4
    assert rows(2.0) == {2.0 * each}
    assert rows(1.0) == {each}
    assert rows(0.0) == {1.5 * each}
    kept, seconds = zip(
        *(
            (stage_memory(base, layout)[0].activations, estimate(base, layout, detail=False).step_seconds)
            for layout in (Layout(ep=4, dp_shard=4, micro_batch=4, capacity=c) for c in (1.0, 2.0, 4.0))
        ),
        strict=True,
    )
    assert kept[0] < kept[1] < kept[2] and seconds[0] < seconds[2]
