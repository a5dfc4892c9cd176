"""Commands that are broken on purpose: one clear line each, no process left, nothing half-written.

The demo: test_demo.py. A killed rank, a port in use, a run that is asked to end: planner/runtime/test_launch.py.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.test_demo import AXISPLAN, ENV, left_behind

TINY = ("llama-tiny", "--cluster", "cpu:1x2", "--seq-len", "64", "--global-batch", "4", "--precision", "fp32")
LARGE = ("deepseek-v3", "--cluster", "h100-sxm:256x8", "--seq-len", "4k", "--global-batch", "15360", "--prove")


def start(*words: str, **popen: object) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([str(AXISPLAN), *words], env=ENV, start_new_session=True, **pipes, **popen)


def last_line(process: subprocess.Popen[str], seconds: float = 90) -> str:
    """The one line on stderr, once the command has ended and all it started with it."""
    _, err = process.communicate(timeout=seconds)
    end = time.monotonic() + 10
    while left_behind(process.pid) and time.monotonic() < end:
        time.sleep(0.2)
    assert left_behind(process.pid) == []
    lines = [line for line in err.splitlines() if line.strip() and not line.endswith(" ...")]  # what is under way is no error
    assert len(lines) == 1, err
    assert lines[0].startswith("axisplan: ")
    assert "Traceback" not in err
    assert "internal error" not in err
    return lines[0]


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def plan(tmp_path: Path, invoke) -> Path:  # type: ignore[no-untyped-def]
    assert invoke("plan", *TINY, "--pin", "pp=1", "--out", str(tmp_path / "plan.json"))[0] == 0
    return tmp_path / "plan.json"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "words"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")]
)
@pytest.mark.parametrize(
    "command",
    [
        ("plan", *LARGE, "--out", "plan.json"),
        ("sweep", *LARGE[:-1], "--gpus", "512,1024,2048", "--out", "sweep.csv"),
        ("profile", "links", "--device", "cpu", "--processes", "2", "--seconds", "60", "--out", "links.yaml"),
    ],
    ids=lambda words: words[0],
)
def test_a_signal_in_the_middle_is_one_line(
    command: tuple[str, ...], number: signal.Signals, code: int, words: str, tmp_path: Path
) -> None:
    process = start(*command, cwd=tmp_path)
    time.sleep(12)
    assert process.poll() is None, process.communicate()
    process.send_signal(number)
    assert words in last_line(process)
    assert process.returncode == code
    assert [name for name in files(tmp_path) if "samples" not in name] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("report", "plan.json", "--out", "it.html"), ("emit", "plan.json", "--out", "it"), ("plan", *TINY, "--out", "it.json"),
        ("report", "plan.json", "--out", "it.png"), ("data", "prepare", "text.txt", "--out", "it"),
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)  # fmt: skip
def test_no_space_in_the_output_folder_is_one_line_and_leaves_nothing(command: tuple[str, ...], plan: Path) -> None:
    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))

    (plan.parent / "text.txt").write_text("words " * 1000)
    before = files(plan.parent)
    process = start(*command, cwd=plan.parent, preexec_fn=small_files)
    assert "File too large" in last_line(process)
    assert process.returncode == 1
    assert files(plan.parent) == before


@pytest.mark.slow
def test_a_full_file_system_is_one_line_and_leaves_nothing(plan: Path, tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", room], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        process = start("report", str(plan), "--out", str(room / "it.html"))
        assert "No space left on device" in last_line(process)
        assert (process.returncode, files(room)) == (1, [])
    finally:
        subprocess.run(["umount", room], check=True)


@pytest.mark.parametrize(
    ("text", "what"), [("{not json", "config.json"), ("[]", "config.json"), ("", "config.json"), ("\x00\x01", "config.json")]
)
@pytest.mark.parametrize("command", ["inspect", "plan", "estimate"])
def test_a_config_that_is_not_json_is_one_line(command: str, text: str, what: str, tmp_path: Path, invoke) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "config.json").write_text(text)
    job = () if command == "inspect" else TINY[1:]
    layout = ("--layout", "tp=2") if command == "estimate" else ()
    code, out, err = invoke(command, str(tmp_path / "config.json"), *job, *layout)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert what in err
