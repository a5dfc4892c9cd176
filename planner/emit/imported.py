"""The way back: a configuration that a user already runs, read into a layout. Nothing that is read is ever executed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cost_models.layout import Layout
from planner.emit.core import named
from planner.emit.let_pass import broken_rules
from profiles.errors import InputError

READERS = {
    "megatron": "planner.emit.megatron.reading",
    "megatron-bridge": "planner.emit.megatron.bridge_reading",
    "torchtitan": "planner.emit.torchtitan.reading",
    "deepspeed": "planner.emit.deepspeed_reading",
    "accelerate": "planner.emit.accelerate_reading",
}
"""Modules with ``read(text, where, world) -> Imported``."""
LARGEST = 4 * 2**20
"""Bytes of the largest file that is looked at."""


@dataclass(frozen=True)
class Imported:
    """What a configuration says. ``job``: seq_len, global_batch, precision, optimizer where it says so; ``model``: facts of the model's
    shape (layers, hidden, heads, experts, ... or a name); ``notes``: what was not understood, or taken from a default; ``problems``: what
    the target's own parser lets pass and its run does not."""

    execution: str
    layout: Layout
    job: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def layout_text(self) -> str:
        """The layout with etp always written where there are experts: left out, it would mean the target's default."""
        text = self.layout.text()
        return text if "etp=" in text or not self.model.get("experts") else f"{text},etp={self.layout.etp}"

    def next_command(self) -> str:
        """What to try next: the estimate of what runs today, the fastest plan, and why today's layout is not that."""
        job = f"--seq-len {self.job.get('seq_len') or 'S'} --global-batch {self.job.get('global_batch') or 'B'}"
        precision = f" --precision {self.job['precision']}" if "precision" in self.job else ""
        rest = f"{self.model.get('name', 'MODEL')} --cluster C --gpus {self.layout.world} {job}{precision} --execution {self.execution}"
        return (
            f"next: axisplan estimate {rest} --layout '{self.layout_text}'\n      axisplan plan {rest} --out plan.json\n"
            f"      axisplan explain plan.json --why '{self.layout_text}'"
        )

    def to_json(self) -> dict[str, Any]:
        """The document of ``axisplan import --json``."""
        return {
            "execution": self.execution, "layout": self.layout_text, "world": self.layout.world, "job": self.job, "model": self.model,
            "notes": list(self.notes), "problems": list(self.problems),
        }  # fmt: skip


def read_configuration(source: str, path: Path, world: int | None = None) -> Imported:
    """Read ``path`` as a configuration of ``source``; ``world``: GPUs, where the file does not say.

    Raises InputError for a file that cannot be read, or a value that cannot be understood.
    """
    module: Any = importlib.import_module(named("--from", source, READERS))
    try:
        if path.stat().st_size > LARGEST:
            raise InputError("FILE", path, f"is larger than {LARGEST // 2**20} MiB; that is no configuration")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("FILE", path, f"cannot be read: {getattr(error, 'strerror', None) or 'not text'}") from None
    found: Imported = module.read(text, str(path), world)
    return replace(found, problems=(*found.problems, *broken_rules(found.execution, found.layout, found.job, found.model)))


def fill_world(values: dict[str, Any], world: int | None, where: str) -> Layout:
    """The layout of the degrees read; data parallelism fills ``world``. Raises InputError where the world is not known or not filled."""
    if world is None and not {"dp_shard", "dp_replicate"} <= set(values):
        raise InputError("--gpus", where, "the file does not say on how many GPUs it runs; say it with --gpus N")
    return Layout.derive(values, world)
