"""A worker's part of ``measure_links``: collectives timed in step with the other ranks of its world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from profiles.errors import one_line
from profiles.measure.bench import Report
from profiles.measure.gpu_worker import device_facts
from profiles.measure.kernels import usable_bytes
from profiles.measure.samples import Sample
from profiles.measure.timing import Timing, clock_of, overtime
from profiles.measure.together import Together
from profiles.operations import Collective

Groups = Sequence[Sequence[int]]
REPEATS = 5
FEWEST_SIZES = 4
"""Message sizes without which no curve can be fitted: they are taken even over budget (as is one of two axes at once)."""
LONGEST_SHARE = 0.05
"""A single call may take this share of the budget; larger messages are then left out."""
MEMORY_SHARE = 0.2
"""Of a worker's usable memory, how much one message's buffers may take."""


def measure_here(
    device: torch.device, together: Together, *, report: Report, axes: Mapping[str, Groups], kinds: Sequence[str],
    sizes: Sequence[int], budget_seconds: float, alone: bool = True, pairs: Sequence[Sequence[str]] = (),
) -> None:  # fmt: skip
    """Measures in step with the other workers of the default process group; rank 0's records go to ``report``."""
    report(
        {
            "type": "facts",
            "facts": {
                **device_facts(device, together.size),
                "backend": "nccl" if device.type == "cuda" else "gloo",
                "world": together.size,
            },
        }
    )
    room = MEMORY_SHARE * min(together.gather(usable_bytes(device, together.size)[1]))
    world = list(range(together.size))
    made = {
        name: [dist.group.WORLD if list(g) == world else dist.new_group(list(g)) for g in groups] for name, groups in axes.items()
    }
    plan = list(candidates(axes, kinds, sizes, alone=alone, pairs=pairs))
    wire = _Wire(device, together)
    start = wire.clock.now()
    reached: dict[tuple[str, str, str, int], tuple[float, float]] = {}
    counts: Counter[tuple[str, str, str, int]] = Counter()
    for index, sample in enumerate(plan):
        op = sample.operation
        assert isinstance(op, Collective)
        curve = (op.axis, sample.beside, op.kind, sample.groups)
        bytes_before, seconds_before = reached.get(curve, (op.bytes, 0.0))
        spent = wire.clock.now() - start
        left = budget_seconds - spent
        least = 1 if sample.beside else FEWEST_SIZES
        open_ = left > 0 or (counts[curve] < least and spent < overtime(budget_seconds))
        expected = seconds_before + max(op.bytes - bytes_before, 0) * _slope(bytes_before, seconds_before)
        share = max(min(budget_seconds / len(plan), 3 * left / (len(plan) - index)), 0.0)
        go, share = together.gather(
            (open_ and expected <= max(LONGEST_SHARE * budget_seconds, share) and 2 * op.bytes <= room, share)
        )[0]
        if not go:
            continue
        done = wire.time(sample, axes, made, share)
        if not done.failed:
            counts[curve] += 1
            if op.bytes >= bytes_before:
                reached[curve] = (op.bytes, done.seconds)
        elapsed = min((wire.clock.now() - start) / budget_seconds, 1.0)
        report({"type": "sample", "section": "links", "done": elapsed, "sample": done.to_json()})


def _slope(size: float, seconds: float) -> float:
    """Seconds a further byte may cost, seen from a message of ``size``: as there, or 1/(0.2 GB/s) where that was latency."""
    return seconds / size if size >= 1 << 20 else min(seconds / size, 5e-9)


PAIRED = (1 << 20, 1 << 26)
"""Smallest and largest message of two axes at once: latency does not contend, and larger ones say the same in more time."""


def candidates(
    axes: Mapping[str, Groups],
    kinds: Sequence[str],
    sizes: Sequence[int],
    *,
    alone: bool = True,
    pairs: Sequence[Sequence[str]] = (),
) -> Iterator[Sample]:
    """What to time, size by size. Point-to-point messages only over the smallest groups. ``alone``: one group of an axis by itself
    as well as all of them at once. ``pairs``: axes whose groups also communicate at the same time, in the first of ``kinds``."""
    smallest = min(len(groups[0]) for groups in axes.values())
    for size in in_order(sizes):
        for name, groups in axes.items():
            ranks, stride = len(groups[0]), groups[0][1] - groups[0][0]
            for kind in kinds:
                if kind == "send_recv" and ranks > smallest:
                    continue
                for active in sorted({1, len(groups)} if alone else {len(groups)}, reverse=True):
                    yield Sample(Collective(kind, name, whole(size, ranks)), ranks=ranks, stride=stride, groups=active)
        for first, second in pairs if PAIRED[0] <= size <= PAIRED[1] else ():
            ranks, groups = len(axes[first][0]), axes[first]
            op = Collective(kinds[0], first, whole(size, ranks))
            yield Sample(op, ranks=ranks, stride=groups[0][1] - groups[0][0], groups=len(groups), beside=second)


def in_order(sizes: Sequence[int]) -> list[int]:
    """The smallest, the largest, then those between, halving the gaps and large ones first: every prefix spans the range."""
    ordered = sorted(sizes)
    places = [0]
    step = max(1, len(ordered) - 1)
    while len(places) < len(ordered):
        places += [p for p in reversed(range(0, len(ordered), step)) if p not in places]
        step = max(1, step // 2)
    return [ordered[p] for p in places]


def whole(size: int, ranks: int) -> int:
    """``size`` bytes as whole 4-byte elements for each of ``ranks``."""
    return max(1, -(-size // (4 * ranks))) * 4 * ranks


class _Wire:
    """One worker's stopwatch for collectives."""

    def __init__(self, device: torch.device, together: Together) -> None:
        self.device, self.together, self.clock = device, together, clock_of(device)

    def time(self, sample: Sample, axes: Mapping[str, Groups], made: Mapping[str, Sequence[Any]], budget_seconds: float) -> Sample:
        """Times the sample in the first ``sample.groups`` groups of its axis at once, and in all those of the axis ``beside`` it; a
        repeat lasts as long as its slowest rank."""
        op = sample.operation
        problem, starts = "", []
        try:
            starts += self._start(op, axes[op.axis][: sample.groups], made[op.axis])
            if sample.beside:
                second = axes[sample.beside]
                starts += self._start(replace(op, bytes=whole(op.bytes, len(second[0]))), second, made[sample.beside])
        except RuntimeError as error:
            problem = one_line(error)[:160]
        problems = [p for p in self.together.gather(problem) if p]
        if problems:
            return replace(sample, failed=problems[0])
        call = partial(finish, starts) if starts else None
        self._run(call, 1)
        once = max(self.together.gather(self._run(call, 1)))
        calls = max(1, min(1000, int(budget_seconds / REPEATS / max(once, 1e-7))))
        times = []
        for _ in range(REPEATS):
            self.together.gather(None)
            times.append(self._run(call, calls) / calls)
        slowest = [max(repeat) for repeat in zip(*self.together.gather(times), strict=True)]
        return sample.timed(Timing(tuple(slowest), calls * REPEATS))

    def _start(self, op: Any, groups: Groups, handles: Sequence[Any]) -> list[Start]:
        """What starts ``op`` in this rank's group, if it is in one."""
        mine = next((i for i, group in enumerate(groups) if self.together.rank in group), None)
        return [] if mine is None else [start(op, list(groups[mine]), handles[mine], self.device)]

    def _run(self, call: Callable[[], object] | None, calls: int) -> float:
        return self.clock.run(call, calls) if call else 0.0


Start = Callable[[], list[Any]]
"""Begins a collective; what it returns is waited for."""


def finish(starts: Sequence[Start]) -> None:
    """Begins every collective, then waits for all of them."""
    for work in [work for begin in starts for work in begin()]:
        work.wait()


def collective(op: Any, group: list[int], handle: Any, device: torch.device) -> Callable[[], object]:
    """The call of ``op`` in process group ``handle`` of ranks ``group``, its buffers allocated."""
    return partial(finish, [start(op, group, handle, device)])


def start(op: Any, group: list[int], handle: Any, device: torch.device) -> Start:
    """What begins ``op`` in process group ``handle`` of ranks ``group``, its buffers allocated."""
    ranks, count = len(group), int(op.bytes) // 4
    full = torch.ones(count, device=device)
    if op.kind == "all_reduce":
        full.zero_()
        return lambda: [dist.all_reduce(full, group=handle, async_op=True)]
    if op.kind == "broadcast":
        return lambda: [dist.broadcast(full, src=group[0], group=handle, async_op=True)]
    if op.kind == "all_gather":
        part = torch.ones(count // ranks, device=device)
        return lambda: [dist.all_gather_into_tensor(full, part, group=handle, async_op=True)]
    if op.kind == "reduce_scatter":
        part = torch.ones(count // ranks, device=device)
        return lambda: [dist.reduce_scatter_tensor(part, full, group=handle, async_op=True)]
    other = torch.empty_like(full)
    if op.kind == "all_to_all":
        return lambda: [dist.all_to_all_single(other, full, group=handle, async_op=True)]
    place = group.index(dist.get_rank())
    ahead, behind = group[(place + 1) % ranks], group[(place - 1) % ranks]

    def exchange() -> list[Any]:
        both = [dist.P2POp(dist.isend, full, ahead, group=handle), dist.P2POp(dist.irecv, other, behind, group=handle)]
        return list(dist.batch_isend_irecv(both))

    return exchange
