"""The documentation tells the truth: every command in it parses, every ``bash`` block runs, links lead somewhere, the site builds.

Blocks marked ``console`` need what a test has not (a GPU, a log, minutes): their commands are parsed against the real command line.
A comment ``# exit 2`` after a command says which exit code it is meant to have.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

import cli

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
QUICK = ("docs/commands/layout.md", "docs/commands/measure.md")
"""Pages whose blocks run in the default tier."""
ELSEWHERE = ("demo", "run", "profile", "dry-run", "verify", "doctor")
"""Commands that take minutes or torch; their own tests run them."""
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.M | re.S)


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
    for kind, body in FENCE.findall(page.read_text(encoding="utf-8")):
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


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, invoke) -> int:
    """Run a page's ``bash`` commands in order in one folder; returns how many ran."""
    monkeypatch.chdir(folder)
    ran = 0
    for command in COMMANDS:
        if command.page != page or command.kind != "bash" or command.name in ELSEWHERE:
            continue
        code, _, err = invoke(*command.words)
        assert code == command.exit_code, f"{command}: exit code {code}: {err}"
        ran += 1
    return ran


@pytest.mark.parametrize("page", QUICK)
def test_the_quick_pages_run(page, tmp_path, monkeypatch, invoke):
    assert run_page(page, tmp_path, monkeypatch, invoke) > 0


RUNNING = sorted({c.page for c in COMMANDS if c.kind == "bash" and c.name not in ELSEWHERE} - set(QUICK))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", RUNNING)
def test_every_page_runs_as_it_is_written(page, tmp_path, monkeypatch, invoke):
    pytest.importorskip("plotly")
    for name in ("runs.csv",):
        (tmp_path / name).write_bytes((REPOSITORY / "tests" / "data" / name).read_bytes())
    (tmp_path / "tests").symlink_to(REPOSITORY / "tests")
    assert run_page(page, tmp_path, monkeypatch, invoke) > 0


def test_every_page_is_in_the_site_and_every_link_between_pages_leads_somewhere():
    text = (REPOSITORY / "mkdocs.yml").read_text()
    for page in PAGES[1:]:
        assert page.relative_to(REPOSITORY / "docs").as_posix() in text, f"{page.name} is not in mkdocs.yml"
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", FENCE.sub("", page.read_text())):
            if "://" not in target and not target.startswith("mailto:"):
                assert (page.parent / target).exists(), f"{page.relative_to(REPOSITORY)} links to {target}"


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
