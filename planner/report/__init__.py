"""Pictures of a plan: one offline HTML file, PNG and SVG for papers, traces for Perfetto."""

from __future__ import annotations

from pathlib import Path

from planner.plan import Plan
from profiles.errors import InputError

ENDINGS = {"html": ".html", "png": ".png", "svg": ".svg", "trace": ".trace.json"}
SUFFIXES = {".html": "html", ".htm": "html", ".png": "png", ".svg": "svg", ".json": "trace"}


def default_name(plan: Path, form: str | None) -> Path:
    """Where the report of the plan file ``plan`` goes when nothing is said."""
    return plan.with_name(plan.name.removesuffix(".json") + ENDINGS[form or "html"])


def write_report(plan: Path, out: Path | None, form: str | None = None, records: Path | None = None) -> tuple[str, Path]:
    """Write the report of the plan file ``plan`` to ``out`` (default: beside the plan) as html, png, svg or trace (default: by the
    file's ending); returns the form and the file. ``records``: JSON lines of a run, which a trace shows beside the prediction.

    Raises InputError for an ending that tells no form, AxisplanError where the plotting packages are absent.
    """
    loaded = Plan.load(plan)
    out = out or default_name(plan, form)
    form = form or SUFFIXES.get(out.suffix.lower())
    if form is None:
        raise InputError("--out", out, f"tells no format; end it in {', '.join(SUFFIXES)} or give --format", f"{out}.html")
    if out.absolute() == plan.absolute():
        raise InputError("--out", out, "is the plan itself", default_name(plan, form))
    if records is not None and form != "trace":
        raise InputError("--run", records, "is laid over a trace", "--format trace")
    if form == "html":
        from planner.report.page import page
        from profiles.files import write_text

        write_text(out, page(loaded))
    elif form == "trace":
        from planner.compare import load_side
        from planner.traces import write_trace

        steps = load_side(records) if records is not None else []
        if isinstance(steps, Plan):
            raise InputError("--run", records, "is a plan, not a run's JSON lines")
        write_trace(loaded, out, steps)
    else:
        from planner.report.paper import draw

        draw(loaded, out, form)
    return form, out
