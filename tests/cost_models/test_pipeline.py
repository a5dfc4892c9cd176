"""The simulator against closed forms, brute force, its own full run, and measured schedules."""

from __future__ import annotations

import csv
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cost_models.pipeline as pipeline
from cost_models.pipeline import makespans, seed_paths, simulate
from cost_models.schedules import order_table, rank_of

DATA = Path(__file__).parents[1] / "data"


def longest_path(schedule: str, pp: int, vpp: int, m: int, f: Any, b: Any, w: Any, p2p: float) -> float:
    """The same by relaxing every dependency until nothing moves: slow, and written without looking at the simulator."""
    table = order_table(schedule, pp, vpp, m)
    ended: dict[tuple[str, int, int], float] = {}
    seconds = {"F": f, "B": b, "W": w, "BW": [x + y for x, y in zip(b, w, strict=True)]}
    changed = True
    while changed:
        changed = False
        for rank, order in enumerate(table):
            clock, skip = 0.0, False
            for i, a in enumerate(order):
                if skip:
                    skip = False
                    continue
                parts = [a, order[i + 1]] if a.paired else [a]
                skip = a.paired
                start = clock
                for part in parts:
                    before = {"F": ("F", -1), "B": ("B", 1), "BW": ("B", 1)}.get(part.kind)
                    if before and 0 <= part.chunk + before[1] < pp * vpp:
                        other = part.chunk + before[1]
                        lag = 0.0 if rank_of(schedule, pp, other, part.microbatch) == rank else p2p
                        start = max(start, ended.get((before[0], part.microbatch, other), 0.0) + lag)
                clock = start + sum(seconds[part.kind][part.chunk] for part in parts)
                for part in parts:
                    key = ("B" if part.kind == "BW" else part.kind, part.microbatch, part.chunk)
                    if ended.get(key) != clock:
                        ended[key], changed = clock, True
    return max(ended.values())


CASES = st.tuples(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v"]),
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 40), st.integers(0, 2**32 - 1),
)  # fmt: skip


def problem(case: tuple[str, int, int, int, int], longer: int = 1) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of simulate for a random, legal, uneven case."""
    schedule, pp, vpp, m, seed = case
    rng = random.Random(seed)
    pp += pp % 2 if schedule == "dualpipe" else 0
    vpp = {"interleaved": vpp, "zb-v": 2, "dualpipe-v": 2, "zb-h1": 1 + vpp % 2}.get(schedule, 1)
    m *= longer
    if schedule.startswith("dual"):
        m = 2 * pp + 2 * m
    chunks, floor = pp * vpp, rng.choice([0.0, 1.0])
    durations = [[floor + rng.choice([rng.random(), rng.randint(1, 3) / 4]) for _ in range(chunks)] for _ in range(3)]
    p2p = rng.choice([0.0, 0.1, [rng.random() for _ in range(chunks)]])
    extra = {"starts": [rng.random() for _ in range(pp)], "ends": [rng.random() for _ in range(pp)]}
    extra |= {"hidden_forward": rng.choice([0.0, 0.05]), "hidden_backward": [0.1 * rng.random() for _ in range(chunks)]}
    return (schedule, pp, vpp, m, *durations, p2p), extra


@settings(max_examples=60, deadline=None, derandomize=True)
@given(CASES)
def test_the_makespan_equals_that_of_repeated_relaxation(case: Any) -> None:
    (schedule, pp, vpp, m, f, b, w, _), _ = problem(case)
    expected = longest_path(schedule, pp, vpp, m, f, b, w, 0.25)
    assert simulate(schedule, pp, vpp, m, f, b, w, 0.25).seconds == pytest.approx(expected, rel=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(CASES, st.booleans())
def test_makespans_of_many_durations_at_once_are_those_one_by_one(case: Any, blocking: bool) -> None:
    (schedule, pp, vpp, m, *_, p2p), extra = problem(case)
    ends: dict[str, Any] = {name: extra[name] for name in ("starts", "ends")}
    f, b, w = np.random.default_rng(case[-1]).random((3, 4, pp * vpp))
    found = makespans(schedule, pp, vpp, m, f, b, w, p2p, blocking=blocking, **ends)
    one_by_one = [
        simulate(schedule, pp, vpp, m, *some, p2p, blocking=blocking, **ends).seconds for some in zip(f, b, w, strict=True)
    ]
    assert found == pytest.approx(one_by_one, rel=1e-12)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(CASES, st.booleans())
def test_the_extrapolated_steady_state_equals_the_full_simulation(case: Any, blocking: bool) -> None:
    arguments, extra = problem(case, longer=6)
    limit = pipeline.FULL_ACTIONS
    try:
        pipeline.FULL_ACTIONS = 60
        pipeline._shorter.cache_clear()
        short = simulate(*arguments, blocking=blocking, **extra)
        path = short.path
        pipeline.FULL_ACTIONS = 10**9
        pipeline._shorter.cache_clear()
        full = simulate(*arguments, blocking=blocking, **extra)
    finally:
        pipeline.FULL_ACTIONS = limit
        pipeline._shorter.cache_clear()
    assert short.seconds == pytest.approx(full.seconds, rel=1e-10)
    assert short.finish == pytest.approx(full.finish, rel=1e-10)
    assert short.busy == pytest.approx(full.busy, rel=1e-10)
    assert path.seconds(*arguments[4:], **extra) == pytest.approx(full.seconds, rel=1e-10)


def test_long_runs_really_are_extrapolated() -> None:
    for schedule, vpp in [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe", 1), ("dualpipe-v", 2)]:
        line = simulate(schedule, 4, vpp, 1024, [1.0] * 4 * vpp, [1.0] * 4 * vpp, [0.7] * 4 * vpp, 0.1)
        assert line._skipped > 0
        assert len(line._times) < 4000


@settings(max_examples=150, deadline=None, derandomize=True)
@given(CASES, st.integers(0, 2**32 - 1), st.booleans())
def test_a_critical_path_is_tight_where_found_and_a_lower_bound_everywhere(case: Any, other: int, blocking: bool) -> None:
    here, extra = problem(case)
    there, extra_there = problem((*case[:4], other))
    path = simulate(*here, blocking=blocking, **extra).path
    assert path.seconds(*here[4:], **extra) == pytest.approx(simulate(*here, blocking=blocking, **extra).seconds, rel=1e-12)
    assert path.seconds(*there[4:], **extra_there) <= simulate(*there, blocking=blocking, **extra_there).seconds * (1 + 1e-12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(CASES, st.booleans(), st.sampled_from([1, 8]))
def test_seed_paths_bound_the_makespan_from_below(case: Any, blocking: bool, longer: int) -> None:
    arguments, extra = problem(case, longer)
    seconds = simulate(*arguments, blocking=blocking, **extra).seconds
    bounds = [p.seconds(*arguments[4:], **extra) for p in seed_paths(*arguments[:4], blocking)]
    assert max(bounds) <= seconds * (1 + 1e-12)
    assert max(bounds) >= 0.5 * seconds


@pytest.mark.parametrize("pp", [1, 2, 4, 8, 16])
def test_balanced_seed_paths_are_exact_for_1f1b_and_gpipe(pp: int) -> None:
    for schedule in ("gpipe", "1f1b"):
        arguments = (schedule, pp, 1, 3 * pp + 1, [1.0] * pp, [1.3] * pp, [0.9] * pp)
        assert max(p.seconds(*arguments[4:]) for p in seed_paths(*arguments[:4])) == pytest.approx(simulate(*arguments).seconds)


# -- closed forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_the_bubble_of_1f1b_is_p_minus_1_over_m_of_the_ideal(pp: int, rounds: int) -> None:
    m, f, b = pp * rounds, 1.0, 2.0
    ideal = m * (f + b)
    for schedule in ("1f1b", "gpipe"):
        line = simulate(schedule, pp, 1, m, [f] * pp, [b / 2] * pp, [b / 2] * pp)
        assert (line.seconds - ideal) / ideal == pytest.approx((pp - 1) / m)
        assert line.bubble_fraction == pytest.approx((pp - 1) / (m + pp - 1))


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("vpp", [2, 3, 6])
def test_interleaving_divides_the_bubble_by_the_chunks_of_a_rank(pp: int, vpp: int) -> None:
    m, chunks = 4 * pp, pp * vpp
    line = simulate("interleaved", pp, vpp, m, [1.0 / vpp] * chunks, [1.0 / vpp] * chunks, [1.0 / vpp] * chunks)
    assert (line.seconds - 3 * m) / (3 * m) == pytest.approx((pp - 1) / (vpp * m))


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zero_bubble_closed_forms(pp: int) -> None:
    """Qi et al. 2024, table 1: idle (p - 1)(F + B - W) under H1, (p - 1)(F + B - 2W) of each rank's own time under H2, and for
    V with F = B = W nothing but the way down to the middle and back. H2's ranks end as far apart as they began."""
    m, f, b, w = 4 * pp, 1.0, 1.1, 0.8
    h1 = simulate("zb-h1", pp, 1, m, [f] * pp, [b] * pp, [w] * pp)
    assert h1.seconds - m * (f + b + w) == pytest.approx((pp - 1) * (f + b - w))
    h2 = simulate("zb-h2", pp, 1, m, [f] * pp, [f] * pp, [f] * pp)
    assert h2.unsynchronised_seconds == pytest.approx(3 * m * f)
    assert h2.seconds == pytest.approx(3 * m * f + (pp - 1) * f)
    v = simulate("zb-v", pp, 2, m, [1.0] * 2 * pp, [1.0] * 2 * pp, [1.0] * 2 * pp)
    assert v.unsynchronised_seconds == pytest.approx(6 * m)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_dualpipe_closed_forms(pp: int) -> None:
    """DeepSeek-V3, arXiv:2412.19437, table 2: idle (PP/2 - 1)(F&B + B - 3W), with B the whole backward; twice the ranks of a
    half-length V: (PP - 1)(F&B + B - 3W) for DualPipe-V."""
    m, f, b, w, hidden = 4 * pp, 1.0, 1.0, 0.9, 0.3
    both = f + b + w - hidden
    line = simulate("dualpipe", pp, 1, m, [f] * pp, [b] * pp, [w] * pp, hidden_forward=hidden)
    busy = sum(line.busy) / pp
    assert line.seconds - busy == pytest.approx((pp / 2 - 1) * (both + b + w - 3 * w), abs=0.35 * pp)
    even = simulate("dualpipe", pp, 1, m, [f] * pp, [f] * pp, [f] * pp)
    assert even.seconds - 3 * m * f == pytest.approx((pp / 2 - 1) * (3 * f + 2 * f - 3 * f))
    folded = simulate("dualpipe-v", pp, 2, m, [f] * 2 * pp, [f] * 2 * pp, [f] * 2 * pp)
    assert folded.seconds - 6 * m * f == pytest.approx((pp - 1) * (3 * f + 2 * f - 3 * f))


def test_transfers_hide_or_add_by_mechanism() -> None:
    """With one microbatch everything is a chain: 2 (p - 1) transfers either way. In the steady state of 1F1B an overlapped
    transfer is hidden behind nothing on the last rank; a blocking one costs a middle rank two of them a microbatch."""
    pp, t = 4, 0.25
    once = simulate("1f1b", pp, 1, 1, [1.0] * pp, [1.0] * pp, [1.0] * pp, t)
    assert once.seconds == pytest.approx(3 * pp + 2 * (pp - 1) * t)
    assert simulate("1f1b", pp, 1, 1, [1.0] * pp, [1.0] * pp, [1.0] * pp, t, blocking=True).seconds == pytest.approx(once.seconds)
    long, longer = (simulate("1f1b", pp, 1, m, [1.0] * pp, [1.0] * pp, [1.0] * pp, t, blocking=True).seconds for m in (64, 65))
    assert longer - long == pytest.approx(3 + 2 * t)


def test_a_chunk_that_stays_on_its_rank_is_not_sent() -> None:
    assert simulate("zb-v", 1, 2, 4, [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], 5.0).seconds == pytest.approx(24.0)
    one = simulate("zb-v", 2, 2, 1, [1.0] * 4, [1.0] * 4, [0.0] * 4, 1.0)
    assert one.seconds == pytest.approx(8 + 2 * 2)


def test_ends_count_on_the_rank_that_has_them() -> None:
    late = simulate("1f1b", 2, 1, 4, [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], ends=[0.0, 10.0])
    none = simulate("1f1b", 2, 1, 4, [1.0, 1.0], [1.0, 1.0], [1.0, 1.0])
    assert late.seconds == none.finish[1] + 10.0
    assert late.path.last == 1
    assert none.finish[1] < none.finish[0] == none.seconds


def test_intervals_tile_each_rank_without_overlap_and_sum_to_busy() -> None:
    for schedule, vpp in [("1f1b", 1), ("interleaved", 2), ("dualpipe-v", 2)]:
        line = simulate(schedule, 4, vpp, 16, [1.0] * 4 * vpp, [0.6] * 4 * vpp, [0.5] * 4 * vpp, 0.1, hidden_forward=0.2)
        for rank in range(4):
            mine = [i for i in line.intervals if i.rank == rank]
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(mine))
            assert sum(i.end - i.start for i in mine) == pytest.approx(line.busy[rank])


def test_an_uneven_stage_sets_the_pace() -> None:
    f = [1.0, 1.0, 1.5, 1.0]
    grow = [simulate("1f1b", 4, 1, m, f, f, f).seconds for m in (100, 101)]
    assert grow[1] - grow[0] == pytest.approx(4.5)


# -- measured schedules -----------------------------------------------------------------------------------------------------


def zero_bubble_rows() -> list[tuple[str, float, float]]:
    """(id, measured seconds, simulated from the printed stage times) of the rows whose model has printed stage times."""
    with (DATA / "zb_stage_times.csv").open() as file:
        stages = {(r["model"], int(r["microbatches"]), int(r["micro_batch"])): r for r in csv.DictReader(file)}
    out = []
    with (DATA / "runs.csv").open() as file:
        for row in csv.DictReader(file):
            if not row["id"].startswith("zb-table4"):
                continue
            m = int(row["global_batch"]) // int(row["micro_batch"])
            printed = stages[row["id"].split("-")[2], m, int(row["micro_batch"])]
            pp, vpp = int(row["pp"]), int(row["vp"])
            f, b, w, p2p = (float(printed[k]) / 1e3 for k in ("T_F_ms", "T_B_ms", "T_W_ms", "T_comm_ms"))
            kind = row["id"].split("-p8")[0].split("1.5B-")[1]
            schedule = {"ZB-2p": "zb-h2", "ZB-1p": "zb-h1", "1F1B": "1f1b", "1F1B-I": "interleaved"}[kind]
            chunks = pp * vpp
            line = simulate(schedule, pp, vpp, m, *([x / vpp] * chunks for x in (f, b, w)), p2p, blocking=schedule == "1f1b")
            seconds = line.unsynchronised_seconds if schedule.startswith("zb") else line.seconds
            out.append((row["id"], float(row["derived_step_s"]), seconds))
    return out


def test_measured_schedules_follow_from_their_printed_stage_times_within_12_percent() -> None:
    rows = zero_bubble_rows()
    assert len(rows) == 12
    for name, measured, simulated in rows:
        assert abs(simulated / measured - 1) <= 0.12, (name, measured, simulated)
    assert np.mean([abs(s / m - 1) for _, m, s in rows]) <= 0.08
