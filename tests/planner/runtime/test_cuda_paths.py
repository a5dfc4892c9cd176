"""What runs on a GPU alone, as far as a machine without one can try it: the kernels' own shape rules, and the code around them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from planner.runtime import attention_blocks, kernels
from planner.runtime.attention_blocks import _CpuFlash, _CudaFlash, _fused
from planner.runtime.optimizer import square_sum, square_sum_fused


class OnCpu(_CudaFlash):
    """The GPU's kernel, played by the CPU's: what is done before and after a call stays the GPU's."""

    forward = _CpuFlash.forward
    backward = _CpuFlash.backward


@pytest.mark.parametrize(
    ("device", "dtype", "width", "kernel"),
    [
        ("cpu", torch.float64, 512, _CpuFlash), ("cuda", torch.bfloat16, 256, _CudaFlash), ("cuda", torch.float16, 128, _CudaFlash),
        ("cuda", torch.bfloat16, 264, None), ("cuda", torch.float32, 64, None),
    ],
)  # fmt: skip
def test_which_kernel_attention_runs_on(device: str, dtype: torch.dtype, width: int, kernel: type | None) -> None:
    assert _fused(SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype, shape=(4, 1, 2, width))) is kernel  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [True, False])
def test_the_gpus_attention_kernel_takes_and_gives_what_the_runtime_does(causal: bool) -> None:
    """Its own shape rules (meta tensors): output in q's shape, one fp32 logsumexp a query, gradients in the shapes of their tensors."""
    q = torch.empty(2, 8, 64, 16, dtype=torch.bfloat16, device="meta")
    k, v = _CudaFlash.keys(*(torch.empty(2, 2, 64 if causal else 32, 16, dtype=torch.bfloat16, device="meta") for _ in range(2)), 8)
    assert k.shape[1] == v.shape[1] == 8
    out, lse = _CudaFlash.forward(q, k, v, causal, 0.25)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 8, 64), torch.float32)
    grads = _CudaFlash.backward(out, q, k, v, out, lse, causal, 0.25)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("widths", [(16, 16), (24, 16), (12, 12)])
def test_repeated_heads_and_padded_widths_around_the_gpus_kernel_change_nothing(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, int]
) -> None:
    q, k = (torch.randn(32, 2, heads, widths[0], dtype=torch.float64) for heads in (8, 2))
    v, grad = (torch.randn(32, 2, heads, widths[1], dtype=torch.float64) for heads in (2, 8))
    rest = (None, None, [0, 32], [0, 32], 0, 0, 0.3)

    def both() -> list[Tensor]:
        out, lse = attention_blocks.attend_forward(q, k, v, *rest)
        return [out, lse, *attention_blocks.attend_backward(grad, q, k, v, out, lse, *rest)]

    expected = both()
    monkeypatch.setattr(attention_blocks, "_fused", lambda _: OnCpu)
    for got, wanted in zip(both(), expected, strict=True):
        assert got.shape == wanted.shape
        assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_gpus_norm_is_the_cpus(dtype: torch.dtype) -> None:
    """Forward by the kernel's own CPU form; backward by its shape rule, one of the gradients left out as a split backward asks."""
    x, weight = torch.randn(5, 3, 8, dtype=dtype), torch.randn(8, dtype=dtype)
    for got, wanted in zip(kernels._rms_norm_fused(x, weight, 1e-6), kernels._rms_norm(x, weight, 1e-6), strict=True):
        assert torch.allclose(got, wanted)
        assert got.shape == wanted.shape
    grad, there, scale, rstd = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((5, 3, 8), (5, 3, 8), (8,), (5, 3)))
    for wanted_parts in ((True, True), (True, False), (False, True)):
        got_parts = kernels._rms_norm_backward_fused(grad, there, scale, rstd, *wanted_parts)
        assert [g.shape for g in got_parts] == [s if w else (0,) for s, w in zip(((5, 3, 8), (8,)), wanted_parts, strict=True)]


def test_the_gradient_norm_of_a_gpu_is_the_cpus() -> None:
    tensors = [torch.randn(n, dtype=torch.float64) for n in (3, 1000, 200_000)]
    assert float(square_sum_fused(tensors)) == pytest.approx(float(square_sum(tensors)), rel=1e-12)
