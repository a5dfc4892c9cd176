"""What a run measures of itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

WATCHED = 2
"""Steps whose allocations are recorded on a CPU: the second is the first that begins with the optimizer's state."""


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

    def peak_of_all(self) -> int:
        """The worst rank's peak."""
        peak = torch.tensor([self.peak()], dtype=torch.int64, device=self.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        return int(peak)


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
