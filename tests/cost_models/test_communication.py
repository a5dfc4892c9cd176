"""Groups of ranks, collectives over them, what overlap leaves, and bytes on the wire."""

from __future__ import annotations

import itertools

import pytest

from cost_models.communication import INTERFERENCE, Exchange, Network, bytes_by_link, exposed, hidden, stragglers
from cost_models.compute import Compute
from cost_models.execution import Execution, load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.step import estimate
from profiles.hardware import load_cluster
from profiles.huggingface import load_model
from profiles.operations import Collective

H100 = load_cluster("h100-sxm:4x8")
BUSY = Compute(matmul=1.0, attention=1.0)


def layouts() -> list[Layout]:
    return [
        Layout(tp=2, cp=2, pp=2, dp_shard=2, dp_replicate=2, ep=4, order=order)
        for order in ("tp-cp-dp-pp", "tp-cp-pp-dp", "tp-pp-cp-dp", "tp-dp-cp-pp")
    ] + [
        Layout(tp=4, pp=2, dp_shard=4, ep=4, etp=2),
        Layout(tp=2, dp_shard=16, ep=8),
        Layout(tp=2, pp=2, dp_shard=8, ep=16, order="tp-cp-pp-dp"),
    ]


@pytest.mark.parametrize("layout", layouts(), ids=str)
@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "dp", "dp_shard", "dp_replicate", "ep", "etp", "edp"])
def test_a_group_spans_the_ranks_that_the_layout_says(layout: Layout, axis: str) -> None:
    group, ranks = Network(H100, layout).group(axis), layout.group(0, axis)
    assert group.ranks == len(ranks)
    assert group.span == ranks[-1] - ranks[0] + 1


@pytest.mark.parametrize("layout", layouts(), ids=str)
@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "dp", "ep", "edp"])
def test_as_many_members_share_a_node_as_the_layout_puts_there(layout: Layout, axis: str) -> None:
    group, ranks = Network(H100, layout).group(axis), layout.group(0, axis)
    inside = sum(rank < 8 for rank in ranks)
    assert H100.spread(group.ranks, group.stride)[0] == inside


def test_the_zero_group_is_the_context_and_the_sharding_ranks_together() -> None:
    layout = Layout(tp=2, cp=4, dp_shard=4)
    group = Network(H100, layout).group("zero")
    assert (group.ranks, group.stride) == (16, 2)


def test_a_group_of_one_costs_nothing() -> None:
    network = Network(H100, Layout(dp_shard=32))
    assert network.seconds("all_reduce", "tp", 1e9) == 0.0
    assert network.sent("all_reduce", "tp", 1e9) == {}


@pytest.mark.parametrize("size", [1e6, 1e7, 1e8, 1e9])
@pytest.mark.parametrize("cluster", ["h100-sxm:4x8", "a100-sxm:4x8", "b200:4x8"])
def test_tensor_parallel_across_nodes_is_slower_than_within_one(cluster: str, size: float) -> None:
    spec = load_cluster(cluster)
    inside = Network(spec, Layout(tp=8, dp_shard=4)).seconds("all_reduce", "tp", size)
    across = Network(spec, Layout(tp=16, dp_shard=2)).seconds("all_reduce", "tp", size)
    assert across > inside


def test_ring_bytes_split_over_the_levels_they_cross() -> None:
    network = Network(H100, Layout(dp_shard=32))
    sent = network.sent("all_gather", "dp", 3.2e9)
    inside, outside = (sent[level.name] for level in H100.levels)
    assert inside == pytest.approx(3.2e9 * 7 / 8)
    assert outside == pytest.approx(3.2e9 / 8 * 3 / 4)
    exchange = network.sent("all_to_all", "dp", 3.2e9)
    assert sum(exchange.values()) == pytest.approx(3.2e9 * 31 / 32)


def test_one_copy_a_node_takes_bytes_and_time_off_the_network_only() -> None:
    layout = Layout(dp_shard=32, ep=32)
    plain = Network(H100, layout, Exchange())
    once = Network(H100, layout, Exchange(outside=0.5))
    assert once.seconds("all_to_all", "ep", 1e9) < plain.seconds("all_to_all", "ep", 1e9)
    a, b = plain.sent("all_to_all", "ep", 1e9), once.sent("all_to_all", "ep", 1e9)
    assert b[H100.levels[0].name] == a[H100.levels[0].name]
    assert b[H100.levels[1].name] == pytest.approx(a[H100.levels[1].name] / 2)


def tp_pass() -> tuple[Collective, ...]:
    return (Collective("all_gather", "tp", 1e8, "in"), Collective("reduce_scatter", "tp", 1e8, "out"))


def test_overlap_of_tensor_parallel_collectives_goes_by_mechanism() -> None:
    network = Network(H100, Layout(tp=8, dp_shard=4))
    serial = exposed(network, Execution(tp_overlap="none"), tp_pass(), "forward", BUSY)["tp"]
    assert exposed(network, Execution(tp_overlap="backward"), tp_pass(), "forward", BUSY)["tp"] == serial
    ring = exposed(network, Execution(tp_overlap="userbuffers", tp_exposed=0.25), tp_pass(), "forward", BUSY)["tp"]
    assert ring == pytest.approx(0.25 * serial)
    back = exposed(network, Execution(tp_overlap="backward"), tp_pass(), "backward_input", BUSY)["tp"]
    gather, scatter = (network.seconds(op.kind, "tp", op.bytes) for op in tp_pass())
    assert back == pytest.approx(gather + INTERFERENCE * scatter)


def test_what_does_not_fit_beside_the_work_is_exposed_and_the_rest_slows_it() -> None:
    assert hidden(0.5, 1.0) == pytest.approx(0.5 * INTERFERENCE)
    assert hidden(2.0, 1.0) == pytest.approx(1.0 + INTERFERENCE)
    assert hidden(0.0, 1.0) == 0.0


def test_ring_passes_hide_beside_attention_and_ulysses_exchanges_do_not() -> None:
    layout = Layout(cp=4, dp_shard=8)
    network = Network(H100, layout)
    ring = (Collective("send_recv", "ring", 1e7, "ring_kv", 3),)
    time = network.seconds("send_recv", "ring", 1e7, 3)
    assert exposed(network, Execution(), ring, "forward", BUSY)["cp"] == pytest.approx(INTERFERENCE * time)
    assert exposed(network, Execution(cp_overlap=False), ring, "forward", BUSY)["cp"] == pytest.approx(time)
    ulysses = Network(H100, Layout(cp=4, cp_kind="ulysses", dp_shard=8))
    exchange = (Collective("all_to_all", "ulysses", 1e7, "ulysses_qkv"),)
    assert exposed(ulysses, Execution(), exchange, "forward", BUSY)["cp"] == ulysses.seconds("all_to_all", "ulysses", 1e7)


def test_bytes_are_kept_apart_by_axis_and_link() -> None:
    network = Network(H100, Layout(tp=4, cp=2, dp_shard=4))
    operations = (Collective("all_gather", "tp", 4e6, "a"), Collective("send_recv", "ring", 1e6, "b", 3))
    sent = bytes_by_link(network, operations)
    assert sent == {"tp": {"nvlink": pytest.approx(3e6)}, "cp": {"nvlink": pytest.approx(3e6)}}


def test_stragglers_grow_with_each_doubling_of_nodes() -> None:
    factors = [stragglers(nodes) for nodes in (1, 2, 4, 64, 1024)]
    assert factors[0] == 1.0
    assert all(a < b for a, b in itertools.pairwise(factors))
    assert factors[-1] == pytest.approx(1.045)


def test_a_ring_or_a_pipeline_goes_at_the_pace_of_its_slowest_neighbours() -> None:
    inside = Network(H100, Layout(cp=8, dp_shard=4)).seconds("send_recv", "ring", 1e8)
    across = Network(H100, Layout(cp=16, dp_shard=2)).seconds("send_recv", "ring", 1e8)
    assert across > 5 * inside
    narrow = Network(H100, Layout(pp=16, dp_shard=2, order="tp-cp-pp-dp"))
    assert narrow.seconds("send_recv", "pp", 1e8) == pytest.approx(across)
    assert set(narrow.sent("send_recv", "pp", 1e8)) == {H100.levels[1].name}


def test_replicas_that_reduce_every_microbatch_are_counted_on_the_network_between_nodes() -> None:
    job = Job(load_model("llama-3-8b"), load_cluster("h100-sxm:2x8"), load_execution("fsdp"), 4096, 64)
    found = estimate(job, Layout.parse("dp_replicate=2,dp_shard=8,zero=3,micro_batch=1", 16)).to_json()["bytes_sent"]["dp"]
    parameters = load_model("llama-3-8b").parameters.total
    sent = 2 * (2 - 1) / 2 * 4 * parameters / 8 * 4  # a ring's share of fp32 gradients' eighths, four microbatches
    between = [size for level, size in found.items() if level != load_cluster("h100-sxm:2x8").levels[0].name]
    assert sum(between) == pytest.approx(sent, rel=0.01)
