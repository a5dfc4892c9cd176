"""Known good layouts: for each (model, GPU, count) of the published grade A runs, our plan beside the layout that was published.

``python benchmarks/known_layouts.py [--only TEXT] [--again]`` plans each job under the run's own Execution, precision and MoE balance
(margin 0: the run used what it used) and keeps the rows in ``benchmarks/results/known_layouts.json``; those already there are left
unless ``--again``. ``--page`` writes ``docs/known-layouts.md`` from them. All of them take about half an hour of one core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cost_models.job import Job
from cost_models.memory import fits
from cost_models.runs import Run, load_runs, read_rows
from cost_models.step import estimate
from planner import search
from planner.layout_words import bare
from planner.legality import violations
from planner.solve import PlanRequest, solve
from profiles.errors import DoesNotFit, InputError
from profiles.files import write_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "known_layouts.json"
PAGE = ROOT / "docs" / "known-layouts.md"
GIB = 2**30
NEAR = 1e-9
QUICK_COLUMNS = 12


def chosen(runs: Iterable[Run]) -> list[Run]:
    """Of each (model, GPU, count) among the judged grade A runs, the one with most tokens a second; in the order of the file."""
    best: dict[tuple[str, str, int], Run] = {}
    for run in runs:
        if run.grade != "A" or not run.judged:
            continue
        key = (run.group[1], run.group[2], run.job.cluster.gpus)
        if key not in best or _speed(run) > _speed(best[key]):
            best[key] = run
    return list(best.values())


def _speed(run: Run) -> float:
    assert run.seconds is not None
    return run.job.tokens / run.seconds


def compare(run: Run) -> dict[str, Any]:
    """A row of the table: what was published, what we plan, both predicted, what was measured."""
    job = replace(run.job, margin=0.0)
    published = estimate(job, run.layout, detail=False).step_seconds
    inside, worst = fits(job, run.layout)
    broken = [v.rule for v in violations(job, run.layout)]
    row: dict[str, Any] = {
        "id": run.id, "source": run.source, "model": run.group[1], "gpu": run.group[2], "gpus": job.cluster.gpus,
        "execution": job.execution.name, "precision": job.precision, "seq_len": job.seq_len, "global_batch": job.global_batch,
        "published": run.layout.text(), "published_s": published, "measured_s": run.seconds, "published_fits": bool(inside),
        "published_gib": worst.needed / GIB, "limit_gib": job.limit_bytes / GIB, "broken": broken,
    }  # fmt: skip
    started = time.process_time()
    for effort in ("quick", "full", "prove"):
        row |= planned(job, effort)
        row["verdict"] = verdict(row)
        if row["verdict"] != "slower":
            break
    if row["verdict"] == "slower":
        row["pinned_s"] = pinned(job, run)
    row["cpu_s"] = round(time.process_time() - started, 1)
    return row


def planned(job: Job, effort: str) -> dict[str, Any]:
    """Our plan. ``quick``: fewer columns, and none of them by the integer program: more effort can only find a faster one. ``full`` stops at
    a gap of 1 %; ``prove`` looks on, for a minute at most."""
    module: Any = search
    held = module.EFFORT, module.solve_column
    if effort == "quick":
        module.EFFORT, module.solve_column = QUICK_COLUMNS, partial(held[1], largest=0)
    try:
        more: dict[str, Any] = {"prove": True, "time_limit": 60.0} if effort == "prove" else {}
        plan = solve(PlanRequest(job, tie=0.0, top=0, **more))
        return {"ours": plan.layout_text, "ours_s": plan.step_seconds, "gap": plan.certificate.gap, "effort": effort}
    except (InputError, DoesNotFit) as error:
        return {"ours": None, "ours_s": None, "why": str(error)[:300], "effort": effort}
    finally:
        module.EFFORT, module.solve_column = held


def verdict(row: dict[str, Any]) -> str:
    """``as fast``: ours is predicted at most as slow; ``slower``: a defect of the search; ``published does not fit``: of the memory model
    (the layout ran); ``published is not legal``: of a rule, unless the batch was rounded; ``nothing fits``: no plan at all."""
    if row["ours_s"] is None:
        return "nothing fits"
    if row["ours_s"] <= row["published_s"] * (1 + NEAR):
        return "as fast" if row["published_fits"] else "published does not fit"
    if not row["published_fits"]:
        return "published does not fit"
    return "published is not legal" if row["broken"] else "slower"


def pinned(job: Job, run: Run) -> float | None:
    """Seconds of our plan when the published degrees are pinned: as fast as published, the search passed it by; else the space lacks it."""
    layout = run.layout
    fields = {f: getattr(layout, f) for f in ("tp", "cp", "pp", "vpp", "ep", "micro_batch")}
    try:
        return solve(PlanRequest(job, pins=",".join(f"{k}={v}" for k, v in fields.items()), tie=0.0, top=0)).step_seconds
    except (InputError, DoesNotFit):
        return None


# -- the page ---------------------------------------------------------------------------------------------------------------


def page(rows: list[dict[str, Any]], jobs: int) -> str:
    """The page in Markdown; ``jobs``: how many there are, of which ``rows`` were planned."""
    kinds = ("as fast", "slower", "published does not fit", "published is not legal", "nothing fits")
    count = {kind: sum(r["verdict"] == kind for r in rows) for kind in kinds}
    measured = [r for r in rows if r["ours_s"]]
    gain = sorted(r["published_s"] / r["ours_s"] for r in measured)
    out = [
        "# Known good layouts",
        "",
        "For each (model, GPU, count) among the grade A rows of [the published runs](runs.md): the layout of the fastest measured run beside",
        "our plan for the same job, under the run's own Execution, precision, batch and MoE balance, with no margin (the run took the",
        "memory it took). A few columns are answered without the integer program first; only where that is slower, with the search's usual",
        "effort (a gap of 1 %), then for a minute with `--prove`.",
        "Seconds are predicted by the same cost model; a lower one is a forecast, not a",
        f"measurement: nobody ran our layouts. {len(rows)} of the {jobs} jobs were planned. Written by",
        "`python benchmarks/known_layouts.py --page`.",
        "",
        "| outcome | jobs | what it says |",
        "|---|---:|---|",
        f"| our plan is predicted at most as slow as the published layout | {count['as fast']} | as it must be |",
        f"| it is slower | {count['slower']} | a defect of the search |",
        f"| the published layout ran, and we say that it does not fit | {count['published does not fit']} | a defect of the memory model |",
        f"| the published layout breaks one of our rules | {count['published is not legal']} | a defect of a rule, or a rounded batch |",
        f"| nothing fits | {count['nothing fits']} | a defect of the memory model |",
        "",
    ]
    if gain:
        out += [
            f"Published over ours, predicted: median {gain[len(gain) // 2]:.2f}, least {gain[0]:.2f}, most {gain[-1]:.2f}, over {len(gain)}"
            f" jobs; {sum(r['cpu_s'] for r in rows) / len(rows):.1f} s of CPU a job in the mean.",
            "",
        ]
    for kind in kinds[1:]:
        some = [r for r in rows if r["verdict"] == kind]
        if some:
            out += [f"## {kind[0].upper()}{kind[1:]}", "", *table(some), ""]
    return "\n".join([*out, "## All", "", *table(rows), ""])


def table(rows: list[dict[str, Any]]) -> list[str]:
    head = "| run | job | published | predicted | measured | needs of GiB | ours | predicted | gap |"
    lines = [head, "|---|---|---|---:|---:|---:|---|---:|---:|"]
    for r in rows:
        job = f"{r['model']}, {r['gpus']} x {r['gpu']}, {r['execution']} {r['precision']}, {r['global_batch']} x {r['seq_len']}"
        needs = f"{r['published_gib']:.1f} / {r['limit_gib']:.1f}"
        ours = r["ours"] or r.get("why", "")[:80]
        rules = f" (breaks {', '.join(r['broken'])})" if r["broken"] else ""
        lines.append(
            f"| {cell(r['id'])} | {cell(job)} | {layout(r['published'])}{rules} | {r['published_s']:.4g} s | {r['measured_s']:.4g} s | {needs}"
            f" | {layout(ours)} | {_seconds(r['ours_s'])} | {_share(r.get('gap'))} |"
        )
    return lines


def layout(text: str) -> str:
    """A layout inside a table."""
    return cell(bare(text).replace(",", " ").replace("micro_batch", "mb"))


def cell(text: str) -> str:
    """Text inside a table."""
    return text.replace("|", "\\|")


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g} s"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="runs whose id, model or source has this text")
    parser.add_argument("--again", action="store_true", help="also those already in the results")
    parser.add_argument("--page", action="store_true", help="write the docs page from the results")
    parser.add_argument("--every", type=int, default=1, help="of those only every n-th")
    parser.add_argument("--limit", type=int, default=10_000, help="most runs to plan now")
    arguments = parser.parse_args()
    runs = chosen(load_runs(read_rows(ROOT / "tests" / "data" / "runs.csv"))[0])
    known: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    wanted = [r for r in runs if arguments.only.lower() in f"{r.id} {r.group} {r.source}".lower()][:: max(1, arguments.every)]
    todo = [r for r in wanted if arguments.again or r.id not in known][: 0 if arguments.page else arguments.limit]
    for run in todo:
        known[run.id] = compare(run)
        r = known[run.id]
        print(
            f"{r['verdict']:24} {run.id:36} {r['published_s']:9.4g} {_seconds(r['ours_s']):>12} {r['cpu_s']:6} s  {r['ours']}",
            flush=True,
        )
        write_text(RESULTS, json.dumps(known, indent=1) + "\n")
    if arguments.page:
        write_text(PAGE, page([known[r.id] for r in runs if r.id in known], len(runs)))


if __name__ == "__main__":
    main()
