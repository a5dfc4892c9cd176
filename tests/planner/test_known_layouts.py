"""Known good layouts: what was published and ran is never predicted faster than our plan for the same job."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cost_models.runs import Run, load_runs, read_rows
from tests.scripts import script

ROOT = Path(__file__).resolve().parents[2]
QUICK = (
    "nemolauncher-llama2-7b-H100x8",
    "nemolauncher-gpt3-5b-nemo-H100x64",
    "narayanan21-t1-1.7B-A100x32",
    "narayanan21-t1-18B-A100x256",
)


KNOWN: Any = script("known_layouts")


@cache
def published() -> dict[str, Run]:
    return {run.id: run for run in KNOWN.chosen(load_runs(read_rows(ROOT / "tests" / "data" / "runs.csv"))[0])}


def test_each_model_gpu_and_count_has_the_fastest_of_its_grade_a_runs() -> None:
    runs = list(published().values())
    assert len(runs) == len({(r.group[1], r.group[2], r.job.cluster.gpus) for r in runs}) > 200
    assert {r.grade for r in runs} == {"A"}


@pytest.mark.parametrize("name", QUICK)
def test_our_plan_is_predicted_at_most_as_slow_as_the_published_layout(name: str) -> None:
    row = KNOWN.compare(published()[name])
    assert row["published_fits"] and not row["broken"]
    assert row["verdict"] == "as fast"
    assert row["ours_s"] <= row["published_s"] * (1 + 1e-9)


@pytest.mark.verify
@pytest.mark.parametrize("name", sorted(published()))
def test_no_published_layout_is_predicted_faster(name: str) -> None:
    row = KNOWN.compare(published()[name])
    assert row["verdict"] in ("as fast", "published does not fit"), row
