"""A dry run for people: tables on the terminal, a plot of memory over the step, a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.dryrun.trace import CATEGORIES, Record
from planner.screen import SIZES, count, percent, size, table
from profiles.errors import InputError
from profiles.files import write_text

if TYPE_CHECKING:
    from rich.console import Console


def show(out: Console, document: Mapping[str, Any]) -> None:
    """One rank on one screen: the peak, then formula against trace line by line."""
    alike = document["stages_alike"]
    others = f" (as stages {', '.join(map(str, alike))})" if len(alike) > 1 else ""
    out.print(
        f"rank {document['rank']}, stage {document['stage']}{others}: peak {size(document['peak_bytes'])} at {document['peak_at']}; "
        f"formula {size(document['formula']['peak_bytes'])} at {document['formula']['peak_at']}",
        soft_wrap=True,
    )
    held = [
        (name, size(held_bytes), percent(held_bytes / document["peak_bytes"]))
        for name, held_bytes in document["bytes"].items()
        if held_bytes
    ]
    out.print(table("alive at the peak", ("", "bytes", "share"), held))
    calls = [(c["axis"], c["kind"], c["ranks"], c["count"], size(c["bytes"])) for c in document["collectives"]]
    out.print(table("collectives of a step", ("axis", "kind", "ranks", "count", "bytes"), calls, left=2))
    rows = []
    for line in document["comparisons"]:
        flops = line["what"].startswith("flops")
        shown = count if flops else size
        named = ", ".join(f"{k} {size(v)}" for k, v in line["named"].items())
        verdict = "equal" if not line["relative"] else f"{100 * line['relative']:.2g} %"
        rows.append(
            (line["what"], shown(line["formula"]), shown(line["trace"]), verdict + ("" if line["agrees"] else "  DIFFERS"), named)
        )
    grid = table("formula and program", ("", "formula", "program", "difference", "of the program, apart"), rows)
    grid.columns[4].justify = "left"
    out.print(grid)


def show_module(out: Console, document: Mapping[str, Any]) -> None:
    """A user's module under the plan."""
    applied = ", ".join(document["parallel"]) or "nothing"
    out.print(
        f"{document['module']} on rank {document['rank']}: {document['parameters']:,} parameters; the plan's {applied} applied; "
        f"peak {size(document['peak_bytes'])} at {document['peak_at']}; {count(document['flops']['total'])} FLOPs a step",
        soft_wrap=True,
    )
    if document["not_applied"]:
        out.print(f"of the plan, not applied to the module: {', '.join(document['not_applied'])}", soft_wrap=True)
    held = [(name, size(here), size(document["most_bytes"].get(name, 0))) for name, here in document["bytes"].items()]
    out.print(table("memory", ("", "at the peak", "at most"), held))
    calls = [(c["axis"], c["kind"], c["ranks"], c["count"], size(c["bytes"])) for c in document["collectives"]]
    out.print(table("collectives", ("axis", "kind", "ranks", "count", "bytes"), calls, left=2))


def show_verify(out: Console, document: Mapping[str, Any]) -> None:
    """The verdict, one line a part."""
    out.print(f"legal    {'yes' if document['legal'] else 'no'}")
    for violation in document["violations"]:
        out.print(f"  {violation['rule']}: {violation['message']}", soft_wrap=True)
    if document["legal"]:
        out.print(f"fits     {'yes' if document['fits'] else 'no'}")
    traced = document.get("dry_run")
    if traced is not None:
        differs = ", ".join(line["what"] for line in traced["differences"])
        verdict = f"differs from the formula in {differs}" if differs else "equals the formula within its tolerances"
        out.print(f"dry run  rank {traced['rank']}: peak {size(traced['peak_bytes'])}; {verdict}", soft_wrap=True)
    if document.get("note"):
        out.print(document["note"], soft_wrap=True)


COLOURS = {
    "parameters": "#0072b2", "gradients": "#56b4e9", "optimizer": "#009e73", "activations": "#e69f00", "held": "#d55e00",
    "temporary": "#cc79a7", "gathered": "#f0e442", "buffers": "#999999",
}  # fmt: skip
"""Of memory by category; ``ACTIONS`` of the schedule's. Okabe and Ito's, told apart by colour-blind eyes too."""
ACTIONS = {"F": "#0072b2", "BW": "#d55e00", "B": "#e69f00", "W": "#009e73"}
NAMED_SPANS = 48
"""Actions that have room for their names."""


def plot(record: Record, rank: int, formula: float, path: Path) -> None:
    """Memory over the step, stacked by category, above the actions of the schedule; ``formula``: the peak that the cost models say
    (PNG, SVG or PDF by the name's ending). Raises InputError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise InputError("--plot", path, "needs matplotlib; install axisplan[plot]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    unit, scale = next(((n, s) for n, s in SIZES if record.peak_bytes >= s), SIZES[-1])
    clock = [at for at, _ in record.curve]
    shown = [c for c in CATEGORIES if any(held[c] for _, held in record.curve)]
    layers = [[held[c] / scale for _, held in record.curve] for c in shown]
    figure, (memory, actions) = pyplot.subplots(
        2, 1, figsize=(12, 5.5), sharex=True, gridspec_kw={"height_ratios": (12, 1), "hspace": 0.06}
    )
    memory.stackplot(clock, layers, labels=shown, colors=[COLOURS[c] for c in shown], step="post")
    memory.plot([record.peak_clock], [record.peak_bytes / scale], "kv", markersize=7, label=f"peak\n{record.peak_at}")
    memory.axhline(formula / scale, color="black", linewidth=1, linestyle="--", label=f"formula's peak\n{size(formula)}")
    memory.set(ylabel=f"{unit} alive", title=f"rank {rank}: memory over one step, peak {size(record.peak_bytes)}")
    memory.set_ylim(0, 1.06 * max(record.peak_bytes, formula) / scale)
    memory.set_xlim(0, max(1, record.operations))
    memory.legend(loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, fontsize="small")
    _action_strip(actions, record)
    actions.set_xlabel("operations of the step")
    try:
        figure.savefig(path, bbox_inches="tight", dpi=120)
    except (OSError, ValueError) as error:
        raise InputError("--plot", path, f"cannot be written: {error}", "memory.png") from None
    finally:
        pyplot.close(figure)


def _action_strip(axes: Any, record: Record) -> None:
    """The step's actions as bars, with their names where there is room."""
    spans = [s for s in record.spans if s.end > s.start]
    for span in spans:
        kind = span.name.rstrip("0123456789.")
        axes.barh(
            0,
            span.end - span.start,
            left=span.start,
            height=1,
            color=ACTIONS.get(kind, "#bbbbbb"),
            edgecolor="white",
            linewidth=0.4,
        )
        wide = (span.end - span.start) / max(1, record.operations)
        if len(spans) <= NAMED_SPANS and wide > 0.008 * len(span.name):
            axes.text((span.start + span.end) / 2, 0, span.name, ha="center", va="center", fontsize=6.5, color="white")
    axes.set(yticks=[], ylim=(-0.5, 0.5))


def events(record: Record, rank: int) -> list[dict[str, Any]]:
    """Chrome trace events: actions, collectives, memory by category. One microsecond stands for one operation."""
    names = (("process_name", 0, f"rank {rank}"), ("thread_name", 0, "actions"), ("thread_name", 1, "collectives"))
    out: list[dict[str, Any]] = [{"name": n, "ph": "M", "pid": rank, "tid": t, "args": {"name": text}} for n, t, text in names]
    out += [
        {"name": s.name, "ph": "X", "ts": s.start, "dur": max(1, s.end - s.start), "pid": rank, "tid": 0, "cat": "action"}
        for s in record.spans
    ]
    out += [
        {"name": f"{c.axis} {c.kind}", "ph": "X", "ts": c.clock, "dur": 1, "pid": rank, "tid": 1, "cat": "collective",
         "args": {"bytes": c.bytes, "ranks": c.ranks}}
        for c in record.calls
    ]  # fmt: skip
    out += [{"name": "memory", "ph": "C", "ts": at, "pid": rank, "args": dict(held)} for at, held in record.curve]
    return out


def write_trace(records: Sequence[tuple[int, Record]], path: Path) -> None:
    """A trace file of some ranks."""
    every = [event for rank, record in records for event in events(record, rank)]
    write_text(path, json.dumps({"traceEvents": every, "displayTimeUnit": "ms"}))
