"""The two ends of the model: embedding, and final norm with head and loss."""

from __future__ import annotations

from cost_models.arrays import ceil_div, maximum, minimum, where
from cost_models.builder import Builder
from cost_models.layer_cost import LayerCost, Local
from profiles.operations import Matmul, Number, Pointwise


def vocab_rows(local: Local) -> Number:
    """Rows of the (padded) vocabulary on one rank."""
    if not local.execution.vocab_parallel:
        return local.model.vocab
    multiple = local.execution.vocab_multiple
    return ceil_div(local.model.vocab, multiple * local.degrees.tp) * multiple


def embedding_operations(local: Local) -> LayerCost:
    """Lookup of token rows split over TP by vocabulary, the reduction of its partial sums, dropout, an optional norm.

    ``transient``: the gradients of its output and of its weight."""
    model, execution = local.model, local.execution
    b = Builder(local, "embedding")
    width = model.embedding_width or model.hidden
    size = local.tokens * width * local.bytes
    b.forward.append(Pointwise(2 * size, 1, "embedding"))
    b.weight_pass("embedding", 3 * size)
    gradients = (
        size + where(local.sp > 1, local.split_tokens * width * local.bytes, 0) + b.weight_gradient(vocab_rows(local) * width)
    )
    masked = where(local.degrees.tp > 1, 1, 0) if execution.vocab_parallel else 0
    if local.job.trains("embedding"):
        b.keep("token_ids", (8 + masked) * local.tokens)
    if execution.vocab_parallel:
        b.leave_tensor_parallel("embedding_out", local.tokens * width, reached=local.job.trains("embedding"))
    if model.learned_positions:
        b.pointwise("positions", 2 * local.split_tokens * width * local.bytes, local.split_tokens * width * local.bytes)
    if model.embedding_width:
        b.linear("embedding_projection", local.split_tokens, model.hidden, width)
        b.keep("embedding_projection_input", local.split_tokens * width * local.bytes, weight=True)
    if model.embedding_norm:
        b.norm("embedding_norm", local.split_tokens, model.hidden, output=False)
    if execution.hidden_dropout:
        elements = local.split_tokens * model.hidden
        b.pointwise("embedding_dropout", 5 * elements, 5 * elements)
        b.keep("embedding_dropout_mask", elements)
    return b.done(transient=gradients)


def head_operations(local: Local) -> LayerCost:
    """Final norm, output projection and cross entropy. With the vocabulary split over TP the loss reduces three fp32 numbers a
    token (maximum, target logit, sum of exponentials; Shoeybi et al. 2019, section 3).

    ``transient``, beyond the kept logits: the loss's own copies, or at the weight gradient the input's gradient, the input gathered
    again under SP, and the fresh weight gradient."""
    model, execution = local.model, local.execution
    b = Builder(local, "head")
    tokens, h, rows = local.tokens, model.hidden, vocab_rows(local)
    if model.final_norm:
        b.norm("final_norm", local.split_tokens, h, output=True, gathered=local.tokens if execution.keeps_gathered_input else None)
    else:
        b.linear_input("head_input", (local.tokens if execution.keeps_gathered_input else local.split_tokens) * h, kept=False)
    width = model.embedding_width or h
    if model.embedding_width:
        b.linear("head_projection", local.split_tokens, width, h)
        b.keep("head_projection_output", local.split_tokens * width * local.bytes, weight=True)
    if execution.vocab_parallel:
        b.enter_tensor_parallel("head_in", tokens * width)
    if execution.loss_chunk_tokens:
        _chunked_head(b, tokens, rows, width)
    else:
        b.linear("head", tokens, rows, width, dtype=local.dtype)
    logits = tokens * rows
    scale = local.bytes / 2
    b.pointwise("loss", execution.logit_forward_traffic * logits * scale, execution.logit_backward_traffic * logits * scale, 3)
    if execution.vocab_parallel:
        b.collective("forward", "all_reduce", "tp", 4 * tokens, "loss", 3 if execution.loss_reductions == 3 else 1)
        if execution.loss_reductions == 2:
            b.collective("forward", "all_reduce", "tp", 8 * tokens, "loss")
    alive = minimum(tokens, execution.loss_chunk_tokens) if execution.loss_chunk_tokens else tokens
    if execution.statistics:
        b.keep("loss_statistics", 12 * tokens)
    if not execution.loss_chunk_tokens:
        b.keep("logits", execution.logit_saved_bytes * logits * scale)
    else:
        b.keep("head_input_gradient", local.split_tokens * width * local.bytes)
    beyond = execution.logit_peak_bytes - (0 if execution.loss_chunk_tokens else execution.logit_saved_bytes)
    regathered = 0 if execution.keeps_gathered_input else where(local.degrees.sp, tokens, 0)
    gradients = (tokens + regathered) * width * local.bytes + execution.weight_gradient_bytes * scale * rows * width
    return b.done(local.split_tokens * h * local.bytes, maximum(beyond * alive * rows * scale, gradients))


def _chunked_head(b: Builder, tokens: Number, rows: Number, width: int) -> None:
    """The output projection over chunks of ``loss_chunk_tokens``, each with its loss and both gradients before the next: as many FLOPs in
    smaller products, and a weight gradient that is read and written again with every chunk."""
    local, execution = b.local, b.local.execution
    chunk = minimum(tokens, execution.loss_chunk_tokens)
    count = ceil_div(tokens, chunk)
    part, dtype = tokens / count, local.dtype
    b.only_forward(Matmul(part, rows, width, dtype, count, "head"))
    b.only_backward_input(Matmul(part, width, rows, dtype, count, "head"))
    if local.job.trains("head"):
        b.weight_pass("head.accumulate", (count - 1) * (4 + local.bytes) * rows * width)
        b.weight_product(Matmul(width, rows, part, dtype, count, "head", weight_gradient=True))
