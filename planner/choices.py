"""What is chosen of a layout: its prefix, its batch, its shard (``planner.space`` says which go together)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

PREFIX_FIELDS = ("tp", "sp", "cp", "cp_kind", "pp", "dp", "ep", "etp")
BATCH_FIELDS = ("micro_batch", "schedule", "vpp")
SPLIT_FIELDS = ("dp_replicate", "dp_shard", "zero")
WAY_FIELDS = ("order", "dispatcher", "offload")
SHARD_FIELDS = (*SPLIT_FIELDS, *WAY_FIELDS)


class Prefix(NamedTuple):
    tp: int
    cp: int
    cp_kind: str
    pp: int
    dp: int
    ep: int
    etp: int
    sp: bool

    @property
    def ring(self) -> int:
        return _parts(self.cp_kind, self.cp)[0]

    @property
    def ulysses(self) -> int:
        return _parts(self.cp_kind, self.cp)[1]


class Batch(NamedTuple):
    micro_batch: int
    schedule: str
    vpp: int
    microbatches: int


class Shard(NamedTuple):
    dp_replicate: int
    dp_shard: int
    zero: int
    order: str
    dispatcher: str
    offload: tuple[str, ...] = ()


@lru_cache(maxsize=256)
def _parts(kind: str, cp: int) -> tuple[int, int]:
    if match := re.fullmatch(r"ring(\d+)xulysses(\d+)", kind):
        return int(match[1]), int(match[2])
    return (1, cp) if kind == "ulysses" else (cp, 1)


class Chosen:
    """A layout of which only some fields are chosen, as rules see it."""

    tp: int
    sp: bool
    cp: int
    cp_kind: str
    pp: int
    dp: int
    schedule: str
    vpp: int

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def choose(self, fields: Sequence[str], values: Sequence[Any]) -> None:
        self.__dict__.update(zip(fields, values, strict=True))

    @property
    def ring(self) -> int:
        return _parts(self.cp_kind, self.cp)[0]

    @property
    def ulysses(self) -> int:
        return _parts(self.cp_kind, self.cp)[1]
