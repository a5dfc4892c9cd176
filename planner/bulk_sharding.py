"""What ZeRO adds to passes and to a step's ends, by arrays: lower bounds on the seconds of gathering, reducing and updating.

The collectives of ``cost_models.sharding`` with arrays for the degrees, groups placed as near as any rank order puts them. A stage's
collectives grow less than its layers do (latency is shared, the rest is concave), so that a layer's share of one
collective over the whole model bounds its share on any stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.communication import INTERFERENCE, seconds_of
from cost_models.job import Job
from cost_models.sharding import EachMicrobatch, beside, each_microbatch, gathers, gathers_once, reduces_once, reductions
from cost_models.stage_states import unit_holding
from cost_models.states import Holding
from cost_models.update import USABLE, optimizer_seconds
from planner.bulk import Bulk, Closest, Ints
from planner.bulk_bytes import degrees_of_prefixes

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ends:
    """Seconds that a rank's collectives and optimizer add at least before its first action (``start``) and after its last (``end``;
    ``end_own``: where more recompute costs more than the reduction that it hides, so that it is taken as the least): of one layer
    by column and kind, and what embedding and head may take off (column; negative where more of them hides). ``whole``: those of all
    layers on one rank, before and after, by column."""

    start: Floats
    end: Floats
    end_own: Floats
    start_least: Floats
    end_least: Floats
    whole: Floats


class Sharding:
    """Collectives of columns: prefixes whose data parallelism is sharded ``shard`` ways under ZeRO stage ``zero``."""

    def __init__(self, job: Job, prefixes: Ints, shard: Ints, zero: int) -> None:
        self.job, self.zero = job, zero
        self.degrees = degrees_of_prefixes(job, prefixes, shard, zero)
        self.network = Closest(job, self.degrees)

    def held(self, unit: int | str) -> tuple[Holding, Holding]:
        """(all, trained) weights of a unit on one rank before ZeRO."""
        return unit_holding(self.job, self.degrees, unit)

    def add(self, bulk: Bulk) -> Bulk:
        """Passes of the same columns with each microbatch's gathers and reductions."""
        if self.zero < 2:
            return bulk
        model = self.job.model
        f, b = bulk.f.copy(), bulk.b.copy()
        for k in range(len(model.kinds)):
            each = self._each(k)
            for mode in range(b.shape[2]):
                before, after = beside(self.job, each, bulk.f[:, k], bulk.b[:, k, mode] + bulk.w[:, k])
                b[:, k, mode] += after
            f[:, k] += before
        ends = []
        for name, unit in (("embedding", bulk.embedding), ("tied head" if model.tied else "head", bulk.head)):
            before, after = beside(self.job, self._each(name), unit[:, 0], unit[:, 1] + unit[:, 2])
            nothing = np.zeros(len(unit))
            ends.append(unit + np.stack([nothing + before, nothing + after, nothing], axis=1))
        return Bulk(f, b, bulk.w, ends[0], ends[1])

    def _each(self, unit: int | str) -> EachMicrobatch:
        return each_microbatch(self.job, self.network, *self.held(unit))

    def ends(self, bulk: Bulk, totals: Ints) -> Ends:
        """What a layer adds at its rank's ends; ``bulk``: seconds of the same columns' passes; ``totals``: layers by kind."""
        job, execution = self.job, self.job.execution
        number, kinds, layers = *bulk.f.shape, job.model.num_layers
        held = [self.held(k) for k in range(kinds)]
        unit = bulk.embedding + bulk.head
        back, short = (USABLE * (b + bulk.w) for b in (bulk.b.max(axis=2), bulk.b.min(axis=2)))
        whole = np.zeros(number)

        def side(
            once: Any, of_kinds: Sequence[Any], overlap: bool, windows: Sequence[Floats], more: Floats
        ) -> tuple[list[Floats], Floats]:
            """(column x kind seconds of a layer for every one of ``windows``, what ``more`` seconds of window take off at most)."""
            nonlocal whole
            outs, least = [np.zeros((number, kinds)) for _ in windows], np.zeros(number)
            happens = once(job, self.degrees)
            for pairs in zip(*of_kinds, strict=True):  # the same collective of every kind
                one = np.stack([np.where(happens, seconds_of(self.network, pair) / layers, 0.0) for pair in pairs], axis=1)
                share = np.stack(
                    [np.broadcast_to(execution.dp_bucket_bytes / np.maximum(1.0, p[0].bytes), number) for p in pairs], axis=1
                )
                lines = [_line(one, share, window, overlap) for window in windows]
                for out, (value, _) in zip(outs, lines, strict=True):
                    out += value
                least -= np.max([slope for _, slope in lines], axis=0) * more
                whole = whole + _all_layers(one, share, windows[0], overlap, totals, more)
            return outs, least

        all_of = [(w if self.zero == 3 else t).times(layers) for w, t in held]
        ahead = execution.dp_overlap and execution.gather_overlap
        (start,), start_least = side(
            gathers_once, [[(one,) for one in gathers(job, some)] for some in all_of], ahead, [USABLE * bulk.f], USABLE * unit[:, 0]
        )
        (end, own), end_least = side(
            reduces_once,
            [reductions(job, self.degrees, t.times(layers)) for _, t in held],
            execution.dp_overlap,
            [back, short],
            USABLE * (unit[:, 1] + unit[:, 2]),
        )
        if job.optimizer != "muon" and not self.degrees_offload:
            update = np.stack([np.broadcast_to(optimizer_seconds(job, self.degrees, t), number) for _, t in held], axis=1)
            end, own, whole = end + update, own + update, whole + update @ totals
        return Ends(start, end, own, start_least, end_least, whole)

    degrees_offload = False
    """Whether optimizer states may live in host memory, where their update is bounded by nothing here."""


def _line(seconds: Floats, share: Floats, window: Floats, overlap: bool) -> tuple[Floats, Floats]:
    """A linear lower bound on ``update._exposed``, which is convex in seconds and window, of columns' layers by kind: (of a layer's part,
    what a second more of window takes off). All kinds' layers hide what theirs together ask for, so that one line holds for all of them."""
    if not overlap:
        return seconds, np.zeros(len(seconds))
    open_, closed = _lines(seconds, share, window)
    better = open_.min(axis=1) > closed.min(axis=1)
    return np.where(better[:, None], open_, closed), np.where(better, 1 - INTERFERENCE, 0.0)


def _lines(seconds: Floats, share: Floats, window: Floats) -> tuple[Floats, Floats]:
    """Either all work beside the collective hides it, or none more than the slowing; the last ``share`` of the whole never hides."""
    rest = seconds * (1 - np.minimum(1.0, share))
    return seconds - (1 - INTERFERENCE) * window, seconds - (1 - INTERFERENCE) * rest


def _all_layers(seconds: Floats, share: Floats, window: Floats, overlap: bool, totals: Ints, more: Floats) -> Floats:
    """By column: the same of all layers together, with ``more`` seconds of window."""
    if not overlap:
        out: Floats = seconds @ totals
        return out
    open_, closed = _lines(seconds, share, window)
    return np.maximum(open_ @ totals - (1 - INTERFERENCE) * more, closed @ totals)
