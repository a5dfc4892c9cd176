"""Whole training steps of one rank under the tracer: who allocates what, in which part of the step."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from cost_models.job import Job
from cost_models.layout import Layout
from planner.dryrun.trace import Record, Tracer
from planner.dryrun.world import batch_of, program, replaced
from planner.runtime.attention import Rotary
from planner.runtime.data_parallel import Bucket
from planner.runtime.fully_sharded import FullyShardedGroup
from planner.runtime.pipeline import Chunk, Transfer
from planner.runtime.train import Trainer


@dataclass
class Trace:
    """One rank's step: the record; names of the groups an axis goes by (axes of more than one rank); bytes with a name of their own
    (``named``) that no formula has, and those of them that are sent (``padded``, by axis and kind)."""

    rank: int
    record: Record
    axes: dict[str, str]
    named: dict[str, int]
    padded: dict[tuple[str, str], float]


def trace(job: Job, layout: Layout, rank: int, steps: int = 2) -> Trace:
    """The last of ``steps`` training steps of ``rank``. Raises InputError for what the runtime does not run."""
    with program(job, layout, rank) as trainer:
        tracer = Tracer(trainer.mesh.axis_of)
        gc.collect()
        gc.disable()
        try:
            with watched(trainer, tracer), tracer:
                for number in range(steps):
                    tag(trainer, tracer)
                    tracer.begin()
                    tracer.enter_phase("start", "buffers")
                    trainer.step(number, batch_of(trainer))
                    tracer.enter_phase("end", "buffers")
        finally:
            gc.enable()
        axes = {n: trainer.mesh.axis_of(a.ranks) for n, a in trainer.mesh.axes.items() if a.size > 1}
        if layout.world > 1:
            axes["world"] = trainer.mesh.axis_of(range(layout.world))
        return Trace(rank, tracer.record, axes, named_bytes(trainer), padded_collectives(trainer))


def named_bytes(trainer: Trainer) -> dict[str, int]:
    """Bytes that no formula has: shards are as long as each other, an optimizer counts its steps, rotary tables, the batch."""
    buckets = [s for s in trainer.shards if isinstance(s, Bucket)]
    pads = [(s, spare(s)) for s in buckets]
    masters = [(m, b) for b, ms in zip(trainer.shards, trainer.optimizer.masters, strict=True) for m in ms]
    held = {id(v.untyped_storage()) for s in trainer.shards for v in s.values}
    apart = [b for m, b in masters if id(m.untyped_storage()) not in held]
    state = trainer.optimizer.engine.state
    shorter = sum(fewer_bytes(group) for group in trainer.shards if isinstance(group, FullyShardedGroup))
    out = {
        "bucket padding": sum(n * s.parameters.element_size() for s, n in pads),
        "gradient padding": sum(n * s.wide.itemsize / (s.shard.size if s.sharded is not None else 1) for s, n in pads),
        "master padding": sum(n * s.wide.itemsize * (2 + (s in apart)) / s.shard.size for s, n in pads),
        "shorter shards": 2 * shorter,
        "step counters": sum(v["step"].nbytes for v in state.values()),
        "rotary tables": sum(t.nbytes for t in rotary_tables(trainer)),
        "batch": 2 * 8 * trainer.settings.global_batch // trainer.layout.dp * trainer.settings.seq_len,
        "selection biases": sum(b.nbytes for d in trainer.decoders.values() for b in d.buffers()),
    }
    return {k: v for k, v in out.items() if v}


def fewer_bytes(group: FullyShardedGroup) -> int:
    """Bytes (negative) by which this rank's shards are smaller than the first rank's: FSDP2 shards by rows, and pads a parameter to
    equally many on every rank."""
    held: list[Any] = [parameter for _, parameter, _ in group.members]
    return sum(p.to_local().nbytes - -(-p.shape[0] // p.device_mesh.size(-1)) * (p.nbytes // p.shape[0]) for p in held)


def spare(bucket: Bucket) -> int:
    """Elements by which a bucket is longer than the parameters in it."""
    return bucket.length - bucket.slots[-1].start - bucket.slots[-1].count


def padded_collectives(trainer: Trainer) -> dict[tuple[str, str], float]:
    """Bytes of a step's collectives that carry buckets' padding, by (axis, kind)."""
    out: dict[tuple[str, str], float] = defaultdict(float)
    for bucket in trainer.shards:
        if not isinstance(bucket, Bucket) or not (elements := spare(bucket)):
            continue
        name, size = trainer.mesh.axis_of, bucket.wide.itemsize * elements
        times = trainer.microbatches if bucket.sharded is not None else 1
        for axis in bucket.partial:
            out[name(axis.ranks), "all_reduce"] += size * times
        for axis in bucket.ends:
            out[name(axis.ranks), "all_reduce"] += size / (bucket.shard.size if bucket.sharded is not None else 1)
        out[name(bucket.shard.ranks), "reduce_scatter"] += size * times
        out[name(bucket.shard.ranks), "all_gather"] += bucket.parameters.element_size() * elements
        if bucket.replicate.size > 1:
            out[name(bucket.replicate.ranks), "all_reduce"] += size / bucket.shard.size
    for group in trainer.shards:
        if isinstance(group, FullyShardedGroup):  # partial sums are of the rank's own rows, which may be fewer
            for axis in group.partial:
                out[trainer.mesh.axis_of(axis.ranks), "all_reduce"] += fewer_bytes(group)
    return {key: size for key, size in out.items() if size}


def rotary_tables(trainer: Trainer) -> Iterator[Tensor]:
    """Cosines and sines that attention layers keep."""
    for decoder in trainer.decoders.values():
        for module in decoder.modules():
            rotary = getattr(module, "rotary", None)
            for pair in rotary._made.values() if isinstance(rotary, Rotary) else ():
                yield from pair


def tag(trainer: Trainer, tracer: Tracer) -> None:
    """States by category, as they are between steps."""
    for shards in trainer.shards:
        if isinstance(shards, Bucket):
            tracer.see(shards.parameters, "parameters")
            for buffer in (shards.full, shards.sharded):
                if buffer is not None:
                    tracer.see(buffer, "gradients")
        elif isinstance(shards, FullyShardedGroup):
            for local in shards.locals:
                tracer.see(local, "parameters")
            tag_gradients(shards, tracer)
    parameters = {id(v.untyped_storage()) for s in trainer.shards for v in s.values}
    for masters in trainer.optimizer.masters:
        for master in masters:
            if id(master.untyped_storage()) not in parameters:
                tracer.see(master, "optimizer")
            for value in trainer.optimizer.engine.state.get(master, {}).values():
                tracer.see(value, "optimizer")
    for decoder in trainer.decoders.values():
        for frozen in (p for p in decoder.parameters() if not p.requires_grad):
            tracer.see(frozen, "parameters")
        for buffer in decoder.buffers():
            tracer.see(buffer, "buffers")
    for table in rotary_tables(trainer):
        tracer.see(table, "buffers")


def tag_gradients(shards: FullyShardedGroup, tracer: Tracer) -> None:
    for _, parameter, _ in shards.members:
        if parameter.grad is not None:
            tracer.see(parameter.grad, "gradients")


@contextmanager
def watched(trainer: Trainer, tracer: Tracer) -> Iterator[None]:
    """The parts of a step tell the tracer when they begin."""
    pipeline, optimizer = trainer.pipeline, trainer.optimizer
    before, run, transfer, step, norm = pipeline.before, pipeline.run, pipeline._transfer, optimizer.step, optimizer.squared_norm
    give = pipeline._give

    def on_action(chunk: Chunk, kind: str, microbatch: int) -> None:
        category = {"F": "activations", "B": "held"}.get(kind, "temporary")
        tracer.enter_phase(f"{kind}{chunk.index}.{microbatch}", category)
        if kind in ("F", "B"):
            arrived = pipeline._received.get((kind, microbatch, chunk.index + (-1 if kind == "F" else 1)))
            if arrived is not None:
                tracer.see(arrived[1], category)
        if before is not None:
            before(chunk, kind, microbatch)

    def on_transfer(one: Transfer) -> None:
        with tracer.as_category("buffers"):
            transfer(one)

    def on_gradient(chunk: Chunk, microbatch: int, x: Tensor) -> None:
        give(chunk, microbatch, x)
        if x.grad is not None:
            tracer.see(x.grad, "buffers")

    def phase(name: str, function: Callable[..., Any], after: str | None = None) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            tracer.enter_phase(name, "temporary")
            out = function(*arguments, **named)
            if after is not None:
                tracer.enter_phase(after, "temporary")
            return out

        return call

    with replaced(
        (pipeline, "before", on_action), (pipeline, "_transfer", on_transfer), (pipeline, "_give", on_gradient),
        (pipeline, "run", phase("pipeline", run, "reduce")),
        (optimizer, "step", phase("optimizer", step)), (optimizer, "squared_norm", phase("norm", norm)),
        *sharding(tracer),
    ):  # fmt: skip
        yield


def sharding(tracer: Tracer) -> Iterator[tuple[Any, str, Any]]:
    """FSDP2's gathers make gathered parameters, its reductions leave gradients."""

    def gathering(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: FSDPParamGroup, *arguments: Any, **named: Any) -> Any:
            with tracer.as_category("gathered"):
                return function(self, *arguments, **named)

        return call

    def reducing(self: FSDPParamGroup, *arguments: Any, **named: Any) -> Any:
        with tracer.as_category("temporary"):
            out = post_backward(self, *arguments, **named)
        for one in self.fsdp_params:
            if one.sharded_param.grad is not None:
                tracer.see(one.sharded_param.grad, "gradients")
        return out

    post_backward = FSDPParamGroup.post_backward
    for name in ("unshard", "wait_for_unshard"):
        yield FSDPParamGroup, name, gathering(getattr(FSDPParamGroup, name))
    yield FSDPParamGroup, "post_backward", reducing
