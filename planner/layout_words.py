"""A layout in the width of a screen: long stages and a recompute choice layer by layer are counted, not listed; files hold them whole."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from cost_models.layout_text import pairs

LONG = {"stages": 24, "recompute": 48}
"""Characters of a value beyond which it is counted."""


def short(layout_text: str) -> str:
    """``layout_text`` with long stages as runs (``7|8x14|7``) and a long recompute choice as layers by kind."""
    return ",".join(f"{key}={shortened(key, value)}" for key, value in pairs(layout_text))


def bare(layout_text: str) -> str:
    """``short`` without what says nothing: degrees of one and the commonest choices."""
    plain = ("sp=true", "recompute=none", "schedule=1f1b")
    words = [
        f"{key}={shortened(key, value)}" for key, value in pairs(layout_text) if value != "1" or key in ("zero", "micro_batch")
    ]
    return ",".join(word for word in words if word not in plain)


def shortened(key: str, value: str) -> str:
    """One value: itself unless it is longer than ``LONG`` lets it be."""
    if len(value) <= LONG.get(key, len(value)):
        return value
    if key == "stages":
        runs = ((layers, len(list(run))) for layers, run in groupby(value.split("|")))
        return "|".join(layers if n == 1 else f"{layers}x{n}" for layers, n in runs)
    if key == "recompute":
        layers: Counter[str] = Counter()
        for part in value.split("/"):
            span, _, kind = part.partition(":")
            first, _, last = span.partition("-")
            layers[kind] += int(last or first) - int(first) + 1
        return " + ".join(f"{n} layers {kind}" for kind, n in layers.most_common())
    return value
