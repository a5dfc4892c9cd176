"""One layout: estimate, check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from planner.command_line import EXAMPLE_JOB, Tokens, as_json, command, job_options, make_job, show_json

if TYPE_CHECKING:
    from cost_models.layout import Layout


LAYOUT_HELP = "tp=8,pp=4,vpp=2,cp=2,ep=8,etp=1,zero=1,micro_batch=1,schedule=interleaved,recompute=selective"
layout_option = click.option(
    "--layout", required=True, metavar="LAYOUT", help=f"key=value,...: {LAYOUT_HELP}; the rest is derived."
)


@command("estimate", f"axisplan estimate {EXAMPLE_JOB} --layout tp=4,pp=4,micro_batch=1")
@job_options
@layout_option
@as_json
def estimate(layout: str, as_json: bool, **options: Any) -> None:
    """What one layout costs: step time with its interval, where the seconds go, memory by stage."""
    from cost_models.step import estimate as estimate_step
    from planner import screen
    from planner.legality import check as check_layout
    from planner.legality import read_layout
    from planner.screen_measured import measured_document, show_measured

    job = make_job(**options)
    chosen = read_layout(job, layout)
    verdict = check_layout(job, chosen)
    if verdict["legal"] and verdict["fits"]:
        cost = estimate_step(job, chosen).to_json()
        document = {**verdict, **cost, "layout": chosen.text(), **measured_document(job, chosen)}
        if as_json:
            show_json(document)
        else:
            terminal = screen.console()
            screen.show_estimate(terminal, chosen.text(), document)
            show_measured(terminal, job, chosen)
        return
    report_verdict(chosen, verdict, as_json)


@command("check", f"axisplan check {EXAMPLE_JOB} --layout tp=4,pp=4,micro_batch=1 --eval-batch 64")
@job_options
@layout_option
@click.option("--eval-batch", type=Tokens(), help="Sequences of an evaluation step: it must run through the same pipeline.")
@as_json
def check(layout: str, eval_batch: int | None, as_json: bool, **options: Any) -> None:
    """Is a layout legal, and does it fit? Exit code 0, 2 (a rule is broken) or 3 (it does not fit)."""
    from planner.legality import check as check_layout
    from planner.legality import read_layout

    job = make_job(**options)
    chosen = read_layout(job, layout)
    report_verdict(chosen, check_layout(job, chosen, eval_batch), as_json)


def report_verdict(chosen: Layout, verdict: dict[str, Any], as_json: bool) -> None:
    """Show what ``check`` found and leave with its exit code."""
    from planner import screen

    if as_json:
        show_json({**verdict, "layout": chosen.text()})
    else:
        screen.show_check(screen.console(), chosen.text(), verdict)
    code = 2 if not verdict["legal"] else 0 if verdict["fits"] else 3
    raise click.exceptions.Exit(code)
