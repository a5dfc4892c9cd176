"""Calibration: the few constants of one cluster, moved so that predictions agree with a user's measured runs.

At most three factors, each with a meaning and a range: the speed of matrix products and attention on a hot chip, the achieved rate
of device memory, the achieved rate of the network between domains. How many are moved depends on how many runs there are; whether
moving them helps is judged on runs left out of the fit, and when it does not, nothing is returned.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cost_models.runs import Run
from cost_models.step import estimate
from profiles.cluster import ClusterSpec, Level
from profiles.errors import AxisplanError, InputError
from profiles.gpu import Constant

FACTORS: dict[str, tuple[float, float, str]] = {
    "compute": (0.5, 1.2, "matrix products and attention of a hot chip, over the profile's"),
    "network": (0.3, 1.3, "achieved rate between domains, over the profile's"),
    "memory": (0.6, 1.2, "achieved rate of device memory, over the profile's"),
}
"""Factor -> (low, high, meaning), in the order in which they are added."""
RUNS_PER_FACTOR = 4
"""Runs needed for each factor that is fitted."""
FEWEST_RUNS = 4
PRIOR_WIDTH = 0.25
"""Standard deviation of the logarithm of a factor before any run is seen; with the noise of a run it says how far few runs may
move it."""
NOISE = 0.05
"""Standard deviation of a run's relative error that no factor explains."""
FOLDS = 5
STEP = 0.02
"""Change of a log factor by which slopes are measured."""
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """``cluster`` with its constants moved. Errors are mean absolute relative errors of step time: ``before`` on all runs,
    ``after`` in the fit, ``held_out`` on runs left out of it."""

    cluster: ClusterSpec
    factors: Mapping[str, float]
    runs: int
    before: float
    after: float
    held_out: float


def calibrate(runs: Sequence[Run], cluster: ClusterSpec) -> Calibration:
    """Fit ``cluster``'s factors to ``runs`` (those on its GPU type that have a time).

    Raises InputError where there are too few such runs, or only one layout of one model, and AxisplanError where the fit does not
    predict left-out runs better than the profile as it is.
    """
    usable = [run for run in runs if run.seconds and run.job.cluster.gpu.name == cluster.gpu.name]
    if len(usable) < FEWEST_RUNS:
        raise InputError(
            "RUNS.csv", len(usable), f"runs on {cluster.gpu.name} with a time; calibrating needs {FEWEST_RUNS}", FEWEST_RUNS
        )
    groups = [(run.group[1], run.layout.text()) for run in usable]
    if len(set(groups)) < 2:
        raise InputError(
            "RUNS.csv", groups[0][1], "is the only layout; runs of at least two models or layouts tell a constant from an accident"
        )
    names = list(FACTORS)[: max(1, min(len(FACTORS), len(usable) // RUNS_PER_FACTOR))]
    if "network" in names and not any(len(run.job.cluster.levels) > 1 for run in usable):
        names = [name for name in FACTORS if name != "network"][: len(names)]
    measured = _Linear.around(usable, names, np.zeros(len(names)))
    x = measured.fit(np.ones(len(usable), bool))
    measured = _Linear.around(usable, names, x)
    x = measured.fit(np.ones(len(usable), bool))
    before = statistics.mean(abs(math.exp(r) - 1) for r in _residuals(usable, {}))
    held_out = statistics.mean(_held_out(measured, groups))
    if held_out >= before:
        found = f"runs left out of the fit are predicted {100 * held_out:.1f} % off, {100 * before:.1f} % without it"
        raise AxisplanError(f"calibration does not help: {found}")
    factors = _factors(names, x)
    after = statistics.mean(abs(math.exp(r) - 1) for r in _residuals(usable, factors))
    return Calibration(scaled(cluster, factors), factors, len(usable), before, after, held_out)


def scaled(cluster: ClusterSpec, factors: Mapping[str, float]) -> ClusterSpec:
    """``cluster`` with its constants multiplied by ``factors`` (names of ``FACTORS``); moved ones get origin ``fitted``."""
    changes = {}
    facts = cluster.gpu.facts
    if "compute" in factors:
        changes["sustained_matmul_speed"] = facts.sustained_matmul_speed.value * factors["compute"]
    if "memory" in factors:
        changes["memory_achieved_bytes_per_second"] = facts.memory_achieved_bytes_per_second.value * factors["memory"]
    gpu = cluster.gpu.faster(**changes) if changes else cluster.gpu
    levels = cluster.levels
    if "network" in factors:
        levels = tuple(_scaled_level(level, factors["network"]) if level.link.network else level for level in levels)
    return replace(cluster, gpu=gpu, levels=levels, kind="", name=f"{cluster.name}-calibrated")


def _scaled_level(level: Level, factor: float) -> Level:
    link = level.link
    curves = {
        kind: tuple(
            replace(
                row,
                bytes_per_second=row.bytes_per_second * factor,
                origin="fitted",
                source=f"calibrated x {factor:.3f}: {row.source}",
            )
            for row in rows
        )
        for kind, rows in link.curves.items()
    }
    peak = link.peak_bytes_per_second
    moved = Constant(peak.value * max(1.0, factor), peak.unit, peak.origin, peak.source)
    return replace(level, link=replace(link, curves=curves, peak_bytes_per_second=moved))


@dataclass(frozen=True)
class _Linear:
    """Log errors of runs as linear functions of the log factors, about ``point``: ``errors + slope (x - point)``."""

    names: Sequence[str]
    point: Vector
    errors: Vector
    slope: Vector

    @classmethod
    def around(cls, runs: Sequence[Run], names: Sequence[str], point: Vector) -> _Linear:
        errors = _residuals(runs, _factors(names, point))
        slope = np.empty((len(runs), len(names)))
        for i in range(len(names)):
            nearby = point.copy()
            nearby[i] += STEP
            slope[:, i] = (_residuals(runs, _factors(names, nearby)) - errors) / STEP
        return cls(names, point, errors, slope)

    def at(self, x: Vector) -> Vector:
        predicted: Vector = self.errors + self.slope @ (x - self.point)
        return predicted

    def fit(self, used: Vector) -> Vector:
        """Log factors of least squares over the ``used`` runs, the prior included, inside their ranges."""
        slope, rest = self.slope[used] / NOISE, (self.errors[used] - self.slope[used] @ self.point) / NOISE
        best = np.linalg.solve(slope.T @ slope + np.eye(len(self.names)) / PRIOR_WIDTH**2, -slope.T @ rest)
        low, high = (np.log([FACTORS[name][i] for name in self.names]) for i in (0, 1))
        inside: Vector = np.clip(best, low, high)
        return inside


def _factors(names: Sequence[str], x: Vector) -> dict[str, float]:
    return {name: float(math.exp(value)) for name, value in zip(names, x, strict=True) if value}


def _residuals(runs: Sequence[Run], factors: Mapping[str, float]) -> Vector:
    """log(predicted / measured) of each run under ``factors``."""
    errors = []
    for run in runs:
        job = replace(run.job, cluster=scaled(run.job.cluster, factors)) if factors else run.job
        errors.append(math.log(estimate(job, run.layout, detail=False).step_seconds / (run.seconds or 1.0)))
    return np.array(errors)


def _held_out(measured: _Linear, groups: Sequence[tuple[str, str]]) -> list[float]:
    """Errors of runs predicted from a fit to the others; runs of one model and layout are left out together."""
    kinds = sorted(set(groups))
    fold_of = np.array([kinds.index(group) % min(FOLDS, len(kinds)) for group in groups])
    errors: list[float] = []
    for fold in np.unique(fold_of):
        out = fold_of == fold
        errors += [abs(math.exp(e) - 1) for e in measured.at(measured.fit(~out))[out]]
    return errors
