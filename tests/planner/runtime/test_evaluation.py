"""The held-out loss, and what a run tells of itself: records, files, spans."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cost_models.layout import Layout
from cost_models.schedules import Action
from planner.runtime.journal import Journal, check_tensorboard
from planner.runtime.pipeline import Transfer, lower_forward
from profiles.errors import InputError

LAYOUTS = [
    (4, "tp=2,pp=2,micro_batch=2", "llama"), (4, "dp=2,cp=2,zero=3", "llama"), (4, "pp=2,dp=2,schedule=zb-v,vpp=2,zero=3", "llama"),
    (4, "tp=2,dp=2,ep=4", "moe"), (4, "pp=2,vpp=2,schedule=interleaved,dp=2,zero=1", "gpt"), (2, "dp=2,zero=2", "mla-lite"),
]  # fmt: skip
CASES = [pytest.param(*case, marks=[] if number in (0, 2) else pytest.mark.slow) for number, case in enumerate(LAYOUTS)]


def tokens(folder: Path, count: int = 401, end: int = 0) -> Path:
    """Prepared data of a 67-word vocabulary, with documents that end inside sequences."""
    ids = np.random.default_rng(5).integers(0, 67, count).astype("uint16")
    ids.tofile(folder / "tokens.bin")
    (folder / "tokens.json").write_text(json.dumps({"dtype": "uint16", "count": count, "vocab": 67, "end": end}))
    return folder


@pytest.mark.parametrize(("world", "layout", "model"), CASES)
def test_the_held_out_loss_is_one_process_and_disturbs_no_step(
    processes: Callable[..., list[Any]], tmp_path: Path, world: int, layout: str, model: str
) -> None:
    """13 sequences do not fill two batches of 8; labels across documents do not count."""
    folder = str(tokens(tmp_path))
    expected = processes(1, "held_out_losses", folder=folder, layout="micro_batch=8", model=model, sequences=13)[0]
    for got in processes(world, "held_out_losses", folder=folder, layout=layout, model=model, sequences=13):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-9)
        assert got["tokens"] == expected["tokens"]
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)


def test_the_held_out_loss_is_the_mean_over_valid_tokens_of_the_first_sequences(
    processes: Callable[..., list[Any]], tmp_path: Path
) -> None:
    folder = str(tokens(tmp_path))
    ids = np.fromfile(tmp_path / "tokens.bin", dtype="uint16")
    got = processes(2, "held_out_losses", folder=folder, layout="dp=2", steps=0, sequences=5)[0]
    assert got["loss"] == pytest.approx(processes(1, "plain_loss", folder=folder, model="llama", sequences=5)[0], rel=1e-12)
    assert got["tokens"] == 5 * 16 - int((ids[: 5 * 16] == 0).sum())


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v", "dualpipe-v"])
def test_forwards_alone_reach_every_chunk_in_order_and_fill_the_pipeline(schedule: str) -> None:
    vpp = 1 if schedule == "1f1b" else 2
    orders = lower_forward(schedule, 4, vpp, 6)
    layout = Layout.parse(f"pp=4,vpp={vpp},schedule={schedule}")
    actions = [(step.microbatch, step.chunk) for order in orders for step in order if isinstance(step, Action)]
    assert sorted(actions) == [(m, c) for m in range(6) for c in range(4 * vpp)]
    moved = [step for order in orders for step in order if isinstance(step, Transfer) and step.kind == "send"]
    crossings = sum(layout.rank_of_chunk(c) != layout.rank_of_chunk(c + 1) for c in range(4 * vpp - 1))
    assert len(moved) == 6 * crossings
    first = [step for step in orders[0] if isinstance(step, Action)][:4]
    assert [step.microbatch for step in first] == [0, 1, 2, 3], "the first rank does not wait for the last"


@pytest.mark.parametrize("layout", ["pp=2,micro_batch=2", "pp=2,schedule=zb-h1,micro_batch=2"])
def test_every_action_of_a_step_is_measured_once_and_none_overlap_on_a_stage(
    processes: Callable[..., list[Any]], layout: str
) -> None:
    got = processes(2, "spans_of_a_step", layout=layout)[0]
    for stage in range(2):
        mine = [s for s in got["spans"] if s["stage"] == stage]
        kinds = [s["kind"] for s in mine]
        assert kinds.count("forward") == 4
        assert kinds.count("backward") + kinds.count("backward_weight") == 4
        assert kinds[-2:] == ["reduce", "optimizer"]
        assert all(a["end"] <= b["start"] for a, b in pairwise(mine))
        assert mine[0]["start"] >= 0
        assert mine[-1]["end"] <= got["seconds"] + 1.0
        assert sum(s["end"] - s["start"] for s in mine if s["microbatch"] >= 0) == pytest.approx(got["busy"][stage])
        assert [s["microbatch"] for s in mine if s["kind"] == "forward"] == [0, 1, 2, 3]


def test_a_run_that_is_continued_writes_no_step_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Journal(tmp_path)
    for step in (1, 2, 3, 4):
        before({"step": step, "loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # cut short by a kill
    after = Journal(tmp_path)
    for step in (3, 4):
        after({"step": step, "loss": -1.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, -1.0), (4, -1.0)]
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_tensorboard_shows_every_record(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    journal = Journal(tmp_path, tensorboard=True)
    journal({"step": 1, "loss": 4.5, "peak_bytes": 3 << 30, "stage_seconds": [0.1, 0.2]})
    journal({"step": 2, "loss": 4.25, "eval_loss": 4.75, "peak_bytes": 3 << 30})
    journal.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss/train")] == [(1, 4.5), (2, 4.25)]
    assert [(e.step, e.value) for e in found.Scalars("loss/held-out")] == [(2, 4.75)]
    assert [e.value for e in found.Scalars("memory/peak-GiB")] == [3.0, 3.0]
    assert [e.value for e in found.Scalars("stages/1-busy-seconds")] == pytest.approx([0.2])


def test_tensorboard_that_is_not_installed_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    check_tensorboard(False)
    with pytest.raises(InputError, match=r"tensorboard: True: needs the package tensorboard: pip install"):
        check_tensorboard(True)
