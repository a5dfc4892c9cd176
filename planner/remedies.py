"""What would help: the smallest change that fits when nothing does, and the documents' remedies for what binds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cost_models.job import GIB, Job
from cost_models.layout import Layout
from cost_models.memory import fits as memory_fits
from planner.books import Outcome
from planner.legality import binding_category, violations
from planner.search import Search
from planner.space import Space, read_wishes
from profiles.errors import InputError

if TYPE_CHECKING:
    from planner.solve import PlanRequest

REMEDIES = {
    "activations": "fewer activations at once: a smaller micro batch (data parallelism divides a fixed batch), then recompute, sequence or"
    " context parallelism",
    "parameters": "split the layers over a pipeline; ZeRO-3 shards parameters over data-parallel ranks",
    "gradients": "split the layers over a pipeline; ZeRO-2 shards gradients over data-parallel ranks",
    "optimizer": "shard the optimizer (ZeRO-1) over more data-parallel ranks, or offload it to host memory",
    "temporary": "one layer or its logits are too large at once: tensor parallelism, a smaller micro batch, a chunked loss",
    "communication": "fewer axes: each communicator keeps buffers of its own",
    "initialisation": "build the model in place (meta device, lazy initialisation), so that a rank never holds more than its part",
    "experts": "expert parallelism: spread the experts over more ranks",
}
"""Documents' remedies by memory category (document A, the decision guide)."""
MOST_DOUBLINGS = 8


def does_not_fit(request: PlanRequest, search: Search, outcome: Outcome) -> str:
    """One line: what binds, on which stage, by how much, and the smallest changes that fit. Never a time."""
    job = request.job
    layout, stage = search.leanest()
    over = stage.needed - job.limit_bytes
    category = binding_category(stage)
    changes = smallest_changes(request)
    tail = (
        f"; would fit: {'; '.join(changes)}"
        if changes
        else "; no single change of GPUs, offload or sequence length was found to fit"
    )
    unexplored = outcome.books.unexplored
    found = f"no feasible layout found ({unexplored:,} columns unexplored)" if unexplored else "no feasible layout"
    return (
        f"{found}: {job.model.name} on {job.cluster.gpus} x {job.cluster.gpu.name} ({outcome.books.legal} legal columns) needs"
        f" {stage.needed / GIB:.1f} GiB on stage {stage.stage} of the leanest one ({layout}), {over / GIB:.1f} GiB more than the"
        f" {job.limit_bytes / GIB:.1f} GiB allowed; {category} binds{tail}"
    )


def smallest_changes(request: PlanRequest) -> list[str]:
    """Single changes after which something fits, the smallest of each kind."""
    out = []
    if not request.offload and fits(replace(request, offload=True)):
        out.append("optimizer offload to host memory (--allow-offload)")
    gpus = more_gpus(request)
    if gpus is not None:
        out.append(f"{gpus} GPUs of this kind")
    seq = request.job.seq_len
    while seq > 512:
        seq //= 2
        if fits(replace(request, job=replace(request.job, seq_len=seq))):
            out.append(f"sequences of {seq} tokens")
            break
    return out


def layout_changes(job: Job, layout: Layout) -> list[str]:
    """Changes of one key of a layout that does not fit after which it does, the smallest of each kind."""
    smaller = [m for m in range(layout.micro_batch - 1, 0, -1) if job.global_batch % (m * layout.dp) == 0]
    choices: tuple[tuple[str, list[Any]], ...] = (
        ("micro_batch", smaller), ("recompute", ["full"]), ("zero", list(range(layout.zero + 1, 4))), ("offload", [("optimizer",)]),
    )  # fmt: skip
    out = []
    for key, values in choices:
        for value in values:
            changed = layout.with_(**{key: value})
            if changed != layout and not violations(job, changed) and memory_fits(job, changed)[0]:
                out.append(f"{key}={value[0] if isinstance(value, tuple) else value}")
                break
    return out


def more_gpus(request: PlanRequest) -> int | None:
    """The fewest doublings of the cluster on which something fits."""
    job = request.job
    if getattr(job.cluster, "pools", ()):
        return None
    gpus = job.cluster.gpus
    for _ in range(MOST_DOUBLINGS):
        gpus *= 2
        try:
            cluster = job.cluster.with_gpus(gpus)
        except InputError:
            continue
        if fits(replace(request, job=replace(job, cluster=cluster))):
            return gpus
    return None


def fits(request: PlanRequest) -> bool:
    """Whether some layout of the request fits (the leanest rows are tried)."""
    job = request.job
    try:
        space = Space(job, read_wishes(request.pins), [read_wishes(e) for e in request.exclude], offload=request.offload)
        search = Search(job, space)
        return search.anything_fits()
    except InputError:
        return False
