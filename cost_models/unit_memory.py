"""What a unit of the model keeps for backward, per microbatch, and the most that exists beyond it: a layer kind under a recompute rule,
or what stands at the model's ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from cost_models import split_backward
from cost_models.job import Job
from cost_models.layer_cost import Local
from cost_models.layers import first_layer
from cost_models.layout import Layout, RecomputeRule
from cost_models.measured import measured_saved
from cost_models.recompute import kept_bytes, kept_twice
from cost_models.units import Unit, microbatch_key, unit_cost
from profiles.operations import Number


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` equal layers in a row: their kind and their recompute rule."""

    kind: int
    rule: RecomputeRule
    count: int


class UnitMemory(NamedTuple):
    """A layer kind under a recompute rule, or an end of the model, per microbatch on one rank: bytes ``kept``, ``saved`` without
    recompute, held for the weight pass, and the most that exists beyond them (``begun``: from the first weight gradient on;
    ``waiting``: where weight gradients wait for each other); its input's gradient (``stream``). Of ``split_backward``: what of the
    saved lies ``above`` the last weight, the weight gradients ``within``, what ``outlasts`` the weight pass."""

    kept: Number
    saved: Number
    weight_pass: Number
    transient: Number
    begun: Number
    waiting: Number
    stream: Number
    above: Number = 0
    within: Number = 0
    outlasts: Number = 0


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
        return UnitMemory(size, size, 0, 0, 0, 0, 0)
    if unit == "joining":
        size = split_backward.joining_gradients(job, degrees)
        return UnitMemory(size, size, 0, 0, 0, 0, 0)
    if unit == "first":
        whole = unit_cost(job, degrees, rule.first)
        size = whole.saved_bytes - first_layer(job, whole).saved_bytes
        return UnitMemory(size, size, 0, 0, 0, 0, 0)
    cost = unit_cost(job, degrees, unit)
    kept = kept_bytes(cost, rule, degrees.tp, discards_outputs=job.execution.discards_outputs)
    kept, saved = measured_saved(job, degrees, unit, rule, kept, cost.saved_bytes)
    return UnitMemory(
        kept,
        saved,
        cost.retained_bytes + kept_twice(cost, rule) if job.execution.split_backward_keeps_graph else cost.weight_pass_bytes,
        cost.transient,
        cost.begun,
        cost.waiting,
        cost.input_bytes,
        split_backward.above_weights(cost),
        split_backward.within(job, cost),
        split_backward.outlasting(cost),
    )


@lru_cache(maxsize=32768)
def _remembered(job: Job, key: Layout, unit: Unit, rule: RecomputeRule) -> UnitMemory:
    return _unit(job, key, unit, rule)
