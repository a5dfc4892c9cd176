"""What a routing histogram says to a job (the imbalance at every ep), and expert placement from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cost_models.layout import divisors
from planner.experts import imbalance, place, read_histogram, zipf
from planner.plan import Plan
from profiles.errors import InputError
from profiles.model import ModelSpec

SYNTHETIC_TOKENS = 1e6


def place_layers(
    routing: Path | None, exponent: float | None, experts: int | None, ep: int, redundant: int
) -> list[dict[str, Any]]:
    """One placement a layer, as JSON. Raises InputError unless exactly one of ``routing`` and ``exponent`` (with ``experts``) is given."""
    if (routing is None) == (exponent is None):
        raise InputError("--routing", routing, "give a histogram, or --zipf with --experts", "--zipf 0.8 --experts 64")
    if routing is not None:
        rows = read_histogram(routing)
    elif experts is None:
        raise InputError("--experts", experts, "is needed with --zipf", 64)
    else:
        rows = [zipf(experts, float(exponent or 0.0), SYNTHETIC_TOKENS)]
    return [place(row, ep, redundant).to_json() for row in rows]


def imbalances(path: str | Path, model: ModelSpec) -> tuple[tuple[int, float], ...]:
    """(ep, max / mean tokens of a rank, the mean over the histogram's layers) for every ep that divides the experts, which stand on the
    ranks in order, as frameworks place them. Raises InputError for a histogram of another number of experts, or a model without."""
    moe = model.moe
    if moe is None:
        raise InputError("--routing", str(path), f"{model.name} has no experts", None)
    rows = read_histogram(path)
    if len(rows[0]) != moe.experts:
        raise InputError("--routing", str(path), f"has counts of {len(rows[0])} experts, {model.name} has {moe.experts}", None)
    return tuple((ep, imbalance(rows, ep, optimised=False)) for ep in divisors(moe.experts))


def with_routing(plan: Plan) -> Plan:
    """The plan, with the histogram's figure at its ep among the certificate's notes."""
    factor = dict(plan.job_settings.routing).get(plan.layout_object.ep)
    if factor is None or plan.layout_object.ep == 1:
        return plan
    note = (
        f"routing: the busiest of {plan.layout_object.ep} expert-parallel ranks has {factor:.2f} times the mean, experts in order; axisplan"
        " experts places them better"
    )
    certificate = plan.certificate.model_copy(update={"notes": [*plan.certificate.notes, note]})
    return plan.model_copy(update={"certificate": certificate})
