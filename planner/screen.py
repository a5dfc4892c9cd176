"""What the terminal shows: the same facts as ``--json``, for people. Colour is never the only sign, and none survives a pipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from planner.cells import AtCommas
from planner.layout_words import short

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from planner.compare import Comparison
    from planner.doctor import Check
    from planner.plan import Plan, RunnerUp
    from planner.report.spans import Spans

GIB = 2**30
SIZES = (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10))
MEMORY_KEYS = ("parameters", "gradients", "optimizer", "activations", "temporary", "communication")
SHORT = {
    "parameters": "param",
    "gradients": "grad",
    "optimizer": "optim",
    "activations": "activ",
    "temporary": "temp",
    "communication": "comm",
}
MARKS = "█▓▒░◆◇"
"""One mark a memory category, so that the bars can be read without colour."""


def console(stderr: bool = False) -> Console:
    """A console that drops colour and cursor tricks, and is 140 columns wide, when its stream is not a terminal."""
    from rich.console import Console

    out = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = 140
    return out


def seconds(value: float) -> str:
    """``12.3 s``, ``45.6 ms``, ``7.8 us``: three significant digits."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} s" if value else "0 s"


def gib(value: float) -> str:
    """Bytes of a GPU's memory."""
    return f"{value / GIB:.2f} GiB" if value >= 0.01 * GIB else f"{value / 2**20:.1f} MiB"


def size(value: float) -> str:
    """Bytes to three digits, in the unit that suits them."""
    for name, unit in SIZES:
        if abs(value) >= unit:
            return f"{value / unit:.{2 if abs(value) < 10 * unit else 1 if abs(value) < 100 * unit else 0}f} {name}"
    return f"{value:.0f} B"


def step_line(record: dict[str, Any]) -> str:
    """A step of a run on one line."""
    parts = [f"step {record['step']:>6}", f"loss {record['loss']:.4f}"]
    if "eval_loss" in record:
        parts.append(f"held-out loss {record['eval_loss']:.4f} ({record['eval_tokens']:,} tokens)")
    parts += [f"grad norm {record['grad_norm']:.3f}", seconds(record["seconds"]), f"{record['tokens_per_second']:,.0f} tokens/s"]
    if "mfu" in record:
        parts.append(f"{100 * record['mfu']:.3g} % MFU")
    parts.append(gib(record["peak_bytes"]))
    if "expert_imbalance" in record:
        parts.append(f"experts {record['expert_imbalance']:.2f} x mean")
    return "  ".join(parts)


def count(value: float) -> str:
    """``671 B``, ``8.03 B``, ``124 M``."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> Table:
    """A table whose first ``left`` columns are words and the others figures."""
    from rich import box
    from rich.table import Table

    out = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        out.add_column(name, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        out.add_row(*(cell if isinstance(cell, AtCommas) else str(cell) for cell in row))
    return out


def show_inspect(out: Console, name: str, document: Mapping[str, Any]) -> None:
    parameters = document["parameters"]
    rows = [
        (part, count(n), f"{n:,}", percent(n / parameters["total"]))
        for part, n in parameters.items()
        if n and part not in ("total", "active", "mtp")
    ]
    rows.append(("total", count(parameters["total"]), f"{parameters['total']:,}", percent(1)))
    rows.append(
        (
            "active a token",
            count(parameters["active"]),
            f"{parameters['active']:,}",
            percent(parameters["active"] / parameters["total"]),
        )
    )
    if parameters.get("mtp"):
        rows.append(("MTP modules, apart", count(parameters["mtp"]), f"{parameters['mtp']:,}", ""))
    out.print(table(f"{name}: parameters", ("part", "", "exact", "share"), rows))
    flops = document["flops_per_token"]
    columns = ("sequences of", f"{document['seq_len']:,}")
    out.print(table("FLOPs a token", columns, [(k.replace("_", " "), count(v)) for k, v in flops.items()]))
    for note in document.get("notes", ()):
        out.print(f"note: {note}")


def show_estimate(out: Console, layout: str, document: Mapping[str, Any]) -> None:
    """One screen: time with its interval, where it goes, memory by stage against the limit."""
    out.print(f"layout   {short(layout)}", soft_wrap=True, markup=False)
    out.print(
        f"step     {seconds(document['step_seconds'])}   (80 % interval {seconds(document['step_seconds_low'])} to "
        f"{seconds(document['step_seconds_high'])})   {document['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU   "
        f"MFU {percent(document['mfu'])}",
        soft_wrap=True,
    )
    show_seconds(out, document)
    show_memory(out, document)
    if host := document.get("host_bytes_per_node"):
        out.print(f"offloaded: {gib(host)} of host memory on the fullest node")
    if document.get("guessed"):
        out.print("guessed: " + "; ".join(map(str, document["guessed"])), soft_wrap=True)


def show_seconds(out: Console, document: Mapping[str, Any]) -> None:
    step = document["step_seconds"]
    causes = sorted(document["seconds"].items(), key=lambda item: -item[1])
    rows = [
        (cause.replace("_", " "), seconds(s), percent(s / step), "#" * round(40 * s / step))
        for cause, s in causes
        if s >= 0.0005 * step
    ]
    grid = table("where the step goes", ("cause", "seconds", "share", ""), rows)
    grid.columns[3].justify = "left"
    out.print(grid)


def show_memory(out: Console, document: Mapping[str, Any], most: int = 8) -> None:
    """Memory of the stages, the fullest ``most`` of them, in GiB and as bars against the limit."""
    stages = sorted(document["memory"], key=lambda s: -s["device"])[:most]
    limit = document["limit_bytes"]
    shown = [k for k in MEMORY_KEYS if any(s.get(k, 0) for s in document["memory"])]
    keys = (*shown, "peak_allocated", "device")
    stages.sort(key=lambda s: s["stage"])
    left_out = f": the fullest {most} of {len(document['memory'])}" if len(document["memory"]) > most else ""
    names = [f"{MARKS[MEMORY_KEYS.index(k)]} {SHORT[k]}" for k in shown]

    def grid(bar_width: int, narrow: bool) -> Table:
        rows = [
            (s["stage"], *(f"{s[k] / GIB:.2f}" for k in keys), percent(s["device"] / limit), bar(s, limit, bar_width))
            for s in stages
        ]
        columns = ("stage", *names, "allocated", "device", "of limit", "up to | the limit")
        if narrow:
            columns = (*(name.replace(" ", "\n") for name in columns[:-1]), columns[-1])
        made = table(f"memory by stage in GiB (limit {limit / GIB:.2f}){left_out}", columns, rows)
        made.columns[-1].justify = "left"
        made.padding = 0 if narrow else (0, 1)
        return made

    chosen = grid(24, narrow=False)
    if overhang(out, chosen) > 0:
        chosen = grid(24, narrow=True)
        if (over := overhang(out, chosen)) > 0:
            chosen = grid(max(8, 24 - over), narrow=True)
    out.print(chosen)


def overhang(out: Console, grid: Table) -> int:
    """How many columns ``grid`` needs more than ``out`` has."""
    return out.measure(grid, options=out.options.update(max_width=10_000)).maximum - out.width


def bar(stage: Mapping[str, float], limit: float, width: int = 24) -> str:
    """A stage's memory by category as marks, ``.`` for context and allocator slack, and ``|`` where the limit is."""
    ends, reached = [], 0.0
    for key in MEMORY_KEYS:
        reached += stage.get(key, 0)
        ends.append(round(width * reached / limit))
    starts = [0, *ends]
    marks = "".join(MARKS[i] * max(0, end - starts[i]) for i, end in enumerate(ends))
    marks += "." * max(0, round(width * stage["device"] / limit) - len(marks))
    return f"{marks[:width]:<{width}}|" + ("+" if stage["device"] > limit else "")


def show_plan(out: Console, plan: Plan, saved_as: str | None = None, top: int | None = None, also: RunnerUp | None = None) -> None:
    """The answer, the first ``top`` runners-up and ``also``, the certificate, and what to type next."""
    show_estimate(out, plan.layout_text, plan.estimate)
    if len(plan.stages) > 1:
        from planner.report.spans import spans_of

        show_timeline(out, spans_of(plan, most=20_000))
    if plan.runners_up:
        rows = [
            (
                AtCommas(short(r.layout_text)),
                seconds(r.estimate["step_seconds"]),
                f"{100 * r.slower:+.1f} %",
                percent(r.chance_faster),
                worst_loss(r.loses),
            )
            for i, r in enumerate(plan.runners_up)
            if top is None or i < top or r is also
        ]
        out.print(table("runners-up", ("layout", "step", "slower", "chance faster", "loses most on"), rows))
    show_certificate(out, plan)
    for warning in plan.warnings:
        out.print(f"warning: {warning}", soft_wrap=True)
    if saved_as:
        from planner.emit.possible import NO_FILES, own_target

        emits = own_target(plan) and not any(w.startswith(NO_FILES) for w in plan.warnings)
        launch = f", axisplan emit {saved_as} --out launch" if emits else f", axisplan report {saved_as} --out report.html"
        out.print(f"\nplan written to {saved_as}; next: axisplan explain {saved_as}{launch}", soft_wrap=True)


BLOCKS = " ▁▂▃▄▅▆▇█"


def show_timeline(out: Console, spans: Spans, most: int = 8, width: int = 96) -> None:
    """The step as one line a stage: how busy it is in each slice of time, full blocks for all of it, blanks for waiting."""
    stages = sorted({s.stage for s in spans.spans})
    width = max(8, min(width, out.width - 8))
    every = max(1, -(-len(stages) // most))
    part = f" ({spans.drawn} of {spans.microbatches} microbatches)" if spans.drawn < spans.microbatches else ""
    out.print(
        f"timeline of {seconds(spans.seconds)}{part}: busy share by stage" + (f" (one stage in {every})" if every > 1 else "")
    )
    for stage in stages[::every]:
        out.print(f"{stage:>5} |{sparkline(spans, stage, width)}|", markup=False)


def sparkline(spans: Spans, stage: int, width: int = 96) -> str:
    """One stage's busy share of ``width`` equal slices of the step."""
    busy, slice_seconds = [0.0] * width, spans.seconds / width or 1.0
    for span in (s for s in spans.spans if s.stage == stage):
        for i in range(max(0, int(span.start / slice_seconds)), min(width, int(span.end / slice_seconds) + 1)):
            busy[i] += max(0.0, min(span.end, (i + 1) * slice_seconds) - max(span.start, i * slice_seconds))
    return "".join(BLOCKS[min(8, round(8 * b / slice_seconds))] for b in busy)


def show_comparison(out: Console, first: str, second: str, found: Comparison) -> None:
    """What differs, then what is the same."""
    out.print(f"A  {first}\nB  {second}\n{found.verdict}", soft_wrap=True, markup=False)
    names = ("predicted", "measured") if found.kind == "run" else ("A", "B")
    rows = [
        (d.section, d.field.replace("_", " "), shown(d.first, d.unit), shown(d.second, d.unit),
         "" if d.change_percent is None else f"{d.change_percent:+.1f} %")
        for d in found.differences
    ]  # fmt: skip
    if rows:
        out.print(table("", ("", "differs", *names, "change"), rows, left=2))
    if found.same:
        sections: dict[str, list[str]] = {}
        for section, field in (name.split(": ", 1) for name in found.same):
            sections.setdefault(section, []).append(field.replace("_", " "))
        out.print("same", markup=False)
        for section, fields in sections.items():
            out.print(f"  {section:<8} {', '.join(fields)}", soft_wrap=True, markup=False)


def shown(value: object, unit: str) -> str:
    """A value of a comparison: seconds and bytes in their units."""
    if value is None:
        return "-"
    if isinstance(value, float) or (isinstance(value, int) and unit):
        return seconds(value) if unit == "s" else gib(value) if unit == "bytes" else f"{value:.5g}"
    return str(value)


def show_doctor(out: Console, checks: Sequence[Check]) -> None:
    """One line a check; the sign before it says ok, note or problem."""
    signs = {"ok": "ok  ", "note": "note", "problem": "BAD "}
    for check in checks:
        out.print(f"{signs[check.state]}  {check.name:<22} {check.found}", soft_wrap=True, markup=False)
        if check.hint:
            out.print(f"{'':28} {check.hint}", soft_wrap=True, markup=False)


def worst_loss(loses: Mapping[str, float]) -> str:
    if not loses:
        return ""
    cause, lost = max(loses.items(), key=lambda item: item[1])
    return f"{cause.replace('_', ' ')} +{seconds(lost)}" if lost > 0 else ""


def show_explain(out: Console, document: Mapping[str, Any]) -> None:
    """What binds and its remedy first; then time, memory with its formulas, the runners-up, and the constants."""
    binds = document["binding"]
    out.print(f"layout   {document['layout']}", soft_wrap=True, markup=False)
    out.print(f"binding  {binds['says']}\nremedy   {binds['remedy']}", soft_wrap=True, markup=False)
    if why := document.get("why_not"):
        out.print(f"\nwhy not  {why['layout']}\n         {why['says']}", soft_wrap=True, markup=False)
        if loses := [(c, s) for c, s in why.get("loses", {}).items() if abs(s) > 1e-6]:
            rows = [(cause.replace("_", " "), f"{1e3 * s:+.2f} ms") for cause, s in loses]
            out.print(table("takes more on", ("cause", "than the plan"), rows))
    show_seconds(out, document)
    terms = [(f["name"], gib(f["value"]), f["text"], f["source"]) for f in document["memory_formulas"]]
    grid = table(
        f"memory of stage {binds['stage']}, {percent(binds['share_of_limit'])} of the limit",
        ("term", "", "formula", "source"),
        terms,
    )
    for column in grid.columns[2:]:
        column.justify = "left"
    out.print(grid)
    if save := document.get("checkpoint"):
        sizes = {key: gib(value) for key, value in save.items()}
        out.print(
            f"checkpoint {sizes['files']}; a save copies {sizes['save_host_rank']} to host memory on the fullest rank, "
            f"{sizes['save_host_node']} on the fullest node; a load reads {sizes['load_host_rank']} a rank at a time; "
            "neither takes device memory",
            soft_wrap=True, markup=False,
        )  # fmt: skip
    others = [(short(r["layout_text"]), f"{100 * r['slower']:+.1f} %", percent(r["chance_faster"]), worst_loss(r["loses"]), r["flips"] or "-")
              for r in document["runners_up"]]  # fmt: skip
    if others:
        columns = ("layout", "slower", "chance faster", "loses most on", "would flip with")
        out.print(table("runners-up", columns, others))
    constants = [(c["field"], c["value"], c["unit"], c["origin"], c["source"]) for c in document["constants"]]
    out.print(table("constants of the cluster", ("field", "value", "unit", "origin", "source"), constants, left=5))
    facts = [(f["fact"], f["value"], f["source"]) for f in document["execution"]]
    out.print(table("facts of the execution", ("fact", "value", "source"), facts, left=3))
    if document["guessed"]:
        out.print("guessed: " + "; ".join(map(str, document["guessed"])), soft_wrap=True, markup=False)


def show_bytes_table(out: Console, rows: Sequence[Mapping[str, Any]], ranks: int) -> None:
    """Bytes of state a parameter."""
    keys = ("execution", "precision", "optimizer", "zero", "parameters", "gradients", "optimizer_state")
    shown = [(*(r[k] for k in keys), f"{r['total']:.4g}") for r in rows]
    columns = ("execution", "precision", "optimizer", "ZeRO", "parameters", "gradients", "optimizer state", "bytes a parameter")
    out.print(table(f"bytes of state a parameter, sharded over {ranks} ranks where ZeRO shards", columns, shown, left=3))


def show_certificate(out: Console, plan: Plan) -> None:
    c = plan.certificate
    unexplored = f" + {c.unexplored:,} unexplored" if c.unexplored else ""
    verdict = (
        "proved: no legal layout of the declared space is faster under this cost model"
        if c.proved
        else f"not proved: gap {100 * c.gap:.3g} %{' (--prove goes on until it is closed)' if c.unexplored else ''}"
    )
    out.print(
        f"certificate  {c.columns_legal:,} legal columns = {c.cut_by_memory:,} cut by memory + {c.cut_by_bound:,} by bound + "
        f"{c.cut_by_dominance:,} by dominance + {c.solved:,} solved{unexplored}\n"
        f"             bound {c.best_bound_seconds:.6g} s, fastest {c.fastest_seconds:.6g} s, gap {c.gap:.2g}; {verdict}",
        soft_wrap=True,
    )
    if c.proposed_seconds > c.fastest_seconds * (1 + 1e-9):
        taste = f"within {percent(c.tie)}, and simpler or roomier (--tie 0: the fastest)"
        out.print(f"             the plan proposed takes {c.proposed_seconds:.6g} s: {taste}", soft_wrap=True)


def show_check(out: Console, layout: str, document: Mapping[str, Any]) -> None:
    out.print(f"layout   {layout}", soft_wrap=True)
    out.print(f"legal    {'yes' if document['legal'] else 'no'}")
    for violation in document["violations"]:
        near = f"; nearest: {violation['nearest']}" if violation["nearest"] is not None else ""
        out.print(f"  {violation['rule']}: {violation['message']}{near}", soft_wrap=True)
    if document["legal"]:
        out.print(f"fits     {'yes' if document['fits'] else 'no'}")
        if binding := document.get("binding"):
            over = binding["over_bytes"]
            state = f"{gib(over)} over the limit" if over > 0 else f"{gib(binding['headroom_bytes'])} below the limit"
            out.print(f"binding  stage {binding['stage']}, {binding['category']}, {state}")
            if binding.get("fits_if_balanced"):
                out.print("         it would fit only if experts were perfectly balanced (--moe-imbalance 1)")
        if changes := document.get("would_fit"):
            out.print(f"remedy   any of: {'; '.join(changes)}", soft_wrap=True, markup=False)
        for warning in document.get("warnings", ()):
            out.print(f"warning  {warning}", soft_wrap=True, markup=False)


@contextmanager
def progress(out: Console, title: str) -> Iterator[Callable[..., None]]:
    """A progress bar on a terminal, one line elsewhere once there is progress; yields ``show(share, what)``."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if not out.is_terminal:
        said = False

        def say_once(share: float, what: str = "") -> None:
            nonlocal said
            if not said:
                out.print(f"{title} ...")
            said = True

        yield say_once
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[what]}"))
    with Progress(*columns, console=out, transient=True) as bars:
        task = bars.add_task(title, total=1.0, what="")

        def show(share: float, what: str = "") -> None:
            bars.update(task, completed=share, what=what)

        yield show


def show_experts(out: Console, document: Sequence[Mapping[str, Any]]) -> None:
    """Placements, one a layer."""
    columns = ("layer", "most loaded rank", "mean", "imbalance", "plain order", "bound", "proved")
    rows = [
        (i, f"{d['most_loaded']:,.0f}", f"{d['mean']:,.0f}", f"{d['imbalance']:.3f}", f"{d['plain_imbalance']:.3f}",
         f"{d['bound']:,.0f}", "yes" if d["proved"] else percent(d["gap"]))
        for i, d in enumerate(document)
    ]  # fmt: skip
    out.print(table("experts on ranks (tokens)", columns, rows))
    for i, placed in enumerate(document[:1]):
        for rank, held in enumerate(placed["ranks"][:16]):
            out.print(f"layer {i} rank {rank}: {' '.join(map(str, held))}", soft_wrap=True)
    worst = max((d["imbalance"] for d in document), default=1.0)
    out.print(f"plan with --moe-imbalance {worst:.3f}")
