"""Numbers on the command line: what is refused comes with the nearest value that is not."""

from __future__ import annotations

import pytest

from planner.number_types import nearest_count

PLAN = ["plan", "llama-tiny", "--cluster", "cpu:1x2", "--seq-len", "128", "--global-batch", "8"]


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("0", 1),
        ("8.5k", 8704),
        ("8q", 8),
        ("2.6", 3),
        ("1e3", 1000),
        ("1e999", 10**12 - 1),
        ("100G", 100 * 1024**3),
        ("9999T", 10**12 - 1),
        ("k", "8k"),
        ("", "8k"),
    ],
)
def test_the_nearest_count_is_what_the_text_seems_to_say(text: str, nearest: object) -> None:
    assert nearest_count(text, "8k") == nearest


@pytest.mark.parametrize(
    ("option", "value", "nearest"),
    [
        ("--seq-len", "-8", "8"), ("--seq-len", "0", "1"), ("--seq-len", "4.5k", "4608"), ("--seq-len", "long", "8k"),
        ("--global-batch", "-128", "128"), ("--global-batch", "1.5", "2"), ("--gpus", "0", "1"), ("--gpus", "two", "8"),
        ("--margin", "8", "0.08"), ("--margin", "-0.1", "0.0"), ("--margin", "nan", "0.08"), ("--memory-limit", "-5", "80.0"),
        ("--moe-imbalance", "0.5", "1.0"), ("--tie", "2", "0.01"), ("--tie", "-1", "0.0"), ("--top", "-1", "0"), ("--top", "99", "50"),
        ("--mtbf", "0", "1000.0"), ("--mtbf", "nan", "1000.0"), ("--checkpoint-seconds", "-1", "0.0"),
        ("--restart-seconds", "inf", "30.0"), ("--spare", "-2", "0"),
    ],
)  # fmt: skip
def test_a_number_that_cannot_be_is_refused_in_one_line_with_the_nearest_that_can(
    invoke, option: str, value: str, nearest: str
) -> None:
    code, out, err = invoke(*PLAN, option, value)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert option in err and f"nearest: {nearest}" in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--lora", "16", "--lora-targets", "experts"), "--lora-targets: 'experts': llama-3-8b has none of these parts"),
        (("--freeze", "attention,mlp,embedding,head,norm"), "leaves nothing of llama-3-8b to train"),
    ],
)
def test_a_job_that_trains_nothing_is_refused(invoke, options: tuple[str, ...], says: str) -> None:
    command = ("plan", "llama-3-8b", "--cluster", "h100-sxm:1x8", "--seq-len", "8k", "--global-batch", "128")
    code, out, err = invoke(*command, *options)
    assert (code, out) == (2, "")
    assert says in err and "nearest: attention,mlp" in err


def test_a_range_that_runs_downwards_is_named(invoke) -> None:
    code, _, err = invoke("plan", "llama-tiny", "--cluster", "cpu:1x4", "--seq-len", "256", "--global-batch", "16k..4k")
    assert code == 2 and "the smaller number first; nearest: 4k..16k" in err


def test_host_memory_is_refused_where_the_execution_cannot_use_it(invoke) -> None:
    code, out, err = invoke(*PLAN, "--allow-offload")
    assert (code, out) == (2, "")
    assert "axisplan offloads nothing" in err


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1", "1e300"])
def test_a_learning_rate_that_cannot_be_is_refused_before_the_plan_is_read(invoke, value: str) -> None:
    code, out, err = invoke("emit", "missing.json", "--learning-rate", value, "--out", "launch")
    assert (code, out) == (2, "")
    assert "--learning-rate" in err and "above 0 and below 1,000; nearest: 0.0003" in err
