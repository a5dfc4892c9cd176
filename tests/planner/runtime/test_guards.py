"""The silent walls of PyTorch (shared/torch.md), each met by a check before anything hangs or is lost."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_layouts as layouts

from cost_models.layout import Layout
from planner.runtime.checkpoint import latest
from planner.runtime.launch import supervise
from planner.runtime.pipeline import Arrived, Transfer, lower
from planner.runtime.train import microbatches
from profiles.errors import InputError

SAVING = Path(__file__).resolve().parent / "checkpoint_programs.py"
SPLIT = ["zb-h1", "zb-v", "dualpipe-v"]


@pytest.mark.parametrize("schedule", [SPLIT[0], *(pytest.param(s, marks=pytest.mark.slow) for s in SPLIT[1:])])
@pytest.mark.parametrize("zero", [3, 0])
def test_a_split_backward_loses_no_gradient_that_data_parallelism_reduces(
    gradients: Callable[..., dict[str, Any]], schedule: str, zero: int
) -> None:
    """Walls 1 and 2: FSDP2 that reshards after the forward, and classic DDP, give wrong gradients there without a word."""
    layouts.compare(gradients, 4, f"pp=2,dp=2,zero={zero},schedule={schedule},micro_batch=1", "llama")


@pytest.mark.parametrize(("schedule", "reshards"), [("1f1b", True), *((schedule, False) for schedule in SPLIT)])
def test_fsdp_reshards_after_the_forward_only_where_the_backward_is_whole(
    processes: Callable[..., list[Any]], schedule: str, reshards: bool
) -> None:
    """Wall 1's guard: the root apart, which FSDP2 never reshards."""
    for found in processes(4, "resharding", layout=f"pp=2,dp=2,zero=3,schedule={schedule},micro_batch=1"):
        assert found == [reshards] * len(found)
        assert len(found) >= 2


def test_workers_of_both_commands_start_without_the_shared_store_that_a_restart_hangs_on(tmp_path: Path) -> None:
    """Wall 9: ``axisplan run`` and launch.sh start torchrun through ``supervise``."""
    said: list[dict[str, Any]] = []
    tell = 'import json, os; print(json.dumps({"shared": os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]}))'
    supervise([sys.executable, "-c", tell], said.append, dict(os.environ), log=tmp_path / "log.txt")
    assert said == [{"shared": "1"}]


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_does() -> None:
    """Wall 7: uneven microbatches hang a pipeline."""
    with pytest.raises(InputError, match="must be a multiple of micro_batch\\*dp = 4; nearest: 8"):
        microbatches(Layout.parse("pp=2,dp=2,micro_batch=2"), 9)


def test_a_save_cut_short_leaves_the_last_whole_checkpoint_to_continue_from(
    processes: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Wall 10: what a killed rank leaves half written is never the one that is read, and the next save replaces it."""
    facts = {"folder": str(tmp_path), "layout": "dp=2,zero=1", "more": 2}
    expected = processes(2, "train_and_save", steps=2, **facts)[0]
    half = tmp_path / "step-00000004"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"cut short")
    assert latest(tmp_path) == tmp_path / "step-00000002"
    assert processes(2, "load_and_train", steps=2, **facts)[0] == expected


def test_a_whole_checkpoint_is_never_written_over(processes: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Wall 10 again: a run that starts afresh in an old run's folder saves beside what is there, and names its own."""
    facts = {"folder": str(tmp_path), "layout": "dp=2,zero=1", "more": 1}
    processes(2, "train_and_save", steps=2, **facts)
    before = {p: p.read_bytes() for p in (tmp_path / "step-00000002").rglob("*") if p.is_file()}
    expected = processes(2, "train_and_save", steps=2, settings={"seed": 5}, **facts)[0]
    assert {p: p.read_bytes() for p in before} == before
    assert latest(tmp_path) == tmp_path / "step-00000002-2"
    assert processes(2, "load_and_train", steps=2, settings={"seed": 5}, **facts)[0] == expected


def test_whatever_ends_a_run_the_save_under_way_is_whole(processes: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert processes(2, "fault_after_a_save_began", file=SAVING, folder=str(tmp_path)) == ["step 2: not a number"] * 2
    assert latest(tmp_path) == tmp_path / "step-00000001"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("pp", [2, 4])
def test_every_pair_of_ranks_meets_its_transfers_in_one_order(schedule: str, pp: int) -> None:
    """Transfers between two ranks in the same order on both, so that none waits for another in a circle."""
    vpp = 1 if schedule in ("gpipe", "1f1b", "zb-h1") else 2
    orders = lower(schedule, pp, vpp, 2 * pp * vpp)
    layout = Layout.parse(f"pp={pp},vpp={vpp},schedule={schedule}")
    seen: dict[tuple[int, int], dict[int, list[Transfer]]] = {}
    for rank, order in enumerate(orders):
        for step in order:
            if isinstance(step, Transfer):
                ends = sorted(
                    (layout.rank_of_chunk(step.chunk), layout.rank_of_chunk(step.chunk + (1 if step.what == "F" else -1)))
                )
                seen.setdefault((ends[0], ends[1]), {}).setdefault(rank, []).append(step)
    for both in seen.values():
        first, second = both.values()
        assert [t[1:] for t in first] == [t[1:] for t in second]
        assert [t.kind for t in first] == [{"send": "receive", "receive": "send"}[t.kind] for t in second]


@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipe-v", 2)])
def test_a_sent_tensor_is_let_go_only_after_its_receiver_has_used_it(schedule: str, vpp: int) -> None:
    """Whatever the speed of each rank: 30 random interleavings of all orders, each step run as soon as what it waits for is there."""
    pp, microbatches = 4, 16
    orders = lower(schedule, pp, vpp, microbatches)
    layout = Layout.parse(f"pp={pp},vpp={vpp},schedule={schedule}")
    confirmed = 0
    for seed in range(30):
        pick = random.Random(seed)
        at, sent, used = [0] * pp, set(), set()
        while ready := [r for r in range(pp) if at[r] < len(orders[r])]:
            rank = pick.choice(ready)
            step = orders[rank][at[rank]]
            if isinstance(step, Arrived):
                assert (step.what, step.microbatch, step.chunk + (1 if step.what == "F" else -1)) in used
                confirmed += 1
            elif isinstance(step, Transfer):
                if step.kind == "send":
                    sent.add((step.what, step.microbatch, step.chunk))
            else:
                what = {"F": "F", "B": "B", "BW": "B"}.get(step.kind)
                before = step.chunk - 1 if what == "F" else step.chunk + 1
                from_far = what and 0 <= before < layout.chunks and layout.rank_of_chunk(before) != rank
                if from_far and (what, step.microbatch, before) not in sent:
                    continue
                used.add((what, step.microbatch, step.chunk))
            at[rank] += 1
    assert confirmed > 30 * microbatches


@pytest.mark.parametrize(("schedule", "pp", "most"), [("1f1b", 2, 2), ("1f1b", 4, 4), ("zb-h1", 4, 4)])
def test_sent_gradients_do_not_pile_up(schedule: str, pp: int, most: int) -> None:
    """gloo says of no send that it is over: without what arrives, all 64 would be held to the end of the step."""
    for order in lower(schedule, pp, 1, 64):
        held = peak = 0
        for step in order:
            held += isinstance(step, Transfer) and step.kind == "send" and step.what == "B"
            held -= isinstance(step, Arrived) and step.what == "B"
            peak = max(peak, held)
        assert peak <= most


@pytest.mark.parametrize("model", ["llama", *[pytest.param(m, marks=pytest.mark.slow) for m in ("moe-v3", "mla")]])
def test_a_split_backward_computes_each_norm_gradient_once(processes: Callable[..., list[Any]], model: str) -> None:
    """The input's in B, the weight's in W: (calls for the input, for the weight) of the last stage, whose B and W are apart."""
    last = processes(2, "norm_gradients", layout="pp=2,schedule=zb-h1,micro_batch=2", model=model)[1]
    whole = processes(2, "norm_gradients", layout="pp=2,schedule=1f1b,micro_batch=2", model=model)[1]
    assert last == whole
    assert last[0] == last[1] > 0
