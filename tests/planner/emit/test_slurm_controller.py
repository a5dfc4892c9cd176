"""sbatch itself, against a controller on this machine whose nodes do not exist: it would start what is emitted."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from plans import job_of, plan_of
from slurms import controller

from planner.emit.core import EmitSettings, emit

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with controller(tmp_path_factory.mktemp("slurm"), 8, 8) as environment:
        yield environment


def submit(
    slurm: dict[str, str], out: Path, cluster: str, layout: str, *arguments: str, **options: str
) -> subprocess.CompletedProcess[str]:
    job = job_of("llama-3.1-8b", cluster, "axisplan", global_batch=1680)
    emit(plan_of(job, layout, legal=False), "axisplan", "slurm", out, EmitSettings(options=options))
    return subprocess.run(
        ["sbatch", "--test-only", *arguments, "job.sbatch"], env=slurm, cwd=out, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("nodes", [1, 2, 8])
@pytest.mark.parametrize(
    "options", [{}, {"partition": "gpu", "time": "1-02:30:00"}, {"mem": "400G", "container": "nvcr.io/nvidia/pytorch:25.09-py3"}]
)
def test_sbatch_would_start_the_job_on_the_plans_nodes(
    slurm: dict[str, str], tmp_path: Path, nodes: int, options: dict[str, str]
) -> None:
    done = submit(slurm, tmp_path / "out", f"h100-sxm:{nodes}x8", "tp=8,micro_batch=1", **options)
    assert done.returncode == 0, done.stderr
    where = "gpu01" if nodes == 1 else f"gpu[01-0{nodes}]"
    assert f"on nodes {where} in partition gpu" in done.stderr


def test_sbatch_would_start_a_rack_of_hosts_with_four_gpus_each(slurm: dict[str, str], tmp_path: Path) -> None:
    done = submit(slurm, tmp_path / "out", "gb200-nvl72:1x32", "tp=8,micro_batch=1")
    assert done.returncode == 0, done.stderr
    assert "gpu[01-08]" in done.stderr


@pytest.mark.parametrize(
    ("cluster", "options", "reason"),
    [
        ("h100-sxm:20x8", {}, "not available|More processors"),
        ("h100-sxm:2x8", {"partition": "nowhere"}, "invalid partition"),
        ("h100-sxm:2x8", {"mem": "4000G"}, "not available|Memory"),
    ],
)
def test_sbatch_refuses_what_the_cluster_does_not_have(
    slurm: dict[str, str], tmp_path: Path, cluster: str, options: dict[str, str], reason: str
) -> None:
    done = submit(slurm, tmp_path / "out", cluster, "tp=8,micro_batch=1", **options)
    assert done.returncode != 0
    assert re.search(reason, done.stderr, re.IGNORECASE), done.stderr
