"""What the real processes of the dry run's tests run."""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from planner.dryrun.rank import tag, watched
from planner.dryrun.trace import Tracer
from planner.plan import Plan
from planner.runtime.data import Batch
from planner.runtime.metrics import live_bytes
from planner.runtime.settings import TrainSettings
from planner.runtime.train import Trainer


def really(path: str) -> dict[str, Any]:
    """Four steps of a plan: what the tracer sees of the second, on real tensors; and bytes that the allocator's own events tell of
    the others."""
    plan = Plan.load(path)
    job, layout = plan.job(), plan.layout_object
    settings = TrainSettings(seq_len=job.seq_len, global_batch=job.global_batch, precision=job.precision)
    trainer = Trainer(job.model, layout, settings, torch.device("cpu"))
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
    allocated = 0
    for number in range(2, 4):
        alive = live_bytes()
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            trainer.step(number, batch())
        allocated = max(allocated, alive + allocated_by_tensors(profile))
    calls = Counter((call.axis, call.kind, call.ranks, call.bytes) for call in tracer.record.calls)
    record = tracer.record
    answer = {"rank": dist.get_rank(), "allocated": allocated, "peak": record.peak_bytes, "bytes": record.at_peak}
    return {**answer, "calls": [[*call, count] for call, count in sorted(calls.items())], "library": record.library}


def allocated_by_tensors(profile: torch.autograd.profiler.profile) -> int:
    """Most bytes allocated and not freed at once, outside the runtime's own operations: on a CPU their kernels widen blocks of rows
    meanwhile, which CUDA's do not."""
    assert profile.kineto_results is not None
    events = profile.kineto_results.events()
    inside = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name().startswith("axisplan::"))
    starts = [start for start, _ in inside]
    alive = most = 0
    for at, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):  # type: ignore[attr-defined]
        place = bisect_right(starts, at) - 1
        if place < 0 or at > inside[place][1]:
            most = max(most, alive, alive + size)
        alive += size
    return most
