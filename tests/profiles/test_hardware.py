"""GPU profiles: datasheet values, predictions against measured points, arrays, and where every number comes from."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.errors import InputError
from profiles.hardware import describe, gpu_names, load_gpu
from profiles.operations import Attend, GroupedMatmul, Matmul, Pointwise

SAMPLES = Path(__file__).parent.parent / "data" / "hardware"
GIB = 2**30
ORIGINS = {"datasheet", "measured", "fitted", "estimate"}


def causal(length: float, heads: float = 32, batch: float = 1, dim: int = 128, backward: bool = False) -> Attend:
    return Attend(batch, heads, heads, length, length, dim, dim, length * (length + 1) / 2, backward=backward)


# name, SMs, bf16 TFLOP/s, fp8, memory GB/s, board W: vendor datasheets
DATASHEETS = [
    ("A100-80GB-SXM", 108, 312, None, 2039, 400),
    ("A100-40GB-SXM", 108, 312, None, 1555, 400),
    ("A100-80GB-PCIe", 108, 312, None, 1935, 300),
    ("A800", 108, 312, None, 2039, 400),
    ("H100-80GB-SXM", 132, 989.5, 1979, 3350, 700),
    ("H100-96GB-SXM-500W", 132, 989.5, 1979, 2400, 500),
    ("H100-80GB-PCIe", 114, 756.5, 1513, 2000, 350),
    ("H800", 132, 989.5, 1979, 3350, 700),
    ("H20", 78, 148, 296, 4000, 400),
    ("H200-141GB-SXM", 132, 989.5, 1979, 4800, 700),
    ("B200", 148, 2250, 4500, 8000, 1000),
    ("B300", 148, 2250, 4500, 8000, 1100),
    ("GB200", 152, 2500, 5000, 8000, 1200),
    ("GB300", 152, 2500, 5000, 8000, 1400),
    ("L40S", 142, 362.05, 733, 864, 350),
    ("RTX-PRO-6000", 188, 500, 1000, 1597, 600),
    ("rtx-4090", 128, 165.2, 330.3, 1008, 450),
    ("rtx-3090", 82, 71, None, 936, 350),
    ("MI300X", 304, 1307.4, 2614.9, 5300, 750),
    ("MI325X", 304, 1307.4, 2614.9, 6000, 1000),
    ("MI355X", 256, 2500, 5000, 8000, 1400),
]


@pytest.mark.parametrize(("name", "sms", "bf16", "fp8", "memory", "watts"), DATASHEETS)
def test_datasheet_values(name: str, sms: int, bf16: float, fp8: float | None, memory: float, watts: float) -> None:
    gpu = load_gpu(name)
    assert gpu.sms == sms
    assert gpu.peak_flops("bf16") == pytest.approx(bf16 * 1e12)
    assert gpu.facts.memory_datasheet_bytes_per_second.value == pytest.approx(memory * 1e9)
    assert gpu.facts.board_watts is not None
    assert gpu.facts.board_watts.value == watts
    assert gpu.memory_bytes_per_second < gpu.facts.memory_datasheet_bytes_per_second.value
    if fp8 is None:
        with pytest.raises(InputError, match="bf16"):
            gpu.peak_flops("fp8")
    else:
        assert gpu.peak_flops("fp8") == pytest.approx(fp8 * 1e12)


# what torch printed as "total capacity", GiB (case A12; issues quoted in the files)
@pytest.mark.parametrize(
    ("name", "gib"),
    [("H100-80GB-SXM", 79.11), ("A100-40GB-SXM", 39.5), ("A100-80GB-SXM", 79.15), ("H200-141GB-SXM", 139.8), ("B200", 178.4)],
)
def test_usable_memory_is_what_torch_can_allocate_not_the_name(name: str, gib: float) -> None:
    gpu = load_gpu(name)
    assert gpu.usable_bytes == pytest.approx(gib * GIB, rel=2e-4)
    assert gpu.usable_bytes < gpu.memory_bytes
    assert 0 < gpu.context_bytes < 2 * GIB


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_loads_and_every_number_has_an_origin_and_a_source(name: str) -> None:
    gpu = load_gpu(name)
    rows = describe(gpu)
    assert len({field for field, *_ in rows}) == len(rows)
    for field, value, unit, origin, source in rows:
        assert np.isfinite(value), field
        assert unit, field
        assert origin in ORIGINS, field
        assert len(source) > 5, field
    for dtype in gpu.peaks:
        assert gpu.seconds(Matmul(4096, 4096, 4096, dtype)) > 0
        assert gpu.seconds(GroupedMatmul(8192, 4096, 1024, 8, dtype)) > 0
    assert gpu.seconds(causal(4096)) > 0
    assert gpu.seconds(Pointwise(1e8)) > 1e8 / gpu.facts.memory_datasheet_bytes_per_second.value


@pytest.mark.parametrize("name", gpu_names())
def test_no_operation_beats_the_datasheet(name: str) -> None:
    gpu = load_gpu(name)
    for dtype in gpu.peaks:
        for size in (1024.0, 4096.0, 16384.0):
            op = Matmul(size, size, size, dtype)
            assert op.flops / gpu.seconds(op, sustained=False) < gpu.peak_flops(dtype)
    for length in (1024.0, 8192.0, 131072.0):
        op = causal(length)
        assert op.flops / gpu.seconds(op) < max(peak.value for dtype, peak in gpu.peaks.items() if dtype in ("bf16", "fp16"))


# measured with random data, microseconds: aiconfigurator medians; TFLOP/s from Azure, MAMF and Primus documents
@pytest.mark.parametrize(("name", "file"), [("H100-80GB-SXM", "gemm_h100_sxm_bf16.csv"), ("B200", "gemm_b200_sxm_bf16.csv")])
def test_matrix_products_match_the_measured_table(name: str, file: str) -> None:
    with (SAMPLES / file).open() as handle:
        table = list(csv.DictReader(handle))
    m, n, k, measured = (np.array([float(row[c]) for row in table]) for c in ("m", "n", "k", "time_us"))
    predicted = load_gpu(name).seconds(Matmul(m, n, k), sustained=False) * 1e6
    off = np.abs(predicted / measured - 1)
    assert off.mean() < 0.055
    assert off[0] < 0.08  # 8192 x 8192 x 8192 stands first


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("H100-80GB-SXM", 640, 720),
        ("A100-80GB-SXM", 235, 262),
        ("H200-141GB-SXM", 620, 720),
        ("MI300X", 640, 770),
        ("B200", 950, 1300),
    ],
)
def test_sustained_rate_of_a_large_product(name: str, low: float, high: float) -> None:
    op = Matmul(8192, 8192, 8192)
    assert low < op.flops / load_gpu(name).seconds(op) / 1e12 < high


def test_a_hot_chip_is_slower_and_only_where_it_was_measured_to_be() -> None:
    h100, a100 = load_gpu("h100"), load_gpu("a100")
    small = Matmul(2048, 4096, 4096)
    assert 1.1 < h100.seconds(small) / h100.seconds(small, sustained=False) < 1.25
    assert 1.0 <= a100.seconds(small) / a100.seconds(small, sustained=False) < 1.04
    b200 = load_gpu("b200")
    fp4 = Matmul(8192, 8192, 8192, "nvfp4")
    ratio = b200.seconds(fp4) / b200.seconds(fp4, sustained=False)
    assert ratio == pytest.approx(1 / b200.facts.sustained_matmul_speed.value, rel=0.02)  # no power law: F itself, clock apart


def test_training_products_of_the_a100_pcie_match_simumax() -> None:
    """Forward, input gradient and weight gradient as timed in training layouts, within the published 4 % on the mean."""
    gpu = load_gpu("a100-pcie")
    with (SAMPLES / "training_gemm_simumax.csv").open() as handle:
        table = list(csv.DictReader(handle))
    off = []
    for row in table:
        m, n, k, groups = (float(row[c]) for c in ("m", "n", "k", "groups"))
        weight = row["layout"] == "NT" or row["stage"] == "bwd_grad_w"
        op = (
            Matmul(m, n, k, weight_gradient=weight)
            if row["op"] == "matmul"
            else GroupedMatmul(m * groups, n, k, groups, weight_gradient=weight)
        )
        off.append(gpu.seconds(op) * 1e6 / float(row["time_us"]) - 1)
    assert np.abs(off).mean() < 0.05
    assert abs(np.mean(off)) < 0.03


def test_few_tokens_an_expert_are_slow_and_many_are_a_plain_product() -> None:
    gpu = load_gpu("h100")
    times = [gpu.seconds(GroupedMatmul(tokens * 8, 4096, 4096, 8)) for tokens in (16, 64, 256, 1024, 8192)]
    rates = [2 * tokens * 8 * 4096 * 4096 / t for tokens, t in zip((16, 64, 256, 1024, 8192), times, strict=True)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(2 * 65536 * 4096 * 4096 / gpu.seconds(Matmul(65536, 4096, 4096)), rel=0.06)
    three = gpu.seconds(GroupedMatmul(3 * 64 * 8, 4096, 4096, 8)) / gpu.seconds(GroupedMatmul(64 * 8, 4096, 4096, 8))
    assert three < 2.5  # document C: three times the tokens is not three times the time


# FlashAttention-3 figures (arXiv:2407.08608), H100, 16k tokens, hidden 2048, TFLOP/s
@pytest.mark.parametrize(
    ("length", "forward", "backward"), [(2048, 521, None), (4096, 579, None), (8192, 602, None), (16384, 616, None)]
)
def test_flash_attention_on_h100_matches_the_paper(length: int, forward: float, backward: float | None) -> None:
    gpu = load_gpu("h100")
    op = causal(length, heads=16, batch=16384 / length)
    assert op.flops / gpu.seconds(op) / 1e12 == pytest.approx(forward, rel=0.15)


@pytest.mark.parametrize(("length", "rate"), [(4096, 542), (16384, 561)])
def test_flash_attention_backward_on_h100_matches_the_paper(length: int, rate: float) -> None:
    op = Attend(16384 / length, 16, 16, length, length, 128, 128, length**2, backward=True)
    assert op.flops / load_gpu("h100").seconds(op) / 1e12 == pytest.approx(rate, rel=0.1)


def test_backward_of_attention_takes_the_measured_multiple_of_forward() -> None:
    gpu = load_gpu("h100")
    for dim, ratio in ((64, 2.6), (128, 2.93)):
        assert gpu.seconds(causal(8192, dim=dim, backward=True)) / gpu.seconds(causal(8192, dim=dim)) == pytest.approx(ratio)
    latent = [Attend(1, 128, 128, 4096, 4096, 192, 128, 4096 * 4097 / 2, backward=back) for back in (False, True)]
    assert gpu.seconds(latent[1]) / gpu.seconds(latent[0]) == pytest.approx(3.2)


def test_causal_windows_and_full_masks_are_priced_by_their_pairs() -> None:
    gpu = load_gpu("h100")
    full = Attend(1, 32, 32, 16384, 16384, 128, 128, 16384**2)
    window = Attend(1, 32, 32, 16384, 16384, 128, 128, 16384 * 1024)
    assert 1.8 < gpu.seconds(full) / gpu.seconds(causal(16384)) < 2.0
    assert gpu.seconds(window) < 0.2 * gpu.seconds(causal(16384))


def test_kernel_generation_divides_the_rate_and_not_the_latency() -> None:
    gpu = load_gpu("h100")
    t0 = gpu.attention.t0_seconds
    assert gpu.seconds(causal(8192), kernel=0.5) - t0 == pytest.approx(2 * (gpu.seconds(causal(8192)) - t0))


def test_unfused_attention_is_two_batched_products_over_every_pair() -> None:
    gpu = load_gpu("a100")
    op = replace(causal(2048, heads=16), fused=False)
    products = gpu.seconds(Matmul(2048, 2048, 128, batch=16)) + gpu.seconds(Matmul(2048, 128, 2048, batch=16))
    assert gpu.seconds(op) == pytest.approx(products)
    assert gpu.seconds(replace(op, backward=True)) == pytest.approx(2 * products)


def test_a_precision_without_samples_borrows_a_curve_and_says_so() -> None:
    gpu = load_gpu("h100")
    assert gpu.curves["bf16"].origin == "fitted"
    assert gpu.curves["fp16"].origin == "estimate"
    assert gpu.seconds(Matmul(8192, 8192, 8192, "fp16")) == gpu.seconds(Matmul(8192, 8192, 8192))
    b200 = load_gpu("b200")
    assert b200.seconds(Matmul(8192, 8192, 8192, "mxfp8")) == pytest.approx(b200.seconds(Matmul(8192, 8192, 8192, "fp8")), rel=0.02)
    assert b200.seconds(Matmul(8192, 8192, 8192, "nvfp4")) < b200.seconds(Matmul(8192, 8192, 8192, "mxfp8"))


def test_quantisation_in_the_samples_is_not_charged_to_the_product() -> None:
    gpu = load_gpu("h100")
    curve = gpu.curves["fp8"]
    assert curve.t0_seconds > 8e-6
    tiny = gpu.seconds(Matmul(128, 128, 128, "fp8"))
    assert tiny < 5e-6


sizes = st.integers(1, 1 << 17)


@settings(max_examples=60, deadline=None)
@given(m=st.lists(sizes, min_size=2, max_size=4), n=sizes, k=sizes, name=st.sampled_from(["h100", "b200", "cpu", "v100"]))
def test_arrays_equal_scalars(m: list[int], n: int, k: int, name: str) -> None:
    gpu = load_gpu(name)
    dtype = "fp16" if name == "v100" else "bf16"
    array = np.array(m)
    length = np.minimum(array, 65536).astype(float)
    pairs = [
        (Matmul(array, n, k, dtype), [Matmul(x, n, k, dtype) for x in m]),
        (GroupedMatmul(array, n, k, 4, dtype), [GroupedMatmul(x, n, k, 4, dtype) for x in m]),
        (
            GroupedMatmul(array, n, k, 4, dtype, weight_gradient=True),
            [GroupedMatmul(x, n, k, 4, dtype, weight_gradient=True) for x in m],
        ),
        (Pointwise(array * 2.0), [Pointwise(x * 2.0) for x in m]),
        (causal(length), [causal(x) for x in length.tolist()]),
        (causal(length, backward=True), [causal(x, backward=True) for x in length.tolist()]),
    ]
    for bulk, single in pairs:
        np.testing.assert_allclose(gpu.seconds(bulk), [gpu.seconds(op) for op in single], rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(m=sizes, n=sizes, k=sizes, more=st.integers(2, 8))
def test_more_work_never_takes_less_time(m: int, n: int, k: int, more: int) -> None:
    gpu = load_gpu("h100")
    assert gpu.seconds(Matmul(m * more, n, k)) >= gpu.seconds(Matmul(m, n, k))
    assert gpu.seconds(Matmul(m, n, k * more)) >= gpu.seconds(Matmul(m, n, k))
    assert gpu.seconds(GroupedMatmul(m * more, n, k, 8)) >= gpu.seconds(GroupedMatmul(m, n, k, 8)) * 0.999


def test_a_misspelt_gpu_names_the_nearest() -> None:
    with pytest.raises(InputError, match="h100-sxm-80gb"):
        load_gpu("h100-sxm-80g")


def test_calibration_changes_a_fact_and_its_origin() -> None:
    gpu = load_gpu("b200").faster(sustained_matmul_speed=0.7)
    assert gpu.facts.sustained_matmul_speed.origin == "fitted"
    assert gpu.seconds(Matmul(8192, 8192, 8192)) > load_gpu("b200").seconds(Matmul(8192, 8192, 8192))
    with pytest.raises(InputError):
        gpu.faster(speed_of_light=1.0)


def test_published_names_of_runs_are_known() -> None:
    """The gpu column of runs.csv."""
    names = ["H100-80GB-SXM", "A100-80GB-SXM", "GB200", "A100-40GB-SXM", "B200", "H100-96GB-SXM-500W", "A100-SXM", "H200-141GB-SXM"]
    assert {load_gpu(name).name for name in names} == {
        "h100-sxm-80gb", "a100-sxm-80gb", "gb200", "a100-sxm-40gb", "b200-sxm-180gb", "h100-sxm-96gb-500w", "h200-sxm-141gb",
    }  # fmt: skip
