"""Pricing of operations: kinds, framework factors, scalars and arrays alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cost_models.compute import (
    architecture,
    host_seconds,
    jitter,
    kernel_speed,
    kernel_table,
    price,
    price_in_ring,
    ring_block,
    ring_launches,
    with_activation,
)
from cost_models.execution import Execution, load_execution
from profiles.hardware import gpu_names, load_gpu
from profiles.operations import Attend, Collective, GroupedMatmul, Matmul, Pointwise

H100 = load_gpu("h100-sxm-80gb")
EAGER = Execution(pointwise_factor=2.0)


def attend(length: int = 4096, **changes: object) -> Attend:
    fields = {
        "batch": 1,
        "heads": 32,
        "kv_heads": 8,
        "q_len": length,
        "k_len": length,
        "qk_dim": 128,
        "v_dim": 128,
        "pairs": length * (length + 1) // 2,
    }
    return Attend(**(fields | changes))  # type: ignore[arg-type]


def test_seconds_are_the_gpu_s_own_by_kind_and_collectives_cost_nothing() -> None:
    product, scores, traffic = Matmul(4096, 4096, 4096), attend(), Pointwise(1e9, 2, "residual")
    cost = price(
        H100, Execution(attention="fa3", pointwise_factor=1.0), (product, scores, traffic, Collective("all_reduce", "tp", 1e9))
    )
    assert cost.matmul == pytest.approx(H100.seconds(product))
    assert cost.attention == pytest.approx(H100.seconds(scores))
    assert cost.pointwise == pytest.approx(H100.seconds(traffic))
    assert cost.kernels == 4
    assert cost.seconds == cost.matmul + cost.attention + cost.pointwise


def test_arrays_cost_what_their_elements_cost() -> None:
    m = np.array([128, 1024, 8192])
    operations = (Matmul(m, 4096, 1024), GroupedMatmul(m * 8, 1024, 512, 8), attend(batch=m // 128), Pointwise(m * 1e6, 3, "rope"))
    whole = price(H100, EAGER, operations)
    for i, size in enumerate(m.tolist()):
        one = price(
            H100,
            EAGER,
            (
                Matmul(size, 4096, 1024),
                GroupedMatmul(size * 8, 1024, 512, 8),
                attend(batch=size // 128),
                Pointwise(size * 1e6, 3, "rope"),
            ),
        )
        assert whole.seconds[i] == pytest.approx(one.seconds, rel=1e-12)


def test_the_framework_s_pointwise_factor_spares_what_is_counted_kernel_by_kernel() -> None:
    plain = price(H100, Execution(pointwise_factor=1.0), (Pointwise(1e9, 1, "loss"),)).pointwise
    assert price(H100, EAGER, (Pointwise(1e9, 1, "loss"),)).pointwise == pytest.approx(plain)
    slow = price(H100, EAGER, (Pointwise(1e9, 1, "mlp_norm"),)).pointwise
    assert slow - H100.launch_seconds == pytest.approx(2 * (plain - H100.launch_seconds))


def test_flash_attention_2_is_slower_than_cudnn_on_hopper_and_equal_on_ampere() -> None:
    assert kernel_speed("fa2", "hopper") < kernel_speed("cudnn", "hopper") < kernel_speed("fa3", "hopper")
    assert kernel_speed("fa2", "ampere") == kernel_speed("cudnn", "ampere") == 1.0
    fast, slow = (price(H100, Execution(attention=kernel), (attend(),)).attention for kernel in ("fa3", "fa2"))  # type: ignore[arg-type]
    assert slow > 1.5 * fast


def test_every_attention_kernel_has_a_speed_with_an_origin_for_every_gpu() -> None:
    for kernel, by_arch in kernel_table().items():
        entries = [by_arch[arch] for arch in by_arch if arch != "relative_to"]
        for entry in entries:
            assert set(entry) == {"value", "origin", "source"}
            assert entry["origin"] in ("measured", "datasheet", "fitted", "estimate")
        for name in gpu_names():
            assert 0 < kernel_speed(kernel, architecture(load_gpu(name).name)) <= 1.0
    assert architecture("gb200") == "blackwell"
    assert architecture("mi300x-192gb") == "other"


def test_a_ring_runs_as_many_smaller_blocks_and_merges_their_outputs() -> None:
    whole = attend(8192, q_len=2048, pairs=8192 * 8193 // 8)
    block, merge = ring_block(whole, 4, 14.0)
    assert 4 * block.pairs == whole.pairs
    assert merge.bytes == 14 * 3 * 32 * 2048 * 128
    assert ring_block(replace(whole, backward=True), 4, 14.0)[1].bytes == 7 * 3 * 2048 * 128 * (32 + 2 * 8)
    execution = Execution()
    alone, split = price(H100, execution, [whole]), price_in_ring(H100, execution, [whole], 4)
    assert split.attention == pytest.approx(4 * price(H100, execution, [block]).attention)
    assert split.pointwise == pytest.approx(price(H100, execution, [merge]).pointwise)
    assert split.attention > alone.attention
    assert price_in_ring(H100, execution, [whole], 1) == alone
    assert split.kernels == ring_launches(4) == 7
    many = price_in_ring(H100, execution, [whole], np.array([1, 4]))
    assert list(many.seconds) == pytest.approx([alone.seconds, split.seconds])


def test_one_product_an_expert_is_slower_than_a_grouped_product_for_many_small_experts() -> None:
    experts = (GroupedMatmul(8192, 1024, 2048, 64),)
    grouped = price(H100, Execution(grouped_gemm=True), experts)
    apart = price(H100, Execution(grouped_gemm=False), experts)
    assert apart.kernels == 64
    assert apart.matmul > grouped.matmul


def test_grouped_products_depend_on_the_tokens_of_an_expert() -> None:
    few, many = (price(H100, Execution(), (GroupedMatmul(65536, 1024, 2048, groups),)).matmul for groups in (512, 16))
    assert few > 1.3 * many


def test_the_launch_floor_grows_with_tp_as_vtrain_measured() -> None:
    execution = Execution(host_layer_seconds=1e-3)
    assert [float(host_seconds(H100, execution, tp)) for tp in (1, 2, 4, 5, 8, 16)] == pytest.approx(
        [1e-3, 1.1e-3, 1.1e-3, 1.5e-3, 1.5e-3, 1.5e-3]
    )
    assert jitter(np.array([1, 2, 4, 8, 16])) == pytest.approx([1.0, 1.1, 1.1, 1.5, 1.5])


def test_cuda_graphs_remove_the_launch_floor() -> None:
    assert host_seconds(H100, Execution(graphs="full"), 8) == 0.0
    assert 0 < host_seconds(H100, Execution(graphs="partial"), 1) < host_seconds(H100, Execution(), 1)


def test_on_a_cpu_the_host_has_no_floor_of_its_own() -> None:
    assert host_seconds(load_gpu("cpu"), Execution(), 1) == 0.0


def test_an_unfused_activation_moves_more_bytes_in_more_kernels() -> None:
    operations = (Pointwise(100, 1, "mlp_activation"), Pointwise(50, 1, "rope"))
    bridge = Execution(unfused_activations=("clamped_swiglu",))
    activation, rope = with_activation(operations, "clamped_swiglu", bridge)
    assert (activation.bytes, activation.kernels) == (pytest.approx(870), 9)  # type: ignore[union-attr]
    assert rope == operations[1]
    assert with_activation(operations, "silu", bridge) == operations


def test_presets_know_their_generation() -> None:
    assert load_execution("megatron").attention == "cudnn"
    assert load_execution("megatron", {"tp_overlap": "userbuffers", "graphs": "full"}).graphs == "full"


def test_triton_s_attention_keeps_its_ratio_to_flash_attention_2_on_every_architecture() -> None:
    ratios = [kernel_speed("triton", arch) / kernel_speed("fa2", arch) for arch in ("ampere", "hopper", "blackwell", "other")]
    assert ratios == pytest.approx([0.55] * 4)
    assert kernel_speed("triton", "hopper") == pytest.approx(0.55 * 0.56)
