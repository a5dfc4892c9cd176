"""The wheel: what it holds, and that it plans in an empty environment without torch (the README's recipe)."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from profiles.version import __version__

REPOSITORY = Path(__file__).resolve().parent.parent
PLANNING_NEEDS = ("pulp", "highspy", "click", "rich", "pydantic", "numpy", "pyyaml")
CLEAN = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{REPOSITORY}", str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(source)]
    subprocess.run(command, check=True, cwd=out, timeout=240)
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_exactly_the_four_parts_and_their_data(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {n.split("/")[0] for n in names}
    assert tops == {"planner", "cost_models", "profiles", "cli.py", f"axisplan-{__version__}.dist-info"}
    for part in ("planner", "cost_models", "profiles"):
        assert f"{part}/py.typed" in names
    tracked = subprocess.run(
        ["git", "ls-files", "planner", "cost_models", "profiles"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    missing = [n for n in tracked.stdout.split() if n not in names]
    assert missing == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_plans_in_an_environment_without_torch(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True, env=CLEAN, timeout=300)
    subprocess.run([*pip, "-c", str(REPOSITORY / "constraints.txt"), *PLANNING_NEEDS], check=True, env=CLEAN, timeout=300)
    absent = subprocess.run([str(python), "-c", "import torch"], env=CLEAN, capture_output=True, check=False)
    assert absent.returncode != 0
    job = ["llama-tiny", "--cluster", "cpu:1x4", "--seq-len", "256", "--global-batch", "16"]
    done = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "axisplan"), "plan", *job, "--prove", "--json"],
        cwd=tmp_path,
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"proved": true' in done.stdout
