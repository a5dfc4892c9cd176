"""A name, a path and a variable with spaces, quotes, ``$(...)`` and newlines are inert in every file of every target and launcher."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from plans import job_of, plan_of, renamed
from starts import started

from planner.emit.core import LAUNCHERS, TARGETS, EmitSettings, emit
from planner.emit.megatron.bridge import unquoted
from profiles.errors import InputError

HOSTILE = "a b $(touch pwned) `touch pwned` 'c' \"d\" \\e ${F} %s\n- touch pwned\r\n#SBATCH --wrap=id\n\tkey: {v}"
LAYOUTS = {"deepspeed": "tp=2,zero=1", "accelerate": "tp=2,zero=3", "torchtitan": "tp=2,pp=2,zero=2"}
OPTIONS = {"kubernetes": {"image": "a/b:c"}, "skypilot": {"setup": HOSTILE}}
NEEDS = {"megatron": "MEGATRON_PATH", "megatron-bridge": "MEGATRON_BRIDGE_PATH", "torchtitan": "HF_ASSETS_PATH", "deepspeed": "MODEL",
         "accelerate": "MODEL"}  # fmt: skip
SHELL, OBJECTS, NOTES = (".sh", ".sbatch"), (".yaml", ".json"), (".md",)


@pytest.fixture(params=list(itertools.product(TARGETS, LAUNCHERS)), ids=lambda pair: "-".join(pair))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str, Path]:
    """The launch folder whose every free value is hostile, in a folder with a hostile name."""
    target, launcher = request.param
    options = dict(OPTIONS.get(launcher, {}))
    if target.startswith("megatron"):
        options["tokenizer"] = HOSTILE
    if launcher in ("kubernetes", "skypilot") and target in NEEDS:
        options[NEEDS[target]] = HOSTILE
    job = job_of(renamed("llama-3.1-8b", HOSTILE), "h100-sxm:2x8", target, 4096, 64)
    out = tmp_path / "o u 't' $(touch pwned)"
    settings = EmitSettings(data=(HOSTILE,), options=options, environment={"MINE": HOSTILE})
    emit(plan_of(job, LAYOUTS.get(target, "tp=2,pp=2")), target, launcher, out, settings)
    return target, launcher, out


def test_every_kind_of_file_holds_it_as_a_value(folder: tuple[str, str, Path]) -> None:
    target, launcher, out = folder
    for path in out.iterdir():
        text = path.read_text()
        if path.suffix in SHELL:
            subprocess.run(["bash", "-n", path], check=True)
            # SC2016 would have us expand what is in single quotes on purpose.
            assert subprocess.run(["shellcheck", "-S", "style", "-e", "SC2016", path], capture_output=True, text=True).stdout == ""
            assert path.suffix == ".sh" or "\n#SBATCH --wrap" not in text
        elif path.suffix == ".py":
            compile(text, path.name, "exec")
        elif path.suffix in NOTES:
            assert [line for line in text.splitlines() if line.startswith(("- ", "touch", "#SBATCH", "\t"))] == []
        elif path.suffix in OBJECTS:
            assert len(list(yaml.safe_load_all(text))) == 1
        else:
            assert path.name == "places.awk"
    values = list(strings(out))
    assert HOSTILE in values
    if launcher == "skypilot":
        assert yaml.safe_load((out / "task.yaml").read_text())["setup"] == HOSTILE + "\n"
    if launcher == "kubernetes" and target in NEEDS:
        found = yaml.safe_load((out / "trainjob.yaml").read_text())["spec"]["trainer"]["env"]
        assert found == [{"name": NEEDS[target], "value": HOSTILE.replace("$(", "$$(")}]


def strings(out: Path) -> list[str]:
    """Every text value of the folder's JSON, YAML and Python."""
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, str):
            found.append(value)
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(inner)

    for path in out.iterdir():
        if path.suffix == ".json":
            walk(json.loads(path.read_text()))
        if path.suffix == ".py":
            found += [
                n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant) and isinstance(n.value, str)
            ]
    return found


def test_starting_it_runs_nothing_else_and_passes_it_on(folder: tuple[str, str, Path]) -> None:
    target, _, out = folder
    words = started(out)
    assert not list(out.parent.rglob("pwned"))
    if target == "megatron":
        assert words[words.index("--data-path") + 1] == words[words.index("--tokenizer-model") + 1] == HOSTILE
    if target == "megatron-bridge":
        tokenizer = next(w for w in words if w.startswith("tokenizer.tokenizer_model="))
        assert unquoted(tokenizer.partition("=")[2]) == HOSTILE
    if target in ("deepspeed", "accelerate"):
        assert str(out / "train.py") in words


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_cannot_be_quoted_is_refused(launcher: str, tmp_path: Path) -> None:
    """Slurm's directives and the names of Kubernetes' objects."""
    options = {"slurm": "partition", "kubernetes": "name", "skypilot": "infra", "torchrun": "partition"}
    given = {"image": "a"} if launcher == "kubernetes" else {}
    plan = plan_of(job_of("llama-3.1-8b", "h100-sxm:2x8", "axisplan", 4096, 64), "tp=2")
    with pytest.raises(InputError, match="--set"):
        emit(plan, "axisplan", launcher, tmp_path / "x", EmitSettings(options={**given, options[launcher]: HOSTILE}))
