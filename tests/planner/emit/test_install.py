"""Installing the real parsers: what works stays until the new one is whole."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from oracles import FOLDER

OLD, NEW = (
    {"packages": ["a==1"], "sets": {"AXISPLAN_ORACLE_A": "python"}},
    {"packages": ["a==2"], "sets": {"AXISPLAN_ORACLE_A": "python"}},
)


@pytest.fixture
def installer() -> Any:
    spec = importlib.util.spec_from_file_location("axisplan_install", FOLDER / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(home: Path, pins: dict[str, Any] | None) -> None:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").write_text("old" if pins else "new")
    if pins:
        (home / "pins.json").write_text(json.dumps(pins))


def test_an_environment_is_kept_where_the_new_one_cannot_be_made(installer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    environment(tmp_path / "a", OLD)

    def fails(home: Path, pins: dict[str, Any], end: float) -> None:
        environment(home, None)
        raise installer.Unavailable("no network")

    monkeypatch.setattr(installer, "make", fails)
    with pytest.raises(installer.Unavailable):
        installer.install("a", NEW, tmp_path, 0.0)
    assert (tmp_path / "a" / "bin" / "python").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_environment_is_replaced_by_a_whole_one_and_kept_at_the_same_pins(
    installer: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    environment(tmp_path / "a", OLD)
    made: list[Path] = []
    monkeypatch.setattr(installer, "make", lambda home, pins, end: (environment(home, None), made.append(home)))
    for _ in range(2):
        assert installer.install("a", NEW, tmp_path, 0.0) == {"AXISPLAN_ORACLE_A": str(tmp_path / "a" / "bin" / "python")}
    assert (tmp_path / "a" / "bin" / "python").read_text() == "new"
    assert json.loads((tmp_path / "a" / "pins.json").read_text()) == NEW
    assert (len(made), [p.name for p in tmp_path.iterdir()]) == (1, ["a"])
