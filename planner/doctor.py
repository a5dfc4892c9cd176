"""What this machine has, what is missing, and whether the backends work. Works where torch is absent."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.solver import silent
from profiles.version import __version__

PACKAGES = ("profiles", "cost_models", "planner")
NEEDED = ("pulp", "highspy", "click", "rich", "pydantic", "numpy", "pyyaml")
EXTRAS = {
    "plot": ("matplotlib", "plotly"), "hf": ("transformers", "safetensors"), "targets": ("megatron-core", "deepspeed", "accelerate"),
}  # fmt: skip
TOOLS = {"torchrun": "axisplan run", "nvidia-smi": "GPU facts", "sbatch": "Slurm launches", "kubectl": "Kubernetes launches"}
OLDEST_PYTHON = (3, 11)
ALL_REDUCE = """
import os, sys, datetime
import torch, torch.distributed as dist
backend, store = sys.argv[1], sys.argv[2]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.FileStore(store, world)
dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=30))
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
value = torch.full((1024,), float(rank + 1), device=device)
dist.all_reduce(value)
ok = bool((value == world * (world + 1) / 2).all())
dist.destroy_process_group()
sys.exit(0 if ok else 3)
"""
"""Run with -I from a file of its own, so that no folder of the user's is imported."""


@dataclass(frozen=True)
class Check:
    """One line: ``state`` is ok, note (a command needs it) or problem; ``hint`` says what to do."""

    name: str
    state: str
    found: str
    hint: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All checks; ``healthy`` unless one is a problem."""

    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        return all(check.state != "problem" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {"healthy": self.healthy, "checks": [asdict(check) for check in self.checks]}


def examine(seconds: float = 60.0) -> Diagnosis:
    """Examine this machine; no backend is tried longer than ``seconds``."""
    return Diagnosis((*_python(), *_packages(), _machine(), *_solvers(), *_torch(seconds), *_extras(), *_tools()))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Iterator[Check]:
    found = f"axisplan {__version__}, Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    old = sys.version_info < OLDEST_PYTHON
    yield Check("axisplan", "problem" if old else "ok", found, "needs Python 3.11 or newer" if old else "")


def _packages() -> Iterator[Check]:
    home = Path(__file__).resolve().parent.parent
    strangers = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        where = Path(spec.origin).resolve().parent.parent if spec and spec.origin else None
        if where != home:
            strangers.append(f"{name} comes from {where}")
    hint = "take that folder off PYTHONPATH" if strangers else ""
    yield Check("our packages", "problem" if strangers else "ok", "; ".join(strangers) or f"all from {home}", hint)
    versions = {name: _version(name) for name in NEEDED}
    missing = [name for name, version in versions.items() if version is None and name not in ("pulp", "highspy")]
    found = ", ".join(f"{n} {v}" for n, v in versions.items() if v)
    yield Check("needed packages", "problem" if missing else "ok", found, f"pip install {' '.join(missing)}" if missing else "")


def _machine() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total = _memory_bytes()
    free = shutil.disk_usage(tempfile.gettempdir()).free
    memory = f"{total / 2**30:.1f} GiB memory" if total else "memory unknown"
    return Check("machine", "ok", f"{cores} cores, {memory}, {free / 2**30:.0f} GiB free in {tempfile.gettempdir()}")


def _memory_bytes() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError, AttributeError):
        return 0.0


def _solvers() -> Iterator[Check]:
    """Whether each solver finds the one answer of a small program."""
    try:
        import pulp
    except ImportError:
        yield Check("solvers", "problem", "pulp is absent", "pip install pulp highspy")
        return
    works = []
    for name in ("HiGHS", "PULP_CBC_CMD"):
        found = _solves(pulp, name)
        works.append(found is None)
        label = "HiGHS" if name == "HiGHS" else "CBC"
        yield Check(f"solver {label}", "ok" if found is None else "note", "works" if found is None else found)
    if not any(works):
        yield Check("solvers", "problem", "none works", "pip install highspy")


def _solves(pulp: Any, name: str) -> str | None:
    try:
        solver = pulp.getSolver(name, msg=False, timeLimit=10)
        if not solver.available():
            return "not there"
        problem = pulp.LpProblem("doctor", pulp.LpMaximize)
        x = pulp.LpVariable("x", 0, 10, cat="Integer")
        problem += x
        problem += 2 * x <= 7, "limit"
        with silent():
            problem.solve(solver)
        return None if pulp.value(x) == 3 else f"answered {pulp.value(x)} where 3 is right"
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}"


def _torch(seconds: float) -> Iterator[Check]:
    version = _version("torch")
    if version is None:
        yield Check(
            "torch", "note", "absent", "planning works without; demo, run, profile and the dry run need it: pip install torch"
        )
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
    yield Check("torch", "ok", f"{version}, CUDA {torch.version.cuda or 'not built in'}")
    if count:
        yield Check("GPUs", "ok", f"{count} x {', '.join(names)}")
    else:
        yield Check("GPUs", "note", "none that torch sees", "the runtime and the profiler use the CPU with gloo")
    import torch.distributed as dist

    if not dist.is_available():
        yield Check("torch.distributed", "problem", "not built in", "install a torch built with distributed")
        return
    yield _backend("gloo", 2, seconds)
    if count:
        if dist.is_nccl_available():
            yield _backend("nccl", min(count, 8), seconds)
        else:
            yield Check("nccl", "problem", "this torch has no NCCL", "install a CUDA build of torch")


def _backend(backend: str, processes: int, seconds: float) -> Check:
    """An all-reduce among ``processes`` processes of this machine."""
    name = f"{backend}, {processes} processes"
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="axisplan-doctor-") as folder:
        program = Path(folder) / "all_reduce.py"
        program.write_text(ALL_REDUCE)
        workers = []
        try:
            for rank in range(processes):
                environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
                command = [sys.executable, "-I", str(program), backend, str(Path(folder) / "store")]
                quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "start_new_session": True}
                workers.append(subprocess.Popen(command, env=environment, cwd=folder, **quiet))
            return _result(name, workers, started, seconds)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
                if worker.stderr:
                    worker.stderr.close()


def _result(name: str, workers: list[subprocess.Popen[bytes]], started: float, seconds: float) -> Check:
    for worker in workers:
        try:
            _, errors = worker.communicate(timeout=max(0.1, started + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            return Check(name, "problem", f"an all-reduce did not end in {seconds:g} s", "is a firewall between the processes?")
        if worker.returncode:
            lines = errors.decode(errors="replace").strip().splitlines() or [f"exit code {worker.returncode}"]
            return Check(name, "problem", f"an all-reduce fails: {lines[-1][:200]}")
    return Check(name, "ok", f"an all-reduce works ({time.monotonic() - started:.1f} s with start-up)")


def _extras() -> Iterator[Check]:
    for extra, names in EXTRAS.items():
        there = {name: _version(name) for name in names}
        missing = [name for name, version in there.items() if version is None]
        found = ", ".join(f"{n} {v}" if v else f"{n} absent" for n, v in there.items())
        yield Check(f"extra {extra}", "note" if missing else "ok", found, f"pip install 'axisplan[{extra}]'" if missing else "")


def _tools() -> Iterator[Check]:
    for tool, use in TOOLS.items():
        where = shutil.which(tool) or shutil.which(tool, path=str(Path(sys.executable).parent))
        yield Check(f"tool {tool}", "ok" if where else "note", where or f"absent ({use})")
