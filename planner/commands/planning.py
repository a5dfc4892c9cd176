"""Choosing: plan, sweep, replan, experts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.command_line import (
    EXAMPLE_JOB,
    Several,
    Tokens,
    as_json,
    collect_seldom,
    command,
    goal_options,
    job_options,
    make_goal,
    make_job,
    options,
    show_json,
    training_options,
)
from planner.number_types import TIE, Count, Real
from profiles.errors import InputError

if TYPE_CHECKING:
    from cost_models.job import Job
    from planner.plan import Plan

PLAN_EXAMPLE = f"""axisplan plan {EXAMPLE_JOB} --out plan.json
axisplan plan llama-3.1-405b --cluster h100-sxm:2048x8 --seq-len 8k --global-batch 2048 --prove
axisplan plan llama-3-8b --cluster h100-sxm:64x8 --seq-len 8k --global-batch 4M..8M --objective fewest-gpus --tokens 1T --deadline 30d
axisplan plan mixtral-8x7b --cluster h100-sxm:8x8 --seq-len 4k --global-batch 512 --routing histogram.csv"""
wish_options = options(
    click.option("--pin", "pins", default="", metavar="KEY=VALUE,...", help="Fix or cap keys of the layout, e.g. tp=8,pp<=4."),
    click.option("--exclude", multiple=True, metavar="KEY=VALUE,...", help="Leave out layouts that have all of these values."),
    click.option("--prove", is_flag=True, help="Go on until the gap is closed (1e-4)."),
    click.option(
        "--time-limit", type=float, metavar="SECONDS", help="End the search after this long with what it has, the gap said."
    ),
    click.option("--allow-offload", "offload", is_flag=True, help="Optimizer state and activations may live in host memory."),
)
top_option = click.option("--top", type=Count(0, 50), default=3, show_default=True, help="Runners-up to show.")
out_option = click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the plan here.")


@command("plan", PLAN_EXAMPLE)
@job_options
@wish_options
@top_option
@click.option("--similar", is_flag=True, help="Runners-up may differ in micro batch, schedule or sharding alone.")
@click.option("--tie", type=TIE, default=0.01, show_default=True, help="Prefer a simpler plan this near.")
@goal_options
@out_option
@as_json
def plan(out: Path | None, as_json: bool, **options: Any) -> None:
    """The fastest layout that fits, the runners-up, and the proof."""
    collect_seldom()
    from dataclasses import replace

    from planner.emit.possible import NO_FILES, model_refusal, with_refusal
    from planner.objectives import answer
    from planner.solve import PlanRequest

    wishes = {key: options.pop(key) for key in ("pins", "exclude", "top", "similar", "tie", "prove", "offload", "time_limit")}
    goals = {key: options.pop(key) for key in GOALS}
    batch = options.pop("global_batch")
    job = make_job(global_batch=1, **options)
    goal = make_goal(job.seq_len, job.cluster.gpus, batch, **goals)
    request = PlanRequest(replace(job, global_batch=goal.batches[0]), **wishes)
    if why := model_refusal(request.job):
        click.echo(f"warning, before planning: {NO_FILES}{why}", err=True)
    many = len(goal.batches) > 1 or goal.objective not in ("step-time", "tokens-per-second-per-gpu")
    if many or sys.stderr.isatty():
        from planner import screen

        with screen.progress(screen.console(stderr=True), goal.objective if many else "planning") as show:
            found = answer(request, goal, show) if many else answer(replace(request, report=show), goal)
    else:
        found = answer(request, goal)
    found = with_refusal(found)
    if job.routing:
        from planner.routing import with_routing

        found = with_routing(found)
    if out:
        found.save(out)
    if as_json:
        click.echo(found.text(), nl=False)
    else:
        show_found(found, job, out)


def show_found(found: Plan, job: Job, out: Path | None) -> None:
    """A plan on the terminal; ``out``: where it was written."""
    from planner import screen, screen_whatif
    from planner.screen_measured import show_measured

    terminal = screen.console()
    screen.show_plan(terminal, found, str(out) if out else None)
    show_measured(terminal, job, found.layout_object)
    screen_whatif.show_extras(terminal, found)


GOALS = ("objective", "deadline", "tokens", "mtbf", "checkpoint_seconds", "restart_seconds", "repair_hours", "spare")
SWEEP_EXAMPLE = """axisplan sweep llama-3-8b --cluster h100-sxm:8x8 --gpus 8,16,32,64 --seq-len 8k --global-batch 128 --plot scaling.png
axisplan sweep llama-3-8b --cluster h100-sxm:1x8,h200-sxm:1x8 --seq-len 4k,8k --global-batch 128 --out sweep.csv
axisplan sweep llama-3-8b --cluster h100-sxm:1x8 --seq-len 8k --global-batch 128 --candidates --out candidates.csv"""


@command("sweep", SWEEP_EXAMPLE)
@click.argument("model")
@click.option("--cluster", "clusters", required=True, metavar="NAME,...", help="One or more clusters (GPU types), commas between.")
@click.option("--gpus", type=Several(), default=(), help="GPU counts (default: all of each cluster).")
@click.option("--seq-len", "seq_lens", type=Several(), required=True, help="Tokens a sequence.")
@click.option("--global-batch", "batches", type=Several(), required=True, help="Sequences a step.")
@click.option("--keep-tokens", "tokens_kept", is_flag=True, help="Longer sequences, fewer of them: the tokens a step stay.")
@training_options
@wish_options
@click.option("--candidates", is_flag=True, help="A row for every candidate of each point: layout, fits, peak, time, reason.")
@click.option("--jobs", type=Count(1, 1024), help="Processes (default: the cores there are).")
@click.option("--state", type=click.Path(path_type=Path, dir_okay=False), help="Keep finished points here, and take them up again.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Picture of tokens/s a GPU (.png, .svg).")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write all rows here (.csv or .json).")
@as_json
def sweep(
    clusters: str,
    gpus: tuple[int, ...],
    seq_lens: tuple[int, ...],
    batches: tuple[int, ...],
    tokens_kept: bool,
    candidates: bool,
    jobs: int | None,
    state: Path | None,
    plot: Path | None,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Plans over GPU counts, sequence lengths, batches and GPU types; or every candidate of them, and why it lost."""
    collect_seldom()
    from planner import screen, screen_whatif
    from planner import sweep as sweeps
    from planner.solve import PlanRequest

    names = tuple(name.strip() for name in clusters.split(",") if name.strip())
    if not (names and seq_lens and batches):
        raise InputError("sweep", clusters, "needs a cluster, a sequence length and a global batch", "--seq-len 8k")
    if candidates and plot:
        raise InputError("--plot", str(plot), "draws plans, not candidates: leave out --candidates")
    wishes = {key: options.pop(key) for key in ("pins", "exclude", "prove", "offload", "time_limit")}
    job = make_job(cluster=names[0], gpus=None, seq_len=seq_lens[0], global_batch=batches[0], **options)
    asked = sweeps.Sweep(PlanRequest(job, **wishes), names, gpus, seq_lens, batches, tokens_kept, candidates)
    with screen.progress(screen.console(stderr=True), "sweep") as show:
        rows = sweeps.run(asked, jobs=jobs, state=state, report=show)
    if out:
        sweeps.write(rows, out)
    if plot:
        sweeps.plot(rows, plot)
    if as_json:
        show_json(rows)
    else:
        screen_whatif.show_sweep(screen.console(), rows, candidates, out)


@command("replan", "axisplan replan plan.json --gpus 480 --out new-plan.json\naxisplan replan plan.json --gpus 480 --keep-batch")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--gpus", type=Tokens(), required=True, help="GPUs that are left (or there now).")
@click.option("--global-batch", type=Tokens(), help="Sequences a step (default: the old one where it divides, else the nearest).")
@click.option("--keep-batch", is_flag=True, help="Fail rather than train with another global batch.")
@click.option("--pin", "pins", default="", metavar="KEY=VALUE,...", help="Fix or cap keys of the layout.")
@click.option("--prove", is_flag=True, help="Go on until the gap is closed (1e-4).")
@top_option
@out_option
@as_json
def replan(plan: Path, gpus: int, out: Path | None, as_json: bool, **options: Any) -> None:
    """The best plan on another number of GPUs that can load the checkpoints of PLAN, and what changes."""
    collect_seldom()
    from planner import screen, screen_whatif
    from planner.plan import Plan
    from planner.replan import replan as again

    found = again(Plan.load(plan), gpus, **options)
    if out:
        found.plan.save(out)
    if as_json:
        show_json(found.to_json())
    else:
        screen_whatif.show_replan(screen.console(), found, str(out) if out else None)


@command(
    "experts", "axisplan experts --routing histogram.csv --ep 8 --redundant 8\naxisplan experts --zipf 0.8 --experts 64 --ep 8"
)
@click.option("--routing", type=click.Path(path_type=Path), help="Tokens by expert: CSV (a row a layer) or JSON.")
@click.option(
    "--zipf",
    type=Real("an exponent from 0 to below 5", 0.0, 5.0, 1.0),
    help="Synthetic skew of this exponent instead of a histogram.",
)
@click.option("--experts", "count", type=Count(1, 65536), help="Experts, with --zipf.")
@click.option("--ep", type=Count(1), required=True, help="Expert-parallel ranks.")
@click.option("--redundant", type=Count(0), default=0, show_default=True, help="Further copies of experts, in all.")
@as_json
def experts(routing: Path | None, zipf: float | None, count: int | None, ep: int, redundant: int, as_json: bool) -> None:
    """Place (and replicate) experts so that the most loaded rank is least loaded, with a bound."""
    from planner import screen
    from planner.routing import place_layers

    document = place_layers(routing, zipf, count, ep, redundant)
    if as_json:
        show_json(document)
    else:
        screen.show_experts(screen.console(), document)
