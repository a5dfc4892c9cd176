"""CPU seconds and certificate of whole plans. Run: python benchmarks/bench_plan.py [NAME ...]"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

CASES = {
    "llama-tiny": "llama-tiny --cluster cpu:1x4 --seq-len 256 --global-batch 16 --precision fp32",
    "llama-3-8b": "llama-3-8b --cluster h100-sxm:1x8 --seq-len 8192 --global-batch 128",
    "llama-3-8b-megatron": "llama-3-8b --cluster h100-sxm:1x8 --seq-len 8192 --global-batch 128 --execution megatron",
    "llama-3.1-405b": "llama-3.1-405b --cluster h100-sxm:2048x8 --seq-len 8192 --global-batch 2048",
    "gpt3-175b": "gpt3-175b --cluster a100-sxm:128x8 --seq-len 2048 --global-batch 1536 --execution megatron",
    "deepseek-v3": "deepseek-v3 --cluster h800-sxm:256x8 --seq-len 4096 --global-batch 15360",
}


def main(names: list[str]) -> None:
    print(f"{'case':22} {'CPU s':>8} {'wall s':>8}  exit")
    for name in names or list(CASES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        command = [sys.executable, "-c", "from cli import main; main()", "plan", *CASES[name].split(), "--json"]
        done = subprocess.run(command, capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{name:22} {cpu:8.2f} {time.perf_counter() - start:8.2f}  {done.returncode}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
