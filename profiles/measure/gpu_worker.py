"""A worker's part of ``measure_gpu``: what to time on its device, and in which shares of the budget."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import date
from typing import Any

import torch

from profiles.errors import AxisplanError
from profiles.measure import kernels, plan
from profiles.measure.bench import Bench, Report, Section
from profiles.measure.together import Together

FEWEST_PRODUCTS, FEWEST_ATTENTIONS, FEWEST_TRAFFIC = 10, 13, 2 * len(kernels.KERNELS)
"""Candidates without which no curve can be fitted (``fitting``), with a few to spare: they are taken even over budget."""
CANDIDATE_SECONDS = {"cpu": 0.2, "cuda": 0.08}
LONGEST_CALL_SECONDS = {"cpu": 0.12, "cuda": 0.02}
"""The FLOPs of the largest products timed follow from how fast the device turns out to be and this."""
POINTWISE_BYTES = {
    "cpu": (8 << 20, 32 << 20, 2 << 20, 16 << 20, 64 << 20, 4 << 20, 1 << 20), "cuda": (256 << 20, 64 << 20, 1 << 30, 16 << 20)
}  # fmt: skip
"""Bytes a kernel moves, most telling first: a few thousand tokens of a small model on a CPU, of a large one on a GPU."""
JUDGE_BYTES = {"cpu": (12 << 20, 24 << 20, 3 << 20), "cuda": (128 << 20, 512 << 20)}
"""Sizes between those, held out of the fit."""


def measure_here(device: torch.device, together: Together, *, report: Report, dtypes: Sequence[str], budget_seconds: float) -> None:
    """Measures on ``device`` in step with the other workers; what was found goes to ``report`` record by record."""
    bench = Bench(device, together)
    start = bench.clock.now()
    report({"type": "facts", "facts": {**device_facts(device, together.size), "threads": torch.get_num_threads()}})
    reported, usable, context = kernels.usable_bytes(device, together.size)
    usable, context = min(together.gather(usable)), max(together.gather(context))
    memory = {"memory_reported_bytes": reported, "memory_usable_bytes": usable, "context_bytes": context}
    report({"type": "facts", "facts": {**memory, "host_memory_bytes": kernels.host_memory()[0]}})
    report({"type": "facts", "facts": _launch(bench)})
    kind, room = device.type, 0.25 * usable
    rates = {dtype: _rate(bench, dtype) for dtype in dtypes}
    longest = LONGEST_CALL_SECONDS[kind]
    sides = (64, 4096) if kind == "cpu" else (128, 32768)
    tokens = (256, 1024, 2048) if kind == "cpu" else (1024, 4096, 8192, 16384)
    sections = [
        Section(
            f"matmul {d}", 0.52 / len(rates), plan.matmuls(d, plan.Bounds(*sides, rate * longest, room), tokens), FEWEST_PRODUCTS
        )
        for d, rate in rates.items()
        if rate > 0
    ]
    attended = [d for d in dtypes if d in ("fp32", "bf16", "fp16") and rates[d] > 0][:1]
    for dtype in attended:
        limit = plan.Bounds(*sides, rates[dtype] * longest / 2, room)
        candidates = plan.attentions(
            dtype, limit, head_dims=(64, 128) if kind == "cpu" else (128, 64), longest=2048 if kind == "cpu" else 32768
        )
        sections.append(Section(f"attention {dtype}", 0.28 / len(attended), candidates, FEWEST_ATTENTIONS))
    limit = plan.Bounds(*sides, float("inf"), room)
    sections.append(
        Section(
            "memory",
            0.2,
            plan.pointwises(limit, forms=kernels.KERNELS, sizes=POINTWISE_BYTES[kind], judges=JUDGE_BYTES[kind]),
            FEWEST_TRAFFIC,
        )
    )
    left = max(budget_seconds - (bench.clock.now() - start), 0.1 * budget_seconds)
    bench.run(sections, budget_seconds=left, candidate_seconds=min(CANDIDATE_SECONDS[kind], left / 20), report=report)


def _launch(bench: Bench) -> dict[str, float]:
    """Seconds an operation takes that has next to nothing to do: on the device, and including the host in eager training; and the same
    of other such operations (``launch_judge_seconds``), which judge it."""
    eager, problem = bench.time_call(lambda: kernels.tiny_layer(bench.device), 0.3)
    if eager is None:
        raise AxisplanError(f"profile: a layer of width 16 failed: {problem}")
    host = eager.seconds / kernels.TINY_LAYER_OPERATIONS
    if bench.device.type != "cuda":
        judge, _ = bench.time_call(lambda: kernels.tiny_feed_forward(bench.device), 0.2)
        facts = {"launch_seconds": host, "eager_seconds": host}
        return {**facts, "launch_judge_seconds": judge.seconds / kernels.TINY_FEED_FORWARD_OPERATIONS} if judge else facts
    graph, _ = bench.time_call(lambda: kernels.launch_graph(bench.device), 0.2)
    facts = {"launch_seconds": graph.seconds / kernels.GRAPH_KERNELS if graph else host, "eager_seconds": host}
    judge, _ = bench.time_call(lambda: kernels.launch_graph(bench.device, kernels.GRAPH_KERNELS // 4), 0.2)
    return {**facts, "launch_judge_seconds": judge.seconds / (kernels.GRAPH_KERNELS // 4)} if judge else facts


def _rate(bench: Bench, dtype: str) -> float:
    """FLOP/s of one middling product: how large the others may be. 0 where the device has no such product."""
    side = 512 if bench.device.type == "cpu" else 4096
    sample = bench.time_sample(plan.product(dtype, side, side, side), 0.1)
    return 0.0 if sample.failed else sample.operation.flops / sample.seconds


def device_facts(device: torch.device, processes: int) -> dict[str, Any]:
    """Name, units, host and date of what is measured."""
    cores = os.cpu_count() or 1
    common = {
        "host": platform.node(),
        "date": date.today().isoformat(),
        "processes": processes,
        "cores": cores,
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {**common, "device": "cuda", "name": properties.name, "sms": properties.multi_processor_count}
    return {**common, "device": "cpu", "name": cpu_name(), "sms": 1}


def cpu_name() -> str:
    """What the processor calls itself."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(ln.split(":", 1)[1].strip() for ln in lines if ln.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
