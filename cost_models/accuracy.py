"""Measured runs against predictions: error by source, ranking, coverage, and the verdict against a baseline.

``regress`` predicts every run and scores it. Errors of time are ``predicted / measured - 1``; a *group* is (source, model, GPU),
and the median over groups keeps a source with many rows from deciding. Layouts are ranked only against layouts of the same
*setting*: everything but the layout equal. What counts as a fitted constant is listed in ``data/fitted.yaml``.
"""

from __future__ import annotations

import csv
import importlib
import io
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cost_models.compute import kernel_table, product_table
from cost_models.execution import load_execution
from cost_models.job import GIB
from cost_models.runs import Run, Skipped
from cost_models.step import estimate
from profiles.errors import InputError
from profiles.files import read_shipped
from profiles.hardware import load_gpu

TELLING = 0.02
"""Runs whose measured times differ by less than this are not ranked: repeats of one configuration differ by 1-2 %."""
PREDICTION_COLUMNS = (
    "id", "predicted_step_s", "predicted_low_s", "predicted_high_s", "predicted_peak_allocated_GiB", "predicted_peak_reserved_GiB",
    "predicted_device_GiB", "note",
)  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """A run and what the cost models say about it; memory in GiB on the worst stage."""

    run: Run
    seconds: float
    low: float
    high: float
    allocated: float
    reserved: float
    device: float
    causes: Mapping[str, float]

    @property
    def error(self) -> float | None:
        """predicted / measured - 1 of the step, None where no time was measured."""
        return None if self.run.seconds is None else self.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """The same of the peak memory that the source counted; None where it did not say what it counted."""
        if not self.run.memory_gib or not self.run.memory_figure:
            return None
        predicted: float = getattr(self, self.run.memory_figure)
        return predicted / self.run.memory_gib - 1

    @property
    def covered(self) -> bool:
        return self.run.seconds is not None and self.low <= self.run.seconds <= self.high


def predict(run: Run) -> Prediction:
    """The estimate of one run. Raises InputError where its layout cannot run."""
    found = estimate(run.job, run.layout)

    def worst(figure: str) -> float:
        return float(max((getattr(stage, figure) for stage in found.memory), default=0.0)) / GIB

    times = float(found.step_seconds), float(found.step_seconds_low), float(found.step_seconds_high)
    return Prediction(run, *times, worst("peak_allocated"), worst("peak_reserved"), worst("device"), found.seconds)


@dataclass(frozen=True)
class Regression:
    """Predictions of all runs that could be mapped, and the rows that could not. Scores are over the *judged* ones: grade A rows
    whose time can be used; where a file has no such row, over every row that has a time."""

    predictions: tuple[Prediction, ...]
    skipped: tuple[Skipped, ...]

    @property
    def judged(self) -> tuple[Prediction, ...]:
        chosen = tuple(p for p in self.predictions if p.run.judged)
        return chosen or tuple(p for p in self.predictions if p.error is not None)

    def to_json(self) -> dict[str, Any]:
        """DESIGN.md's keys; errors are fractions."""
        judged = self.judged
        scored = {id(p) for p in judged}
        others = [p for p in self.predictions if p.error is not None and id(p) not in scored]
        return {
            "rows": len(judged),
            "skipped": [{"id": s.id, "why": s.why} for s in self.skipped],
            "step_time": {
                **score(judged),
                "median_group_mape": median_group(judged),
                "groups": len({p.run.group for p in judged}),
                "within_5_percent": _share(judged, 0.05),
                "within_10_percent": _share(judged, 0.10),
                "by_source": _by(judged, lambda p: p.run.source),
                "by_gpu": _by(judged, lambda p: p.run.group[2]),
                "by_kind": _by(judged, lambda p: "moe" if p.run.moe else "dense"),
                "by_group": _by(judged, lambda p: " | ".join(p.run.group)),
                "other_grades": _by(others, lambda p: f"{p.run.grade or 'none'} | {p.run.source}"),
            },
            "memory": memory_scores(self.predictions),
            "ranking": ranking(judged),
            "interval_coverage": sum(p.covered for p in judged) / len(judged) if judged else 0.0,
            "fitted_constants": len(fitted_constants()),
            "fitted": [entry["name"] for entry in fitted_constants()],
            "guessed": _guesses(judged),
        }

    def predictions_csv(self) -> str:
        """One line a run (``PREDICTION_COLUMNS``), the runs that could not be mapped with the reason in ``note``."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(PREDICTION_COLUMNS)
        for p in self.predictions:
            figures = (p.seconds, p.low, p.high, p.allocated, p.reserved, p.device)
            writer.writerow([p.run.id, *(f"{figure:.6g}" for figure in figures), "; ".join(p.run.guessed)])
        for s in self.skipped:
            writer.writerow([s.id, "", "", "", "", "", "", s.why])
        return out.getvalue()


def regress(runs: Iterable[Run], skipped: Iterable[Skipped] = ()) -> Regression:
    """Predict every run; one that the cost models refuse is skipped with the reason."""
    predictions, left_out = [], list(skipped)
    for run in runs:
        try:
            predictions.append(predict(run))
        except InputError as error:
            left_out.append(Skipped(run.id, str(error)))
    return Regression(tuple(predictions), tuple(left_out))


# -- scores ---------------------------------------------------------------------------------------------------------------


def score(predictions: Iterable[Prediction]) -> dict[str, float]:
    """``n``, ``mape`` (mean absolute error), ``median`` absolute error, ``bias`` (mean error), ``p90``, as fractions."""
    return _score([p.error for p in predictions if p.error is not None])


def _score(errors: Sequence[float]) -> dict[str, float]:
    if not errors:
        return {"n": 0}
    sizes = sorted(abs(e) for e in errors)
    return {
        "n": len(sizes),
        "mape": statistics.mean(sizes),
        "median": statistics.median(sizes),
        "bias": statistics.mean(errors),
        "p90": sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
    }


def _by(predictions: Iterable[Prediction], key: Callable[[Prediction], str]) -> dict[str, dict[str, float]]:
    parts: defaultdict[str, list[Prediction]] = defaultdict(list)
    for p in predictions:
        parts[key(p)].append(p)
    return {name: score(members) for name, members in sorted(parts.items())}


def median_group(predictions: Iterable[Prediction]) -> float:
    """Median over (source, model, GPU) of the group's mean absolute error."""
    groups: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for p in predictions:
        if p.error is not None:
            groups[p.run.group].append(abs(p.error))
    return statistics.median(statistics.mean(errors) for errors in groups.values()) if groups else 0.0


def _share(predictions: Sequence[Prediction], limit: float) -> float:
    errors = [p.error for p in predictions if p.error is not None]
    return sum(abs(e) <= limit for e in errors) / len(errors) if errors else 0.0


def memory_scores(predictions: Iterable[Prediction]) -> dict[str, Any]:
    """Error of peak memory by source, apart for each figure a source counts (allocated, reserved, device); over runs of grade A, as
    for time (a run's grade is empty in a user's own file)."""
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for p in predictions:
        error = p.memory_error
        if error is not None and p.run.grade in ("", "A"):
            parts[f"{p.run.source} | {p.run.memory_figure}"].append(error)
    return {name: _score(errors) for name, errors in sorted(parts.items())}


def _guesses(predictions: Iterable[Prediction]) -> dict[str, int]:
    counts: defaultdict[str, int] = defaultdict(int)
    for p in predictions:
        for guess in p.run.guessed:
            counts[guess] += 1
    return dict(sorted(counts.items()))


def ranking(predictions: Iterable[Prediction]) -> dict[str, Any]:
    """How well layouts of one setting are ordered.

    ``pair_order``: share of the pairs that differ by more than ``TELLING`` which are ordered rightly; ``tau``: Kendall's tau-b over
    the same pairs (right minus wrong over all), averaged over settings; ``regret``: how much slower the layout predicted fastest
    was measured than the fastest, averaged over settings; ``best_picked``: share of settings in which it is the fastest.
    """
    settings: defaultdict[tuple[str, ...], list[Prediction]] = defaultdict(list)
    for p in predictions:
        if p.error is not None:
            settings[p.run.setting].append(p)
    right = wrong = 0
    taus, regrets = [], []
    for members in settings.values():
        if len({p.run.layout for p in members}) < 2:
            continue
        agree = disagree = 0
        for a, b in itertools.combinations(members, 2):
            measured_a, measured_b = a.run.seconds or 0.0, b.run.seconds or 0.0
            if a.run.layout == b.run.layout or abs(measured_a - measured_b) <= TELLING * min(measured_a, measured_b):
                continue
            same = (a.seconds - b.seconds) * (measured_a - measured_b) > 0
            agree, disagree = agree + same, disagree + (not same)
        if agree + disagree:
            taus.append((agree - disagree) / (agree + disagree))
            right, wrong = right + agree, wrong + disagree
        chosen, fastest = min(members, key=lambda p: p.seconds), min(p.run.seconds or 0.0 for p in members)
        regrets.append((chosen.run.seconds or 0.0) / fastest - 1)
    if not regrets:
        return {"settings": 0, "pairs": 0, "tau": None, "pair_order": None, "regret": None}
    return {
        "settings": len(regrets),
        "pairs": right + wrong,
        "tau": statistics.mean(taus) if taus else None,
        "pair_order": right / (right + wrong) if right + wrong else None,
        "regret": statistics.mean(regrets),
        "worst_regret": max(regrets),
        "best_picked": sum(r <= TELLING for r in regrets) / len(regrets),
    }


@cache
def fitted_constants() -> tuple[dict[str, Any], ...]:
    """The register of constants that were moved to agree with published runs: ``name``, ``place``, ``low``, ``high``, ``prior``."""
    return tuple(read_shipped(Path(__file__).parent / "data" / "fitted.yaml")["fitted"])


def constant_value(place: str) -> float:
    """The value that the constant at a ``place`` of the register has now."""
    kind, _, rest = place.partition(":")
    name, _, key = rest.rpartition(".")
    if kind in ("kernel", "products"):
        table = kernel_table() if kind == "kernel" else product_table()
        return float(table[name][key]["value"])
    if kind == "gpu":
        return float(getattr(load_gpu(name).facts, key).value)
    if kind == "execution":
        return float(getattr(load_execution("megatron" if name == "any" else name), key))
    return float(getattr(importlib.import_module(name), key))


# -- baseline -------------------------------------------------------------------------------------------------------------

WATCHED = (
    ("step_time.mape", 0.002), ("step_time.median_group_mape", 0.002), ("step_time.by_source.*.mape", 0.01),
    ("step_time.by_kind.*.mape", 0.005), ("memory.*.mape", 0.005), ("ranking.pair_order", -0.01), ("ranking.regret", 0.005),
    ("fitted_constants", 0.5),
)  # fmt: skip
"""Figures that may not get worse, and by how much they may move (negative: larger is better)."""
VISIBLE = 5e-5
"""Differences below this are not shown: they vanish in the figures that are printed."""
COVERAGE = (0.7, 0.9)
"""Where the coverage of an 80 % interval must lie."""


@dataclass(frozen=True)
class Change:
    """A watched figure that differs from the baseline's."""

    figure: str
    before: float
    after: float
    worse: bool

    def __str__(self) -> str:
        scale, unit = (1.0, "") if self.figure == "fitted_constants" else (100.0, " %")
        word = "WORSE" if self.worse else "changed"
        return f"{word:8s}{self.figure}: {scale * self.before:.2f}{unit} -> {scale * self.after:.2f}{unit}"


def compare(now: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[Change]:
    """Watched figures of two ``Regression.to_json()`` that differ, worse ones first; one that is missing now counts as worse."""
    changes = []
    for pattern, allowed in WATCHED:
        old, new = _figures(baseline, pattern), _figures(now, pattern)
        for figure, before in old.items():
            after = new.get(figure)
            if before is None:
                continue
            if after is None:
                changes.append(Change(figure, before, float("nan"), True))
            elif abs(after - before) > VISIBLE:
                worse = after < before + allowed if allowed < 0 else after > before + allowed
                changes.append(Change(figure, before, after, worse))
    before, after = float(baseline.get("interval_coverage", 0.8)), float(now.get("interval_coverage", 0.8))
    if COVERAGE[0] <= before <= COVERAGE[1] and not COVERAGE[0] <= after <= COVERAGE[1]:
        changes.append(Change("interval_coverage", before, after, True))
    return sorted(changes, key=lambda c: (not c.worse, c.figure))


def _figures(tree: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """Every number that a dotted path names, ``*`` standing for any key."""
    found: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    for part in pattern.split("."):
        step = []
        for path, node in found:
            if isinstance(node, Mapping):
                step += [((*path, key), value) for key, value in node.items() if part in ("*", key)]
        found = step
    return {".".join(path): value for path, value in found}


def github_annotations(changes: Iterable[Change], file: str) -> list[str]:
    """GitHub workflow commands for the changes: errors for what got worse, notices for the rest."""
    out = []
    for change in changes:
        text = str(change).split(None, 1)[1].replace("%", "%25")
        out.append(f"::{'error' if change.worse else 'notice'} file={file},title=axisplan regress::{text}")
    return out
