"""Hashes of what is the key of many memories of costs, computed once."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Any


class HashedOnce:
    """A base of frozen dataclasses; they name it again, ``__hash__ = HashedOnce.__hash__``, or dataclass puts its own."""

    @cached_property
    def _hash(self) -> int:
        values: Any = self
        return hash(tuple(getattr(values, f.name) for f in fields(values)))

    def __hash__(self) -> int:
        return self._hash
