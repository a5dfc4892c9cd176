"""Where rank 0 writes the records of a run: one JSON line a step on stdout and in ``out/metrics.jsonl``, and TensorBoard.

A run that is continued overwrites what it trains again: after a restart neither file shows a step twice.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from profiles.errors import InputError
from profiles.files import naming, write_text

Record = dict[str, Any]
PLOTTED = {
    "loss": "loss/train", "eval_loss": "loss/held-out", "mtp_loss": "loss/later-tokens", "balance_loss": "experts/balance-loss",
    "expert_imbalance": "experts/imbalance", "grad_norm": "optimizer/grad-norm", "seconds": "speed/step-seconds",
    "tokens_per_second": "speed/tokens-per-second", "mfu": "speed/mfu", "peak_bytes": "memory/peak-GiB",
    "reserved_bytes": "memory/reserved-GiB",
}  # fmt: skip
"""Record key -> TensorBoard tag."""
GIB = 2**30


def check_tensorboard(asked: bool) -> None:
    """Raise InputError where TensorBoard is asked for and not installed."""
    if asked and importlib.util.find_spec("tensorboard") is None:
        raise InputError("tensorboard", True, "needs the package tensorboard: pip install 'axisplan[tensorboard]'", "false")


class Journal:
    """Writes each record that it is called with. ``out`` None: stdout alone."""

    def __init__(self, out: Path | None, tensorboard: bool = False) -> None:
        self.path = None if out is None else out / "metrics.jsonl"
        self._tensorboard = out / "tensorboard" if out is not None and tensorboard else None
        self._writer: Any = None
        self.records: list[Record] = []

    def __call__(self, record: Record) -> None:
        line = json.dumps(record) + "\n"
        if not self.records:
            self._begin(record["step"])
        self.records.append(record)
        sys.stdout.write(line)
        sys.stdout.flush()
        if self.path is not None:
            with naming(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        if self._writer is not None:
            self._plot(record)

    def _begin(self, step: int) -> None:
        if self.path is not None:
            before = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
            write_text(self.path, "".join(line + "\n" for line in before if _step_of(line) < step))
        if self._tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._tensorboard), purge_step=step)

    def _plot(self, record: Record) -> None:
        for key, tag in PLOTTED.items():
            if key in record:
                value = record[key] / GIB if key.endswith("_bytes") else record[key]
                self._writer.add_scalar(tag, value, record["step"])
        for stage, seconds in enumerate(record.get("stage_seconds", ())):
            self._writer.add_scalar(f"stages/{stage}-busy-seconds", seconds, record["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _step_of(line: str) -> float:
    """The step of a line; a line cut short by a death belongs to none and is dropped."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
