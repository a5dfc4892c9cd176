"""What the user wants fixed or left out: ``field op values``, read from a command line."""

from __future__ import annotations

import re
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

            close = difflib.get_close_matches(field, FIELDS, 1)
            raise InputError("pin", field, f"is no part of a layout; parts are {', '.join(FIELDS)}", close[0] if close else None)
        values = (raw,) if field in ("stages", "recompute") else tuple(v.strip() for v in raw.split("|"))
        if op in ("<=", ">=") and not values[0].isdecimal():
            raise InputError("pin", part, "a limit is a whole number", f"{field}{op}8")
        if op in ("=", "!=") and field not in ("stages",):
            values = tuple(_text(Layout.read(f"{field}={v}")[field]) for v in values)
        wishes.append(Wish(field, op, values))
    return tuple(wishes)
