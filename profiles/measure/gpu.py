"""Measures one GPU, or one CPU process among as many as will train: ``measure_gpu`` -> samples -> fit -> ``GpuProfile``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from profiles.errors import AxisplanError, InputError
from profiles.hardware import GpuProfile
from profiles.measure import fitting, judging
from profiles.measure.samples import Sample
from profiles.measure.timing import noise, others_busy, patience
from profiles.measure.together import Alone

Progress = Callable[[float, str], None]
"""Called with the share done (0 to 1) and what was measured last."""
DTYPES = ("fp32", "bf16", "fp16", "fp8", "tf32", "fp64")
FEWEST_JUDGES = 5
"""Held-out products of a dtype whose median error says something."""


@dataclass
class GpuMeasurement(judging.Measured):
    """What ``measure_gpu`` found. ``profile`` is None where too little was measured before an interruption."""

    profile: GpuProfile | None = None

    @property
    def rough(self) -> str:
        """Why the profile is a rough one; empty where it is not: too few shapes were left to judge the fit by."""
        if self.profile is None:
            return ""
        judges = {d: e.count if (e := self.held_out.get(f"matmul {d}")) else 0 for d in self.profile.matmul}
        poor = [f"{dtype} ({count})" for dtype, count in judges.items() if count < FEWEST_JUDGES]
        few = f"fewer than {FEWEST_JUDGES} shapes judge the fit of {', '.join(poor)}"
        return f"ROUGH profile: {few}; measure for longer (--seconds)" if poor else ""


class Collector:
    """Gathers the records of a measurement, passes progress on, and holds what there is when it is interrupted."""

    def __init__(self, progress: Progress | None, first: float = 0.0, last: float = 1.0) -> None:
        self.samples: list[Sample] = []
        self.facts: dict[str, Any] = {}
        self._progress, self._first, self._last = progress, first, last

    def __call__(self, record: dict[str, Any]) -> None:
        if record["type"] == "sample":
            self.samples.append(Sample.from_json(record["sample"]))
            if self._progress:
                self._progress(self._first + (self._last - self._first) * record["done"], describe(self.samples[-1]))
        elif record["type"] == "facts":
            self.facts.update(record["facts"])


def describe(sample: Sample) -> str:
    """A sample in a few words, for a progress bar."""
    op: Any = sample.operation
    name = type(op).__name__
    if name == "Matmul":
        text = f"{op.dtype} {op.m} x {op.n} x {op.k}"
    elif name == "Attend":
        text = f"attention {'backward' if op.backward else 'forward'} {op.dtype} {op.q_len} tokens, {op.heads} x {op.qk_dim}"
    elif name == "Pointwise":
        text = f"{sample.form} {op.bytes / 2**20:.0f} MiB"
    else:
        text = f"{op.kind.replace('_', '-')} over {sample.ranks}, {op.bytes / 2**10:.0f} KiB"
    return f"{text}: {sample.failed}" if sample.failed else text


def measure_gpu(
    device: str | None = None,
    dtypes: Sequence[str] | None = None,
    *,
    budget_seconds: float = 60.0,
    progress: Progress | None = None,
    processes: int = 1,
    threads: int = 1,
) -> GpuMeasurement:
    """Measures and fits this machine's device (``cuda`` where there is one, else ``cpu``).

    ``processes`` workers measure at the same time, each on its GPU or with its ``threads`` of the CPU (one is
    what torchrun gives), as they will train.
    An interruption (Ctrl-C) returns what was measured until then. Raises InputError for unknown dtypes or devices, AxisplanError
    where workers fail or nothing could be fitted.
    """
    device, dtypes = check(device, dtypes, processes, budget_seconds)
    job = {"dtypes": list(dtypes), "budget_seconds": budget_seconds}
    collector, others = Collector(progress), others_busy()
    interrupted = False
    try:
        if processes == 1:
            _measure_alone(device, threads, collector, job)
        else:
            from profiles.measure.launch import run_workers

            everything = {"device": device, "gpu": job}
            run_workers(
                everything,
                processes,
                timeout_seconds=patience(budget_seconds),
                on_record=collector,
                threads=threads,
            )
    except KeyboardInterrupt:
        interrupted = True
    return finish(collector, processes=processes, threads=threads, interrupted=interrupted, others=others)


def inside_torchrun() -> bool:
    """Whether this process is one of a world that somebody else started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def workers(processes: int | None, device: str) -> int:
    """How many measure at once: torchrun's world, else ``processes``, else one for each GPU (4 on a CPU). ``device`` as ``check``
    returns it."""
    import torch

    if inside_torchrun():
        return int(os.environ["WORLD_SIZE"])
    return processes or (torch.cuda.device_count() if device == "cuda" else 4)


def check(device: str | None, dtypes: Sequence[str] | None, processes: int, budget_seconds: float) -> tuple[str, tuple[str, ...]]:
    """The device and dtypes to measure; InputError for what cannot be."""
    import torch

    if device not in (None, "auto", "cpu", "cuda"):
        raise InputError("device", device, "is one of auto, cpu, cuda", "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device", "cuda", "torch sees no CUDA device here", "cpu")
    if processes < 1:
        raise InputError("processes", processes, "at least one", 1)
    if budget_seconds <= 0:
        raise InputError("budget_seconds", budget_seconds, "must be positive", 10)
    chosen = "cuda" if device in (None, "auto") and torch.cuda.is_available() else device or "cpu"
    chosen = "cpu" if chosen == "auto" else chosen
    if chosen == "cuda" and processes > torch.cuda.device_count():
        raise InputError("processes", processes, f"one for each of the {torch.cuda.device_count()} GPUs", torch.cuda.device_count())
    for dtype in dtypes or ():
        if dtype not in DTYPES:
            raise InputError("dtypes", dtype, f"is one of {', '.join(DTYPES)}", "bf16")
    default = ("fp32", "bf16") if chosen == "cpu" else ("bf16", "fp16", "tf32", "fp32", "fp8")
    return chosen, tuple(dict.fromkeys(dtypes)) if dtypes else default


def _measure_alone(device: str, threads: int, collector: Collector, job: dict[str, Any]) -> None:
    import torch

    from profiles.measure.gpu_worker import measure_here

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        measure_here(torch.device("cuda", 0) if device == "cuda" else torch.device("cpu"), Alone(), report=collector, **job)
    finally:
        torch.set_num_threads(before)


def finish(collector: Collector, *, processes: int, threads: int, interrupted: bool, others: float) -> GpuMeasurement:
    """Fits what was collected. After an interruption the profile may be None; otherwise too little to fit is an AxisplanError."""
    result = GpuMeasurement(collector.samples, collector.facts, interrupted=interrupted)
    result.noise = noise([s.spread for s in collector.samples if not s.failed], others=others, threads=processes * threads)
    try:
        result.profile = fitting.gpu_profile(collector.samples, collector.facts)
        result.held_out = judging.held_out_errors(result.profile, collector.samples, collector.facts)
    except fitting.TooFew as error:
        if not interrupted:
            raise AxisplanError(f"profile: {error}; give it a longer budget") from None
    return result
