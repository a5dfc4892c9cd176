"""Launching: demo, emit, import, verify, dry-run, run, data, and the workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from planner.command_line import CONTEXT, Commands, Examples, Tokens, as_json, cli, command, show_json
from planner.number_types import LEARNING_RATE
from profiles.errors import InputError


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
SOURCES = TARGETS[1:]


@command("emit", "axisplan emit plan.json --target axisplan --launcher torchrun --out launch")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--target", type=click.Choice(TARGETS), help="Default: what the plan was made for, else axisplan.")
@click.option("--launcher", type=click.Choice(LAUNCHERS), default="torchrun", show_default=True)
@click.option("--data", multiple=True, help="Training text or prepared data (other targets: data in the target's own form).")
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True)
@click.option("--learning-rate", type=LEARNING_RATE, default=3e-4, show_default=True)
@click.option(
    "--set", "extra", multiple=True, metavar="KEY=VALUE",
    help="An option of the launcher (partition=gpu, image=NAME) or of the target (tokenizer=NAME, release=main).",
)  # fmt: skip
@click.option(
    "--env", "environment", multiple=True, metavar="NAME=VALUE", help="A variable for every process; the folder's plan records it."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder to write.")
@as_json
def emit(
    plan: Path,
    target: str | None,
    launcher: str,
    data: tuple[str, ...],
    extra: tuple[str, ...],
    environment: tuple[str, ...],
    out: Path,
    as_json: bool,
    **numbers: Any,
) -> None:
    """The launch files of a plan: a folder with the plan, the settings, launch.sh and a README."""
    from planner.emit.core import EmitSettings
    from planner.emit.core import emit as write
    from planner.emit.possible import own_target
    from planner.plan import Plan

    made = Plan.load(plan)
    target = target or own_target(made) or "axisplan"
    folder = out.resolve()
    found = tuple(os.path.relpath(Path(d).resolve(), folder) if target == "axisplan" else d for d in data)
    settings = EmitSettings(data=found, options=pairs_of("--set", extra), environment=pairs_of("--env", environment), **numbers)
    written = write(made, target, launcher, out, settings)
    if as_json:
        show_json({"target": target, "launcher": launcher, "folder": str(out), "files": [path.name for path in written]})
        return
    for path in written:
        click.echo(path)


def pairs_of(name: str, given: tuple[str, ...]) -> dict[str, str]:
    """``KEY=VALUE`` options as a mapping."""
    bad = next((p for p in given if "=" not in p), None)
    if bad is not None:
        raise InputError(name, bad, "must read key=value", f"{bad}=1")
    return dict(p.split("=", 1) for p in given)


@command(
    "import", "axisplan import --from megatron train.sh --gpus 64\naxisplan import --from deepspeed ds_config.json --gpus 64 --json"
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--from", "source", type=click.Choice(SOURCES), required=True)
@click.option("--gpus", type=Tokens(), help="GPUs it runs on, where the file does not say.")
@as_json
def import_command(file: Path, source: str, gpus: int | None, as_json: bool) -> None:
    """A configuration that you run today -> a layout, for estimate, check and compare. The file is read, never run.

    What was not understood or taken from a default is a note; what the target's own parser lets pass and its run does not, a problem.
    """
    from planner.emit.imported import read_configuration

    found = read_configuration(source, file, gpus)
    if as_json:
        show_json(found.to_json())
        return
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    for problem in found.problems:
        click.echo(f"problem: {problem}", err=True)
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


RUN_EXAMPLE = """axisplan run plan.json --data notes.txt --steps 100
axisplan run plan-for-gpus.json --data notes.txt --device cpu
axisplan run plan.json --data tokens --eval-data held-out.txt --eval-every 50 --tensorboard --trace trace.json"""


@command("run", RUN_EXAMPLE)
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--settings", type=click.Path(path_type=Path), help="Training settings (JSON), as emitted.")
@click.option("--data", type=click.Path(path_type=Path), multiple=True, help="Training text or prepared data.")
@click.option("--steps", type=click.IntRange(1))
@click.option("--eval-data", type=click.Path(path_type=Path), multiple=True, help="Held-out text or prepared data.")
@click.option("--eval-every", type=click.IntRange(0), help="Steps between held-out losses (default: one, after the last step).")
@click.option("--tensorboard", is_flag=True, help="Write metrics for TensorBoard too, under OUT/tensorboard.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the last step of every stage over the predicted one, for Perfetto or chrome://tracing.",
)
@click.option("--runs", type=click.Path(path_type=Path, dir_okay=False), help="Add the measured run to this runs.csv too.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Where metrics and checkpoints (--set checkpoint_every=N; else none) go (default: run/ here, or beside --settings).",
)
@click.option(
    "--device",
    type=click.Choice(("plan", "cpu", "cuda")),
    help="What to compute on (default: what the plan is for; cpu runs any plan here, slowly).",
)
@click.option("--set", "extra", multiple=True, metavar="KEY=VALUE", help="Any other training setting.")
@click.option(
    "--restarts",
    type=click.IntRange(0, 1000),
    default=0,
    show_default=True,
    help="How often all workers are started again after one died; they go on from the last checkpoint.",
)
@click.option("--port", type=click.IntRange(1, 65535), help="Rendezvous port (default: a free one).")
@as_json
def run(
    plan: Path,
    settings: Path | None,
    data: tuple[Path, ...],
    steps: int | None,
    eval_data: tuple[Path, ...],
    eval_every: int | None,
    tensorboard: bool,
    trace: Path | None,
    runs: Path | None,
    out: Path | None,
    device: str | None,
    extra: tuple[str, ...],
    restarts: int,
    port: int | None,
    as_json: bool,
) -> None:
    """Train a plan on this machine's devices through torchrun: one line a step."""
    from planner.plan import Plan
    from planner.runtime.launch import checked, launch, shown
    from planner.runtime.settings import parser

    loaded = Plan.load(plan)
    arguments = ["train", str(plan.resolve())]
    numbers = (
        ("--settings", settings),
        ("--steps", steps),
        ("--eval-every", eval_every),
        ("--trace", trace),
        ("--runs", runs),
        ("--out", out),
        ("--device", device),
    )
    for name, value in numbers:
        arguments += [name, str(value)] if value is not None else []
    arguments += ["--data", *map(str, data)] if data else []
    arguments += ["--eval-data", *map(str, eval_data)] if eval_data else []
    arguments += ["--tensorboard"] if tensorboard else []
    for pair in extra:
        arguments += ["--set", pair]

    folder = checked(parser().parse_args(arguments), alone=True)
    trained, show = False, shown(as_json)

    def record(line: dict[str, Any]) -> None:
        nonlocal trained
        trained = True
        show(line)

    launch(arguments, loaded.layout_object.world, record, log=folder / "workers.log", port=port, restarts=restarts)
    if not trained:
        click.echo("nothing to train: the last checkpoint already has all of --steps", err=True)


@command("export", "axisplan export run --out my-model\naxisplan export run/checkpoints/step-00000200 --dtype fp32 --out my-model")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(("bf16", "fp16", "fp32")), default="bf16", show_default=True)
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), help="A Hugging Face config.json to lay beside the weights."
)
@click.option(
    "--base", type=click.Path(path_type=Path, file_okay=False), help="Where some parts were frozen: the folder to take them from."
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="The folder to write.")
def export(checkpoint: Path, dtype: str, config: Path | None, base: Path | None, out: Path) -> None:
    """A run's CHECKPOINT (or the last one of a run's folder) as Hugging Face safetensors, in one process; LoRA adapters as PEFT's files."""
    import torch

    from cost_models.checkpoints import export_bytes
    from planner.runtime.adapter_files import export_adapters, trained_of
    from planner.runtime.checkpoint import find, read_facts
    from planner.runtime.weights import export as write
    from planner.screen import gib
    from profiles.model import ModelSpec

    if config is not None and not config.is_file():
        raise InputError("--config", config, "is not a file")
    path = find(checkpoint)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    trained = trained_of(path)
    if trained.get("lora_rank"):
        for file in export_adapters(path, out, kind):
            click.echo(file)
        return
    if trained.get("frozen") and base is None:
        raise InputError(
            "--base", "none", f"the run trained all but {', '.join(trained['frozen'])}; name the folder that it started from"
        )
    needed = export_bytes(ModelSpec.model_validate(read_facts(path)["model"]))
    click.echo(f"reading {path}; at most {gib(needed)} of host memory", err=True)
    for file in write(path, out, kind, config, base=base):
        click.echo(file)
    if config is None:
        click.echo("no config.json, which transformers needs beside the weights: --config FILE lays it there", err=True)


@cli.group("data", cls=Commands, context_settings=CONTEXT, example="axisplan data prepare book.txt notes.txt --out tokens")
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
    if arguments[:1] == ("start",):
        from planner.runtime.launch import start

        start(arguments[1:])
        return
    from planner.runtime.worker import main as work

    work(list(arguments))


worker.ignore_unknown_options = True
worker.context_settings = {"ignore_unknown_options": True, "help_option_names": []}
