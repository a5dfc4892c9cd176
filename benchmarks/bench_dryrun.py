"""CPU seconds and memory of the dry run on large plans: a rank of 8 of Llama-3.1-405B's layers, one of all 126, one of DeepSeek-V3.

    python benchmarks/bench_dryrun.py [--save] [405b-8|405b-126|deepseek-v3 ...]

Each runs in a process of its own; CPU seconds, because wall time depends on what else the machine does. ``--save`` keeps the figures,
with date, machine and torch, in ``benchmarks/results/dryrun.json``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "dryrun.json"

CASES = {
    "405b-8": ("llama-3.1-405b", "h100-sxm:2048x8", 8192, 2048, "tp=8,pp=16,zero=1,micro_batch=1"),
    "405b-126": ("llama-3.1-405b", "h100-sxm:2048x8", 8192, 2048, "tp=8,zero=3,recompute=full"),
    "deepseek-v3": ("deepseek-v3", "h100-sxm:256x8", 4096, 2048, "pp=16,ep=64,zero=1,recompute=full"),
}


def run(name: str) -> dict[str, Any]:
    """Trace one case in this process and print its line; its figures."""
    import torch

    from cost_models.execution import load_execution
    from cost_models.job import Job
    from planner.dryrun.report import run_rank, worst_stage
    from planner.dryrun.world import rank_of_stage
    from planner.legality import read_layout
    from profiles.hardware import load_cluster
    from profiles.huggingface import load_model

    warnings.simplefilter("ignore")
    model, cluster, seq_len, batch, text = CASES[name]
    job = Job(load_model(model), load_cluster(cluster), load_execution("axisplan"), seq_len, batch)
    layout = read_layout(job, text)
    began, clock = time.process_time(), time.perf_counter()
    found = run_rank(job, layout, rank_of_stage(layout, worst_stage(job, layout)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    differs = ", ".join(f"{d.what} {100 * d.relative:.1f} %" for d in found.disagreements) or "nothing"
    seconds = time.process_time() - began
    print(f"{name}: {seconds:.1f} CPU s, {peak:.0f} MiB, {found.trace.record.operations} operations a step; differs: {differs}")
    memory = found.formula.memory
    return {
        "model": model, "cluster": cluster, "seq_len": seq_len, "global_batch": batch, "layout": layout.text(), "stage": found.stage,
        "cpu_seconds": round(seconds, 1), "wall_seconds": round(time.perf_counter() - clock, 1), "process_mib": round(peak),
        "operations": found.trace.record.operations, "traced_peak_gib": round(found.trace.record.peak_bytes / 2**30, 2),
        "formula_peak_gib": round(memory.peak_allocated / 2**30, 2), "differs": [d.what for d in found.disagreements],
        "date": datetime.date.today().isoformat(), "machine": f"{processor()}, {os.cpu_count()} cores", "torch": torch.__version__,
    }  # fmt: skip


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *CASES], default=[])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    names = options.names or list(CASES)
    if len(names) > 1:
        for name in names:
            subprocess.run([sys.executable, __file__, *(["--save"] if options.save else []), name], check=True)
        return
    figures = run(names[0])
    if options.save:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**kept, names[0]: figures}, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
