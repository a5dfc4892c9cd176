"""Installs the real parsers of the targets into ``.oracles/``, each in an environment of its own, within a bounded time.

``python tests/oracles/install.py [--seconds N] [--folder DIR] [NAME ...]`` reads ``pins.toml`` beside it. What is already there at the
same pins is kept; what is there at others is replaced once the new one is whole, and kept where that fails. ``DIR/oracles.json`` then holds the variables of the tests (docs/emit.md), for those that could be installed; the
others are named with the reason. Exit code 0 unless a NAME asked for is unknown: a machine without the network still runs the rest of
its tests, and the tests of a parser that is missing say so when they skip.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
NEWER = ("--python-version", "3.12", "--only-binary=:all:")
"""Sources that no wheel of this Python holds are taken from the next one's."""


class Unavailable(Exception):
    """Why an oracle could not be installed, in a line."""


def pip(python: Path, arguments: list[str], end: float, environment: dict[str, str]) -> None:
    """Run pip until ``end`` (monotonic seconds). Raises Unavailable with its last line."""
    left = end - time.monotonic()
    if left <= 5:
        raise Unavailable("no time was left")
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "--retries", "1", *arguments]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=left,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip was stopped after {left:.0f} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise Unavailable(said[0][:200] if said else f"pip exited with {done.returncode}")


def unpack(wheel: Path, into: Path) -> None:
    """A wheel's files as the folder ``into``, in the place of what was there."""
    fresh = into.with_name(f".{into.name}.part")
    shutil.rmtree(fresh, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(fresh)
    replace(into, fresh)


def replace(old: Path, new: Path) -> None:
    """``new`` takes the place of ``old``, whole."""
    old.parent.mkdir(parents=True, exist_ok=True)
    away = old.with_name(f".{old.name}.old")
    shutil.rmtree(away, ignore_errors=True)
    if old.exists():
        old.rename(away)
    new.rename(old)
    shutil.rmtree(away, ignore_errors=True)


def make(home: Path, pins: dict[str, Any], end: float) -> None:
    """The environment of an oracle as the folder ``home``. Raises Unavailable."""
    venv.create(home, with_pip=True, clear=True)
    if pins.get("torch"):
        site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
        (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    alone = [] if pins.get("dependencies") else ["--no-deps"]
    constraints = [] if "constraints" not in pins else ["--constraint", str(HERE / pins["constraints"])]
    command = ["install", "--no-compile", *alone, *constraints, *pins["packages"]]
    pip(home / "bin" / "python", command, end, pins.get("environment", {}))


def install(name: str, pins: dict[str, Any], folder: Path, end: float) -> dict[str, str]:
    """One oracle under ``folder``; its variables. Raises Unavailable, and leaves an older one as it was."""
    home, wheels = folder / name, folder / "wheels"
    stamp = home / "pins.json"
    if not (stamp.exists() and json.loads(stamp.read_text()) == pins and (home / "bin" / "python").exists()):
        fresh = folder / f".{name}.part"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            make(fresh, pins, end)
            for pinned in pins.get("sources", {}).values():
                pip(fresh / "bin" / "python", ["download", "--no-deps", *NEWER, "--dest", str(wheels), pinned], end, {})
        except Unavailable:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        for where, pinned in pins.get("sources", {}).items():
            stem = pinned.replace("-", "_").replace("==", "-")
            unpack(next(wheels.glob(f"{stem}-*.whl")), folder / where)
        (fresh / stamp.name).write_text(json.dumps(pins))
        replace(home, fresh)
    return {
        variable: str(home / "bin" / "python" if what == "python" else folder / what) for variable, what in pins["sets"].items()
    }


def main() -> int:
    every: dict[str, dict[str, Any]] = tomllib.loads((HERE / "pins.toml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="all installations together (default 300)")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / ".oracles", help="where to (default .oracles)")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(every)} (default: all, in this order)")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in every]
    if unknown:
        parser.error(f"no such oracle: {', '.join(unknown)}")
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "oracles.json"
    found: dict[str, str] = json.loads(written.read_text()) if written.exists() else {}
    end = time.monotonic() + given.seconds
    for name in given.names or every:
        start = time.monotonic()
        try:
            found |= install(name, every[name], folder, end)
        except (Unavailable, OSError) as reason:
            kept = ", the older one is kept" if set(every[name]["sets"]) <= set(found) else ""
            print(f"oracle {name:<12} not installed{kept}: {reason}", flush=True)
        else:
            print(f"oracle {name:<12} ready ({time.monotonic() - start:.0f} s)", flush=True)
    beside = written.with_suffix(".part")
    beside.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    beside.replace(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
