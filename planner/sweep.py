"""What-if sweeps: plans over GPU counts, sequence lengths, batches and GPU types; or, of one point, every candidate and why it lost.

Each point is one plan (``planner.solve``); points run in processes of their own, finished ones are kept in a state file that a later
call takes up again, keyed by a hash of everything that the point depends on.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_models.job import Job
from cost_models.memory import fits
from planner.books import Outcome
from planner.columns import mode_text
from planner.legality import binding_category
from planner.plan import digest, hashes
from planner.search import Search
from planner.solve import PlanRequest, layout_of, search, solve
from profiles.errors import AxisplanError, DoesNotFit, InputError, one_line
from profiles.files import read_json, write_text
from profiles.version import __version__

if TYPE_CHECKING:
    from planner.rows import Row

AXES = ("cluster", "gpus", "seq_len", "global_batch")
COLUMNS = (
    *AXES, "fits", "layout", "step_seconds", "step_seconds_low", "step_seconds_high", "tokens_per_second", "tokens_per_second_per_gpu",
    "mfu", "peak_bytes", "limit_bytes", "binding", "gap", "proved", "reason",
)  # fmt: skip
ESTIMATED = ("step_seconds", "step_seconds_low", "step_seconds_high", "tokens_per_second_per_gpu", "mfu", "limit_bytes")
CANDIDATE_COLUMNS = (*AXES, "layout", "fits", "peak_bytes", "peak_is", "binding", "seconds", "seconds_are", "reason")
MOST_POINTS = 10_000
Report = Callable[[float, str], None]


@dataclass(frozen=True)
class Sweep:
    """The values of each axis; every combination is a point. ``request``: all that does not vary. ``tokens_kept``: the global batch is
    that of the first sequence length, and shrinks as sequences grow, so that a step keeps its tokens."""

    request: PlanRequest
    clusters: tuple[str, ...]
    gpus: tuple[int, ...] = ()
    seq_lens: tuple[int, ...] = ()
    global_batches: tuple[int, ...] = ()
    tokens_kept: bool = False
    candidates: bool = False


@dataclass(frozen=True)
class Point:
    values: dict[str, Any]
    request: PlanRequest | None
    refused: str = ""

    @property
    def key(self) -> str:
        """Everything its row depends on, hashed."""
        if self.request is None:
            return digest([self.values, self.refused, __version__])
        wishes = {k: v for k, v in vars(self.request).items() if k != "job"}
        return digest([self.values, hashes(self.request.job), json.loads(json.dumps(wishes)), __version__])


def points(sweep: Sweep) -> list[Point]:
    """Every combination, in the order of the axes; one that is no cluster (GPUs that do not fill nodes) keeps its reason.

    Raises InputError for an unknown cluster or more than ``MOST_POINTS`` points.
    """
    from profiles.hardware import load_cluster

    job = sweep.request.job
    seqs, batches = sweep.seq_lens or (job.seq_len,), sweep.global_batches or (job.global_batch,)
    number = len(sweep.clusters) * max(1, len(sweep.gpus)) * len(seqs) * len(batches)
    if number > MOST_POINTS:
        raise InputError("sweep", number, f"is more points than the {MOST_POINTS} a sweep takes", MOST_POINTS)
    out = []
    for name in sweep.clusters:
        cluster = load_cluster(name)
        for gpus, seq, batch in itertools.product(sweep.gpus or (cluster.gpus,), seqs, batches):
            sequences = max(1, batch * seqs[0] // seq) if sweep.tokens_kept else batch
            values = {"cluster": name, "gpus": gpus, "seq_len": seq, "global_batch": sequences}
            try:
                there = replace(job, cluster=cluster.with_gpus(gpus), seq_len=seq, global_batch=sequences)
            except InputError as error:
                out.append(Point(values, None, one_line(error)))
                continue
            out.append(Point(values, replace(sweep.request, job=there)))
    return out


def run(sweep: Sweep, *, jobs: int | None = None, state: Path | None = None, report: Report | None = None) -> list[dict[str, Any]]:
    """The row of every point, in order (with ``candidates``: the rows of all candidates of all points).

    ``jobs``: processes (default: the cores this one may use); ``state``: a JSON file of finished points, read first and written whole
    after each point. An interrupt loses only the points in flight.
    """
    todo = points(sweep)
    known: dict[str, list[dict[str, Any]]] = _read_state(state)
    work = candidate_rows if sweep.candidates else plan_rows
    keys = [f"{'candidates' if sweep.candidates else 'plan'}:{p.key}" for p in todo]
    waiting = [(k, p) for k, p in zip(keys, todo, strict=True) if k not in known]
    tell = report or (lambda share, what: None)
    done = len(todo) - len(waiting)
    for key, rows in _each(work, waiting, jobs or len(os.sched_getaffinity(0))):
        known[key] = rows
        done += 1
        if state is not None:
            write_text(state, json.dumps(known) + "\n")
        tell(done / len(todo), f"{done} of {len(todo)}")
    return [row for key in keys for row in known[key]]


def _read_state(state: Path | None) -> dict[str, list[dict[str, Any]]]:
    if state is None or not state.exists():
        return {}
    data = read_json(state, "--state")
    if not isinstance(data, dict) or not all(isinstance(rows, list) for rows in data.values()):
        raise InputError("--state", str(state), "is no state of a sweep")
    return data


def _each(
    work: Callable[[Point], list[dict[str, Any]]], waiting: Sequence[tuple[str, Point]], jobs: int
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    if jobs <= 1 or len(waiting) <= 1:
        for key, point in waiting:
            yield key, work(point)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    start = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(waiting)), mp_context=start, initializer=_leave_interrupts_to_the_parent)
    try:
        futures = {pool.submit(work, point): key for key, point in waiting}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise AxisplanError("a process of the sweep was killed (out of memory?); run again with fewer --jobs") from None
    except KeyboardInterrupt:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def plan_rows(point: Point) -> list[dict[str, Any]]:
    """The one row of a point: its plan, or why there is none."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {**point.values, "fits": False, "proved": False}
    if point.request is None:
        return [{**row, "reason": point.refused}]
    try:
        plan = solve(replace(point.request, top=0))
    except (InputError, DoesNotFit) as error:
        return [{**row, "reason": one_line(error), "limit_bytes": point.request.job.limit_bytes}]
    estimate, c = plan.estimate, plan.certificate
    worst = max(estimate["memory"], key=lambda s: s["device"])
    return [
        row
        | {
            "fits": True, "layout": plan.layout_text, "peak_bytes": worst["device"], "gap": c.gap, "proved": c.proved,
            "tokens_per_second": point.request.job.tokens / plan.step_seconds, "binding": binding_category(_Named(worst)),
            **{k: estimate[k] for k in ESTIMATED},
        }
    ]  # fmt: skip


class _Named:
    """A stage's JSON by attribute."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


def candidate_rows(point: Point) -> list[dict[str, Any]]:
    """A row for each candidate of a point: the legal combinations of degrees and micro batch (with the best schedule, sharding and
    recompute found for it where it was worth solving), fastest first; why each was not chosen."""
    if point.request is None:
        return [{**dict.fromkeys(CANDIDATE_COLUMNS), **point.values, "fits": False, "reason": point.refused}]
    try:
        if point.request.job.cluster.pools:
            raise InputError(
                "--candidates", point.values["cluster"], "candidates are listed for one GPU type, not for pools of several", None
            )
        found, outcome = search(replace(point.request, top=0))
    except InputError as error:
        return [{**dict.fromkeys(CANDIDATE_COLUMNS), **point.values, "fits": False, "reason": one_line(error)}]
    rows = [{**dict.fromkeys(CANDIDATE_COLUMNS), **point.values, **row} for row in _candidates(found, outcome)]
    return sorted(rows, key=lambda r: (not r["fits"], r["seconds"], r["layout"]))


def _candidates(found: Search, outcome: Outcome) -> Iterator[dict[str, Any]]:
    job = found.job
    answers: dict[tuple[Any, int], Any] = {}
    for one in outcome.found:
        key = (one.prefix, one.batch.micro_batch)
        if key not in answers or one.answer.seconds < answers[key].answer.seconds:
            answers[key] = one
    fastest = outcome.fastest
    for row, seconds, least in zip(found.rows, found.row_bounds, found.row_bytes, strict=True):
        answer = answers.get((row.prefix, row.micro_batch))
        if answer is None:
            yield _unsolved(found, job, row, float(seconds), float(least), None if fastest is None else fastest.answer.seconds)
            continue
        layout = layout_of(answer)
        worst = fits(job, layout)[1]
        slower = answer.answer.seconds / fastest.answer.seconds - 1 if fastest else 0.0
        reason = "the fastest" if answer is fastest else f"{100 * slower:.2f} % slower than the fastest"
        yield {
            "layout": layout.text(), "fits": True, "peak_bytes": float(worst.device), "peak_is": "exact", "binding": binding_category(worst),
            "seconds": answer.answer.seconds, "seconds_are": "exact", "reason": reason,
        }  # fmt: skip


def _unsolved(found: Search, job: Job, row: Row, seconds: float, least: float, fastest: float | None) -> dict[str, Any]:
    """A candidate cut by its bounds; the layout shown is the leanest of it: all sharded, all recomputed."""
    out: dict[str, Any] = {"seconds": seconds, "seconds_are": "at least", "peak_is": "at least", "fits": True, "peak_bytes": least}
    choice = _leanest(found, row)
    if choice is None:
        return {**out, "layout": str(row.prefix), "fits": False, "reason": "no legal sharding goes with it"}
    out["layout"] = choice.text()
    inside, worst = fits(job, choice)
    if least > job.limit_bytes:
        over = (least - job.limit_bytes) / 2**30
        return {
            **out, "fits": False, "binding": binding_category(worst),
            "reason": f"does not fit: at least {over:.2f} GiB over the limit with everything sharded and recomputed",
        }  # fmt: skip
    out |= {"peak_bytes": float(worst.device), "peak_is": "of the leanest even split", "binding": binding_category(worst)}
    if not inside:
        return {**out, "fits": False, "reason": "does not fit in an even split with everything sharded and recomputed"}
    if fastest is None:
        return {**out, "reason": "was not solved"}
    if seconds >= fastest:
        return {**out, "reason": f"cut by its bound: cannot take less than {seconds:.6g} s, the fastest takes {fastest:.6g} s"}
    return {**out, "reason": f"cut by the bounds of its schedules and shardings, which reach {fastest:.6g} s or the gap stated"}


def _leanest(found: Search, row: Row) -> Any:
    batch = row.batches[0]
    shards = found.space.columns_of(row.prefix, batch)
    if not shards:
        return None
    shard = max(shards, key=lambda s: (s.zero, s.dp_shard, len(s.offload)))
    return found.space.layout(row.prefix, batch, shard, recompute=mode_text(found.modes[-1]))


# -- showing it -----------------------------------------------------------------------------------------------------------


def to_csv(rows: Iterable[dict[str, Any]]) -> str:
    """Rows as CSV; empty cells for what there is none of."""
    rows = list(rows)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """All rows, as JSON where the name ends so, else as CSV."""
    write_text(path, json.dumps(rows, indent=1) + "\n" if path.suffix == ".json" else to_csv(rows))


def varying(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The axes that take more than one value, the one with most first."""
    many = {a: len({r[a] for r in rows}) for a in AXES}
    return sorted((a for a in AXES if many[a] > 1), key=lambda a: (-many[a], AXES.index(a)))


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens a second a GPU against the axis with most values, a line for each choice of the others; what does not fit is left out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes = varying(rows) or ["gpus"]
    numeric = [a for a in axes if a != "cluster"] or ["gpus"]
    across, others = numeric[0], [a for a in axes if a != numeric[0]]
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["fits"]:
            name = ", ".join(f"{row[a]}" if a == "cluster" else f"{a.replace('_', ' ')} {row[a]}" for a in others)
            lines.setdefault(name, []).append((row[across], row["tokens_per_second_per_gpu"]))
    figure, picture = plt.subplots(figsize=(8, 5))
    for (name, spots), marker in zip(lines.items(), itertools.cycle("osD^v<>PX*"), strict=False):
        picture.plot(*zip(*sorted(spots), strict=True), marker=marker, label=name or None)
    picture.set_xscale("log", base=2)
    picture.set_ylim(bottom=0)
    picture.set_xlabel(across.replace("_", " "))
    picture.set_ylabel("tokens/s a GPU")
    if any(lines):
        picture.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
