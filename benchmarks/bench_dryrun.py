"""CPU seconds and memory of the dry run on large plans: a rank of 8 of Llama-3.1-405B's layers, one of all 126, one of DeepSeek-V3.

    python benchmarks/bench_dryrun.py [--save] [--json] [405b-8|405b-126|deepseek-v3 ...]

Each runs in a process of its own; CPU seconds, because wall time depends on what else the machine does. ``--save`` keeps the figures,
with date, machine and torch, in ``benchmarks/results/dryrun.json``; ``--json`` prints them.
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
    """The figures of one case, traced in this process."""
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
    held = sum(len(layout.layers_of_chunk(c, job.model.num_layers)) for c in layout.chunks_of_rank(found.stage))
    return {
        "model": model, "cluster": cluster, "seq_len": seq_len, "global_batch": batch, "layout": layout.text(), "stage": found.stage,
        "layers": held, "cpu_seconds": round(time.process_time() - began, 1), "wall_seconds": round(time.perf_counter() - clock, 1),
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10, "operations": found.trace.record.operations,
        "traced_peak_bytes": found.trace.record.peak_bytes, "formula_peak_bytes": found.formula.memory.peak_allocated,
        "differs": [f"{d.what} {100 * d.relative:.1f} %" for d in found.disagreements],
        "date": datetime.date.today().isoformat(), "machine": f"{processor()}, {os.cpu_count()} cores", "torch": torch.__version__,
    }  # fmt: skip


def line(name: str, figures: dict[str, Any]) -> str:
    """One case's figures for people."""
    process, differs = figures["process_bytes"] / 2**20, ", ".join(figures["differs"]) or "nothing"
    return (
        f"{name}: {figures['cpu_seconds']} CPU s, {process:.0f} MiB, {figures['operations']} operations a step; differs: {differs}"
    )


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
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.names or list(CASES)
    if len(names) > 1:
        for name in names:
            flags = [f"--{flag}" for flag in ("save", "json") if getattr(options, flag)]
            subprocess.run([sys.executable, __file__, *flags, name], check=True)
        return
    figures = run(names[0])
    print(json.dumps(figures) if options.json else line(names[0], figures))
    if options.save:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**kept, names[0]: figures}, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
