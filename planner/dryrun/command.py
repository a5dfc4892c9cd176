"""What ``axisplan dry-run`` does with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.dryrun import show
from planner.dryrun.modules import trace_module
from planner.dryrun.report import DryRun, all_stages, dry_run
from planner.plan import Plan
from planner.screen import console
from profiles.errors import InputError


def run_command(
    plan: Plan,
    shown: bool,
    *,
    rank: int | None,
    stage: int | None,
    all_stages: bool,
    steps: int,
    module: str | None,
    strict: bool,
    plot: Path | None,
    trace: Path | None,
) -> tuple[list[dict[str, Any]], int]:
    """(documents, exit code). ``shown``: print tables as well. Raises InputError."""
    if module is not None:
        if plot or trace or all_stages or stage is not None or strict:
            raise InputError("--module", module, "goes with --rank and --json alone")
        document = trace_module(module, plan, rank or 0)
        if shown:
            show.show_module(console(), document)
        return [document], 0
    runs = _runs(plan, rank, stage, all_stages, steps)
    documents = [run.document() for run in runs]
    if shown:
        for document in documents:
            show.show(console(), document)
    worst = max(runs, key=lambda run: run.trace.record.peak_bytes)
    if plot is not None:
        show.plot(worst.trace.record, worst.trace.rank, worst.formula.memory.peak_allocated, plot)
    if trace is not None:
        show.write_trace([(run.trace.rank, run.trace.record) for run in runs], trace)
    return documents, int(strict and not all(run.agrees for run in runs))


def _runs(plan: Plan, rank: int | None, stage: int | None, every: bool, steps: int) -> list[DryRun]:
    if not every:
        return [dry_run(plan, rank, stage, steps)]
    if rank is not None or stage is not None:
        raise InputError("--all-stages", True, "goes without --rank and --stage")
    return all_stages(plan, steps)
