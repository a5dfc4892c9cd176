"""The checks that need a GPU, as far as a CPU can run them: the jobs' program, and the report over what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from profiles.hardware import load_gpu
from profiles.measure.samples import Sample, save_samples
from profiles.operations import Matmul
from tests.scripts import script

REPOSITORY = Path(__file__).resolve().parents[1]

report = script("gpu_report").report
MEMORY = {"peak_allocated": 105.0}
EXPECTED = {
    "dense": {
        "traced": {"peak_bytes": 102.0}, "memory": MEMORY, "step_seconds": 1.0, "step_seconds_low": 0.9, "step_seconds_high": 1.1,
    }
}  # fmt: skip
ERRORS = {"attention": [1e-4, 2e-4], "norm": [1e-5]}


def found(folder: Path, **changes: Any) -> list[str]:
    """The report's lines over results that are all good but for ``changes``: verdict and what it is about."""
    h200 = load_gpu("h200-sxm")
    op = Matmul(4096, 4096, 4096, "bf16")
    factor = changes.get("slower", 1.05)
    sample = Sample(op, seconds=factor * float(h200.seconds(op, sustained=False)))
    save_samples(folder / "gpu.samples.json", [sample], launch_seconds=h200.launch_seconds, memory_usable_bytes=h200.usable_bytes)
    job = {"max_memory_allocated": 100.0, "step_seconds": [1.02, 1.05, 9.0], **changes.get("job", {})}
    (folder / "jobs.json").write_text(json.dumps({"dense": job}))
    losses = {"losses on the device": [5.0, 4.0], "losses on the CPU": [5.0, changes.get("loss", 4.0)]}
    (folder / "numbers.json").write_text(
        json.dumps(
            {**losses, "operations torch.float32": ERRORS, "operations torch.bfloat16": ERRORS, **changes.get("numbers", {})}
        )
    )
    (folder / "expected.json").write_text(json.dumps(EXPECTED))
    return [str(line).split(":")[0] for line in report(folder, folder, "h200-sxm") if not line.good]


def test_good_results_are_all_good(tmp_path: Path) -> None:
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "bad"),
    [
        ({"slower": 1.2}, "OVER     h200-sxm-141gb matmul bf16, known / measured (1)"),
        ({"job": {"max_memory_allocated": 98.0}}, "OVER     dense"),
        ({"job": {"step_seconds": [1.3, 1.3]}}, "OVER     dense"),
        ({"job": {"step_seconds": [60.0, 60.0]}}, "OVER     dense"),
        ({"job": {"step_seconds": [0.85, 0.85]}}, "OVER     dense"),
        ({"job": {"max_memory_allocated": None}}, "MISSING  dense"),
        ({"loss": 4.1}, "OVER     fp32 losses of ten steps, device and CPU (the furthest)"),
        ({"numbers": {"operations torch.bfloat16": {"failed": "x"}}}, "MISSING  operations in bfloat16"),
        ({"numbers": {"operations torch.float32": {"norm": [0.1]}}}, "OVER     norm in float32, worst output"),
    ],
)
def test_what_is_over_its_limit_or_missing_is_said(changes: dict[str, Any], bad: str, tmp_path: Path) -> None:
    assert bad in found(tmp_path, **changes)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_jobs_run_on_a_cpu_at_small_sizes(tmp_path: Path) -> None:
    for name, arguments in (
        ("gpu_jobs.py", [str(tmp_path), "--tiny", "--only", "dense-full-recompute"]),
        ("gpu_checks.py", [str(tmp_path), str(tmp_path / "out"), "--inside", "jobs"]),
    ):
        command = [sys.executable, "-W", "ignore", str(REPOSITORY / "benchmarks" / name), *arguments]
        one = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path, env=one)
        assert done.returncode == 0, done.stderr[-2000:]
    expected = json.loads((tmp_path / "expected.json").read_text())["dense-full-recompute"]
    assert expected["layout"].endswith("recompute=full")
    assert expected["traced"]["peak_bytes"] > 16 * expected["parameters"]
    job = json.loads((tmp_path / "out" / "jobs.json").read_text())["dense-full-recompute"]
    assert "failed" not in job
    assert 0 < job["loss"] < 10
    assert job["step_seconds"]
