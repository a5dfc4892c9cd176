"""Processes for multi-process tests: one pool a world size, started once a session, fed functions by name.

A call names a file, a function in it and JSON arguments; each process runs it and answers with JSON. A process that raises, dies or
does not answer in time ends the pool: the call fails with every process's error, and the next call starts a fresh pool.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import select
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


class Pool:
    """``world`` processes joined by gloo on this machine."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.processes: list[subprocess.Popen[bytes]] = []
        atexit.register(self.close)

    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
        }
        for rank in range(self.world):
            env = {
                **os.environ,
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
                "PYTHONSAFEPATH": "1",
            }
            command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve())]
            self.processes.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE))

    def call(self, file: str | Path, function: str, timeout: float = 240.0, **arguments: Any) -> list[Any]:
        """What ``function(**arguments)`` returned in each process, by rank."""
        try:
            return self._call(file, function, timeout, arguments)
        except BaseException:  # a test's own limit too: what was asked is still being answered
            self.close()
            raise

    def _call(self, file: str | Path, function: str, timeout: float, arguments: dict[str, Any]) -> list[Any]:
        if not self.processes:
            self.start()
        order = json.dumps({"file": str(file), "function": function, "arguments": arguments}) + "\n"
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(order.encode())
            process.stdin.flush()
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.world and time.monotonic() < deadline:
            waiting = {p.stdout: r for r, p in enumerate(self.processes) if r not in answers}
            for stream in select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))[0]:
                line = stream.readline()
                rank = waiting[stream]
                answers[rank] = json.loads(line) if line else {"error": f"process ended ({self.processes[rank].poll()})"}
                if "error" in answers[rank]:
                    deadline = min(deadline, time.monotonic() + 2.0)
        errors = {r: answers.get(r, {"error": "no answer in time"}).get("error") for r in range(self.world)}
        if any(errors.values()):
            raise AssertionError("\n".join(f"rank {r}: {e}" for r, e in errors.items() if e))
        return [answers[r]["value"] for r in range(self.world)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []


_POOLS: dict[int, Pool] = {}


def pool(world: int) -> Pool:
    """The session's pool of ``world`` processes."""
    return _POOLS.setdefault(world, Pool(world))


def load(file: str | Path) -> ModuleType:
    """The module in ``file``, loaded once."""
    name = "loaded_" + Path(file).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _serve() -> None:
    """What each process of a pool does: join, then answer calls until its input ends."""
    import datetime
    import faulthandler
    import signal

    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {"value": getattr(load(order["file"]), order["function"])(**order["arguments"])}
        except BaseException:
            answer = {"error": traceback.format_exc(limit=-6)}
        if "value" in answer:
            _leave_groups()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _leave_groups() -> None:
    """Give back every group that the call made: each has threads that wake a hundred times a second for as long as it lives.

    DTensor's caches go too: they answer with meshes of earlier calls (equal by shape), whose groups no longer are.
    """
    import gc

    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.distributed.tensor import debug

    dist.barrier()  # nobody leaves a group in which another still waits
    debug._clear_sharding_prop_cache()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


if __name__ == "__main__":
    _serve()
