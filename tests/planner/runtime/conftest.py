"""Fixtures of the runtime's tests: processes, and results of one process to compare with."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # the helpers beside the tests are importable by their names
_spec = importlib.util.spec_from_file_location("axisplan_tests_distributed", HERE.parents[1] / "distributed.py")
assert _spec is not None
assert _spec.loader is not None
distributed = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(distributed)
PROGRAMS = HERE / "programs.py"


@pytest.fixture(scope="session")
def processes() -> Callable[..., list[Any]]:
    """Run a function of programs.py in ``world`` processes: ``processes(4, "name", argument=...)``."""

    def call(world: int, function: str, timeout: float = 240.0, file: Path = PROGRAMS, **arguments: Any) -> list[Any]:
        answers: list[Any] = distributed.pool(world).call(file, function, timeout, **arguments)
        return answers

    return call


@pytest.fixture(scope="session")
def gradients(processes: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Loss and every whole gradient of one step under a layout, gathered from all ranks; made once for each question."""
    folder = tmp_path_factory.mktemp("gradients")
    known: dict[str, dict[str, Any]] = {}

    def ask(world: int, layout: str, **facts: Any) -> dict[str, Any]:
        key = json.dumps([world, layout, facts], sort_keys=True)
        if key not in known:
            path = folder / f"{len(known)}.npz"
            loss = processes(world, "gradients", path=str(path), layout=layout, **facts)[0]
            with np.load(path) as file:
                known[key] = {"loss": loss, **{n: file[n] for n in file.files}}
        return known[key]

    return ask
