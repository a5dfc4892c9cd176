"""Repeated timings: warm-up, batches long enough for the clock, the median of repeats and how far they spread.

A repeat is a *mean* over a stretch of calls, because on a machine with more workers than cores a single call is either left alone
or interrupted, and only the mean of many is what training will see; the *median* of the repeats then sheds the odd disturbance.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

BATCH_SECONDS = 1e-3
"""A batch of calls lasts at least this long: some thousand times the resolution of either clock."""
QUIET_SPREAD = 0.10
"""Interquartile range over median below which a machine counts as quiet."""
BUSY_SHARE = 0.10
"""Of the cores, what others may use before measuring starts."""
SHARED_SPREAD = 0.30
"""The same where more threads measure than there are cores, so that the scheduler's turns show."""

OVERTIME, LEAST_OVERTIME_SECONDS = 2.5, 45.0
"""How far a budget may be exceeded to measure what a fit needs at least: this many times, and this long however short it was."""


def overtime(budget_seconds: float) -> float:
    """Seconds after which measuring ends though something is lacking."""
    return max(OVERTIME * budget_seconds, LEAST_OVERTIME_SECONDS)


STARTUP_SECONDS = 90.0
"""What workers may take to start, above the budget."""


def patience(budget_seconds: float, parts: int = 1) -> float:
    """Seconds after which workers are ended that measure ``parts`` things within a budget, each of which may run over it."""
    return STARTUP_SECONDS + 3 * budget_seconds + parts * LEAST_OVERTIME_SECONDS


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call of each repeat."""

    repeats: tuple[float, ...]
    calls: int = 1

    @property
    def seconds(self) -> float:
        """Median of the repeats."""
        return statistics.median(self.repeats)

    @property
    def low(self) -> float:
        return self._quartiles()[0]

    @property
    def high(self) -> float:
        return self._quartiles()[1]

    @property
    def spread(self) -> float:
        """Interquartile range over median."""
        low, high = self._quartiles()
        return (high - low) / self.seconds if self.seconds > 0 else 0.0

    def _quartiles(self) -> tuple[float, float]:
        if len(self.repeats) < 2:
            return self.repeats[0], self.repeats[0]
        first, _, third = statistics.quantiles(self.repeats, n=4, method="inclusive")
        return first, third


def pooled(timings: Sequence[Timing]) -> Timing:
    """The timings of several workers that did the same thing at once, as one: repeat by repeat the harmonic mean.

    That is workers x time / calls done by all: what one worker gets while another is kept waiting evens out.
    """
    return Timing(
        tuple(statistics.harmonic_mean(r) for r in zip(*(t.repeats for t in timings), strict=False)), sum(t.calls for t in timings)
    )


class Clock(Protocol):
    """Runs a function and says how long it took, work on the device included."""

    def run(self, function: Callable[[], object], calls: int) -> float:
        """Seconds that ``calls`` calls in a row take."""
        ...

    def now(self) -> float:
        """Seconds on the host's monotonic clock."""
        ...


class HostClock:
    """``time.perf_counter``: right where a call returns only when its work is done (CPU)."""

    def __init__(self, timer: Callable[[], float] = time.perf_counter) -> None:
        self.now = timer

    def run(self, function: Callable[[], object], calls: int) -> float:
        start = self.now()
        for _ in range(calls):
            function()
        return self.now() - start


class CudaClock:
    """CUDA events around the calls, on the current stream."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch, self._device = torch, device
        self.now = time.perf_counter

    def run(self, function: Callable[[], object], calls: int) -> float:
        cuda = self._torch.cuda
        first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize(self._device)
        first.record()
        for _ in range(calls):
            function()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3


def clock_of(device: Any) -> Clock:
    """The clock of a ``torch.device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def warm(function: Callable[[], object], clock: Clock, *, warmup: int = 1) -> int:
    """Calls ``function`` until it is warm; how many calls make a batch of ``BATCH_SECONDS``."""
    for _ in range(warmup):
        clock.run(function, 1)
    calls = 1
    while True:
        seconds = clock.run(function, calls)
        if seconds >= BATCH_SECONDS or calls >= 1 << 20:
            return calls
        growth = BATCH_SECONDS / seconds * 1.3 if seconds > 0 else 16.0
        calls = int(min(calls * 16, max(calls * 2, calls * growth)))


def time_batches(function: Callable[[], object], calls: int, clock: Clock, *, budget_seconds: float, repeats: int = 7) -> Timing:
    """Times batches of ``calls`` calls until ``budget_seconds`` are over (at least three), gathered into ``repeats`` means."""
    batches: list[float] = []
    end = clock.now() + budget_seconds
    while len(batches) < 3 or clock.now() < end:
        batches.append(clock.run(function, calls) / calls)
    parts = min(repeats, len(batches))
    bounds = [round(i * len(batches) / parts) for i in range(parts + 1)]
    means = tuple(statistics.fmean(batches[a:b]) for a, b in pairwise(bounds))
    return Timing(means, calls * len(batches))


def time_calls(function: Callable[[], object], clock: Clock, *, budget_seconds: float = 0.25, repeats: int = 7) -> Timing:
    """Seconds a call of ``function`` takes once warm: ``repeats`` repeats within about ``budget_seconds``, more for a slow call."""
    return time_batches(function, warm(function, clock), clock, budget_seconds=budget_seconds, repeats=repeats)


@dataclass(frozen=True, slots=True)
class Noise:
    """How steady the machine was: the median spread of all timings, the share of its cores that others kept busy just before
    measuring began, and how many threads measured on how many cores."""

    spread: float
    others: float = 0.0
    cores: int = 1
    threads: int = 1

    @property
    def limit(self) -> float:
        return QUIET_SPREAD if self.threads <= self.cores else SHARED_SPREAD

    @property
    def noisy(self) -> bool:
        return self.spread > self.limit or self.others > BUSY_SHARE

    def __str__(self) -> str:
        text = f"the middle half of a timing's repeats spans {100 * self.spread:.0f} % of its median"
        text += f" (quiet: below {100 * self.limit:.0f} % with {self.threads} threads on {self.cores} cores)"
        if not self.noisy:
            return f"quiet machine: {text}"
        return (
            f"NOISY machine: {text}; others kept {100 * self.others:.0f} % of the cores busy. Measure again when nothing else runs"
        )


def others_busy(seconds: float = 0.25) -> float:
    """Share of the cores that is busy (0 to 1) while this process waits ``seconds``; 0 where the system does not say."""
    before = _busy()
    time.sleep(seconds)
    after = _busy()
    if before is None or after is None or after[1] <= before[1]:
        return 0.0
    return min(max((after[0] - before[0]) / (after[1] - before[1]), 0.0), 1.0)


def _busy() -> tuple[float, float] | None:
    """(busy, all) ticks of all cores since boot, from Linux's /proc/stat."""
    try:
        with open("/proc/stat") as lines:
            ticks = [float(t) for t in lines.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def noise(spreads: Sequence[float], *, others: float = 0.0, threads: int = 1, cores: int | None = None) -> Noise:
    """What the spreads of timings say of the machine (0 when there are none)."""
    return Noise(statistics.median(spreads) if spreads else 0.0, others, cores or os.cpu_count() or 1, threads)
