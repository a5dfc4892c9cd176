"""The Slurm controller of tests/oracles, for the tests; skips them where Slurm is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from oracles import FOLDER


@contextmanager
def controller(folder: Path, nodes: int, gpus: int) -> Iterator[dict[str, str]]:
    """The environment that makes Slurm's commands talk to a controller of ``nodes`` nodes that do not exist."""
    spec = importlib.util.spec_from_file_location("slurm_controller", FOLDER / "slurm_controller.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if missing := module.missing():
        pytest.skip(f"not here: {', '.join(missing)} (apt-get install slurm-client slurmctld munge)")
    with module.controller(folder, nodes, gpus) as environment:
        yield environment
