"""Many layouts at once: exact memory, and the lower bounds on seconds and bytes that the planner cuts with; layouts a second, on one core.

OMP_NUM_THREADS=1 python benchmarks/bench_bulk.py
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.memory import stage_memory
from cost_models.memory_bulk import device_bytes
from planner.search import Search
from planner.space import Space
from profiles.errors import InputError
from profiles.hardware import load_cluster
from profiles.huggingface import load_model


def layouts(job: Job, gpus: int) -> list[Layout]:
    """Every product of a few degrees that the job's batch divides into."""
    moe = job.model.moe is not None
    out = []
    for tp, pp, cp, ep, mb, zero, replicas in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8), (1, 3), (1, 2, 4)
    ):
        try:
            fields = {
                "tp": tp,
                "pp": pp,
                "cp": cp,
                "ep": ep if moe else 1,
                "micro_batch": mb,
                "zero": zero,
                "dp_replicate": replicas,
            }
            layout = Layout.derive(fields, gpus)
        except InputError:
            continue
        if layout.microbatches(job.global_batch) >= 1:
            out.append(layout)
    return list(dict.fromkeys(out))


def exact(name: str) -> str:
    """Memory of many layouts of a job, together and one by one."""
    job = Job(load_model(name), load_cluster("h100-sxm:64x8"), load_execution("megatron"), 4096, 1024)
    many = layouts(job, 512)
    bulk = spent(lambda: device_bytes(job, many))
    some = many[:: max(1, len(many) // 100)]
    single = spent(lambda: [stage_memory(job, layout) for layout in some]) / len(some)
    return f"{name}: memory of {len(many):,} layouts at once {len(many) / bulk:,.0f}/s, one by one {1e3 * single:.2f} ms"


def bounds(name: str, cluster: str) -> str:
    """The planner's lower bounds for every row (degrees and micro batch) of a job's space."""
    job = Job(load_model(name), load_cluster(cluster), load_execution("megatron"), 4096, 4096)
    rows = Search(job, Space(job)).rows
    keys, count = len(rows.keys), len(rows)
    seconds = spent(lambda: rows.bulk)
    bytes_ = spent(lambda: rows.bytes)
    modes = len(rows.modes)
    return (
        f"{name}: {count:,} rows with {keys:,} microbatches x {modes} recompute choices: seconds {count / seconds:,.0f} rows/s "
        f"({keys / seconds:,.0f} microbatches/s), bytes {count / bytes_:,.0f} rows/s"
    )


def spent(run: Callable[[], object]) -> float:
    """CPU seconds of one run."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    for name in ("llama-3.1-70b", "qwen3-30b-a3b", "deepseek-v3"):
        print(exact(name))
    for name, cluster in (("llama-3.1-70b", "h100-sxm:64x8"), ("deepseek-v3", "h800-sxm:256x8")):
        print(bounds(name, cluster))


if __name__ == "__main__":
    main()
