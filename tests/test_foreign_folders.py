"""planner, profiles, cost_models and cli are common words: a user's own folder of that name must never be picked up."""

from __future__ import annotations

from pathlib import Path

import pytest

NAMES = ("planner", "profiles", "cost_models")


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A project folder with packages and a module named like ours, each of which says so when imported."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('foreign package imported')\n")
    (tmp_path / "cli.py").write_text("raise SystemExit('foreign cli imported')\n")
    return tmp_path


def test_the_command_runs_in_a_folder_that_holds_packages_of_the_same_names(axisplan, foreign):
    done = axisplan("models", cwd=foreign)
    assert done.returncode == 0, done.stderr
    assert "llama-tiny" in done.stdout


def test_a_foreign_package_on_the_python_path_is_named_instead_of_used(axisplan, foreign):
    (foreign / "cli.py").unlink()
    for name in NAMES:
        (foreign / name / "__init__.py").write_text("")
    done = axisplan("models", cwd=foreign, PYTHONPATH=str(foreign))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert str(foreign) in done.stderr or "No module named" in done.stderr
