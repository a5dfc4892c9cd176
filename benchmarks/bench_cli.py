"""CPU seconds of the command line: start-up, and a small plan whole. Run: python benchmarks/bench_cli.py [--repeats N].

Goals (issue 1): imports 0.3 s, a small job's whole command under 1.0 s, without importing torch. Prints a JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sysconfig
from pathlib import Path

AXISPLAN = str(Path(sysconfig.get_path("scripts")) / "axisplan")
COMMANDS = {
    "--version": ["--version"],
    "plan llama-tiny on cpu:1x4": ["plan", "llama-tiny", "--cluster", "cpu:1x4", "--seq-len", "256", "--global-batch", "16", "--json"],
    "plan llama-3-8b on h100-sxm:1x8": [
        "plan", "llama-3-8b", "--cluster", "h100-sxm:1x8", "--seq-len", "8k", "--global-batch", "128", "--json",
    ],
}  # fmt: skip


def cpu_seconds(arguments: list[str]) -> float:
    """User and system CPU seconds of one cold run of the command, on one core."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([AXISPLAN, *arguments], env=env, check=True, stdout=subprocess.DEVNULL, preexec_fn=one_core)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    out = {}
    for name, arguments in COMMANDS.items():
        runs = [cpu_seconds(arguments) for _ in range(repeats)]
        out[name] = {
            "median_cpu_seconds": round(statistics.median(runs), 3),
            "min": round(min(runs), 3),
            "max": round(max(runs), 3),
        }
    print(json.dumps(out, indent=2))


if __name__ == "__main__":
    main()
