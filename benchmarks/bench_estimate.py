"""Speed of one estimate and of the bulk bounds: ``python benchmarks/bench_estimate.py``. CPU seconds, best of several runs."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from cost_models.bounds import bulk_lower_bounds
from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.memory import stage_memory
from cost_models.passes import _unit, unit_cost
from cost_models.step import estimate
from profiles.hardware import load_cluster
from profiles.huggingface import load_model


def best(run: Callable[[], object], times: int = 20) -> float:
    """Least CPU milliseconds of ``times`` runs."""
    spent = []
    for _ in range(times):
        start = time.process_time()
        run()
        spent.append(time.process_time() - start)
    return 1e3 * min(spent)


def fresh(job: Job, layout: Layout, detail: bool) -> None:
    """One estimate whose layer prices are not cached."""
    _unit.cache_clear()
    unit_cost.cache_clear()
    estimate(job, layout, detail=detail)


def main() -> None:
    cases = (
        ("llama-3.1-8b", "h100-sxm:1x8", 128, "dp=8"),
        ("llama-3.1-70b", "h100-sxm:8x8", 256, "tp=4,pp=4,vpp=5,dp=4"),
        (
            "llama-3.1-405b",
            "h100-sxm:64x8",
            252,
            "tp=8,pp=8,vpp=6,stages=" + "|".join(["3"] * 15 + ["2"] * 15 + ["3"] * 17 + ["0"]),
        ),
        ("deepseek-v3", "h100-sxm:32x8", 1024, "tp=1,pp=8,ep=32"),
    )
    for model, cluster, batch, text in cases:
        spec = load_cluster(cluster)
        job = Job(load_model(model), spec, load_execution("megatron"), 8192, batch)
        layout = Layout.parse(text, spec.gpus)
        actions = 2 * layout.chunks * layout.microbatches(batch)
        warm = best(lambda job=job, layout=layout: estimate(job, layout, detail=False))  # type: ignore[misc]
        cold = best(lambda job=job, layout=layout: fresh(job, layout, False), 5)  # type: ignore[misc]
        whole = best(lambda job=job, layout=layout: (stage_memory.cache_clear(), estimate(job, layout)), 5)  # type: ignore[misc]
        figures = f"{warm:6.2f} ms time, {whole:6.2f} ms with memory, {cold:6.2f} ms nothing cached"
        print(f"{model:16s} {text[:32]:32s} {actions:6d} actions: {figures}")
    job = Job(load_model("llama-3.1-70b"), load_cluster("h100-sxm:64x8"), load_execution("megatron"), 8192, 512)
    rng = np.random.default_rng(0)
    count = 20000
    tp, pp = 2 ** rng.integers(0, 4, count), 2 ** rng.integers(0, 5, count)
    micro = 2 ** rng.integers(0, 3, count)
    spent = best(lambda: bulk_lower_bounds(job, tp=tp, pp=pp, micro_batch=micro, dp=512 // (tp * pp)), 5)
    print(f"bulk lower bounds: {count / spent * 1e3:,.0f} layouts a second")


if __name__ == "__main__":
    main()
