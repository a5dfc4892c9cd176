"""What every stage of a plan does, and when: the simulator's timeline as spans, for pictures and traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cost_models.chunks import blocks_transfers, boundary_seconds, chunk_seconds, rank_updates, run_schedule
from cost_models.job import Job
from cost_models.layout import Layout, RecomputeRule
from cost_models.passes import PassSeconds, layer_key, unit_seconds
from cost_models.units import Unit
from planner.plan import Plan

NAMES = {"F": "forward", "B": "backward_input", "W": "backward_weight", "BW": "backward"}
KINDS = ("forward", "backward", "backward_input", "backward_weight", "gather", "reduce", "optimizer")
"""``gather``: parameters collected before the first forward; ``reduce``: gradients reduced after the last backward."""
MOST_ACTIONS = 250_000
"""Actions of a step that are drawn one by one; a longer step is drawn with fewer microbatches, which the picture says."""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of a stage: seconds from the start of the step; ``communication``: seconds of it that wait for a
    collective. ``microbatch`` and ``chunk`` are -1 for what is done once a step."""

    stage: int
    kind: str
    microbatch: int
    chunk: int
    start: float
    end: float
    communication: float = 0.0


@dataclass(frozen=True)
class Spans:
    """A step: spans by stage and start, where it ends (``seconds``, overheads and stragglers included), one transfer between
    stages (``transfer`` seconds, which a stage may sit out idle), and how many of the microbatches are drawn."""

    spans: tuple[Span, ...]
    seconds: float
    transfer: float
    microbatches: int
    drawn: int

    def idle(self, stage: int) -> float:
        """Seconds that a stage waits."""
        mine = [s for s in self.spans if s.stage == stage]
        return self.seconds - sum(s.end - s.start for s in mine)


def spans_of(plan: Plan, most: int = MOST_ACTIONS) -> Spans:
    """The timeline of a plan's step, of at most about ``most`` actions."""
    return simulate(plan.job(), plan.layout_object, plan.step_seconds, most)


def simulate(job: Job, layout: Layout, step_seconds: float, most: int = MOST_ACTIONS) -> Spans:
    """The timeline of one step of ``job`` under ``layout``, which takes ``step_seconds`` in all; a step of more than ``most`` actions
    with fewer microbatches."""
    chunks = chunk_seconds(job, layout)
    updates = rank_updates(job, layout, chunks)
    microbatches = drawn = layout.microbatches(job.global_batch)
    group = 2 * layout.pp * (2 if layout.schedule.startswith("dualpipe") else 1)
    while 2 * layout.chunks * drawn > most and drawn > 4 * group:
        drawn -= group * max(1, drawn // (4 * group))
    timeline = run_schedule(job, layout, chunks, updates, drawn)
    shares = _shares(job, layout)
    spans = []
    for i in timeline.intervals:
        kind, chunk = NAMES[i.action.kind], i.action.chunk
        share = shares[chunk][kind]
        spans.append(Span(i.rank, kind, i.action.microbatch, chunk, i.start, i.end, share * (i.end - i.start)))
    for rank, update in enumerate(updates):
        if update.start:
            spans.append(Span(rank, "gather", -1, -1, 0.0, update.start, update.start))
        at = timeline.finish[rank]
        for axis_seconds in update.reduce.values():
            spans.append(Span(rank, "reduce", -1, -1, at, at + axis_seconds, axis_seconds))
            at += axis_seconds
        if update.optimizer:
            spans.append(Span(rank, "optimizer", -1, -1, at, at + update.optimizer))
    spans.sort(key=lambda s: (s.stage, s.start, s.end))
    end = max((s.end for s in spans), default=0.0)
    return Spans(
        tuple(spans), max(end, step_seconds) if drawn == microbatches else end, boundary_seconds(job, layout), microbatches, drawn
    )


def _shares(job: Job, layout: Layout) -> list[Mapping[str, float]]:
    """By chunk and kind, the share of a pass that is exposed communication (transfers that block it included)."""
    key = layer_key(job, layout)
    wait = boundary_seconds(job, layout) if blocks_transfers(job, layout.schedule) else 0.0
    out: list[Mapping[str, float]] = []
    for chunk, cost in enumerate(chunk_seconds(job, layout)):
        waits = {"F": 0.0, "B": 0.0, "W": 0.0}
        for (unit, rule), count in cost.parts:
            for name, seconds in _exposed(job, key, unit, rule).items():
                waits[name] += count * seconds
        whole = {"F": cost.forward, "B": cost.backward_input, "W": cost.backward_weight}
        for name, neighbour in (("F", chunk + 1), ("B", chunk - 1)):
            if 0 <= neighbour < layout.chunks and layout.rank_of_chunk(neighbour) != layout.rank_of_chunk(chunk):
                waits[name] += wait
                whole[name] += wait
        share = {NAMES[n]: _share(waits[n], whole[n]) for n in waits}
        out.append({**share, "backward": _share(waits["B"] + waits["W"], whole["B"] + whole["W"])})
    return out


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole else 0.0


def _exposed(job: Job, key: Layout, unit: Unit, rule: RecomputeRule) -> dict[str, float]:
    found = unit_seconds(job, key, unit, rule)

    def waits(*passes: PassSeconds) -> float:
        return sum(sum(one.exposed.values()) for one in passes)

    return {"F": waits(found.forward), "B": waits(found.recompute, found.backward_input), "W": waits(found.backward_weight)}
