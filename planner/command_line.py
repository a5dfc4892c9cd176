"""The frame of the command line: parameter types, help with examples, the options that describe a job, and the Job they make."""

from __future__ import annotations

import atexit
import gc
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from planner.number_types import DURATION, GIBIBYTES, IMBALANCE, MARGIN, MEAN_TIME, Count, nearest_count
from profiles.errors import InputError
from profiles.version import __version__

if TYPE_CHECKING:
    from cost_models.job import Job
    from planner.objectives import Goal

PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
EXECUTIONS = ("axisplan", "megatron", "megatron-bridge", "torchtitan", "deepspeed", "fsdp", "accelerate")


USUAL: dict[str, int | str] = {"--seq-len": "8k", "--global-batch": 512, "--gpus": 8}
"""What is proposed where a count cannot be read at all."""


class Tokens(click.ParamType):  # type: ignore[type-arg,unused-ignore]
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
            near = nearest_count(text.lstrip("-"), USUAL.get(name, 1))
            raise InputError(name, value, "must be a whole number of at least 1 and of at most 12 digits, k and M allowed", near)
        return int(digits) * scale


class Batches(Tokens):
    """Sequences a step, or a range of tokens a step to choose from (``4M..16M``), which stays text."""

    name = "COUNT|LOW..HIGH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if ".." in str(value) else super().convert(value, param, ctx)


class Several(Tokens):
    """Counts with commas between: ``8,16,32``."""

    name = "COUNT,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        read = super().convert
        return tuple(read(part, param, ctx) for part in str(value).split(",") if part.strip())


class Words(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Names with commas between."""

    name = "NAME,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(part.strip() for part in str(value).split(",") if part.strip())


class WithExample:
    """What a command and a group of commands share: help that ends with an example that can be pasted."""

    def __init__(self, *args: Any, example: str = "", **kwargs: Any) -> None:
        self.example = example
        super().__init__(*args, **kwargs)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.example:
            with formatter.section("Example"):
                for line in self.example.strip().splitlines():
                    formatter.write(f"  {line}\n")  # as it is: a wrapped line could not be pasted


class Examples(WithExample, click.Command):
    """A command whose help ends with an example. An empty name of a file is refused: to ``pathlib`` it would be this folder."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        paths = {name for p in self.params if isinstance(p.type, click.Path) for name in p.opts if name.startswith("-")}
        for before, word in zip(["", *args], args, strict=False):
            name = before if word == "" else word.removesuffix("=") if word.endswith("=") else ""
            if name in paths:
                raise InputError(name, "", "names a file or a folder")
        return super().parse_args(ctx, args)


class Commands(WithExample, click.Group):
    """Lists commands in the order they are written, in which a newcomer needs them, each with its whole first sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, c.get_short_help_str(10_000)) for name, c in self.commands.items() if not c.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


def options(*added: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several click decorators as one."""

    def apply(function: Any) -> Any:
        for decorator in reversed(added):
            function = decorator(function)
        return function

    return apply


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")

training_options = options(
    click.option("--precision", type=click.Choice(PRECISIONS), default="bf16", show_default=True),
    click.option("--execution", default="axisplan", show_default=True, help=f"What will run it: {', '.join(EXECUTIONS)}."),
    click.option("--set", "facts", multiple=True, metavar="execution.KEY=VALUE", help="Set one fact of the execution."),
    click.option("--optimizer", default="adamw", show_default=True, help="adamw, adamw8bit, muon or sgd."),
    click.option("--lora", "lora_rank", type=Tokens(), metavar="RANK", help="Train LoRA adapters of this rank, all else frozen."),
    click.option("--lora-targets", type=Words(), metavar="PART,...",
                 help="Parts with adapters (default all): attention, mlp, experts, shared, state_space, mtp."),
    click.option("--lora-alpha", type=float, help="Adapters are scaled by this over their rank (default: by one)."),
    click.option("--freeze", "frozen", type=Words(), metavar="PART,...",
                 help="Parts that are not trained: the above, embedding, head, router, norm."),
    click.option("--documents", metavar="LENGTHxCOUNT,...",
                 help="Lengths of the documents that sequences are packed from: 512x1000,4096x20."),
    click.option("--moe-imbalance", type=IMBALANCE, help="Max / mean tokens of an expert-parallel rank."),
    click.option("--routing", metavar="HISTOGRAM", help="Tokens by expert (.csv, a row a layer, or .json): the imbalance at every ep."),
    click.option("--memory-limit", type=GIBIBYTES, metavar="GIB", help="Usable device memory, instead of the GPU's."),
    click.option("--margin", type=MARGIN, default=0.08, show_default=True, help="Share of usable memory kept free."),
)  # fmt: skip

job_options = options(
    click.argument("model"),
    click.option("--cluster", required=True, help="Built-in name such as h100-sxm:64x8 (64 nodes of 8), or a YAML file."),
    click.option("--gpus", type=Tokens(), help="Plan for this many GPUs of this kind of cluster (default: those it has)."),
    click.option("--seq-len", type=Tokens(), required=True, help="Tokens a sequence (8k = 8192)."),
    click.option(
        "--global-batch", type=Batches(), required=True, help="Sequences a step; for plan also a range of tokens, 4M..16M."
    ),
    click.option("--profile", type=click.Path(),
                 help="Layers measured by axisplan profile layer --out FILE: their seconds and bytes go before the formulas'."),
    training_options,
)  # fmt: skip

goal_options = options(
    click.option("--objective", default="step-time", show_default=True, metavar="NAME",
                 help="step-time, tokens-per-second-per-gpu, gpu-hours, cost, fewest-gpus, pareto-gpus or pareto-memory."),
    click.option("--deadline", metavar="TIME", help="30d, 12h, 90s: for all --tokens, or for one step without them."),
    click.option("--tokens", metavar="COUNT", help="Tokens to train on in all: 15T, 300B."),
    click.option("--mtbf", type=MEAN_TIME, metavar="HOURS", help="Mean time between failures of one node: adds goodput to the plan."),
    click.option("--checkpoint-seconds", type=DURATION, default=30.0, show_default=True, help="How long a save holds training up."),
    click.option("--restart-seconds", type=DURATION, default=600.0, show_default=True, help="From a failure to training again."),
    click.option("--repair-hours", type=DURATION, default=24.0, show_default=True, help="Until a failed node is back."),
    click.option("--spare", type=Count(0), help="Spare nodes kept ready (default: as many as pay)."),
)  # fmt: skip


def collect_seldom() -> None:
    """Look for garbage a seventieth as often, and not when the process ends: a plan makes millions of objects, hardly one of them in a
    cycle."""
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.freeze)


def make_goal(
    seq_len: int, gpus: int, global_batch: int | str, objective: str, deadline: str | None, tokens: str | None, mtbf: float | None,
    checkpoint_seconds: float, restart_seconds: float, repair_hours: float, spare: int | None,
) -> Goal:  # fmt: skip
    """The Goal that ``goal_options`` describe, for a cluster of ``gpus``."""
    from planner.objectives import Failures, Goal, read_batches, read_deadline, read_tokens

    if spare is not None and mtbf is None:
        raise InputError("--spare", spare, "counts nodes that stand in for failed ones: say how often they fail", "--mtbf 6300")
    return Goal(
        objective,
        None if tokens is None else read_tokens(tokens),
        None if deadline is None else read_deadline(deadline),
        read_batches(str(global_batch), seq_len, gpus),
        None if mtbf is None else Failures(mtbf, checkpoint_seconds, restart_seconds, repair_hours, spare),
    )


def make_job(
    model: str,
    cluster: str,
    gpus: int | None,
    seq_len: int,
    global_batch: int | str,
    precision: str,
    execution: str,
    facts: tuple[str, ...],
    optimizer: str,
    moe_imbalance: float | None,
    memory_limit: float | None,
    margin: float,
    lora_rank: int | None = None,
    lora_targets: tuple[str, ...] | None = None,
    lora_alpha: float | None = None,
    frozen: tuple[str, ...] | None = None,
    documents: str | None = None,
    routing: str | None = None,
    profile: str | None = None,
) -> Job:
    """The Job that the shared options describe."""
    from cost_models.execution import load_execution
    from cost_models.job import GIB, Job
    from cost_models.packing import documents_of
    from profiles.hardware import load_cluster
    from profiles.huggingface import load_model

    if isinstance(global_batch, str):
        raise InputError("--global-batch", global_batch, "must be one count here; a range is for axisplan plan", 512)
    if routing is not None and moe_imbalance is not None:
        raise InputError("--routing", routing, "goes without --moe-imbalance: the histogram says it", None)
    spec = load_cluster(cluster)
    if gpus is not None:
        spec = spec.with_gpus(gpus)
    shapes = load_model(model)
    imbalance_by_ep: tuple[tuple[int, float], ...] = ()
    if routing is not None:
        from planner.routing import imbalances

        imbalance_by_ep = imbalances(routing, shapes)
    if moe_imbalance is not None and shapes.moe is None:
        raise InputError("--moe-imbalance", moe_imbalance, f"{shapes.name} has no experts whose tokens could be unequal", None)
    job = Job(
        model=shapes,
        cluster=spec,
        execution=load_execution(execution, read_facts(facts)),
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        optimizer=optimizer,
        moe_imbalance=moe_imbalance,
        margin=margin,
        memory_limit_bytes=memory_limit * GIB if memory_limit is not None else None,
        lora_rank=lora_rank or 0,
        lora_targets=lora_targets or (),
        lora_alpha=lora_alpha or 0.0,
        frozen=frozen or (),
        documents=documents_of(documents) if documents else (),
        routing=imbalance_by_ep,
    )
    refuse_nothing_to_train(job)
    if profile is None:
        return job
    from planner.layer_profiles import with_profile

    return with_profile(job, profile)


def refuse_nothing_to_train(job: Job) -> None:
    """Raises InputError where what is frozen, or where adapters stand, leaves no weight of the model to train."""
    from cost_models.job import ADAPTED, PARTS

    if not (job.lora_rank or job.frozen):
        return
    names = {"mlp": "dense_mlp", "experts": "routed_experts", "shared": "shared_experts"}
    held = job.model.parameters.as_dict()
    present = [part for part in PARTS if held[names.get(part, part)]]
    if any(job.trains(part) or job.adapts(part) for part in present):
        return
    if job.lora_rank:
        near = [part for part in present if part in ADAPTED]
        rule = f"{job.model.name} has none of these parts: nothing would be trained"
        raise InputError("--lora-targets", ",".join(job.lora_targets), rule, ",".join(near))
    raise InputError(
        "--freeze", ",".join(job.frozen), f"leaves nothing of {job.model.name} to train", ",".join(job.frozen[:-1]) or None
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


# -- the command ------------------------------------------------------------------------------------------------------

EXAMPLE_JOB = "llama-3-70b --cluster h100-sxm:8x8 --seq-len 8k --global-batch 512"


@click.group(
    cls=Commands,
    context_settings=CONTEXT,
    example="axisplan demo\naxisplan plan llama-3-8b --cluster h100-sxm:1x8 --seq-len 8k --global-batch 128 --out plan.json",
)
@click.version_option(__version__, prog_name="axisplan", message="%(prog)s %(version)s")
def cli() -> None:
    """Find the fastest way to spread the training of a model over a cluster, prove it, and launch it.

    Start with `axisplan demo`: the whole job on this machine in a few minutes.
    """


def command(name: str, example: str = "", hidden: bool = False) -> Callable[[Callable[..., Any]], click.Command]:
    return cli.command(name, cls=Examples, example=example, context_settings=CONTEXT, hidden=hidden)


def show_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2))
