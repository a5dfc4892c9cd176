"""Goodput: Young and Daly intervals, spare nodes."""

from __future__ import annotations

import math
import random

import pytest

from planner.goodput import at_most, daly_interval, goodput, useful_fraction, young_interval
from profiles.errors import InputError


def test_dalys_interval_is_a_hair_from_the_minimum_of_his_model_wherever_saves_are_short():
    """The interval is an expansion; the wall time at it is within 0.2 % of the numerical minimum (Daly 2006, section 5)."""
    draw = random.Random(3)
    for _ in range(50):
        mtbf = 10 ** draw.uniform(3, 6)
        save = mtbf * 10 ** draw.uniform(-5, -0.5)
        best = max(useful_fraction(save * 10 ** (i / 200), save, 60.0, mtbf) for i in range(-200, 1200))
        assert useful_fraction(daly_interval(save, mtbf), save, 60.0, mtbf) >= best * (1 - 0.002)


def test_young_is_the_first_term_and_long_saves_fall_back_to_the_mean_time_between_failures():
    assert young_interval(300.0, 86_400.0) == pytest.approx(7200.0)
    assert daly_interval(300.0, 86_400.0) == pytest.approx(7200 * (1 + math.sqrt(300 / 172_800) / 3 + 300 / 172_800 / 9) - 300)
    assert daly_interval(300.0, 100.0) == 100.0


def test_the_model_is_what_a_simulated_run_does():
    """Exponential failures played out: saves of 30 s, restarts of 120 s, an interruption an hour."""
    draw, mtbf, save, restart = random.Random(1), 3600.0, 30.0, 120.0
    interval = daly_interval(save, mtbf)
    done = wall = 0.0
    while done < 4000 * interval:
        fails = draw.expovariate(1 / mtbf)
        if fails >= interval + save:
            wall, done = wall + interval + save, done + interval
            continue
        wall += fails
        while (again := draw.expovariate(1 / mtbf)) < restart:
            wall += again
        wall += restart
    assert done / wall == pytest.approx(useful_fraction(interval, save, restart, mtbf), rel=0.01)


def test_419_interruptions_in_54_days_on_2048_nodes_are_one_in_three_hours():
    """Llama 3 (arXiv:2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 GPUs; over 90 % useful."""
    node_hours = 54 * 24 * 2048 / 419
    found = goodput(2048, node_hours, checkpoint_seconds=15, restart_seconds=420, step_seconds=6.0)
    assert found.job_mtbf_hours == pytest.approx(3.09, abs=0.01)
    assert found.useful_fraction > 0.9
    assert found.interval_seconds == found.interval_steps * 6.0


def test_spare_nodes_are_those_that_train_most_for_what_is_paid():
    best = goodput(64, 2000.0, 30, 300)
    for spare in range(12):
        assert goodput(64, 2000.0, 30, 300, spare=spare).overall <= best.overall + 1e-15
    assert goodput(64, 200.0, 30, 300).spare_nodes > best.spare_nodes
    assert at_most(0, 0.5) == pytest.approx(math.exp(-0.5))
    assert at_most(200, 0.5) == pytest.approx(1.0)


def test_figures_that_cannot_be_are_refused_by_name():
    for arguments, field in (
        ((4, 0.0, 1, 1), "--mtbf"),
        ((4, 1.0, -1, 1), "--checkpoint-seconds"),
        ((4, 1.0, 1, -1), "--restart-seconds"),
    ):
        with pytest.raises(InputError) as refused:
            goodput(*arguments)
        assert refused.value.field == field
