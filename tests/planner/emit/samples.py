"""Random legal layouts of an execution, for real parsers to judge."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from cost_models.job import Job
from cost_models.layout import Layout, divisors, even_split
from planner.legality import RULES, limits_of
from planner.rules.core import Case


def legal(job: Job, layout: Layout) -> bool:
    case = Case(job, layout, limits_of(job))
    return not any(rule.breaks(case) for rule in RULES.values())


def layouts(job: Job, seed: int, tries: int = 200_000) -> Iterator[Layout]:
    """Endless legal layouts, each once; degrees drawn from the divisors of the world."""
    draw, seen = random.Random(seed), set[Layout]()
    for _ in range(tries):
        layout = one(job, draw)
        if layout is not None and layout not in seen and legal(job, layout):
            seen.add(layout)
            yield layout


def one(job: Job, draw: random.Random) -> Layout | None:
    limits, world, layers, moe = limits_of(job), job.cluster.gpus, job.model.num_layers, job.model.moe
    axes = limits.axes
    tp = draw.choice([d for d in divisors(world) if d <= 16]) if "tp" in axes else 1
    pp = draw.choice([d for d in divisors(world // tp) if d <= 16]) if "pp" in axes else 1
    cp = draw.choice([1, 1, 1, *(d for d in divisors(world // tp // pp) if d <= 8)]) if "cp" in axes else 1
    dp = world // tp // pp // cp
    replicate = draw.choice([1, 1, *divisors(dp)]) if "dp_replicate" in axes else 1
    schedule = draw.choice([s for s in limits.schedules if s not in limits.costed]) if pp > 1 else "1f1b"
    vpp = draw.choice((2, 3, 4)) if schedule == "interleaved" else 2 if schedule in ("zb-v", "dualpipe-v") else 1
    if pp * vpp > layers:
        return None
    zero = draw.choice(limits.zero)
    ep = draw.choice(divisors(moe.experts)) if moe is not None and "ep" in axes else 1
    etp = draw.choice((1, 1, 1, tp)) if moe is not None and "etp" in axes else 1
    changes: dict[str, Any] = {
        "tp": tp, "pp": pp, "cp": cp, "dp_replicate": replicate, "dp_shard": dp // replicate, "zero": zero, "schedule": schedule,
        "vpp": vpp, "ep": ep, "etp": etp,
        "sp": tp > 1 and limits.sequence_parallel, "micro_batch": draw.choice((1, 1, 2)), "order": draw.choice(limits.orders),
    }  # fmt: skip
    if cp > 1:
        kinds = [k for k in limits.cp_kinds if k != "hybrid"] + [
            f"ring{r}xulysses{cp // r}" for r in divisors(cp)[1:-1] if "hybrid" in limits.cp_kinds
        ]
        changes["cp_kind"] = draw.choice(kinds)
    if pp > 1 and limits.uneven_stages and draw.random() < 0.4:
        changes["stages"] = uneven(layers, pp * vpp, draw)
    changes["recompute"] = recompute(job, draw, changes)
    if "optimizer" in limits.offload and zero and draw.random() < 0.1:
        changes["offload"] = ("optimizer",)
    if moe is not None and ep > 1:
        changes["dispatcher"] = draw.choice(limits.dispatchers)
    return Layout(**changes)


def uneven(layers: int, chunks: int, draw: random.Random) -> tuple[int, ...]:
    counts = list(even_split(layers, chunks))
    for _ in range(draw.randint(1, 3)):
        source, to = draw.randrange(chunks), draw.randrange(chunks)
        if counts[source] > 1:
            counts[source] -= 1
            counts[to] += 1
    return tuple(counts)


def recompute(job: Job, draw: random.Random, changes: dict[str, Any]) -> str:
    limits = limits_of(job)
    mode = draw.choice((*limits.recompute_modes, "block"))
    if mode == "block":
        if limits.recompute != "block":
            return "none"
        n, start, parts = draw.randint(1, 2), 0, []
        for count in changes.get("stages") or even_split(job.model.num_layers, changes["pp"] * changes["vpp"]):
            first = min(n, count)
            parts.append(f"{start}-{start + first - 1}:full")
            start += count
        return "/".join(parts)
    if mode == "selective":
        return f"selective({draw.choice([m for m in limits.modules if m in MODULES_EVERYWHERE])})" if limits.modules else "none"
    return str(mode)


MODULES_EVERYWHERE = ("core_attn", "layernorm", "mlp", "op")
"""Modules that every model has."""
