"""Mixers without softmax: state-space blocks (Mamba) and linear attention, split over TP by heads.

The scan is counted as the chunked matrix form runs it: within chunks of ``CHUNK`` tokens as attention, between chunks through
the state (Mamba-2, arXiv:2405.21060 section 6; gated delta rule, arXiv:2412.06464 section 3). Context parallelism exchanges
tokens for heads around the scan.
"""

from __future__ import annotations

from cost_models.arrays import maximum
from cost_models.builder import Builder, Entry
from cost_models.layer_cost import LayerCost, Local
from profiles.model import LinearAttention, StateSpace
from profiles.operations import Matmul, Number, Pointwise

CHUNK = {"state_space": 256, "gated_delta": 64, "lightning": 256}
"""Tokens of a chunk in the released kernels (mamba_ssm, flash-linear-attention, lightning attention)."""


def state_space_operations(local: Local, mixer: StateSpace, *, entry: Entry, post_norm: bool, leave: bool = True) -> LayerCost:
    """Mamba-1 or Mamba-2: in_proj, short convolution, scan, gated norm, out_proj."""
    model, tp = local.model, local.degrees.tp
    b = Builder(local, "state_space")
    tokens, h, size = local.tokens, model.hidden, local.bytes
    heads = maximum(mixer.heads // tp, 1)
    inner, groups = heads * mixer.head_dim, maximum(mixer.groups // tp, 1)
    b.entry("ssm", entry)
    if mixer.version == 1:
        b.linear("in_proj", tokens, 2 * inner, h)
        mixed = inner
    else:
        mixed = inner + 2 * groups * mixer.state
        b.linear("in_proj", tokens, inner + mixed + heads, h)
    b.pointwise("convolution", 2 * tokens * mixed * size, 3 * tokens * mixed * size)
    b.keep("convolution_input", tokens * mixed * size)
    b.keep("convolution_output", tokens * mixed * size)
    b.keep("gate", tokens * inner * size)
    if mixer.version == 1:
        small = mixer.dt_rank + 2 * mixer.state
        b.linear("x_proj", tokens, small, inner)
        b.linear("dt_proj", tokens, inner, mixer.dt_rank)
        b.keep("step_sizes", tokens * (inner + small) * size)
        traffic = tokens * inner * size * 5
        b.pointwise("scan", traffic, 2 * traffic)
        for phase in ("forward", "backward_input"):
            b.collective(phase, "all_reduce", "tp", tokens * small * size, "x_proj")
    else:
        b.keep("step_sizes", 4 * tokens * heads)
        _chunked_scan(b, "scan", tokens, groups, mixer.state, heads, mixer.head_dim, CHUNK["state_space"])
    _exchange(b, mixed, inner)
    b.keep("scan_output", tokens * inner * size)
    b.pointwise("scan_gate", 4 * tokens * inner * size, 6 * tokens * inner * size)
    b.keep("scan_gated", tokens * inner * local.input_bytes, weight=True)
    b.linear("out_proj", tokens, h, inner)
    return b.residual("ssm", post_norm=post_norm, gradients=b.gradients(tokens * (mixed + 3 * inner) * size), reduce=leave)


def linear_attention_operations(
    local: Local, mixer: LinearAttention, *, entry: Entry, post_norm: bool, leave: bool = True
) -> LayerCost:
    """Gated delta rule (Qwen3-Next) or lightning attention (MiniMax-01)."""
    model, tp = local.model, local.degrees.tp
    b = Builder(local, "state_space")
    tokens, h, size = local.tokens, model.hidden, local.bytes
    key_heads, value_heads = maximum(mixer.key_heads // tp, 1), maximum(mixer.value_heads // tp, 1)
    key, value = key_heads * mixer.key_dim, value_heads * mixer.value_dim
    mixed = 2 * key + value
    b.entry("ssm", entry)
    b.linear("in_proj", tokens, mixed + value, h)
    if mixer.form == "gated_delta":
        b.linear("step_proj", tokens, 2 * value_heads, h)
        b.pointwise("convolution", 2 * tokens * mixed * size, 3 * tokens * mixed * size)
        b.keep("convolution_input", tokens * mixed * size)
        b.keep("step_sizes", 8 * tokens * value_heads)
    b.keep("convolution_output", tokens * mixed * size)
    b.keep("gate", tokens * value * size)
    delta = mixer.form == "gated_delta"
    _chunked_scan(b, "scan", tokens, value_heads, mixer.key_dim, value_heads, mixer.value_dim, CHUNK[mixer.form], delta=delta)
    _exchange(b, mixed, value)
    b.keep("scan_output", tokens * value * size)
    b.pointwise("scan_gate", 4 * tokens * value * size, 6 * tokens * value * size)
    b.keep("scan_gated", tokens * value * local.input_bytes, weight=True)
    b.linear("out_proj", tokens, h, value)
    return b.residual("ssm", post_norm=post_norm, gradients=b.gradients(tokens * (mixed + 3 * value) * size), reduce=leave)


def _exchange(b: Builder, entering: Number, leaving: Number) -> None:
    """Tokens for heads and back, over all of cp."""
    tokens, size = b.local.tokens, b.local.bytes
    for phase in ("forward", "backward_input"):
        b.collective(phase, "all_to_all", "cp", tokens * entering * size, "scan_exchange")
        b.collective(phase, "all_to_all", "cp", tokens * leaving * size, "scan_exchange")


def _chunked_scan(
    b: Builder, name: str, tokens: Number, groups: Number, state: int, heads: Number, width: int, chunk: int, *, delta: bool = False
) -> None:
    """Within chunks: C B^T per group and its product with the values per head (causal half); between: states in and out. The
    ``delta`` rule corrects what it writes: K K^T, its triangular inverse applied to keys and values, and the corrected keys' read of the
    state (the UT transform of arXiv:2412.06464, section 3.3)."""
    local = b.local
    chunks = tokens / chunk
    products: tuple[Matmul, ...] = (
        Matmul(chunk, chunk / 2, state, local.dtype, chunks * groups, name),
        Matmul(chunk, width, chunk / 2, local.dtype, chunks * heads, name),
        Matmul(state, width, chunk, local.dtype, chunks * heads, name),
        Matmul(chunk, width, state, local.dtype, chunks * heads, name),
    )
    if delta:
        products += (
            Matmul(chunk, chunk / 2, state, local.dtype, chunks * heads, name),
            Matmul(chunk, state, chunk / 2, local.dtype, chunks * heads, name),
            Matmul(chunk, width, chunk / 2, local.dtype, chunks * heads, name),
            Matmul(chunk, width, state, local.dtype, chunks * heads, name),
        )
    traffic = tokens * (2 * groups * state + 2 * heads * width) * local.bytes
    b.only_forward(*products, Pointwise(traffic, 3, name))
    b.only_backward_input(*products, *products, Pointwise(3 * traffic, 5, name))
