"""The silent walls of PyTorch (shared/torch.md), each met by a check before anything hangs or is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cost_models.layout import Layout
from planner.runtime.checkpoint import latest
from planner.runtime.pipeline import Transfer, lower
from planner.runtime.train import microbatches
from profiles.errors import InputError


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
