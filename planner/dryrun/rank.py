"""Whole training steps of one rank under the tracer: who allocates what, in which part of the step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


def trace(job: Job, layout: Layout, rank: int, steps: int = 2) -> tuple[Record, int]:
    """The last of ``steps`` training steps of ``rank``, and the bytes by which its states are longer than the tensors in them (a
    shard is as long as the others). Raises InputError for what the runtime does not run."""
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
        return tracer.record, padding(trainer)


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
        for buffer in decoder.buffers():
            tracer.see(buffer, "buffers")
        for module in decoder.modules():
            rotary = getattr(module, "rotary", None)
            for pair in rotary._made.values() if isinstance(rotary, Rotary) else ():
                for table in pair:
                    tracer.see(table, "buffers")


def tag_gradients(shards: FullyShardedGroup, tracer: Tracer) -> None:
    for _, parameter, _ in shards.members:
        if parameter.grad is not None:
            tracer.see(parameter.grad, "gradients")


def padding(trainer: Trainer) -> int:
    """Elements by which this rank's buckets are longer than the parameters in them."""
    return sum(s.length - s.slots[-1].start - s.slots[-1].count for s in trainer.shards if isinstance(s, Bucket))


@contextmanager
def watched(trainer: Trainer, tracer: Tracer) -> Iterator[None]:
    """The parts of a step tell the tracer when they begin."""
    pipeline, optimizer = trainer.pipeline, trainer.optimizer
    before, run, transfer, step, norm = pipeline.before, pipeline.run, pipeline._transfer, optimizer.step, optimizer.squared_norm

    def on_action(chunk: Chunk, kind: str, microbatch: int) -> None:
        tracer.enter_phase(f"{kind}{chunk.index}.{microbatch}", "activations" if kind == "F" else "temporary")
        if before is not None:
            before(chunk, kind, microbatch)

    def on_transfer(one: Transfer) -> None:
        with tracer.as_category("activations" if one.what == "F" else "temporary"):
            transfer(one)

    def phase(name: str, function: Callable[..., Any], after: str | None = None) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            tracer.enter_phase(name, "temporary")
            out = function(*arguments, **named)
            if after is not None:
                tracer.enter_phase(after, "temporary")
            return out

        return call

    with replaced(
        (pipeline, "before", on_action), (pipeline, "_transfer", on_transfer), (pipeline, "run", phase("pipeline", run, "reduce")),
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
