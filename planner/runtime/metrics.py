"""What a run measures of itself."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

WATCHED = 2
"""Steps whose allocations are recorded on a CPU: the second is the first that begins with the optimizer's state."""


Mark = float | torch.cuda.Event
"""A moment on a device: host seconds, or an event on the stream that computes."""


class Clock:
    """When things happen on a device: the host's clock for a CPU, events for a GPU, whose work goes on after the call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Mark, last: Mark) -> float:
        """Seconds between two marks; waits for a GPU to reach them."""
        if isinstance(first, float) or isinstance(last, float):
            return float(last) - float(first)  # type: ignore[arg-type]
        last.synchronize()
        first.synchronize()
        return float(first.elapsed_time(last)) / 1e3


class Memory:
    """Peak bytes that tensors of this rank took: the CUDA allocator's count; on a CPU those alive when a step begins and what the
    step allocates beyond them, from the allocator's own events (the step is slower for it)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._peak, self._left = 0, WATCHED

    @contextmanager
    def step(self) -> Iterator[bool]:
        """Around a step; yields whether its allocations are recorded."""
        if self.device.type == "cuda" or not self._left:
            yield False
            return
        self._left -= 1
        alive = live_bytes()
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            yield True
        self._peak = max(self._peak, alive + most_allocated(profile))

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else self._peak

    def reserved(self) -> int:
        """Most bytes that the CUDA allocator held; 0 on a CPU, whose allocator holds nothing back."""
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0


def worst_of_all(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each over all ranks."""
    worst = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.tolist()


def live_bytes() -> int:
    """Bytes of every storage that a tensor of this process holds."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def most_allocated(profile: torch.autograd.profiler.profile) -> int:
    """Most bytes allocated and not freed at once while the profile ran."""
    assert profile.kineto_results is not None
    events = [(e.start_ns(), e.nbytes()) for e in profile.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[attr-defined]
    alive = most = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        alive += size
        most = max(most, alive)
    return most
