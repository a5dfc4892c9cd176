"""Arithmetic that takes one number or a numpy array of them, so that one formula costs one layout or ten thousand."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def where(condition: Any, yes: Any, no: Any) -> Any:
    """``yes`` where ``condition`` holds, else ``no``."""
    return np.where(condition, yes, no) if isinstance(condition, np.ndarray) else (yes if condition else no)


def maximum(a: Any, b: Any) -> Any:
    return np.maximum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else max(a, b)


def most(values: Iterable[Any]) -> Any:
    """The largest of some numbers, or of arrays element by element."""
    return reduce(maximum, values)


def minimum(a: Any, b: Any) -> Any:
    return np.minimum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else min(a, b)


def ceil_div(a: Any, b: Any) -> Any:
    """Smallest whole number not below a / b."""
    return -(-a // b)


def nowhere(value: Any) -> bool:
    """Whether a number is 0 everywhere."""
    return not value.any() if isinstance(value, np.ndarray) else not value


def plain(value: Any) -> Any:
    """A number as a Python float; an array as it is."""
    return value if isinstance(value, np.ndarray) and value.ndim else float(value)


def always_one(degree: Any) -> bool:
    """Whether a degree is 1 everywhere, so that what only a larger degree causes can be left out."""
    return bool(np.all(degree == 1)) if isinstance(degree, np.ndarray) else degree == 1


def distinct(table: Ints) -> tuple[Ints, Ints]:
    """(the first of each distinct row, in the order of a sort; which of those each row is) of whole numbers from 0."""
    code, number = np.zeros(len(table), np.int64), 1
    for column in table.T:
        values, place = _places(column)
        number, code = _places(code * values + place)
    first = np.zeros(number, np.int64)
    first[code[::-1]] = np.arange(len(table))[::-1]  # of those that are assigned to one place, the last stays
    return first, code


def _places(code: Ints) -> tuple[int, Ints]:
    """(how many distinct whole numbers from 0 there are, the place of each among them, rising)."""
    top = int(code.max(initial=-1)) + 1
    if top > 8 * len(code) + 1024:
        values, place = np.unique(code, return_inverse=True)
        return len(values), place
    seen = np.zeros(top, bool)
    seen[code] = True
    rising = np.cumsum(seen)
    return int(seen.sum()), rising[code] - 1
