"""How workers that measure at once keep in step: all start a timing together, and all know when one of them could not."""

from __future__ import annotations

from typing import Any, Protocol

Value = Any


class Together(Protocol):
    """The workers of one measurement."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def gather(self, value: Value) -> list[Value]:
        """Every worker's value, by rank; also a meeting point."""
        ...


class Alone:
    """One worker."""

    size, rank = 1, 0

    def gather(self, value: Value) -> list[Value]:
        return [value]


class Workers:
    """The workers of the default process group, meeting over gloo whatever they measure with."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._group = dist.new_group(backend="gloo") if dist.get_backend() != "gloo" else dist.group.WORLD
        self.size, self.rank = dist.get_world_size(), dist.get_rank()

    def gather(self, value: Value) -> list[Value]:
        values: list[Value] = [None] * self.size
        self._dist.all_gather_object(values, value, group=self._group)
        return values
