"""What every launch folder is made of: a target's program, a launcher round it, a README; written whole or not at all.

A *target* (``TARGETS``) turns a plan into a ``Program``: the files it reads and the words that torchrun starts on every node. A
*launcher* (``LAUNCHERS``) turns plan and program into files that start ``launch.sh`` on every node. ``launch.sh`` is always the same:
it exports the environment, each variable with its reason, and becomes torchrun on this node. On several nodes it wants
``NODE_RANK`` and ``MASTER_ADDR`` (``MASTER_PORT`` is 29500 unless set), which a launcher sets.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Literal, Protocol

from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from planner.emit.files import fill, write_folder
from planner.emit.options import Option, refuse_unknown
from planner.emit.readme import comment, readme
from planner.legality import limits_of, unrunnable, violations
from planner.plan import Plan
from planner.rules.core import family
from profiles.errors import InputError

LAUNCH = "launch.sh"


@dataclass(frozen=True)
class Word:
    """One word of a command: the shell variable ``base`` (none: ``""``) followed by ``text``, which is taken literally."""

    text: str = ""
    base: str = ""

    def shell(self) -> str:
        """The word as bash source; nothing in ``text`` is expanded."""
        return (f'"${{{self.base}}}"' if self.base else "") + (quote(self.text) if self.text or not self.base else "")


def in_folder(path: str) -> Word:
    """A file of the emitted folder, wherever that is when it is started."""
    return Word("/" + path, "here")


def from_environment(variable: str, rest: str = "") -> Word:
    """What the user's environment names (a ``Need``), and what follows it, e.g. a checkout and a script in it."""
    return Word(rest, variable)


@dataclass(frozen=True)
class Variable:
    """A variable of the environment and why it has this value; ``value`` None: it must not be set.

    ``how``: ``set`` it; a ``default`` that the site may have set otherwise; ``prepend`` to a path list; ``suggest`` it in a
    comment, because only the site knows the value.
    """

    name: str
    value: str | Word | None
    reason: str
    how: Literal["set", "default", "prepend", "suggest"] = "set"

    def shell(self) -> str:
        """A comment with the reason, and the export."""
        reason = f"# {comment(self.reason)}"
        if self.value is None:
            return f"{reason}\nunset {self.name}"
        value = self.value.shell() if isinstance(self.value, Word) else quote(self.value)
        name = self.name
        if self.how == "suggest":
            return f"{reason}\n# export {name}={comment(value)}"
        if self.how == "default":
            return f'{reason}\n: "${{{name}:={inside_quotes(self.value)}}}"\nexport {name}'
        tail = f'"${{{name}:+:${name}}}"' if self.how == "prepend" else ""
        return f"{reason}\nexport {name}={value}{tail}"


def inside_quotes(value: str | Word) -> str:
    """A literal as it must be written between double quotes."""
    if isinstance(value, Word):
        raise TypeError("a default is literal")
    return "".join("\\" + c if c in '\\"$`}' else c for c in value)


@dataclass(frozen=True)
class Need:
    """A variable that the user must have set, what it names, and an example."""

    name: str
    what: str
    example: str


@dataclass(frozen=True)
class Program:
    """What a target runs on every node under torchrun.

    ``words`` follow torchrun's own arguments. With ``executable``, torchrun starts that command (looked up on PATH, and torchrun
    beside it) instead of a Python file. ``notes`` go into the README.
    """

    target: str
    words: tuple[Word, ...]
    files: dict[str, str] = field(default_factory=dict)
    environment: tuple[Variable, ...] = ()
    needs: tuple[Need, ...] = ()
    executable: str = ""
    arguments: tuple[str, ...] = ("--steps", "100")
    """Arguments that the user may add, as an example."""
    notes: tuple[str, ...] = ()
    log: str = "log.txt"
    """Where the README says to keep what the program prints."""
    starter: tuple[str, ...] = ()
    """Words after ``executable`` of the command that starts torchrun and looks after it; none: launch.sh becomes torchrun."""


@dataclass(frozen=True)
class Launch:
    """What a launcher adds: files, which of them are executable, and how to start (one line of shell)."""

    files: dict[str, str]
    start: str
    executable: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    log: str = ""
    """The file that has what rank 0 printed, in the README's last line; none: the target's own."""


@dataclass(frozen=True)
class EmitSettings:
    """What a launch folder needs beside the plan. ``options``: of the launcher (partition, image, time, ...) and of the target
    (tokenizer, release), as text."""

    steps: int = 100
    learning_rate: float = 3e-4
    data: tuple[str, ...] = ()
    """Training data in the target's own form; paths relative to the folder stay relative to it. None: synthetic."""
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the user's that every process gets; recorded in the folder's plan.json."""


class Target(Protocol):
    """A module of ``TARGETS``; ``OPTIONS``: those of its own, where it has any."""

    def program(self, plan: Plan, settings: EmitSettings) -> Program: ...


class Launcher(Protocol):
    """A module of ``LAUNCHERS``."""

    def takes(self, program: Program) -> Mapping[str, Option]: ...

    def launch(self, plan: Plan, program: Program, settings: EmitSettings) -> Launch: ...


TARGETS = {
    "axisplan": "planner.emit.axisplan_runtime",
    "megatron": "planner.emit.megatron.program",
    "megatron-bridge": "planner.emit.megatron.bridge",
    "torchtitan": "planner.emit.torchtitan.program",
    "deepspeed": "planner.emit.deepspeed",
    "accelerate": "planner.emit.accelerate",
}
LAUNCHERS = {
    "torchrun": "planner.emit.torchrun",
    "slurm": "planner.emit.slurm",
    "kubernetes": "planner.emit.kubernetes",
    "skypilot": "planner.emit.skypilot",
}


def emit(plan: Plan, target: str, launcher: str, out: Path, settings: EmitSettings | None = None) -> list[Path]:
    """Write the launch folder ``out``: plan.json, the target's files, launch.sh, the launcher's files, README.md.

    Returns the files written. Raises InputError for a name that is not known, a plan that the target cannot run (with every broken
    rule), or a folder that holds other files.
    """
    settings = settings or EmitSettings()
    launching: Launcher = importlib.import_module(named("--launcher", launcher, LAUNCHERS))
    plan = plan.model_copy(update={"environment": passed_through(settings.environment)})
    program = program_of(plan, target, settings)
    of_target: Mapping[str, Option] = getattr(importlib.import_module(TARGETS[target]), "OPTIONS", {})
    refuse_unknown(settings.options, {target: of_target, launcher: launching.takes(program)})
    start = launching.launch(plan, program, settings)
    contents = {"plan.json": plan.text(), **program.files, LAUNCH: launch_script(plan, program), **start.files}
    contents["README.md"] = readme(plan, program, start)
    return write_folder(out, contents, executable=(LAUNCH, *start.executable))


def passed_through(given: Mapping[str, str]) -> dict[str, str]:
    """Variables by name; InputError for what the shell would not take as a name, or a value with a zero byte."""
    for name, value in given.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise InputError("--env", name, "is a variable's name (letters, digits and _) with a value", "CUDA_LAUNCH_BLOCKING=1")
    return dict(given)


def program_of(plan: Plan, target: str, settings: EmitSettings) -> Program:
    """What ``target`` runs of the plan. Raises InputError for a name that is not known, or a plan that it cannot run."""
    module: Target = importlib.import_module(named("--target", target, TARGETS))
    return module.program(plan, settings)


def named(field_name: str, name: str, table: Mapping[str, str]) -> str:
    """The entry of ``table``; InputError names what there is."""
    if name not in table:
        raise InputError(field_name, name, f"is one of {', '.join(table)}", next(iter(table)))
    return table[name]


# -- may the target run it? ------------------------------------------------------------------------------------------------


def admit(plan: Plan, target: str) -> tuple[Job, Layout]:
    """The plan's job as ``target`` runs it, and its layout; InputError with every broken rule where it cannot.

    A plan made for another execution is looked at under this one's limits; its job keeps model, cluster, batch and precision, and what
    was set of the execution where the two share one (Megatron-LM and Megatron-Bridge).
    """
    job, layout = plan.job(), plan.layout_object
    made_for = limits_of(job).target
    if made_for != target:
        kin = made_for != "any" and family(made_for) == family(target)
        job = replace(job, execution=job.execution.with_(name=target) if kin else load_execution(target))
    judged = job if job.execution.name == target else replace(job, execution=load_execution(target))
    broken = [*unrunnable(judged), *violations(judged, layout)]
    if broken:
        name = plan.execution.get("name", "")
        other = "" if made_for == target else f" (made for --execution {name}; plan with --execution {target})"
        lines = " | ".join(f"{v.rule}: {v.line()}" for v in broken)
        raise InputError("--target", target, f"cannot run this plan{other}: {lines}")
    return job, layout


def refuse(target: str, reason: str) -> InputError:
    """The error of a plan that ``target`` cannot express, for ``raise``."""
    return InputError("--target", target, f"cannot run this plan: {reason}")


# -- launch.sh -------------------------------------------------------------------------------------------------------------


def nodes_of(plan: Plan) -> tuple[int, int]:
    """Hosts (operating systems, on each of which one torchrun starts) and GPUs of each."""
    cluster = plan.job().cluster
    return cluster.hosts, cluster.gpus // cluster.hosts


def launch_script(plan: Plan, program: Program) -> str:
    """``launch.sh``: starts this node's torchrun."""
    nodes, per_node = nodes_of(plan)
    return fill(
        "launch.sh",
        title=comment(title(plan)),
        target=program.target,
        processes=str(nodes * per_node),
        nodes=str(nodes),
        per_node=str(per_node),
        last_node=str(nodes - 1),
        needs=needs(program.needs),
        environment="\n".join(v.shell() for v in (*program.environment, *_passed(plan))),
        torchrun=_torchrun(program.executable),
        starter=" ".join(['"${executable}"', *map(quote, program.starter)]) if program.starter else "",
        rendezvous=_rendezvous(nodes),
        words="\n".join("  " + " ".join(w.shell() for w in line) for line in lines(_words(program))),
    )


def _passed(plan: Plan) -> list[Variable]:
    return [Variable(name, value, "Passed through (emit --env), after all others.") for name, value in plan.environment.items()]


def needs(wanted: tuple[Need, ...]) -> str:
    """Lines that stop with a reason when a variable is not set."""
    lines = []
    for need in wanted:
        message = quote(comment(f"launch.sh: set {need.name} to {need.what}, e.g. {need.example}"))
        lines.append(f"[ -n \"${{{need.name}:-}}\" ] || {{ printf '%s\\n' {message} >&2; exit 1; }}")
    return "\n".join(lines)


def _torchrun(executable: str) -> str:
    if not executable:
        return 'torchrun=$(command -v torchrun) || { echo "launch.sh: torchrun is not on PATH" >&2; exit 1; }'
    return fill("find-executable.sh", name=executable).rstrip()


def _words(program: Program) -> tuple[Word, ...]:
    return (Word("--no-python"), Word(base="executable"), *program.words) if program.executable else program.words


def lines(words: tuple[Word, ...]) -> list[list[Word]]:
    """Words by line: a flag stands with its values, anything else alone."""
    out: list[list[Word]] = []
    for word in words:
        if out and not word.base and not word.text.startswith("-") and out[-1][0].text.startswith("--"):
            out[-1].append(word)
        else:
            out.append([word])
    return out


def _rendezvous(nodes: int) -> str:
    if nodes == 1:
        return "rendezvous=(--standalone)"
    return (
        ': "${NODE_RANK:?set it to the number of this node, from 0}" "${MASTER_ADDR:?set it to the address of node 0}"\n'
        'rendezvous=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")'
    )


def title(plan: Plan) -> str:
    """Names the plan in one line."""
    cluster = plan.job().cluster
    return f"{plan.model['name']} on {cluster.gpus} x {cluster.gpu.name}: {plan.layout_text}"
