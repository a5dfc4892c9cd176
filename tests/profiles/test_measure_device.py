"""Timing real operations in this process: forms, failures that do not stop the profile, interruption; and the pictures."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from profiles.errors import AxisplanError, InputError
from profiles.measure import bench as bench_module
from profiles.measure import fitting, gpu, kernels, plots
from profiles.measure.bench import Bench, Section
from profiles.measure.samples import Sample
from profiles.measure.timing import HostClock
from profiles.measure.together import Alone
from profiles.operations import Attend, GroupedMatmul, Matmul, Pointwise

from .test_measure_fitting import FACTS, link_samples, other_samples, product_samples

CPU = torch.device("cpu")


@pytest.mark.parametrize("form", ["forward", "input_gradient", "weight_gradient"])
def test_every_form_of_a_product_has_its_sides(form: str) -> None:
    result: Any = kernels.build(Matmul(6, 4, 8, "fp32", weight_gradient=form == "weight_gradient"), form, CPU)()
    assert result.shape == (6, 4)


def test_attention_forward_and_backward_have_the_shapes_of_their_operation() -> None:
    op = Attend(2, 4, 2, 16, 16, 8, 8, 136, "fp32")
    out: Any = kernels.build(op, "causal", CPU)()
    assert out.shape == (2, 4, 16, 8)
    gradients: Any = kernels.build(replace(op, backward=True), "causal", CPU)()
    assert [tuple(g.shape) for g in gradients] == [(2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8)]


def test_grouped_products_split_tokens_over_experts() -> None:
    out: Any = kernels.build(GroupedMatmul(64, 32, 16, 4, "bf16"), "", CPU)()
    assert out.shape == (64, 32)


@pytest.mark.parametrize("form", list(kernels.KERNELS))
def test_every_pointwise_form_runs(form: str) -> None:
    kernels.build(Pointwise(1 << 16, kernels.KERNELS[form]), form, CPU)()


def test_a_candidate_without_room_is_recorded_and_the_profile_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "host_memory", lambda: (1e9, 1e6, 0.0))
    records: list[dict[str, Any]] = []
    samples = [Sample(Matmul(512, 512, 512, "fp32")), Sample(Matmul(32, 32, 32, "fp32"))]
    Bench(CPU, Alone()).run([Section("m", 1.0, iter(samples))], budget_seconds=5, candidate_seconds=0.01, report=records.append)
    first, second = (Sample.from_json(r["sample"]) for r in records)
    assert first.failed.startswith("out of memory: needs 0.00 GiB")
    assert second.seconds > 0
    assert not second.failed


def test_a_kernel_the_device_lacks_is_recorded_with_its_reason() -> None:
    done = Bench(CPU, Alone()).time_sample(Sample(Matmul(32, 32, 32, "nvfp4")), 0.01)
    assert done.failed == "no nvfp4 product is timed here"
    assert done.seconds == 0


def test_an_allocation_that_fails_is_out_of_memory() -> None:
    def make() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    assert Bench(CPU, Alone()).time_call(make, 0.01) == (None, "out of memory")


def test_sections_take_turns_by_their_shares_and_get_their_least_after_the_budget() -> None:
    class Stepped(HostClock):
        """Every product takes a second of a clock that only products move."""

        def __init__(self) -> None:
            self.seconds = 0.0
            super().__init__(lambda: self.seconds)

        def run(self, function: Any, calls: int) -> float:
            self.seconds += 1.0
            return 1.0

    def samples() -> Any:
        while True:
            yield Sample(Matmul(8, 8, 8, "fp32"))

    records: list[dict[str, Any]] = []
    bench = Bench(CPU, Alone(), clock=Stepped())
    sections = [Section("a", 0.75, samples()), Section("b", 0.25, samples()), Section("c", 0.01, samples(), least=3)]
    bench.run(sections, budget_seconds=60, candidate_seconds=0.5, report=records.append)
    taken = [r["section"] for r in records]
    assert taken.count("a") == pytest.approx(3 * taken.count("b"), abs=1.5)
    assert taken.count("c") == 3


def test_an_interruption_leaves_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, report: Any, **__: Any) -> None:
        report({"type": "facts", "facts": FACTS})
        for sample in product_samples()[:5]:
            report({"type": "sample", "done": 0.1, "sample": sample.to_json()})
        raise KeyboardInterrupt

    monkeypatch.setattr("profiles.measure.gpu_worker.measure_here", interrupted)
    seen: list[float] = []
    result = gpu.measure_gpu("cpu", progress=lambda done, text: seen.append(done))
    assert (result.interrupted, len(result.samples), result.profile) == (True, 5, None)
    assert seen == [0.1] * 5


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"device": "tpu"}, "device"),
        ({"dtypes": ["fp12"]}, "dtypes"),
        ({"budget_seconds": 0}, "budget_seconds"),
        ({"processes": 0}, "processes"),
    ],
)
def test_what_cannot_be_measured_is_an_input_error(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        gpu.measure_gpu(**arguments)
    assert caught.value.field == field


def test_a_real_measurement_of_two_seconds_gives_a_profile() -> None:
    result = gpu.measure_gpu("cpu", ["fp32"], budget_seconds=2.0, threads=1)
    assert result.profile is not None
    assert 1e9 < result.profile.peak_flops("fp32") < 1e13
    assert 0 < result.profile.launch_seconds < 1e-2
    assert result.profile.usable_bytes > 1e8
    assert "matmul fp32" in result.held_out


def test_pictures_are_written_whole(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    samples = product_samples() + other_samples()
    plots.plot_gpu(fitting.gpu_profile(samples, FACTS), samples, tmp_path / "gpu.png")
    both = link_samples(ranks=2, groups=2) + link_samples(ranks=2, groups=1) + link_samples(ranks=4)
    plots.plot_links(fitting.link(both, FACTS)[0], both, tmp_path / "links.svg")
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "links.svg").read_text()[:1000]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpu.png", "links.svg"]


def test_a_plot_of_another_kind_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InputError, match=r"\.png, \.svg, \.pdf"):
        plots.plot_links(fitting.link(link_samples(), FACTS)[0], link_samples(), tmp_path / "links.txt")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AxisplanError, match=r"axisplan\[plot\]"):
        plots.plot_links(fitting.link(link_samples(), FACTS)[0], link_samples(), tmp_path / "links.png")
