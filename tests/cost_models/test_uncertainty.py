"""Intervals follow from origins, common errors are shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.step import estimate
from cost_models.uncertainty import EIGHTY, OWN_ERROR, cause_errors, chance_faster, flipping_cause, relative_error
from profiles.hardware import load_cluster
from profiles.huggingface import load_model

JOB = Job(load_model("llama-3.1-8b"), load_cluster("h100-sxm:1x8"), load_execution("megatron"), 8192, 128)


def test_a_gpu_with_estimated_curves_has_a_wider_interval_than_a_measured_one() -> None:
    layout = Layout.parse("dp=8", 8)
    measured = estimate(JOB, layout)
    guessed = estimate(replace(JOB, cluster=load_cluster("mi300x:1x8")), layout)
    width = [e.step_seconds_high / e.step_seconds_low for e in (measured, guessed)]
    assert width[1] > width[0] > 1.05
    assert any("mi300x" in text.lower() for text in guessed.guessed)


def test_a_fitted_curve_is_as_sure_as_it_was_on_what_it_had_not_seen() -> None:
    gpu = JOB.cluster.gpu
    curve = gpu.matmul["bf16"]
    assert curve.origin == "fitted"
    assert cause_errors(JOB)["matmul"] == pytest.approx((curve.heldout_error**2 + 0.015**2) ** 0.5)
    unknown = replace(gpu, matmul={**gpu.matmul, "bf16": replace(curve, heldout_error=None)})
    assert cause_errors(replace(JOB, cluster=replace(JOB.cluster, gpu=unknown)))["matmul"] == pytest.approx(
        (0.06**2 + 0.015**2) ** 0.5
    )


def test_the_interval_is_symmetric_in_ratio() -> None:
    found = estimate(JOB, Layout.parse("tp=2,dp=4", 8))
    assert found.step_seconds / found.step_seconds_low == pytest.approx(found.step_seconds_high / found.step_seconds)
    assert pytest.approx(1.2816, abs=1e-4) == EIGHTY


def test_an_error_is_at_least_the_noise_of_runs_and_at_most_its_worst_cause() -> None:
    errors = cause_errors(JOB)
    assert relative_error(JOB, {}) == OWN_ERROR
    for cause, error in errors.items():
        assert relative_error(JOB, {cause: 1.0}) == pytest.approx((error**2 + OWN_ERROR**2) ** 0.5)


def test_the_chance_to_be_faster_is_half_for_equals_and_falls_with_distance() -> None:
    one = {"matmul": 0.8, "communication.tp": 0.2}
    assert chance_faster(JOB, one, dict(one)) == pytest.approx(0.5)
    chances = [chance_faster(JOB, one, {"matmul": 0.8 * f, "communication.tp": 0.2 * f}) for f in (1.0, 1.02, 1.05, 1.2)]
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] < 0.02


def test_shared_errors_do_not_blur_the_order_of_two_layouts_of_one_job() -> None:
    alike = chance_faster(JOB, {"matmul": 1.0}, {"matmul": 1.05})
    unlike = chance_faster(JOB, {"matmul": 0.6, "communication.tp": 0.4}, {"matmul": 1.05})
    assert alike < unlike


def test_the_flipping_cause_is_the_one_nearest_to_its_own_error() -> None:
    first, second = {"matmul": 0.9, "communication.tp": 0.1}, {"matmul": 0.9, "communication.tp": 0.02, "bubble": 0.1}
    found = flipping_cause(JOB, first, second)
    assert found is not None
    cause, change = found
    assert cause == "bubble" or cause == "communication.tp"
    changed = [dict(s) for s in (first, second)]
    for s in changed:
        s[cause] = s.get(cause, 0.0) * (1 + change)
    assert sum(changed[0].values()) == pytest.approx(sum(changed[1].values()))
    assert flipping_cause(JOB, {"matmul": 1.0}, {"matmul": 1.0}) is None


def test_a_difference_of_rounding_flips_nothing() -> None:
    found = flipping_cause(JOB, {"matmul": 1.0, "bubble": 2e-15}, {"matmul": 1.2, "bubble": 0.0})
    assert found is not None and found[0] == "matmul"


def test_a_cause_that_would_have_to_be_many_times_as_long_flips_nothing() -> None:
    """The first step's bubble of 1 ms would have to be 300 ms."""
    assert flipping_cause(JOB, {"matmul": 1.0, "attention": 0.3, "bubble": 0.001}, {"matmul": 1.2, "attention": 0.4}) is None
