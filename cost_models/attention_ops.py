"""Softmax attention: query-key pairs under masks and context parallelism, and the operations of MHA, GQA, MQA and MLA layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from cost_models.arrays import always_one, maximum, minimum, where
from cost_models.builder import Builder, Entry
from cost_models.layer_cost import LayerCost, Local
from profiles.model import Attention, LatentAttention
from profiles.operations import Attend, Matmul, Number, Pointwise

SCORE_FORWARD, SCORE_BACKWARD = 8, 14
"""Bytes a score read and written by unfused attention in 16 bits, matrix products' outputs and inputs included: forward write 2,
softmax 4, read 2; backward write 2, softmax 6, reads 6."""
DROPOUT_FORWARD, DROPOUT_BACKWARD = 5, 5
"""Dropout on the scores: read 2, write 2, mask 1."""


def causal_pairs(length: Number, window: int | None = None, chunk: int | None = None) -> Number:
    """Query-key pairs of the first ``length`` tokens of a causal sequence: each query sees itself and all earlier tokens, the last
    ``window`` of them, or those of its own ``chunk``."""
    if chunk is not None:
        full, rest = length // chunk, length % chunk
        return full * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2
    triangle = length * (length + 1) // 2
    if window is None:
        return triangle
    beyond = maximum(length - window, 0)
    inside = minimum(length, window)
    return inside * (inside + 1) // 2 + beyond * window


def rank_pairs(
    length: Number, parts: Number, *, balanced: bool = True, window: int | None = None, chunk: int | None = None
) -> Number:
    """Pairs of the busiest of ``parts`` context-parallel ranks that share one causal sequence of ``length`` tokens.

    ``balanced``: rank r owns blocks r and 2 parts - 1 - r of 2 parts blocks, which gives equal pairs under a plain causal mask;
    with a window the middle ranks have the most. Otherwise contiguous blocks, of which the last has the most. Chunked masks are
    counted rank by rank.
    """

    def between(first: Number, last: Number) -> Number:
        return causal_pairs(last, window, chunk) - causal_pairs(first, window, chunk)

    if chunk is not None and not always_one(parts):
        most: Any = 0
        for rank in range(int(np.max(parts))):
            if balanced:
                block = length // (2 * parts)
                mirror = length - rank * block
                pairs = between(rank * block, (rank + 1) * block) + between(mirror - block, mirror)
            else:
                block = length // parts
                pairs = between(rank * block, (rank + 1) * block)
            most = where(rank < parts, maximum(most, pairs), most)
        return most
    if balanced:
        block = length // (2 * parts)
        return where(parts == 1, between(0, length), between(length // 2 - block, length // 2 + block))
    return between(length - length // parts, length)


def packed_pairs(local: Local, ring: Number) -> Number:
    """Pairs of the busiest of ``ring`` ranks when sequences are packed from the job's documents."""
    from cost_models.packing import packing

    def one(parts: int) -> float:
        found = packing(local.job.documents, local.job.seq_len, parts, balanced=local.execution.cp_balanced)
        return found.pairs / parts * found.imbalance

    if isinstance(ring, np.ndarray):
        values, places = np.unique(ring, return_inverse=True)
        return np.array([one(int(v)) for v in values])[places.reshape(ring.shape)]
    return one(int(ring))


def attention_operations(local: Local, mixer: Attention, *, entry: Entry, post_norm: bool, leave: bool = True) -> LayerCost:
    """The attention block of one layer: norm, projections, attention, output projection, residual.

    Collectives: TP before and after (Shoeybi et al. 2019; with SP Korthikanti et al. 2022); context parallelism as ``cp_kind``
    says: ring passes of K and V (ring - 1 forward and backward; of their gradients ring), all-to-all of Q, K, V and of the output
    (DeepSpeed-Ulysses, arXiv:2309.14509), or an all-gather of K and V (Llama 3, arXiv:2407.21783 section 3.3.2).
    """
    model, execution, degrees = local.model, local.execution, local.degrees
    b = Builder(local, "attention")
    tokens, h, tp = local.tokens, model.hidden, degrees.tp
    heads, kv = mixer.heads // tp, maximum(mixer.kv_heads // tp, 1)
    query_width, kv_width = heads * mixer.head_dim, kv * mixer.head_dim
    value_width, output_width = kv * mixer.value_width, heads * mixer.value_width
    gate_width = output_width if mixer.output_gate else 0

    b.entry("attention", entry)
    columns = query_width + kv_width + value_width + gate_width
    if execution.fused_qkv:
        b.linear("qkv", tokens, columns, h)
    else:
        b.linear("q", tokens, query_width + gate_width, h)
        b.linear("k", tokens, kv_width, h)
        b.linear("v", tokens, value_width, h)
    if mixer.qk_norm != "none":
        for name, width, count in (("q_norm", query_width, heads), ("k_norm", kv_width, kv)):
            b.pointwise(name, 2 * tokens * width * local.bytes, 3 * tokens * width * local.bytes)
            b.keep(f"{name}_input", tokens * width * local.bytes)
            if execution.statistics:
                b.keep(f"{name}_statistics", 4 * tokens * (1 if mixer.qk_norm == "full" else count))
    if mixer.rotary:
        traffic = 2 * tokens * (query_width + kv_width) * local.bytes
        b.pointwise("rope", traffic, traffic, 2)
    _attend(b, heads, kv, mixer.head_dim, mixer.value_width, mixer.window, mixer.chunk)
    if mixer.output_gate:
        b.keep("output_gate", tokens * gate_width * local.bytes)
        b.pointwise("output_gate", 3 * tokens * gate_width * local.bytes, 5 * tokens * gate_width * local.bytes)
        b.keep("gated_output", tokens * output_width * local.bytes, weight=True)
    b.linear_input("projection_input", tokens * output_width, kept=True)
    b.linear("projection", tokens, h, output_width)
    size = tokens * local.bytes
    core = size * (output_width + query_width + kv_width + value_width)
    core = core + _score_transient(b, heads) + _ring_transient(b, heads, kv, mixer.head_dim, mixer.value_width)
    products = 1 if execution.fused_qkv else 3
    gradients = b.backward_peak(
        (size * (query_width + kv_width + value_width), h * (columns if execution.fused_qkv else query_width)),
        core,
        (size * output_width, h * output_width),
        products=products,
        free=size * (query_width + kv_width + value_width + output_width),
        done=size * value_width,
    )
    return b.residual("attention", post_norm=post_norm, gradients=gradients, reduce=leave)


def latent_attention_operations(local: Local, mixer: LatentAttention, *, entry: Entry, post_norm: bool) -> LayerCost:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 section 2.1), K and V expanded to all heads for training.

    Down-projections are replicated over TP and run on the rank's own tokens; the up-projections are split by heads.
    """
    model, degrees = local.model, local.degrees
    b = Builder(local, "attention")
    tokens, split, h = local.tokens, local.split_tokens, model.hidden
    heads = mixer.heads // degrees.tp
    b.entry("attention", entry, parallel=False)
    latent = mixer.kv_rank + mixer.rope_dim
    together = local.execution.keeps_gathered_input
    if mixer.q_rank:
        b.linear("q_down", split, mixer.q_rank, h)
        b.norm("q_latent_norm", split, mixer.q_rank, output=not together)
    b.linear("kv_down", split, latent, h)
    b.norm("kv_latent_norm", split, mixer.kv_rank, output=not together)
    entering = (mixer.q_rank or h) + latent
    b.enter_tensor_parallel("latent_in", tokens * entering)
    if together:
        b.keep("latent_input", tokens * entering * local.input_bytes, weight=True)
    b.linear("q_up", tokens, heads * mixer.head_dim, mixer.q_rank or h)
    b.linear("kv_up", tokens, heads * (mixer.nope_dim + mixer.value_dim), mixer.kv_rank)
    traffic = 2 * tokens * heads * (mixer.head_dim + mixer.head_dim) * local.bytes
    b.pointwise("rope", traffic, traffic, 3)
    _attend(b, heads, heads, mixer.head_dim, mixer.value_dim, mixer.window, None)
    b.linear_input("projection_input", tokens * heads * mixer.value_dim, kept=True)
    b.linear("projection", tokens, h, heads * mixer.value_dim)
    size = tokens * heads * local.bytes
    inner = size * (2 * mixer.head_dim + mixer.value_dim)
    core = inner + size * mixer.value_dim + _score_transient(b, heads)
    core = core + _ring_transient(b, heads, heads, mixer.head_dim, mixer.value_dim)
    output = heads * mixer.value_dim
    last = (size * mixer.value_dim, h * output)
    gradients = b.backward_peak((inner, 0), core, last, products=0, free=inner + size * mixer.value_dim)
    return b.residual("attention", post_norm=post_norm, gradients=gradients)


def _attend(b: Builder, heads: Number, kv: Number, qk_dim: int, v_dim: int, window: int | None, chunk: int | None) -> None:
    """Context-parallel exchange, attention itself, what it keeps, and the exchange of its output."""
    local, execution, degrees = b.local, b.local.execution, b.local.degrees
    tokens, size, ring, ulysses = local.tokens, local.bytes, degrees.ring, degrees.ulysses
    kept_kv = heads if execution.kv_repeated else kv
    if execution.kv_repeated:
        traffic = tokens * (kv + heads) * (qk_dim + v_dim) * size
        b.pointwise("repeat_kv", traffic, traffic, 2)

    # Ulysses: tokens are exchanged for heads. A rank keeps at least one KV head, so few KV heads are sent repeatedly.
    sent_kv = maximum(kept_kv, ulysses)
    query, keys, output = tokens * heads * qk_dim * size, tokens * sent_kv * (qk_dim + v_dim) * size, tokens * heads * v_dim * size
    b.collective("forward", "all_to_all", "ulysses", query + keys, "ulysses_qkv")
    b.collective("backward_input", "all_to_all", "ulysses", query + keys, "ulysses_qkv")

    # Ring or gather: K and V of the other ranks' tokens, for the heads this rank now holds.
    block = keys
    gathered = degrees.cp_kind == "allgather"
    if gathered:
        b.collective("forward", "all_gather", "ring", block * ring, "gather_kv")
        if not execution.gathered_kv_kept:
            b.collective("backward_input", "all_gather", "ring", block * ring, "gather_kv")
        b.collective("backward_input", "reduce_scatter", "ring", block * ring, "scatter_kv_gradient")
    else:
        b.collective("forward", "send_recv", "ring", block, "ring_kv", ring - 1)
        b.collective("backward_input", "send_recv", "ring", block, "ring_kv", ring - 1)
        gradient = block * execution.ring_gradient_bytes / 2
        b.collective("backward_input", "send_recv", "ring", gradient, "ring_kv_gradient", ring)

    local_heads, local_kv = heads // ulysses, maximum(kept_kv // ulysses, 1)
    queries = local.job.seq_len // ring
    batch = degrees.micro_batch
    b.keep("query", tokens * heads * qk_dim * size)
    b.keep("key_value", keys * (ring if gathered and execution.gathered_kv_kept else 1))
    if execution.unfused:
        _unfused(b, batch, local_heads, queries, qk_dim, v_dim)
    else:
        visible = local.job.seq_len
        if local.job.documents:
            pairs = packed_pairs(local, ring)
        elif execution.causal_skip:
            pairs = rank_pairs(visible, ring, balanced=execution.cp_balanced, window=window, chunk=chunk)
        else:
            pairs = queries * visible
        b.attend(Attend(batch, local_heads, local_kv, queries, visible, qk_dim, v_dim, pairs, local.dtype, name="core_attention"))
        if execution.statistics:
            b.keep("log_sum_exp", 4 * tokens * heads)
    b.keep("attention_output", output, weight=True)
    if execution.ulysses_keeps_output and not always_one(ulysses):
        b.keep("attention_output_exchanged", output * where(ulysses > 1, 1, 0), weight=True)
    b.collective("forward", "all_to_all", "ulysses", output, "ulysses_output")
    b.collective("backward_input", "all_to_all", "ulysses", output, "ulysses_output")


def _score_transient(b: Builder, heads: Number) -> Number:
    """Bytes of scores alive for a moment in unfused attention (all of b a s^2 at once)."""
    local, execution, degrees = b.local, b.local.execution, b.local.degrees
    if not execution.unfused:
        return 0
    queries, keys = local.job.seq_len // degrees.ring, local.job.seq_len
    return execution.score_bytes * degrees.micro_batch * (heads // degrees.ulysses) * queries * keys


def _ring_transient(b: Builder, heads: Number, kv: Number, qk_dim: int, v_dim: int) -> Number:
    """Blocks of K and V that a ring holds beside its own (``ring_buffers``), two of their gradients, and what a wide sum of the
    query's gradient takes; or the gathered K and V with their gradients."""
    local, degrees, execution = b.local, b.local.degrees, b.local.execution
    block = local.tokens * maximum(kv, degrees.ulysses) * (qk_dim + v_dim) * local.bytes
    if degrees.cp_kind == "allgather":
        return where(degrees.ring > 1, 2 * degrees.ring * block, 0)
    wide = execution.ring_gradient_bytes / 2
    query = local.tokens * heads * qk_dim * local.bytes * (wide - 1)
    return where(degrees.ring > 1, (execution.ring_buffers + 2 * wide) * block + query, 0)


def _unfused(b: Builder, batch: Number, heads: Number, queries: Number, qk_dim: int, v_dim: int) -> None:
    """Attention as two batched products and a softmax over all s x s scores. Keeps 2 bytes of probabilities a score, and with
    dropout a mask of 1 and the dropped probabilities of 2: the 5 a s^2 b of Korthikanti et al. 2022, section 4.1."""
    local, keys, products = b.local, b.local.job.seq_len, batch * heads
    scores = products * queries * keys
    dropout = local.execution.attention_dropout
    scale = local.bytes / 2
    b.only_forward(
        Matmul(queries, keys, qk_dim, local.dtype, products, "scores"),
        Pointwise((SCORE_FORWARD + DROPOUT_FORWARD * dropout) * scores * scale, 3, "softmax"),
        Matmul(queries, v_dim, keys, local.dtype, products, "context"),
    )
    b.only_backward_input(
        Matmul(keys, v_dim, queries, local.dtype, products, "value_gradient"),
        Matmul(queries, keys, v_dim, local.dtype, products, "probability_gradient"),
        Pointwise((SCORE_BACKWARD + DROPOUT_BACKWARD * dropout) * scores * scale, 3, "softmax"),
        Matmul(queries, qk_dim, keys, local.dtype, products, "query_gradient"),
        Matmul(keys, qk_dim, queries, local.dtype, products, "key_gradient"),
    )
    b.keep("probabilities", scores * local.bytes)
    if dropout:
        b.keep("attention_mask", scores)
        b.keep("dropped_probabilities", scores * local.bytes)
