"""Document C (expert parallelism): the rows about cost, placement and memory."""

import random

import pytest

from cost_models.execution import Execution
from cost_models.job import Job
from cost_models.layers import LayerCost, layer_operations
from cost_models.layout import Layout
from cost_models.memory import stage_memory
from cost_models.moe_ops import expected_distinct, imbalance_of
from cost_models.states import layer_weights
from planner.experts import place
from profiles.hardware import load_cluster
from profiles.model import Attention, Layer, ModelSpec, Moe, uniform
from profiles.operations import Attend, Collective, GroupedMatmul, Matmul

MIXER = Attention(heads=16, kv_heads=16, head_dim=64)


def model(experts: int = 8, top_k: int = 2) -> ModelSpec:
    return uniform("moe", Layer(mixer=MIXER, ffn=Moe(experts=experts, top_k=top_k, width=1024)), 4, hidden=1024, vocab=1024)


def cost(
    spec: ModelSpec, layout: Layout, imbalance: float = 1.0, execution: Execution | None = None, seq_len: int = 2048
) -> LayerCost:
    job = Job(spec, load_cluster("h100-sxm:1x8"), execution or Execution(), seq_len, 64, moe_imbalance=imbalance)
    return layer_operations(job, layout, spec.layer(0))


def sent(one: LayerCost, axis: str = "ep") -> float:
    return sum(op.bytes for op in one.forward if isinstance(op, Collective) and op.axis == axis)


def test_common_parts_are_replicated_experts_spread_and_the_router_replicated() -> None:
    spec, layout = model(), Layout(ep=4, dp_shard=4)
    for weight in layer_weights(spec, spec.layer(0)):
        assert weight.local(layout, Execution()) * (4 if weight.part == "experts" else 1) == weight.elements


def test_halving_experts_a_gpu_does_not_halve_memory() -> None:
    spec = model()
    job = Job(spec, load_cluster("h100-sxm:1x8"), Execution(), 2048, 64, moe_imbalance=1.0)
    four, two = (stage_memory(job, Layout(ep=ep, dp_shard=8, zero=0))[0].peak_allocated for ep in (2, 4))
    assert 0.5 * four < two < four


def test_two_chosen_experts_on_one_gpu_can_share_a_copy() -> None:
    """``EP (1 - C(E - E/EP, k) / C(E, k))``: E = 8, k = 2, EP = 4 gives 1.857, of which (EP - 1) / EP are remote."""
    assert expected_distinct(8, 2, 4) == pytest.approx(1.857, abs=0.0005)
    layout = Layout(ep=4, dp_shard=4)
    per_expert, per_rank = (sent(cost(model(), layout, execution=Execution(dispatch=d))) for d in ("per_expert", "per_rank"))
    assert per_rank / per_expert == pytest.approx(1.857 / 2, abs=0.0005)
    assert per_expert == 2 * 2048 * 2 * 1024 * 2


def test_the_expected_number_of_copies_is_what_sampling_gives() -> None:
    draw = random.Random(5)
    for experts, top_k, ep in ((8, 2, 4), (64, 6, 8), (256, 8, 64), (16, 1, 4), (16, 16, 4)):
        mean = sum(len({e // (experts // ep) for e in draw.sample(range(experts), top_k)}) for _ in range(4000)) / 4000
        assert expected_distinct(experts, top_k, ep) == pytest.approx(mean, rel=0.03)


def test_node_limited_routing_sends_a_copy_to_each_node() -> None:
    spec = model(experts=64, top_k=6)
    layout = Layout(ep=16, dp_shard=16)
    job = Job(spec, load_cluster("h100-sxm:4x4"), Execution(dispatch="per_node"), 2048, 64, moe_imbalance=1.0)
    one = layer_operations(job, layout, spec.layer(0))
    assert sent(one) / 2 == pytest.approx(expected_distinct(64, 6, 4) * 2048 * 1024 * 2)


def test_equal_expert_counts_are_not_equal_work() -> None:
    """8 tokens, E0 gets 1, E1 gets 1, E2 the other six: GPU 0 computes 2, GPU 1 computes 6; 6 / mean 4 = 1.5."""
    assert imbalance_of((1, 1, 6, 0), (0, 0, 1, 1)) == 1.5


def test_no_placement_helps_one_hot_expert_and_two_redundant_slots_do() -> None:
    """The same tokens: 6 is proved the best placement; with two redundant slots both ranks get 4."""
    plain = place((1, 1, 6, 0), 2)
    assert (plain.most_loaded, plain.proved) == (6, True)
    spread = place((1, 1, 6, 0), 2, redundant=2)
    assert sorted(spread.loads) == [4, 4]
    assert spread.proved


def test_a_hot_expert_loads_compute_buffers_and_communication_and_all_grow_with_imbalance() -> None:
    layout = Layout(ep=4, dp_shard=4)
    even, hot = cost(model(), layout), cost(model(), layout, 1.5)
    grouped = [sum(op.flops for op in c.forward if isinstance(op, GroupedMatmul)) for c in (even, hot)]
    assert grouped[1] == 1.5 * grouped[0]
    assert sent(hot) == 1.5 * sent(even)
    assert hot.saved_bytes > even.saved_bytes
    assert hot.transient > even.transient


def test_tokens_an_expert_are_what_the_grouped_product_is_given() -> None:
    for seq_len in (64, 2048):
        op = next(op for op in cost(model(), Layout(ep=4, dp_shard=4), seq_len=seq_len).forward if isinstance(op, GroupedMatmul))
        assert op.tokens / op.groups == seq_len * 2 / 2


@pytest.mark.parametrize("gpu", ["a100-sxm", "h100-sxm", "b200", "gb300-nvl72", "mi300x"])
def test_few_tokens_an_expert_make_slow_products_and_three_times_the_tokens_are_not_three_times_the_time(gpu: str) -> None:
    profile = load_cluster(gpu).gpu
    times = [float(profile.seconds(GroupedMatmul(n, 4096, 4096, 8, "bf16"))) for n in (256, 768, 2304, 65536, 3 * 65536)]
    rates = [n / t for n, t in zip((256, 768, 2304, 65536, 3 * 65536), times, strict=True)]
    assert rates == sorted(rates)
    assert times[1] < 1.5 * times[0]
    assert times[4] == pytest.approx(3 * times[3], rel=0.05)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_expert_parallelism_does_not_fix_how_attention_is_parallelised(tp: int) -> None:
    one = cost(model(), Layout(tp=tp, sp=tp > 1, ep=4, dp_shard=4))
    attention = next(op for op in one.forward if isinstance(op, Attend))
    assert attention.heads == 16 // tp
    router = next(op for op in one.forward if isinstance(op, Matmul) and op.name == "router")
    assert (router.m, router.n) == (2048 // tp, 8)
