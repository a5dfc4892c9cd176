"""The candidates that the search had before it, for the picture of time against memory: recomputed from the plan, a bounded number.

A candidate is a legal combination of degrees and micro batch. Those that cannot fit are counted; the others are ordered by how fast
they may be, and of some spread evenly over that order the search's quick answer is taken: the best of the likely schedules, shardings
and recompute choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cost_models.memory_bulk import device_bytes
from planner.plan import Plan
from planner.search import Search
from planner.solve import layout_of
from planner.space import Space
from planner.wishes import read_wishes
from profiles.errors import AxisplanError

MOST = 80


@dataclass(frozen=True)
class Considered:
    """``rows``: role, layout, seconds of a step and bytes of the fullest stage; ``fitting`` of ``legal`` candidates may fit."""

    rows: tuple[dict[str, Any], ...]
    fitting: int
    legal: int

    @property
    def note(self) -> str:
        if not self.legal:
            return ""
        drawn = f", {len(self.rows)} of them drawn" if len(self.rows) < self.fitting else ""
        return f"Of {self.legal:,} legal combinations of degrees and micro batch {self.fitting:,} may fit{drawn}."


def considered(plan: Plan, most: int = MOST) -> Considered:
    """Up to ``most`` candidates of the plan's space; none where it cannot be made again (several GPU types, an objective over more jobs)."""
    job = plan.job()
    if job.cluster.pools or plan.certificate.objective not in ("", "step-time"):
        return Considered((), 0, 0)
    try:
        search = Search(job, Space(job, read_wishes(",".join(plan.certificate.pins.values())), []))
        legal = search.rows.counts > 0
    except AxisplanError:
        return Considered((), 0, 0)
    left = np.flatnonzero(search.rows.fit & legal)
    left = left[np.lexsort((left, search.row_bounds[left]))]
    chosen = []
    for place in np.unique(np.linspace(0, len(left) - 1, min(len(left), most)).round().astype(int)) if len(left) else ():
        search.found = {}
        search.try_row(search.rows[int(left[place])], most=1, spare=0)
        if search.found:
            chosen.append(min(search.found.values(), key=lambda found: found.answer.seconds))
    layouts = [layout_of(best) for best in chosen]
    rows = [
        {"role": "considered", "layout": layout.text(), "seconds": float(best.answer.seconds), "bytes": float(needed)}
        for best, layout, needed in zip(chosen, layouts, device_bytes(job, layouts), strict=True)
    ]
    return Considered(tuple(rows), len(left), int(legal.sum()))
