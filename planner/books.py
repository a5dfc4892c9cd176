"""What a search keeps: the answers it found, the queue of what is left to open, and the figures of the certificate."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

from planner.program import Answer
from planner.space import Batch, Prefix, Shard


@dataclass
class Books:
    """The certificate's figures as they grow."""

    legal: int = 0
    by_memory: int = 0
    by_bound: int = 0
    by_dominance: int = 0
    """Columns equal in every cost to one that was solved."""
    solved: int = 0
    cuts: int = 0
    programs: int = 0
    unexplored: int = 0
    """Columns that effort or time did not reach."""
    weakest: float = float("inf")
    """The least bound over columns cut by bound, solved or not explored."""

    def solve(self, number: int) -> None:
        """One of ``number`` columns of equal costs was solved."""
        self.solved += 1
        self.by_dominance += number - 1


@dataclass(frozen=True, slots=True)
class Alike:
    """A column, and how many there are of its costs, itself included."""

    shard: Shard
    number: int


@dataclass
class Found:
    """An answer of one column with where it stands in the space."""

    answer: Answer
    prefix: Prefix
    batch: Batch
    shard: Shard


@dataclass
class Outcome:
    fastest: Found | None
    found: list[Found]
    books: Books
    best_bound: float


@dataclass
class Queue:
    """What is left to open, the least bound first; ``gap``: how far below the answer a bound must lie to be worth it."""

    gap: float
    heap: list[tuple[float, int, int, Any]] = field(default_factory=list)
    opened: int = 0
    added: int = 0

    def add(self, bound: float, level: int, item: Any) -> None:
        self.added += 1
        heapq.heappush(self.heap, (bound, level, self.added, item))

    def pop(self) -> tuple[float, int, Any]:
        self.opened += 1
        bound, level, _, item = heapq.heappop(self.heap)
        return bound, level, item

    @property
    def least(self) -> float:
        return self.heap[0][0] if self.heap else float("inf")

    def __len__(self) -> int:
        return len(self.heap)
