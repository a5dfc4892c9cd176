"""How a rank's layers lie in its chunks: as many in each, or one more in some. Which, is part of the declared space.

With two chunks a rank either may hold the layer more. With more chunks the last ones do, the model's own last chunk after the others: what
fills and drains the pipeline are the first ones, and they have the most microbatches in flight. Ranks that deal their layers out in different
ways wait for each other at every chunk, so that ways beyond these are many and slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

FREE = 2
"""Chunks a rank up to which any of them may hold the layer more."""


@lru_cache(maxsize=4096)
def ways(layers: int, vpp: int, *, tail: bool) -> tuple[tuple[int, ...], ...]:
    """The ways in which a rank's ``layers`` lie in its ``vpp`` chunks, in model order, the likeliest first; ``tail``: the rank holds the
    model's last chunk."""
    each, more = divmod(layers, vpp)
    some = combinations(order(vpp, tail=tail), more) if vpp <= FREE else [order(vpp, tail=tail)[:more]]
    return tuple(tuple(each + (chunk in up) for chunk in range(vpp)) for up in some)


def order(vpp: int, *, tail: bool) -> tuple[int, ...]:
    """A rank's chunks in the order in which they get one more."""
    late = tuple(reversed(range(vpp)))
    return (*late[1:], late[0]) if tail else late


def dealt(ranks: npt.NDArray[np.int64], loads: Sequence[int], vpp: int, way: int = 0) -> tuple[int, ...]:
    """Layers of every chunk where each rank takes the ``way`` of its ways (the last one it has beyond); ``ranks``: of every chunk."""
    out = np.zeros(len(ranks), np.int64)
    for rank, load in enumerate(loads):
        some = ways(int(load), vpp, tail=rank == int(ranks[-1]))
        out[ranks == rank] = some[min(way, len(some) - 1)]
    return tuple(out.tolist())
