"""Goodput: how often to save, how much of the paid time trains, and how many spare nodes to keep.

Failures of a node are taken as exponential with mean M_node, so a job on n nodes is interrupted every ``M = M_node / n`` on average.
With delta the seconds a save holds training up and R the seconds to restart (detect, reschedule, load), a run that needs T seconds of
training and saves every tau seconds of it takes (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", Future Generation Computer Systems 22, 2006, eq. 13 and 20)

    T_wall = M exp(R / M) (exp((tau + delta) / M) - 1) T / tau,

whose minimum is close to ``tau = sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + (delta / 2M) / 9) - delta`` for delta < 2M, else M
(eq. 37). The first term alone is J. W. Young's (Communications of the ACM 17, 1974). The useful fraction is T / T_wall.

A failed node is repaired in ``repair_hours``. Of n + s nodes a Poisson number with mean ``(n + s) repair / M_node`` is away; training
stands while more than s are. Without a given s, the one that trains most for each node paid is taken.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from profiles.errors import InputError

MOST_SPARE_SHARE = 0.5
"""Spare nodes are tried up to this share of the nodes that train."""


@dataclass(frozen=True)
class Goodput:
    """Seconds and shares. ``overall`` = useful_fraction x availability x nodes / (nodes + spare): training got for what is paid."""

    nodes: int
    node_mtbf_hours: float
    job_mtbf_hours: float
    checkpoint_seconds: float
    restart_seconds: float
    repair_hours: float
    young_interval_seconds: float
    interval_seconds: float
    """Daly's interval: seconds of training between two saves."""
    interval_steps: int
    """The same in whole steps, at least 1; 0 where no step time was given."""
    useful_fraction: float
    spare_nodes: int
    availability: float
    """Share of time in which enough nodes stand."""
    overall: float
    failures_per_day: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def young_interval(checkpoint_seconds: float, mtbf_seconds: float) -> float:
    """Young's first-order interval, seconds."""
    return math.sqrt(2 * checkpoint_seconds * mtbf_seconds)


def daly_interval(checkpoint_seconds: float, mtbf_seconds: float) -> float:
    """Daly's higher-order interval, seconds of training between saves."""
    delta, mtbf = checkpoint_seconds, mtbf_seconds
    if delta >= 2 * mtbf:
        return mtbf
    ratio = delta / (2 * mtbf)
    return math.sqrt(2 * delta * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - delta


def useful_fraction(interval: float, checkpoint_seconds: float, restart_seconds: float, mtbf_seconds: float) -> float:
    """Share of the wall time that is training which is kept; 0 where failures come too fast to get anywhere."""
    exponent = (interval + checkpoint_seconds) / mtbf_seconds + restart_seconds / mtbf_seconds
    if exponent > 500:
        return 0.0
    wall = mtbf_seconds * math.exp(restart_seconds / mtbf_seconds) * math.expm1((interval + checkpoint_seconds) / mtbf_seconds)
    return interval / wall


def at_most(count: int, mean: float) -> float:
    """P(a Poisson number of this mean <= count)."""
    logs = (k * math.log(mean) - mean - math.lgamma(k + 1) if mean else (0.0 if k == 0 else -math.inf) for k in range(count + 1))
    return min(1.0, math.fsum(math.exp(x) for x in logs))


def goodput(
    nodes: int,
    mtbf_hours: float,
    checkpoint_seconds: float,
    restart_seconds: float,
    *,
    repair_hours: float = 24.0,
    spare: int | None = None,
    step_seconds: float | None = None,
) -> Goodput:
    """What failures cost a job on ``nodes`` nodes, each of which fails every ``mtbf_hours`` on average.

    ``spare``: nodes kept ready beside them; None = as many as train most for each node paid. Raises InputError.
    """
    for field, value, low in (
        ("--mtbf", mtbf_hours, 0.0), ("--checkpoint-seconds", checkpoint_seconds, 0.0), ("--repair-hours", repair_hours, 0.0)
    ):  # fmt: skip
        if not low < value < math.inf:
            raise InputError(field, value, "must be above 0 and finite")
    if not 0 <= restart_seconds < math.inf:
        raise InputError("--restart-seconds", restart_seconds, "must not be negative", 0)
    if spare is not None and spare < 0:
        raise InputError("--spare", spare, "must not be negative", 0)
    mtbf = mtbf_hours * 3600 / nodes
    interval = daly_interval(checkpoint_seconds, mtbf)
    steps = 0
    if step_seconds:
        steps = max(1, round(interval / step_seconds))
        interval = steps * step_seconds
    useful = useful_fraction(interval, checkpoint_seconds, restart_seconds, mtbf)

    def standing(s: int) -> float:
        return at_most(s, (nodes + s) * repair_hours / mtbf_hours)

    chosen = spare
    if chosen is None:
        chosen, best = 0, 0.0
        for s in range(max(8, int(MOST_SPARE_SHARE * nodes)) + 1):
            stands = standing(s)
            if stands / (nodes + s) > best:
                chosen, best = s, stands / (nodes + s)
            if stands > 1 - 1e-9:
                break
    available = standing(chosen)
    return Goodput(
        nodes=nodes, node_mtbf_hours=mtbf_hours, job_mtbf_hours=mtbf / 3600, checkpoint_seconds=checkpoint_seconds,
        restart_seconds=restart_seconds, repair_hours=repair_hours, young_interval_seconds=young_interval(checkpoint_seconds, mtbf),
        interval_seconds=interval, interval_steps=steps, useful_fraction=useful, spare_nodes=chosen, availability=available,
        overall=useful * available * nodes / (nodes + chosen), failures_per_day=24 * nodes / mtbf_hours,
    )  # fmt: skip
