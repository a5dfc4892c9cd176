"""Starting a launch folder with stand-ins for torchrun and axisplan that print their words."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

STAND_IN = '#!/bin/bash\nprintf "%s\\0" "$@"\n'
NEEDED = {
    "MODEL": "/models/$(id) x", "MEGATRON_PATH": "/m", "MEGATRON_BRIDGE_PATH": "/b", "HF_ASSETS_PATH": "/h", "MASTER_ADDR": "head",
}  # fmt: skip
"""What launch.sh of any target wants set."""


def commands(folder: Path, *names: str) -> Path:
    """A folder of commands that print their words, each ended by a zero byte."""
    folder.mkdir(exist_ok=True)
    for name in names or ("torchrun", "axisplan"):
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)
    return folder


def run(out: Path, *arguments: str, node_rank: int = 0) -> subprocess.CompletedProcess[bytes]:
    """launch.sh of the folder ``out``, with the stand-ins beside that folder first on the path."""
    path = f"{commands(out.parent / 'bin')}:/usr/bin:/bin"
    env = {**NEEDED, "PATH": path, "HOME": os.environ["HOME"], "NODE_RANK": str(node_rank)}
    command = ["bash", str(out / "launch.sh"), *arguments]
    return subprocess.run(command, env=env, cwd=out.parent, capture_output=True, timeout=60, check=False)


def started(out: Path, *arguments: str, node_rank: int = 0) -> list[str]:
    """The words that torchrun is given, by launch.sh or by the command that launch.sh becomes (``axisplan worker start torchrun ...``)."""
    done = run(out, *arguments, node_rank=node_rank)
    assert done.returncode == 0, done.stderr.decode()
    words = done.stdout.decode().split("\0")[:-1]
    return words[words.index("--nnodes") :]
