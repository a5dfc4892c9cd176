"""What a chunk of the model keeps for backward, per microbatch, and the most that exists beyond it while its backward runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from cost_models import split_backward
from cost_models.arrays import maximum, minimum, where
from cost_models.fully_sharded import backward_by_unit, by_unit
from cost_models.gradient_buckets import Buckets
from cost_models.job import Job
from cost_models.layout import Layout, RecomputeRule
from cost_models.model_end import model_end, shared_gradient, waiting_for_embedding
from cost_models.split_backward import weight_pass_peak
from cost_models.state_bytes import shards
from cost_models.unit_memory import PLAIN, Run, unit_memory
from profiles.operations import Number


class ChunkMemory(NamedTuple):
    """Bytes per microbatch on one rank. ``kept``: from forward to backward. ``weight_pass``: held from input-gradient to
    weight-gradient pass. Beyond ``kept`` (of this microbatch) exists at most ``loss`` at the loss, and in a whole backward ``head``
    when the head's gradient is complete (both None where the chunk has no head) and ``backward`` in its layers. ``largest``: kept by
    its largest layer. ``input_pass`` and ``ending``: the most that exists beyond ``weight_pass`` in the input-gradient and in the
    weight-gradient pass."""

    kept: Number = 0
    weight_pass: Number = 0
    loss: Number | None = None
    head: Number | None = None
    backward: Number = 0
    largest: Number = 0
    input_pass: Number = 0
    ending: Number = 0


def runs_of(job: Job, layout: Any, chunk: int) -> tuple[Run, ...]:
    """The layers of ``chunk`` as runs of equal ones, in order."""
    return _runs(job.model.pattern, layout.pp, layout.vpp, layout.stages, layout.recompute, chunk)


@lru_cache(maxsize=65536)
def _runs(pattern: tuple[int, ...], pp: int, vpp: int, stages: tuple[int, ...], recompute: str, chunk: int) -> tuple[Run, ...]:
    layout = Layout(pp=pp, vpp=vpp, stages=stages, recompute=recompute)
    rules = layout.recompute_rules
    layers = layout.layers_of_chunk(chunk, len(pattern))

    def sort(i: int) -> tuple[int, str, tuple[str, ...]]:
        rule = rules.of(i)
        return pattern[i], rule.mode, rule.modules

    return tuple(
        Run(kind, RecomputeRule(0, None, mode, modules), len(list(group))) for (kind, mode, modules), group in groupby(layers, sort)
    )


class Place(NamedTuple):
    """Where a chunk stands: ``first`` holds the embedding, ``last`` head and prediction modules; ``shares``: its input is the output of
    a chunk of the same rank (where a V turns), which keeps it."""

    first: bool = False
    last: bool = False
    shares: bool = False


def place_of(layout: Any, chunk: int) -> Place:
    """The place of ``chunk`` under ``layout``."""
    shares = chunk > 0 and layout.rank_of_chunk(chunk - 1) == layout.rank_of_chunk(chunk)
    return Place(chunk == 0, chunk == layout.chunks - 1, shares)


def chunk_memory(job: Job, layout: Any, chunk: int) -> ChunkMemory:
    """The memory of ``chunk`` under ``layout``."""
    return assemble(
        job, layout, runs_of(job, layout, chunk), place_of(layout, chunk), once=layout.microbatches(job.global_batch) == 1
    )


def assemble(job: Job, degrees: Any, runs: Iterable[Run], place: Place, *, once: bool = False) -> ChunkMemory:
    """A chunk of ``runs`` layers. ``once``: the step has a single microbatch.

    Backward goes from the last layer to the first: while a layer runs, what later layers (and the head) kept is free again, and
    the layer's own recomputed tensors and gradients exist beside what is kept.
    """
    first, last = place.first, place.last
    runs = tuple(runs)
    buckets = Buckets(job, degrees)
    end = model_end(job, degrees, runs, first=first) if last else None
    kept, weight_pass, above = (0, 0, 0) if end is None else (end.kept, end.weight_pass, end.above)
    loss, head = (None, None) if end is None else (end.loss, end.backward)
    freed: Number = kept
    backward: Number = 0
    given: Number = 0
    largest: Number = 0
    together = job.execution.recompute_unit
    for run in reversed(runs):
        unit = unit_memory(job, degrees, run.kind, run.rule)
        if run.rule.mode == "full":
            total = unit.kept * -(-run.count // together)
            again = unit.saved * min(together, run.count) - unit.kept
        else:
            total, again = unit.kept * run.count, maximum(unit.saved - unit.kept, 0)
        most = again + maximum(unit.transient, unit.begun + buckets.of(run.kind)) - freed
        backward = maximum(backward, most)
        if run is runs[-1]:  # its output's gradient is the one that arrived
            most = maximum(most - unit.stream, most - unit.kept if run.count > 1 else 0)
        given = maximum(given, most)
        kept = kept + total
        weight_pass = weight_pass + unit.weight_pass * run.count
        largest = maximum(largest, unit.kept)
        freed = freed + total
    if first:
        embedding = unit_memory(job, degrees, "embedding")
        kept = kept + embedding.kept
        if runs and runs[0].rule.mode == "none":
            kept = kept - unit_memory(job, degrees, "first", RecomputeRule(runs[0].kind, None, "none")).kept
    between = unit_memory(job, degrees, "boundary").kept
    if job.execution.pipeline_output_kept:
        kept = kept + between * ((not last) - place.shares)
    waits = waiting_for_embedding(job, degrees) if first and last else 0
    beside = buckets.of_vectors((run.kind, run.count) for run in runs) + waits
    backward, given = backward + beside, given + beside
    if first:  # what waits, the lookup's gradient and their sum exist at once; then the sum and its bucket
        looked_up = embedding.transient + maximum(buckets.of("embedding"), 2 * waits) - freed
        backward, given = maximum(backward, looked_up), maximum(given, looked_up)
    if by_unit(job, degrees):
        sharded = backward_by_unit(job, degrees, runs, kept, first=first, last=last, once=once)
        ways, _ = shards(degrees)
        backward = where(ways > 1, sharded[1], backward)
        if last:
            loss, head = where(ways > 1, sharded[0], loss), where(ways > 1, sharded[0], head)
    if not job.execution.split_backward_keeps_graph:
        return ChunkMemory(kept, weight_pass, loss, head, backward, largest, kept + backward - weight_pass, backward)
    if first:  # its input-gradient pass is empty, and leaves its output's gradient
        return ChunkMemory(kept, kept + (0 if last else between), loss, head, backward, largest, 0, given)
    if runs and not last:
        above = unit_memory(job, degrees, runs[-1].kind, runs[-1].rule).above
        weight_pass = weight_pass - above
    input_pass = unit_memory(job, degrees, "joining").kept + above
    ending = weight_pass_peak(_weight_pass_units(job, degrees, runs, last=last), weight_pass)
    return ChunkMemory(kept, weight_pass, loss, head, backward, largest, input_pass, ending)


def _weight_pass_units(job: Job, degrees: Any, runs: Iterable[Run], *, last: bool) -> list[split_backward.Unit]:
    """The units of a chunk in the order of its weight-gradient pass. Prediction modules make gradients of embedding and head too:
    a tied head's are apart until the pass ends, those of a head of its own are added as they come (two and their sum)."""
    buckets = Buckets(job, degrees)

    def unit(name: int | str, rule: RecomputeRule = PLAIN, count: int = 1) -> split_backward.Unit:
        memory, own = unit_memory(job, degrees, name, rule), split_backward.own_gradients(job, degrees, name)
        return split_backward.Unit(count, memory.weight_pass - memory.outlasts, own, memory.within, buckets.of(name))

    layers = [unit(run.kind, run.rule, run.count) for run in runs]
    if not last:
        return layers
    head = unit("head")
    if job.model.mtp:
        lookup, again = shared_gradient(job, degrees, "embedding"), shared_gradient(job, degrees, "head")
        module = unit("mtp", count=job.model.mtp)
        if job.model.tied:
            layers.append(replace(module, own=module.own + lookup + again))
        else:  # its head's part goes with the head
            layers.append(replace(module, frees=module.frees - head.frees, own=module.own + lookup))
            head = replace(head, frees=head.frees * (1 + module.count), within=3 * again)
    return [head, *layers] if job.model.tied else [*layers, head]


def offloaded(activations: Number, chunks: Iterable[ChunkMemory]) -> Number:
    """Device bytes of kept activations when they are offloaded: two layers' worth, the one that leaves or returns and the next."""
    largest: Number = 0
    for chunk in chunks:
        largest = maximum(largest, chunk.largest)
    return minimum(activations, 2 * largest)
