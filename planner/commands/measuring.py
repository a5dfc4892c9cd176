"""Measuring: profile, measure, regress, calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.command_line import CONTEXT, Commands, Examples, Tokens, as_json, cli, command, options, show_json
from profiles.errors import InputError

if TYPE_CHECKING:
    from profiles.measure.machine import MachineMeasurement


@cli.group("profile", cls=Commands, context_settings=CONTEXT, example="axisplan profile gpu --out cluster.yaml")
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


@profile.command(
    "gpu",
    cls=Examples,
    example="axisplan profile gpu --out cluster.yaml --plot gpu.png\naxisplan profile gpu --processes 1 --against h200-sxm",
    context_settings=CONTEXT,
)
@measuring
@plot_option
@click.option("--dtype", "dtypes", multiple=True, help="Precisions to measure (default: those this device is fast in).")
@click.option("--against", metavar="GPU", help="Compare what was measured with this built-in GPU (or a file).")
@as_json
def profile_gpu(
    device: str,
    processes: int | None,
    seconds: float,
    out: Path | None,
    plot: Path | None,
    dtypes: tuple[str, ...],
    against: str | None,
    as_json: bool,
) -> None:
    """Matrix products, attention, memory, launches, usable memory, and the links between the processes: a cluster file."""
    from planner import screen, screen_measured
    from profiles.hardware import load_gpu
    from profiles.measure.judging import differences
    from profiles.measure.machine import profile_machine
    from profiles.measure.plots import check_picture, plot_gpu

    if plot:
        check_picture(plot)
    known = load_gpu(against) if against else None
    terminal = screen.console(stderr=as_json)
    with screen.progress(terminal, "measuring") as show:
        measured = profile_machine(processes, budget_seconds=seconds, device=device, dtypes=dtypes or None, progress=show)
    beside = differences(known, measured.gpu.samples, measured.gpu.facts) if known else {}
    if not as_json:
        screen_measured.show_measurement(terminal, measured)
        screen_measured.show_differences(terminal, known, beside)
    if out:
        terminal.print(measured.save(out), soft_wrap=True)
    if (kept := keep_as_this(measured)) and not as_json:
        terminal.print(kept, soft_wrap=True)
    if plot and measured.gpu.profile:
        plot_gpu(measured.gpu.profile, measured.gpu.samples, plot)
        terminal.print(f"picture in {plot}")
    if as_json:
        show_json(screen_measured.machine_document(measured, beside))
    if measured.interrupted:
        raise KeyboardInterrupt


def keep_as_this(measured: MachineMeasurement) -> str:
    """Keep a whole measurement as the cluster ``this``; a line that says so, or why not."""
    from profiles.catalogue import this_machine

    if measured.cluster is None or measured.interrupted or measured.gpu.rough:
        return ""
    try:
        measured.save(this_machine())
    except OSError as error:
        return f"not kept as this machine: {error}"
    return "kept as this machine: --cluster this, axisplan clusters show this"


LINKS_EXAMPLE = """axisplan profile links --processes 4 --layout tp=2,pp=2
axisplan profile links --processes 2 --kinds all_reduce,broadcast"""


@profile.command("links", cls=Examples, example=LINKS_EXAMPLE, context_settings=CONTEXT)
@measuring
@plot_option
@click.option("--layout", metavar="LAYOUT", help="Measure the groups of each axis of this layout (default: every group size).")
@click.option(
    "--kinds", metavar="KIND,...", help="Only these: all_reduce, all_gather, reduce_scatter, all_to_all, send_recv, broadcast."
)
@as_json
def profile_links(
    device: str, processes: int | None, seconds: float, out: Path | None, plot: Path | None, layout: str | None, kinds: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Every collective over groups of processes, by message size: one group alone, all groups of an axis at once, and with --layout
    every two axes at once (contention)."""
    from cost_models.layout import Layout
    from planner import screen, screen_measured
    from profiles.links import KINDS
    from profiles.measure.gpu import check, workers
    from profiles.measure.links import measure_links
    from profiles.measure.plots import check_picture, plot_links

    if plot:
        check_picture(plot)
    axes = None
    if layout:
        chosen = Layout.parse(layout, workers(processes, check(device, None, 1, seconds)[0]))
        names = [axis for axis, size in chosen.axes if size > 1]
        axes = {axis: list(chosen.groups(axis)) for axis in names} or None
    terminal = screen.console(stderr=as_json)
    with screen.progress(terminal, "measuring links") as show:
        chosen_kinds = kinds.replace("-", "_").replace(" ", "").split(",") if kinds else KINDS
        measured = measure_links(
            axes, processes=processes, device=device, kinds=chosen_kinds, budget_seconds=seconds, progress=show
        )
    if measured is None:
        return
    if as_json:
        show_json(screen_measured.links_document(measured))
    else:
        screen_measured.show_links(terminal, measured)
    if out:
        from profiles.files import write_text
        from profiles.hardware import to_yaml

        measured.save_samples(out.with_suffix(".samples.json"))
        if measured.link:
            write_text(out, to_yaml(measured.link))
    if plot and measured.link:
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
@click.option(
    "--name", help="What the rows are called: MODEL.KIND is what --profile looks for (default: the model's or function's)."
)
@as_json
def profile_layer(
    what: str, device: str, processes: int | None, seconds: float, out: Path | None, as_json: bool, **shapes: Any
) -> None:
    """One layer of a model, or any module that a function PACKAGE.MODULE:FUNCTION returns: time, FLOPs, kept and peak bytes.

    What is written to --out is given to plan, estimate and check as --profile, where it goes before the formulas.
    """
    from planner import screen, screen_measured
    from planner.layer_profiles import measure

    terminal = screen.console(stderr=as_json)
    with screen.progress(terminal, "measuring layers") as show:
        found = measure(what, device=device, processes=processes or 1, budget_seconds=seconds, progress=show, **shapes)
    if as_json:
        show_json(found.model_dump(mode="json"))
    else:
        screen_measured.show_layers(terminal, found)
    if out:
        found.save(out)
        terminal.print(f"written to {out}; plan with --profile {out}")


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
    before = read_json(baseline, "--baseline") if baseline else {}
    if baseline and (not isinstance(before, dict) or "step_time" not in before):
        raise InputError("--baseline", baseline, "is not what regress --json printed: it has no step_time")
    changes = accuracy.compare(document, before) if baseline else []
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
