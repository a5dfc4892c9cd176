"""Logits that take too much: whether the loss is better computed in chunks, and saying so.

One microbatch's logits (tokens x vocabulary / tp, with what the loss keeps beside them) exist at once on the last stage. In chunks of
``CHUNK`` tokens they take ``CHUNK / tokens`` of it, for smaller products and a weight gradient that is written with every chunk.
"""

from __future__ import annotations

from dataclasses import replace

from cost_models.head_ops import vocab_rows
from cost_models.job import GIB, Job
from cost_models.layer_cost import Local
from cost_models.layout import Layout

CHUNK = 1024
"""Tokens of a chunk (cases.md A19: 4.637 GiB at 8,192 tokens of a 152k vocabulary, 0.580 GiB in chunks of 1,024)."""
MOST = 0.10
"""Share of the memory a rank may use above which logits are chunked."""


def logit_bytes(job: Job, layout: Layout) -> float:
    """Bytes of a microbatch's logits at the loss's peak on one rank of the last stage."""
    local, execution = Local(job, layout), job.execution
    tokens = min(int(local.tokens), execution.loss_chunk_tokens or int(local.tokens))
    return float(execution.logit_peak_bytes * local.bytes / 2 * tokens * vocab_rows(local))


def chunked(job: Job, layout: Layout) -> tuple[Job, str]:
    """(the job with a chunked loss, or as it is where that is not wanted or the framework cannot; what to say of it, or nothing)."""
    whole = logit_bytes(job, layout)
    if job.execution.loss_chunk_tokens or whole <= MOST * job.limit_bytes or Local(job, layout).tokens <= CHUNK:
        return job, ""
    small = replace(job, execution=job.execution.with_(loss_chunk_tokens=CHUNK))
    of = f"whole logits take {whole / GIB:.1f} GiB, {whole / job.limit_bytes:.0%} of the memory a rank may use"
    if job.execution.chunks_loss:
        return small, f"the loss is computed in chunks of {CHUNK} tokens: {of}"
    return job, (
        f"{of}; a loss in chunks of {CHUNK} tokens would take {logit_bytes(small, layout) / GIB:.1f} GiB, which {job.execution.name}"
        " does not say it has (--set execution.chunks_loss=true)"
    )
