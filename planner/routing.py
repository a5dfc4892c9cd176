"""Expert placement from the command line: a routing histogram, or synthetic skew where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.experts import place, read_histogram, zipf
from profiles.errors import InputError

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
