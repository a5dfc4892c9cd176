"""Speed of one estimate: ``python benchmarks/bench_estimate.py``. CPU seconds, best of several runs."""

from __future__ import annotations

import time
from collections.abc import Callable

from cost_models import activations, chunks, memory, passes, units
from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.memory import stage_memory
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


CACHES = (
    passes._unit,
    passes.held_weights,
    passes.unit_weights,
    activations._remembered,
    units._cost,
    memory.stage_memory,
    chunks.chunk_detail,
)


def fresh(job: Job, layout: Layout, detail: bool) -> None:
    """One estimate of which nothing but the schedule is known."""
    for cached in CACHES:
        cached.cache_clear()
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
        whole = best(lambda job=job, layout=layout: (stage_memory.cache_clear(), estimate(job, layout)))  # type: ignore[misc]
        cold = best(lambda job=job, layout=layout: fresh(job, layout, True), 5)  # type: ignore[misc]
        figures = f"{warm:6.2f} ms time, {whole:6.2f} ms with memory, {cold:6.2f} ms nothing cached"
        print(f"{model:16s} {text[:32]:32s} {actions:6d} actions: {figures}")


if __name__ == "__main__":
    main()
