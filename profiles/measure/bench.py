"""Times planned operations on one device, in step with the other workers, section by section within a budget.

Sections take turns by the share of the time each has had, so an interruption at any moment leaves something of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from profiles.errors import one_line
from profiles.measure.kernels import build, host_memory, needed_bytes
from profiles.measure.samples import Sample
from profiles.measure.timing import Clock, Timing, clock_of, overtime, pooled, time_batches, warm
from profiles.measure.together import Together

Report = Callable[[dict[str, Any]], None]
MEMORY_SHARE = 0.4
"""Of the host memory a worker may use, how much one candidate may take: the kernel ends a process that overdraws, unasked."""


@dataclass
class Section:
    """Candidates of one kind, the share of the budget they get, and how many a fit needs at ``least``."""

    name: str
    share: float
    samples: Iterator[Sample]
    least: int = 0
    spent: float = 0.0
    taken: int = 0
    open: bool = True


class Bench:
    """One worker's stopwatch: a device, a clock, and the others who measure at the same time."""

    def __init__(self, device: torch.device, together: Together, *, clock: Clock | None = None) -> None:
        self.device, self.together, self.clock = device, together, clock or clock_of(device)

    def time_call(
        self, make: Callable[[], Callable[[], object]], budget_seconds: float, needed: float = 0.0
    ) -> tuple[Timing | None, str]:
        """Makes a call and times it on all workers at once: (pooled timing, "") or (None, why a worker could not)."""
        problem, call, calls = self._room(needed), None, 0
        if not problem:
            try:
                call = make()
                calls = warm(call, self.clock)
            except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError) as error:
                problem = "out of memory" if _is_memory(error) else one_line(error)[:160]
                call = None
                self._forget()
        problems = [p for p in self.together.gather(problem) if p]
        if problems or call is None:
            return None, problems[0]
        timing = time_batches(call, calls, self.clock, budget_seconds=budget_seconds)
        return pooled(self.together.gather(timing)), ""

    def time_sample(self, sample: Sample, budget_seconds: float) -> Sample:
        """The sample with its time, or with why it has none."""
        op = sample.operation
        timing, problem = self.time_call(lambda: build(op, sample.form, self.device), budget_seconds, needed_bytes(op, sample.form))
        return sample.timed(timing) if timing else replace(sample, failed=problem)

    def run(self, sections: list[Section], *, budget_seconds: float, candidate_seconds: float, report: Report) -> None:
        """Times candidates until ``budget_seconds`` are spent or there are none left; rank 0's clock decides for all.

        Where a section lacks its ``least``, on a busy machine or for want of budget, it goes on for up to ``overtime``.
        """
        start = self.clock.now()
        while True:
            elapsed = self.clock.now() - start
            choice = self.together.gather(self._choose(sections, elapsed, budget_seconds))[0]
            if choice is None:
                return
            section = sections[choice]
            sample = next(section.samples, None)
            if sample is None:
                section.open = False
                continue
            began = self.clock.now()
            done = self.time_sample(sample, candidate_seconds)
            section.spent += self.clock.now() - began
            section.taken += not done.failed and not done.held_out
            elapsed = min((self.clock.now() - start) / budget_seconds, 1.0)
            report({"type": "sample", "section": section.name, "done": elapsed, "sample": done.to_json()})

    def _choose(self, sections: list[Section], elapsed: float, budget: float) -> int | None:
        late = elapsed >= budget
        waiting = [i for i, s in enumerate(sections) if s.open and (not late or s.taken < s.least)]
        if elapsed >= overtime(budget) or not waiting:
            return None
        return min(waiting, key=lambda i: sections[i].spent / sections[i].share)

    def _room(self, needed: float) -> str:
        """Why ``needed`` bytes do not fit in the host's memory; empty where they do, or where the device will say so itself."""
        if self.device.type != "cpu":
            return ""
        room = MEMORY_SHARE * host_memory()[1] / self.together.size
        return f"out of memory: needs {needed / 2**30:.2f} GiB of {room / 2**30:.2f}" if needed > room else ""

    def _forget(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _is_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error) or "out of memory" in str(error).lower()
