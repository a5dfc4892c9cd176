"""What a chunk of the model keeps for backward, per microbatch, and the most that exists beyond it while its backward runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from cost_models import split_backward
from cost_models.arrays import maximum, minimum, where
from cost_models.fully_sharded import Units, by_unit
from cost_models.gradient_buckets import Buckets
from cost_models.head_ops import vocab_rows
from cost_models.job import Job
from cost_models.layer_cost import Local
from cost_models.layers import first_layer
from cost_models.layout import Layout, RecomputeRule
from cost_models.measured import measured_saved
from cost_models.recompute import kept_bytes
from cost_models.split_backward import weight_pass_peak
from cost_models.state_bytes import shards
from cost_models.units import Unit, microbatch_key, unit_cost
from profiles.operations import Number


@dataclass(frozen=True, slots=True)
class ChunkMemory:
    """Bytes per microbatch on one rank. ``kept``: from forward to backward. ``weight_pass``: held from input-gradient to
    weight-gradient pass. ``loss`` and ``backward``: the most that exists beyond ``kept`` (of this microbatch) at the loss (None
    where the chunk has none) and in a whole backward. ``largest``: kept by its largest layer. ``input_pass`` and ``ending``: the
    most that exists beyond ``weight_pass`` in the input-gradient and in the weight-gradient pass."""

    kept: Number = 0
    weight_pass: Number = 0
    loss: Number | None = None
    backward: Number = 0
    largest: Number = 0
    input_pass: Number = 0
    ending: Number = 0


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` equal layers in a row: their kind and their recompute rule."""

    kind: int
    rule: RecomputeRule
    count: int


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


def chunk_memory(job: Job, layout: Layout, chunk: int) -> ChunkMemory:
    """The memory of ``chunk`` under ``layout``."""
    first, last = chunk == 0, chunk == layout.chunks - 1
    once = layout.microbatches(job.global_batch) == 1
    return assemble(job, layout, runs_of(job, layout, chunk), first=first, last=last, boundary=sends_on(layout, chunk), once=once)


def sends_on(layout: Layout, chunk: int) -> bool:
    """Whether a chunk's output goes to another rank: where a V turns it is the input that the next chunk keeps."""
    return chunk < layout.chunks - 1 and layout.rank_of_chunk(chunk + 1) != layout.rank_of_chunk(chunk)


def assemble(
    job: Job, degrees: Any, runs: Iterable[Run], *, first: bool, last: bool, boundary: bool, once: bool = False
) -> ChunkMemory:
    """A chunk of ``runs`` layers; ``first`` holds the embedding, ``last`` head and MTP modules, ``boundary`` sends its output on.
    ``once``: the step has a single microbatch.

    Backward goes from the last layer to the first: while a layer runs, what later layers (and the head) kept is free again, and
    the layer's own recomputed tensors and gradients exist beside what is kept.
    """
    runs = tuple(runs)
    kept: Number = 0
    weight_pass: Number = 0
    largest: Number = 0
    freed: Number = 0
    above: Number = 0
    loss: Number | None = None
    backward: Number = 0
    if last:
        for name in ("mtp",) * job.model.mtp + ("head",):
            tail = unit_memory(job, degrees, name)
            if name == "mtp" and runs:
                tail = _prediction_module(job, degrees, tail, runs[-1])
            kept = kept + tail.kept
            weight_pass = weight_pass + tail.weight_pass
            loss = tail.transient if loss is None else maximum(loss, tail.transient + shared_gradient(job, degrees, "head") - freed)
            freed = freed + tail.kept
            above = above + tail.above
    together = job.execution.recompute_unit
    for run in reversed(runs):
        unit = unit_memory(job, degrees, run.kind, run.rule)
        if run.rule.mode == "full":
            total = unit.kept * -(-run.count // together)
            again = unit.saved * min(together, run.count) - unit.kept
        else:
            total, again = unit.kept * run.count, maximum(unit.saved - unit.kept, 0)
        backward = maximum(backward, again + unit.transient - freed)
        kept = kept + total
        weight_pass = weight_pass + unit.weight_pass * run.count
        largest = maximum(largest, unit.kept)
        freed = freed + total
    if first:
        embedding = unit_memory(job, degrees, "embedding")
        kept = kept + embedding.kept
        if runs and runs[0].rule.mode == "none":
            kept = kept - unit_memory(job, degrees, "first", RecomputeRule(runs[0].kind, None, "none")).kept
    if boundary and job.execution.pipeline_output_kept:
        kept = kept + unit_memory(job, degrees, "boundary").kept
    buckets = Buckets(job, degrees, tuple((run.kind, run.count) for run in runs), first, last)
    waits = waiting_for_embedding(job, degrees) if first and last else 0
    backward = backward + buckets.of_layers + waits
    if first:  # what waits, the lookup's gradient and their sum exist at once
        backward = maximum(backward, buckets.of_embedding + embedding.transient + 2 * waits - freed)
    if last:
        loss = maximum(loss, buckets.of_head + head_gradients(job, degrees))
    if by_unit(job, degrees):
        sharded = _unit_by_unit(job, degrees, runs, kept, first=first, last=last, once=once)
        ways, _ = shards(degrees)
        backward = where(ways > 1, sharded[1], backward)
        loss = None if loss is None else where(ways > 1, sharded[0], loss)
    if not job.execution.split_backward_keeps_graph:
        return ChunkMemory(kept, weight_pass, loss, backward, largest, kept + backward - weight_pass, backward)
    if first:  # its input-gradient pass is empty, and leaves its output's gradient
        arrived = unit_memory(job, degrees, "boundary").kept if boundary else 0
        return ChunkMemory(kept, kept + arrived, loss, backward, largest, 0, backward)
    if runs and not last:
        above = unit_memory(job, degrees, runs[-1].kind, runs[-1].rule).above
        weight_pass = weight_pass - above
    input_pass = unit_memory(job, degrees, "joining").kept + above
    bucket = maximum(buckets.of_layers, buckets.of_head if last else 0)
    ending = weight_pass_peak(_weight_pass_units(job, degrees, runs, last=last), bucket)
    return ChunkMemory(kept, weight_pass, loss, backward, largest, input_pass, ending)


def head_gradients(job: Job, degrees: Any) -> Number:
    """Beyond what is kept, when the head's weight gradient is complete: it and its input's gradient; the logits are gone."""
    head = unit_memory(job, degrees, "head")
    return split_backward.own_gradients(job, degrees, "head") + head.stream - head.above


def _prediction_module(job: Job, degrees: Any, module: UnitMemory, last: Run) -> UnitMemory:
    """A multi-token-prediction module, whose layer follows the rule of the model's ``last``: at its own loss, or in its layer's
    backward once its head is done, whose weight gradient waits."""
    plain, layer = unit_memory(job, degrees, last.kind), unit_memory(job, degrees, last.kind, last.rule)
    head = unit_memory(job, degrees, "head")
    dropped = plain.kept - layer.kept
    inside = dropped + layer.transient + shared_gradient(job, degrees, "head") - head.kept
    transient = maximum(where(dropped > 0, head.transient, module.transient), inside)
    return replace(module, kept=module.kept - dropped, transient=transient)


def waiting_for_embedding(job: Job, degrees: Any) -> Number:
    """The gradient of the token embedding that waits for the lookup's, which comes last, where one backward goes through both ends:
    a tied head's, or that of a prediction module's lookup."""
    return shared_gradient(job, degrees, "embedding") if job.model.tied or job.model.mtp else 0


def shared_gradient(job: Job, degrees: Any, weight: str) -> Number:
    """What one use of ``head`` or ``embedding`` leaves until the last use's gradient is there: autograd adds up all uses of a weight
    before it gives the sum away (seen in the dry run of DeepSeek-V3)."""
    execution, local = job.execution, Local(job, degrees)
    if execution.dummy_weight_gradients or not job.trains("embedding" if job.model.tied else weight):
        return 0
    width = job.model.embedding_width or job.model.hidden
    return execution.weight_gradient_bytes * local.bytes / 2 * vocab_rows(local) * width


def _weight_pass_units(job: Job, degrees: Any, runs: Iterable[Run], *, last: bool) -> list[split_backward.Unit]:
    """The units of a chunk in the order of its weight-gradient pass. Prediction modules make gradients of embedding and head too:
    a tied head's are apart until the pass ends, those of a head of its own are added as they come (two and their sum)."""

    def unit(name: int | str, rule: RecomputeRule = PLAIN, count: int = 1) -> split_backward.Unit:
        memory = unit_memory(job, degrees, name, rule)
        return count, memory.weight_pass, split_backward.own_gradients(job, degrees, name), memory.within

    layers = [unit(run.kind, run.rule, run.count) for run in runs]
    if not last:
        return layers
    head = unit("head")
    if job.model.mtp:
        lookup, again = shared_gradient(job, degrees, "embedding"), shared_gradient(job, degrees, "head")
        count, held, own, within = unit("mtp", count=job.model.mtp)
        if job.model.tied:
            layers.append((count, held, own + lookup + again, within))
        else:  # its head's part goes with the head
            layers.append((count, held - head[1], own + lookup, within))
            head = (1, head[1] * (1 + count), head[2], 3 * again)
    return [head, *layers] if job.model.tied else [*layers, head]


def _unit_by_unit(
    job: Job, degrees: Any, runs: tuple[Run, ...], kept: Number, *, first: bool, last: bool, once: bool
) -> tuple[Number, Number]:
    """``ChunkMemory``'s (loss, backward) where ZeRO-3 gathers and reduces unit by unit, whole parameters and gradients included.

    The states hold all reduced gradients; in the backward of a step's only microbatch (``once``) those of layers still to come do
    not exist yet.
    """
    units = Units(job, degrees, first, last)
    freed: Number = 0
    missing: Number = 0
    loss: Number = 0
    behind: Number = 0
    if once:
        missing = units.reduced_ends + sum(units.reduced(run.kind) * run.count for run in runs)
    if last and runs:
        loss, freed, behind = _losses_by_unit(job, degrees, units, runs[-1])
        loss = loss - missing
    backward: Number = units.reducing_ends - kept
    if first and last:
        waits, lookup = waiting_for_embedding(job, degrees), unit_memory(job, degrees, "embedding").transient
        joined = units.throughout + where(waits > 0, lookup + waits, 0) - kept
        backward = maximum(backward, joined + (units.behind(runs[0].kind) if runs else 0))
    for place in range(len(runs) - 1, -1, -1):
        run = runs[place]
        unit = unit_memory(job, degrees, run.kind, run.rule)
        again = unit.saved - unit.kept if run.rule.mode == "full" else maximum(unit.saved - unit.kept, 0)
        beside = units.throughout + units.whole(run.kind)
        for number in range(min(run.count, 3)):  # the first, the one behind it, and the last, behind which another run lies
            done = number if number < 2 else run.count - 1
            following = run.kind if done < run.count - 1 else runs[place - 1].kind if place else None
            ahead = 0 if following is None else units.ahead(following)
            gone = freed + unit.kept * done
            absent = missing - units.reduced(run.kind) * done if once else 0
            waiting = units.waiting(run.kind, unit.waiting)
            backward = maximum(backward, again + waiting - gone + beside + ahead + behind - absent)
            behind = units.behind(run.kind)
        freed = freed + unit.kept * run.count
        missing = missing - units.reduced(run.kind) * run.count if once else 0
        backward = maximum(backward, units.reducing(run.kind) + unit.stream - freed - missing)
    return loss, backward


def _losses_by_unit(job: Job, degrees: Any, units: Units, layer: Run) -> tuple[Number, Number, Number]:
    """Of ``_unit_by_unit``: the most around the losses and in the backward of prediction modules (their layer follows the rule of
    the model's last ``layer``), what is free when the model's layers begin, and the reduction's input that still lives then."""
    head = unit_memory(job, degrees, "head")
    if not job.model.mtp:
        return units.at_loss(layer.kind, head.transient), head.kept, 0
    inner = unit_memory(job, degrees, layer.kind, layer.rule)
    again = maximum(inner.saved - inner.kept, 0)
    most = units.at_loss("mtp", head.transient)
    freed: Number = 0
    behind: Number = 0
    waits: Number = 0
    for more in reversed(range(job.model.mtp)):
        module = _prediction_module(job, degrees, unit_memory(job, degrees, "mtp"), layer)
        most = maximum(most, head.transient + units.gathered_ends + waits + behind - freed)
        inside = again + units.waiting(layer.kind, inner.waiting) + units.whole("mtp") + units.throughout
        ahead = units.ahead("mtp" if more else layer.kind)
        most = maximum(most, inside + ahead + behind - freed - head.kept)
        freed, behind, waits = freed + module.kept, units.behind("mtp"), units.waiting_ends
    return maximum(most, head.transient + units.throughout + ahead + behind - freed), freed + head.kept, behind


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """A layer kind under a recompute rule, or an end of the model, per microbatch on one rank: bytes ``kept``, ``saved`` without
    recompute, held for the weight pass, and the most that exists beyond them (``waiting``: where weight gradients wait for each
    other); its input's gradient (``stream``); of what is saved, that which lies ``above`` its last weight."""

    kept: Number
    saved: Number
    weight_pass: Number
    transient: Number
    waiting: Number
    stream: Number
    above: Number = 0
    within: Number = 0
    """``split_backward.within``."""


PLAIN = RecomputeRule(0, None, "none")


def unit_memory(job: Job, degrees: Any, unit: Unit, rule: RecomputeRule = PLAIN) -> UnitMemory:
    """The memory of a layer kind by its index, or of ``embedding``, ``head``, ``mtp``, of the ``boundary`` tensor between stages, or
    of the ``joining`` gradients of a layer's input.

    Remembered: by the fields of a ``Layout`` that matter to it, or by the arrays themselves (``memory_bulk.LayoutArrays``).
    """
    if isinstance(degrees, Layout):
        return _remembered(job, microbatch_key(degrees), unit, rule)
    found: UnitMemory = degrees.remember(("unit", unit, rule), lambda d: _unit(job, d, unit, rule))
    return found


def _unit(job: Job, degrees: Any, unit: Unit, rule: RecomputeRule) -> UnitMemory:
    if unit == "boundary":
        local = Local(job, degrees)
        size = local.split_tokens * job.model.hidden * local.bytes
        return UnitMemory(size, size, 0, 0, 0, 0)
    if unit == "joining":
        size = split_backward.joining_gradients(job, degrees)
        return UnitMemory(size, size, 0, 0, 0, 0)
    if unit == "first":
        whole = unit_cost(job, degrees, rule.first)
        size = whole.saved_bytes - first_layer(job, whole).saved_bytes
        return UnitMemory(size, size, 0, 0, 0, 0)
    cost = unit_cost(job, degrees, unit)
    kept = kept_bytes(cost, rule, degrees.tp, discards_outputs=job.execution.discards_outputs)
    kept, saved = measured_saved(job, degrees, unit, rule, kept, cost.saved_bytes)
    return UnitMemory(
        kept,
        saved,
        cost.retained_bytes if job.execution.split_backward_keeps_graph else cost.weight_pass_bytes,
        cost.transient,
        cost.waiting,
        cost.input_bytes,
        split_backward.above_weights(cost),
        split_backward.within(job, cost),
    )


@lru_cache(maxsize=32768)
def _remembered(job: Job, key: Layout, unit: Unit, rule: RecomputeRule) -> UnitMemory:
    return _unit(job, key, unit, rule)


def offloaded(activations: Number, chunks: Iterable[ChunkMemory]) -> Number:
    """Device bytes of kept activations when they are offloaded: two layers' worth, the one that leaves or returns and the next."""
    largest: Number = 0
    for chunk in chunks:
        largest = maximum(largest, chunk.largest)
    return minimum(activations, 2 * largest)
