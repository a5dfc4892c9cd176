"""Flags of a command line: an ordered mapping from name to values, and its two spellings."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from planner.emit.core import Word

Flags = dict[str, tuple[str, ...]]
"""``--name`` -> its values as text; () for a switch."""


def switch(*names: str) -> Flags:
    return dict.fromkeys(names, ())


def words(flags: Flags) -> tuple[Word, ...]:
    """The flags as words of a command."""
    return tuple(Word(text) for name, values in flags.items() for text in (name, *values))


def number(value: float) -> str:
    """``0.0003``, ``1e-05``, ``5`` as Python prints them; whole numbers without a point."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def pattern(values: Iterable[int]) -> str:
    """A list of small integers as the list expression that Megatron reads, runs together: ``([0]*3+[1]*58)``."""
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    return "(" + "+".join(f"[{value}]*{count}" for value, count in runs) + ")"
