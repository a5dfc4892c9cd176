"""What ZeRO adds to passes and to a step's ends, by arrays: lower bounds on the seconds of gathering, reducing and updating.

The collectives of ``cost_models.sharding`` with arrays for the degrees, groups placed as near as any rank order puts them. A stage's
collectives grow less than its layers do (latency is shared, the rest is concave), so that a layer's share of one
collective over the whole model bounds its share on any stage.
"""

from __future__ import annotations

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
    by column and kind, and what embedding and head may take off (column; negative where more of them hides)."""

    start: Floats
    end: Floats
    end_own: Floats
    start_least: Floats
    end_least: Floats


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

    def ends(self, bulk: Bulk) -> Ends:
        """What a layer adds at its rank's ends; ``bulk``: seconds of the same columns' passes."""
        job, execution = self.job, self.job.execution
        model, layers = job.model, job.model.num_layers
        start, end, own = np.zeros_like(bulk.f), np.zeros_like(bulk.f), np.zeros_like(bulk.f)
        unit = bulk.embedding + bulk.head
        more = [USABLE * unit[:, 0], USABLE * (unit[:, 1] + unit[:, 2])]
        least = [np.zeros(len(unit)), np.zeros(len(unit))]
        ahead = execution.dp_overlap and execution.gather_overlap
        for k in range(len(model.kinds)):
            whole, trained = self.held(k)
            back, front = USABLE * (bulk.b[:, k].max(axis=1) + bulk.w[:, k]), USABLE * bulk.f[:, k]
            short = USABLE * (bulk.b[:, k].min(axis=1) + bulk.w[:, k])
            all_layers = gathers(job, (whole if self.zero == 3 else trained).times(layers))
            for once, collectives, window, overlap, out, place in (
                (gathers_once, ((one,) for one in all_layers), front, ahead, start, 0),
                (reduces_once, reductions(job, self.degrees, trained.times(layers)), back, execution.dp_overlap, end, 1),
            ):  # fmt: skip
                for pair in collectives:
                    share = execution.dp_bucket_bytes / np.maximum(1.0, pair[0].bytes)
                    one = np.where(once(job, self.degrees), seconds_of(self.network, pair) / layers, 0.0)
                    value, slope = _line(one, share, window, overlap)
                    out[:, k] += value
                    if place:
                        narrow, steep = _line(one, share, short, overlap)
                        own[:, k] += narrow
                        slope = np.maximum(slope, steep)
                    if k == 0:
                        least[place] = least[place] - slope * more[place]
            if job.optimizer != "muon" and not self.degrees_offload:
                update = optimizer_seconds(job, self.degrees, trained)
                end[:, k] += update
                own[:, k] += update
        return Ends(start, end, own, least[0], least[1])

    degrees_offload = False
    """Whether optimizer states may live in host memory, where their update is bounded by nothing here."""


def _line(seconds: Floats, share: Any, window: Floats, overlap: bool) -> tuple[Floats, Floats]:
    """A linear lower bound on ``update._exposed``, which is convex in seconds and window: (of a layer's part, what a second more of window
    takes off). Either all work beside the collective hides it, or none more than the slowing; the last ``share`` of the whole never
    hides."""
    if not overlap:
        return seconds, np.zeros_like(seconds)
    rest = seconds * (1 - np.minimum(1.0, share))
    open_ = seconds - (1 - INTERFERENCE) * window
    closed = seconds - (1 - INTERFERENCE) * rest
    slope = np.where(open_ > closed, 1 - INTERFERENCE, 0.0)
    return np.maximum(open_, closed), slope
