"""The saved-tensor contract: what autograd really keeps of each operation, and what the fused kernels' schemas ask for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
import torch
from torch import Tensor

from planner.runtime.attention import Tokens, attend
from planner.runtime.loss import token_losses
from planner.runtime.mesh import Axis
from planner.runtime.mlp import act
from planner.runtime.norms import _RmsNorm
from planner.runtime.saved import CONTRACTS, Fused

S, B, H, D, V = 8, 2, 4, 16, 32


def made(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16).requires_grad_()


def kept_of(run: Callable[[], Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor that autograd saves while ``run`` runs."""
    kept: list[tuple[tuple[int, ...], torch.dtype]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return kept


BF16, FP32, INT = torch.bfloat16, torch.float32, torch.int64
SHAPES = {
    "attend": {**dict.fromkeys(("q", "out"), ((S, B, H, D), BF16)), **dict.fromkeys(("k", "v"), ((S, B, 2, D), BF16)),
               "logsumexp": ((B, H, S), FP32)},
    "rms_norm": {"x": ((S, B, D), BF16), "weight": ((D,), BF16), "rstd": ((S, B), FP32)},
    "cross_entropy": {"logits": ((S * B, V), BF16), "targets": ((S * B,), INT), "logsumexp": ((S * B,), FP32)},
    "swiglu": dict.fromkeys(("gate", "up"), ((S, B, D), BF16)), "activate": {"x": ((S, B, D), BF16)},
}  # fmt: skip
RUNS: dict[str, Callable[[], Tensor]] = {
    "attend": lambda: attend(made(S, B, H, D), made(S, B, 2, D), made(S, B, 2, D), Tokens((0, S)), 0, 0, D**-0.5),
    "rms_norm": lambda: _RmsNorm.apply(made(S, B, D), made(D), 1e-5),
    "cross_entropy": lambda: token_losses(made(S, B, V), torch.zeros(B, S, dtype=INT), Axis("tp", ranks=(0,)), 0),
    "swiglu": lambda: act(made(S, B, D), made(S, B, D), "silu"), "activate": lambda: act(made(S, B, D), None, "gelu"),
}  # fmt: skip


@pytest.mark.parametrize("operation", list(CONTRACTS))
def test_autograd_keeps_what_the_contract_says(operation: str) -> None:
    """Views of the arguments (the flattened logits' own function keeps none) and bookkeeping apart: as many, of these shapes."""
    contract = CONTRACTS[operation]
    assert sorted(kept_of(RUNS[operation]), key=str) == sorted((SHAPES[operation][name] for name in contract.ours), key=str)


@pytest.mark.parametrize("fused", [f for c in CONTRACTS.values() for f in c.fused if f.backward], ids=lambda f: f.name)
def test_a_fused_kernels_backward_asks_for_what_is_said_that_it_keeps(fused: Fused) -> None:
    schema = getattr(torch.ops.aten, fused.backward).default._schema
    tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type) and not a.name.startswith("grad")]
    assert tuple(tensors) == fused.keeps
