"""What the real processes of the dry run's tests run."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from planner.dryrun.rank import tag, watched
from planner.dryrun.trace import Tracer
from planner.plan import Plan
from planner.runtime.data import Batch
from planner.runtime.metrics import Memory
from planner.runtime.settings import TrainSettings
from planner.runtime.train import Trainer


def really(path: str) -> dict[str, Any]:
    """Four steps of a plan: what the tracer sees of the second, on real tensors; and bytes the allocator handed out at the most in
    the others (what is inside kernels and gloo included)."""
    plan = Plan.load(path)
    job, layout = plan.job(), plan.layout_object
    settings = TrainSettings(seq_len=job.seq_len, global_batch=job.global_batch, precision=job.precision)
    device = torch.device("cpu")
    trainer, memory = Trainer(job.model, layout, settings, device), Memory(device)
    generator = torch.Generator().manual_seed(dist.get_rank() // layout.tp)

    def batch() -> Batch:
        shape = (job.global_batch // layout.dp, job.seq_len)
        return Batch(*(torch.randint(0, job.model.vocab, shape, generator=generator) for _ in range(2)))

    tracer = Tracer(trainer.mesh.axis_of)
    gc.collect()
    with watched(trainer, tracer), tracer:
        for number in range(2):
            tag(trainer, tracer)
            tracer.begin()
            tracer.enter_phase("start", "buffers")
            trainer.step(number, batch())
    for number in range(2, 4):
        with memory.step():
            trainer.step(number, batch())
    sent: Counter[str] = Counter()
    for call in tracer.record.calls:
        sent[f"{call.axis} {call.kind}"] += call.bytes
    record = tracer.record
    answer = {"rank": dist.get_rank(), "allocated": memory.peak(), "peak": record.peak_bytes, "sent": dict(sent)}
    return {**answer, "bytes": record.at_peak, "peak_at": record.peak_at, "library": record.library}
