"""Start the worker processes of a job on this machine through torchrun, and leave none behind."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from planner.plan import Plan
from planner.runtime import devices
from planner.runtime.journal import check_tensorboard
from planner.runtime.settings import check_files, parser, read_settings
from planner.runtime.stop import STOPPED, die_with_parent, passed_on
from planner.runtime.worker import LOST, REFUSED
from profiles.errors import AxisplanError, InputError

PATIENCE = 8.0
"""Seconds that torchrun and the workers get to end after SIGTERM (a worker saves and leaves) before they are killed."""


def launch(
    arguments: Sequence[str],
    processes: int,
    record: Callable[[dict[str, Any]], None],
    *,
    log: Path | None = None,
    timeout: float | None = None,
    port: int | None = None,
    restarts: int = 0,
) -> None:
    """Run ``axisplan worker ARGUMENTS`` in ``processes`` processes; each JSON line that they print goes to ``record``.

    ``log`` keeps their other output; ``port`` is the rendezvous port (default: a free one); ``restarts`` how often torchrun may
    start all of them again after one died. Raises AxisplanError with one line that says what went wrong.
    """
    if port is not None:
        _check_port(port)
    rendezvous = ["--standalone"] if port is None else ["--nnodes", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [sys.executable, "-P", "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(processes)]
    command += ["--max-restarts", str(restarts), "-m", "planner.runtime.worker", *arguments]
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    supervise(command, record, {"OMP_NUM_THREADS": threads, **os.environ}, log=log, timeout=timeout)


def start(command: Sequence[str]) -> None:
    """What an emitted launch.sh becomes: torchrun and its words, one of whose is ``train``, looked after as ``axisplan run`` does."""
    words = command[list(command).index("train") :]
    arguments = parser().parse_args(words)
    if arguments.restarts < 0:
        raise InputError("--restarts", arguments.restarts, "must not be negative", 0)
    node = os.environ.get("NODE_RANK")
    log = checked(arguments, alone=False) / ("workers.log" if node is None else f"workers-{node}.log")
    torchrun, *rest = command
    again = ["--max-restarts", str(arguments.restarts)] if arguments.restarts else []
    supervise([torchrun, *again, *rest], shown(arguments.json), dict(os.environ), log=log)


def checked(arguments: argparse.Namespace, *, alone: bool) -> Path:
    """Look at a run before any process is started: its settings, its files, and whether the devices are here. Returns ``out``, made.

    ``alone``: this command starts all processes of the plan, not one machine's. What is worth saying goes to stderr. Raises
    InputError.
    """
    plan = Plan.load(arguments.plan)
    cluster, settings = plan.job().cluster, read_settings(arguments, plan.job())
    check_tensorboard(settings.tensorboard)
    check_files(settings)
    processes = plan.layout_object.world // (1 if alone else cluster.hosts)
    for line in devices.check(cluster, settings.device, processes, alone=alone):
        say(line)
    assert settings.out is not None
    settings.out.mkdir(parents=True, exist_ok=True)
    return settings.out


def shown(as_json: bool) -> Callable[[dict[str, Any]], None]:
    """Prints a step: a line for people, or JSON."""
    from planner.screen import step_line

    return lambda line: print(json.dumps(line) if as_json else step_line(line), flush=True)


def say(text: str) -> None:
    """A line beside the steps."""
    print(f"axisplan: {text}", file=sys.stderr, flush=True)


def supervise(
    command: Sequence[str],
    record: Callable[[dict[str, Any]], None],
    env: dict[str, str],
    *,
    log: Path | None = None,
    timeout: float | None = None,
) -> None:
    """Run a torchrun command (or a script that becomes one): its JSON lines go to ``record``, and no process outlives this call.

    SIGTERM is passed on to the workers, which finish their step, save and leave; then Stopped is raised. Raises AxisplanError with
    one line that says what went wrong.
    """
    env = {**env, "PYTHONSAFEPATH": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with tempfile.TemporaryFile("w+") if log is None else log.open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=output, text=True, env=env, start_new_session=True, preexec_fn=die_with_parent
        )  # fmt: skip
        deadline = None if timeout is None else time.monotonic() + timeout
        timer = _alarm(process, timeout)
        try:
            assert process.stdout is not None
            with passed_on(process, end) as stop:
                for line in process.stdout:
                    _take(line, record)
                code = process.wait()
        finally:
            timer.cancel()
            end(process)
        said = stopped(output)
        if stop.asked or (code and said):
            raise Stopped(said or "stopped by SIGTERM; no step was under way, nothing was saved")
        if deadline is not None and time.monotonic() > deadline and code:
            raise AxisplanError(f"not finished after {timeout:.0f} s{_where(log)}")
        if code:
            raise_failure(output, code, log)


def _take(line: str, record: Callable[[dict[str, Any]], None]) -> None:
    """A line that a worker printed: a step, or a note."""
    if line.startswith("{"):
        found = json.loads(line)
        if "note" in found:
            say(found["note"])
        else:
            record(found)


class Refused(AxisplanError):
    """The workers refused their input: exit code 2, as if it had been refused here."""

    exit_code = 2


class Stopped(AxisplanError):
    """The run was asked to end and did: exit code 143, as a shell gives a command that SIGTERM ended."""

    exit_code = 143


def stopped(output: IO[str]) -> str | None:
    """What a worker said when it left because it was asked to."""
    output.seek(0)
    said = [line.removeprefix(STOPPED).strip() for line in output if line.startswith(STOPPED)]
    return said[-1] if said else None


def raise_failure(output: IO[str], code: int, log: Path | None) -> None:
    """Raise what a failed run's output says: with InputError's exit code where the workers refused their input."""
    output.seek(0)
    text = output.read()
    kind = Refused if REFUSED in text else AxisplanError
    raise kind(f"{why(text, code)}{_where(log)}")


def why(text: str, code: int) -> str:
    """The line of a failed run's output that says why: a worker's own, else which rank died of what."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line.removeprefix("axisplan: ") for line in lines if line.startswith("axisplan: ")]
    if ours:
        return ours[0]
    waited = [line for line in lines if LOST in line and "imed out" in line]
    if waited:  # for a rank that hangs: torchrun has killed it since
        return waited[0]
    died = re.findall(r"rank\s*:\s*(\d+)[^\n]*\n[^\n]*exitcode\s*:\s*-(\d+)", text)
    if died:  # torchrun ends the other ranks with SIGTERM: the cause is the rank that died of something else
        rank, number = next((d for d in died if int(d[1]) != signal.SIGTERM), died[0])
        return f"rank {rank} was killed by {signal.Signals(int(number)).name}"
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return "the rendezvous port is in use; give another one or none"
    said = [line for line in lines if re.search(r"(Error|Exception)\b.*:", line)]
    return said[-1] if said else f"the workers ended with exit code {code}"


def end(process: subprocess.Popen[str]) -> None:
    """End torchrun: asked first, then killed. Its workers die with it (``worker``: parent-death signal)."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _alarm(process: subprocess.Popen[str], timeout: float | None) -> Any:
    import threading

    timer = threading.Timer(timeout if timeout is not None else 1e9, end, (process,))
    timer.daemon = True
    if timeout is not None:
        timer.start()
    return timer


def _where(log: Path | None) -> str:
    return f" (all of its output: {log})" if log is not None else ""


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise InputError("port", port, "is in use; leave it out for a free one") from None
