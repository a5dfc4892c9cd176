"""Held-out loss: the mean over the valid tokens of a fixed set of sequences, the same number under every layout.

The set goes through the pipeline forward only, a global batch at a time; where it does not fill the last one, sequences without a
valid token do.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from cost_models.layout import SPLIT_BACKWARD
from planner.runtime import fully_sharded
from planner.runtime.collectives import all_reduce_world
from planner.runtime.data import Batch, TokenFile, indices_of
from planner.runtime.loss import IGNORED
from planner.runtime.train import Trainer


class HeldOut:
    """The first ``sequences`` sequences of ``data`` (0 = all), in the file's order."""

    def __init__(self, data: TokenFile, sequences: int = 0) -> None:
        self.data, self.sequences = data, min(sequences or data.count, data.count)

    def batch(self, numbers: range) -> Batch:
        """Sequences by number; beyond the set, ones without a valid token."""
        made = self.data.at([n if n < self.sequences else 0 for n in numbers])
        beyond = torch.tensor([n >= self.sequences for n in numbers])
        return Batch(made.ids, made.labels.masked_fill(beyond[:, None], IGNORED), made.documents)

    def loss(self, trainer: Trainer) -> dict[str, Any]:
        """``eval_loss``, ``eval_tokens`` it is the mean of, ``eval_seconds``. Called by every rank, between steps."""
        began = time.perf_counter()
        whole, size = trainer.settings.global_batch, trainer.mesh.tp.size * trainer.layout.pp
        sums = torch.zeros(2, dtype=torch.float64, device=trainer.device)
        trainer.balance.recording = False
        for number in range(-(-self.sequences // whole)):
            batches = trainer.cut(self.batch(indices_of(number, whole, trainer.layout.dp, trainer.mesh.dp)))
            sums[0] += trainer.pipeline.evaluate(batches) / trainer.mesh.tp.size
            sums[1] += sum((b.labels != IGNORED).sum() for b in batches) / size
        if trainer.sharded and trainer.layout.schedule in SPLIT_BACKWARD:
            for decoder in trainer.decoders.values():
                fully_sharded.let_go(decoder)
        total, tokens = all_reduce_world(sums).tolist()
        return {"eval_loss": total / max(tokens, 1.0), "eval_tokens": round(tokens), "eval_seconds": time.perf_counter() - began}
