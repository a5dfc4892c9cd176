"""LAYOUT strings, ``tp=8,pp=4,...``: their values read and written."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from profiles.errors import InputError


def pairs(text: str) -> Iterator[tuple[str, str]]:
    """Split ``a=1,b=f(x,y),c=2`` at commas outside parentheses."""
    seen: set[str] = set()
    for part in re.split(r",(?![^(]*\))", text):
        if not part.strip():
            continue
        key, sep, value = part.partition("=")
        key = key.strip()
        if not sep:
            raise InputError("layout", part, "must read key=value", f"{part.strip()}=1")
        if key in seen:
            raise InputError("layout", key, "is given twice")
        seen.add(key)
        yield key, value.strip()


def integer(key: str, raw: str) -> int:
    """A degree or a count of at least 1, a ZeRO stage of at least 0."""
    try:
        value = int(raw)
    except ValueError:
        raise InputError(key, raw, "must be a whole number", 1) from None
    low = 0 if key == "zero" else 1
    if value < low:
        raise InputError(key, value, f"must be at least {low}", low)
    return value


def one_of(key: str, raw: str, names: Sequence[str], default: str) -> str:
    """``raw`` where it is one of ``names``; else InputError with the closest of them, or ``default``."""
    if raw not in names:
        close = difflib.get_close_matches(raw, names, 1)
        raise InputError(key, raw, f"is one of {', '.join(names)}", close[0] if close else default)
    return raw


def value_of(key: str, raw: str) -> Any:
    """The value of a key other than schedule and recompute; InputError for one that it cannot have."""
    if key == "sp":
        if raw.lower() not in ("true", "false", "1", "0", "on", "off"):
            raise InputError("sp", raw, "must be true or false", "true")
        return raw.lower() in ("true", "1", "on")
    if key == "cp_kind":
        if not re.fullmatch(r"ring|ulysses|allgather|ring\d+xulysses\d+", raw):
            raise InputError(key, raw, "is ring, ulysses, allgather or ringNxulyssesM", "ring")
        return raw
    if key == "order":
        axes = raw.split("-")
        if (
            axes[0] != "tp"
            or set(axes) - {"tp", "cp", "ep", "dp", "pp"}
            or not {"tp", "dp", "pp"} <= set(axes)
            or len(set(axes)) != len(axes)
        ):
            raise InputError(key, raw, "lists tp, cp, dp, pp innermost first, tp innermost", "tp-cp-dp-pp")
        return "-".join(a for a in axes if a != "ep")
    if key == "stages":
        if not re.fullmatch(r"\d+(x\d{1,4})?(\|\d+(x\d{1,4})?)*", raw):
            raise InputError(key, raw, "lists the layers of each chunk, e.g. 30|32|32|32 or 30|32x3")
        runs = (part.partition("x") for part in raw.split("|"))
        return tuple(layers for count, _, times in runs for layers in (int(count),) * int(times or 1))
    if key == "dispatcher":
        if raw not in ("alltoall", "allgather", "deepep", "hybridep"):
            raise InputError(key, raw, "is alltoall, allgather, deepep or hybridep", "alltoall")
        return raw
    if key == "capacity":
        try:
            factor = float(raw)
        except ValueError:
            factor = -1.0
        if not 0 <= factor < math.inf:
            raise InputError(key, raw, "must be a factor >= 0 (0 = dropless)", 0)
        return factor
    if key == "offload":
        parts = tuple(p for p in raw.split("+") if p and p != "none")
        for part in parts:
            if part not in ("optimizer", "activations"):
                raise InputError(key, part, "is optimizer, activations, or both joined by +", "optimizer")
        return parts
    value = integer(key, raw)
    if key == "zero" and value > 3:
        raise InputError("zero", value, "must be 0, 1, 2 or 3", 3)
    return value


def shown(value: Any) -> str:
    """A value as ``value_of`` reads it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ("|" if value and isinstance(value[0], int) else "+").join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
