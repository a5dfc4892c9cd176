"""The wheel: what it holds, and that it plans in an empty environment without torch (the README's recipe)."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
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
def test_the_source_distribution_builds_the_same_wheel(wheel, tmp_path):
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps"]
    code = "from setuptools import build_meta; print(build_meta.build_sdist('.'))"
    source = wheel.parent / "source"
    built = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True, timeout=240)
    sdist = source / built.stdout.split()[-1]
    subprocess.run([*pip, "-w", str(tmp_path), str(sdist)], check=True, cwd=tmp_path, timeout=240)
    rebuilt = next(tmp_path.glob("*.whl"))
    assert contents(rebuilt) == contents(wheel)
    with tarfile.open(sdist) as archive:
        held = {"/".join(n.split("/")[1:]) for n in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "cli.py"} <= held


def contents(wheel: Path) -> dict[str, bytes]:
    """What a wheel installs, its record apart (that holds the files' times of packing)."""
    with zipfile.ZipFile(wheel) as archive:
        return {n: archive.read(n) for n in archive.namelist() if not n.endswith("/RECORD")}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_installed_here_agrees(tmp_path):
    found = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False, timeout=240)
    assert found.stdout.strip() == "No broken requirements found.", found.stdout


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
