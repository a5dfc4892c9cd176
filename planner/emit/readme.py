"""The README of a launch folder: ten lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cost_models.layout_text import pairs
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
    """Ten lines: the plan in a table, what this is, how to start, what to expect, how to compare."""
    job, estimate = plan.job(), plan.estimate
    worst = max(estimate["memory"], key=lambda s: s["device"])
    said = list(pairs(plan.layout_text))
    proof = "proved fastest" if plan.certificate.proved else f"within {100 * plan.certificate.gap:.2g} % of the proven bound"
    made = plan.execution.get("name", "axisplan")
    needs = [f"Set {code(need.name)} to {need.what} (e.g. {code(need.example)})." for need in program.needs]
    return fill(
        "readme.md",
        title=comment(f"{plan.model['name']} with {program.target} on {job.cluster.gpus} x {job.cluster.gpu.name}"),
        keys=_row(key for key, _ in said),
        rule="|" + "---|" * len(said),
        values=_row(cell(value) for _, value in said),
        what=(
            f"trains {code(str(plan.model['name']))}, {job.global_batch} sequences of {job.seq_len} tokens a step, in {job.precision}; "
            f"the layout is {proof} under axisplan's cost model (execution {made})"
        ),
        start=" ".join([f"`{start.start}`.", *map(comment, (*needs, *program.notes, *start.notes))]),
        expected=(
            f"{seconds(estimate['step_seconds'])} a step (80 % interval {seconds(estimate['step_seconds_low'])} to "
            f"{seconds(estimate['step_seconds_high'])}), {gib(worst['device'])} on the fullest rank (stage {worst['stage']})"
        ),
        version=plan.axisplan,
        log=start.log or program.log,
    )


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
