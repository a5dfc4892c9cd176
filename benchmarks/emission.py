"""How many random plans the targets' and launchers' real parsers take as they were planned.

``python benchmarks/emission.py [--plans 200] [--only NAME ...] [--kind KIND]`` draws plans as the tests do (tests/planner/emit/judges.py,
dense and mixtures of experts) and keeps a row for each parser, kind and source in ``benchmarks/results/emission.json``: what was asked,
how many were accepted, the first complaints. Parsers come from tests/oracles/install.py or the variables of docs/emit.md; one that is not
there is left out and named. ``--page`` prints the rows as the table of docs/emit.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from profiles.files import write_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "emission.json"
sys.path.insert(0, str(ROOT / "tests" / "planner" / "emit"))

from judges import JUDGES, KINDS, judged  # noqa: E402
from oracles import where  # noqa: E402

CHECKOUTS = {
    "megatron": ("Megatron-LM", "AXISPLAN_MEGATRON"),
    "megatron-bridge": ("Megatron-Bridge", "AXISPLAN_MEGATRON_BRIDGE"),
    "torchtitan": ("TorchTitan", "AXISPLAN_TORCHTITAN"),
}
"""Judges whose parser may be a checkout of the user's own: its name, the variable that says where it is."""
PACKAGES = {
    "torchtitan": "torchtitan",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
    "skypilot": "skypilot",
    "kubernetes": "kubeflow",
}
"""Judges whose parser is the first package of an entry of pins.toml."""


def git(folder: Path, *arguments: str) -> str:
    """What git says of ``folder``; nothing where it is no checkout of its own."""
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 and (folder / ".git").exists() else ""


def source(name: str) -> str:
    """Which parser a judge asks: a commit, or a pinned package."""
    pins: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "tests" / "oracles" / "pins.toml").read_text(encoding="utf-8"))
    title, variable = CHECKOUTS.get(name, ("", ""))
    if variable in where() and (commit := git(Path(where()[variable]), "log", "-1", "--format=%h of %cs")):
        return f"{title}, commit {commit}"
    if name in ("megatron", "megatron-bridge"):
        pinned = next(iter(pins["bridge" if name == "megatron-bridge" else "megatron"]["sources"].values()))
        return f"wheel {pinned}"
    if name in PACKAGES:
        return ", ".join(pins[PACKAGES[name]]["packages"][: 4 if name == "kubernetes" else 1])
    if name == "slurm":
        return subprocess.run(["/usr/sbin/slurmctld", "-V"], capture_output=True, text=True, check=False).stdout.strip()
    if name == "torchrun":
        import torch

        return f"torch {torch.__version__}"
    return "this repository's runtime"


def measured(name: str, kind: str, plans: int, seed: int) -> dict[str, Any]:
    """A row: the judge's verdict on ``plans`` random plans."""
    start, complaints = time.monotonic(), []
    for plan, said in judged(name, kind, plans, seed):
        if said:
            complaints.append(f"{plan}: {', '.join(said)}"[:400])
    return {
        "judge": name, "kind": kind, "source": source(name), "plans": plans, "accepted": plans - len(complaints), "seed": seed,
        "complaints": complaints[:3], "commit": git(ROOT, "rev-parse", "--short", "HEAD"), "date": datetime.date.today().isoformat(),
        "wall_seconds": round(time.monotonic() - start),
    }  # fmt: skip


def keep(row: dict[str, Any]) -> None:
    """Put the row in the place of an older one of the same judge, kind and source."""
    rows = load()
    key = ("judge", "kind", "source")
    rows = [r for r in rows if [r[k] for k in key] != [row[k] for k in key]] + [row]
    order = list(JUDGES)
    rows.sort(key=lambda r: (order.index(r["judge"]), KINDS.index(r["kind"]), r["source"]))
    write_text(RESULTS, json.dumps(rows, indent=1) + "\n")


def load() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    return rows


def page(rows: list[dict[str, Any]]) -> str:
    """The rows as a table of Markdown: dense and mixtures of experts side by side."""
    lines = ["| target or launcher | parser | dense | mixtures of experts | date |", "|---|---|---|---|---|"]
    for name, parser in dict.fromkeys((r["judge"], r["source"]) for r in rows):
        cells = {r["kind"]: f"{r['accepted']} of {r['plans']}" for r in rows if (r["judge"], r["source"]) == (name, parser)}
        date = max(r["date"] for r in rows if (r["judge"], r["source"]) == (name, parser))
        lines.append(f"| `{name}` | {parser} | {cells.get('dense', '')} | {cells.get('moe', '')} | {date} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--only", nargs="*", choices=list(JUDGES), default=list(JUDGES), metavar="NAME")
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if given.page:
        print(page(load()))
        return
    for name in given.only:
        for kind in given.kind:
            try:
                row = measured(name, kind, given.plans, given.seed)
            except pytest.skip.Exception as reason:
                print(f"{name:<16} left out: {reason}", flush=True)
                break
            keep(row)
            print(
                f"{name:<16} {kind:<6} {row['accepted']} of {row['plans']} ({row['wall_seconds']} s)",
                *row["complaints"],
                sep="\n  ",
                flush=True,
            )


if __name__ == "__main__":
    main()
