"""Critical paths of schedules, kept from column to column."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.layout import V_SHAPED
from cost_models.pipeline import Path, seed_paths

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Paths:
    """Critical paths of one schedule shape, as matrices over chunks. They bound every column of that shape, so they are kept."""

    def __init__(self, schedule: str, pp: int, vpp: int, microbatches: int, blocking: bool) -> None:
        self.key = (schedule, pp, vpp, microbatches, blocking)
        self.ranks = ranks_of(schedule, pp, pp * vpp)
        self._seen: dict[bytes, int] = {}
        self.duals: list[Floats] = []
        """Weights over paths that were optimal for some column: any of them bounds every column."""

    @cached_property
    def rows(self) -> list[Path]:
        """The paths kept, the schedule's own first, which are found when they are asked for."""
        self.__dict__["rows"] = rows = list[Path]()
        for path in seed_paths(*self.key):
            self.add(path)
        return rows

    def add(self, path: Path) -> bool:
        """Keep a path; False when it was there."""
        mark, rows = _mark(path), self.rows
        if mark in self._seen:
            return False
        self._seen[mark] = len(rows)
        rows.append(path)
        self.__dict__.pop("matrices", None)
        return True

    def place(self, path: Path) -> int:
        """Which of the rows a kept path is."""
        return self._seen[_mark(path)]

    @cached_property
    def matrices(self) -> tuple[Floats, Floats, Floats, Floats, Floats, Floats, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(forward, backward input, backward weight, paired forward, paired backward) path x chunk, transfers by path, first and last rank."""
        rows = self.rows
        return (
            np.array([p.forward for p in rows]), np.array([p.backward_input for p in rows]), np.array([p.backward_weight for p in rows]),
            np.array([p.paired_forward for p in rows]), np.array([p.paired_backward for p in rows]),
            np.array([float(np.sum(p.p2p_forward) + np.sum(p.p2p_backward)) for p in rows]),
            np.array([p.first for p in rows]), np.array([p.last for p in rows]),
        )  # fmt: skip


def _mark(path: Path) -> bytes:
    parts = (path.forward, path.backward_input, path.backward_weight, path.p2p_forward, path.p2p_backward)
    return b"".join(a.tobytes() for a in parts) + bytes((path.first % 256, path.last % 256))


@lru_cache(maxsize=1024)
def ranks_of(schedule: str, pp: int, chunks: int) -> Ints:
    """The rank of every chunk (the first of DualPipe's two)."""
    chunk = np.arange(chunks)
    out: Ints = np.where(chunk < pp, chunk, 2 * pp - 1 - chunk) if schedule in V_SHAPED else chunk % pp
    return out


class PathStore:
    """``Paths`` by shape."""

    def __init__(self) -> None:
        self._by: dict[tuple[Any, ...], Paths] = {}

    def of(self, schedule: str, pp: int, vpp: int, microbatches: int, blocking: bool) -> Paths:
        key = (schedule, pp, vpp, microbatches, blocking)
        if key not in self._by:
            self._by[key] = Paths(*key)
        return self._by[key]

    @property
    def count(self) -> int:
        return sum(len(p.rows) for p in self._by.values())
