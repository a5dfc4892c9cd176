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

from profiles.errors import AxisplanError, InputError, one_line
from profiles.version import __version__

if TYPE_CHECKING:
    from cost_models.job import Job
    from cost_models.layout import Layout

PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
EXECUTIONS = ("axisplan", "megatron", "torchtitan", "deepspeed", "fsdp", "accelerate")


# -- what every command shares ----------------------------------------------------------------------------------------


class Tokens(click.ParamType):
    """A positive count; k and M stand for 1,024 and 1,048,576 (``8k`` = 8192)."""

    name = "COUNT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip()
        scale = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 1)
        digits = text[:-1] if scale > 1 else text
        if not digits.isdecimal() or int(digits) < 1 or len(digits) > 12:
            name = param.opts[-1] if param else "count"
            raise InputError(name, value, "must be a whole number of at least 1, k and M allowed", "8k")
        return int(digits) * scale


class Examples(click.Command):
    """A command whose help ends with an example that can be pasted."""

    def __init__(self, *args: Any, example: str = "", **kwargs: Any) -> None:
        self.example = example
        super().__init__(*args, **kwargs)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.example:
            with formatter.section("Example"):
                for line in self.example.strip().splitlines():
                    formatter.write_text(line)


class Commands(click.Group):
    """Lists commands in the order they are written: the order in which a newcomer needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


@click.group(cls=Commands, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="axisplan", message="%(prog)s %(version)s")
def cli() -> None:
    """Find the fastest way to spread the training of a model over a cluster, prove it, and launch it.

    Start with `axisplan demo`: the whole job on this machine in a few minutes.
    """


def command(name: str, example: str = "", hidden: bool = False) -> Callable[[Callable[..., Any]], click.Command]:
    return cli.command(name, cls=Examples, example=example, context_settings=CONTEXT, hidden=hidden)


def options(*added: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several click decorators as one."""

    def apply(function: Any) -> Any:
        for decorator in reversed(added):
            function = decorator(function)
        return function

    return apply


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")

job_options = options(
    click.argument("model"),
    click.option("--cluster", required=True, help="Built-in name such as h100-sxm:64x8 (64 nodes of 8), or a YAML file."),
    click.option("--gpus", type=Tokens(), help="Use this many GPUs of the cluster (default: all)."),
    click.option("--seq-len", type=Tokens(), required=True, help="Tokens a sequence (8k = 8192)."),
    click.option("--global-batch", type=Tokens(), required=True, help="Sequences a step."),
    click.option("--precision", type=click.Choice(PRECISIONS), default="bf16", show_default=True),
    click.option("--execution", default="axisplan", show_default=True, help=f"What will run it: {', '.join(EXECUTIONS)}."),
    click.option("--set", "facts", multiple=True, metavar="execution.KEY=VALUE", help="Set one fact of the execution."),
    click.option("--optimizer", default="adamw", show_default=True, help="adamw, adam8bit, muon or sgd."),
    click.option("--moe-imbalance", type=float, help="Max / mean tokens of an expert-parallel rank."),
    click.option("--memory-limit", type=float, metavar="GIB", help="Usable device memory, instead of the GPU's."),
    click.option("--margin", type=float, default=0.08, show_default=True, help="Share of usable memory kept free."),
)


def make_job(
    model: str,
    cluster: str,
    gpus: int | None,
    seq_len: int,
    global_batch: int,
    precision: str,
    execution: str,
    facts: tuple[str, ...],
    optimizer: str,
    moe_imbalance: float | None,
    memory_limit: float | None,
    margin: float,
) -> Job:
    """The Job that the shared options describe."""
    from cost_models.execution import load_execution
    from cost_models.job import GIB, Job
    from profiles.hardware import load_cluster
    from profiles.huggingface import load_model

    if not 0 <= margin < 1:
        raise InputError("--margin", margin, "must be at least 0 and below 1", 0.08)
    if memory_limit is not None and not 0 < memory_limit < 1e6:
        raise InputError("--memory-limit", memory_limit, "must be GiB above 0", 80)
    if moe_imbalance is not None and not 1 <= moe_imbalance < 1e4:
        raise InputError("--moe-imbalance", moe_imbalance, "is max / mean tokens of a rank, so at least 1", 1)
    spec = load_cluster(cluster)
    if gpus is not None:
        spec = spec.with_gpus(gpus)
    return Job(
        model=load_model(model),
        cluster=spec,
        execution=load_execution(execution, read_facts(facts)),
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        optimizer=optimizer,
        moe_imbalance=moe_imbalance,
        margin=margin,
        memory_limit_bytes=memory_limit * GIB if memory_limit is not None else None,
    )


def read_facts(facts: tuple[str, ...]) -> dict[str, str]:
    """``execution.KEY=VALUE`` options as a mapping."""
    read = {}
    for fact in facts:
        key, sep, value = fact.partition("=")
        if not sep or not key.startswith("execution."):
            raise InputError("--set", fact, "must read execution.KEY=VALUE", "execution.attention=flash")
        read[key.removeprefix("execution.")] = value
    return read


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


@command("worker", hidden=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """One process of a run, started by torchrun."""
    from planner.runtime.worker import main as work

    raise click.exceptions.Exit(work(list(arguments)))


worker.ignore_unknown_options = True
worker.context_settings = {"ignore_unknown_options": True, "help_option_names": []}


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
        code = fail(f"{error.format_message()}{where}", 2)
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
