"""Pre-flight: verdicts on made-up measurements, and a real check on gloo under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from plans import job_of, plan_of

from planner.emit.core import EmitSettings, emit
from planner.legality import read_layout
from planner.placement import host_map, misplaced
from planner.preflight import Axis, Findings, axes_of, problems_of
from profiles.hardware import load_cluster
from profiles.operations import Collective

HOSTS = [f"node{r // 8}" for r in range(32)]
DP = Axis("dp", Collective("all_reduce", "dp", 64 << 20), 4, 1e-3)


def findings(**changes: object) -> Findings:
    made = Findings(HOSTS, {"product": [1e-3] * 32}, {"product": 1e-3}, {"dp": [(r % 8, 1e-3) for r in range(32)]})
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_cluster_as_the_plan_expects_has_no_problems() -> None:
    assert problems_of(findings(), [DP], 0.3) == []


def test_a_slow_gpu_is_named_with_its_host() -> None:
    times = [1e-3] * 32
    times[19] = 1.6e-3
    assert problems_of(findings(devices={"product": times}), [DP], 0.3) == [
        "slow: rank 19 on node2: product takes 1.6 ms, 1.60 x the median rank's"
    ]


def test_a_cluster_slower_than_the_profile_is_said_once() -> None:
    found = problems_of(findings(devices={"product": [2e-3] * 32}), [DP], 0.3)
    assert found == ["product takes 2 ms, 2.00 x the plan's 1 ms, on the median rank"]


def test_a_rank_that_cannot_run_is_named() -> None:
    times: list[float | str] = [1e-3] * 32
    times[3] = "CUDA error: uncorrectable ECC error"
    assert problems_of(findings(devices={"product": times}), [DP], 0.3) == [
        "rank 3 on node0 cannot run product: CUDA error: uncorrectable ECC error"
    ]


def test_a_slow_group_is_named_with_its_hosts() -> None:
    tp = Axis("tp", Collective("all_reduce", "tp", 64 << 20), 8, 1e-3)
    times = [(r // 8 * 8, 3e-3 if r // 8 == 2 else 1e-3) for r in range(32)]
    found = problems_of(findings(axes={"tp": times}), [tp], 0.3)
    assert found == ["slow: tp all_reduce of 64 MiB over 8 in the group of rank 16 (node2) takes 3 ms, 3.00 x the median group's"]


def test_a_slow_node_in_every_group_is_found_by_pairs() -> None:
    slow = {"dp": [(r % 8, 4e-3) for r in range(32)]}
    ring = [(0, 8), (8, 16), (16, 24), (24, 0)]
    pairs = {"dp": {pair: 4e-3 if 16 in pair else 1e-3 for pair in ring}}
    found = problems_of(findings(axes=slow, pairs=pairs), [DP], 0.3)
    assert found[0].startswith("dp all_reduce of 64 MiB over 4 takes 4 ms, 4.00 x the plan's 1 ms")
    assert found[1:] == ["slow node: node2: every exchange with it (dp) takes up to 1.60 x the median pair's"]


def test_a_tensor_parallel_group_across_nodes_is_a_problem_with_the_map() -> None:
    job = job_of("llama-3.1-8b", "h100-sxm:4x8", "axisplan")
    layout = read_layout(job, "tp=8")
    assert misplaced(layout, job.cluster, HOSTS) == []
    shifted = HOSTS[1:] + HOSTS[:1]
    found = misplaced(layout, job.cluster, shifted)
    assert "tensor-parallel group of ranks 0 to 7 spans node0 and node1; it must lie inside a node" in found
    assert host_map(shifted)[:2] == ["ranks 0-6: node0", "ranks 7-14: node1"]


def test_a_rack_may_hold_a_group_on_several_hosts() -> None:
    job = job_of("llama-3.1-8b", "gb200-nvl72:1x64", "axisplan")
    hosts = [f"host{r // 4}" for r in range(64)]
    assert misplaced(read_layout(job, "tp=8"), load_cluster("gb200-nvl72:1x64"), hosts) == []


def test_every_axis_of_more_than_one_rank_is_measured_against_the_plans_price() -> None:
    job = job_of("qwen3-30b-a3b", "h100-sxm:8x8", "axisplan")
    axes = {a.name: a for a in axes_of(job, read_layout(job, "tp=4,cp=2,pp=2,ep=8"))}
    assert {name: a.ranks for name, a in axes.items()} == {"tp": 4, "cp": 2, "dp": 4, "ep": 8, "edp": 4, "pp": 2}
    assert all(0 < a.expected < 0.1 for a in axes.values())
    dense = job_of("llama-3.1-8b", "h100-sxm:8x8", "axisplan")
    assert {a.name for a in axes_of(dense, read_layout(dense, "tp=8"))} == {"tp", "dp"}


# -- for real --------------------------------------------------------------------------------------------------------------------


def check(tmp_path: Path, layout: str, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    job = job_of("llama-tiny", f"cpu:1x{ranks}", "axisplan", seq_len=64, global_batch=8, precision="fp32")
    out = tmp_path / "launch"
    emit(plan_of(job, layout), "axisplan", "torchrun", out, EmitSettings())
    env = {**os.environ, "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [str(out / "launch.sh"), "--check", "--seconds", "2", "--json", *arguments]
    return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.slow
def test_check_on_gloo_measures_every_axis_and_passes_where_nothing_is_slow(tmp_path: Path) -> None:
    done = check(tmp_path, "tp=2,zero=1", 2, "--tolerance", "1e6")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert set(found["axes"]) == {"tp"}
    assert len(found["axes"]["tp"]["seconds"]) == 2
    assert all(t > 0 for t in found["axes"]["tp"]["seconds"])
    assert all(len(d["seconds"]) == 2 for d in found["devices"].values())


@pytest.mark.slow
def test_check_on_gloo_stops_with_the_slow_named(tmp_path: Path) -> None:
    done = check(tmp_path, "tp=2,dp_shard=2,zero=1", 4, "--tolerance", "-0.9")
    assert done.returncode == 1
    found = json.loads(done.stdout.splitlines()[0])
    assert not found["ok"]
    assert any(p.startswith("slow: rank") for p in found["problems"])
    assert {"tp", "dp"} <= set(found["axes"])
