"""Links and clusters: published busbw, hierarchy, arrays, names, files, and what bad files say."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.errors import InputError
from profiles.hardware import (
    ClusterSpec,
    Level,
    cluster_names,
    describe,
    gpu_names,
    load_cluster,
    load_link,
)
from profiles.operations import wire_bytes

SAMPLES = Path(__file__).parent.parent / "data" / "hardware"
KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast"]
MIB = 2**20


def busbw(cluster: ClusterSpec, kind: str, size: float, ranks: int, stride: int = 1) -> float:
    """GB/s as nccl-tests prints it."""
    return float(wire_bytes(kind, size, ranks) / cluster.collective_seconds(kind, size, ranks, stride) / 1e9)


# nccl-tests at 512 MiB on 8 GPUs (aiconfigurator)
@pytest.mark.parametrize(
    ("name", "kind", "rate"),
    [
        ("h100-sxm", "all_reduce", 445),
        ("h100-sxm", "all_gather", 335),
        ("h100-sxm", "reduce_scatter", 336),
        ("h100-sxm", "all_to_all", 315),
        ("a100-sxm", "all_reduce", 222),
        ("a100-sxm", "all_gather", 205),
        ("h200-sxm", "all_reduce", 460),
        ("b200", "all_reduce", 704),
        ("b200", "all_gather", 617),
        ("b300", "all_reduce", 704),
        ("h800-sxm", "all_gather", 158),
        ("a100-pcie", "all_reduce", 12.5),
    ],
)
def test_large_collectives_in_a_node_match_nccl_tests(name: str, kind: str, rate: float) -> None:
    assert busbw(load_cluster(name), kind, 512 * MIB, 8) == pytest.approx(rate, rel=0.1)


def test_in_switch_reduction_helps_the_all_reduce_alone() -> None:
    cluster = load_cluster("h100-sxm")
    assert busbw(cluster, "all_reduce", 512 * MIB, 8) > 1.25 * busbw(cluster, "all_gather", 512 * MIB, 8)


# published all-reduces across nodes: collectives_internode_published.csv
ACROSS = [
    ("H100 IB NDR (CoreWeave)", "h100-sxm:8x8", 0.05),
    ("GB200 NVL72 one rack", "gb200-nvl72:1x72", 0.12),
    ("GB200 2 racks", "gb200-nvl72:2x72", 0.16),
    ("H200 8x400 per node", "h200-sxm:248x8", 0.1),
    ("H20 8x(2)x400 IB", "h20-sxm:2x8", 0.2),
    ("MI300X node", "mi300x:1x8", 0.05),
    ("H100 node (Azure ND v5)", "h100-sxm:1x8", 0.05),
]


@pytest.mark.parametrize(("system", "cluster", "tolerance"), ACROSS)
def test_published_all_reduces_are_met(system: str, cluster: str, tolerance: float) -> None:
    with (SAMPLES / "collectives_internode_published.csv").open() as handle:
        table = [row for row in csv.DictReader(handle) if row["system"] == system and row["op"] == "all_reduce"]
    assert table
    for row in table:
        ranks, size = int(row["gpus"]), float(row["bytes"])
        seconds = float(row["us"]) * 1e-6 if row["us"] else wire_bytes("all_reduce", size, ranks) / float(row["busbw_GBs"]) / 1e9
        assert load_cluster(cluster).collective_seconds("all_reduce", size, ranks) == pytest.approx(seconds, rel=tolerance), row


def test_twenty_racks_drive_eight_nics_a_rack_not_seventy_two() -> None:
    """coreweave/nccl-tests: 381 GB/s at 8 GiB over 1,440 GPUs, 406 at 16 GiB."""
    cluster = load_cluster("gb200-nvl72:20x72")
    assert busbw(cluster, "all_reduce", 2.0**33, 1440) == pytest.approx(381, rel=0.12)
    assert busbw(cluster, "all_reduce", 2.0**34, 1440) == pytest.approx(406, rel=0.12)


# aiconfigurator GB200 MoE dispatch, NVLink two-sided, bf16, hidden 7168, 256 experts, top 8: us by ranks and tokens a rank
@pytest.mark.parametrize(
    ("ranks", "tokens", "measured"),
    [
        (4, 8192, 706),
        (4, 65536, 5177),
        (16, 8192, 1489),
        (16, 65536, 11805),
        (32, 8192, 1605),
        (32, 65536, 12733),
        (64, 8192, 1833),
        (64, 65536, 14927),
    ],
)
def test_expert_dispatch_inside_a_rack_matches_its_measurement(ranks: int, tokens: int, measured: float) -> None:
    """One copy a distinct rank: EP (1 - C(E - E/EP, k)/C(E, k)) of them on average (document C)."""
    distinct = ranks * (1 - math.comb(256 - 256 // ranks, 8) / math.comb(256, 8))
    seconds = load_cluster("gb200-nvl72:1x72").collective_seconds("all_to_all", tokens * distinct * 7168 * 2, ranks)
    assert seconds * 1e6 == pytest.approx(measured, rel=0.15)


def test_a_group_on_one_gpu_a_node_is_bound_by_its_nic() -> None:
    cluster = load_cluster("h100-sxm:64x8")
    assert 42 < busbw(cluster, "all_gather", 2.0**30, 64, stride=8) < 48.3
    assert busbw(cluster, "all_gather", 2.0**30, 64, stride=8) == pytest.approx(
        busbw(load_cluster("h100-sxm:128x8"), "all_gather", 2.0**30, 64, stride=16), rel=1e-9
    )


def test_groups_that_share_a_nic_divide_it() -> None:
    cluster = load_cluster("h100-sxm:16x8")
    alone = cluster.collective_seconds("all_reduce", 2.0**30, 16, 8)
    assert cluster.collective_seconds("all_reduce", 2.0**30, 16, 8, sharing=4) == pytest.approx(4 * alone, rel=0.1)
    inside = cluster.collective_seconds("all_reduce", 2.0**30, 8)
    assert cluster.collective_seconds("all_reduce", 2.0**30, 8, sharing=4) == inside  # NVLink ports are each GPU's own
    pcie = load_cluster("l40s")
    assert pcie.collective_seconds("all_reduce", 2.0**30, 4, sharing=2) > 1.9 * pcie.collective_seconds("all_reduce", 2.0**30, 4)


def test_small_messages_take_a_tree_and_large_groups_a_longer_ring() -> None:
    """NCCL's choice: an all-reduce of 8 bytes on 2 nodes 47-51 us, on 32 GPUs about 68; a ring gather grows with its nodes."""
    assert load_cluster("h100-sxm:2x8").collective_seconds("all_reduce", 8, 16) == pytest.approx(48e-6, rel=0.1)
    assert load_cluster("a100-sxm:4x8").collective_seconds("all_reduce", 8, 32) == pytest.approx(68e-6, rel=0.1)
    sixteen, sixtyfour = (load_cluster(f"h100-sxm:{n}x8").collective_seconds("all_gather", 8, 8 * n) for n in (16, 64))
    assert 8e-6 < (sixtyfour - sixteen) / 48 < 20e-6  # 12 us a node explains FSDP at 256 GPUs and more


def test_level_names_where_a_group_lives() -> None:
    cluster = load_cluster("a100-pcie:4x8")
    assert [level.name for level in cluster.levels] == ["nvlink-bridge", "pcie", "network"]
    assert cluster.level_of(2).name == "nvlink-bridge"
    assert cluster.level_of(4).name == "pcie"
    assert cluster.level_of(2, stride=4).name == "pcie"
    assert cluster.level_of(4, stride=8).name == "network"
    assert cluster.level_of(1).name == "nvlink-bridge"


def test_send_recv_costs_the_level_between_neighbours() -> None:
    cluster = load_cluster("h100-sxm:4x8")
    size = 2.0**30
    near, far = cluster.collective_seconds("send_recv", size, 2, 1), cluster.collective_seconds("send_recv", size, 2, 8)
    assert size / near / 1e9 == pytest.approx(380, rel=0.15)  # H100 peer-to-peer 380 GB/s (nccl issue 1264)
    assert size / far / 1e9 == pytest.approx(48.3, rel=0.1)
    assert cluster.collective_seconds("send_recv", size, 4, 8) == far


def test_nvlink_domains_of_two_four_eight_and_seventy_two() -> None:
    assert load_cluster("a100-pcie").levels[0].size == 2
    assert load_cluster("h100-sxm:4x4").levels[0].size == 4
    assert load_cluster("h100-sxm:4x8").levels[0].size == 8
    assert load_cluster("gb200-nvl72:4x72").levels[0].size == 72
    assert [(level.name, level.size) for level in load_cluster("gb200-nvl72:36x4").levels] == [("nvlink", 72), ("network", 144)]
    assert load_cluster("gb200-nvl72:4x72").hosts == 72


def test_an_oversubscribed_spine_and_missing_rails_slow_what_crosses_them() -> None:
    base = load_cluster("h100-sxm:64x8")
    nic = base.levels[-1].link
    pods = replace(
        base,
        levels=(base.levels[0], Level(name="pod", size=128, link=nic), Level(name="spine", size=512, link=nic, oversubscription=4)),
    )
    inside = pods.collective_seconds("all_gather", 2.0**30, 16, 8)
    assert inside == pytest.approx(base.collective_seconds("all_gather", 2.0**30, 16, 8), rel=1e-9)
    across, flat = pods.collective_seconds("all_gather", 2.0**30, 64, 8), base.collective_seconds("all_gather", 2.0**30, 64, 8)
    assert across >= flat * 0.98  # sixteen nodes a pod reduce within it first: the spine carries a sixteenth
    wide = pods.collective_seconds("all_to_all", 2.0**30, 512), base.collective_seconds("all_to_all", 2.0**30, 512)
    assert wide[0] > 2.5 * wide[1]
    unrailed = replace(base, levels=(base.levels[0], replace(base.levels[1], rail_optimised=False)))
    assert unrailed.collective_seconds("all_gather", 2.0**30, 64, 8) == pytest.approx(flat / 0.85, rel=0.05)


@pytest.mark.parametrize("name", ["h100-sxm:16x8", "gb200-nvl72:2x72", "a100-pcie:4x8", "cpu:2x4", "mi300x:4x8"])
@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_never_take_less_time(name: str, kind: str) -> None:
    cluster = load_cluster(name)
    sizes = 2.0 ** np.arange(0, 34)
    for ranks, stride in ((2, 1), (4, 1), (8, 1), (cluster.gpus, 1), (2, cluster.gpus_per_node)):
        times = cluster.collective_seconds(kind, sizes, ranks, stride)
        assert np.all(np.diff(times) > 0)
        assert times[0] > 0


@pytest.mark.parametrize("name", ["h100-sxm", "a100-sxm", "b200", "gb200-nvl72", "mi300x", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_crossing_nodes_is_never_faster_than_one_domain(name: str, kind: str) -> None:
    one = load_cluster(f"{name}:1x8") if name != "cpu" else load_cluster("cpu:1x4")
    sizes = 2.0 ** np.arange(3, 34)
    for nodes in (2, 4):
        across = load_cluster(f"{name}:{nodes}x{one.gpus // nodes}")
        if name == "gb200-nvl72":
            across = replace(
                across, levels=(replace(across.levels[0], size=8 // nodes), replace(load_cluster(f"{name}:2x72").levels[1], size=8))
            )
        ratio = across.collective_seconds(kind, sizes, one.gpus) / one.collective_seconds(kind, sizes, one.gpus)
        assert ratio.min() >= 0.999, (nodes, ratio)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    name=st.sampled_from(["h100-sxm:16x8", "gb200-nvl72:4x72", "a100-pcie:4x8"]),
    size=st.integers(1, 1 << 33),
    ranks=st.lists(st.sampled_from([1, 2, 4, 8, 16, 32]), min_size=2, max_size=4),
    stride=st.sampled_from([1, 2, 4, 8]),
    sharing=st.sampled_from([1, 2, 4]),
)
def test_arrays_equal_scalars(kind: str, name: str, size: int, ranks: list[int], stride: int, sharing: int) -> None:
    cluster = load_cluster(name)
    ranks = [min(n, cluster.gpus // stride) for n in ranks]
    single = [cluster.collective_seconds(kind, float(size), n, stride, sharing) for n in ranks]
    np.testing.assert_allclose(cluster.collective_seconds(kind, float(size), np.array(ranks), stride, sharing), single, rtol=1e-9)
    strides = np.full(len(ranks), stride)
    np.testing.assert_allclose(
        cluster.collective_seconds(kind, np.full(len(ranks), float(size)), np.array(ranks), strides, sharing), single, rtol=1e-9
    )
    assert all(t == 0 for t, n in zip(single, ranks, strict=True) if n == 1)


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_loads_at_any_shape_and_every_number_has_a_source(name: str) -> None:
    one = load_cluster(name)
    for text in (
        name,
        f"{name}:2x{one.gpus_per_node}",
        f"{name}:{3 * one.gpus_per_node}",
        f"{name}:1x2",
        f"{name}:1x1",
        f"{name}:4x2",
    ):
        cluster = load_cluster(text)
        assert cluster.levels[-1].size == cluster.gpus
        assert cluster.collective_seconds("all_reduce", 1e6, cluster.gpus) >= 0
    fields = [row[0] for row in describe(one)]
    assert len(set(fields)) == len(fields)
    for field, value, unit, origin, source in describe(one):
        assert np.isfinite(value), field
        assert origin in ("datasheet", "measured", "fitted", "estimate"), field
        assert unit, field
        assert source, field
    assert one.price_per_gpu_hour.value > 0


def test_every_gpu_has_a_cluster_or_is_a_variant() -> None:
    used = {load_cluster(name).gpu.name for name in cluster_names()}
    assert set(gpu_names()) - used == {"v100-sxm-16gb"}


def test_names_as_users_and_runs_write_them() -> None:
    assert load_cluster("h100-sxm:64x8").gpus == 512
    assert load_cluster("h100-sxm:64x8").nodes == 64
    assert load_cluster("H100-80GB-SXM:4x8").name == "h100-sxm:4x8"
    assert load_cluster("H100-96GB-SXM-500W:16x8").gpu.name == "h100-sxm-96gb-500w"
    assert load_cluster("cpu:1x4").gpus == 4
    assert load_cluster("h100-sxm:16").nodes == 2
    assert load_cluster("h100-sxm:4").gpus == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h100-sxn:2x8", "h100-sxm"),
        ("h100-sxm:2by8", "h100-sxm:1x8"),
        ("h100-sxm:12", "whole nodes"),
        ("h100-sxm:0x8", "between 1 and"),
        ("h100-sxm:99999999x8", "between 1 and 1,048,576 GPUs; nearest: h100-sxm:131072x8"),
        ("", "not known"),
        ("nowhere/file.yaml", "cannot be read"),
        ("missing.yaml", "cannot be read"),
    ],
)
def test_a_bad_name_is_one_line_with_the_nearest(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        load_cluster(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_with_gpus_keeps_the_domains() -> None:
    cluster = load_cluster("h100-sxm:64x8")
    assert cluster.with_gpus(16) == load_cluster("h100-sxm:2x8")
    assert cluster.with_gpus(4).levels[0].size == 4
    with pytest.raises(InputError, match="whole nodes of 8; nearest: 16"):
        cluster.with_gpus(14)
    slow = cluster.with_network(25e9, "HDR200").with_gpus(16)
    assert slow.levels[1].link.peak_bytes_per_second.value == 25e9
    own = replace(cluster, kind="", name="ours")
    assert [(level.name, level.size) for level in own.with_gpus(64).levels] == [("nvlink", 8), ("network", 64)]
    assert [(level.name, level.size) for level in own.with_gpus(4).levels] == [("nvlink", 4)]


def test_another_line_rate_scales_the_network_and_nothing_else() -> None:
    cluster = load_cluster("a100-sxm:8x8")
    half = cluster.with_network(12.5e9, "4 x HDR200 a node")
    assert half.collective_seconds("all_gather", 2.0**32, 64, 1) == pytest.approx(
        2 * cluster.collective_seconds("all_gather", 2.0**32, 64, 1), rel=0.02
    )
    assert half.collective_seconds("all_gather", 1e9, 8) == cluster.collective_seconds("all_gather", 1e9, 8)
    assert busbw(half, "all_reduce", 2.0**33, 64) == pytest.approx(95, rel=0.04)  # nccl-tests issue 252


@pytest.mark.parametrize(
    ("cluster", "kind", "size", "ranks", "stride", "choice"),
    [
        ("h100-sxm:1x8", "all_reduce", 1 << 30, 8, 1, ("NVLS", "Simple")),  # 445 GB/s of busbw, where a ring ends at 335
        ("h100-sxm:1x8", "all_reduce", 1 << 16, 8, 1, ("NVLS", "LL")),
        ("a100-sxm:1x8", "all_reduce", 1 << 30, 8, 1, ("ring", "Simple")),  # no reduction in its switch
        ("h100-sxm:1x8", "all_gather", 1 << 30, 8, 1, ("ring", "Simple")),
        ("h100-sxm:1x8", "all_to_all", 1 << 30, 8, 1, ("direct", "Simple")),
        ("a100-sxm:4x8", "all_reduce", 8, 32, 1, ("tree", "LL")),  # small messages over many nodes
        ("a100-sxm:16x8", "all_reduce", 1 << 34, 128, 1, ("ring", "Simple")),
        ("h100-sxm:64x8", "all_gather", 1 << 20, 64, 8, ("ring", "")),
        ("h100-sxm:2x8", "send_recv", 1 << 20, 2, 8, ("direct", "")),
    ],
)
def test_the_algorithm_and_protocol_that_nccl_takes(
    cluster: str, kind: str, size: int, ranks: int, stride: int, choice: tuple[str, str]
) -> None:
    assert load_cluster(cluster).choice(kind, size, ranks, stride) == choice


def test_the_tree_is_taken_where_it_is_the_faster_one_and_the_price_is_of_the_choice() -> None:
    cluster = load_cluster("a100-sxm:16x8")
    ring, tree = cluster.ways("all_reduce", 128)
    for size in (8.0, 2.0**20, 2.0**26, 2.0**34):
        seconds = [alpha + max(rate * size + c * math.sqrt(size) for rate, c in terms) for alpha, terms in (ring, tree)]
        chosen = cluster.choice("all_reduce", size, 128)[0]
        assert chosen == ("tree" if seconds[1] < seconds[0] else "ring")
        assert cluster.collective_seconds("all_reduce", size, 128) == pytest.approx(min(seconds))


def test_protocols_switch_at_larger_messages_in_larger_groups() -> None:
    """As fitted to nccl-tests: two lines, the lower of which is taken; all-to-all leaves LL at a tenth of the size."""
    for name in ("nvlink3", "nvlink4", "nvlink5"):
        rows = load_link(name).curves
        switches = [row.protocol_switch_bytes for row in rows["all_reduce"]]
        assert all(isinstance(s, float) and 1e6 < s < 1e8 for s in switches)
        assert switches == sorted(switches)  # type: ignore[type-var]
    pairs = [row.protocol_switch_bytes for row in load_link("nvlink4").curves["all_to_all"]]
    assert all(s is not None and s < 5e5 for s in pairs)
    assert load_link("ib-ndr400").protocol("all_reduce", 1 << 20, 8) == ""


def test_every_number_of_a_cluster_is_described() -> None:
    """Whatever is a number in the file of a cluster is a row of ``clusters show``, borrowed curves and domains included."""
    rows = {row[0]: row for row in describe(load_cluster("gb200-nvl72:4x72"))}
    network = [name.split(".")[0] for name in rows if name.endswith(".rails")]
    assert rows[f"{network[0]}.rails"][1] == 8
    assert rows[f"{network[0]}.oversubscription"][1] == 1
    assert rows["nvlink.size"][1] == 72
    assert rows["nvlink.all_reduce[4].protocol_switch_bytes"][1] > 1e6
    assert rows["gb200.grouped.mxfp8.tokens0"][3] == "estimate"
    assert all(row[2] and row[3] and row[4] for row in rows.values())
