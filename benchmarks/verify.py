"""Every test of every tier, one test file at a time, and its figures kept: what ``make verify`` runs.

    python benchmarks/verify.py                    all files; figures in benchmarks/results/verify.json
    python benchmarks/verify.py --continue         only files whose kept figures are of another commit, or that failed
    python benchmarks/verify.py tests/planner/...  these files or folders

Exit code 1 when a test fails. Tests whose oracle (a target's own package, a browser) is not installed skip, and are counted as skipped.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(__file__).parent / "results" / "verify.json"
LIMIT = 7200
"""Seconds a test file may take."""


def commit() -> str:
    """Short hash of what is checked out, with ``+`` when files differ from it (figures kept here apart)."""
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return head + "+" * bool(changed.strip())


def run(file: Path) -> dict[str, Any]:
    """Figures of one test file: tests by outcome, seconds of wall time, names of what failed."""
    of = commit()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(file)]
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=LIMIT, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    bad = [c.get("name", "") for c in cases if c.find("failure") is not None or c.find("error") is not None]
    if code not in (0, 5) and not bad:
        bad = [f"pytest ended with {code}"]
    skipped = sum(c.find("skipped") is not None for c in cases)
    return {
        "commit": of, "date": datetime.now(UTC).date().isoformat(), "passed": len(cases) - skipped - len(bad), "skipped": skipped,
        "failed": bad, "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def files(wanted: list[Path]) -> list[Path]:
    """Test files under ``wanted``, in the order of their names."""
    found = [f for w in wanted for f in ([w] if w.is_file() else sorted(w.rglob("test_*.py")))]
    return [f.resolve().relative_to(ROOT) for f in found]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("paths", nargs="*", type=Path, default=[ROOT / "tests"])
    arguments.add_argument("--continue", dest="go_on", action="store_true")
    chosen = arguments.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and tests send it
    kept: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept = {name: row for name, row in kept.items() if (ROOT / name).exists()}
    for file in files(chosen.paths):
        row = kept.get(file.as_posix())
        if chosen.go_on and row and row["commit"] == commit() and not row["failed"]:
            continue
        print(f"== {file}", flush=True)
        kept[file.as_posix()] = run(file)
        KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    rows = kept.values()
    failed = {name: row["failed"] for name, row in kept.items() if row["failed"]}
    for name, tests in failed.items():
        print(f"failed in {name}: {', '.join(tests)}")
    print(
        f"{sum(r['passed'] for r in rows)} passed, {sum(r['skipped'] for r in rows)} skipped, {sum(len(r['failed']) for r in rows)} failed "
        f"in {sum(r['seconds'] for r in rows) / 60:.0f} minutes; {len(kept)} files; commits {', '.join(sorted({r['commit'] for r in rows}))}"
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
