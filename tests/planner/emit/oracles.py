"""The real parsers of the targets, each in a process of its own environment (tests/oracles), fed with many cases."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / "tests" / "oracles"
INSTALLED = REPOSITORY / ".oracles" / "oracles.json"
"""What tests/oracles/install.py wrote: the variables of the oracles that it could install."""


def where() -> dict[str, str]:
    """Variables that name the parsers: those installed, and over them those of the environment."""
    installed: dict[str, str] = json.loads(INSTALLED.read_text(encoding="utf-8")) if INSTALLED.exists() else {}
    return installed | {name: value for name, value in os.environ.items() if name.startswith("AXISPLAN_") and value}


class Oracle:
    """A driver of tests/oracles under the Python that ``variable`` names; skips the test, with the reason, where there is none."""

    def __init__(self, driver: str, variable: str, *also: str) -> None:
        known = where()
        missing = [name for name in (variable, *also) if name not in known]
        if missing:
            pytest.skip(f"{' and '.join(missing)} not set: python tests/oracles/install.py installs it (docs/emit.md)")
        env = {**os.environ, **known, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER)}
        self.driver, self.said = driver, tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [known[variable], str(FOLDER / driver)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True, env=env,
        )  # fmt: skip
        assert self._line() == {"ready": True}

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.said.seek(0)
            raise AssertionError(f"{self.driver} ended ({self.process.wait(10)}); the last it said:\n{self.said.read()[-3000:]}")
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
        self.said.close()
