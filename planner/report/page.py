"""The report as one HTML file that opens offline: plotly's own script is inside. Needs plotly (extra ``plot``)."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from string import Template
from typing import Any

from cost_models.job import Job
from cost_models.layout import Layout
from planner import screen
from planner.layout_words import short
from planner.plan import Plan, execution_dump
from planner.report import figures
from planner.report.considered import considered
from planner.report.spans import KINDS, Spans, spans_of
from profiles.errors import AxisplanError
from profiles.hardware import describe


def page(plan: Plan) -> str:
    """The whole file."""
    script = _plotly()
    job, layout, spans = plan.job(), plan.layout_object, spans_of(plan)
    others = considered(plan)
    drawn = {
        "figures": {
            "memory": figures.memory_figure(plan.estimate),
            "seconds": figures.seconds_figure(plan.estimate),
            "candidates": figures.candidates_figure(plan, others.rows),
        },
        "timeline": timeline_data(spans, layout),
        "cluster": cluster_data(job, layout),
    }
    data = resources.files("planner.report") / "data"
    return Template((data / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(f"{job.model.name} on {job.cluster.name}"),
        style=(data / "report.css").read_text(encoding="utf-8"),
        plotly=script,
        program=(data / "report.js").read_text(encoding="utf-8"),
        data=json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("</", "<\\/"),
        answer=answer(plan, job, layout),
        cards=cards(plan),
        warnings="".join(f'<p class="warning">{html.escape(w)}</p>' for w in plan.warnings),
        timeline_note=html.escape(timeline_note(spans, layout)),
        memory_note=html.escape(memory_note(plan)),
        cluster_note=html.escape(cluster_note(job, layout)),
        candidates_note=html.escape(others.note),
        stages=stages_table(plan),
        sent=sent_table(plan),
        runners=runners_table(plan),
        certificate=certificate(plan),
        assumptions=assumptions(plan, job),
        layout=breakable(plan.layout_text),
        version=html.escape(plan.axisplan),
    )


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise AxisplanError("the HTML report needs plotly: pip install 'axisplan[plot]'") from None
    return str(get_plotlyjs())


# -- data for the pictures made in the page ---------------------------------------------------------------------------------


def timeline_data(spans: Spans, layout: Layout) -> dict[str, Any]:
    """The spans by column, seconds to seven digits."""

    def digits(value: float) -> float:
        return float(f"{value:.7g}")

    rows = spans.spans
    return {
        "kinds": list(KINDS), "stages": layout.pp, "seconds": spans.seconds, "transfer": spans.transfer,
        "stage": [s.stage for s in rows], "kind": [KINDS.index(s.kind) for s in rows],
        "microbatch": [s.microbatch for s in rows], "chunk": [s.chunk for s in rows],
        "start": [digits(s.start) for s in rows], "end": [digits(s.end) for s in rows],
        "communication": [digits(s.communication) for s in rows],
    }  # fmt: skip


def cluster_data(job: Job, layout: Layout) -> dict[str, Any]:
    """What the page needs to know where a rank is and what groups it is in."""
    return {
        "world": layout.world, "gpus_per_node": job.cluster.gpus_per_node, "axes": [list(axis) for axis in layout.axes],
        "expert": {"etp": layout.etp, "ep": layout.ep, "edp": layout.edp} if job.model.moe else {},
        "levels": [{"name": level.name, "size": level.size} for level in job.cluster.levels],
    }  # fmt: skip


# -- words ------------------------------------------------------------------------------------------------------------------


def answer(plan: Plan, job: Job, layout: Layout) -> str:
    """The answer in a sentence."""
    e = plan.estimate
    fullest = max(e["memory"], key=lambda s: s["device"])
    degrees = ", ".join(f"{name} {size}" for name, size in degrees_of(layout)) or "no parallelism"
    sure = (
        "proved fastest under this cost model"
        if plan.certificate.proved
        else f"within {100 * plan.certificate.gap:.2g} % of the bound"
    )
    return (
        f"<b>{html.escape(job.model.name)}</b> trains on {layout.world:,} x {html.escape(job.cluster.gpu.name)} in "
        f"<b>{screen.seconds(e['step_seconds'])} a step</b> of {job.global_batch:,} sequences of {job.seq_len:,} tokens with {degrees}: "
        f"{e['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU, {100 * e['mfu']:.1f} % MFU, "
        f"{100 * fullest['device'] / e['limit_bytes']:.0f} % of the memory limit on the fullest GPU; {sure}."
    )


def degrees_of(layout: Layout) -> list[tuple[str, int]]:
    """The degrees that exceed one, in the field's names."""
    names = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp_replicate", "dp_shard")
    return [(n, getattr(layout, n)) for n in names if getattr(layout, n) > 1]


def cards(plan: Plan) -> str:
    e = plan.estimate
    fullest = max(e["memory"], key=lambda s: s["device"])
    c = plan.certificate
    low, high = screen.seconds(e["step_seconds_low"]), screen.seconds(e["step_seconds_high"])
    shown = (
        (
            "step",
            screen.seconds(e["step_seconds"]),
            f"80 %: {low} to {high}",
        ),
        ("tokens/s a GPU", f"{e['tokens_per_second_per_gpu']:,.0f}", ""),
        ("MFU", f"{100 * e['mfu']:.1f} %", f"HFU {100 * e['hfu']:.1f} %"),
        ("idle", f"{100 * e['bubble_fraction']:.1f} %", "of the step, mean of the stages"),
        ("fullest GPU", screen.gib(fullest["device"]), f"stage {fullest['stage']}, limit {screen.gib(e['limit_bytes'])}"),
        ("proof", "proved" if c.proved else "not proved", f"gap {100 * c.gap:.2g} %, {c.columns_legal:,} layouts"),
    )
    return "".join(
        f'<div class="card"><span>{html.escape(a)}</span><b>{html.escape(b)}</b><small>{html.escape(note)}</small></div>'
        for a, b, note in shown
    )


def timeline_note(spans: Spans, layout: Layout) -> str:
    note = (
        f"Schedule {layout.schedule}, {spans.microbatches:,} microbatches. Exposed communication is drawn at the end of its pass; "
        "where passes are too many to tell apart, a slice of time shows their shares, idle at the top."
    )
    if layout.pp > 1:
        note += f" A transfer between stages takes {screen.seconds(spans.transfer)}."
    if spans.drawn < spans.microbatches:
        note += f" Drawn with {spans.drawn:,} of them: the steady part repeats."
    return note + " Drag to zoom in time, double-click for the whole step; blank is waiting."


def memory_note(plan: Plan) -> str:
    fullest = max(plan.estimate["memory"], key=lambda s: s["device"])
    largest = max(figures.memory_parts(fullest).items(), key=lambda item: item[1])
    return f"Stage {fullest['stage']} is the fullest; {largest[0]} is its largest part ({screen.gib(largest[1])})."


def cluster_note(job: Job, layout: Layout) -> str:
    level = job.cluster.levels[0]
    return f"{layout.world:,} ranks, blocks are {level.name} domains of {min(level.size, layout.world)}; order {layout.order}, innermost first."


# -- tables -----------------------------------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """An HTML table; the first ``left`` columns are words."""

    def cell(tag: str, index: int, value: object) -> str:
        return f"<{tag}{'' if index < left else ' class=n'}>{breakable(str(value))}</{tag}>"

    head = "".join(cell("th", i, c) for i, c in enumerate(columns))
    body = "".join("<tr>" + "".join(cell("td", i, v) for i, v in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def breakable(text: str) -> str:
    """Escaped text that may break after the commas of a layout."""
    return html.escape(text).replace(",", ",<wbr>") if "=" in text else html.escape(text)


def stages_table(plan: Plan) -> str:
    times = plan.estimate.get("stage_seconds", [])
    rows = []
    for stage in plan.stages:
        layers = ", ".join(f"{r[0]}-{r[1]}" if r else "-" for r in stage.layers)
        ends = " + ".join(n for n, here in (("embedding", stage.embedding), ("head", stage.head)) if here)
        busy = screen.seconds(times[stage.stage]) if stage.stage < len(times) else ""
        kinds = sorted(set(stage.recompute))
        rows.append((stage.stage, layers, ends, "; ".join(kinds), busy))
    return table(("stage", "layers", "also", "recompute", "busy"), rows, left=4)


def sent_table(plan: Plan) -> str:
    rows = [
        (axis, link, f"{b / 2**30:,.3f}")
        for axis, links in plan.estimate.get("bytes_sent", {}).items()
        for link, b in links.items()
    ]
    return table(("axis", "over", "GiB a step"), rows, left=2) if rows else "<p>Nothing is sent.</p>"


def runners_table(plan: Plan) -> str:
    if not plan.runners_up:
        return "<p>None were asked for, or no really different layout is left (<code>axisplan plan --top 5</code>).</p>"
    rows = [
        (
            short(r.layout_text), screen.seconds(r.estimate["step_seconds"]), f"{100 * r.slower:+.1f} %",
            screen.gib(max(s["device"] for s in r.estimate["memory"])), f"{100 * r.chance_faster:.0f} %", screen.worst_loss(r.loses), r.flips,
        )
        for r in plan.runners_up
    ]  # fmt: skip
    return table(("layout", "step", "slower", "fullest GPU", "chance it is faster", "loses most on", "would win if"), rows)


def certificate(plan: Plan) -> str:
    c = plan.certificate
    rows: list[tuple[str, object]] = [
        ("legal columns", f"{c.columns_legal:,}"), ("cut by memory", f"{c.cut_by_memory:,}"), ("cut by bound", f"{c.cut_by_bound:,}"),
        ("cut by dominance", f"{c.cut_by_dominance:,}"), ("solved", f"{c.solved:,}"), ("unexplored", f"{c.unexplored:,}"),
        ("best bound", f"{c.best_bound_seconds:.6g} s"),
        ("fastest", f"{c.fastest_seconds:.6g} s"), ("proposed", f"{c.proposed_seconds:.6g} s (tie {100 * c.tie:g} %)"),
        ("gap", f"{c.gap:.2g}"), ("proved", "yes" if c.proved else "no"), ("objective", c.objective), ("solver", c.solver or "-"),
    ]  # fmt: skip
    rows += [("space", c.space)] * bool(c.space) + [("pinned", ", ".join(c.pins.values()))] * bool(c.pins)
    rows += [("note", n) for n in c.notes]
    return table(("", ""), rows, left=2)


def assumptions(plan: Plan, job: Job) -> str:
    """Every constant with its origin, the facts of the execution, what was guessed, and the inputs' hashes."""
    parts = []
    if guessed := plan.estimate.get("guessed"):
        parts.append("<h3>Guessed</h3><ul>" + "".join(f"<li>{html.escape(str(g))}</li>" for g in guessed) + "</ul>")
    settings = plan.job_settings.model_dump()
    rows = [(k.replace("_", " "), _said(v)) for k, v in settings.items()]
    rows += [(f"execution: {k}", _said(v)) for k, v in execution_dump(job.execution).items()]
    parts.append(f"<details open><summary>The job and the execution</summary>{table(('what', 'value'), rows, left=2)}</details>")
    constants = describe(job.cluster)
    counts: dict[str, int] = {}
    for row in constants:
        counts[row[3]] = counts.get(row[3], 0) + 1
    words = ", ".join(f"{n} {origin}" for origin, n in sorted(counts.items()))
    grid = table(("constant", "value", "unit", "origin", "source"), [(r[0], _figure(r[1]), *r[2:]) for r in constants], left=1)
    parts.append(f"<details><summary>{len(constants)} constants of the hardware: {html.escape(words)}</summary>{grid}</details>")
    grid = table(("input", "SHA-256"), list(plan.inputs.items()), left=2)
    parts.append(f"<details><summary>Inputs</summary>{grid}</details>")
    return "".join(parts)


def _said(value: Any) -> str:
    """A setting in words, not as Python writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_said, value)) or "none"
    if isinstance(value, float):
        return f"{value:,.10g}"
    return "none" if value is None else str(value)


def _figure(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
