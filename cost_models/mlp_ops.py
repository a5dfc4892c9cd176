"""The dense feed-forward: gated or plain, split over TP by its inner width."""

from __future__ import annotations

from cost_models.builder import Builder, Entry
from cost_models.layer_cost import LayerCost, Local
from profiles.model import Mlp
from profiles.operations import Number


def mlp_operations(local: Local, ffn: Mlp, *, entry: Entry, post_norm: bool) -> LayerCost:
    """Norm, up (and gate) projection, activation, down projection, residual (Shoeybi et al. 2019, section 3)."""
    b = Builder(local, "mlp")
    b.entry("mlp", entry)
    width = ffn.width // local.degrees.tp
    projections(b, "mlp", local.tokens, local.model.hidden, width, gated=ffn.gated)
    inner, h = local.tokens * width * local.bytes, local.model.hidden
    up = 2 if ffn.gated else 1
    core = activation_gradients(local, local.tokens, width, gated=ffn.gated)
    pieces = 1 if local.execution.fused_gate_up else up
    weight = width * h
    gradients = b.backward_peak(
        (up * inner, weight * up // pieces), core, (inner, weight), products=pieces, free=(up + 1) * inner, done=inner
    )
    return b.residual("mlp", post_norm=post_norm, gradients=gradients)


def projections(b: Builder, name: str, tokens: Number, h: int, width: Number, *, gated: bool) -> None:
    """Up, activation, down on ``tokens`` rows, and what they keep. Bytes of the activation: gated reads two and writes one element
    (backward reads three, writes two); plain reads and writes one (backward reads two, writes one)."""
    execution = b.local.execution
    up = 2 * width if gated else width
    b.linear(f"{name}_up", tokens, up, h, pieces=1 if execution.fused_gate_up or not gated else 2)
    activation(b, name, tokens * width, gated=gated)
    b.linear(f"{name}_down", tokens, h, width)


def activation_gradients(local: Local, rows: Number, width: Number, *, gated: bool) -> Number:
    """Bytes beyond the kept ones at the activation's backward: gradients of product, gate and up, the product itself being free
    since the down projection's backward. Plain: gradients of product and hidden, less the product."""
    return rows * width * (2 if gated else 1) * local.bytes


def activation(b: Builder, name: str, elements: Number, *, gated: bool) -> None:
    """The activation over ``elements`` inner elements: its traffic and what it keeps. The kept product is the down projection's
    input; an eager gate keeps act(gate) as well; a compiled one recomputes the product from gate and up."""
    local, execution = b.local, b.local.execution
    size = elements * local.bytes
    b.pointwise(f"{name}_activation", (3 if gated else 2) * size, (5 if gated else 3) * size)
    b.keep(f"{name}_hidden", (2 if gated else 1) * size)
    if gated and execution.elementwise == "eager":
        b.keep(f"{name}_gate_output", size)
    if execution.elementwise != "compiled":
        b.keep(f"{name}_product", elements * local.input_bytes, weight=True, module=f"{name}_product")
