"""Order tables against PyTorch's own, and what ranks hold against the published counts."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from cost_models.dependencies import build, graph
from cost_models.layout import SCHEDULES, SPLIT_BACKWARD, V_SHAPED, ZERO_BUBBLE
from cost_models.schedules import check_schedule, group_size, in_flight, order_rows, order_table, rank_of
from profiles.errors import InputError

SHAPES = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-h1", 2), ("zb-h2", 1),
    ("zb-v", 2), ("dualpipe", 1), ("dualpipe-v", 2),
]  # fmt: skip


def torch_order(name: str, pp: int, vpp: int, microbatches: int) -> list[list[str]]:
    """The compute actions of torch's schedule class, without processes: its order is a function of a few attributes."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = object.__new__(schedules.get_schedule_class(name))
    schedule._num_stages = schedule.num_stages = pp * vpp
    schedule._n_microbatches = microbatches
    schedule.pp_group_size, schedule.n_local_stages = pp, vpp
    schedule.number_of_rounds = max(1, microbatches // pp)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    if vpp == 1 and name in ("GPipe", "1F1B"):
        orders = schedule._get_pipeline_order()
    else:
        orders = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(pp)}
    return [list(_flat(orders[rank])) for rank in range(pp)]


def _flat(actions: Any) -> Any:
    names = {"F": "F", "B": "BW", "I": "B", "W": "W"}
    for a in actions:
        if a is None:
            continue
        for part in a.sub_actions or (a,):
            if part.computation_type.value in names:
                mark = "+" if a.sub_actions and part.computation_type.value == "F" else ""
                yield f"{part.stage_index}{names[part.computation_type.value]}{part.microbatch_index}{mark}"


def ours(schedule: str, pp: int, vpp: int, microbatches: int) -> list[list[str]]:
    return [[f"{a}{'+' if a.paired else ''}" for a in order] for order in order_table(schedule, pp, vpp, microbatches)]


@pytest.mark.parametrize(
    ("schedule", "name", "vpp", "microbatches"),
    [
        ("gpipe", "GPipe", 1, lambda pp: (1, 3, 8)),
        ("1f1b", "1F1B", 1, lambda pp: (pp, 2 * pp, 3 * pp + 1)),
        ("interleaved", "Interleaved1F1B", 2, lambda pp: (pp, 4 * pp, max(1, pp - 1))),
        ("interleaved", "Interleaved1F1B", 3, lambda pp: (pp, 2 * pp)),
        ("zb-h1", "InterleavedZeroBubble", 1, lambda pp: (pp, 2 * pp, 3 * pp + 1)),
        ("zb-h1", "InterleavedZeroBubble", 2, lambda pp: (pp, 4 * pp)),
        ("zb-v", "ZBVZeroBubble", 2, lambda pp: (1, pp, 2 * pp, 4 * pp + 1)),
        ("dualpipe-v", "DualPipeV", 2, lambda pp: (2 * pp, 3 * pp, 5 * pp + 1)),
    ],
)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
def test_orders_equal_those_of_pytorch(schedule: str, name: str, vpp: int, microbatches: Any, pp: int) -> None:
    for m in microbatches(pp):
        if schedule == "zb-h1" and m % max(1, m // pp):
            continue
        mine, theirs = ours(schedule, pp, vpp, m), torch_order(name, pp, vpp, m)
        if name == "1F1B":  # torch 2.13's table numbers the last rank's forwards from 1 (what it runs is right)
            theirs[-1] = [f"{pp - 1}F{int(a.split('F')[1]) - 1}" if "F" in a else a for a in theirs[-1]]
        assert mine == theirs, m


def test_a_flexible_interleaved_group_equals_that_of_pytorch() -> None:
    assert [group_size(4, m) for m in (10, 6, 8, 3)] == [5, 6, 4, 3]
    assert ours("interleaved", 4, 2, 10) == torch_order("Interleaved1F1B", 4, 2, 10)


def test_the_group_leaves_a_remainder_that_megatron_accepts() -> None:
    for pp in range(2, 9):
        for m in range(pp, 60):
            g = group_size(pp, m)
            assert pp <= g <= m
            assert m % g == 0 or m % g >= pp


@pytest.mark.parametrize(("schedule", "vpp"), SHAPES)
def test_every_microbatch_passes_every_chunk_once_on_its_rank_without_deadlock(schedule: str, vpp: int) -> None:
    rng = random.Random(7)
    for _ in range(25):
        pp = rng.choice([2, 4, 6]) if schedule == "dualpipe" else rng.randint(1, 6)
        m = 2 * rng.randint(pp, 3 * pp) if schedule.startswith("dual") else rng.randint(1, 4 * pp)
        table = order_table(schedule, pp, vpp, m)
        done: Counter[tuple[str, int, int]] = Counter()
        for rank, order in enumerate(table):
            for a in order:
                assert rank_of(schedule, pp, a.chunk, a.microbatch) == rank
                for kind in ("B", "W") if a.kind == "BW" else (a.kind,):
                    done[kind, a.microbatch, a.chunk] += 1
        assert set(done.values()) == {1}
        assert len(done) == 3 * m * pp * vpp
        graph(schedule, pp, vpp, m)


def test_dualpipe_pairs_a_forward_with_a_backward_of_the_other_direction() -> None:
    for order in order_table("dualpipe", 8, 1, 20):
        pairs = [(a, order[i + 1]) for i, a in enumerate(order) if a.paired]
        assert pairs
        for f, b in pairs:
            assert (f.kind, b.kind) == ("F", "BW")
            assert f.microbatch % 2 != b.microbatch % 2


def test_1f1b_holds_min_of_microbatches_and_stages_to_the_end() -> None:
    for pp in (1, 2, 4, 8):
        for m in (1, 3, 8, 50):
            held = [f.counts for f in in_flight("1f1b", pp, 1, m)]
            assert held == [{stage: min(m, pp - stage)} for stage in range(pp)]
            assert [f.counts for f in in_flight("gpipe", pp, 1, m)] == [{stage: m} for stage in range(pp)]


def test_interleaved_holds_what_megatron_warms_up_with_and_one_more() -> None:
    for pp in (2, 4, 8):
        for vpp in (2, 3, 4):
            for m in (pp, 4 * pp):
                for rank, f in enumerate(in_flight("interleaved", pp, vpp, m)):
                    assert sum(f.counts.values()) == min(m * vpp, 2 * (pp - 1 - rank) + (vpp - 1) * pp + 1)


def test_zero_bubble_holds_what_its_paper_says() -> None:
    """H1 as much as 1F1B's first stage, H2 2p - 1 of it, V p of two half-size chunks (Qi et al. 2024, table 1)."""
    for pp in (2, 4, 8):
        m = 4 * pp
        assert {sum(f.counts.values()) for f in in_flight("zb-h1", pp, 1, m)} == {pp}
        assert {sum(f.counts.values()) for f in in_flight("zb-h2", pp, 1, m)} == {2 * pp - 1}
        assert {sum(f.counts.values()) for f in in_flight("zb-v", pp, 2, m)} == {2 * pp}


def test_dualpipe_holds_one_microbatch_more_than_ranks() -> None:
    """DeepSeek-V3, arXiv:2412.19437, table 2: activations of PP + 1 microbatches, for DualPipe and (in chunks) DualPipe-V."""
    for pp in (2, 4, 8):
        assert {sum(f.counts.values()) for f in in_flight("dualpipe", pp, 1, 4 * pp)} == {pp + 1}
        assert {sum(f.counts.values()) for f in in_flight("dualpipe-v", pp, 2, 4 * pp)} == {2 * pp + 1}


@pytest.mark.parametrize(("schedule", "vpp"), SHAPES)
def test_what_is_held_does_not_depend_on_how_long_the_steady_state_lasts(schedule: str, vpp: int) -> None:
    from cost_models.schedules import _in_flight

    for pp in (2, 4):
        m = 24 * pp
        full = [_in_flight(rank, rows) for rank, rows in enumerate(order_rows(schedule, pp, vpp, m))]
        assert list(in_flight(schedule, pp, vpp, m)) == full


def test_the_peak_is_taken_over_moments_not_over_chunks() -> None:
    rank0 = in_flight("interleaved", 2, 2, 4)[0]
    by_hand, alive = 0, Counter[int]()
    for a in order_table("interleaved", 2, 2, 4)[0]:
        alive[a.chunk] += 1 if a.kind == "F" else -1
        by_hand = max(by_hand, 10 * alive[0] + 3 * alive[2])
    assert rank0.peak({0: 10.0, 2: 3.0}) == by_hand


def test_weight_inputs_held_for_later_count_with_their_own_bytes() -> None:
    last = in_flight("zb-h1", 4, 1, 8)[3]
    assert last.peak({3: 1.0}) == 4.0
    assert last.peak({3: 1.0}, {3: 0.5}) == 1.0 + 3 * 0.5


@pytest.mark.parametrize(
    ("arguments", "field", "nearest"),
    [
        (("1f1b", 4, 2, 8), "vpp", 1),
        (("zb-v", 4, 1, 8), "vpp", 2),
        (("dualpipe", 3, 1, 8), "pp", 4),
        (("dualpipe", 4, 1, 6), "microbatches", 8),
        (("dualpipe", 4, 1, 9), "microbatches", 10),
        (("dualpipe-v", 4, 2, 7), "microbatches", 8),
        (("nothing", 1, 1, 1), "schedule", "1f1b"),
        (("1f1b", 1, 1, 0), "microbatches", 1),
    ],
)
def test_a_schedule_that_cannot_run_names_the_nearest_that_can(arguments: Any, field: str, nearest: object) -> None:
    with pytest.raises(InputError) as caught:
        check_schedule(*arguments)
    assert (caught.value.field, caught.value.nearest) == (field, nearest)


def test_an_order_that_waits_for_itself_or_for_nobody_is_reported_as_a_deadlock() -> None:
    remote = np.array([True, False])
    circle = (
        np.array([(0, 0, 0, 0), (3, 0, 0, 0), (0, 1, 0, 0), (3, 1, 0, 0)]),
        np.array([(0, 1, 1, 0), (3, 1, 1, 0), (0, 0, 1, 0), (3, 0, 1, 0)]),
    )
    with pytest.raises(AssertionError, match="deadlocks on rank"):
        build(circle, 2, remote, 0)
    with pytest.raises(AssertionError, match="no rank does"):
        build((np.array([(0, 0, 0, 0), (3, 1, 0, 0)]), np.array([(0, 1, 1, 0)])), 2, remote, 0)


@pytest.mark.parametrize("schedule", sorted({*SCHEDULES, "zb-h2"}))
def test_what_splits_its_backwards_is_what_the_order_has(schedule: str) -> None:
    kinds = {
        action.kind
        for order in order_table(schedule, 4, 2 if schedule in ("interleaved", *V_SHAPED) else 1, 16)
        for action in order
    }
    assert ("B" in kinds) == (schedule in SPLIT_BACKWARD)
    assert ("B" in kinds and "BW" not in kinds) == (schedule in ZERO_BUBBLE)
