"""The whole job on this machine: measure it, plan a small model, prove the plan, emit it, train it, compare with the prediction.

``run_demo`` reads as the story; each step is one function below it or elsewhere in the product. Nothing here is special to the
demo: the same profile, plan, emission and runtime serve a real cluster.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_models.execution import load_execution
from cost_models.job import Job
from planner import screen
from planner.plan import Plan, RunnerUp, stages_of
from profiles.errors import AxisplanError, InputError
from profiles.files import write_text
from profiles.hardware import ClusterSpec, load_cluster
from profiles.huggingface import load_model
from profiles.model import ModelSpec

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class DemoSettings:
    """What the demo does; the defaults fit a machine of two cores and five minutes."""

    out: Path
    model: str = "llama-tiny"
    processes: int | None = None
    """Default: the GPUs there are, else four processes on the CPU."""
    seq_len: int = 256
    global_batch: int = 16
    steps: int = 24
    data: tuple[Path, ...] = ()
    profile: Path | None = None
    profile_seconds: float = 60.0
    slower_by: float = 0.15
    """The runner-up to run as well: the first one predicted at least this much slower."""
    timeout_seconds: float = 600.0


@dataclass
class Run:
    """A plan that was run, and what its run printed: one record a step."""

    name: str
    plan: Plan
    folder: Path
    number: int
    """Of its chapter in the story."""
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median step time after the first quarter of the steps, which warm up caches and allocators and are watched for memory."""
        warm = self.records[max(1, len(self.records) // 4) :]
        timed = [r["seconds"] for r in warm if not r.get("watched")] or [r["seconds"] for r in self.records]
        return float(statistics.median(timed))

    @property
    def peak_bytes(self) -> float:
        return float(max(r["peak_bytes"] for r in self.records))

    @property
    def predicted_bytes(self) -> float:
        """Allocated bytes of the fullest rank."""
        return float(max(s["peak_allocated"] for s in self.plan.estimate["memory"]))


def run_demo(settings: DemoSettings, out: Console) -> None:
    """Profile, plan, emit, run, compare; the same for a slower runner-up. Everything made lies in ``settings.out``."""
    started = time.monotonic()
    model = load_model(settings.model)
    check_text(settings)
    cluster = profiled(settings, out)
    plan, slower = planned(settings, model, cluster, out)
    text = training_text(settings)
    runs = [Run("plan", plan, settings.out / "launch", 3)]
    if slower is not None:
        runs.append(Run("runner-up", instead(plan, slower), settings.out / "launch-runner-up", 4))
    for run in runs:
        emitted(run, settings, text, out)
        trained(run, settings, out)
    compared(runs, out)
    launch = runs[0].folder / "launch.sh"
    out.print(f"\ndone in {time.monotonic() - started:.0f} s; everything is in {settings.out}")
    out.print(f"next: axisplan explain {settings.out / 'plan.json'}, or train longer: {launch} --steps 500", soft_wrap=True)


def check_text(settings: DemoSettings) -> None:
    """Raise InputError for a text that is not there, before anything is measured or written."""
    for path in settings.data:
        if not path.is_file():
            raise InputError("--data", path, "is not a file")


def training_text(settings: DemoSettings) -> tuple[Path, ...]:
    """The user's files, or Python's own documentation topics: real English that is on every machine."""
    if settings.data:
        return tuple(p.resolve() for p in settings.data)
    from pydoc_data.topics import topics

    path = settings.out / "text.txt"
    write_text(path, "\n\n".join(topics[name] for name in sorted(topics)))
    return (path.resolve(),)


def profiled(settings: DemoSettings, out: Console) -> ClusterSpec:
    """This machine as a cluster: measured now, or read from ``--profile``."""
    out.rule("1. profile: what can this machine do?", align="left")
    if settings.profile is not None:
        return load_cluster(str(settings.profile))
    import torch

    from profiles.measure.machine import profile_machine

    with screen.progress(out, "measuring matrix products, memory and links, all processes at work at once") as show:
        dtypes = ("bf16",) if torch.cuda.is_available() else ("fp32",)
        measured = profile_machine(settings.processes, budget_seconds=settings.profile_seconds, dtypes=dtypes, progress=show)
    if measured.interrupted or measured.cluster is None:
        raise KeyboardInterrupt
    path = settings.out / "cluster.yaml"
    measured.save(path)
    cluster = measured.cluster
    out.print(
        f"{cluster.gpus} x {cluster.gpu.name}, {screen.gib(cluster.gpu.usable_bytes)} each; every figure with its origin: "
        f"axisplan clusters show {path}",
        soft_wrap=True,
    )
    return cluster


def planned(settings: DemoSettings, model: ModelSpec, cluster: ClusterSpec, out: Console) -> tuple[Plan, RunnerUp | None]:
    """The proved plan for the demo's model on ``cluster``, and the runner-up that will be run as well."""
    from planner.solve import PlanRequest, solve

    out.rule("2. plan: the fastest layout that fits, with proof", align="left")
    job = Job(
        model=model,
        cluster=cluster,
        execution=load_execution("axisplan"),
        seq_len=settings.seq_len,
        global_batch=settings.global_batch,
        precision="fp32" if cluster.gpu.is_host else "bf16",
    )
    plan = solve(PlanRequest(job, top=12, tie=0.0, prove=True))
    path = settings.out / "plan.json"
    plan.save(path)
    slower = next((r for r in plan.runners_up if r.slower >= settings.slower_by), None)
    screen.show_plan(out, plan, top=4, also=slower)
    return plan, slower


def instead(plan: Plan, runner: RunnerUp) -> Plan:
    """The plan with ``runner``'s layout in the place of the chosen one."""
    from planner.plan import layout_from

    layout = layout_from(runner.layout)
    changes = {"layout": runner.layout, "layout_text": runner.layout_text, "estimate": runner.estimate, "runners_up": []}
    return plan.model_copy(update={**changes, "stages": stages_of(plan.job(), layout)})


def emitted(run: Run, settings: DemoSettings, text: tuple[Path, ...], out: Console) -> None:
    """The launch folder of a plan."""
    from planner.emit.core import EmitSettings, emit

    out.rule(f"{run.number}. emit and run: the {run.name}", align="left")
    if run.number > 3:
        out.print(
            f"the first layout predicted at least {100 * settings.slower_by:.0f} % slower: is the order predicted the order measured?"
        )
    folder = run.folder.resolve()
    data = tuple(os.path.relpath(path, folder) for path in text)
    emit(run.plan, "axisplan", "torchrun", folder, EmitSettings(steps=settings.steps, learning_rate=1e-3, data=data))
    out.print(f"{run.plan.layout_text}\n{run.folder / 'launch.sh'} starts it", soft_wrap=True)


def trained(run: Run, settings: DemoSettings, out: Console) -> None:
    """Run the emitted launch.sh and keep what it prints."""
    from planner.runtime.launch import supervise

    bin_folder = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": bin_folder + os.pathsep + os.environ.get("PATH", "")}
    log = run.folder / "log.txt"
    with screen.progress(out, f"training {settings.steps} steps") as show:

        def record(line: dict[str, Any]) -> None:
            run.records.append(line)
            show(
                len(run.records) / settings.steps,
                f"step {line['step']}  loss {line['loss']:.3f}  {screen.seconds(line['seconds'])}",
            )

        command = ["bash", str(run.folder / "launch.sh"), "--json"]
        supervise(command, record, env, log=log, timeout=settings.timeout_seconds)
    if len(run.records) < settings.steps:
        raise AxisplanError(f"the run printed {len(run.records)} of {settings.steps} steps (all of its output: {log})")
    losses = [r["loss"] for r in run.records]
    picked = [losses[i] for i in sorted({round(k * (len(losses) - 1) / 5) for k in range(6)})]
    out.print("loss " + " > ".join(f"{loss:.3f}" for loss in picked), soft_wrap=True)


def compared(runs: list[Run], out: Console) -> None:
    """Predicted against measured, side by side, and whether the order predicted is the order measured."""
    out.rule("5. predicted against measured", align="left")
    rows = []
    for run in runs:
        predicted = run.plan.step_seconds
        low, high = run.plan.estimate["step_seconds_low"], run.plan.estimate["step_seconds_high"]
        rows.append((run.name, run.plan.layout_text, screen.seconds(predicted), f"{screen.seconds(low)} to {screen.seconds(high)}",
                     screen.seconds(run.seconds), f"{100 * (predicted / run.seconds - 1):+.0f} %",
                     screen.gib(run.predicted_bytes), screen.gib(run.peak_bytes)))  # fmt: skip
    columns = ("", "layout", "predicted step", "80 % interval", "measured", "error", "predicted memory", "measured")
    out.print(screen.table("step time: median; memory: allocated, fullest rank", columns, rows, left=2))
    if len(runs) < 2:
        out.print("no runner-up was predicted at least 15 % slower, so there is no order to check")
        return
    first, second = runs
    if first.seconds < second.seconds:
        ratio = second.seconds / first.seconds
        out.print(f"the order predicted is the order measured: the plan is {ratio:.2f} times as fast as the runner-up")
    else:
        out.print(
            "the order predicted is NOT the order measured: the runner-up took "
            f"{second.seconds / first.seconds:.2f} of the plan's time; a noisy machine, or the cost model is wrong here",
            soft_wrap=True,
        )
