"""How sure an estimate is: an 80 % interval from the errors of the curves used and the origin of each constant.

A step's seconds come by cause (matmul, attention, ..., communication.tp, bubble). Each cause carries one relative error that is
common to everything priced with it: the held-out error of the GPU's curve where that was measured, wider where it is an estimate or
borrowed. A step also has an error of its own (run-to-run noise, what no term describes). Two layouts of one job share the common
errors, so only the difference in where their seconds go can turn their order: ``chance_faster``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from cost_models.job import Job
from cost_models.layer_cost import LOW_PRECISION
from cost_models.layout import Layout
from profiles.gpu import AttentionCurve, MatmulCurve

ORIGIN_ERROR = {"measured": 0.04, "fitted": 0.06, "datasheet": 0.08, "estimate": 0.15}
"""Relative standard error of a rate by the origin of its constants, where no held-out error is known (hardware/README.md section 2:
transfer to a GPU without data costs about 10 %, boxes of one Blackwell type differ by 20 %)."""
CAUSE_ERROR = {
    "pointwise": 0.13, "recompute": 0.05, "host": 0.40, "optimizer": 0.20, "overhead": 0.40, "stragglers": 0.50,
    "communication.tp": 0.15, "communication.cp": 0.25, "communication.ep": 0.30, "communication.etp": 0.20,
    "communication.dp": 0.30, "communication.edp": 0.30, "communication.pp": 0.30, "bubble": 0.10,
}  # fmt: skip
"""Relative standard error of what is not a GPU curve: collectives 7-14 % in their tables and as much again for overlap; pointwise
and host work depend on kernels that were not seen."""
SHAPES_ERROR, LIBRARIES_ERROR, KERNELS_ERROR = 0.015, 0.05, 0.05
"""Beyond a curve's held-out error: a layer's mix of shapes; the libraries' generation, in 8 and 4 bits (releases of one run
differ by 2-15 %); the attention kernel's (``data/attention_kernels.yaml``)."""
OWN_ERROR = 0.025
"""Relative standard error of a step by itself: repeats of one differ by 1-4 %, releases of one by up to 10 %."""
FARTHEST = 5.0
"""Relative change of a cause beyond which nobody need ask what it would turn."""
ROUNDING = 1e-9
"""Share of a step's seconds below which a difference is one of rounding."""
EIGHTY = 1.2815515655446008
"""Standard errors on either side of an 80 % interval: the 90 % quantile of a normal distribution."""


def cause_errors(job: Job) -> dict[str, float]:
    """Relative standard error of each cause for ``job``."""
    gpu, precision = job.cluster.gpu, job.precision
    errors = dict(CAUSE_ERROR)
    mixed = LIBRARIES_ERROR if precision in LOW_PRECISION else SHAPES_ERROR
    errors["matmul"] = math.hypot(_curve_error(gpu.curves.get(precision) or next(iter(gpu.curves.values()))), mixed)
    errors["attention"] = math.hypot(_curve_error(gpu.attention), KERNELS_ERROR)
    return errors


def _curve_error(curve: MatmulCurve | AttentionCurve) -> float:
    if curve.heldout_error is not None and curve.origin in ("measured", "fitted"):
        return curve.heldout_error
    return ORIGIN_ERROR[curve.origin]


def relative_error(job: Job, seconds: Mapping[str, float]) -> float:
    """Relative standard error of a step whose ``seconds`` by cause these are."""
    total = sum(seconds.values())
    if total <= 0:
        return OWN_ERROR
    errors = cause_errors(job)
    common = sum((errors.get(cause, 0.25) * value / total) ** 2 for cause, value in seconds.items())
    return math.sqrt(common + OWN_ERROR**2)


def interval(job: Job, layout: Layout, step: float, seconds: Mapping[str, float]) -> tuple[float, float, tuple[str, ...]]:
    """(low, high) of the 80 % interval, log-symmetric about ``step``, and what had to be guessed."""
    error = relative_error(job, seconds)
    factor = math.exp(EIGHTY * error)
    return step / factor, step * factor, guesses(job, layout)


def guesses(job: Job, layout: Layout) -> tuple[str, ...]:
    """What the estimate assumed for want of a measurement or a statement."""
    out = []
    gpu = job.cluster.gpu
    curve = gpu.curves.get(job.precision)
    if curve is None:
        out.append(f"{gpu.name} has no {job.precision} products")
    elif curve.origin == "estimate":
        out.append(f"matrix products on {gpu.name}: {curve.source}")
    if gpu.attention.origin == "estimate":
        out.append(f"attention on {gpu.name}: {gpu.attention.source}")
    for level in job.cluster.levels:
        if any(row.origin == "estimate" for rows in level.link.curves.values() for row in rows):
            out.append(f"collectives over {level.link.name} are estimates")
    if job.model.moe is not None and layout.ep > 1 and job.moe_imbalance is None and not job.routing:
        out.append("moe_imbalance: the default, no histogram given")
    return tuple(out)


def chance_faster(job: Job, first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Chance that the step whose seconds by cause are ``second`` is really faster than ``first``'s. Errors of a cause are
    shared."""
    errors = cause_errors(job)
    a, b = sum(first.values()), sum(second.values())
    shared = sum((errors.get(cause, 0.25) * (first.get(cause, 0.0) - second.get(cause, 0.0))) ** 2 for cause in {**first, **second})
    own = OWN_ERROR**2 * (a * a + b * b) / 4
    spread = math.sqrt(shared + own)
    return 0.5 * (1 + math.erf((a - b) / spread / math.sqrt(2))) if spread > 0 else float(b < a)


def flipping_cause(job: Job, first: Mapping[str, float], second: Mapping[str, float]) -> tuple[str, float] | None:
    """The cause whose seconds, wrong by the least of its own standard errors, would turn the order of two steps: (cause, relative
    change that makes them equal). None where no cause's change can, or only one past ``FARTHEST``."""
    errors = cause_errors(job)
    gap = sum(second.values()) - sum(first.values())
    least = ROUNDING * sum(first.values())
    best: tuple[float, str, float] | None = None
    for cause in {**first, **second}:
        difference = first.get(cause, 0.0) - second.get(cause, 0.0)
        if abs(difference) <= least:
            continue
        change = gap / difference
        if change <= -1.0 or change > FARTHEST:
            continue
        distance = abs(change) / errors.get(cause, 0.25)
        if best is None or (distance, cause) < best[:2]:
            best = (distance, cause, change)
    return None if best is None else (best[1], best[2])
