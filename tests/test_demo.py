"""The main job end to end, and what happens when it is broken on purpose."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest

AXISPLAN = Path(sysconfig.get_path("scripts")) / "axisplan"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}


def demo(out: Path, *arguments: str, **popen: object) -> subprocess.Popen[str]:
    command = [str(AXISPLAN), "demo", "--out", str(out), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=ENV, start_new_session=True, **pipes, **popen)


def left_behind(session: int) -> list[str]:
    """Command lines of live processes whose session was started by the demo, or that run a worker of it."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((status.parent / "cmdline").read_text().replace("\0", " "))
        except (OSError, IndexError):
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_measures_plans_emits_trains_and_compares(tmp_path):
    process = demo(tmp_path / "d", "--profile-seconds", "12", "--steps", "6")
    out, err = process.communicate(timeout=850)
    assert process.returncode == 0, err
    for heading in ("1. profile", "2. plan", "3. emit and run: the plan", "5. predicted against measured"):
        assert heading in out
    assert "proved: no legal layout" in out
    assert "next: axisplan explain" in out
    for name in ("cluster.yaml", "plan.json", "launch/launch.sh", "launch/train.json", "launch/README.md"):
        assert (tmp_path / "d" / name).is_file()
    losses = [float(x) for x in out.split("\nloss ", 1)[1].split("\n", 1)[0].split(" > ")]
    assert losses[-1] < losses[0]


def test_a_config_that_is_not_json_is_one_line_and_nothing_is_written(invoke, tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{not json")
    code, _, err = invoke("demo", "--model", str(config), "--out", str(tmp_path / "d"))
    assert code == 2
    assert err.count("\n") == 1
    assert "config.json" in err
    assert not (tmp_path / "d").exists()


def test_a_folder_that_cannot_be_written_is_one_line(invoke, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = invoke("demo", "--out", str(tmp_path / "file" / "d"))
    assert code in (1, 2)
    assert err.count("\n") == 1
    assert "internal error" not in err


def test_a_full_disk_is_one_line_and_leaves_no_half_written_file(tmp_path):
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    process = demo(tmp_path / "d", preexec_fn=small_files)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.count("\n") == 1
    assert "File too large" in err
    assert [p for p in (tmp_path / "d").rglob("*") if p.is_file()] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_in_the_middle_is_one_line_and_no_process_stays(tmp_path):
    process = demo(tmp_path / "d", "--profile-seconds", "30")
    time.sleep(15)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1].startswith("axisplan: interrupted")
    time.sleep(1)
    assert left_behind(process.pid) == []
