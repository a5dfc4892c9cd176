"""Fits: constants recovered from synthetic samples, held-out errors on small samples of the published tables."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiles.errors import InputError
from profiles.fit import (
    AttentionSample,
    CollectiveSample,
    ExpertSample,
    MatmulSample,
    fit_attention,
    fit_collective,
    fit_experts,
    fit_matmul,
    nondecreasing,
    protocol_switch,
)
from profiles.hardware import MatmulCurve, load_gpu, load_link
from profiles.operations import wire_bytes
from tests.scripts import script

SAMPLES = Path(__file__).parent.parent / "data" / "hardware"
ROOT = Path(__file__).parent.parent.parent


def noise(count: int, level: float = 0.01) -> np.ndarray:
    return 1 + level * np.random.default_rng(1).standard_normal(count)


def grid(low: int = 512) -> np.ndarray:
    sizes = [low * 2**i for i in range(6)]
    return np.array([(m, n, k) for m in sizes for n in sizes for k in sizes if 2.0 * m * n * k < 5e14], dtype=float)


def test_matmul_constants_are_recovered() -> None:
    true = MatmulCurve(
        efficiency=0.8,
        t0_seconds=4e-6,
        m0=90,
        n0=60,
        k0=150,
        f0_flops=1e12,
        g=0.06,
        memory_bytes_per_second=3e12,
        origin="estimate",
        source="made up",
    )
    m, n, k = grid().T
    seconds = true.seconds(1e15, m, n, k) * noise(len(m))
    fit = fit_matmul([MatmulSample(*row) for row in zip(m, n, k, seconds, strict=True)], peak=1e15, memory_bytes_per_second=3e12)
    assert fit.errors.mean < 0.012
    big = (8192.0, 8192.0, 8192.0)
    assert fit.curve.seconds(1e15, *big) == pytest.approx(true.seconds(1e15, *big), rel=0.01)
    assert fit.curve.g == pytest.approx(0.06, abs=0.015)
    assert fit.curve.m0 == pytest.approx(90, rel=0.15)
    assert fit.curve.k0 == pytest.approx(150, rel=0.1)
    assert fit.curve.t0_seconds == pytest.approx(4e-6, rel=0.1)


def test_without_derate_the_fit_has_none_and_extrapolates_to_shapes_never_seen() -> None:
    true = MatmulCurve(
        efficiency=0.7, t0_seconds=8e-6, m0=16, n0=32, k0=32, memory_bytes_per_second=8e9, origin="estimate", source="made up"
    )
    m, n, k = grid(64).T
    fit = fit_matmul(
        [MatmulSample(*row) for row in zip(m, n, k, true.seconds(1e11, m, n, k, item=4, out=4), strict=True)],
        peak=1e11, memory_bytes_per_second=8e9, item_bytes=4, out_bytes=4, derate=False, origin="measured", source="here",
    )  # fmt: skip
    assert fit.curve.g == 0
    assert fit.curve.origin == "measured"
    assert fit.curve.seconds(1e11, 4096, 4096, 4096, item=4, out=4) == pytest.approx(
        true.seconds(1e11, 4096, 4096, 4096, item=4, out=4), rel=0.01
    )


def test_outliers_do_not_bend_the_fit() -> None:
    true = load_gpu("h100").curves["bf16"]
    m, n, k = grid().T
    seconds = true.seconds(989.5e12, m, n, k)
    seconds[::20] *= 3
    fit = fit_matmul(
        [MatmulSample(*row) for row in zip(m, n, k, seconds, strict=True)],
        peak=989.5e12,
        memory_bytes_per_second=true.memory_bytes_per_second,
    )
    assert fit.errors.median < 0.01


def test_attention_constants_are_recovered() -> None:
    rng = np.random.default_rng(0)
    samples = []
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        for lanes in (8, 16, 32, 64, 128):
            tiles = lanes * np.ceil(length / 128)
            for dim, speed in ((64, 0.8), (128, 1.0)):
                flops = 4 * length * (length + 1) / 2 * lanes * dim
                t = 1e-5 + flops / (0.6 * 1e15 * speed) * (1 + 600 / length) * (1 + 1.2 * 132 / tiles) * (
                    1 + 0.01 * rng.standard_normal()
                )
                samples.append(AttentionSample(1, length, lanes, dim, t))
    fit = fit_attention(samples, peak=1e15, sms=132)
    assert fit.errors.mean < 0.02
    assert fit.curve.efficiency == pytest.approx(0.6, rel=0.03)
    assert fit.curve.s0 == pytest.approx(600, rel=0.1)
    assert fit.curve.w0 == pytest.approx(1.2, rel=0.1)
    assert fit.curve.head_dim_speed[64] == pytest.approx(0.8, rel=0.03)


def test_collective_rows_are_recovered_one_a_kind_and_group_size() -> None:
    samples = [
        CollectiveSample(
            kind,
            ranks,
            2.0**p,
            float(2e-5 * ranks + wire_bytes(kind, 2.0**p, ranks) / 3e11 + 6e-9 * np.sqrt(wire_bytes(kind, 2.0**p, ranks))),
        )
        for kind in ("all_reduce", "all_gather")
        for ranks in (2, 8)
        for p in range(9, 30)
    ]
    fits = fit_collective(samples, origin="measured", source="here")
    assert set(fits) == {"all_reduce", "all_gather"}
    for rows in fits.values():
        for fit, ranks in zip(rows, (2, 8), strict=True):
            assert fit.curve.ranks == ranks
            assert fit.curve.alpha_seconds == pytest.approx(2e-5 * ranks, rel=1e-3)
            assert fit.curve.bytes_per_second == pytest.approx(3e11, rel=1e-3)
            assert fit.curve.sqrt_seconds == pytest.approx(6e-9, rel=1e-2)
            assert fit.errors.mean < 1e-3


def test_a_collective_that_only_waits_still_fits() -> None:
    samples = [CollectiveSample("all_reduce", 2, 2.0**p, 3e-4) for p in range(4, 12)]
    (fit,) = fit_collective(samples)["all_reduce"]
    assert fit.curve.alpha_seconds == pytest.approx(3e-4, rel=1e-3)


def test_expert_constants_are_recovered_beside_the_traffic_of_routing() -> None:
    plain = load_gpu("b200").curves["bf16"]
    samples = []
    for hidden, inner in ((2048, 768), (4096, 1536), (7168, 2048), (5120, 8192)):
        for groups in (4, 16, 64):
            for rows in (64, 200, 512, 1000, 4096):
                tokens = float(rows * groups)
                padded = rows * (128 * np.ceil(rows / 128) / rows) ** 0.5
                t = 2e-5 + 8 * tokens * hidden / plain.memory_bytes_per_second
                for n, k in ((2 * inner, hidden), (hidden, inner)):
                    curve = MatmulCurve(**{**vars(plain), "efficiency": 0.9 * plain.efficiency, "m0": 150.0})
                    t += curve.busy(2.25e15, padded, n, k, groups, 2 * (tokens * k + groups * n * k) + 2 * tokens * n, 0.0)
                samples.append(ExpertSample(tokens, hidden, inner, groups, float(t), 0, f"{hidden}/{inner}"))
    fit = fit_experts(samples, plain=plain, peak=2.25e15, item_bytes=2, weight_gradient=1.2)
    assert fit.errors.mean < 0.03
    assert fit.curve.efficiency == pytest.approx(0.9, rel=0.05)
    assert fit.curve.tokens0 == pytest.approx(150, rel=0.15)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_are_refused(seconds: float) -> None:
    samples = [MatmulSample(512, 512, 512 * (i + 1), 1e-5) for i in range(10)] + [MatmulSample(512, 512, 512, seconds)]
    with pytest.raises(InputError, match="positive"):
        fit_matmul(samples, peak=1e15, memory_bytes_per_second=1e12)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(InputError, match="at least 8"):
        fit_matmul([MatmulSample(512, 512, 512, 1e-5)], peak=1e15, memory_bytes_per_second=1e12)
    with pytest.raises(InputError, match="at least"):
        fit_collective([CollectiveSample("all_reduce", 2, 8, 1e-5)])


FIT_HARDWARE: Any = script("fit_hardware")
OTHER_FORMS: Any = script("other_forms")
HERE: Path = script("hardware_samples").HERE


# held-out error on the full tables: 3.8 and 4.6 %; on 60 (n, k) pairs a little more
@pytest.mark.parametrize(
    ("name", "stem", "rate", "limit"), [("h100", "h100_sxm", 0.88 * 3350, 0.045), ("b200", "b200_sxm", 0.85 * 7700, 0.055)]
)
def test_held_out_error_on_a_sample_of_the_published_products(name: str, stem: str, rate: float, limit: float) -> None:
    samples = FIT_HARDWARE.matmul_samples(SAMPLES / f"gemm_{stem}_bf16.csv")
    gpu = load_gpu(name)
    fit = fit_matmul(samples, peak=gpu.peak_flops("bf16"), memory_bytes_per_second=rate * 1e9)
    assert fit.errors.mean < limit
    big = (8192.0, 8192.0, 8192.0)
    assert fit.curve.seconds(gpu.peak_flops("bf16"), *big) == pytest.approx(
        gpu.curves["bf16"].seconds(gpu.peak_flops("bf16"), *big), rel=0.03
    )


def test_held_out_error_on_a_sample_of_published_attention() -> None:
    samples = FIT_HARDWARE.attention_samples(SAMPLES / "attention_prefill_causal_bf16.csv", "H100-SXM")
    fit = fit_attention(samples, peak=989.5e12, sms=132)
    assert fit.errors.mean < 0.09
    assert 0.5 < fit.curve.head_dim_speed[64] < 0.95


def test_held_out_error_on_the_published_collectives_of_h100() -> None:
    samples = FIT_HARDWARE.collective_samples(SAMPLES / "collectives_intranode_nccl.csv", "h100_sxm")
    fits = fit_collective(samples)
    error = {kind: np.mean([fit.errors.mean for fit in rows]) for kind, rows in fits.items()}
    assert error["all_reduce"] < 0.06
    assert error["all_gather"] < 0.06
    assert error["reduce_scatter"] < 0.06
    assert error["all_to_all"] < 0.13
    shipped = load_gpu("h100")
    assert shipped.name == "h100-sxm-80gb"


def test_held_out_error_on_a_sample_of_published_experts() -> None:
    samples = FIT_HARDWARE.expert_samples(SAMPLES / "moe_fused_balanced.csv", "B200-SXM", "bf16")
    plain = load_gpu("b200").curves["bf16"]
    free = fit_experts(samples, plain=plain, peak=2.25e15, item_bytes=2, weight_gradient=1.2, at_most=1.6)
    bound = fit_experts(samples, plain=plain, peak=2.25e15, item_bytes=2, weight_gradient=1.2)
    assert free.errors.mean < 0.12
    assert bound.errors.mean < 0.14
    assert bound.curve.efficiency <= 1


def test_shipped_curves_come_from_the_script() -> None:
    """Curves marked fitted name the script and carry the error of shapes they have not seen."""
    for name in ("a100", "h100", "h200", "b200", "b300", "gb200", "gb300", "l40s"):
        curve = load_gpu(name).matmul["bf16"]
        assert "benchmarks/fit_hardware.py" in curve.source
        assert curve.heldout_error is not None
        assert curve.heldout_error < 0.085


def test_the_script_refuses_a_missing_folder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["fit_hardware.py", "--samples", "nowhere"])
    assert FIT_HARDWARE.main() == 2
    assert "no such folder" in capsys.readouterr().err


def test_sample_files_are_small_and_have_a_source() -> None:
    files = list(SAMPLES.glob("*.csv"))
    assert sum(path.stat().st_size for path in files) < 300_000
    listed = (SAMPLES / "README.md").read_text()
    assert all(path.name in listed for path in files)
    for path in files:
        with path.open() as handle:
            assert len(list(csv.DictReader(handle))) > 20


def test_the_switch_of_two_protocols_is_found_where_their_lines_cross() -> None:
    wire = np.array([2.0**p for p in range(9, 30)])
    times = np.minimum(5e-6 + wire / 2e10, 2e-5 + wire / 2e11) * noise(len(wire))
    crossing = (2e-5 - 5e-6) / (1 / 2e10 - 1 / 2e11)
    assert protocol_switch(wire, times) == pytest.approx(crossing, rel=0.2)
    assert protocol_switch(wire, 5e-6 + wire / 2e11) is None


def errors_of(forms: Any) -> dict[str, float]:
    """Mean held-out error by form."""
    return {title: float(np.nanmean(np.abs(ratios - 1))) for title, ratios in forms}


@pytest.mark.parametrize(
    ("title", "speed"),
    [
        ("roofline", lambda m, n, k: np.minimum(6e14, 2 * m * n * k / ((2 * k * (m + n) + 2 * m * n) / 1.2e12))),
        ("interpolated table", lambda m, n, k: 1e14 * (n / 4096) ** 0.3 * (k / 4096) ** 0.2 * (m / 4096) ** 0.1),
        ("one tile, hard waves", lambda m, n, k: 2 * m * n * k / (np.ceil(np.ceil(m / 128) * np.ceil(n / 256) / 100) * k * 1e-8)),
    ],
)
def test_samples_made_by_a_form_are_predicted_by_it_and_not_by_constant_efficiency(title: str, speed: Any) -> None:
    m, n, k = grid(256).T
    samples = [MatmulSample(*row) for row in zip(m, n, k, 2 * m * n * k / speed(m, n, k), strict=True)]
    found = errors_of(OTHER_FORMS.products(samples, peak=1e15, sms=100, item_bytes=2, memory_bytes_per_second=3e12, cast=False))
    assert found[title] < 0.02
    assert found["constant efficiency"] > 0.05


def test_other_forms_of_a_collective_find_what_made_the_samples() -> None:
    wire = 2.0 ** np.arange(10, 29)
    made = {
        "latency + bandwidth": 2e-5 + wire / 2e11,
        "lower of two protocols": np.minimum(5e-6 + wire / 2e10, 2e-5 + wire / 2e11),
        "free exponent": 1e-5 + wire / 2e11 + 3e-8 * wire**0.4,
    }
    for title, seconds in made.items():
        samples = [CollectiveSample("broadcast", 2, b, t) for b, t in zip(wire, seconds, strict=True)]
        assert errors_of(OTHER_FORMS.collectives(samples))[title] < 0.01, title


def test_every_megabyte_is_on_the_lines_between_the_sizes_that_were_kept() -> None:
    kept = [CollectiveSample("all_reduce", 4, float(mb << 20), t) for mb, t in ((1, 1e-5), (3, 3e-5), (4, 9e-5))]
    dense = script("hardware_samples").every_megabyte(kept)
    assert [(s.bytes / 2**20, s.seconds) for s in dense] == [
        (mb, pytest.approx(t)) for mb, t in ((1, 1e-5), (2, 2e-5), (3, 3e-5), (4, 9e-5))
    ]


def test_neighbours_that_fall_share_their_mean() -> None:
    assert nondecreasing([1, 2, 2, 5]) == [1, 2, 2, 5]
    assert nondecreasing([1, 4, 2, 5]) == [1, 3, 3, 5]
    assert nondecreasing([6, 4, 2, 8, 0]) == [4, 4, 4, 4, 4]
    assert nondecreasing([]) == []


KEPT: list[dict[str, Any]] = json.loads(FIT_HARDWARE.KEPT.read_text())


def test_every_shipped_curve_is_the_one_that_the_script_found() -> None:
    """The kept fits against the files, curve by curve; what is not shipped (an unbounded fit, fp8_block) is in no file."""
    shipped = [r for r in KEPT if r.get("shipped")]
    assert len(shipped) > 120
    for r in shipped:
        if r["kind"] == "attention":
            curve: Any = load_gpu(r["of"]).attention
        elif r["kind"] in ("matmul", "grouped"):
            curve = getattr(load_gpu(r["of"]), r["kind"])[r["what"]]
        else:
            curve = next(row for row in load_link(r["of"]).curves[r["collective"]] if row.ranks == r["ranks"])
        for name, value in r["curve"].items():
            if name not in ("fp8_speed", "head_dim_speed", "backward_ratio"):
                assert getattr(curve, name) == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), (
                    r["of"],
                    name,
                )


def test_the_page_shows_the_kept_fits() -> None:
    page = script("hardware_errors")
    text = page.PAGE.read_text()
    assert page.page(text, KEPT) == text
    for gpu in ("a100-sxm-80gb", "gb300", "rtx-pro-6000"):
        assert f"| {gpu} | bf16 | **" in text


def test_the_samples_kept_here_give_the_shipped_curves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FIT_HARDWARE, "products", lambda *_, **__: ())  # other forms
    source = next(s for s in FIT_HARDWARE.SAMPLES if s.gpu == "rtx-pro-6000")
    gpu = load_gpu("rtx-pro-6000")
    for r in FIT_HARDWARE.fit_products(source, gpu, HERE, FIT_HARDWARE.Reference(None)):
        assert r["curve"]["efficiency"] == gpu.matmul[r["what"]].efficiency
        assert r["mean"] < 0.08


def test_every_form_found_elsewhere_is_found_here_about_as_far_off() -> None:
    """Of bf16 products, attention and collectives: the mean error of each form within a quarter, or a point, of what others found (forms
    with few constants, whose fits have little choice)."""
    page = script("hardware_errors")
    compared = 0
    for r in KEPT:
        forms = {"matmul": page.PRODUCT_FORMS, "attention": page.ATTENTION_FORMS}.get(r["kind"], {})
        for title, form in forms.items() if r["what"] in ("bf16", "head 128") else ():
            if form in r["reference"]:
                here, there = 100 * r["forms"][title][0], r["reference"][form][0]
                assert here == pytest.approx(there, rel=0.25, abs=1.0), (r["of"], title)
                compared += 1
    assert compared > 80
    alike = [
        (100 * r["forms"][t][0], r["reference"]["alpha-beta"][0])
        for r in KEPT
        if r["kind"] == "link"
        for t in ("latency + bandwidth",)
    ]
    assert np.mean([here for here, _ in alike]) == pytest.approx(np.mean([there for _, there in alike]), rel=0.05)


def test_on_every_megabyte_the_form_is_as_near_to_vtrains_tables_as_elsewhere() -> None:
    whole = {r["what"]: r["whole"][0] for r in KEPT if r["kind"] == "vtrain" and r["what"].startswith("a100")}
    assert len(whole) == 3
    assert max(whole.values()) < 0.012  # 0.6 to 1.2 % elsewhere
