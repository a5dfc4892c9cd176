"""Whatever is typed or lies in a file, a command ends with exit code 0 to 3, in bounded time, and with one clear line.

Real files (a config.json, a cluster, a plan, a layout, a command line) are mutated; hypothesis chooses and shrinks. The default tier
runs a seeded sample, ``make verify`` ten thousand cases.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cli
from profiles.errors import AxisplanError

CPU_SECONDS = 30.0
"""More CPU time than this for one case is a failure; wall time would depend on the machine's load."""
GROWTH_BYTES = 3 << 30
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 10**30, -(10**18), 0.5, -0.0, 1e308, 1e-308, float("inf"), float("nan"), "", "x", "0", "1e9",
    "\x00", "é" * 40, "${HOME}", "../../etc/passwd", "__import__('os').system('true')", "a" * 5000, [], [1], [[]], {}, {"a": 1}, [None], ["x", 1],
]  # fmt: skip
TEXT = [
    "{",
    "}",
    "[",
    "]",
    "\n",
    "\t",
    ":",
    "- ",
    "&a ",
    "*a",
    "!!python/object:os.system ",
    "\x00",
    "\ufeff",
    "0x1F",
    "1_000",
    ".inf",
    "~",
    '"',
    "#",
]


class TooLong(BaseException):
    """The case used more CPU time than it may."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run(*arguments: str) -> int:
    """Run the command in this process and hold it to its promise; returns the exit code."""
    out, err = io.StringIO(), io.StringIO()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code: Any = None
    try:
        with cpu_limit(CPU_SECONDS), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    except TooLong:
        pytest.fail(f"more than {CPU_SECONDS:g} s of CPU time: {shown(arguments)}")
    said = err.getvalue()
    assert code in (0, 1, 2, 3), f"exit code {code}: {shown(arguments)}: {said}"
    assert "internal error" not in said, f"{shown(arguments)}: {said}"
    assert "Traceback" not in said + out.getvalue(), shown(arguments)
    if code in (1, 2) and not out.getvalue():
        assert said.startswith("axisplan: "), f"{shown(arguments)}: {said!r}"
        assert said.count("\n") == 1, f"{shown(arguments)}: {said!r}"
        assert len(said) < 4000, shown(arguments)
    if "--json" in arguments and code == 0:
        json.loads(out.getvalue())
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown * 1024 < GROWTH_BYTES, f"{grown >> 10} MiB more memory: {shown(arguments)}"
    return int(code)


def shown(arguments: tuple[str, ...]) -> str:
    return "axisplan " + " ".join(a if len(a) < 200 else a[:200] + "..." for a in arguments)


# -- mutation ---------------------------------------------------------------------------------------------------------------


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path into a document of dictionaries and lists."""
    keys: Any = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield (*at, key)
        yield from places(node[key], (*at, key))


def mutated(document: Any, rnd: random.Random, most: int = 3) -> Any:
    """A copy with a few values replaced, scaled, removed, doubled or renamed."""
    document = copy.deepcopy(document)
    for _ in range(rnd.randint(1, most)):
        paths = list(places(document))
        if not paths:
            return rnd.choice(HOSTILE)
        *parents, last = rnd.choice(paths)
        node = document
        for key in parents:
            node = node[key]
        change = rnd.randrange(6)
        value = node[last]
        if change == 0:
            del node[last]
        elif change == 1 and isinstance(value, int | float) and not isinstance(value, bool):
            node[last] = rnd.choice([value + 1, value - 1, -value, value * 2, value * 3, value / 2, value * 10**6, str(value)])
        elif change == 2 and isinstance(node, dict):
            node[rnd.choice(["x", str(last) + "_", "num_layers", "version"])] = value
        elif change == 3 and isinstance(value, list):
            node[last] = value * rnd.choice([0, 2, 50])
        else:
            node[last] = copy.deepcopy(rnd.choice(HOSTILE))
    return document


def scrambled(text: str, rnd: random.Random) -> str:
    """Text with pieces cut, doubled or put in."""
    for _ in range(rnd.randint(1, 4)):
        a, b = sorted((rnd.randint(0, len(text)), rnd.randint(0, len(text))))
        change = rnd.randrange(4)
        if change == 0:
            text = text[:a] + text[b:]
        elif change == 1:
            text = text[:a]
        elif change == 2:
            text = text[:a] + rnd.choice(TEXT) * rnd.choice([1, 1, 2, 300]) + text[a:]
        else:
            text = text[:b] + text[a : min(b, a + 500)] + text[b:]
    return text


def spoiled(document: Any, dump: Callable[[Any], str], rnd: random.Random) -> str:
    """A file of the document: mutated, or (one in four) its text scrambled."""
    if rnd.random() < 0.25:
        return scrambled(dump(document), rnd)
    return dump(mutated(document, rnd))


# -- the five kinds of input --------------------------------------------------------------------------------------------------


def to_yaml(document: Any) -> str:
    return str(yaml.safe_dump(document, allow_unicode=True, sort_keys=False))


JOB = ("--seq-len", "4k", "--global-batch", "64")


def config(rnd: random.Random, folder: Path) -> None:
    names = sorted(p.name for p in (resources.files("profiles") / "data" / "models").iterdir() if p.name.endswith(".json"))
    text = (resources.files("profiles") / "data" / "models" / rnd.choice(names)).read_text(encoding="utf-8")
    path = folder / "config.json"
    path.write_text(spoiled(json.loads(text), json.dumps, rnd), encoding="utf-8", errors="surrogateescape")
    if run("inspect", str(path), "--json") == 0 and rnd.random() < 0.5:
        run(
            "check",
            str(path),
            "--cluster",
            "h100-sxm:2x8",
            *JOB,
            "--layout",
            rnd.choice(["tp=2", "tp=2,pp=2,recompute=full", "zero=3"]),
        )


VALUES: dict[str, list[Any]] = {
    "tp": [1, 2, 4, 8, 3, 0, -1, 10**9], "pp": [1, 2, 4, 8, 5], "vpp": [1, 2, 4, 100], "cp": [1, 2, 4], "ep": [1, 2, 8, 16], "etp": [1, 2],
    "dp": [1, 2, 8], "dp_replicate": [1, 2, 4], "dp_shard": [1, 2, 8], "zero": [0, 1, 2, 3, 4], "sp": ["true", "false", "maybe"],
    "cp_kind": ["ring", "ulysses", "allgather", "ring2xulysses2", "ring0xulysses2", "star"], "order": ["tp-cp-dp-pp", "tp-pp-dp", "pp-tp", "-"],
    "micro_batch": [1, 2, 4, 3, 10**12], "schedule": ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v", "none"],
    "recompute": ["none", "full", "selective", "selective(mlp)", "0-3:full", "0-3:full/2-5:full", "9999:full", "selective(", "3-1:full"],
    "stages": ["16|16", "8|8|8|8", "0|32", "1", "|", "9" * 400], "dispatcher": ["alltoall", "deepep", "x"], "capacity": [0, 1.25, "nan", "-1", "inf"],
    "offload": ["none", "optimizer", "activations", "optimizer+activations", "all"],
}  # fmt: skip


def layout(rnd: random.Random, folder: Path) -> None:
    keys = rnd.sample(sorted(VALUES), rnd.randint(1, 6))
    text = ",".join(
        f"{k}={rnd.choice(VALUES[k] if rnd.random() < 0.3 else VALUES[k][: max(1, len(VALUES[k]) // 2)])}" for k in keys
    )
    if rnd.random() < 0.2:
        text = scrambled(text, rnd)
    model = rnd.choice(["llama-3-8b", "qwen3-30b-a3b", "llama-tiny"])
    execution = rnd.choice(["axisplan", "megatron", "torchtitan", "deepspeed", "fsdp", "accelerate"])
    command = rnd.choice(["check", "estimate"])
    run(
        command,
        model,
        "--cluster",
        "h100-sxm:2x8",
        *JOB,
        "--execution",
        execution,
        f"--layout={text}",
        *rnd.choice([(), ("--json",)]),
    )


def cluster(rnd: random.Random, folder: Path) -> None:
    path = folder / "cluster.yaml"
    path.write_text(
        spoiled(known_cluster(rnd.choice(["h100-sxm:2x8", "cpu:1x4"])), to_yaml, rnd), encoding="utf-8", errors="surrogateescape"
    )
    run("clusters", "show", str(path))
    if rnd.random() < 0.5:
        run("check", "llama-tiny", "--cluster", str(path), "--seq-len", "256", "--global-batch", "16", "--layout", "tp=2")


CLUSTERS: dict[str, Any] = {}


def known_cluster(name: str) -> Any:
    from profiles.hardware import load_cluster

    if name not in CLUSTERS:
        CLUSTERS[name] = yaml.safe_load(load_cluster(name).to_yaml())
    return CLUSTERS[name]


PLANS: dict[str, Any] = {}


def known_plan() -> Any:
    """The document of a plan whose figures are real."""
    if not PLANS:
        from planner.plan import Plan
        from planner.solve import PlanRequest, solve

        PLANS["plan"] = solve(PlanRequest(small_job(), top=2)).to_json()
        assert Plan.read(PLANS["plan"])
    return PLANS["plan"]


def small_job() -> Any:
    from cost_models.execution import load_execution
    from cost_models.job import Job
    from profiles.hardware import load_cluster
    from profiles.huggingface import load_model

    return Job(load_model("llama-tiny"), load_cluster("cpu:1x4"), load_execution("axisplan"), 128, 8, "fp32")


def plan(rnd: random.Random, folder: Path) -> None:
    path, good = folder / "plan.json", folder / "good.json"
    good.write_text(json.dumps(known_plan()))
    document = known_plan()
    if rnd.random() < 0.6:
        part = rnd.choice(["estimate", "certificate", "runners_up", "stages", "layout", "warnings"])
        changed = copy.deepcopy(document)
        changed[part] = mutated(changed[part], rnd)
        path.write_text(json.dumps(changed), encoding="utf-8", errors="surrogateescape")
    else:
        path.write_text(spoiled(document, json.dumps, rnd), encoding="utf-8", errors="surrogateescape")
    command = rnd.choice(["compare", "trace", "html", "emit", "explain"])
    if command == "compare":
        run("compare", *rnd.sample([str(path), str(good)], 2), *rnd.choice([(), ("--json",)]))
    elif command == "emit":
        target = rnd.choice(["axisplan", "megatron", "torchtitan", "deepspeed", "accelerate"])
        run(
            "emit",
            str(path),
            "--target",
            target,
            "--launcher",
            rnd.choice(["torchrun", "slurm", "kubernetes"]),
            "--out",
            str(folder / "out"),
        )
    elif command == "explain":
        run("explain", str(path))
    else:
        run("report", str(path), "--format", command, "--out", str(folder / "report"))


WORDS = [
    "", "-1", "0", "1", "2", "8k", "1e9", "9" * 30, "nan", "inf", "x", "llama-tiny", "llama-3-8b", "h100-sxm:1x8", "cpu:1x2", "cpu:0x0", "h100-sxm:",
    "no-such:1x1", "cpu:1x99999999999", "tp=1", "tp=2,pp=2", "tp==2", "=", ",", "execution.attention=flash", "execution.x=1", "execution.=", "bf16",
    "fp32", "fp64", "megatron", "torchtitan", "adamw", "sgd", "/", ".", "/dev/null", "missing.json", "é\udcff", "--", "-", "a" * 3000,
]  # fmt: skip
SAFE = (
    "inspect", "models", "clusters", "estimate", "check", "plan", "emit", "explain", "report", "compare", "import", "experts", "completion", "regress",
    "calibrate", "measure", "verify", "sweep", "replan",
)  # fmt: skip
"""Commands that neither train nor measure this machine."""


def command_line(rnd: random.Random, folder: Path, names: tuple[str, ...] = SAFE) -> None:
    import click

    command = cli.cli.commands.get(rnd.choice(names))
    if command is None:
        return
    assert command.name
    arguments: list[str] = [command.name]
    if isinstance(command, click.Group) and rnd.random() < 0.8:
        child = rnd.choice(sorted(command.commands))
        command = command.commands[child]
        arguments.append(child)
    small = command.name == "plan" or rnd.random() < 0.3
    for parameter in command.params:
        required = parameter.required or rnd.random() < 0.25
        if not required or (parameter.name == "out" and rnd.random() < 0.5):
            continue
        value = (
            str(folder / "out.x")
            if parameter.name == "out"
            else sensible(parameter.name or "", rnd)
            if small or rnd.random() < 0.6
            else rnd.choice(WORDS)
        )
        if isinstance(parameter, click.Argument):
            arguments.append(value)
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            arguments.append(parameter.opts[-1])
        elif rnd.random() < 0.95:
            arguments += [parameter.opts[-1], value]
    if not small and rnd.random() < 0.2:
        arguments.insert(rnd.randint(1, len(arguments)), rnd.choice(WORDS))
    run(*arguments)


BUSY = ("demo", "run", "profile", "dry-run", "verify", "doctor", "data", "export")
"""Commands that train, trace or measure: here with no process to be had, and nothing traced."""


def machine(rnd: random.Random, folder: Path) -> None:
    """Arguments and files of the commands that use this machine, up to where they would start a process or trace the program."""
    files = {
        "plan.json": spoiled(known_plan(), json.dumps, rnd) if rnd.random() < 0.6 else json.dumps(known_plan()),
        "notes.txt": scrambled("Some words of a text. " * 50, rnd),
        "train.json": spoiled({"steps": 3, "data": ["notes.txt"], "learning_rate": 1e-3, "seed": 1}, json.dumps, rnd),
        "cluster.yaml": spoiled(known_cluster("cpu:1x4"), to_yaml, rnd),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    with alone():
        command_line(rnd, folder, BUSY)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """No process can be started, nothing is traced: each is an error that a command must say in a line."""
    import subprocess

    def no_process(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "a process")

    def no_trace(*_: object, **__: object) -> None:
        raise AxisplanError("nothing is traced here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", no_process)
        patch.setattr(subprocess.Popen, "__del__", lambda self, *_: None)
        with contextlib.suppress(ImportError):
            patch.setattr(importlib.import_module("planner.dryrun.report"), "trace", no_trace)
            patch.setattr(importlib.import_module("planner.dryrun.modules"), "trace_module", no_trace)
        yield


def sensible(name: str, rnd: random.Random) -> str:
    """A value that the parameter mostly takes."""
    known = {
        "model": "llama-tiny", "cluster": "cpu:1x2", "seq_len": "128", "global_batch": "8", "layout": "tp=2", "precision": "fp32", "gpus": "2",
        "execution": "axisplan", "facts": "execution.attention=flash", "optimizer": "adamw", "moe_imbalance": "1.5", "memory_limit": "4",
        "margin": "0.1", "pins": "tp=1", "exclude": "pp=2", "top": "1", "tie": "0.02", "form": "trace", "name": "cpu:1x2", "ep": "4", "zipf": "0.8",
        "count": "16", "redundant": "4", "shell": "bash", "plan": "plan.json", "plan_option": "plan.json", "settings": "train.json",
        "data": "notes.txt", "eval_data": "notes.txt", "files": "notes.txt", "steps": "2", "processes": "2", "seconds": "1", "device": "cpu",
        "profile": "cluster.yaml", "what": "llama-tiny", "rank": "1", "stage": "0", "tokenizer": "bytes", "checkpoint": "run",
    }  # fmt: skip
    return known.get(name, rnd.choice(WORDS)) if rnd.random() < 0.9 else rnd.choice(WORDS)


KINDS: dict[str, Callable[[random.Random, Path], None]] = {
    "config": config, "layout": layout, "cluster": cluster, "plan": plan, "command": command_line,
    "machine": machine,
}  # fmt: skip


def fuzz(kind: str, cases: int, folder: Path) -> None:
    """``cases`` of ``kind``, the same ones every time."""

    @settings(max_examples=cases, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False, note_method_calls=False))
    def one(rnd: random.Random) -> None:
        KINDS[kind](rnd, folder)

    here = os.getcwd()
    os.chdir(folder)
    try:
        one()
    finally:
        os.chdir(here)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_spoiled_input_ends_with_a_known_exit_code(kind, tmp_path):
    fuzz(kind, 30, tmp_path)


@pytest.mark.verify
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_spoiled_inputs_end_with_a_known_exit_code(kind, tmp_path):
    fuzz(kind, 10_000 // len(KINDS), tmp_path)


def test_a_yaml_bomb_and_a_cycle_are_refused(tmp_path):
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    for name, text in (
        ("bomb.yaml", bomb),
        ("cycle.yaml", "&a\nname: *a\n"),
        ("deep.yaml", "[" * 5000),
        ("object.yaml", "!!python/object/apply:os.getcwd []\n"),
    ):
        path = tmp_path / name
        path.write_text(text)
        assert run("clusters", "show", str(path)) == 2, name
    deep = tmp_path / "deep.json"
    deep.write_text('{"a":' * 100_000)
    assert run("inspect", str(deep)) == 2
