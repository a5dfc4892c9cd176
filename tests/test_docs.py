"""The documentation tells the truth: every block in it is run, links lead somewhere, the site builds.

``bash`` and ``console`` blocks are run as they stand, in order, in one folder a page that holds the files the page speaks of
(``FILES``): ``bash`` in this process, ``console`` as processes (they measure, train, or need torch) with small numbers of steps and
seconds (``SMALL``). ``python`` blocks are executed, ``yaml`` blocks read by the command they are for, and README's quoted plan is
compared with what is printed. A comment ``# exit 2`` after a command says which exit code it is meant to have. ``NOT_RUN`` names
the few lines that another test runs, or that need several machines.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml

import cli
from profiles.hardware import load_cluster
from profiles.huggingface import load_model

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
QUICK = ("docs/commands/layout.md", "docs/commands/measure.md")
"""Pages whose blocks run in the default tier."""
IN_A_PROCESS = ("demo", "run", "profile", "dry-run", "verify", "doctor")
"""Commands that start processes or need torch, wherever they stand."""
NOT_RUN = {
    "make demo": "tests/test_demo.py runs it small", "make test": "it is what runs this", "axisplan demo": "tests/test_demo.py",
    "pip install": "tests/test_packaging.py installs", "torchrun --nnodes 2": "two machines; its command is parsed",
    "python tests/oracles/install.py": ".ci/run runs it", "torchrun --standalone --nproc-per-node 4 benchmarks/": "a benchmark of minutes",
}  # fmt: skip
SMALL = {
    ("run",): ("--steps", "2"), ("profile", "gpu"): ("--seconds", "4"), ("profile", "links"): ("--seconds", "4"),
    ("profile", "layer"): ("--seconds", "4", "--processes", "1"),
}  # fmt: skip
"""What is appended to a documented command when it is run here; a later value of an option replaces the earlier one."""
SHORTER = {"4096": "64", "8192": "64", "llama-3.1-8b": "llama-tiny"}
"""Sequence lengths and models of documented measurements, and those measured here."""
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)


def fences(page: Path) -> list[tuple[str, str]]:
    """Kind and text of every block; one without a kind is a ``console``."""
    return [(kind or "console", body) for kind, body in FENCE.findall(page.read_text(encoding="utf-8"))]


@dataclass(frozen=True)
class Command:
    """One ``axisplan`` command of a page."""

    page: str
    kind: str
    words: tuple[str, ...]
    exit_code: int

    @property
    def name(self) -> str:
        return self.words[0] if self.words else ""

    def __str__(self) -> str:
        return f"{self.page}: axisplan {shlex.join(self.words)}"


def commands_of(page: Path) -> list[Command]:
    """The commands of a page's ``bash`` and ``console`` blocks, in order."""
    out = []
    for kind, body in fences(page):
        if kind not in ("bash", "console"):
            continue
        for line in body.replace("\\\n", " ").splitlines():
            code = re.search(r"#.*\bexit (?:code )?(\d)", line)
            for part in re.split(r"&&|\||;|>(?!=)", line.split(" #")[0].removeprefix("$ ")) if "$(" not in line else ():
                words = shlex.split(part, comments=True)
                if words[:1] == ["axisplan"]:
                    page_name = page.relative_to(REPOSITORY).as_posix()
                    out.append(Command(page_name, kind, tuple(words[1:]), int(code[1]) if code else 0))
    return out


COMMANDS = [command for page in PAGES for command in commands_of(page)]


def parsed(words: tuple[str, ...]) -> None:
    """Raise what click raises where the words are no command of ours."""
    group: click.Command = cli.cli
    context = click.Context(cli.cli, info_name="axisplan")
    rest = list(words)
    while isinstance(group, click.Group) and rest:
        found = group.get_command(context, rest[0])
        assert found is not None, f"no command {rest[0]}"
        group, rest = found, rest[1:]
    if rest != ["--help"]:
        group.make_context(group.name, rest, parent=context)


def test_the_documentation_has_commands_of_every_kind():
    names = {c.name for c in COMMANDS}
    visible = {n for n, c in cli.cli.commands.items() if not c.hidden} - {"completion"}
    assert visible - names == set(), "commands that no page shows"


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_documented_command_is_one_of_ours(command):
    parsed(command.words)


# -- blocks are run --------------------------------------------------------------------------------------------------------------

TRAIN_SH = """\
torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 \\
    --micro-batch-size 1 --global-batch-size 128 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --bf16
"""
CONFIG_PY = """\
config = Trainer.Config(
    training=TrainingConfig(local_batch_size=2, seq_len=8192, global_batch_size=128),
    parallelism=ParallelismConfig(tensor_parallel_degree=4, data_parallel_shard_degree=16),
)
"""
MYMODEL_PY = """\
import torch


def build():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    model.parallel_plan = {}
    return model, torch.empty(4, 64)
"""
STEP = '{"step": %d, "loss": 5.0, "grad_norm": 1.0, "seconds": 1.5, "tokens_per_second": 100.0, "peak_bytes": 1000000}\n'
TINY = ("llama-tiny", "--cluster", "cpu:1x4", "--seq-len", "128", "--global-batch", "16", "--precision", "fp32")


def runs_of(begins: str) -> str:
    """The published runs whose source begins so, as a runs.csv."""
    with (REPOSITORY / "tests" / "data" / "runs.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row for row in rows if row["source"].startswith(begins))
    return out.getvalue()


def furnish(folder: Path, invoke) -> None:
    """The files that the pages speak of."""
    prose = "The plan was the fastest layout that fits. " * 400
    texts = {
        "notes.txt": prose, "book.txt": prose, "held-out.txt": prose, "train.sh": TRAIN_SH, "config.py": CONFIG_PY, "mymodel.py": MYMODEL_PY,
        "log.txt": "".join(STEP % i for i in range(8)), "runs.csv": runs_of("NVIDIA NeMo"),
        "ds_config.json": '{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}',
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "my-checkpoint").mkdir()
    config = REPOSITORY / "profiles" / "data" / "models" / "llama-tiny.json"
    (folder / "my-checkpoint" / "config.json").write_bytes(config.read_bytes())
    (folder / "tests").symlink_to(REPOSITORY / "tests")
    assert invoke("plan", *TINY, "--out", "plan.json")[0] == 0
    code, baseline, err = invoke("regress", "runs.csv", "--json")
    assert code == 0, err
    (folder / "baseline.json").write_text(baseline, encoding="utf-8")


def small(words: tuple[str, ...]) -> list[str]:
    """A documented command with less to do."""
    added = next((extra for name, extra in SMALL.items() if words[: len(name)] == name), ())
    return [SHORTER.get(w, w) if words[0] == "profile" else w for w in words] + list(added)


def in_a_process(command: Command) -> bool:
    return command.kind == "console" or command.name in IN_A_PROCESS


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, invoke, axisplan=None) -> int:
    """Run a page's commands in order in one folder; returns how many ran. Without ``axisplan``, those of this process alone."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "140")
    ran = 0
    for command in COMMANDS:
        if command.page != page or f"axisplan {command.name}" in NOT_RUN or (in_a_process(command) and axisplan is None):
            continue
        if in_a_process(command):
            done = axisplan(*small(command.words), cwd=folder, timeout=300)
            code, err = done.returncode, done.stderr
        else:
            code, _, err = invoke(*command.words)
        assert code == command.exit_code, f"{command}: exit code {code}: {err}"
        ran += 1
    return ran


@pytest.mark.parametrize("page", QUICK)
def test_the_quick_pages_run(page, tmp_path, monkeypatch, invoke):
    assert run_page(page, tmp_path, monkeypatch, invoke) > 0


RUNNING = sorted({c.page for c in COMMANDS})


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", RUNNING)
def test_every_page_runs_as_it_is_written(page, tmp_path, monkeypatch, invoke, axisplan):
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path, invoke)
    for body in blocks(REPOSITORY / page, "python"):
        if named := re.match(r"# (\w+\.py)\n", body):
            (tmp_path / named[1]).write_text(body, encoding="utf-8")
    assert run_page(page, tmp_path, monkeypatch, invoke, axisplan) > 0


def blocks(page: Path, kind: str) -> list[str]:
    return [body for found, body in fences(page) if found == kind]


EVERY_BLOCK = [(p.relative_to(REPOSITORY).as_posix(), kind, body) for p in PAGES for kind, body in fences(p)]


def test_every_block_has_a_kind_and_every_line_of_a_shell_is_a_command_of_ours_or_is_run_elsewhere():
    assert {kind for _, kind, _ in EVERY_BLOCK} <= {"bash", "console", "python", "yaml", "text"}
    for page, kind, body in EVERY_BLOCK:
        if kind in ("bash", "console"):
            for line in body.replace("\\\n", " ").splitlines():
                known = line.startswith(("axisplan ", "#")) or any(line.startswith(name) for name in NOT_RUN)
                assert known or not line.strip(), f"{page}: {line}"


@pytest.mark.parametrize("body", [body for _, kind, body in EVERY_BLOCK if kind == "yaml"], ids=lambda b: b.split("\n")[0])
def test_yaml_of_the_documentation_is_read(body, tmp_path):
    document = yaml.safe_load(body)
    path = tmp_path / "it.yaml"
    path.write_text(body, encoding="utf-8")
    if "kinds" in document:
        assert load_model(str(path)).name == document["name"]
    elif "levels" in document:
        assert load_cluster(str(path)).name == document["name"]
    else:  # a workflow: its commands are ours
        lines = [step["run"] for job in document["jobs"].values() for step in job["steps"] if "run" in step]
        commands = [shlex.split(c) for line in lines for c in re.findall(r"axisplan (.*?)(?:;|&&|$)", line) if c]
        assert commands
        for words in commands:
            parsed(tuple(words))


@pytest.mark.parametrize("body", [body for _, kind, body in EVERY_BLOCK if kind == "python"], ids=lambda b: b.split("\n")[0])
def test_python_of_the_documentation_runs(body):
    if "torch" in body:
        pytest.importorskip("torch")
    exec(compile(body, "block", "exec"), {"__name__": "block"})


@pytest.mark.slow
def test_the_plan_that_the_readme_quotes_is_what_is_printed(tmp_path, monkeypatch, axisplan):
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    command, quoted = re.search(r"```bash\n(axisplan plan [^\n]*)\n```\n\n```text\n(.*?)```", readme, re.S).groups()
    done = axisplan(*shlex.split(command)[1:], cwd=tmp_path, COLUMNS="140")
    assert done.returncode == 0, done.stderr
    assert [line.rstrip() for line in done.stdout.splitlines()] == [line.rstrip() for line in quoted.splitlines()]


def test_every_page_is_in_the_site_and_every_link_between_pages_leads_somewhere():
    text = (REPOSITORY / "mkdocs.yml").read_text()
    for page in PAGES[1:]:
        assert page.relative_to(REPOSITORY / "docs").as_posix() in text, f"{page.name} is not in mkdocs.yml"
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", FENCE.sub("", page.read_text())):
            if "://" not in target and not target.startswith("mailto:"):
                assert (page.parent / target).exists(), f"{page.relative_to(REPOSITORY)} links to {target}"


def test_every_module_of_the_costs_is_on_the_map_of_their_page():
    places = (REPOSITORY / "docs" / "costs.md").read_text().split("## Where what lies")[1].split("\n## ")[0]
    modules = {path.stem for path in (REPOSITORY / "cost_models").glob("*.py")} - {"__init__"}
    assert set(re.findall(r"`(\w+)`", places)) == modules


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_builds_without_a_warning(tmp_path):
    for name in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is absent: pip install 'axisplan[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=quiet, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert (tmp_path / "site" / "api" / "index.html").stat().st_size > 20_000
