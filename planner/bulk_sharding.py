"""What ZeRO adds to passes and to a step's ends, by arrays: lower bounds on the seconds of gathering, reducing and updating.

The formulas of ``passes._with_sharding`` and ``update.update_seconds`` with arrays for the degrees, groups placed as near as any rank order
puts them. A stage's collectives grow less than its layers do (latency is shared, the rest is concave), so that a layer's share of one
collective over the whole model bounds its share on any stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.communication import INTERFERENCE, hidden
from cost_models.compute import is_host
from cost_models.job import Job
from cost_models.passes import gather_bytes
from cost_models.stage_states import adapters
from cost_models.states import Holding, Weight, embedding_weights, head_weights, hold, layer_weights
from cost_models.update import OPTIMIZER_SHARE, USABLE
from planner.bulk import Bulk, Ints
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
        self.degrees = degrees_of_prefixes(job, prefixes, shard)
        self.pipelined = prefixes[:, 6] > 1
        d = self.degrees
        self.dense, self.expert = d.dp_shard * d.cp, d.edp_shard
        self.groups = {
            "zero": (self.dense, d.tp), "edp_shard": (self.expert, d.etp * d.ep),
            "dp_replicate": (d.dp // d.dp_shard, d.tp * self.dense),
            "edp_replicate": (np.maximum(1, d.edp // np.maximum(1, self.expert)), d.etp * d.ep * self.expert),
        }  # fmt: skip
        execution = job.execution
        once = self.pipelined & (not execution.reduce_every_microbatch)
        self.reduces_once = np.full(len(prefixes), zero < 2 or execution.accumulates_unsharded) | once
        self.gathers_once = self.pipelined & (not execution.reshard_with_pipeline)

    def seconds(self, kind: str, axis: str, size: Any) -> Floats:
        """Seconds of one collective by column."""
        ranks, stride = (np.broadcast_to(np.asarray(x), self.dense.shape) for x in self.groups[axis])
        size = np.broadcast_to(np.asarray(size, float), ranks.shape)
        out: Floats = np.where((ranks > 1) & (size > 0), self.job.cluster.collective_seconds(kind, size, ranks, stride), 0.0)
        return out

    def held(self, weights: tuple[Weight, ...]) -> tuple[Holding, Holding]:
        """(all, trained) weights on one rank before ZeRO."""
        job = self.job
        whole = hold(weights, self.degrees, job.execution)
        if job.lora_rank:
            return whole, hold(adapters(job, weights), self.degrees, job.execution)
        if job.frozen:
            return whole, hold([w for w in weights if w.part not in job.frozen], self.degrees, job.execution)
        return whole, whole

    def gather(self, weights: Holding) -> tuple[Floats, Floats]:
        """Seconds of gathering (dense, expert) weights."""
        dense, expert = gather_bytes(self.job, weights)
        return self.seconds("all_gather", "zero", dense), self.seconds("all_gather", "edp_shard", expert)

    def reduce(self, trained: Holding) -> tuple[Floats, Floats]:
        """Seconds of reducing the gradients of (dense, expert) weights."""
        each = self.job.execution.reduce_bytes
        out = []
        for count, inner, outer, ways in (
            (trained.dense, "zero", "dp_replicate", self.dense), (trained.expert, "edp_shard", "edp_replicate", self.expert),
        ):  # fmt: skip
            if self.zero == 0:
                out.append(self.seconds("all_reduce", inner, each * count) + self.seconds("all_reduce", outer, each * count))
            else:
                out.append(
                    self.seconds("reduce_scatter", inner, each * count) + self.seconds("all_reduce", outer, each * count / ways)
                )
        return out[0], out[1]

    def add(self, bulk: Bulk) -> Bulk:
        """Passes of the same columns with each microbatch's gathers and reductions."""
        if self.zero < 2:
            return bulk
        model = self.job.model
        f, b = bulk.f.copy(), bulk.b.copy()
        for k, layer in enumerate(model.kinds):
            before, after = self._each(layer_weights(model, layer))
            b[:, k] += self._beside(after[:, None], bulk.b[:, k] + bulk.w[:, [k]])
            f[:, k] += self._beside(before, bulk.f[:, k])
        ends = []
        for weights, unit in (
            (embedding_weights(model), bulk.embedding),
            (head_weights(model, shares_embedding=model.tied), bulk.head),
        ):
            before, after = self._each(weights)
            more = np.stack(
                [self._beside(before, unit[:, 0]), self._beside(after, unit[:, 1] + unit[:, 2]), np.zeros(len(unit))], axis=1
            )
            ends.append(unit + more)
        return Bulk(f, b, bulk.w, ends[0], ends[1])

    def _each(self, weights: tuple[Weight, ...]) -> tuple[Floats, Floats]:
        """Seconds of collectives in (forward, backward) of every microbatch."""
        whole, trained = self.held(weights)
        gather = np.where(self.gathers_once, 0.0, sum(self.gather(whole))) if self.zero == 3 else np.zeros(len(self.dense))
        after = gather * (self.job.execution.gathers_per_microbatch - 1) + np.where(
            self.reduces_once, 0.0, sum(self.reduce(trained))
        )
        return gather, after

    def _beside(self, seconds: Floats, work: Floats) -> Floats:
        if self.job.execution.fsdp_prefetch and not is_host(self.job.cluster.gpu):
            out: Floats = hidden(seconds, work)
            return out
        return np.zeros_like(work) + seconds

    def ends(self, bulk: Bulk) -> Ends:
        """What a layer adds at its rank's ends; ``bulk``: seconds of the same columns' passes."""
        job, execution = self.job, self.job.execution
        model, layers = job.model, job.model.num_layers
        start, end, own = np.zeros_like(bulk.f), np.zeros_like(bulk.f), np.zeros_like(bulk.f)
        gathers = self.gathers_once if self.zero == 3 else np.full(len(self.dense), self.zero in (1, 2))
        traffic = execution.optimizer_traffic * OPTIMIZER_SHARE[job.optimizer] / job.cluster.gpu.memory_bytes_per_second
        ways = (self.dense, self.expert) if self.zero else (1, 1)
        unit = bulk.embedding + bulk.head
        more = [USABLE * unit[:, 0], USABLE * (unit[:, 1] + unit[:, 2])]
        least = [np.zeros(len(unit)), np.zeros(len(unit))]
        ahead = execution.dp_overlap and execution.gather_overlap
        for k, layer in enumerate(model.kinds):
            whole, trained = self.held(layer_weights(model, layer))
            back, front = USABLE * (bulk.b[:, k].max(axis=1) + bulk.w[:, k]), USABLE * bulk.f[:, k]
            short = USABLE * (bulk.b[:, k].min(axis=1) + bulk.w[:, k])
            for seconds, counts, window, overlap, out, place in (
                (self.reduce(trained.times(layers)), (trained.dense, trained.expert), back, execution.dp_overlap, end, 1),
                (self.gather(whole.times(layers)), (whole.dense, whole.expert), front, ahead, start, 0),
            ):  # fmt: skip
                happens = self.reduces_once if place else gathers
                each = execution.reduce_bytes if place else 4.0
                for one, count in zip(seconds, counts, strict=True):
                    share = execution.dp_bucket_bytes / np.maximum(1.0, each * count * layers)
                    one = np.where(happens, one / layers, 0.0)
                    value, slope = _line(one, share, window, overlap)
                    out[:, k] += value
                    if place:
                        narrow, steep = _line(one, share, short, overlap)
                        own[:, k] += narrow
                        slope = np.maximum(slope, steep)
                    if k == 0:
                        least[place] = least[place] - slope * more[place]
            if job.optimizer != "muon" and not self.degrees_offload:
                update = traffic * (trained.dense / ways[0] + trained.expert / ways[1])
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
