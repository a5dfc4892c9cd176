"""What the real processes of the dry run's tests run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from planner.dryrun.counting import call_of
from planner.plan import Plan
from planner.runtime.data import Batch
from planner.runtime.metrics import Memory
from planner.runtime.train import Trainer, TrainSettings


class Calls(TorchDispatchMode):
    """Bytes of the collectives that are really called, by (axis, kind)."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.axis_of, self.sent = trainer.mesh.axis_of, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if "c10d" in func._schema.name and (call := call_of(func._schema.name, args, out, self.axis_of, "", 0)):
            self.sent[f"{call.axis} {call.kind}"] += call.bytes
        return out


def really(path: str) -> dict[str, Any]:
    """Three steps of a plan: bytes really allocated at the most, and collectives of the last."""
    plan = Plan.load(path)
    job, layout = plan.job(), plan.layout_object
    settings = TrainSettings(seq_len=job.seq_len, global_batch=job.global_batch, precision=job.precision)
    device = torch.device("cpu")
    trainer, memory = Trainer(job.model, layout, settings, device), Memory(device)
    generator = torch.Generator().manual_seed(dist.get_rank() // layout.tp)

    def batch() -> Batch:
        shape = (job.global_batch // layout.dp, job.seq_len)
        return Batch(*(torch.randint(0, job.model.vocab, shape, generator=generator) for _ in range(2)))

    for number in range(2):
        with memory.step():
            trainer.step(number, batch())
    calls = Calls(trainer)
    with calls:
        trainer.step(2, batch())
    return {"rank": dist.get_rank(), "peak": memory.peak(), "sent": dict(calls.sent)}
