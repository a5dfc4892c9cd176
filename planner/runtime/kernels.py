"""The runtime's own operations (``torch.ops.axisplan.*``), each with stated inputs, outputs and saved tensors.

A trace sees one operation with known arguments, whatever kernel runs below, so what it counts on a CPU is what a GPU does:

=====================  ==============================================  ========================================
operation              computes                                        autograd saves (see the callers)
=====================  ==============================================  ========================================
rms_norm               x * rsqrt(mean(x^2) + eps) * weight             x, weight, rstd [rows] (fp32 at least)
swiglu                 act(gate) * up                                  gate, up
activate               act(x)                                          x
attend                 softmax(q k^T) v under a mask made of spans     q, k, v, out, logsumexp [b, heads, s]
cross_entropy          logsumexp and target logit of a vocabulary part logits, targets, logsumexp [tokens]
=====================  ==============================================  ========================================

Temporaries inside an operation are its own business: bounded by blocks of rows, freed on return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from planner.runtime.attention_blocks import attend_backward, attend_forward, attend_shapes

_library = torch.library.Library("axisplan", "DEF")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def _operation(schema: str, real: Callable, fake: Callable, cuda: Callable | None = None) -> None:
    """Define an operation; ``cuda`` where another kernel computes the same there."""
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, real, "CPU")
    _library.impl(name, cuda or real, "CUDA")
    _library.impl(name, fake, "Meta")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """What statistics are kept in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# -- root mean square norm ----------------------------------------------------------------------------------------------


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(accumulate_dtype(x.dtype))
    rstd = torch.rsqrt(wide.square().mean(-1).add_(eps))
    return (wide * rstd.unsqueeze(-1)).to(x.dtype).mul_(weight).contiguous(), rstd


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=accumulate_dtype(x.dtype))


def _rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, for_x: bool = True, for_weight: bool = True
) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(x.dtype)
    scaled = x.to(dtype) * rstd.unsqueeze(-1)
    wide, heavy = grad.to(dtype), weight.to(dtype)
    both = (wide * scaled).flatten(0, -2)
    weight_grad = both.sum(0).to(weight.dtype) if for_weight else weight.new_empty(0)
    if not for_x:
        return x.new_empty(0), weight_grad
    mean = torch.mv(both, heavy).div_(x.shape[-1]).view_as(rstd).unsqueeze(-1)
    grads = (wide * heavy).addcmul_(scaled, mean, value=-1).mul_(rstd.unsqueeze(-1))
    return grads.to(x.dtype), weight_grad


def _rms_norm_fused(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, rstd = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)
    return out, rstd.view(x.shape[:-1])


def _rms_norm_backward_fused(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, for_x: bool = True, for_weight: bool = True
) -> tuple[Tensor, Tensor]:
    which = [for_x, for_weight]
    grads = torch.ops.aten._fused_rms_norm_backward(grad, x, [x.shape[-1]], rstd.unsqueeze(-1), weight, which)
    return grads[0] if for_x else x.new_empty(0), grads[1] if for_weight else weight.new_empty(0)


_operation("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", _rms_norm, _rms_norm_fake, cuda=_rms_norm_fused)
_operation(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd, bool for_x=True, bool for_weight=True) -> (Tensor, Tensor)",
    _rms_norm_backward,
    lambda grad, x, weight, rstd, for_x=True, for_weight=True: (
        x.new_empty(x.shape if for_x else 0),
        weight.new_empty(weight.shape if for_weight else 0),
    ),
    cuda=_rms_norm_backward_fused,
)

# -- activations --------------------------------------------------------------------------------------------------------


def _swiglu(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return _ACTIVATIONS[kind](gate).mul_(up)


def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    acted = _ACTIVATIONS[kind](gate)
    return _activate_backward(grad * up, gate, kind), acted.mul_(grad)


def _activate_backward(grad: Tensor, x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return torch.ops.aten.silu_backward(grad, x)
    if kind in ("gelu", "gelu_tanh"):
        return torch.ops.aten.gelu_backward(grad, x, approximate="tanh" if kind == "gelu_tanh" else "none")
    return grad * (x > 0) if kind == "relu" else grad * 2 * F.relu(x)


_operation("swiglu(Tensor gate, Tensor up, str kind) -> Tensor", _swiglu, lambda gate, up, kind: gate.new_empty(gate.shape))
_operation(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up, str kind) -> (Tensor, Tensor)",
    _swiglu_backward,
    lambda grad, gate, up, kind: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
)
_operation("activate(Tensor x, str kind) -> Tensor", lambda x, kind: _ACTIVATIONS[kind](x), lambda x, kind: x.new_empty(x.shape))
_operation(
    "activate_backward(Tensor grad, Tensor x, str kind) -> Tensor", _activate_backward, lambda grad, x, kind: x.new_empty(x.shape)
)

# -- cross entropy over a part of the vocabulary -------------------------------------------------------------------------

WIDENED_BYTES = 128 << 20
"""Of the logits that are widened at a time: rows of a vocabulary of 128k enough to fill a GPU, few beside the logits."""


def _pieces(logits: Tensor) -> Iterator[slice]:
    """Rows of ``logits`` that are widened together."""
    rows = max(1, WIDENED_BYTES // (logits.shape[1] * accumulate_dtype(logits.dtype).itemsize))
    return (slice(low, low + rows) for low in range(0, logits.shape[0], rows))


def _cross_entropy(logits: Tensor, targets: Tensor, start: int) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(logits.dtype)
    lse = logits.new_empty(logits.shape[0], dtype=dtype)
    picked = torch.zeros_like(lse)
    if logits.shape[1] == 0:
        return lse.fill_(float("-inf")), picked
    for rows in _pieces(logits):
        wide = logits[rows].to(dtype)
        lse[rows] = wide.logsumexp(-1)
        local, inside = _local_targets(targets[rows], start, logits.shape[1])
        picked[rows] = wide.gather(1, local.unsqueeze(1)).squeeze(1) * inside
    return lse, picked


def _local_targets(targets: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    inside = (targets >= start) & (targets < start + count)
    return (targets - start).clamp(0, count - 1), inside


def _cross_entropy_backward(logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, start: int) -> Tensor:
    out = torch.empty_like(logits)
    if logits.shape[1] == 0:
        return out
    for rows in _pieces(logits):
        place = out[rows] if out.dtype == lse.dtype else None  # where no other type is needed, nothing beside the result is made
        probability = torch.sub(logits[rows], lse[rows].unsqueeze(1), out=place).exp_()
        local, inside = _local_targets(targets[rows], start, logits.shape[1])
        probability.scatter_add_(1, local.unsqueeze(1), -inside.to(lse.dtype).unsqueeze(1)).mul_(scale[rows].unsqueeze(1))
        if place is None:
            out[rows] = probability
    return out


def _cross_entropy_fake(logits: Tensor, targets: Tensor, start: int) -> tuple[Tensor, Tensor]:
    made = logits.new_empty(logits.shape[0], dtype=accumulate_dtype(logits.dtype))
    return made, torch.empty_like(made)


_operation("cross_entropy(Tensor logits, Tensor targets, int start) -> (Tensor, Tensor)", _cross_entropy, _cross_entropy_fake)
_operation(
    "cross_entropy_backward(Tensor logits, Tensor targets, Tensor lse, Tensor scale, int start) -> Tensor",
    _cross_entropy_backward,
    lambda logits, targets, lse, scale, start: logits.new_empty(logits.shape),
)

# -- attention ----------------------------------------------------------------------------------------------------------

_operation(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? q_document, Tensor? k_document, int[] q_spans, int[] k_spans, int window, int chunk, "
    "float scale) -> (Tensor, Tensor)",
    attend_forward,
    lambda q, k, v, *_: attend_shapes(q, v),
)
_operation(
    "attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? q_document, "
    "Tensor? k_document, int[] q_spans, int[] k_spans, int window, int chunk, float scale) -> (Tensor, Tensor, Tensor)",
    attend_backward,
    lambda grad, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)),
)

rms_norm = torch.ops.axisplan.rms_norm
rms_norm_backward = torch.ops.axisplan.rms_norm_backward
swiglu = torch.ops.axisplan.swiglu
swiglu_backward = torch.ops.axisplan.swiglu_backward
activate = torch.ops.axisplan.activate
activate_backward = torch.ops.axisplan.activate_backward
cross_entropy = torch.ops.axisplan.cross_entropy
cross_entropy_backward = torch.ops.axisplan.cross_entropy_backward
attend = torch.ops.axisplan.attend
attend_grad = torch.ops.axisplan.attend_backward
