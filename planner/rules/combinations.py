"""Rules of the target that forbid features only together; the data is ``excluded`` in ``planner/data/limits.yaml``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from planner.rules.core import Break, Case, rule

TERMS: dict[str, tuple[str, Callable[[Case], bool]]] = {
    "tp": ("tp", lambda c: c.layout.tp > 1),
    "cp": ("cp", lambda c: c.layout.cp > 1),
    "ep": ("ep", lambda c: c.layout.ep > 1),
    "ep1": ("ep", lambda c: c.layout.ep == 1),
    "replicated": ("dp_replicate", lambda c: c.layout.dp_replicate > 1),
    "sharded": ("zero", lambda c: c.layout.zero > 0),
    "unsharded": ("dp_shard", lambda c: c.layout.dp_shard * c.layout.cp == 1),
    "shards": ("dp_shard", lambda c: c.layout.zero > 0 and c.layout.dp_shard * c.layout.cp > 1),
    "on_cpus": ("cluster", lambda c: c.job.cluster.gpu.is_host),
    "zero0": ("zero", lambda c: c.layout.zero == 0),
    "zero3": ("zero", lambda c: c.layout.zero == 3),
    "offload": ("offload", lambda c: bool(c.layout.offload)),
    "moe": ("model", lambda c: c.job.model.moe is not None),
}
"""What a combination may name: the field to blame, and when it holds."""


@rule("target", "tp cp ep dp_replicate dp_shard zero offload", "the target has these features together",
      lambda _, limits: bool(limits.excluded))  # fmt: skip
def combination_is_expressible(case: Case) -> Iterator[Break]:
    for entry in case.limits.excluded:
        if all(TERMS[name][1](case) for name in entry["with"]):
            field = TERMS[entry["with"][0]][0]
            value = getattr(case.layout, field)
            shown = "+".join(value) if field == "offload" else value
            repairs: tuple[Any, ...] | None = (
                {"offload": ("none",), "dp_shard": (1,)}.get(field) if entry["with"][0] != "unsharded" else None
            )
            yield Break(field, shown, f"{case.limits.target}: {entry['why']}", repairs)


@rule("target", "capacity", "the target drops tokens beyond a capacity factor")
def capacity_is_expressible(case: Case) -> Iterator[Break]:
    if case.layout.capacity > 0 and not case.limits.drops_tokens:
        yield Break("capacity", case.layout.capacity, f"{case.limits.target} drops no tokens", (0.0,))


@rule("target", "tp sp", "the target has sequence parallelism")
def sequence_parallelism_is_expressible(case: Case) -> Iterator[Break]:
    if case.layout.sp and not case.limits.sequence_parallel:
        yield Break("sp", True, f"{case.limits.target}: tensor parallelism without sequence parallelism", (False,))
