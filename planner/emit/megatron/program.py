"""Megatron-LM: ``pretrain_gpt.py`` of the user's checkout with the flags of a plan."""

from __future__ import annotations

from cost_models.job import Job
from cost_models.layout import Layout
from planner.emit import connections
from planner.emit.core import EmitSettings, Need, Program, Variable, admit, from_environment
from planner.emit.environment import DEEPEP, shared
from planner.emit.megatron.flags import Flags, number, switch, words
from planner.emit.megatron.layout import layout_flags
from planner.emit.megatron.model import model_flags
from planner.emit.options import Option, read_options
from planner.plan import Plan

CHECKOUT = Need("MEGATRON_PATH", "your checkout of Megatron-LM", "/opt/Megatron-LM")
BACKENDS = {"unfused": "unfused", "triton": "flash", "fa2": "flash", "fa3": "flash", "cudnn": "fused"}

OPTIONS = {"tokenizer": Option(r"[^\x00]*", "names a tokenizer of the hub, or its folder", "./tokenizer"), **DEEPEP}


def program(plan: Plan, settings: EmitSettings) -> Program:
    """Raises InputError for a plan that Megatron-LM cannot run, with the reason."""
    job, layout = admit(plan, "megatron")
    flags = all_flags(job, layout, settings)
    environment = (
        Variable("PYTHONPATH", from_environment(CHECKOUT.name), "pretrain_gpt.py imports the checkout's own packages.", "prepend"),
        *connections.megatron(connections.Streams.of(job, layout)),
        *shared(plan, "megatron", settings.options),
    )
    return Program(
        target="megatron",
        words=(from_environment(CHECKOUT.name, "/pretrain_gpt.py"), *words(flags)),
        environment=environment,
        needs=(CHECKOUT,),
        arguments=("--train-iters", str(settings.steps)),
        notes=_notes(job, settings),
    )


def require_model(job: Job) -> None:
    """Raise InputError where ``pretrain_gpt.py`` does not build the model."""
    model_flags(job)


def all_flags(job: Job, layout: Layout, settings: EmitSettings, target: str = "megatron") -> Flags:
    """The whole command line behind the script's name."""
    return model_flags(job, target) | layout_flags(job, layout, target) | training_flags(job, settings)


def training_flags(job: Job, settings: EmitSettings) -> Flags:
    """Data, optimizer and logging: what is not the planner's, and must be said all the same."""
    execution = job.execution
    flags: Flags = {
        "--attention-backend": (BACKENDS[execution.attention],),
        "--attention-dropout": ("0.1" if execution.attention_dropout else "0.0",),
        "--hidden-dropout": ("0.1" if execution.hidden_dropout else "0.0",),
    } | graphs(job) | switch("--cross-entropy-loss-fusion") | {"--cross-entropy-fusion-impl": ("native",)}  # fmt: skip
    tokenizer = read_options(settings.options, OPTIONS)["tokenizer"]
    if tokenizer:
        flags |= {"--tokenizer-type": ("HuggingFaceTokenizer",), "--tokenizer-model": (tokenizer,)}
    else:
        flags["--tokenizer-type"] = ("NullTokenizer",)
    flags["--vocab-size"] = (str(job.model.vocab),)
    flags |= {"--data-path": settings.data} if settings.data else switch("--mock-data")
    return (
        flags
        | {
            "--train-iters": (str(settings.steps),),
            "--lr": (number(settings.learning_rate),),
            "--lr-decay-style": ("cosine",),
            "--weight-decay": ("0.1",),
            "--adam-beta2": ("0.95",),
            "--clip-grad": ("1.0",),
            "--eval-iters": ("0",),
            "--log-interval": ("1",),
            "--seed": ("1234",),
        }
        | switch("--log-throughput")
    )


def graphs(job: Job) -> Flags:
    """CUDA graphs of a whole iteration, or Transformer Engine's of each layer's attention and of the router of a mixture of experts."""
    if job.execution.graphs == "none":
        return {}
    if job.execution.graphs == "full":
        return {"--cuda-graph-impl": ("full_iteration",)} | switch("--no-check-for-nan-in-loss-and-grad")
    modules = ("attn",) if job.model.moe is None else ("attn", "moe_router")
    return {"--cuda-graph-impl": ("transformer_engine",), "--cuda-graph-modules": modules}


def _notes(job: Job, settings: EmitSettings) -> tuple[str, ...]:
    notes = []
    if not settings.data:
        notes.append("It trains on made-up tokens unless emitted with --data PREFIX and --set tokenizer=NAME.")
    if job.model.notes:
        notes.append(f"Of the model: {'; '.join(job.model.notes)}.")
    return tuple(notes)
