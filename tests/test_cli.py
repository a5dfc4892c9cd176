"""The command line: exit codes, one clear line an error, help with an example, and no torch where none is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

import cli

JOB = ["llama-3-8b", "--cluster", "h100-sxm:1x8", "--seq-len", "8k", "--global-batch", "128"]


def every_group(group: click.Group = cli.cli, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = [(name, c) for name, c in group.commands.items() if isinstance(c, click.Group)]
    return [path, *(found for name, c in inner for found in every_group(c, (*path, name)))]


def every_command(group: click.Group = cli.cli, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    found: list[tuple[tuple[str, ...], click.Command]] = []
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found += every_command(command, (*path, name))
        elif not command.hidden:
            found.append(((*path, name), command))
    return found


@pytest.mark.parametrize("path", [path for path, _ in every_command()], ids=" ".join)
def test_help_of_every_command_says_what_it_does_and_ends_with_an_example(invoke, path):
    code, out, _ = invoke(*path, "--help")
    assert code == 0
    assert out.splitlines()[2].strip()
    assert f"axisplan {' '.join(path)}" in out.split("Example", 1)[1]


@pytest.mark.parametrize("path", every_group(), ids=lambda path: " ".join(path) or "axisplan")
def test_help_of_every_group_says_whole_sentences_and_ends_with_an_example(invoke, path):
    code, out, _ = invoke(*path, "--help")
    assert code == 0
    assert "..." not in out.split("Commands:", 1)[1].split("Example", 1)[0].replace("[ARGS]...", "")
    assert f"axisplan {' '.join(path)}".rstrip() in out.split("Example", 1)[1]


def test_version_is_the_one_of_the_package(invoke):
    from profiles.version import __version__

    assert invoke("--version")[:2] == (0, f"axisplan {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["plan", "no-such-model", *JOB[1:]], 2, "no-such-model"),
        (["plan", "llama-3-8", *JOB[1:]], 2, "llama-3-8b"),
        (["plan", JOB[0], "--cluster", "h100-smx:1x8", *JOB[3:]], 2, "h100-sxm"),
        (["plan", *JOB[:4], "0", *JOB[5:]], 2, "--seq-len"),
        (["plan", *JOB, "--pin", "tp=3"], 2, "tp"),
        (["plan", *JOB, "--pin", "tq=2"], 2, "nearest: tp"),
        (["plan", *JOB, "--pin", "tp=2", "--exclude", "tp=2"], 2, "meets the pins and is not excluded"),
        (["plan", *JOB, "--execution", "fsdp", "--global-batch", "1"], 2, "with 1 sequences of 8192 tokens a step"),
        (["plan", *JOB, "--margin", "2"], 2, "--margin"),
        (["plan", *JOB, "--set", "attention=flash"], 2, "execution.KEY=VALUE"),
        (["plan", *JOB, "--execution", "megatorn"], 2, "megatron"),
        (["estimate", *JOB, "--layout", "tp=2,pq=4"], 2, "pq"),
        (["explain", "no-such-file.json"], 2, "no-such-file.json"),
        (["plan", *JOB, "--no-such-option"], 2, "--no-such-option"),
        (["plan", *JOB[:4]], 2, "--seq-len"),
        (["plan", *JOB, "--out", ""], 2, "--out"),
        (["profile", "gpu", "--plot="], 2, "--plot"),
    ],
)
def test_bad_input_is_one_line_on_stderr_that_names_it(invoke, arguments, code, words):
    got, out, err = invoke(*arguments)
    assert (got, out) == (code, "")
    assert err.startswith("axisplan: ")
    assert err.count("\n") == 1
    assert words in err
    assert "Traceback" not in err
    assert "internal error" not in err


def test_check_exits_0_2_or_3_and_estimate_prints_no_time_for_what_does_not_fit(invoke):
    assert invoke("check", *JOB, "--layout", "zero=3,recompute=full")[0] == 0
    code, out, _ = invoke("check", *JOB, "--layout", "tp=3", "--json")
    assert code == 2
    assert {v["rule"] for v in json.loads(out)["violations"]} >= {"heads_divide_tp", "degrees_fill_the_world"}
    code, out, _ = invoke("estimate", "llama-3.1-405b", *JOB[1:], "--layout", "tp=8", "--json")
    assert code == 3
    document = json.loads(out)
    assert document["legal"] is True
    assert document["fits"] is False
    assert document["binding"]["over_bytes"] > 0
    assert "step_seconds" not in document


def test_json_of_estimate_has_the_documented_keys_and_its_seconds_add_up(invoke):
    code, out, err = invoke("estimate", *JOB, "--layout", "zero=3,recompute=full", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    keys = {
        "legal", "violations", "fits", "binding", "step_seconds", "step_seconds_low", "step_seconds_high", "tokens_per_second_per_gpu",
        "mfu", "hfu", "bubble_fraction", "seconds", "memory", "limit_bytes", "bytes_sent", "guessed",
    }  # fmt: skip
    assert keys <= set(document)
    assert sum(document["seconds"].values()) == pytest.approx(document["step_seconds"], rel=1e-9)


def test_nothing_that_plans_imports_torch():
    script = "import sys; sys.modules['torch'] = None; import cli; cli.main(sys.argv[1:])"
    job = ["plan", "llama-tiny", "--cluster", "cpu:1x4", "--seq-len", "256", "--global-batch", "16", "--prove", "--json"]
    done = subprocess.run([sys.executable, "-c", script, *job], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["certificate"]["proved"] is True


def test_a_closed_pipe_says_nothing():
    command = [sys.executable, "-c", "import cli; cli.main(['models'])"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) in (0, 1)


@pytest.mark.parametrize(("encoding", "name"), [("ascii", "models"), ("utf-8", "m\udcff")])
def test_what_the_terminal_has_no_letter_for_is_a_question_mark(tmp_path, encoding, name):
    job = ["llama-tiny", "--cluster", "cpu:1x2", "--seq-len", "128", "--global-batch", "8", "--precision", "fp32", "--out", name]
    command = [sys.executable, "-c", "import sys, cli; cli.main(sys.argv[1:])", "plan", *job]
    variables = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, timeout=120, check=False, cwd=tmp_path, env=variables)
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"plan written to {name}".encode("ascii", "replace") in done.stdout
