"""Traces for Perfetto and chrome://tracing (the Trace Event Format): the simulated step, and a measured one over it.

One process a stage, with a row for its work, one for what it sends, and one for what it was measured to do. Load the file at
ui.perfetto.dev.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from planner.plan import Plan
from planner.report.spans import Spans, spans_of
from profiles.files import write_text

Event = dict[str, Any]
COLOURS = {
    "forward": "thread_state_running", "backward": "thread_state_iowait", "backward_input": "thread_state_iowait",
    "backward_weight": "good", "gather": "terrible", "reduce": "terrible", "optimizer": "olive",
}  # fmt: skip
"""Names of chrome://tracing's palette."""
WORK, WIRE, MEASURED = 0, 1, 2


def trace(plan: Plan, measured: Sequence[dict[str, Any]] = (), done: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The trace of a plan's step as a document; ``measured``: records of a run (one a step), drawn below the prediction; ``done``:
    what each stage did in one of its steps (``runtime.timeline.measured_spans``), drawn below what it was predicted to do."""
    spans = spans_of(plan)
    events = [*_names(plan), *_spans(plan, spans), *_memory(plan), *_done(plan, done), *_measured(plan, measured)]
    return {
        "traceEvents": events, "displayTimeUnit": "ms",
        "otherData": {
            "axisplan": plan.axisplan, "model": plan.model["name"], "cluster": plan.cluster["name"], "layout": plan.layout_text,
            "predicted_step_seconds": plan.step_seconds, "microbatches": spans.microbatches, "microbatches_drawn": spans.drawn,
        },
    }  # fmt: skip


def write_trace(plan: Plan, out: Path, measured: Sequence[dict[str, Any]] = (), done: Sequence[dict[str, Any]] = ()) -> None:
    """Write ``trace`` to ``out``."""
    write_text(out, json.dumps(trace(plan, measured, done), separators=(",", ":"), allow_nan=False) + "\n")


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _names(plan: Plan) -> Iterator[Event]:
    for stage in plan.stages:
        layers = ", ".join(f"{r[0]}-{r[1]}" for r in stage.layers if r)
        yield _label("process_name", stage.stage, WORK, f"stage {stage.stage} (layers {layers})")
        yield {"name": "process_sort_index", "ph": "M", "pid": stage.stage, "tid": WORK, "args": {"sort_index": stage.stage}}
        yield _label("thread_name", stage.stage, WORK, "work")
        yield _label("thread_name", stage.stage, WIRE, "exposed communication")


def _label(kind: str, pid: int, tid: int, text: str) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": text}}


def _spans(plan: Plan, spans: Spans) -> Iterator[Event]:
    layout = plan.layout_object
    last = layout.chunks - 1
    for number, s in enumerate(spans.spans):
        name = s.kind.replace("_", " ") + (f" {s.microbatch}" if s.microbatch >= 0 else "")
        args = {} if s.microbatch < 0 else {"microbatch": s.microbatch, "chunk": s.chunk, "communication_seconds": s.communication}
        row = WIRE if s.kind in ("gather", "reduce") else WORK
        yield {
            "name": name, "cat": s.kind, "ph": "X", "pid": s.stage, "tid": row, "ts": _microseconds(s.start),
            "dur": _microseconds(s.end - s.start), "cname": COLOURS[s.kind], "args": args,
        }  # fmt: skip
        if row == WORK and s.communication:
            yield {
                "name": f"waits in {name}", "cat": "communication", "ph": "X", "pid": s.stage, "tid": WIRE,
                "ts": _microseconds(s.end - s.communication), "dur": _microseconds(s.communication), "cname": "terrible",
            }  # fmt: skip
        onward = s.chunk + 1 if s.kind == "forward" else s.chunk - 1
        if s.kind in ("forward", "backward", "backward_input") and 0 <= onward <= last and layout.rank_of_chunk(onward) != s.stage:
            yield from _arrow(number, s.stage, layout.rank_of_chunk(onward), s.end, s.end + spans.transfer)


def _arrow(number: int, source: int, target: int, leaves: float, arrives: float) -> Iterator[Event]:
    shared = {"name": "transfer", "cat": "transfer", "id": number, "tid": WORK}
    yield {**shared, "ph": "s", "pid": source, "ts": _microseconds(leaves) - 0.001}
    yield {**shared, "ph": "f", "bp": "e", "pid": target, "ts": _microseconds(arrives) + 0.001}


def _memory(plan: Plan) -> Iterator[Event]:
    for stage in plan.estimate["memory"]:
        yield {
            "name": "predicted peak (GiB)", "ph": "C", "pid": stage["stage"], "ts": 0,
            "args": {"allocated": round(stage["peak_allocated"] / 2**30, 3), "device": round(stage["device"] / 2**30, 3)},
        }  # fmt: skip


def _done(plan: Plan, spans: Sequence[dict[str, Any]]) -> Iterator[Event]:
    for stage in plan.stages if spans else ():
        yield _label("thread_name", stage.stage, MEASURED, "work, measured")
    for span in spans:
        once = span["microbatch"] < 0
        yield {
            "name": span["kind"].replace("_", " ") + ("" if once else f" {span['microbatch']}"), "cat": f"measured {span['kind']}",
            "ph": "X", "pid": span["stage"], "tid": MEASURED, "ts": _microseconds(span["start"]),
            "dur": _microseconds(span["end"] - span["start"]), "cname": COLOURS[span["kind"]],
            "args": {} if once else {"microbatch": span["microbatch"], "chunk": span["chunk"]},
        }  # fmt: skip


def _measured(plan: Plan, records: Sequence[dict[str, Any]]) -> Iterator[Event]:
    """Measured steps and the predicted one, in a process of their own: one row each, all from zero."""
    if not records:
        return
    pid = len(plan.stages)
    yield _label("process_name", pid, 0, "whole steps: predicted and measured")
    yield _label("thread_name", pid, 0, "predicted")
    yield {"name": "predicted step", "ph": "X", "pid": pid, "tid": 0, "ts": 0, "dur": _microseconds(plan.step_seconds)}
    yield _label("thread_name", pid, 1, "measured, one after the other")
    at = 0.0
    for record in records:
        yield {
            "name": f"step {record.get('step')}", "ph": "X", "pid": pid, "tid": 1, "ts": _microseconds(at),
            "dur": _microseconds(record["seconds"]), "args": {k: v for k, v in record.items() if isinstance(v, int | float)},
        }  # fmt: skip
        at += record["seconds"]
