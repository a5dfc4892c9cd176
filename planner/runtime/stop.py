"""SIGTERM asks a run to end after its present step: the worker's part, and that of the process that started it.

A worker that is asked finishes its step, saves, says so in one line on stderr that begins with ``STOPPED``, and leaves with exit
code 0. The launcher passes the signal on to the workers themselves, not to torchrun: torchrun kills workers that have not ended
after 30 s, whatever they still have to save.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STOPPED = "axisplan-stopped: "
"""Begins the line of a worker that left because it was asked to."""
WORKERS = (b"planner.runtime.worker", b"worker\0train")
"""What the command line of a worker holds, started by ``axisplan run`` or by an emitted launch.sh."""


class Stop:
    """``asked`` becomes True on SIGTERM. Outside the main thread, where Python allows no handler, it never does."""

    asked = False

    def __enter__(self) -> Stop:
        self._before = signal.signal(signal.SIGTERM, self._ask) if threading.current_thread() is threading.main_thread() else None
        return self

    def _ask(self, *_: object) -> None:
        self.asked = True

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)


@contextmanager
def passed_on(process: subprocess.Popen[str], end: Callable[[subprocess.Popen[str]], None]) -> Iterator[Stop]:
    """While ``process`` (torchrun) runs: the first SIGTERM goes to its workers, a second one calls ``end``."""
    stop = Stop()

    def handle(_: int, __: FrameType | None) -> None:
        if stop.asked:
            end(process)
            return
        stop.asked = True
        workers = workers_of(process.pid)
        for pid in workers:
            _signal(pid)
        if not workers:
            process.terminate()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it dies, so that a killed launcher leaves nothing behind."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def workers_of(pid: int) -> list[int]:
    """Worker processes under ``pid``; none where the system has no /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            facts = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.name)] = int(facts[1])
    return sorted(child for child in parents if _under(child, pid, parents) and _is_worker(child))


def _under(child: int, pid: int, parents: dict[int, int]) -> bool:
    seen = set()
    while child in parents and child not in seen:
        seen.add(child)
        child = parents[child]
        if child == pid:
            return True
    return False


def _is_worker(pid: int) -> bool:
    try:
        line, environment = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
    except OSError:
        return False
    return b"\0RANK=" in b"\0" + environment and any(word in line for word in WORKERS)  # torchrun itself has no rank


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
