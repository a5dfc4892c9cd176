"""Numbers on the command line: each type says what it takes, and refuses the rest with the nearest value it would take."""

from __future__ import annotations

import math
import re
from typing import Any

import click

from profiles.errors import InputError

SCALES = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
MOST = 10**12 - 1


def nearest_count(text: str, fallback: int | str, low: int = 1, high: int = MOST) -> int | str:
    """The whole number within [low, high] nearest to what ``text`` seems to say (``-8``, ``8.5k``, ``1e3``, ``8q``); else ``fallback``."""
    match = re.match(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([a-zA-Z]?)", text)
    if not match:
        return fallback
    value = float(match[1]) * SCALES.get(match[2].lower(), 1)
    return round(max(low, min(high, value)))


class Count(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A whole number within a range."""

    name = "INTEGER"

    def __init__(self, low: int, high: int | None = None) -> None:
        self.low, self.high = low, MOST if high is None else high
        self.says = f"must be a whole number of at least {low}" + ("" if high is None else f" and at most {high}")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip()
        if not re.fullmatch(r"[+-]?\d{1,15}", text) or not self.low <= int(text) <= self.high:
            name = param.opts[-1] if param else "count"
            raise InputError(name, value, self.says, nearest_count(text, self.low, self.low, self.high))
        return int(text)


class Real(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A finite number from ``low`` (itself excluded where ``above``) to ``high`` (itself excluded); ``example`` where none is near."""

    name = "FLOAT"

    def __init__(self, what: str, low: float, high: float, example: float, *, above: bool = False) -> None:
        self.what, self.low, self.high, self.example, self.above = what, low, high, example, above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if self.low <= number < self.high and not (self.above and number == self.low):
            return number
        near = self.low if number < self.low and not self.above else self.example
        raise InputError(param.opts[-1] if param else "number", value, f"must be {self.what}", near)


MARGIN = Real("at least 0 and below 1", 0.0, 1.0, 0.08)
TIE = Real("at least 0 and below 1", 0.0, 1.0, 0.01)
GIBIBYTES = Real("GiB above 0 and below 1,000,000", 0.0, 1e6, 80.0, above=True)
IMBALANCE = Real("max / mean tokens of a rank, so at least 1 and below 10,000", 1.0, 1e4, 1.0)
DURATION = Real("at least 0 and finite", 0.0, 1e12, 30.0)
MEAN_TIME = Real("above 0 and finite", 0.0, 1e12, 1000.0, above=True)
LEARNING_RATE = Real("above 0 and below 1,000", 0.0, 1e3, 3e-4, above=True)
