"""What the terminal shows of sweeps, replanning, Pareto fronts and goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.layout_words import bare
from planner.screen import gib, percent, seconds, table

if TYPE_CHECKING:
    from rich.console import Console

    from planner.plan import Plan
    from planner.replan import Replan

MOST_CANDIDATES = 30
FULL_WIDTH = 130
"""Columns of a window below which a sweep's table leaves its layouts the room that its gaps took."""


def show_sweep(out: Console, rows: Sequence[Mapping[str, Any]], candidates: bool, written: Path | None) -> None:
    """One line a point, or the candidates that come first; all of them are ``written``."""
    if candidates:
        _show_candidates(out, rows, written)
        return
    shown = [
        (
            r["cluster"], r["gpus"], r["seq_len"], r["global_batch"], seconds(r["step_seconds"]),
            f"{r['tokens_per_second_per_gpu']:,.0f}", percent(r["mfu"]), gib(r["peak_bytes"]), percent(r["gap"]),
            bare(r["layout"]),
        )
        if r["fits"]
        else (r["cluster"], r["gpus"], r["seq_len"], r["global_batch"], "-", "-", "-", "-", "-", r["reason"])
        for r in rows
    ]  # fmt: skip
    columns = (
        "cluster",
        "GPUs",
        "tokens",
        "batch",
        "step",
        "tokens/s a GPU",
        "MFU",
        "fullest",
        "gap",
        "layout, or why there is none",
    )
    grid = table("sweep", columns, shown)
    grid.padding = (0, 1) if out.width >= FULL_WIDTH else 0
    grid.columns[-1].justify = "left"
    out.print(grid)


def _show_candidates(out: Console, rows: Sequence[Mapping[str, Any]], written: Path | None) -> None:
    shown = [
        (
            bare(r["layout"]), "yes" if r["fits"] else "no", gib(r["peak_bytes"]) if r["peak_bytes"] else "-", r["binding"] or "-",
            seconds(r["seconds"]) if r["seconds"] else "-", r["reason"],
        )
        for r in rows[:MOST_CANDIDATES]
    ]  # fmt: skip
    grid = table("candidates", ("layout", "fits", "peak", "binding", "step", "reason"), shown)
    grid.columns[-1].justify = "left"
    out.print(grid)
    if len(rows) > MOST_CANDIDATES:
        where = f"all are in {written}" if written else "--out candidates.csv writes all of them"
        out.print(f"{len(rows) - MOST_CANDIDATES} more; {where}", soft_wrap=True, markup=False)


def show_replan(out: Console, found: Replan, saved_as: str | None = None) -> None:
    """What changes, then the new plan."""
    rows = [(c.field.replace("_", " "), shown(c.field, c.before), shown(c.field, c.after)) for c in found.changes]
    grid = table("what changes", ("", "before", "after"), rows)
    out.print(grid)
    for note in found.notes:
        out.print(f"note: {note}", soft_wrap=True)
    from planner.screen import show_plan

    show_plan(out, found.plan, saved_as)


def shown(field: str, value: Any) -> str:
    """A value in its unit."""
    if field.endswith("_bytes"):
        return gib(value)
    if field.endswith("_seconds"):
        return seconds(value)
    if field == "mfu":
        return percent(value)
    if isinstance(value, tuple):
        return ("|" if value and isinstance(value[0], int) else "+").join(map(str, value)) or "none"
    return f"{value:,.0f}" if isinstance(value, float) else str(value)


def show_extras(out: Console, plan: Plan) -> None:
    """The Pareto front, the goodput, and the notes of the certificate, where there are any."""
    if plan.front:
        rows = [
            (
                p["gpus"], seconds(p["step_seconds"]), f"{p['tokens_per_second_per_gpu']:,.0f}", gib(p["device_bytes"]),
                gib(p["headroom_bytes"]), p["layout"],
            )
            for p in plan.front
        ]  # fmt: skip
        grid = table("Pareto front", ("GPUs", "step", "tokens/s a GPU", "fullest", "free", "layout"), rows)
        grid.columns[-1].justify = "left"
        out.print(grid)
    for note in plan.certificate.notes:
        out.print(f"note: {note}", soft_wrap=True)
    g = plan.goodput
    if g and "interval_seconds" in g:
        out.print(
            f"goodput      a failure every {g['job_mtbf_hours']:,.1f} h: save every {g['interval_seconds'] / 60:,.1f} min"
            f" ({g['interval_steps']} steps), {percent(g['useful_fraction'])} of the time trains; {g['spare_nodes']} spare nodes:"
            f" enough stand {100 * g['availability']:.2f} % of the time, {percent(g['overall'])} of what is paid trains",
            soft_wrap=True,
        )
    if g and "tokens" in g:
        worth = f", {g['cost']:,.0f} dollars" if g.get("cost") else ""
        out.print(
            f"budget       {g['tokens']:.4g} tokens: {g['steps']:,} steps, {g['run_seconds'] / 86400:.2f} days,"
            f" {g['gpu_hours']:,.0f} GPU-hours{worth}",
            soft_wrap=True,
        )
