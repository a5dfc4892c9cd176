"""The dry run of a plan: which rank to trace, the document that it gives, and the verdict of ``verify``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.memory import stage_memory
from cost_models.schedules import order_table
from planner.dryrun.compare import Line, canonical, compare
from planner.dryrun.counting import Call
from planner.dryrun.formula import StepFormula, step_formula
from planner.dryrun.rank import Trace, trace
from planner.dryrun.trace import most_bytes
from planner.dryrun.world import exact_factor, rank_of_stage
from planner.legality import check, require
from planner.plan import Plan
from profiles.errors import InputError


@dataclass(frozen=True)
class DryRun:
    """One rank traced, with the formula's figures for it. ``alike``: the stages whose program is the same."""

    stage: int
    alike: tuple[int, ...]
    trace: Trace
    formula: StepFormula
    lines: tuple[Line, ...]
    cpu_seconds: float

    @property
    def agrees(self) -> bool:
        return all(line.agrees for line in self.lines)

    @property
    def disagreements(self) -> list[Line]:
        return [line for line in self.lines if not line.agrees]

    def document(self) -> dict[str, Any]:
        """The keys of docs/dry-run.md; bytes and FLOPs of one step of this rank."""
        record, memory = self.trace.record, self.formula.memory
        expected = canonical(self.formula.sent, self.trace.axes)
        return {
            "rank": self.trace.rank, "stage": self.stage, "stages_alike": list(self.alike), "peak_bytes": record.peak_bytes,
            "peak_at": record.peak_at, "bytes": dict(record.at_peak), "most_bytes": most_bytes(record),
            "kept_activations": record.kept, "flops": {**record.flops, "total": sum(record.flops.values())},
            "collectives": collectives(record.calls),
            "formula": {
                "peak_bytes": memory.peak_allocated, "peak_at": memory.peak_at,
                "bytes": {k: getattr(memory, k) for k in ("parameters", "gradients", "optimizer", "activations", "temporary")},
                "kept_activations": self.formula.kept, "flops": {**self.formula.flops, "total": sum(self.formula.flops.values())},
                "collectives": [{"axis": a, "kind": k, "bytes": v} for (a, k), v in sorted(expected.items()) if v],
            },
            "named_bytes": self.trace.named, "comparisons": [line.to_json() for line in self.lines],
            "differences": [line.to_json() for line in self.disagreements], "operations": record.operations, "cpu_seconds": self.cpu_seconds,
        }  # fmt: skip


def collectives(calls: Iterable[Call]) -> list[dict[str, Any]]:
    """Collectives of the step by axis and kind: how often, bytes in all, ranks of the group."""
    count: Counter[tuple[str, str, int]] = Counter()
    size: Counter[tuple[str, str, int]] = Counter()
    for call in calls:
        key = (call.axis, call.kind, call.ranks)
        count[key] += 1
        size[key] += call.bytes
    return [{"axis": a, "kind": k, "count": count[a, k, n], "bytes": size[a, k, n], "ranks": n} for a, k, n in sorted(count)]


def dry_run(plan: Plan, rank: int | None = None, stage: int | None = None, steps: int = 2) -> DryRun:
    """Trace ``rank``, or the first rank of ``stage``; by default that of the stage with the highest predicted peak.

    Raises InputError for a plan that the runtime does not run, or a rank outside the world.
    """
    job, layout = plan.job(), plan.layout_object
    require(job, layout)
    if rank is None:
        rank = rank_of_stage(layout, worst_stage(job, layout) if stage is None else stage)
    elif stage is not None:
        raise InputError("--stage", stage, "give a rank or a stage, not both")
    if not 0 <= rank < layout.world:
        raise InputError("rank", rank, f"the plan has ranks 0 to {layout.world - 1}", min(max(rank, 0), layout.world - 1))
    return run_rank(job, layout, rank, steps)


def run_rank(job: Job, layout: Layout, rank: int, steps: int = 2) -> DryRun:
    """Trace one rank and compare."""
    began = time.process_time()
    found = trace(job, layout, rank, steps)
    stage = layout.coordinates(rank)["pp"]
    formula = step_formula(job.with_imbalance(exact_factor(job, layout)), layout, stage)
    alike = next(group for group in alike_stages(job, layout) if stage in group)
    return DryRun(stage, alike, found, formula, tuple(compare(formula, found)), time.process_time() - began)


def all_stages(plan: Plan, steps: int = 2) -> list[DryRun]:
    """One rank of each kind of stage."""
    job, layout = plan.job(), plan.layout_object
    require(job, layout)
    return [run_rank(job, layout, rank_of_stage(layout, group[0]), steps) for group in alike_stages(job, layout)]


def worst_stage(job: Job, layout: Layout) -> int:
    return max(stage_memory(job, layout), key=lambda s: s.peak_allocated).stage


def alike_stages(job: Job, layout: Layout) -> list[tuple[int, ...]]:
    """Pipeline ranks whose program is the same: the same layers under the same recompute rules, in the same order of actions."""
    orders = order_table(layout.schedule, layout.pp, layout.vpp, layout.microbatches(job.global_batch))
    groups: dict[Any, list[int]] = {}
    for stage, order in enumerate(orders):
        chunks = layout.chunks_of_rank(stage)
        place = {chunk: index for index, chunk in enumerate(chunks)}
        rules = layout.recompute_rules
        layers = (layout.layers_of_chunk(c, job.model.num_layers) for c in chunks)
        held = tuple(tuple((job.model.pattern[i], str(rules.of(i).mode), rules.of(i).modules) for i in one) for one in layers)
        ends = tuple((c == 0, c == layout.chunks - 1) for c in chunks)
        actions = tuple((a.kind, a.microbatch, place[a.chunk]) for a in order)
        groups.setdefault((held, ends, actions), []).append(stage)
    return [tuple(group) for group in groups.values()]


def verify(plan: Plan, steps: int = 2) -> dict[str, Any]:
    """Legality, fit, and the dry run of the worst stage: the check document with ``dry_run`` and ``exit_code`` (0 good, 1 formula and
    program disagree, 2 not legal, 3 does not fit)."""
    job, layout = plan.job(), plan.layout_object
    document = check(job, layout)
    if not document["legal"]:
        return {**document, "dry_run": None, "exit_code": 2}
    if job.execution.name != "axisplan":
        note = f"not traced: the plan is for {job.execution.name}, the dry run traces axisplan's own runtime"
        return {**document, "dry_run": None, "note": note, "exit_code": 0 if document["fits"] else 3}
    found = run_rank(job, layout, rank_of_stage(layout, worst_stage(job, layout)), steps)
    beyond = found.trace.record.peak_bytes > job.limit_bytes
    code = 3 if not document["fits"] or beyond else 0 if found.agrees else 1
    return {**document, "dry_run": found.document(), "exit_code": code}
