"""Timings with a clock of our own: what is a repeat, a median, a spread, and when a machine is noisy."""

from __future__ import annotations

import pytest

from profiles.measure.timing import HostClock, Timing, noise, others_busy, pooled, time_batches, time_calls, warm


class FakeTime:
    """A clock that only moves when work is done; ``slow`` marks the calls that take ten times as long."""

    def __init__(self, seconds: float, slow: tuple[int, ...] = ()) -> None:
        self.now, self.seconds, self.slow, self.calls = 0.0, seconds, slow, 0

    def __call__(self) -> float:
        return self.now

    def work(self) -> None:
        self.calls += 1
        self.now += self.seconds * (10 if self.calls in self.slow else 1)


def test_a_steady_call_takes_its_time_and_has_no_spread() -> None:
    fake = FakeTime(2e-3)
    timing = time_calls(fake.work, HostClock(fake), budget_seconds=0.1)
    assert timing.seconds == pytest.approx(2e-3)
    assert timing.spread == pytest.approx(0, abs=1e-9)
    assert len(timing.repeats) == 7


def test_short_calls_are_batched_until_the_clock_can_see_them() -> None:
    fake = FakeTime(1e-6)
    calls = warm(fake.work, HostClock(fake))
    assert calls * 1e-6 >= 1e-3
    assert time_batches(fake.work, calls, HostClock(fake), budget_seconds=0.02).seconds == pytest.approx(1e-6)


def test_a_call_longer_than_the_budget_is_still_timed_three_times() -> None:
    fake = FakeTime(5.0)
    timing = time_batches(fake.work, 1, HostClock(fake), budget_seconds=0.1)
    assert timing.repeats == (5.0, 5.0, 5.0)


def test_the_median_sheds_one_disturbed_repeat() -> None:
    fake = FakeTime(1e-2, slow=(12,))
    timing = time_batches(fake.work, 1, HostClock(fake), budget_seconds=0.5)
    assert timing.seconds == pytest.approx(1e-2)
    assert max(timing.repeats) > 1.1e-2


def test_workers_pool_by_what_all_of_them_got_done() -> None:
    """One worker kept waiting while the other had the core: 1 and 3 ms a call are 2 calls in 1.5 ms each, the harmonic mean."""
    assert pooled([Timing((1e-3, 2e-3)), Timing((3e-3, 2e-3))]).repeats == pytest.approx((1.5e-3, 2e-3))


def test_quartiles_of_known_repeats() -> None:
    timing = Timing((1.0, 2.0, 3.0, 4.0, 5.0))
    assert (timing.low, timing.seconds, timing.high, timing.spread) == (2.0, 3.0, 4.0, pytest.approx(2 / 3))


@pytest.mark.parametrize(
    ("spreads", "others", "threads", "noisy"),
    [
        ([0.02, 0.03, 0.5], 0.0, 1, False),
        ([0.15, 0.2, 0.3], 0.0, 1, True),
        ([0.2, 0.2, 0.2], 0.0, 4, False),  # more threads than cores: the scheduler's turns are no noise
        ([0.4, 0.4, 0.4], 0.0, 4, True),
        ([0.02], 0.6, 1, True),  # steady, but others had the cores
        ([], 0.0, 1, False),
    ],
)
def test_a_noisy_machine_is_said_to_be_noisy(spreads: list[float], others: float, threads: int, noisy: bool) -> None:
    found = noise(spreads, others=others, threads=threads, cores=2)
    assert found.noisy is noisy
    assert str(found).startswith("NOISY" if noisy else "quiet")


def test_the_share_others_use_is_a_share() -> None:
    assert 0.0 <= others_busy(0.02) <= 1.0
