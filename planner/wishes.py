"""What the user wants fixed or left out: ``field op values``, read from a command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cost_models.layout import Layout
from profiles.errors import InputError

FIELDS = ("tp", "cp", "cp_kind", "pp", "vpp", "ep", "etp", "dp", "dp_replicate", "dp_shard", "zero", "order", "micro_batch", "schedule",
          "recompute", "dispatcher", "offload", "stages", "sp", "capacity")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wish:
    """``field op values``: =, <=, >= or !=."""

    field: str
    op: str
    values: tuple[str, ...]

    def allows(self, value: Any) -> bool:
        shown = _text(value)
        if self.op == "=":
            return shown in self.values
        if self.op == "!=":
            return shown not in self.values
        limit = int(self.values[0])
        return int(value) <= limit if self.op == "<=" else int(value) >= limit

    def __str__(self) -> str:
        return f"{self.field}{self.op}{'|'.join(self.values)}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return str(value)


def read_wishes(text: str) -> tuple[Wish, ...]:
    """``tp=8,pp<=4,schedule=1f1b|interleaved``. Raises InputError for a field that is no part of a layout."""
    wishes = []
    for part in re.split(r",(?![^(]*\))", text):
        if not part.strip():
            continue
        match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|!=|=)\s*(.+?)\s*", part)
        if not match:
            raise InputError("pin", part, "must read key=value, key<=value, key>=value or key!=value", "tp=8")
        field, op, raw = match[1], match[2], match[3]
        if field not in FIELDS:
            import difflib

            close = difflib.get_close_matches(field, FIELDS, 1, cutoff=0.5)
            raise InputError("pin", field, f"is no part of a layout; parts are {', '.join(FIELDS)}", close[0] if close else None)
        values = (raw,) if field in ("stages", "recompute") else tuple(v.strip() for v in raw.split("|"))
        if op in ("<=", ">=") and not values[0].isdecimal():
            raise InputError("pin", part, "a limit is a whole number", f"{field}{op}8")
        if op in ("=", "!=") and field not in ("stages",):
            values = tuple(_text(Layout.read(f"{field}={v}")[field]) for v in values)
        wishes.append(Wish(field, op, values))
    return tuple(wishes)


def require_choices(pins: Sequence[Wish], excluded: Sequence[Sequence[Wish]]) -> None:
    """Raise InputError for a wish about what the space does not choose."""
    for wish in (*pins, *(w for e in excluded for w in e)):
        if wish.field == "stages":
            rule = "stages are what the program chooses; axisplan estimate --layout prices a given split"
        elif wish.field == "capacity":
            rule = "a capacity factor changes what is trained, not only how fast; axisplan estimate --layout prices one"
        elif wish.field == "sp" and wish.op == "=" and "false" in wish.values and wish in pins:
            rule = "sequence parallelism goes with tp where the target has it; axisplan estimate --layout prices a layout without"
        else:
            continue
        raise InputError("--pin" if wish in pins else "--exclude", str(wish), rule, None)
    for several in excluded:
        if len(several) > 1 and any(w.field == "recompute" for w in several):
            rule = "recompute is chosen for each layer: it is left out alone, not only beside other choices"
            raise InputError(
                "--exclude", ",".join(map(str, several)), rule, next(str(w) for w in several if w.field == "recompute")
            )
