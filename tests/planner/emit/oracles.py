"""The real parsers of the targets, each in a process of its own environment (tests/oracles), fed with many cases."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "oracles"


class Oracle:
    """A driver of tests/oracles under the Python that ``variable`` names; skips the test, with the reason, where it is not set."""

    def __init__(self, driver: str, variable: str, *also: str) -> None:
        missing = [name for name in (variable, *also) if not os.environ.get(name)]
        if missing:
            pytest.skip(f"{' and '.join(missing)} not set: see docs/emit.md, 'Checked with the real parsers'")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        self.process = subprocess.Popen(
            [os.environ[variable], str(FOLDER / driver)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=env,
        )  # fmt: skip
        assert self._line() == {"ready": True}

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the driver ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, case: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        return self._line()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def refused(answers: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """Names of the cases that the parser did not accept, each with its error."""
    return [f"{name}: {a['stage']}: {a['error']}" for name, a in answers if not a["ok"]]
