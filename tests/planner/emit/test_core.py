"""The frame of every launch folder: shell that is clean and inert, names that are known, folders written whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from plans import job_of, plan_of, renamed
from starts import started

from planner.commands import launching
from planner.emit.core import (
    LAUNCHERS,
    TARGETS,
    EmitSettings,
    Need,
    Variable,
    Word,
    emit,
    from_environment,
    in_folder,
    lines,
    needs,
)
from planner.emit.imported import READERS
from planner.plan import Plan
from profiles.errors import InputError

HOSTILE = [
    "$(touch pwned)", "`touch pwned`", "a'; touch pwned; '", 'a"; touch pwned; "', "a\ntouch pwned\n", "model with spaces", "--flag",
    "$HOME", "a\\",
    "${IFS}touch${IFS}pwned", "%s", "a\r\ntouch pwned", "#",
]  # fmt: skip
LAYOUTS = {"axisplan": "tp=2,pp=2", "megatron": "tp=2,pp=2", "megatron-bridge": "tp=2,pp=2", "torchtitan": "tp=2,pp=2,zero=2"}


def plan(target: str, name: str = "llama-3.1-8b", cluster: str = "h100-sxm:1x8") -> Plan:
    return plan_of(job_of(renamed("llama-3.1-8b", name), cluster, target, 4096, 64), LAYOUTS[target])


def bash(script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", *options, str(script)], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("cluster", ["h100-sxm:1x8", "h100-sxm:4x8", "gb200-nvl72:1x72"])
@pytest.mark.parametrize("target", LAYOUTS)
def test_launch_scripts_are_clean_shell(target: str, cluster: str, tmp_path: Path) -> None:
    if cluster.startswith("gb200"):
        job = job_of("llama-3.1-8b", cluster, target, 4096, 72)
        made = plan_of(job, "tp=2,zero=2" if target == "torchtitan" else "tp=2")
    else:
        made = plan(target, cluster=cluster)
    emit(made, target, "torchrun", tmp_path / "launch", EmitSettings())
    script = tmp_path / "launch" / "launch.sh"
    assert bash(script, "-n").returncode == 0
    assert os.access(script, os.X_OK)
    if shutil.which("shellcheck"):
        found = subprocess.run(["shellcheck", "-S", "style", str(script)], capture_output=True, text=True, timeout=60, check=False)
        assert found.stdout == ""


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("target", LAYOUTS)
def test_a_hostile_name_of_a_model_is_inert(target: str, name: str, tmp_path: Path) -> None:
    """launch.sh runs with stand-ins for torchrun and axisplan that print their words: they are the plan's, and nothing else ran."""
    options = {"tokenizer": name} if target.startswith("megatron") else {}
    emit(plan(target, name), target, "torchrun", tmp_path / "launch", EmitSettings(data=(name,), options=options))
    words = started(tmp_path / "launch", "--last", "a b")
    assert not list(tmp_path.rglob("pwned"))
    assert words[-2:] == ["--last", "a b"]
    assert words[:5] == ["--nnodes", "1", "--nproc-per-node", "8", "--standalone"]
    if target == "megatron":
        assert words[words.index("--tokenizer-model") + 1] == name
        assert words[words.index("--data-path") + 1] == name
    if target == "torchtitan":
        source = (tmp_path / "launch" / "axisplan_config.py").read_text()
        compile(source, "axisplan_config.py", "exec")
        assert f"dataset={name!r}" in source
    readme = (tmp_path / "launch" / "README.md").read_text()
    assert readme.startswith("# ")
    assert "\ntouch" not in readme


def test_paths_with_spaces_and_quotes_work(tmp_path: Path) -> None:
    folder = tmp_path / "a 'b' $(c)"
    emit(plan("axisplan"), "axisplan", "torchrun", folder, EmitSettings())
    assert f"{folder}/plan.json" in started(folder)


def test_what_the_user_must_set_is_asked_for_by_name(tmp_path: Path) -> None:
    emit(plan("megatron"), "megatron", "torchrun", tmp_path / "launch", EmitSettings())
    done = subprocess.run(
        ["bash", str(tmp_path / "launch" / "launch.sh")], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("launch.sh: set MEGATRON_PATH to your checkout of Megatron-LM")


def test_words_and_variables_in_shell() -> None:
    assert Word("a b").shell() == "'a b'"
    assert Word("").shell() == "''"
    assert in_folder("plan.json").shell() == '"${here}"/plan.json'
    assert from_environment("M", "/x y.py").shell() == "\"${M}\"'/x y.py'"
    assert Variable("A", None, "why").shell() == "# why\nunset A"
    assert Variable("A", "b c", "why").shell() == "# why\nexport A='b c'"
    assert Variable("A", "x", "a\nb", "suggest").shell() == "# a b\n# export A=x"
    assert Variable("P", Word(base="here"), "why", "prepend").shell() == '# why\nexport P="${here}""${P:+:$P}"'
    assert [[w.text for w in line] for line in lines((Word("-m"), Word("x"), Word("--a"), Word("1"), Word("2"), Word("--b")))] == [
        ["-m"], ["x"], ["--a", "1", "2"], ["--b"],
    ]  # fmt: skip
    assert "exit 1" in needs((Need("A", "it's", "$(x)"),))


@pytest.mark.parametrize("value", ['a"b', "a$(c)", "a`c`", "a\\b", "a}b"])
def test_a_default_keeps_its_value(value: str) -> None:
    script = Variable("AXISPLAN_X", value, "why", "default").shell() + '\nprintf %s "$AXISPLAN_X"'
    assert subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=True).stdout == value


@pytest.mark.parametrize(("target", "launcher", "field"), [("megatrn", "torchrun", "--target"), ("megatron", "pbs", "--launcher")])
def test_names_that_are_not_known_are_answered_with_what_there_is(target: str, launcher: str, field: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        emit(plan("megatron"), target, launcher, tmp_path / "x")
    assert error.value.field == field
    assert all(name in error.value.rule for name in (TARGETS if field == "--target" else LAUNCHERS))


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "launch"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"thesis\.txt"):
        emit(plan("megatron"), "megatron", "torchrun", folder)
    assert [p.name for p in folder.iterdir()] == ["thesis.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["launch"]


def test_a_refused_plan_leaves_no_folder(tmp_path: Path) -> None:
    job = job_of("gemma-2-9b", seq_len=2048, global_batch=64)
    with pytest.raises(InputError):
        emit(plan_of(job, "tp=2", legal=False), "megatron", "torchrun", tmp_path / "launch")
    assert not list(tmp_path.iterdir())


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        emit(plan("megatron"), "megatron", "torchrun", tmp_path / folder)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    assert json.loads((tmp_path / "a" / "plan.json").read_text())["layout"]["tp"] == 2


@pytest.mark.parametrize(
    ("target", "launcher", "key", "says", "nearest"),
    [
        ("axisplan", "torchrun", "tokenizer", "axisplan takes no options; torchrun takes no options", None),
        ("torchtitan", "torchrun", "relase", "torchtitan takes release, deepep; torchrun takes no options", "release"),
        ("megatron", "slurm", "tokeniser", "megatron takes tokenizer, deepep; slurm takes partition, account", "tokenizer"),
        ("megatron", "slurm", "partitions", "megatron takes tokenizer, deepep; slurm takes partition, account", "partition"),
        ("megatron", "kubernetes", "megatron-path", "MEGATRON_PATH", "MEGATRON_PATH"),
    ],
)
def test_an_option_that_nobody_takes_is_refused_with_the_nearest_of_both(
    target: str, launcher: str, key: str, says: str, nearest: str | None, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as error:
        emit(plan(target), target, launcher, tmp_path / "launch", EmitSettings(options={key: "x", "image": "a"}))
    assert (error.value.field, error.value.value, error.value.nearest) == ("--set", key, nearest)
    assert says in error.value.rule


def test_a_targets_option_goes_with_any_launcher(tmp_path: Path) -> None:
    options = {"tokenizer": "our tokenizer", "partition": "gpu"}
    emit(plan("megatron"), "megatron", "slurm", tmp_path / "launch", EmitSettings(options=options))
    assert "--tokenizer-model 'our tokenizer'" in (tmp_path / "launch" / "launch.sh").read_text()


def test_the_command_offers_what_there_is() -> None:
    """Its lists stand apart, so that --help imports no emitter."""
    assert tuple(TARGETS) == launching.TARGETS
    assert tuple(LAUNCHERS) == launching.LAUNCHERS
    assert tuple(READERS) == launching.SOURCES


def test_emission_as_json_names_the_files(invoke, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    plan("axisplan").save(tmp_path / "plan.json")
    code, out, err = invoke("emit", str(tmp_path / "plan.json"), "--out", str(tmp_path / "launch"), "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert {"target": "axisplan", "launcher": "torchrun", "folder": str(tmp_path / "launch")}.items() <= document.items()
    assert sorted(document["files"]) == sorted(p.name for p in (tmp_path / "launch").iterdir())
