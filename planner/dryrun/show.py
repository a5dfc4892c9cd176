"""A dry run for people: tables on the terminal, a plot of memory over the step, a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.dryrun.trace import CATEGORIES, Record
from planner.screen import count, gib, percent, table
from profiles.errors import InputError
from profiles.files import write_text

if TYPE_CHECKING:
    from rich.console import Console


def show(out: Console, document: Mapping[str, Any]) -> None:
    """One rank on one screen: the peak, then formula against trace line by line."""
    alike = document["stages_alike"]
    others = f" (as stages {', '.join(map(str, alike))})" if len(alike) > 1 else ""
    out.print(
        f"rank {document['rank']}, stage {document['stage']}{others}: peak {gib(document['peak_bytes'])} at {document['peak_at']}; "
        f"formula {gib(document['formula']['peak_bytes'])} at {document['formula']['peak_at']}",
        soft_wrap=True,
    )
    held = [(name, gib(size), percent(size / document["peak_bytes"])) for name, size in document["bytes"].items() if size]
    out.print(table("alive at the peak", ("", "bytes", "share"), held))
    calls = [(c["axis"], c["kind"], c["ranks"], c["count"], gib(c["bytes"])) for c in document["collectives"]]
    out.print(table("collectives of a step", ("axis", "kind", "ranks", "count", "bytes"), calls, left=2))
    rows = []
    for line in document["comparisons"]:
        flops = line["what"].startswith("flops")
        shown = count if flops else gib
        named = ", ".join(f"{k} {gib(v)}" for k, v in line["named"].items())
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
        f"peak {gib(document['peak_bytes'])} at {document['peak_at']}; {count(document['flops']['total'])} FLOPs a step",
        soft_wrap=True,
    )
    held = [(name, gib(size), gib(document["most_bytes"].get(name, 0))) for name, size in document["bytes"].items()]
    out.print(table("memory", ("", "at the peak", "at most"), held))
    calls = [(c["axis"], c["kind"], c["ranks"], c["count"], gib(c["bytes"])) for c in document["collectives"]]
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
        out.print(f"dry run  rank {traced['rank']}: peak {gib(traced['peak_bytes'])}; {verdict}", soft_wrap=True)
    if document.get("note"):
        out.print(document["note"], soft_wrap=True)


def plot(record: Record, rank: int, path: Path) -> None:
    """Memory over the step, stacked by category (PNG, SVG or PDF by the name's ending). Raises InputError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise InputError("--plot", path, "needs matplotlib; install axisplan[plot]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    clock = [at for at, _ in record.curve]
    layers = [[held[c] / 2**30 for _, held in record.curve] for c in CATEGORIES]
    figure, axes = pyplot.subplots(figsize=(11, 5))
    axes.stackplot(clock, layers, labels=CATEGORIES, step="post")
    axes.plot([record.peak_clock], [record.peak_bytes / 2**30], "kv", label=f"peak: {record.peak_at}")
    axes.set(xlabel="operations of the step", ylabel="GiB alive", title=f"rank {rank}: memory over one step")
    axes.legend(loc="upper right", fontsize="small")
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InputError("--plot", path, f"cannot be written: {error}", "memory.png") from None
    finally:
        pyplot.close(figure)


def events(record: Record, rank: int) -> list[dict[str, Any]]:
    """Chrome trace events: actions, collectives, memory by category. One microsecond stands for one operation."""
    out: list[dict[str, Any]] = [
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
