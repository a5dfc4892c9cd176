"""Memory one by one and in bulk: milliseconds a layout, layouts a second, on one core.

OMP_NUM_THREADS=1 python benchmarks/bench_memory.py
"""

from __future__ import annotations

import itertools
import time

from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.memory import stage_memory
from cost_models.memory_bulk import device_bytes, grouped, least_device_bytes
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


def main() -> None:
    for name in ("llama-3.1-70b", "qwen3-30b-a3b", "deepseek-v3"):
        job = Job(load_model(name), load_cluster("h100-sxm:64x8"), load_execution("megatron"), 4096, 1024)
        many = layouts(job, 512)
        start = time.perf_counter()
        device_bytes(job, many)
        bulk = time.perf_counter() - start
        groups = grouped(job, many)
        start = time.perf_counter()
        for arrays, _, _ in groups:
            least_device_bytes(job, arrays)
        bound = time.perf_counter() - start
        some = many[:: max(1, len(many) // 100)]
        start = time.perf_counter()
        for layout in some:
            stage_memory(job, layout)
        single = (time.perf_counter() - start) / len(some)
        print(
            f"{name}: {len(many)} layouts, {len(groups)} groups: exact {len(many) / bulk:,.0f}/s, lower bounds "
            f"{len(many) / bound:,.0f}/s, one by one {1e3 * single:.2f} ms"
        )


if __name__ == "__main__":
    main()
