"""CPU seconds and memory of the dry run on large plans: a rank of 8 of Llama-3.1-405B's layers, one of all 126, one of DeepSeek-V3.

    python benchmarks/bench_dryrun.py [405b-8|405b-126|deepseek-v3 ...]

Each runs in a process of its own; CPU seconds, because wall time depends on what else the machine does.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import warnings

CASES = {
    "405b-8": ("llama-3.1-405b", "h100-sxm:2048x8", 8192, 2048, "tp=8,pp=16,zero=1,micro_batch=1"),
    "405b-126": ("llama-3.1-405b", "h100-sxm:2048x8", 8192, 2048, "tp=8,zero=3,recompute=full"),
    "deepseek-v3": ("deepseek-v3", "h100-sxm:256x8", 4096, 2048, "pp=16,ep=64,zero=1,recompute=full"),
}


def run(name: str) -> None:
    """Trace one case in this process and print its line."""
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
    began = time.process_time()
    found = run_rank(job, layout, rank_of_stage(layout, worst_stage(job, layout)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    differs = ", ".join(f"{d.what} {100 * d.relative:.1f} %" for d in found.disagreements) or "nothing"
    seconds = time.process_time() - began
    print(f"{name}: {seconds:.1f} CPU s, {peak:.0f} MiB, {found.trace.record.operations} operations a step; differs: {differs}")


if __name__ == "__main__":
    names = sys.argv[1:] or list(CASES)
    if len(names) == 1:
        run(names[0])
    else:
        for one in names:
            subprocess.run([sys.executable, __file__, one], check=True)
