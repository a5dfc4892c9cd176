"""The costs of columns of one pipeline, by arrays: what a bound asks of a layer, of a rank's ends and of its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.flying import Flying

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
ROUNDING = 1e-9
"""Layers by which a capacity may miss a whole number through rounding."""


@dataclass(frozen=True)
class Costs:
    """Costs of columns of one shape, by column first. Seconds of one microbatch: ``f``, ``b`` (least mode), ``w`` of a layer of the main
    kind, ``again`` column x mode what recompute adds; ``embedding``, ``head`` column x (f, b, w); ``transfer``; ``hidden`` column x (f, b)
    what a pair hides of a layer; ``start``, ``end``, ``end_own``, ``least``: ``bulk_sharding.Ends``. Bytes: ``state`` and ``kept`` column
    x mode of a layer, ``lowest`` what it keeps at least, ``waits`` what it holds for its weight gradient, less ``above`` a chunk,
    ``room`` column x rank; ``spare``: what a rank has for one layer's whole tensors without more room (inf: it never needs them).
    Without a main kind these are of the mean layer, and the modes those of all kinds: each keeps as much less than the mean layer
    without recompute as it saves.
    ``credit``: seconds by column and chunk by which one microbatch may pass layers of other kinds faster; ``lighter``: bytes by column and
    rank by which they may need other; where those of another kind lead the model, instead ``ahead`` column x (f, b, w) seconds and
    ``ahead_bytes`` column x (state, kept in the least mode, waits) of one of them."""

    f: Floats
    b: Floats
    w: Floats
    again: Floats
    embedding: Floats
    head: Floats
    transfer: Floats
    hidden: Floats
    start: Floats
    end: Floats
    end_own: Floats
    least: Floats
    state: Floats
    kept: Floats
    lowest: Floats
    waits: Floats
    above: Floats
    room: Floats
    spare: Floats
    credit: Floats
    lighter: Floats
    ahead: Floats
    ahead_bytes: Floats

    @property
    def quicker(self) -> Floats:
        """Column x (f, b, w): seconds by which a leading layer is quicker."""
        return np.maximum(0.0, np.stack([self.f, self.b, self.w], axis=1) - self.ahead)

    def roomy(self, flying: Flying, vpp: int, layers: int, first: int) -> Bools:
        """Whether the ranks of a column have room for all layers in the mode that keeps least, a rank's chunks as even as they can be;
        ``first``: layers of another kind before all others, of which a rank holds one less than the rank before it, or any number where the
        ranks are fewer."""
        kept, good, ahead = self.lowest[:, None], np.ones(len(self), bool), self._most_ahead(first)
        state, keeps, waits = (self.ahead_bytes[:, i, None] for i in range(3))
        for moment in flying.moments:
            each = np.stack([self.state[:, None] + g.alive * kept + g.waiting * self.waits[:, None] for g in moment])
            room = self.room + 1.0 + sum(g.waiting for g in moment) * self.above[:, None]
            if first:
                lead = np.stack([state + g.alive * keeps + g.waiting * waits for g in moment])
                room = room + ahead * np.maximum(0.0, (each - lead).max(axis=0))
            else:
                room = room + self.lighter
            one = np.maximum(each.mean(axis=0), 1e-30)
            odd = each.max(axis=0) - one if len(moment) > 1 else 0.0
            most = np.floor((room + odd) / one + ROUNDING)
            good &= (most >= vpp).all(axis=1) & (np.minimum(most, layers).sum(axis=1) >= layers)
        return good

    def _most_ahead(self, first: int) -> Floats:
        """By rank, how many of the ``first`` leading layers it may hold."""
        pp = self.room.shape[1]
        return np.maximum(0.0, first - np.arange(pp)) if first <= pp else np.full(pp, float(first))

    def prices(self, flying: Flying, first: int) -> Iterator[tuple[Floats, Floats, Floats]]:
        """Column x rank at each full moment: (bytes of a layer that recomputes nothing, bytes that there are for all of them, least seconds of
        recompute a byte that they exceed these by); ``first``: leading layers of another kind, which may weigh nothing."""
        top, ahead = self.kept.max(axis=1)[:, None], self._most_ahead(first)
        saved = top - self.kept
        with np.errstate(divide="ignore", invalid="ignore"):
            price = np.where(saved > 0, self.again / saved, np.inf).min(axis=1)[:, None]
        price = np.where(np.isfinite(price), price, 0.0)
        for moment in flying.moments:
            each = np.stack([self.state[:, None] + g.alive * top + g.waiting * self.waits[:, None] for g in moment])
            room = self.room + (0.0 if first else self.lighter) + sum(g.waiting for g in moment) * self.above[:, None]
            one = np.maximum(each.mean(axis=0), 1e-30)
            odd = each.max(axis=0) - one
            yield one, room + odd + ahead * each.max(axis=0), price / np.maximum(np.max([g.alive for g in moment], axis=0), 0.5)

    def take(self, at: Any) -> Costs:
        """The columns ``at``."""
        return Costs(*(getattr(self, name)[at] for name in self.__dataclass_fields__))

    @classmethod
    def joined(cls, parts: Sequence[Costs]) -> Costs:
        """All columns of ``parts``."""
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in cls.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.f)

    def mark(self) -> bytes:
        """Equal for equal costs."""
        return b"".join(np.ascontiguousarray(getattr(self, name)).tobytes() for name in self.__dataclass_fields__)
