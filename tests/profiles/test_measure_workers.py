"""The profiler's workers as processes: started clear of a user's own folders, followed, ended, and a machine really measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from profiles.errors import AxisplanError
from profiles.hardware import load_cluster
from profiles.links import KINDS
from profiles.measure.launch import run_workers, torchrun_command
from profiles.measure.layer import measure_layer
from profiles.measure.links import measure_links
from profiles.measure.machine import profile_machine
from profiles.measure.samples import load_samples
from tests.conftest import AXISPLAN

FOREIGN = "raise SystemExit('a foreign module was imported')\n"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jobs of these tests lie in a folder of their own, by whose name their processes are told from others'."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def workers(folder: Path) -> list[int]:
    """Processes (torchrun and its workers) whose job lies in ``folder``."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in command:
            found.append(int(process.name))
    return found


def gone(folder: Path, seconds: float = 20.0) -> bool:
    """Whether every process of a job in ``folder`` ends within ``seconds``."""
    end = time.monotonic() + seconds
    while workers(folder) and time.monotonic() < end:
        time.sleep(0.1)
    return not workers(folder)


def test_the_command_keeps_the_current_folder_off_the_path() -> None:
    command = torchrun_command(2, "profiles.measure.worker", "a b", "c")
    assert command.count("-P") == 2
    assert command[-2:] == ["a b", "c"]
    assert "--standalone" in command


def test_a_machine_of_two_processes_is_measured_and_read_back(
    tmp_path: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder that holds modules of the same names, with a budget of seconds; nothing is left running."""
    for name in ("profiles", "planner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(FOREIGN)
    (tmp_path / "torch.py").write_text(FOREIGN)
    monkeypatch.chdir(tmp_path)
    seen: list[float] = []
    found = profile_machine(2, budget_seconds=5.0, device="cpu", dtypes=("fp32",), progress=lambda done, _: seen.append(done))
    assert found.cluster is not None
    assert found.links is not None
    assert found.links.link is not None
    assert set(found.links.link.curves) == set(KINDS)
    assert seen == sorted(seen)
    assert seen[-1] > 0.5
    found.save(tmp_path / "this.yaml")
    cluster = load_cluster(str(tmp_path / "this.yaml"))
    assert cluster == found.cluster
    assert (cluster.gpus, cluster.gpu.peaks["fp32"].origin, cluster.gpu.date) == (2, "measured", cluster.date)
    assert cluster.collective_seconds("all_reduce", 1 << 20, 2) > cluster.collective_seconds("all_reduce", 1 << 10, 2) > 0
    samples, facts = load_samples(tmp_path / "this.samples.json")
    assert len(samples) == len(found.gpu.samples) + len(found.links.samples)
    assert (facts["processes"], facts["world"], facts["backend"]) == (2, 2, "gloo")
    assert not workers(own_folder)


def test_a_worker_that_fails_is_one_line_and_the_other_does_not_wait_for_it(own_folder: Path) -> None:
    job = {"device": "cpu", "links": {"axes": {"all": [[0, 7]]}, "kinds": ["all_reduce"], "sizes": [1024], "budget_seconds": 1}}
    start = time.monotonic()
    with pytest.raises(AxisplanError, match="profile: a worker failed") as caught:
        run_workers(job, 2, timeout_seconds=60, on_record=lambda record: None)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 50
    assert not workers(own_folder)


def test_workers_that_take_too_long_are_ended(own_folder: Path) -> None:
    with pytest.raises(AxisplanError, match="not done after 1 s"):
        run_workers({"device": "cpu"}, 2, timeout_seconds=1.0, on_record=lambda record: None)
    assert gone(own_folder)


SCRIPT = """
from profiles.measure.links import measure_links
print("go", flush=True)
result = measure_links(processes=2, device="cpu", budget_seconds=60, progress=lambda done, text: print(done, flush=True))
print("interrupted", result.interrupted, len(result.samples) > 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_profile_leaves_no_process(number: signal.Signals, own_folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-P", "-c", SCRIPT], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    for _ in range(4):
        child.stdout.readline()
    assert len(workers(own_folder)) >= 3
    os.kill(child.pid, number)
    output, _ = child.communicate(timeout=30)
    assert gone(own_folder)
    if number is signal.SIGINT:
        assert child.returncode == 0
        assert "interrupted True True" in output


@pytest.mark.slow
def test_groups_along_an_axis_alone_and_at_once() -> None:
    axes = {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
    found = measure_links(
        axes, processes=4, device="cpu", kinds=["all_reduce"], sizes=[1 << p for p in (10, 14, 18, 20)], budget_seconds=10
    )
    assert found is not None
    timed: set[tuple[Any, ...]] = {(s.operation.axis, s.stride, s.groups) for s in found.samples if not s.failed}
    assert {("tp", 1, 2), ("tp", 1, 1), ("dp", 2, 2), ("dp", 2, 1)} <= timed
    assert set(found.contention) == {"tp", "dp", "tp and dp"}
    assert found.link is not None
    both = [s for s in found.samples if s.beside]
    assert {(s.operation.axis, s.beside, s.operation.bytes, s.groups) for s in both} == {("tp", "dp", 1 << 20, 2)}
    assert all(s.seconds > 0 for s in both)
    assert [row.ranks for row in found.link.curves["all_reduce"]] == [2]


INSIDE = """
from profiles.measure.links import measure_links
result = measure_links(sizes=[1 << 10, 1 << 12, 1 << 14, 1 << 16], kinds=["broadcast"], device="cpu", budget_seconds=3)
print("RESULT", None if result is None else list(result.link.curves), flush=True)
"""


@pytest.mark.slow
def test_in_a_world_that_torchrun_started_rank_0_has_the_result(tmp_path: Path) -> None:
    (tmp_path / "inside.py").write_text(INSIDE)
    head = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*head, str(tmp_path / "inside.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(done.stdout.splitlines()) == ["RESULT None", "RESULT ['broadcast']"]


@pytest.mark.slow
def test_the_command_under_torchrun_measures_torchruns_world_and_rank_0_writes(tmp_path: Path) -> None:
    """Whatever ``--processes`` says: the ranks are those that torchrun started."""
    head = [
        sys.executable,
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
        str(AXISPLAN),
    ]
    given = ["--device", "cpu", "--processes", "4", "--seconds", "3", "--kinds", "all-reduce,broadcast", "--layout", "tp=2"]
    command = [*head, "profile", "links", *given, "--out", str(tmp_path / "links.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("error of the fit on samples left out") == 1
    link = yaml.safe_load((tmp_path / "links.yaml").read_text())
    assert {kind: [row["ranks"] for row in rows] for kind, rows in link["curves"].items()} == {"all_reduce": [2], "broadcast": [2]}
    samples, facts = load_samples(tmp_path / "links.samples.json")
    assert (facts["world"], facts["backend"]) == (2, "gloo")
    assert {s.ranks for s in samples} == {2}


@pytest.mark.slow
def test_a_layer_is_measured_by_two_processes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import torch\ndef make(micro_batch, seq_len): return torch.nn.Linear(32, 32), torch.randn(micro_batch, seq_len, 32)\n"
    (tmp_path / "linear_here.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    profile = measure_layer("linear_here:make", micro_batches=[2], seq_lens=[16], processes=2, device="cpu", budget_seconds=1)
    (row,) = profile.rows
    assert (profile.processes, row.forward_flops, row.parameter_bytes) == (2, 2 * 32 * 32 * 32, (32 * 32 + 32) * 4)


@pytest.mark.slow
def test_a_killed_worker_ends_the_others_and_is_named(own_folder: Path) -> None:
    def kill_one(record: dict[str, Any]) -> None:
        if record["type"] == "start":
            parts = {process: (Path("/proc") / str(process) / "cmdline").read_bytes() for process in workers(own_folder)}
            os.kill(max(process for process, command in parts.items() if b"torch.distributed.run" not in command), signal.SIGKILL)

    job = {"device": "cpu", "links": {"axes": {"all": [[0, 1]]}, "kinds": ["all_reduce"], "sizes": [1 << 20], "budget_seconds": 30}}
    with pytest.raises(AxisplanError, match=r"a worker failed: (exitcode *: -9|.*closed by peer|.*reset by peer)"):
        run_workers(job, 2, timeout_seconds=60, on_record=kill_one)
    assert gone(own_folder)
