"""The `axisplan` command. Each command reads its input, calls one function of the packages below, and shows the answer.

Exit codes: 0 done, 1 something failed, 2 the input is wrong, 3 nothing fits. Errors are one line on stderr. Heavy modules are
imported inside the commands that need them, so that planning starts at once and works where torch is absent.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.command_line import (
    CONTEXT,
    Commands,
    Examples,
    Several,
    Tokens,
    as_json,
    goal_options,
    job_options,
    make_goal,
    make_job,
    options,
    training_options,
)  # fmt: skip
from profiles.errors import AxisplanError, InputError, one_line
from profiles.version import __version__

if TYPE_CHECKING:
    from cost_models.layout import Layout


@click.group(cls=Commands, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="axisplan", message="%(prog)s %(version)s")
def cli() -> None:
    """Find the fastest way to spread the training of a model over a cluster, prove it, and launch it.

    Start with `axisplan demo`: the whole job on this machine in a few minutes.
    """


def command(name: str, example: str = "", hidden: bool = False) -> Callable[[Callable[..., Any]], click.Command]:
    return cli.command(name, cls=Examples, example=example, context_settings=CONTEXT, hidden=hidden)


def show_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2))


def not_ours() -> str | None:
    """The line to say when `planner`, `cost_models` or `profiles` would be imported from elsewhere than beside this file.

    Those are common words: a folder of that name on PYTHONPATH must not silently take the place of ours.
    """
    home = Path(__file__).resolve().parent
    for name in ("profiles", "cost_models", "planner"):
        spec = importlib.util.find_spec(name)
        where = Path(spec.origin).resolve().parent.parent if spec and spec.origin else None
        if where != home:
            return f"the package '{name}' would come from {where or 'nowhere'}, not from axisplan; take that folder off PYTHONPATH"
    return None


# -- what is known ----------------------------------------------------------------------------------------------------


@command("inspect", "axisplan inspect llama-3.1-405b --seq-len 8k\naxisplan inspect path/to/config.json --json")
@click.argument("model")
@click.option("--seq-len", type=Tokens(), default=4096, show_default=True, help="Tokens a sequence, for the attention FLOPs.")
@as_json
def inspect(model: str, seq_len: int, as_json: bool) -> None:
    """Parameters (total, active, by part), FLOPs a token and layer groups of MODEL."""
    from cost_models.flops import inspect_model
    from planner import screen
    from profiles.huggingface import load_model

    spec = load_model(model)
    document = inspect_model(spec, seq_len)
    if as_json:
        show_json(document)
    else:
        screen.show_inspect(screen.console(), spec.name, document)


@command("models", "axisplan models")
@as_json
def models(as_json: bool) -> None:
    """The models built in, by the names people write."""
    from planner import screen
    from profiles.huggingface import load_model, model_names

    if as_json:
        show_json(model_names())
        return
    rows = []
    for name in model_names():
        spec = load_model(name)
        rows.append((name, screen.count(spec.parameters.total), screen.count(spec.parameters.active), spec.num_layers, spec.hidden))
    columns = ("model", "parameters", "active", "layers", "hidden")
    screen.console().print(screen.table("built-in models (or a Hugging Face config.json, or a folder holding one)", columns, rows))


@cli.group("clusters", cls=Commands, context_settings=CONTEXT, invoke_without_command=True)
@click.pass_context
def clusters(context: click.Context) -> None:
    """The clusters and GPUs built in; `axisplan clusters show h100-sxm:64x8` prints every number with its origin."""
    if context.invoked_subcommand is None:
        from planner import screen
        from profiles.hardware import cluster_names, load_cluster

        rows = []
        for name in cluster_names():
            spec = load_cluster(name)
            domains = ", ".join(f"{level.name} {level.size}" for level in spec.levels)
            dtype = "bf16" if "bf16" in spec.gpu.peaks else "fp16"
            peak = f"{spec.gpu.peak_flops(dtype) / 1e12:,.0f}" if name != "cpu" else ""
            rows.append((name, spec.gpu.name, f"{spec.gpu.usable_bytes / screen.GIB:.1f}", peak, domains))
        columns = ("cluster", "GPU", "usable GiB", "16-bit TFLOP/s", "domains of one node")
        screen.console().print(screen.table("built-in clusters: NAME:NODESxGPUS, e.g. h100-sxm:64x8", columns, rows, left=2))


@clusters.command("show", cls=Examples, example="axisplan clusters show h100-sxm:64x8", context_settings=CONTEXT)
@click.argument("name")
@as_json
def clusters_show(name: str, as_json: bool) -> None:
    """Every number of a cluster, with its unit, origin and source."""
    from planner import screen
    from profiles.hardware import describe, load_cluster

    rows = describe(load_cluster(name))
    if as_json:
        show_json([dict(zip(("field", "value", "unit", "origin", "source"), row, strict=False)) for row in rows])
    else:
        screen.console().print(screen.table(name, ("field", "value", "unit", "origin", "source"), rows, left=5))


# -- one layout -------------------------------------------------------------------------------------------------------

LAYOUT_HELP = "tp=8,pp=4,vpp=2,cp=2,ep=8,etp=1,zero=1,micro_batch=1,schedule=interleaved,recompute=selective"
layout_option = click.option(
    "--layout", required=True, metavar="LAYOUT", help=f"key=value,...: {LAYOUT_HELP}; the rest is derived."
)
EXAMPLE_JOB = "llama-3-70b --cluster h100-sxm:8x8 --seq-len 8k --global-batch 512"


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

    job = make_job(**options)
    chosen = read_layout(job, layout)
    verdict = check_layout(job, chosen)
    if verdict["legal"] and verdict["fits"]:
        cost = estimate_step(job, chosen).to_json()
        document = {**verdict, **cost, "layout": chosen.text()}
        if as_json:
            show_json(document)
        else:
            screen.show_estimate(screen.console(), chosen.text(), document)
        return
    report_verdict(chosen, verdict, as_json)


@command("check", f"axisplan check {EXAMPLE_JOB} --layout tp=4,pp=4,micro_batch=1")
@job_options
@layout_option
@as_json
def check(layout: str, as_json: bool, **options: Any) -> None:
    """Is a layout legal, and does it fit? Exit code 0, 2 (a rule is broken) or 3 (it does not fit)."""
    from planner.legality import check as check_layout
    from planner.legality import read_layout

    job = make_job(**options)
    chosen = read_layout(job, layout)
    report_verdict(chosen, check_layout(job, chosen), as_json)


def report_verdict(chosen: Layout, verdict: dict[str, Any], as_json: bool) -> None:
    """Show what ``check`` found and leave with its exit code."""
    from planner import screen

    if as_json:
        show_json({**verdict, "layout": chosen.text()})
    else:
        screen.show_check(screen.console(), chosen.text(), verdict)
    code = 2 if not verdict["legal"] else 0 if verdict["fits"] else 3
    raise click.exceptions.Exit(code)


# -- planning ---------------------------------------------------------------------------------------------------------

PLAN_EXAMPLE = f"""axisplan plan {EXAMPLE_JOB} --out plan.json
axisplan plan llama-3.1-405b --cluster h100-sxm:2048x8 --seq-len 8k --global-batch 2048 --prove
axisplan plan llama-3-8b --cluster h100-sxm:64x8 --seq-len 8k --global-batch 4M..8M --objective fewest-gpus --tokens 1T --deadline 30d"""
wish_options = options(
    click.option("--pin", "pins", default="", metavar="KEY=VALUE,...", help="Fix or cap keys of the layout, e.g. tp=8,pp<=4."),
    click.option("--exclude", multiple=True, metavar="KEY=VALUE,...", help="Leave out layouts that have all of these values."),
    click.option("--prove", is_flag=True, help="Go on until the gap is closed (1e-4)."),
    click.option("--allow-offload", "offload", is_flag=True, help="Optimizer state and activations may live in host memory."),
)
top_option = click.option("--top", type=click.IntRange(0, 50), default=3, show_default=True, help="Runners-up to show.")
out_option = click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the plan here.")


@command("plan", PLAN_EXAMPLE)
@job_options
@wish_options
@top_option
@click.option("--similar", is_flag=True, help="Runners-up may differ in micro batch, schedule or sharding alone.")
@click.option(
    "--tie", type=click.FloatRange(0, 1, max_open=True), default=0.01, show_default=True, help="Prefer a simpler plan this near."
)
@goal_options
@out_option
@as_json
def plan(out: Path | None, as_json: bool, **options: Any) -> None:
    """The fastest layout that fits, the runners-up, and the proof."""
    from dataclasses import replace

    from planner import screen, screen_whatif
    from planner.objectives import answer
    from planner.solve import PlanRequest

    wishes = {key: options.pop(key) for key in ("pins", "exclude", "top", "similar", "tie", "prove", "offload")}
    goals = {key: options.pop(key) for key in GOALS}
    batch = options.pop("global_batch")
    job = make_job(global_batch=1, **options)
    goal = make_goal(job.seq_len, job.cluster.gpus, batch, **goals)
    request = PlanRequest(replace(job, global_batch=goal.batches[0]), **wishes)
    terminal = screen.console()
    if len(goal.batches) > 1 or goal.objective not in ("step-time", "tokens-per-second-per-gpu"):
        with screen.progress(screen.console(stderr=True), goal.objective) as show:
            found = answer(request, goal, show)
    else:
        found = answer(request, goal)
    if out:
        found.save(out)
    if as_json:
        click.echo(found.text(), nl=False)
    else:
        screen.show_plan(terminal, found, str(out) if out else None)
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
@click.option("--jobs", type=click.IntRange(1, 1024), help="Processes (default: the cores there are).")
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
    from planner import screen, screen_whatif
    from planner import sweep as sweeps
    from planner.solve import PlanRequest

    names = tuple(name.strip() for name in clusters.split(",") if name.strip())
    if not (names and seq_lens and batches):
        raise InputError("sweep", clusters, "needs a cluster, a sequence length and a global batch", "--seq-len 8k")
    if candidates and plot:
        raise InputError("--plot", str(plot), "draws plans, not candidates: leave out --candidates")
    wishes = {key: options.pop(key) for key in ("pins", "exclude", "prove", "offload")}
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
        screen_whatif.show_sweep(screen.console(), rows, candidates)


@command("replan", "axisplan replan plan.json --gpus 480 --out new-plan.json")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--gpus", type=Tokens(), required=True, help="GPUs that are left (or there now).")
@click.option("--global-batch", type=Tokens(), help="Sequences a step (default: the old one where it divides, else the nearest).")
@click.option("--pin", "pins", default="", metavar="KEY=VALUE,...", help="Fix or cap keys of the layout.")
@click.option("--prove", is_flag=True, help="Go on until the gap is closed (1e-4).")
@top_option
@out_option
@as_json
def replan(plan: Path, gpus: int, out: Path | None, as_json: bool, **options: Any) -> None:
    """The best plan on another number of GPUs that can load the checkpoints of PLAN, and what changes."""
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


# -- looking at it ----------------------------------------------------------------------------------------------------


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
    """Two plans, or a plan and a measured run (JSON lines of `axisplan run --json`): what differs, first."""
    from planner import screen
    from planner.compare import compare_files

    found = compare_files(first, second)
    if as_json:
        show_json(found.to_json())
    else:
        screen.show_comparison(screen.console(), str(first), str(second), found)


# -- running it -------------------------------------------------------------------------------------------------------


@command("demo", "axisplan demo\naxisplan demo --data notes.txt --steps 200")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("axisplan-demo"), show_default=True)
@click.option(
    "--data", type=click.Path(path_type=Path), multiple=True, help="Text to train on (default: Python's own documentation)."
)
@click.option("--model", default="llama-tiny", show_default=True, help="A built-in name or a config.json.")
@click.option("--processes", type=click.IntRange(2, 64), help="Default: the GPUs there are, else 4 on the CPU.")
@click.option("--steps", type=click.IntRange(4, 100_000), default=24, show_default=True)
@click.option("--profile", type=click.Path(path_type=Path), help="A cluster.yaml measured before, instead of measuring now.")
@click.option("--profile-seconds", type=click.FloatRange(5, 600), default=60.0, show_default=True)
def demo(**options: Any) -> None:
    """The whole job on this machine: measure, plan, prove, emit, train, compare. A few minutes on two cores."""
    from planner import screen
    from planner.demo import DemoSettings, run_demo

    run_demo(DemoSettings(**options), screen.console())


TARGETS = ("axisplan", "megatron", "megatron-bridge", "torchtitan", "deepspeed", "accelerate")
LAUNCHERS = ("torchrun", "slurm", "kubernetes", "skypilot")


@command("emit", "axisplan emit plan.json --target axisplan --launcher torchrun --out launch")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--target", type=click.Choice(TARGETS), default="axisplan", show_default=True)
@click.option("--launcher", type=click.Choice(LAUNCHERS), default="torchrun", show_default=True)
@click.option("--data", multiple=True, help="Training text or prepared data (other targets: data in the target's own form).")
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True)
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), default=3e-4, show_default=True)
@click.option("--set", "extra", multiple=True, metavar="KEY=VALUE", help="A launcher's option: partition=gpu, image=NAME.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder to write.")
def emit(plan: Path, target: str, launcher: str, data: tuple[str, ...], extra: tuple[str, ...], out: Path, **numbers: Any) -> None:
    """The launch files of a plan: a folder with the plan, the settings, launch.sh and a README."""
    from planner.emit.core import EmitSettings
    from planner.emit.core import emit as write
    from planner.plan import Plan

    folder = out.resolve()
    found = tuple(os.path.relpath(Path(d).resolve(), folder) if target == "axisplan" else d for d in data)
    settings = EmitSettings(data=found, options=pairs_of("--set", extra), **numbers)
    for path in write(Plan.load(plan), target, launcher, out, settings):
        click.echo(path)


def pairs_of(name: str, given: tuple[str, ...]) -> dict[str, str]:
    """``KEY=VALUE`` options as a mapping."""
    bad = next((p for p in given if "=" not in p), None)
    if bad is not None:
        raise InputError(name, bad, "must read key=value", f"{bad}=1")
    return dict(p.split("=", 1) for p in given)


@command(
    "import", "axisplan import --from megatron train.sh --gpus 64\naxisplan import --from torchtitan config.py --gpus 64 --json"
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--from", "source", type=click.Choice(("megatron", "torchtitan", "deepspeed", "accelerate")), required=True)
@click.option("--gpus", type=Tokens(), help="GPUs it runs on, where the file does not say.")
@as_json
def import_command(file: Path, source: str, gpus: int | None, as_json: bool) -> None:
    """A configuration that you run today -> a layout, for estimate, check and compare. The file is read, never run."""
    from planner.emit.imported import read_configuration

    found = read_configuration(source, file, gpus)
    if as_json:
        show_json(found.to_json())
        return
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(found.layout_text)
    click.echo(found.next_command(), err=True)


@command("verify", "axisplan verify plan.json\naxisplan verify plan.json --json")
@click.argument("plan", type=click.Path(path_type=Path))
@as_json
def verify(plan: Path, as_json: bool) -> None:
    """Before a launch: is the plan whole, legal, does it fit, and does the real program of its worst stage agree? Exit code 0 to 3."""
    from planner.dryrun import show
    from planner.dryrun.report import verify as verify_plan
    from planner.plan import Plan
    from planner.screen import console

    document = verify_plan(Plan.load(plan))
    if as_json:
        show_json(document)
    else:
        show.show_verify(console(), document)
    raise click.exceptions.Exit(document["exit_code"])


@command("dry-run", "axisplan dry-run plan.json --stage 0 --strict\naxisplan dry-run plan.json --module mymodel:build")
@click.argument("plan", type=click.Path(path_type=Path), required=False)
@click.option("--plan", "plan_option", type=click.Path(path_type=Path), help="The plan, as an option.")
@click.option("--rank", type=int, help="The rank to trace (default: the first of the stage with the highest predicted peak).")
@click.option("--stage", type=int, help="Trace the first rank of this pipeline rank.")
@click.option("--all-stages", is_flag=True, help="Trace one rank of every stage; stages that are alike once.")
@click.option(
    "--steps", type=click.IntRange(1, 100), default=2, show_default=True, help="Training steps; the last one is reported."
)
@click.option(
    "--module", metavar="PACKAGE.MODULE:FUNCTION", help="Trace the module that this function builds instead of the plan's model."
)
@click.option("--strict", is_flag=True, help="Exit code 1 where formula and program differ beyond the tolerances.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw memory over the step.")
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), help="Write a trace for Perfetto or chrome://tracing.")
@as_json
def dry_run(plan: Path | None, plan_option: Path | None, as_json: bool, **options: Any) -> None:
    """One rank of the plan's real program, in a world of any size, without GPUs: memory, FLOPs, collectives, against the formulas."""
    from planner.dryrun.command import run_command
    from planner.plan import Plan

    path = plan or plan_option
    if path is None:
        raise InputError("plan", "", "name a plan file", "axisplan dry-run plan.json")
    documents, code = run_command(Plan.load(path), not as_json, **options)
    if as_json:
        show_json(documents[0] if len(documents) == 1 else {"stages": documents})
    raise click.exceptions.Exit(code)


@command("run", "axisplan run plan.json --data notes.txt --steps 100")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--settings", type=click.Path(path_type=Path), help="Training settings (JSON), as emitted.")
@click.option("--data", type=click.Path(path_type=Path), multiple=True, help="Training text or prepared data.")
@click.option("--steps", type=click.IntRange(1))
@click.option("--out", type=click.Path(path_type=Path), help="Where checkpoints and metrics go (default: run/ beside the plan).")
@click.option("--set", "extra", multiple=True, metavar="KEY=VALUE", help="Any other training setting.")
@click.option("--port", type=click.IntRange(1, 65535), help="Rendezvous port (default: a free one).")
@as_json
def run(
    plan: Path,
    settings: Path | None,
    data: tuple[Path, ...],
    steps: int | None,
    out: Path | None,
    extra: tuple[str, ...],
    port: int | None,
    as_json: bool,
) -> None:
    """Train a plan on this machine's devices through torchrun: one line a step."""
    from planner import screen
    from planner.plan import Plan
    from planner.runtime.launch import launch

    loaded = Plan.load(plan)
    arguments = ["train", str(plan.resolve())]
    for name, value in (("--settings", settings), ("--steps", steps), ("--out", out)):
        arguments += [name, str(value)] if value is not None else []
    arguments += ["--data", *map(str, data)] if data else []
    for pair in extra:
        arguments += ["--set", pair]

    def record(line: dict[str, Any]) -> None:
        if as_json:
            click.echo(json.dumps(line))
        else:
            click.echo(
                f"step {line['step']:>6}  loss {line['loss']:.4f}  grad norm {line['grad_norm']:.3f}  "
                f"{screen.seconds(line['seconds'])}  {line['tokens_per_second']:,.0f} tokens/s  {screen.gib(line['peak_bytes'])}"
            )

    launch(arguments, loaded.layout_object.world, record, port=port)


@cli.group("data", cls=Commands, context_settings=CONTEXT)
def data() -> None:
    """Training data: text to tokens that are mapped into memory."""


DATA_EXAMPLE = """axisplan data prepare book.txt notes.txt --out tokens
axisplan run plan.json --data tokens"""


@data.command("prepare", cls=Examples, example=DATA_EXAMPLE, context_settings=CONTEXT)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--tokenizer", default="bytes", show_default=True, help="bytes, or a Hugging Face tokenizer.json.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="The folder to write.")
@as_json
def data_prepare(files: tuple[Path, ...], tokenizer: str, out: Path, as_json: bool) -> None:
    """Tokenise text FILES, one document each, into a folder that `run --data` and `emit --data` take."""
    from planner.runtime.data import prepare

    found = prepare(files, out, tokenizer)
    if as_json:
        show_json(found)
    else:
        click.echo(", ".join(f"{key} {value}" for key, value in found.items()))


@command("worker", hidden=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """One process of a run, started by torchrun."""
    if arguments[:1] == ("check",):
        from planner.preflight import run as check_cluster

        raise click.exceptions.Exit(check_cluster(arguments[1:]))
    from planner.runtime.worker import main as work

    raise click.exceptions.Exit(work(list(arguments)))


worker.ignore_unknown_options = True
worker.context_settings = {"ignore_unknown_options": True, "help_option_names": []}


# -- measuring --------------------------------------------------------------------------------------------------------


@cli.group("profile", cls=Commands, context_settings=CONTEXT)
def profile() -> None:
    """Measure this machine's GPUs (or CPU), links, or layers; what is measured can be planned with."""


measuring = options(
    click.option("--device", type=click.Choice(("auto", "cpu", "cuda")), default="auto", show_default=True),
    click.option(
        "--processes", type=click.IntRange(1, 64), help="How many work at once (default: the GPUs there are; 4 on a CPU)."
    ),
    click.option("--seconds", type=click.FloatRange(1, 7200), default=60.0, show_default=True, help="About how long to measure."),
    click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write what was measured here (YAML)."),
)
plot_option = click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Picture of points and curves (.png, .svg)."
)
LAYER_EXAMPLE = """axisplan profile layer llama-tiny --seq-len 256 --micro-batch 1 --out layers.json
axisplan profile layer my_package.my_module:make_layer"""


@profile.command("gpu", cls=Examples, example="axisplan profile gpu --out cluster.yaml --plot gpu.png", context_settings=CONTEXT)
@measuring
@plot_option
@click.option("--dtype", "dtypes", multiple=True, help="Precisions to measure (default: those this device is fast in).")
def profile_gpu(
    device: str, processes: int | None, seconds: float, out: Path | None, plot: Path | None, dtypes: tuple[str, ...]
) -> None:
    """Matrix products, attention, memory, launches, usable memory, and the links between the processes: a cluster file."""
    from planner import screen
    from profiles.measure.machine import profile_machine

    terminal = screen.console()
    with screen.progress(terminal, "measuring") as show:
        measured = profile_machine(processes, budget_seconds=seconds, device=device, dtypes=dtypes or None, progress=show)
    screen.show_measurement(terminal, measured)
    if out:
        measured.save(out)
        terminal.print(f"written to {out}; plan with --cluster {out}")
    if plot and measured.gpu.profile:
        from profiles.measure.plots import plot_gpu

        plot_gpu(measured.gpu.profile, measured.gpu.samples, plot)
        terminal.print(f"picture in {plot}")
    if measured.interrupted:
        raise KeyboardInterrupt


@profile.command("links", cls=Examples, example="axisplan profile links --processes 4 --layout tp=2,pp=2", context_settings=CONTEXT)
@measuring
@plot_option
@click.option("--layout", metavar="LAYOUT", help="Measure the groups of each axis of this layout (default: every group size).")
def profile_links(
    device: str, processes: int | None, seconds: float, out: Path | None, plot: Path | None, layout: str | None
) -> None:
    """Every collective over groups of processes, by message size, several groups at once included."""
    from cost_models.layout import Layout
    from planner import screen
    from profiles.measure.links import measure_links

    world = processes or 4
    axes = None
    if layout:
        chosen = Layout.parse(layout, world)
        names = [axis for axis, size in chosen.axes if size > 1]
        axes = {axis: list(chosen.groups(axis)) for axis in names} or None
    terminal = screen.console()
    with screen.progress(terminal, "measuring links") as show:
        measured = measure_links(axes, processes=world, device=device, budget_seconds=seconds, progress=show)
    if measured is None:
        return
    screen.show_links(terminal, measured)
    if out and measured.link:
        from profiles.files import write_text
        from profiles.hardware import to_yaml

        write_text(out, to_yaml(measured.link))
        measured.save_samples(out.with_suffix(".samples.json"))
    if plot and measured.link:
        from profiles.measure.plots import plot_links

        plot_links(measured.link, measured.samples, plot)
    if measured.interrupted:
        raise KeyboardInterrupt


@profile.command(
    "layer",
    cls=Examples,
    example=LAYER_EXAMPLE,
    context_settings=CONTEXT,
)
@click.argument("what")
@measuring
@click.option("--seq-len", "seq_lens", type=Tokens(), multiple=True, default=(1024,), show_default=True)
@click.option("--micro-batch", "micro_batches", type=click.IntRange(1), multiple=True, default=(1,), show_default=True)
@click.option("--tp", type=click.IntRange(1), multiple=True, default=(1,), show_default=True, help="Local shapes of this degree.")
@click.option("--dtype", default="fp32", show_default=True)
def profile_layer(what: str, device: str, processes: int | None, seconds: float, out: Path | None, **shapes: Any) -> None:
    """One layer of a model, or any module that a function PACKAGE.MODULE:FUNCTION returns: time, FLOPs, kept and peak bytes."""
    from planner import screen
    from planner.layer_profiles import measure

    terminal = screen.console()
    with screen.progress(terminal, "measuring layers") as show:
        found = measure(what, device=device, processes=processes or 1, budget_seconds=seconds, progress=show, **shapes)
    screen.show_layers(terminal, found)
    if out:
        found.save(out)
        terminal.print(f"written to {out}; plan with --profile {out}")


# -- accuracy ---------------------------------------------------------------------------------------------------------


@command("measure", "axisplan measure log.txt --plan plan.json --out runs.csv && axisplan regress runs.csv")
@click.argument("log", type=click.Path(path_type=Path))
@click.option("--plan", type=click.Path(path_type=Path), required=True, help="The plan that was run.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Add the row to this runs.csv.")
@click.option("--id", "identity", default="", help="The row's id (default: a hash of the plan); a row of the same id is replaced.")
@click.option("--warmup", type=click.IntRange(0), help="Lines to leave out at the start (default: a third, at most 10).")
@as_json
def measure(log: Path, plan: Path, out: Path | None, identity: str, warmup: int | None, as_json: bool) -> None:
    """A training log (axisplan, Megatron-LM, TorchTitan, DeepSpeed) -> a row of runs.csv, beside what the plan predicted."""
    from planner import screen
    from planner.emit.logs import append_row
    from planner.emit.logs import measure as read
    from planner.plan import Plan

    loaded = Plan.load(plan)
    row, found = read(log, loaded, identity=identity, warmup=warmup)
    if out is not None:
        append_row(out, row)
    if as_json:
        show_json(row)
    else:
        error = 100 * (loaded.step_seconds / found.seconds - 1)
        measured, planned = screen.seconds(found.seconds), screen.seconds(loaded.step_seconds)
        click.echo(f"{measured} a step (median of {found.counted}, {found.form} log); predicted {planned} ({error:+.1f} %)")


@command("regress", "axisplan regress runs.csv --baseline baseline.json --out predictions.csv")
@click.argument("runs", type=click.Path(path_type=Path))
@click.option("--baseline", type=click.Path(path_type=Path), help="Earlier --json output: exit code 1 when the models got worse.")
@click.option("--out", type=click.Path(path_type=Path), help="Write a prediction a row here (CSV).")
@click.option("--picture", type=click.Path(path_type=Path), help="Predicted against measured, log-log, by source (.png, .svg).")
@click.option("--github", is_flag=True, help="Print what changed as GitHub annotations.")
@as_json
def regress(runs: Path, baseline: Path | None, out: Path | None, picture: Path | None, github: bool, as_json: bool) -> None:
    """The error of the cost models on measured runs, by source; exit code 1 when worse than the baseline."""
    from cost_models import accuracy, accuracy_report
    from cost_models.runs import load_runs, read_rows
    from profiles.files import read_json, write_text

    found = accuracy.regress(*load_runs(read_rows(runs)))
    document = found.to_json()
    if out:
        write_text(out, found.predictions_csv())
    if picture:
        accuracy_report.picture(found, picture)
    changes = accuracy.compare(document, read_json(baseline, "--baseline")) if baseline else []
    if as_json:
        show_json(document)
    else:
        lines = accuracy_report.summary(document)
        if baseline:
            lines += accuracy.github_annotations(changes, str(runs)) if github else accuracy_report.diff(changes)
        click.echo("\n".join(lines))
    if any(change.worse for change in changes):
        raise click.exceptions.Exit(1)


@command("calibrate", "axisplan calibrate my-runs.csv --cluster h100-sxm:4x8 --out my-cluster.yaml")
@click.argument("runs", type=click.Path(path_type=Path))
@click.option("--cluster", required=True, help="The cluster whose few constants are fitted.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Write the calibrated cluster here (YAML).")
@as_json
def calibrate(runs: Path, cluster: str, out: Path, as_json: bool) -> None:
    """Fit the few free constants of one cluster to measured runs; refuses when there are too few or it does not help."""
    from dataclasses import asdict

    from cost_models.calibrate import FACTORS
    from cost_models.calibrate import calibrate as fit
    from cost_models.runs import load_runs, read_rows
    from profiles.files import write_text
    from profiles.hardware import load_cluster, to_yaml

    found = fit(load_runs(read_rows(runs))[0], load_cluster(cluster))
    write_text(out, to_yaml(found.cluster))
    if as_json:
        show_json({k: v for k, v in asdict(found).items() if k != "cluster"})
        return
    for name, factor in found.factors.items():
        click.echo(f"{name:10} x {factor:.3f}   {FACTORS[name][2]}")
    click.echo(
        f"{found.runs} runs: error {100 * found.before:.1f} % before, {100 * found.after:.1f} % fitted, "
        f"{100 * found.held_out:.1f} % on runs left out; written to {out}"
    )


# -- experts ----------------------------------------------------------------------------------------------------------


@command(
    "experts", "axisplan experts --routing histogram.csv --ep 8 --redundant 8\naxisplan experts --zipf 0.8 --experts 64 --ep 8"
)
@click.option("--routing", type=click.Path(path_type=Path), help="Tokens by expert: CSV (a row a layer) or JSON.")
@click.option("--zipf", type=click.FloatRange(0, 4), help="Synthetic skew of this exponent instead of a histogram.")
@click.option("--experts", "count", type=click.IntRange(1, 65536), help="Experts, with --zipf.")
@click.option("--ep", type=click.IntRange(1), required=True, help="Expert-parallel ranks.")
@click.option("--redundant", type=click.IntRange(0), default=0, show_default=True, help="Further copies of experts, in all.")
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


@command("doctor", "axisplan doctor")
@click.option("--seconds", type=click.FloatRange(1, 600), default=60.0, show_default=True, help="The longest a backend is tried.")
@as_json
def doctor(seconds: float, as_json: bool) -> None:
    """What this machine has, what is missing, and whether the backends work; exit code 1 when something is broken."""
    from planner import screen
    from planner.doctor import examine

    found = examine(seconds)
    if as_json:
        show_json(found.to_json())
    else:
        screen.show_doctor(screen.console(), found.checks)
    if not found.healthy:
        raise click.exceptions.Exit(1)


@command("completion", 'eval "$(axisplan completion bash)"')
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """The shell's completion script; put its output into your shell's start-up file."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "axisplan", "_AXISPLAN_COMPLETE").source())


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with DESIGN.md's codes; never a traceback (AXISPLAN_TRACEBACK=1 shows one)."""
    code = 0
    try:
        if problem := not_ours():
            raise AxisplanError(problem)
        code = cli.main(args=argv, prog_name="axisplan", standalone_mode=False) or 0
        sys.stdout.flush()
    except AxisplanError as error:
        code = fail(error, error.exit_code)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.exceptions.NoArgsIsHelpError as helped:
        click.echo(helped.format_message())
        code = 0
    except click.UsageError as error:
        where = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        code = fail(" ".join(f"{error.format_message()}{where}".split()), 2)
    except click.FileError as error:
        code = fail(error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt):
        code = fail("interrupted; nothing half-written was left", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        code = fail(f"{error.filename or 'a file'}: {error.strerror or one_line(error)}", 1)
    except MemoryError:
        code = fail("this machine ran out of memory", 1)
    except RecursionError:
        code = fail("the input is nested too deeply", 2)
    except Exception as error:
        if os.environ.get("AXISPLAN_TRACEBACK"):
            raise
        code = fail(f"internal error: {type(error).__name__}: {one_line(error)} (AXISPLAN_TRACEBACK=1 shows where)", 1)
    sys.exit(code)


def fail(error: BaseException | str, code: int) -> int:
    if os.environ.get("AXISPLAN_TRACEBACK") and isinstance(error, BaseException):
        raise error
    click.echo(f"axisplan: {error if isinstance(error, str) else one_line(error)}", err=True)
    return code
