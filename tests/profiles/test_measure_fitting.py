"""Fits of samples that were made from known curves: what went in comes out."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cost_models.compute import price
from cost_models.execution import load_execution
from planner.screen_measured import show_errors, show_links
from profiles.errors import InputError
from profiles.hardware import MatmulCurve
from profiles.measure import fitting, judging, kernels, plan
from profiles.measure.gpu import GpuMeasurement
from profiles.measure.links import LinkMeasurement, contention
from profiles.measure.samples import Sample, load_samples, save_samples
from profiles.measure.timing import Noise
from profiles.operations import Attend, Collective, Pointwise, wire_bytes

FACTS: dict[str, Any] = {
    "device": "cpu", "name": "Test CPU", "host": "there", "date": "2026-01-02", "processes": 4, "threads": 1, "sms": 1,
    "launch_seconds": 2e-5, "memory_reported_bytes": 8e9, "memory_usable_bytes": 7e9, "context_bytes": 2e8,
    "host_memory_bytes": 3e10,
}  # fmt: skip
TRUE = MatmulCurve(
    efficiency=1.0, t0_seconds=2e-6, m0=20, n0=10, k0=30, origin="measured", source="made up", memory_bytes_per_second=4e10
)
RATIO = 1.25


def product_samples(noise: float = 0.0) -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for s in islice(plan.matmuls("fp32", plan.Bounds(64, 4096, 5e9, 1e9), (256, 1024)), 70):
        op = s.operation
        seconds = float(TRUE.seconds(5e10, op.m, op.n, op.k, item=4, out=4)) * (RATIO if op.weight_gradient else 1.0)
        samples.append(replace(s, seconds=seconds * float(np.exp(noise * rng.standard_normal()))))
    return samples


def other_samples() -> list[Sample]:
    rates = {"add": 4e10, "swiglu": 2e10, "norm": 5e9}
    samples = [
        Sample(Pointwise(size, 1), seconds=2e-5 + size / rate, form=form)
        for form, rate in rates.items()
        for size in (1 << 21, 1 << 23, 1 << 25)
    ]
    samples += [
        replace(s, operation=Pointwise(1 << 24, 1), seconds=2e-5 + (1 << 24) / rates[s.form], held_out=True) for s in samples[::3]
    ]
    for s in islice(plan.attentions("fp32", plan.Bounds(64, 4096, 5e9, 1e9), head_dims=(64,), longest=4096), 20):
        op = s.operation
        forward = 1e-5 + op.flops / (2.5 if op.backward else 1.0) / 2.5e10 * (1 + 200 / (op.q_len + 1))
        samples.append(replace(s, seconds=forward * (2.2 if op.backward else 1.0)))
    return samples


def test_a_known_curve_is_found_again_with_its_weight_gradient_ratio() -> None:
    profile = fitting.gpu_profile(product_samples() + other_samples(), FACTS)
    errors = judging.held_out_errors(profile, product_samples(), FACTS)
    assert errors["matmul fp32"].median < 0.02
    assert errors["matmul fp32"].count > 10
    assert profile.facts.weight_gradient_ratio.value == pytest.approx(RATIO, rel=0.05)
    assert profile.matmul["fp32"].origin == "measured"
    assert "there" in profile.matmul["fp32"].source


def test_noise_of_ten_percent_leaves_the_fit_well_within_it() -> None:
    profile = fitting.gpu_profile(product_samples(0.1) + other_samples(), FACTS)
    assert judging.held_out_errors(profile, product_samples(), FACTS)["matmul fp32"].median < 0.08


def test_a_cpu_process_is_named_so_that_its_launches_count() -> None:
    assert fitting.gpu_profile(product_samples() + other_samples(), FACTS).name == "cpu-there"


def test_a_gpu_is_named_as_built_in_ones_are() -> None:
    assert fitting.gpu_name("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"


def test_pointwise_work_runs_at_the_rate_of_a_layers_mix() -> None:
    profile = fitting.gpu_profile(product_samples() + other_samples(), FACTS)
    mix = plan.LAYER_MIX
    expected = sum(mix.values()) / (mix["add"] / 4e10 + mix["swiglu"] / 2e10 + mix["norm"] / 5e9)
    assert profile.memory_bytes_per_second == pytest.approx(expected, rel=0.01)


def by_size(moved: float) -> float:
    """Bytes/s of a machine whose cache is left between 8 and 32 MiB."""
    return 2e10 if moved <= 8 << 20 else 2e10 * (moved / (8 << 20)) ** -0.8 if moved <= 32 << 20 else 2e10 * 4**-0.8


def traffic_samples() -> list[Sample]:
    """Of every form the same rate by size; kernels of one form move what it moves in all divided by their number."""
    made = plan.pointwises(
        plan.Bounds(64, 4096, 5e9, 1e9), forms=dict(kernels.KERNELS), sizes=(8 << 20, 32 << 20, 2 << 20), judges=(12 << 20, 24 << 20, 3 << 20)
    )  # fmt: skip
    return [
        replace(s, seconds=2e-5 * s.operation.kernels + s.operation.bytes / by_size(s.operation.bytes / s.operation.kernels))
        for s in made
    ]


def test_a_rate_that_falls_beyond_the_cache_is_kept_by_what_a_kernel_moves() -> None:
    others = [s for s in other_samples() if not isinstance(s.operation, Pointwise)]
    samples = product_samples() + traffic_samples() + others
    profile = fitting.gpu_profile(samples, FACTS)
    assert profile.traffic is not None
    assert profile.traffic.rates == {size: pytest.approx(by_size(size), rel=1e-3) for size in (2 << 20, 8 << 20, 32 << 20)}
    for moved, count in ((1 << 10, 1), (3 << 20, 1), (5 << 20, 2), (12 << 20, 3), (24 << 20, 1), (1 << 30, 1)):
        op = Pointwise(moved * count, count)
        assert profile.seconds(op) == pytest.approx(2e-5 * count + moved * count / by_size(moved), rel=1e-3), moved
        assert price(profile, load_execution("axisplan"), [replace(op, name="loss")]).pointwise == pytest.approx(
            profile.seconds(op)
        )
    judged = judging.held_out_errors(profile, samples, FACTS)["memory traffic"]
    assert (judged.count, judged.p90) == (3, pytest.approx(0, abs=0.01))
    many = np.array([1e6, 2e7, 4e8])
    assert profile.seconds(Pointwise(many, 1)) == pytest.approx([profile.seconds(Pointwise(float(one), 1)) for one in many])


def test_more_bytes_never_take_less_time_however_noisy_the_samples_are() -> None:
    slow = [
        replace(s, seconds=20 * s.seconds) if s.operation.bytes / s.operation.kernels < 4 << 20 else s for s in traffic_samples()
    ]
    profile = fitting.gpu_profile(product_samples() + slow, FACTS)
    times = [profile.seconds(Pointwise(float(size), 0)) for size in np.geomspace(1 << 20, 1 << 26, 50)]
    assert all(later >= 0.999 * first for first, later in pairwise(times))  # rates are kept with four digits


def test_a_calibrated_memory_rate_moves_the_rates_by_size_with_it() -> None:
    profile = fitting.gpu_profile(product_samples() + traffic_samples(), FACTS)
    faster = profile.faster(memory_achieved_bytes_per_second=2 * profile.memory_bytes_per_second)
    assert faster.seconds(Pointwise(1 << 24, 0)) == pytest.approx(profile.seconds(Pointwise(1 << 24, 0)) / 2)


def test_attention_is_priced_as_it_was_measured_both_ways() -> None:
    samples = other_samples()
    profile = fitting.gpu_profile(product_samples() + samples, FACTS)
    for s in samples:
        if isinstance(s.operation, Attend):
            assert float(profile.seconds(s.operation)) == pytest.approx(s.seconds, rel=0.1)


def test_too_little_attention_is_an_estimate_that_says_so() -> None:
    profile = fitting.gpu_profile(product_samples() + other_samples()[:9], FACTS)
    assert profile.attention.origin == "estimate"
    assert "too little" in profile.attention.source


def test_too_few_products_are_no_profile() -> None:
    with pytest.raises(fitting.TooFew, match="matrix products"):
        fitting.gpu_profile(product_samples()[:6] + other_samples(), FACTS)


def test_failed_candidates_are_left_out() -> None:
    samples = product_samples()
    failed = [replace(s, seconds=0.0, failed="out of memory") for s in samples[:5]]
    profile = fitting.gpu_profile(failed + samples[5:] + other_samples(), FACTS)
    assert judging.held_out_errors(profile, samples, FACTS)["matmul fp32"].median < 0.02


def link_samples(kind: str = "all_reduce", ranks: int = 4, groups: int = 1, slower: float = 1.0) -> list[Sample]:
    sizes = [1 << p for p in range(10, 26, 2)]
    return [
        Sample(
            Collective(kind, "axis", size),
            seconds=slower * (2e-4 + float(wire_bytes(kind, size, ranks)) / 1.5e9),
            ranks=ranks,
            groups=groups,
        )
        for size in sizes
    ]


def test_a_link_is_found_again() -> None:
    link, errors = fitting.link(link_samples(), {**FACTS, "backend": "gloo"})
    (row,) = link.curves["all_reduce"]
    assert (row.ranks, row.origin) == (4, "measured")
    assert row.alpha_seconds == pytest.approx(2e-4, rel=0.02)
    assert row.bytes_per_second == pytest.approx(1.5e9, rel=0.02)
    assert errors["all_reduce over 4"].median < 0.01
    assert float(link.seconds("all_reduce", 1 << 27, 4)) == pytest.approx(2e-4 + 1.5 * (1 << 27) / 1.5e9, rel=0.02)


def test_with_groups_at_once_measured_they_make_the_curve() -> None:
    samples = link_samples(ranks=2, groups=1) + link_samples(ranks=2, groups=2, slower=3.0)
    link, _ = fitting.link(samples, FACTS)
    assert link.curves["all_reduce"][0].alpha_seconds == pytest.approx(6e-4, rel=0.05)


def test_a_link_is_never_said_to_be_much_faster_than_it_was_seen() -> None:
    samples = [replace(s, seconds=2e-4 + 1e-6 * float(np.sqrt(s.operation.bytes))) for s in link_samples("all_gather", 2)]
    (row,) = fitting.link(samples, FACTS)[0].curves["all_gather"]
    fastest = max(s.operation.bytes / 2 / s.seconds for s in samples)
    assert row.bytes_per_second <= 2 * fastest * 1.001
    assert row.sqrt_seconds == 0


def test_three_sizes_are_no_link() -> None:
    with pytest.raises(fitting.TooFew, match="message sizes"):
        fitting.link(link_samples()[:3], FACTS)


def test_samples_are_read_back_as_written(tmp_path: Path) -> None:
    samples = product_samples()[:3] + other_samples() + link_samples()
    save_samples(tmp_path / "s.json", samples, host="here")
    assert load_samples(tmp_path / "s.json") == (samples, {"host": "here"})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"samples": [{"op": "Matmul"}]}', '{"samples": [{"op": "os.system"}]}'])
def test_another_file_is_not_taken_for_samples(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(InputError, match="samples"):
        load_samples(tmp_path / "s.json")


def test_every_kind_of_operation_is_judged_on_what_it_was_not_fitted_to() -> None:
    samples = product_samples() + other_samples()
    profile = fitting.gpu_profile(samples, FACTS)
    judged = judging.held_out_errors(profile, samples, {**FACTS, "launch_judge_seconds": 1.6e-5})
    assert set(judged) == {"matmul fp32", "attention forward fp32", "attention backward fp32", "memory traffic", "launch"}
    assert judged["attention forward fp32"].median < 0.1
    assert judged["attention backward fp32"].median < 0.1
    assert judged["memory traffic"].median == pytest.approx(0.0, abs=0.1)
    assert judged["launch"].median == pytest.approx(0.25)
    slower = [replace(s, seconds=2 * s.seconds) if s.held_out else s for s in samples]
    assert judging.held_out_errors(profile, slower, FACTS)["memory traffic"].ratio == pytest.approx(0.5, abs=0.05)
    assert judging.held_out_errors(profile, slower, FACTS)["attention forward fp32"].ratio == pytest.approx(0.5, abs=0.05)


def test_what_is_held_out_changes_no_curve() -> None:
    samples = product_samples() + other_samples()
    spoiled = [replace(s, seconds=100 * s.seconds) if s.held_out else s for s in samples]
    assert fitting.gpu_profile(spoiled, FACTS) == fitting.gpu_profile(samples, FACTS)


def test_repeats_spread_by_kind_of_operation() -> None:
    timed = [replace(s, low=0.9 * s.seconds, high=1.1 * s.seconds) for s in product_samples()]
    quiet = [replace(s, low=s.seconds, high=s.seconds) for s in link_samples()]
    failed = replace(timed[0], failed="out of memory")
    assert judging.spreads([*timed, *quiet, failed]) == {"all_reduce over 4": 0.0, "matmul fp32": pytest.approx(0.2)}


def shown(show: Any, measured: Any) -> str:
    out = Console(file=io.StringIO(), width=160)
    show(out, measured)
    return " ".join(out.file.getvalue().split())  # type: ignore[attr-defined]


def test_the_screen_says_how_well_each_kind_fits_what_failed_and_which_was_noisy() -> None:
    samples = [replace(s, low=0.8 * s.seconds, high=1.2 * s.seconds) for s in product_samples()] + other_samples()
    profile = fitting.gpu_profile(samples, FACTS)
    failed = [replace(samples[0], seconds=0.0, failed="out of memory")]
    measured = GpuMeasurement(samples + failed, FACTS, profile, held_out=judging.held_out_errors(profile, samples, FACTS))
    text = shown(show_errors, measured)
    assert re.search(r"matmul fp32 0\.\d % \d\.\d % \d+ 40\.0 % noisy", text)
    assert "memory traffic" in text
    assert "attention backward fp32" in text
    assert "not measured" in text
    assert "out of memory" in text
    assert "quiet machine" in text
    assert "NOISY machine" in shown(show_errors, replace(measured, noise=Noise(0.4)))


def test_the_screen_of_links_has_a_row_for_each_curve() -> None:
    samples = link_samples()
    link, errors = fitting.link(samples, FACTS)
    text = shown(show_links, LinkMeasurement(samples, FACTS, link, {"tp": 1.5}, held_out=errors))
    assert "all-reduce over 4 200 us 1.50 GB/s" in text
    assert "all-reduce over 4 0.0 % 0.0 % 8" in text
    assert "tp x 1.50" in text


def test_contention_is_all_groups_at_once_over_one_alone() -> None:
    samples = link_samples(ranks=2, groups=1) + link_samples(ranks=2, groups=2, slower=3.0)
    assert contention(samples) == {"axis": pytest.approx(3.0)}


def test_contention_of_two_axes_is_both_at_once_over_the_longer_of_them() -> None:
    tp = [replace(s, operation=replace(s.operation, axis="tp")) for s in link_samples(ranks=2, groups=2)]
    dp = [replace(s, operation=replace(s.operation, axis="dp"), seconds=2 * s.seconds) for s in tp]
    both = [replace(s, beside="dp", seconds=5 * s.seconds) for s in tp]
    assert contention([*tp, *dp, *both]) == {"tp and dp": pytest.approx(2.5)}
    assert fitting.by_curve([*tp, *both]) == fitting.by_curve(tp)
    assert judging.kind_of(both[0]) == "all_reduce over 2, tp and dp at once"
