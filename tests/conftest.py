"""What all tests share: how to run the command as a user does."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

AXISPLAN = Path(sysconfig.get_path("scripts")) / "axisplan"
REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the tests measure is not kept as the user's own machine."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AXISPLAN_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of copied public data (tests/data/README.md names each source)."""
    return Path(__file__).resolve().parent / "data"


@pytest.fixture
def axisplan(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the installed command in an empty folder; returns the finished process."""

    def run(*arguments: str, cwd: Path = tmp_path, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **environment}
        command = [str(AXISPLAN), *arguments]
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)

    return run


@pytest.fixture
def invoke() -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process (no start-up cost); returns (exit code, stdout, stderr)."""
    import contextlib
    import io

    import cli

    def run(*arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
            cli.main(list(arguments))
        return int(stop.value.code or 0), out.getvalue(), err.getvalue()

    return run
