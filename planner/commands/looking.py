"""Looking at a plan: explain, report, compare."""

from __future__ import annotations

from pathlib import Path

import click

from planner.command_line import Tokens, as_json, command, show_json
from profiles.errors import InputError


@command(
    "explain", "axisplan explain plan.json --why tp=8,pp=4\naxisplan explain --bytes-per-parameter --execution megatron --ranks 64"
)
@click.argument("plan", type=click.Path(path_type=Path), required=False)
@click.option("--why", metavar="LAYOUT", help="Also why this layout is not the one proposed.")
@click.option(
    "--bytes-per-parameter", "per_parameter", is_flag=True, help="Bytes of state a parameter, by precision, optimizer, ZeRO."
)
@click.option("--execution", default="axisplan", show_default=True, help="With --bytes-per-parameter: of this framework.")
@click.option(
    "--ranks", type=Tokens(), default=8, show_default=True, help="With --bytes-per-parameter: ranks that ZeRO shards over."
)
@as_json
def explain(plan: Path | None, why: str | None, per_parameter: bool, execution: str, ranks: int, as_json: bool) -> None:
    """What binds and the remedy, what each runner-up loses, why not another layout, every term with its numbers and source."""
    from planner import screen
    from planner.explain import bytes_table
    from planner.explain import explain as explain_plan
    from planner.plan import Plan

    if per_parameter:
        rows = bytes_table(execution, ranks)
        show_json(rows) if as_json else screen.show_bytes_table(screen.console(), rows, ranks)
        return
    if plan is None:
        raise InputError("plan", None, "is needed, or --bytes-per-parameter", "plan.json")
    document = explain_plan(Plan.load(plan), why)
    if as_json:
        show_json(document)
    else:
        screen.show_explain(screen.console(), document)


@command("report", "axisplan report plan.json --out report.html\naxisplan report plan.json --format trace --out trace.json")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The file to write (default: beside the plan).")
@click.option("--format", "form", type=click.Choice(("html", "png", "svg", "trace")), help="Default: by the ending of --out.")
@click.option("--run", "records", type=click.Path(path_type=Path), help="A run's JSON lines, laid over the trace.")
def report(plan: Path, out: Path | None, form: str | None, records: Path | None) -> None:
    """One offline HTML file with every picture of a plan; or PNG, SVG, or a trace for Perfetto."""
    from planner.report import write_report

    click.echo("{} written to {}".format(*write_report(plan, out, form, records)))


@command("compare", "axisplan compare plan.json other.json\naxisplan compare plan.json run/metrics.jsonl")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@as_json
def compare(first: Path, second: Path, as_json: bool) -> None:
    """Two plans, or a plan and a measured run (its folder, or the JSON lines of `axisplan run --json`): what differs, first."""
    from planner import screen
    from planner.compare import compare_files

    found = compare_files(first, second)
    if as_json:
        show_json(found.to_json())
    else:
        screen.show_comparison(screen.console(), str(first), str(second), found)
