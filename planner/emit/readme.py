"""The README of a launch folder: ten lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cost_models.layout import pairs
from planner.emit.files import fill
from planner.plan import Plan
from planner.screen import gib, seconds

if TYPE_CHECKING:
    from planner.emit.core import Launch, Program


def comment(text: str) -> str:
    """``text`` on one line of printable characters, so that it cannot leave the comment or heading it stands in."""
    return "".join(c if c.isprintable() else " " for c in text)


def code(text: str) -> str:
    """``text`` as inline code of Markdown."""
    return "`" + comment(text).replace("`", "'") + "`"


def cell(text: str) -> str:
    """Inline code in a table, where a bar would end the cell."""
    return code(text).replace("|", "\\|")


def readme(plan: Plan, program: Program, start: Launch) -> str:
    """What this is, the plan in a table, how to start, what to expect, how to compare."""
    job, estimate = plan.job(), plan.estimate
    worst = max(estimate["memory"], key=lambda s: s["device"])
    rows = ["| key | value |", "|---|---|", *(f"| {key} | {cell(value)} |" for key, value in pairs(plan.layout_text))]
    proof = "proved fastest" if plan.certificate.proved else f"within {100 * plan.certificate.gap:.2g} % of the proven bound"
    made = plan.execution.get("name", "axisplan")
    gpus = f"{job.cluster.gpus} x {job.cluster.gpu.name}"
    needs = [f"Set {code(need.name)} to {need.what} (e.g. {code(need.example)})." for need in program.needs]
    notes = [*needs, *program.notes, *start.notes]
    return fill(
        "readme.md",
        title=comment(f"{plan.model['name']} with {program.target}"),
        summary=(
            f"Trains {code(str(plan.model['name']))} on {gpus}: {job.global_batch} sequences of {job.seq_len} tokens a step, in "
            f"{job.precision}; the layout is {proof} under axisplan's cost model (execution {made})."
        ),
        table="\n".join(rows),
        start=start.start,
        notes="".join(f"* {comment(note)}\n" for note in notes),
        expected=(
            f"{seconds(estimate['step_seconds'])} a step (80 % interval {seconds(estimate['step_seconds_low'])} to "
            f"{seconds(estimate['step_seconds_high'])}), {gib(worst['device'])} on the fullest rank (stage {worst['stage']})"
        ),
        version=plan.axisplan,
        log=start.log or program.log,
    )
