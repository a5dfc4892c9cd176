"""The whole job on this machine: measure it, plan a small model, prove the plan, emit it, train it, and compare with the prediction.

``run_demo`` reads as the story; each step is one function below it or elsewhere in the product. Nothing here is special to the
demo: the same profile, plan, emission and runtime serve a real cluster.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles.errors import AxisplanError, InputError
from profiles.files import write_text

if TYPE_CHECKING:
    from rich.console import Console

    from planner.plan import Plan

GIB = 2**30


@dataclass(frozen=True)
class DemoSettings:
    """What the demo does; the defaults fit a machine of two cores and five minutes."""

    out: Path
    model: str = "llama-tiny"
    processes: int = 4
    seq_len: int = 256
    global_batch: int = 16
    steps: int = 24
    data: tuple[Path, ...] = ()
    profile: Path | None = None
    profile_seconds: float = 60.0
    slower_by: float = 0.15
    """The runner-up to run as well: the first one predicted at least this much slower."""


@dataclass
class Measured:
    """What a run printed: one record a step."""

    name: str
    plan: Plan
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median step time after the first quarter of the steps, which warm up caches and allocators."""
        warm = self.records[max(1, len(self.records) // 4) :] or self.records
        return statistics.median(r["seconds"] for r in warm)

    @property
    def peak_bytes(self) -> float:
        return float(max(r["peak_bytes"] for r in self.records))


def training_text(settings: DemoSettings) -> tuple[Path, ...]:
    """The user's files, or Python's own documentation topics: real English that is on every machine."""
    for path in settings.data:
        if not path.is_file():
            raise InputError("--data", path, "is not a file")
    if settings.data:
        return settings.data
    from pydoc_data.topics import topics

    path = settings.out / "text.txt"
    write_text(path, "\n\n".join(topics[name] for name in sorted(topics)))
    return (path,)
