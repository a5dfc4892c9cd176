"""A Slurm controller on this machine with nodes that do not exist, for ``sbatch --test-only``: nothing is ever run.

``controller(folder, nodes, gpus)`` starts munged and slurmctld with configuration, state and logs under ``folder`` and yields the
environment that makes ``sbatch`` talk to them; both end with it. Needs Debian's slurmctld, slurm-client and munge, and root (munge
wants its files to be its user's own).
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NEEDED = ("munged", "slurmctld", "sbatch", "scontrol")
CONF = """\
ClusterName=axisplan
SlurmctldHost={host}
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=3600
NodeName=gpu[01-{nodes:02d}] CPUs=64 RealMemory=500000 Gres=gpu:{gpus} State=CLOUD
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Programs that are not installed, and ``root`` where this user is another."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    return [name for name in NEEDED if shutil.which(name, path=path) is None] + ([] if os.getuid() == 0 else ["root"])


@contextmanager
def controller(folder: Path, nodes: int, gpus: int) -> Iterator[dict[str, str]]:
    """A running controller; the environment for Slurm's commands. Raises RuntimeError with its log when it does not answer."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    (folder / "state").mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    (folder / "slurm.conf").write_text(CONF.format(host=socket.gethostname(), port=port, folder=folder, nodes=nodes, gpus=gpus))
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    env = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = [
        "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
    ]  # fmt: skip
    started: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "out.log").open("wb") as log:
            started.append(subprocess.Popen(munge, env=env, stdout=log, stderr=log))
            wait(lambda: (folder / "munge.socket").exists(), "munged", folder)
            started.append(subprocess.Popen(["slurmctld", "-D", "-c"], env=env, stdout=log, stderr=log))
            wait(
                lambda: subprocess.run(["scontrol", "ping"], env=env, capture_output=True).stdout.count(b"is UP") > 0,
                "slurmctld",
                folder,
            )
        yield env
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(20)


def wait(ready: object, what: str, folder: Path, seconds: float = 60.0) -> None:
    """Until ``ready()``; RuntimeError with the logs otherwise."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if ready():  # type: ignore[operator]
            return
        time.sleep(0.2)
    logs = "\n".join(p.read_text(errors="replace")[-800:] for p in folder.glob("*.log"))
    raise RuntimeError(f"{what} did not start:\n{logs}")
