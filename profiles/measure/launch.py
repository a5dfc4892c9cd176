"""Starts N worker processes of the profiler through torchrun on this machine, and leaves none of them behind.

A worker gets a job (JSON) and appends what it measured, record by record, to a file that is read here as it grows: so progress is
shown, and what was measured before an interruption is kept.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profiles.errors import AxisplanError

Record = dict[str, Any]
POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0
"""How long torchrun gets to end its workers before it is killed (they then end by themselves: ``worker.watch_parent``)."""


def torchrun_command(processes: int, module: str, *arguments: str) -> list[str]:
    """The command that runs ``python -P -m module arguments`` in ``processes`` workers on this machine.

    ``-P`` keeps the current folder off the path, where a user may have a ``profiles`` of his own.
    """
    head = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
    return [*head, "--nproc-per-node", str(processes), "--no-python", sys.executable, "-P", "-m", module, *arguments]


def worker_environment(threads: int) -> dict[str, str]:
    """This process's environment for workers of one machine: ``threads`` each, safe path, the loopback interface."""
    given = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONSAFEPATH": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    environment = {**os.environ, **given}
    if sys.platform.startswith("linux"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def run_workers(
    job: Record,
    processes: int,
    *,
    timeout_seconds: float,
    on_record: Callable[[Record], None],
    threads: int = 1,
    module: str = "profiles.measure.worker",
) -> None:
    """Runs ``job`` in ``processes`` workers; ``on_record`` gets each record of rank 0 as it is written.

    Raises AxisplanError when a worker fails or ``timeout_seconds`` pass. On any way out, KeyboardInterrupt included, every
    process that was started has ended.
    """
    with tempfile.TemporaryDirectory(prefix="axisplan-profile-") as folder:
        job_file, records, log = (Path(folder) / n for n in ("job.json", "records.jsonl", "log.txt"))
        job_file.write_text(json.dumps({**job, "owner": os.getpid()}))
        records.touch()
        with log.open("wb") as sink:
            child = subprocess.Popen(
                torchrun_command(processes, module, str(job_file), str(records)),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=worker_environment(threads),
                start_new_session=True,
            )
            try:
                finished = _follow(child, records, on_record, time.monotonic() + timeout_seconds)
            finally:
                end(child)
        if not finished:
            raise AxisplanError(f"profile: the {processes} workers were not done after {timeout_seconds:.0f} s and were ended")
        if child.returncode != 0:
            raise AxisplanError(f"profile: a worker failed: {_reason(records, log)}")


def _follow(child: subprocess.Popen[bytes], records: Path, on_record: Callable[[Record], None], deadline: float) -> bool:
    """Passes records on until the child ends (True) or the deadline passes (False)."""
    with records.open() as lines:
        partial = ""
        while True:
            ended = child.poll() is not None
            while piece := lines.readline():
                partial += piece
                if partial.endswith("\n"):
                    on_record(json.loads(partial))
                    partial = ""
            if ended:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)


def end(child: subprocess.Popen[bytes]) -> None:
    """Ends torchrun and, through it, its workers: asked first, then killed."""
    if child.poll() is not None:
        return
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        child.send_signal(number)
        try:
            child.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue


def _reason(records: Path, log: Path) -> str:
    """What a failed worker said: its own record of the error, else the last error its log names, else how it ended."""
    for line in records.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("type") == "error":
            return str(record["message"])
    lines = [ln.strip() for ln in log.read_text(errors="replace").splitlines() if ln.strip()]
    named = [ln for ln in lines if re.match(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b", ln) and "ChildFailedError" not in ln]
    ended = [ln for ln in lines if ln.startswith("exitcode")]
    return (named[-1:] or ended[:1] or lines[-1:] or ["no output"])[0][:300]
