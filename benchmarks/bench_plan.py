"""Speed of whole plans, and how it grows with GPUs: CPU seconds, peak memory, gap. Each command runs cold, on one core.

    python benchmarks/bench_plan.py                      the goals of issue 5, as a table
    python benchmarks/bench_plan.py --growth             Llama-3.1-405B (8B up to 512 GPUs) from 8 to 1,048,576 GPUs
    python benchmarks/bench_plan.py ... --best 3         each run three times, the least CPU seconds of them (a shared host's vary)
    python benchmarks/bench_plan.py ... --save           keep the rows in benchmarks/results/plan.json, those of goals not named too, and
                                                         draw docs/plan-growth.svg

The package's bytecode is compiled before, as pip does when it installs (this checkout's, whatever PYTHONDONTWRITEBYTECODE says).
A run that takes longer than its limit is ended by --time-limit, so that its gap is what it had by then.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import resource
import subprocess
import sysconfig
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

AXISPLAN = str(Path(sysconfig.get_path("scripts")) / "axisplan")
ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "results" / "plan.json"
PICTURE = ROOT / "docs" / "plan-growth.svg"
MEGATRON = "deepseek-v3 --cluster h800-sxm:256x8 --seq-len 4k --global-batch 15360 --execution megatron --precision fp8"
GOALS = {
    "Llama-3-8B on 8 H100": ("llama-3-8b --cluster h100-sxm:1x8 --seq-len 8k --global-batch 128 --prove", 0.7, 1e-4),
    "Llama-3.1-405B on 16,384 H100": ("llama-3.1-405b --cluster h100-sxm:2048x8 --seq-len 8k --global-batch 2048", 3.0, 1e-2),
    "the same, proved": ("llama-3.1-405b --cluster h100-sxm:2048x8 --seq-len 8k --global-batch 2048 --prove", 30.0, 1e-4),
    "DeepSeek-V3 on 2,048 H800": ("deepseek-v3 --cluster h800-sxm:256x8 --seq-len 4k --global-batch 15360", 5.0, None),
    "the same, proved ": ("deepseek-v3 --cluster h800-sxm:256x8 --seq-len 4k --global-batch 15360 --prove", 60.0, 1e-4),
    "DeepSeek-V3 on 2,048 H800, megatron": (MEGATRON, 5.0, None),
    "the same, proved  ": (f"{MEGATRON} --prove", 60.0, 1e-4),
    "Llama-3.1-405B on 1,048,576 H100": (
        "llama-3.1-405b --cluster h100-sxm:131072x8 --seq-len 8k --global-batch 131072",
        30.0,
        None,
    ),
    "llama-tiny on cpu:1x4": ("llama-tiny --cluster cpu:1x4 --seq-len 256 --global-batch 16 --precision fp32", 1.0, None),
}
"""Name -> (arguments of ``axisplan plan``, CPU seconds wanted, gap wanted)."""
GROWTH = tuple(2**k for k in range(3, 21))
"""GPUs."""


def compiled() -> None:
    for package in ("planner", "cost_models", "profiles"):
        compileall.compile_dir(ROOT / package, quiet=2)
    compileall.compile_file(ROOT / "cli.py", quiet=2)


def one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def measured(arguments: str, limit: float) -> dict[str, Any]:
    """One cold run: user and system CPU seconds, wall seconds, peak resident MB, and what the certificate says."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    command = [AXISPLAN, "plan", *arguments.split(), "--json", "--time-limit", f"{limit:g}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=one_core)
    out, errors = child.communicate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    row: dict[str, Any] = {
        "arguments": arguments, "exit": child.returncode, "wall_seconds": round(time.perf_counter() - start, 2),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
    }  # fmt: skip
    if child.returncode == 0:
        plan = json.loads(out)
        c = plan["certificate"]
        row |= {key: c[key] for key in ("columns_legal", "solved", "unexplored", "gap", "proved", "fastest_seconds")}
        row["layout"] = plan["layout_text"][:160]
    else:
        row["reason"] = errors.decode().strip().splitlines()[-1][:160] if errors else ""
    return row


def quickest(arguments: str, limit: float, times: int) -> dict[str, Any]:
    """The run of least CPU seconds of several."""
    rows = [measured(arguments, limit) for _ in range(max(1, times))]
    return {**min(rows, key=lambda row: row["cpu_seconds"]), "runs": len(rows)}


def peak_megabytes(arguments: str, limit: float) -> float:
    """Peak resident memory of the same run, measured in a process of its own."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = ["python3", "-c", code, AXISPLAN, "plan", *arguments.split(), "--json", "--time-limit", f"{limit:g}"]
    done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return round(int(done.stdout) / 1024)


def growth_arguments(gpus: int) -> str:
    """The job of a number of GPUs: one model that fits there, a batch that grows with them."""
    model = "llama-3-8b" if gpus <= 512 else "llama-3.1-405b"
    return f"{model} --cluster h100-sxm:{gpus // 8}x8 --seq-len 8k --global-batch {max(64, gpus // 8)}"


def draw(rows: Sequence[Mapping[str, Any]]) -> None:
    """CPU seconds and gap over GPUs."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    matplotlib.rcParams["svg.hashsalt"] = "axisplan"
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
    good = sorted((r for r in rows if r["exit"] == 0), key=lambda r: r["gpus"])
    for model, mark in (("llama-3-8b", "o-"), ("llama-3.1-405b", "s-")):
        some = [r for r in good if r["arguments"].startswith(model + " ")]
        above.plot([r["gpus"] for r in some], [r["cpu_seconds"] for r in some], mark, label=model)
        below.plot([r["gpus"] for r in some], [100 * r["gap"] for r in some], mark, label=model)
    above.set(yscale="log", ylabel="CPU seconds, whole command")
    above.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_formatter=NullFormatter())
    below.set(xscale="log", ylabel="gap, %", xlabel="GPUs")
    below.set_xscale("log", base=2)
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(PICTURE, metadata={"Date": None})


def save(part: str, rows: list[dict[str, Any]]) -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    host = f"{platform.machine()}, {platform.processor() or 'processor not named'}, Python {platform.python_version()}, one core"
    host += f", {os.getloadavg()[0]:.0f} other processes running at the end"
    order = dict.fromkeys([arguments for arguments, *_ in GOALS.values()] + [growth_arguments(gpus) for gpus in GROWTH])
    all_ = {row["arguments"]: row for row in (*kept.get(part, {}).get("rows", ()), *rows)}
    rows = [all_[arguments] for arguments in order if arguments in all_]
    kept[part] = {"date": datetime.now(UTC).date().isoformat(), "host": host, "rows": rows}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def show(name: str, row: Mapping[str, Any], wanted: float | None = None) -> None:
    gap = "" if row["exit"] else f"{100 * row['gap']:.3g} %"
    goal = "" if wanted is None else f"{wanted:g}"
    peak = row.get("peak_megabytes", "")
    print(
        f"{name:34} {row['cpu_seconds']:>8} {goal:>6} {gap:>10} {peak!s:>8} {row.get('unexplored', row.get('reason', ''))}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="goals by the start of their names; all where none is given")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a search may take")
    parser.add_argument("--best", type=int, default=1, metavar="N", help="runs of each, of which the quickest counts")
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    compiled()
    print(f"{'':34} {'CPU s':>8} {'goal':>6} {'gap':>10} {'peak MB':>8} unexplored")
    rows: list[dict[str, Any]] = []
    if asked.growth:
        for gpus in GROWTH:
            row = {"gpus": gpus, **quickest(growth_arguments(gpus), asked.limit, asked.best)}
            rows.append(row)
            show(f"{gpus:,} GPUs", row)
    else:
        for name, (arguments, wanted, gap) in GOALS.items():
            if asked.names and not any(name.startswith(n) for n in asked.names):
                continue
            row = {
                "name": name.strip(),
                "wanted_seconds": wanted,
                "wanted_gap": gap,
                **quickest(arguments, asked.limit, asked.best),
            }
            row["peak_megabytes"] = peak_megabytes(arguments, asked.limit)
            rows.append(row)
            show(name, row, wanted)
    if asked.save:
        save("growth" if asked.growth else "goals", rows)
        if asked.growth:
            draw(rows)


if __name__ == "__main__":
    main()
