"""The README of every launch folder is ten lines: the plan in a table, what this is, how to start, what to expect, how to compare."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from plans import job_of, plan_of, renamed

from planner.emit.core import LAUNCHERS, TARGETS, EmitSettings, emit

LAYOUTS = {"deepspeed": "tp=2,zero=1", "accelerate": "tp=2,zero=3", "torchtitan": "tp=2,pp=2,zero=2"}
HOSTILE = "a | b\n# c `d`\n* e $(f)"


def readme(tmp_path: Path, target: str, launcher: str, name: str = "llama-3.1-8b") -> list[str]:
    job = job_of(renamed("llama-3.1-8b", name), "h100-sxm:4x8", target, 4096, 64)
    options = {"image": "a/b:c"} if launcher == "kubernetes" else {}
    emit(plan_of(job, LAYOUTS.get(target, "tp=2,pp=2")), target, launcher, tmp_path / "out", EmitSettings(options=options))
    return (tmp_path / "out" / "README.md").read_text().split("\n")


@pytest.mark.parametrize(("target", "launcher"), itertools.product(TARGETS, LAUNCHERS))
def test_it_is_ten_lines_in_the_same_order(target: str, launcher: str, tmp_path: Path) -> None:
    lines = readme(tmp_path, target, launcher)
    assert len(lines) == 11
    assert lines[-1] == ""
    assert lines[0] == f"# llama-3.1-8b with {target} on 32 x h100-sxm-80gb"
    keys, rule, values = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:5])
    table = dict(zip(keys, values, strict=True))
    assert (table["tp"], table["micro_batch"], set(rule)) == ("`2`", "`1`", {"---"})
    assert [line.split(":")[0] for line in lines[6:10]] == ["* What", "* Start", "* Expect", "* Compare"]
    assert "64 sequences of 4096 tokens a step, in bf16" in lines[6]
    assert re.search(r"[\d.]+ m?s a step \(80 % interval .+ to .+\), [\d.]+ GiB on the fullest rank \(stage \d\)", lines[8])
    assert re.search(r"`axisplan measure \S+ --plan plan\.json --out runs\.csv`, then `axisplan regress runs\.csv`", lines[9])
    assert max(map(len, lines)) < 500


@pytest.mark.parametrize("target", TARGETS)
def test_a_hostile_name_adds_no_line_and_no_cell(target: str, tmp_path: Path) -> None:
    lines = readme(tmp_path, target, "torchrun", HOSTILE)
    assert lines[0].startswith("# a | b # c")
    assert lines[6].count("`") % 2 == 0
    assert len({line.count("|") for line in lines[2:5]}) == 1
    assert len(lines) == 11
