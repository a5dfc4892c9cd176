"""Lower bounds on the bytes of ranks for hundreds of thousands of degrees at once: what a layer's states and activations need at least.

The same formulas as ``cost_models.memory`` with arrays for the degrees, under the most sharding that a ZeRO stage allows. What depends on
the split of data parallelism or on the rank order (gathered buffers, communicators beyond the least) is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.job import Job
from cost_models.layout import RecomputeRule
from cost_models.model_end import prediction_module
from cost_models.overheads import communicators, gathered_layers, message_buffers
from cost_models.stage_states import unit_holding
from cost_models.state_bytes import shards, states
from cost_models.unit_memory import Run, unit_memory
from planner.bulk import KINDS, Ints, degrees_of, dispatchers_of, grids
from planner.rules.core import Limits

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Kept:
    """Bytes of one microbatch by key: ``kept`` key x kind x mode from a layer's forward to its backward; ``beyond``: key x kind, most that
    a layer's backward needs beside what is kept; ``tail``: kept by the head and prediction modules; ``loss``: what the loss needs beside
    it; ``waits`` key x kind between a layer's input-gradient and weight-gradient pass, of which a chunk of layers holds ``above`` less at most
    (``activations.assemble``); ``message``: buffers of a pipeline's sends and receives."""

    kept: Floats
    beyond: Floats
    tail: Floats
    loss: Floats
    waits: Floats
    above: Floats
    message: Floats


@dataclass(frozen=True)
class Held:
    """Bytes by prefix: ``state`` (ZeRO stage -> prefix x kind) of a layer, ``embedding`` and ``head`` (ZeRO stage -> prefix) of the ends,
    all under the most sharding; ``room``: for all that the allocator holds, pipeline messages included."""

    state: dict[int, Floats]
    embedding: dict[int, Floats]
    head: dict[int, Floats]
    room: Floats


def kept_of(job: Job, keys: Ints, modes: tuple[RecomputeRule, ...], *, offload: bool) -> Kept:
    """What a microbatch needs at least, by key (``bulk.COLUMNS``). ``offload``: activations may live in host memory."""
    model, number = job.model, len(keys)
    out = Kept(
        np.zeros((number, len(model.kinds), len(modes))), np.full((number, len(model.kinds)), np.inf),
        np.zeros(number), np.zeros(number), np.zeros((number, len(model.kinds))), np.zeros(number), np.zeros(number),
    )  # fmt: skip
    out.waits[:] = np.inf
    out.kept[:] = np.inf
    execution = job.execution
    for kind, name in enumerate(KINDS):
        for grid in grids(keys, kind):
            at, spread = grid.keys, grid.spread
            for dispatcher in dispatchers_of(job):
                degrees = grid.all(job, name, dispatcher)
                for k in range(len(model.kinds)):
                    for m, mode in enumerate(modes):
                        unit = unit_memory(job, degrees, k, mode)
                        together = execution.recompute_unit if mode.mode == "full" else 1
                        least = unit.kept / together
                        if execution.split_backward_keeps_graph:
                            out.above[at] = np.maximum(out.above[at], spread(unit.above))
                        if mode.mode == "none" and k == model.pattern[0]:  # the model's first layer may keep less
                            least = least - unit_memory(job, degrees, "first", RecomputeRule(k, None, "none")).kept
                        out.kept[at, k, m] = np.minimum(out.kept[at, k, m], 0.0 if offload else spread(least))
                    waits = 0.0 if offload or job.measured else unit.weight_pass
                    out.waits[at, k] = np.minimum(out.waits[at, k], spread(waits))
                    out.beyond[at, k] = np.minimum(out.beyond[at, k], spread(unit.transient))
            degrees = grid.dense(job, name)
            head = unit_memory(job, degrees, "head")
            out.tail[at] = 0.0 if offload else spread(head.kept + _prediction(job, degrees, modes))
            out.loss[at] = spread(head.transient)
            out.message[at] = spread(message_buffers(job, degrees))
    return out


def _prediction(job: Job, degrees: Any, modes: tuple[RecomputeRule, ...]) -> Any:
    """Bytes that prediction modules keep at least: their layer follows the rule of the model's last."""
    last = [Run(job.model.pattern[-1], mode, 1) for mode in modes]
    return job.model.mtp and job.model.mtp * reduce(np.minimum, [prediction_module(job, degrees, run)[0] for run in last])


def degrees_of_prefixes(job: Job, prefixes: Ints, shard: Ints, zero: int, *, offload: bool = False) -> Any:
    """Prefixes (tp, ring, ulysses, ep, etp, cp kind, pp, dp) as degrees, data parallelism sharded ``shard`` ways under a ZeRO stage;
    ``offload``: optimizer states in host memory."""
    keys = np.concatenate([prefixes[:, :5], np.ones((len(prefixes), 1), np.int64), prefixes[:, 5:6]], axis=1)
    degrees = degrees_of(job, keys, "ring")
    degrees.pp, degrees.dp, degrees.dp_shard = prefixes[:, 6], prefixes[:, 7], shard
    degrees.dp_replicate = degrees.dp // shard
    place = degrees.etp * degrees.ep
    degrees.edp = np.maximum(1, degrees.tp * degrees.cp * degrees.dp // place)
    degrees.edp_shard = np.maximum(1, degrees.tp * degrees.cp * shard // place)
    degrees.edp_replicate = np.maximum(1, degrees.edp // degrees.edp_shard)
    degrees.zero, degrees.offload = zero, ("optimizer",) if offload else ()
    return degrees


def states_of(
    job: Job, prefixes: Ints, shard: Ints, zero: int, *, offload: bool, once: bool = False
) -> tuple[Floats, Floats, Floats, Floats]:
    """Bytes of states by prefix under a ZeRO stage over ``shard`` ways: (of a layer by kind, of the embedding, of the head with prediction
    modules, of what the last rank has a copy of where the embedding is on another one). ``once``: a step's only microbatch, during whose
    backward gradients that are reduced layer by layer do not exist yet."""
    model, number = job.model, len(prefixes)
    degrees = degrees_of_prefixes(job, prefixes, shard, zero, offload=offload)
    later = once and zero == 3 and job.execution.reduces_by_unit

    def total(unit: int | str) -> Floats:
        holding, trained = unit_holding(job, degrees, unit)
        held = states(job, degrees, holding, replace(trained, largest=0))  # a stage holds the largest matrix once, not one a layer
        bytes_: Floats = np.zeros(number) + (held.total - held.gradients if later else held.total)
        return bytes_

    layers = np.stack([total(k) for k in range(len(model.kinds))], axis=1)
    head, twice = total("tied head" if model.tied else "head"), np.zeros(number)
    if model.tied:
        twice = total("head") - head
    if model.mtp:
        head = head + model.mtp * total("mtp")
        twice = twice if model.tied else total("tokens")
    return layers, total("embedding"), head, twice


def gathered_of(job: Job, prefixes: Ints, shard: Ints, zero: int) -> Floats:
    """Bytes of whole parameters and gradients that a layer's backward has beside the states at least, by prefix: of the smallest kind, of
    the largest one where a rank has all."""
    degrees = degrees_of_prefixes(job, prefixes, shard, zero)
    if zero < 2 or job.execution.reduces_by_unit or (zero == 2 and job.execution.gradient_bucket_bytes):
        return np.zeros(len(prefixes))
    sizes = [unit_holding(job, degrees, k)[0].all for k in range(len(job.model.kinds))]
    every = np.stack([np.zeros(len(prefixes)) + size for size in sizes])
    one = np.where(prefixes[:, 6] == 1, every.max(axis=0), every.min(axis=0))
    out: Floats = np.where(shards(degrees)[0] > 1, gathered_layers(job, degrees, one, one), 0.0)
    return out


def held_of(job: Job, limits: Limits, prefixes: Ints, *, offload: bool, once: bool = False) -> Held:
    """What states need at least, by prefix: (tp, ring, ulysses, ep, etp, cp kind, pp, dp). ``offload``: optimizer states may live in
    host memory; ``once``: as in ``states_of``."""
    state, first, last = {}, {}, {}
    for zero in sorted(set(limits.zero) | {0}):
        state[zero], first[zero], last[zero], _ = states_of(job, prefixes, prefixes[:, 7], zero, offload=offload, once=once)
    degrees = degrees_of_prefixes(job, prefixes, prefixes[:, 7], 0)
    if "allgather" in limits.dispatchers:
        degrees.dispatcher = "allgather"
    outside = communicators(job, degrees) + job.cluster.gpu.context_bytes
    room = (job.limit_bytes - job.execution.workspace_bytes - outside) / job.execution.slack
    return Held(state, first, last, np.zeros(len(prefixes)) + room)
