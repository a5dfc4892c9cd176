"""How long the pipeline simulator takes, CPU milliseconds: building a schedule's graph, one simulation, its critical path.

``python benchmarks/bench_pipeline.py``. Actions are the chunk operations of the whole schedule; beyond 2,000 a shorter run is
simulated and its steady state extrapolated exactly ("nodes" says how many were walked).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cost_models.dependencies import graph
from cost_models.pipeline import seed_paths, simulate
from cost_models.schedules import in_flight, order_rows, order_table

CASES = [
    ("1f1b", 8, 1, 32), ("1f1b", 8, 1, 125), ("1f1b", 16, 1, 512), ("1f1b", 16, 1, 16384), ("interleaved", 8, 4, 32),
    ("interleaved", 16, 8, 512), ("zb-h1", 8, 1, 80), ("zb-v", 8, 2, 40), ("dualpipe", 16, 1, 64), ("dualpipe-v", 8, 2, 48),
]  # fmt: skip


def cpu(work: Callable[[], object], times: int = 1) -> float:
    """CPU milliseconds of one call."""
    start = time.process_time()
    for _ in range(times):
        work()
    return 1e3 * (time.process_time() - start) / times


def main() -> None:
    print(
        f"{'schedule':12s}{'pp':>4s}{'vpp':>4s}{'m':>7s}{'actions':>9s}{'nodes':>8s}{'first':>9s}{'again':>9s}{'path':>9s}{'seeds':>9s}"
    )
    for schedule, pp, vpp, m in CASES:
        chunks = pp * vpp
        durations = [[1.0 + 0.01 * (c % 3) for c in range(chunks)], [1.1] * chunks, [0.9] * chunks]
        for cached in (order_rows, order_table, graph, seed_paths, in_flight):
            cached.cache_clear()
        first = cpu(lambda: simulate(schedule, pp, vpp, m, *durations, 0.1))  # noqa: B023
        again = cpu(lambda: simulate(schedule, pp, vpp, m, *durations, 0.1), 20)  # noqa: B023
        line = simulate(schedule, pp, vpp, m, *durations, 0.1)
        path = cpu(lambda: line.path)  # noqa: B023
        seeds = cpu(lambda: seed_paths(schedule, pp, vpp, m))  # noqa: B023
        actions = (2 if schedule in ("1f1b", "interleaved") else 3) * m * chunks
        print(
            f"{schedule:12s}{pp:4d}{vpp:4d}{m:7d}{actions:9d}{len(line._times):8d}{first:9.2f}{again:9.2f}{path:9.2f}{seeds:9.2f}"
        )


if __name__ == "__main__":
    main()
