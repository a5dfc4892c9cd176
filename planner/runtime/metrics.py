"""What a run measures of itself."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist


class Memory:
    """Peak bytes of a rank since this object was made: the CUDA allocator's, or on a CPU the process's growth (peak resident set
    size beyond what was resident before, which holds the interpreter and its libraries)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._before = _resident_bytes()

    def peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self._before)

    def peak_of_all(self) -> int:
        """The worst rank's peak."""
        peak = torch.tensor([self.peak()], dtype=torch.int64, device=self.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        return int(peak)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
