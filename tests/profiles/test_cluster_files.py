"""Cluster and GPU files: round trips, files by hand, mixed clusters, and what bad files say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from profiles.errors import InputError
from profiles.hardware import ClusterSpec, Constant, Level, Link, TrafficCurve, describe, load_cluster, load_gpu, load_link, to_yaml


@pytest.mark.parametrize("text", ["h100-sxm:64x8", "gb200-nvl72:2x72", "cpu:1x4", "a100-pcie:2x8"])
def test_a_cluster_survives_its_file(text: str, tmp_path: Path) -> None:
    cluster = load_cluster(text)
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster.to_yaml())
    again = load_cluster(str(path))
    assert again == cluster
    assert hash(again) == hash(cluster)
    assert again.collective_seconds("all_reduce", 1e8, cluster.gpus) == cluster.collective_seconds("all_reduce", 1e8, cluster.gpus)


def measured_cluster() -> ClusterSpec:
    """What the profiler writes: a GPU and a link measured here, on a date."""
    traffic = TrafficCurve(rates={2 << 20: 1.6e10, 32 << 20: 8.4e9}, origin="measured", source="copies here")
    gpu = replace(load_gpu("cpu"), host="machine-1", date="2026-11-29", aliases=[], traffic=traffic)
    rows = load_link("shared-memory").curves
    link = Link(
        name="loopback",
        shared=True,
        peak_bytes_per_second=Constant(2e9, "B/s one way per process", "measured", "gloo, 4 processes"),
        curves={
            kind: tuple(replace(row, origin="measured") for row in rows[kind]) for kind in ("all_reduce", "all_gather", "send_recv")
        },
    )
    memory = Constant(2.0**34, "bytes/host", "measured", "/proc/meminfo")
    price = Constant(0.0, "USD per GPU-hour", "estimate", "own machine")
    return ClusterSpec(
        name="this-machine",
        gpu=gpu,
        gpus=4,
        gpus_per_node=4,
        gpus_per_host=4,
        levels=(Level(name="host", size=4, link=link),),
        host_memory_bytes=memory,
        price_per_gpu_hour=price,
        host="machine-1",
        date="2026-11-29",
    )


def test_a_measured_cluster_loads_through_the_same_schema(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text(to_yaml(measured_cluster()))
    again = load_cluster(str(path))
    assert again == measured_cluster()
    assert again.gpu.date == "2026-11-29"
    assert ("cpu.traffic.rates[33554432]", 8.4e9, "bytes/s at bytes a kernel", "measured", "copies here") in describe(again)
    path.write_text(to_yaml(load_gpu("h100")))
    assert load_gpu(str(path)) == load_gpu("h100")


def test_a_file_by_hand_may_name_gpus_and_links(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(
        "name: ours\ngpu: h100\ngpus: 32\ngpus_per_node: 8\nlevels:\n"
        "- {name: nvlink, size: 8, link: nvlink4}\n- {name: network, link: ib-ndr400}\n"
    )
    cluster = load_cluster(str(path))
    assert cluster.nodes == 4
    assert cluster.gpus_per_host == 8
    assert cluster.collective_seconds("all_reduce", 1e9, 32) == load_cluster("h100-sxm:4x8").collective_seconds(
        "all_reduce", 1e9, 32
    )


def test_a_mixed_cluster_has_pools(tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text(
        "name: mixed\ngpus_per_node: 8\npools:\n- {gpu: h100, gpus: 16}\n- {gpu: a100, gpus: 16}\n"
        "levels:\n- {name: nvlink, size: 8, link: nvlink3}\n- {name: network, link: ib-hdr200}\n"
    )
    cluster = load_cluster(str(path))
    assert cluster.gpus == 32
    assert [pool.gpu.name for pool in cluster.pools] == ["h100-sxm-80gb", "a100-sxm-80gb"]
    assert cluster.gpu == cluster.pools[0].gpu
    assert {row[0].split(".")[0] for row in describe(cluster)} >= {"h100-sxm-80gb", "a100-sxm-80gb"}
    with pytest.raises(InputError, match="pools"):
        cluster.with_gpus(16)


def spoiled(change: str) -> str:
    data = yaml.safe_load(load_cluster("h100-sxm:2x8").to_yaml())
    level = data["levels"][1]
    if change == "negative bandwidth":
        level["link"]["curves"]["all_reduce"][0]["bytes_per_second"] = -4.8e10
    elif change == "negative peak":
        level["link"]["peak_bytes_per_second"]["value"] = -1.0
    elif change == "misspelt field":
        data["host_memory_byte"] = data.pop("host_memory_bytes")
    elif change == "misspelt inner field":
        data["gpu"]["facts"]["sm"] = data["gpu"]["facts"].pop("sms")
    elif change == "misspelt gpu":
        data["gpu"] = "h100-smx-80gb"
    elif change == "misspelt link":
        level["link"] = "ib-ndr40"
    elif change == "unknown origin":
        data["gpu"]["facts"]["sms"]["origin"] = "hearsay"
    elif change == "no source":
        data["gpu"]["facts"]["sms"]["source"] = ""
    elif change == "infinite":
        data["gpu"]["peaks"]["bf16"]["value"] = float("inf")
    elif change == "too small a last level":
        level["size"] = 12
    elif change == "uneven nodes":
        data["gpus"], level["size"] = 17, 17
    elif change == "no levels":
        data["levels"] = []
    return yaml.safe_dump(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("negative bandwidth", "bytes_per_second"),
        ("negative peak", "must be positive"),
        ("misspelt field", "nearest: host_memory_bytes"),
        ("misspelt inner field", "nearest: sms"),
        ("misspelt gpu", "nearest: h100-sxm-80gb"),
        ("misspelt link", "nearest: ib-ndr400"),
        ("unknown origin", "origin"),
        ("no source", "source"),
        ("infinite", "finite"),
        ("too small a last level", "span the cluster"),
        ("uneven nodes", "whole nodes"),
        ("no levels", "levels"),
    ],
)
def test_a_bad_file_is_one_error_that_names_the_field(change: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(spoiled(change))
    with pytest.raises(InputError) as caught:
        load_cluster(str(path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: [unclosed", "not valid YAML"),
        ("- a\n- b\n", "mapping"),
        ("", "mapping"),
        ("a: &a [1]\nb: *a\n", "aliases"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("gpu: 7\nlevels: 3\n", "c.yaml"),
        ("gpu: h100\nlevels: [3]\n", "c.yaml"),
        ("\x00", "c.yaml"),
        ("pools: [1]\n", "c.yaml"),
        ("pools: 1\ngpus: x\n", "c.yaml"),
        ("gpu: h100\ngpus: 8\ngpus: 16\n", "has gpus twice, in lines 2 and 3"),
        ("gpu: h100\nlevels:\n- {name: a, size: 2, size: 4}\n", "has size twice, in lines 3 and 3"),
        ("name: x\ngpu: h100\ngpus: {a: 1, b: 2}\nlevels: []\n", "gpus: 'a mapping of a, b'"),
        ("name: x\ngpu: h100\ngpus: 8\nlevels: {a: 1}\n", "levels: 'a mapping of a': must be a list"),
        ("name: x\ngpu: [h100]\ngpus: 8\nlevels: []\n", "gpu: 'a list of 1': is the name of a GPU"),
        ("name: x\ngpu: {name: mine}\ngpus: 8\nlevels: []\n", "is missing"),
    ],
)
def test_a_broken_file_is_one_error(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_cluster(str(path))
    assert says in str(caught.value)
    assert "'dict'" not in str(caught.value)
    assert "tuple" not in str(caught.value)


def test_a_truncated_file_is_one_error_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = load_cluster("h100-sxm:2x8").to_yaml()
    path = tmp_path / "cut.yaml"
    for cut in range(1, whole.rindex("\nname:"), len(whole) // 60):
        path.write_text(whole[:cut])
        with pytest.raises(InputError):
            load_cluster(str(path))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    path.write_bytes(b"a: " + b"1" * (5 << 20))
    with pytest.raises(InputError, match="larger than 4 MiB"):
        load_cluster(str(path))
