"""Leave one source, or one generation of GPUs, out: how well are runs predicted that took no part in the fit of any constant?

For each source (and each generation: Ampere, Hopper, Blackwell) the constants of ``cost_models/data/fitted.yaml`` are fitted again to
all other judged runs (least squares of log errors, linearised once, pulled towards each constant's value before any run was seen), and
what was left out is predicted with them. ``python benchmarks/leave_one_out.py [RUNS.csv] [--json FILE]``; two minutes on one core.
"""

from __future__ import annotations

import importlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cost_models import communication, compute, passes, step
from cost_models.accuracy import constant_value, fitted_constants
from cost_models.accuracy_report import short
from cost_models.compute import architecture
from cost_models.execution import execution_names
from cost_models.runs import Run, load_runs, read_rows

NOISE = 0.06
"""Standard deviation of a run's log error that no constant explains."""


def ancestors(name: str) -> set[str]:
    """A preset and those it extends."""
    folder = Path(compute.__file__).parent / "data" / "executions"
    found = {name, "any"}
    while base := (yaml.safe_load((folder / f"{name}.yaml").read_text()) or {}).get("extends"):
        found.add(base)
        name = base
    return found


FAMILY = {name: ancestors(name) for name in execution_names()}


def set_value(place: str, value: float) -> Callable[[Run], Run]:
    """Give a constant another value: tables and modules at once, presets and GPUs by the returned change of a run."""
    kind, _, rest = place.partition(":")
    name, _, key = rest.rpartition(".")
    if kind == "kernel":
        compute.kernel_table()[name][key]["value"] = value
    elif kind == "products":
        compute.product_table()[name][key]["value"] = value
    elif kind == "code":
        for module in (importlib.import_module(name), passes, step, communication):
            if hasattr(module, key):
                setattr(module, key, value)
    if kind == "execution":
        return lambda run: with_fact(run, name, key, value)
    if kind == "gpu":
        return lambda run: with_gpu(run, name, key, value)
    return lambda run: run


def with_fact(run: Run, preset: str, fact: str, value: float) -> Run:
    execution = run.job.execution
    if preset not in FAMILY[execution.name] or getattr(execution, fact) != constant_value(f"execution:{preset}.{fact}"):
        return run
    return replace(run, job=replace(run.job, execution=execution.with_(**{fact: value})))


def with_gpu(run: Run, gpu: str, fact: str, value: float) -> Run:
    cluster = run.job.cluster
    if cluster.gpu.name != gpu:
        return run
    moved = replace(cluster, gpu=cluster.gpu.faster(**{fact: value}), name=f"{cluster.name}-{value:.6f}")
    return replace(run, job=replace(run.job, cluster=moved))


@contextmanager
def constants(values: dict[str, float]) -> Iterator[Callable[[Run], Run]]:
    """The constants at ``values`` inside the block; yields the change to make to a run."""
    before = {place: constant_value(place) for place in values}
    changes = [set_value(place, value) for place, value in values.items()]
    forget()

    def change(run: Run) -> Run:
        for one in changes:
            run = one(run)
        return run

    try:
        yield change
    finally:
        for place, value in before.items():
            set_value(place, value)
        forget()


def forget() -> None:
    """Drop everything that was computed with other constants."""
    for module in (passes, compute, step, communication):
        for name, thing in list(vars(module).items()):
            if hasattr(thing, "cache_clear") and name not in ("kernel_table", "product_table", "architecture"):
                thing.cache_clear()


def log_errors(runs: Sequence[Run], values: dict[str, float]) -> Any:
    with constants(values) as change:
        return np.array(
            [math.log(step.estimate(j.job, j.layout, detail=False).step_seconds / (j.seconds or 1.0)) for j in map(change, runs)]
        )


def main(path: str, target: str | None) -> None:
    runs = [run for run in load_runs(read_rows(path))[0] if run.judged]
    table = list(fitted_constants())
    places = [entry["place"] for entry in table]
    now = np.array([constant_value(place) for place in places])
    prior = np.array([float(entry["prior"]) for entry in table])
    width = np.array([(float(entry["high"]) - float(entry["low"])) / 3 for entry in table])
    low, high = (np.array([float(entry[key]) for entry in table]) for key in ("low", "high"))
    base = log_errors(runs, {})
    slope = np.empty((len(runs), len(places)))
    for i, place in enumerate(places):
        move = 0.05 * (high[i] - low[i]) * (1 if now[i] + 0.05 * (high[i] - low[i]) <= high[i] else -1)
        slope[:, i] = (log_errors(runs, {place: now[i] + move}) - base) / move
    rows: dict[str, dict[str, Any]] = {}
    for kind, key in (("sources", lambda run: run.source), ("generations", lambda run: architecture(run.job.cluster.gpu.name))):
        rows[kind] = {}
        for name in sorted({key(run) for run in runs}):
            kept = np.array([key(run) != name for run in runs])
            a = np.concatenate([slope[kept] / NOISE, np.diag(1 / width)])
            b = np.concatenate([(slope[kept] @ now - base[kept]) / NOISE, prior / width])
            fitted = np.clip(np.linalg.lstsq(a, b, rcond=None)[0], low, high)
            values = {place: float(v) for place, v in zip(places, fitted, strict=True)}
            left = np.exp(log_errors([run for run in runs if key(run) == name], values)) - 1
            rows[kind][name] = {
                "n": len(left),
                "fitted": statistics.mean(abs(math.exp(e) - 1) for e in base[~kept]),
                "left_out": float(np.abs(left).mean()),
                "bias": float(left.mean()),
                "constants": values,
            }
            line = f"with it {100 * rows[kind][name]['fitted']:5.1f} %  without {100 * rows[kind][name]['left_out']:5.1f} %"
            print(f"{short(name):24s}{len(left):4d} runs  {line}", flush=True)
    sources = rows["sources"]

    def mean(names: Sequence[str]) -> float:
        return sum(sources[n]["left_out"] * sources[n]["n"] for n in names) / sum(sources[n]["n"] for n in names)

    result = {
        **rows,
        "fitted": statistics.mean(abs(math.exp(e) - 1) for e in base),
        "left_out": mean(list(sources)),
        "without_bloom": mean([name for name in sources if "BLOOM" not in name]),
        "all_at_prior": statistics.mean(
            abs(math.exp(e) - 1) for e in log_errors(runs, dict(zip(places, map(float, prior), strict=True)))
        ),
    }
    print({key: round(100 * value, 2) for key, value in result.items() if isinstance(value, float)})
    if target:
        Path(target).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    out = arguments[arguments.index("--json") + 1] if "--json" in arguments else None
    files = [a for a in arguments if not a.startswith("--") and a != out]
    main(files[0] if files else str(Path(__file__).parents[1] / "tests" / "data" / "runs.csv"), out)
