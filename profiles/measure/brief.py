"""A brief look at every rank of a job that is about to start: its device, and its groups' collectives, each rank on its own clock.

``measure_gpu`` and ``measure_links`` pool what they find into one profile; here every rank keeps its own figures, so that the slow one
can be named.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from profiles.errors import one_line
from profiles.measure.gpu_worker import device_facts
from profiles.measure.kernels import build, usable_bytes
from profiles.measure.link_worker import collective
from profiles.measure.samples import Sample
from profiles.measure.timing import clock_of, time_batches, warm
from profiles.measure.together import Together
from profiles.operations import Collective

REPEATS = 5


def where_am_i(device: torch.device) -> dict[str, Any]:
    """Host, device and memory of this rank."""
    facts = device_facts(device, 1)
    return {"host": platform.node(), "device": facts["name"], "memory": usable_bytes(device, 1)[0]}


def time_devices(samples: Sequence[Sample], device: torch.device, together: Together, budget_seconds: float) -> list[float | str]:
    """Seconds of each sample on this rank while all ranks do the same, or why it has none."""
    clock = clock_of(device)
    out: list[float | str] = []
    for sample in samples:
        try:
            call = build(sample.operation, sample.form, device)
            calls = warm(call, clock)
            together.gather(None)
            out.append(time_batches(call, calls, clock, budget_seconds=budget_seconds / len(samples)).seconds)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            together.gather(None)
            out.append(one_line(error)[:160])
    return out


def time_collective(
    op: Collective, group: Sequence[int], device: torch.device, together: Together, budget_seconds: float
) -> float | str:
    """Seconds of ``op`` in this rank's ``group`` while the other ranks' groups do the same, or why it failed.

    Every rank of the world calls this for the axis; only a group's own ranks make it.
    """
    clock = clock_of(device)
    call, problem = None, ""
    try:
        handle: Any = dist.group.WORLD
        if len(group) < together.size:
            handle = dist.new_group(list(group), use_local_synchronization=True)
        call = collective(op, list(group), handle, device)
        clock.run(call, 1)
    except RuntimeError as error:
        problem = one_line(error)[:160]
    broken = [p for p in together.gather(problem) if p]
    if broken or call is None:
        return problem or broken[0]
    once = max(together.gather(clock.run(call, 1)))
    calls = max(1, min(200, int(budget_seconds / REPEATS / max(once, 1e-7))))
    times = []
    for _ in range(REPEATS):
        together.gather(None)
        times.append(clock.run(call, calls) / calls)
    return sorted(times)[REPEATS // 2]


def time_pairs(
    size: int, group: Sequence[int], device: torch.device, together: Together, budget_seconds: float
) -> dict[int, float]:
    """Seconds that an exchange of ``size`` bytes takes with each of this rank's two neighbours in its group, by neighbour.

    Pairs take turns, so that each message has its ranks for itself: what a slow ring cannot tell, which of its links is slow.
    """
    clock = clock_of(device)
    place, ranks = list(group).index(together.rank), len(group)
    full = torch.ones(max(1, size // 4), device=device)
    other = torch.empty_like(full)
    out: dict[int, float] = {}
    for turn in (0, 1):
        mate = place ^ 1 if turn == 0 else place + (1 if place % 2 else -1)
        if turn and ranks % 2 == 0:
            mate %= ranks
        peer = group[mate] if 0 <= mate < ranks else None
        together.gather(None)
        if peer is None:
            continue

        def exchange(peer: int = peer) -> None:
            for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, full, peer), dist.P2POp(dist.irecv, other, peer)]):
                request.wait()

        exchange()
        once = clock.run(exchange, 1)
        calls = max(1, min(50, int(budget_seconds / 4 / max(once, 1e-7))))
        # Both ends must exchange as often: the lower rank says how often.
        count = torch.tensor([calls], device=device)
        if together.rank < peer:
            dist.send(count, peer)
        else:
            dist.recv(count, peer)
        calls = int(count)
        out[peer] = clock.run(exchange, calls) / calls
    return out
