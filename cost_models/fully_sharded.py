"""Whole parameters and gradients beside a backward under ZeRO-3 that gathers and reduces one unit at a time, as PyTorch's FSDP2 does
(``Execution.reduces_by_unit``).

A unit is a layer's dense weights, a layer's experts, or the ends (embedding, final norm, head) of a chunk. In backward a unit is
gathered, the unit behind it is gathered ahead of time, and its gradients wait until all exist; then they are reduced at once, and
the reduction's input lives until the next unit's turn. The ends stay gathered throughout, and the head's gradient waits with them.
Source: torch.distributed.fsdp._fully_shard (2.13), traced by the dry run (docs/dry-run.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from cost_models.arrays import maximum, where
from cost_models.job import Job
from cost_models.layout import SPLIT_BACKWARD, Layout
from cost_models.model_end import prediction_module, waiting_for_embedding
from cost_models.stage_states import unit_holding
from cost_models.state_bytes import shards
from cost_models.states import Holding
from cost_models.unit_memory import Run, unit_memory
from profiles.operations import Number


def keeps_gathered(job: Job, degrees: Any) -> Any:
    """Whether a pipeline rank holds all its parameters gathered for the whole step."""
    execution = job.execution
    if execution.reduces_by_unit:
        return degrees.schedule in SPLIT_BACKWARD
    return (degrees.pp > 1) & (not execution.reshard_with_pipeline)


def by_unit(job: Job, degrees: Any) -> bool:
    """Whether ``Units`` describes the layout's ZeRO stage (where it shards over more than one rank)."""
    return degrees.zero == 3 and job.execution.reduces_by_unit and not keeps_gathered(job, degrees)


class LayerBytes(NamedTuple):
    """Bytes of a layer on one rank: ``Units.whole``, ``ahead``, ``behind``; of ``waiting`` what comes to the layer's own; of ``reducing``
    what comes to the ends."""

    whole: Number
    ahead: Number
    behind: Number
    waiting: Number
    reducing: Number


@dataclass(frozen=True)
class Units:
    """Bytes of a chunk's units on one rank. ``first`` and ``last``: the chunk holds the embedding, the head."""

    job: Job
    degrees: Any
    first: bool
    last: bool

    @property
    def own(self) -> float:
        """Bytes an element of the gradient that autograd makes."""
        return self.job.execution.weight_gradient_bytes * (2 if self.job.precision == "fp32" else 1)

    def holding(self, unit: int | str) -> Holding:
        return unit_holding(self.job, self.degrees, unit)[0]

    def trained(self, unit: int | str) -> Holding:
        return unit_holding(self.job, self.degrees, unit)[1]

    @property
    def _head(self) -> str:
        return "tied head" if self.job.model.tied and self.first else "head"

    def _ends(self, of: Callable[[str], Holding]) -> Number:
        embedding = of("embedding").all if self.first else of("tokens").all if self.last and self._looks_up else 0
        return embedding + (of(self._head).all if self.last else 0)

    @property
    def _looks_up(self) -> bool:
        """Whether prediction modules have an embedding that is not the head."""
        return self.job.model.mtp > 0 and not self.job.model.tied

    @property
    def ends(self) -> Number:
        """Elements of the ends' unit."""
        return self._ends(self.holding)

    @property
    def trained_ends(self) -> Number:
        """Those of them that have a gradient."""
        return self._ends(self.trained)

    @cached_property
    def throughout(self) -> Number:
        """Bytes beside every layer's backward."""
        return self.gathered_ends + self.waiting_ends

    @property
    def gathered_ends(self) -> Number:
        """Bytes of the gathered ends."""
        return self.job.gathered_element * self.ends

    @property
    def waiting_ends(self) -> Number:
        """Gradients that wait for the ends' reduction: the head's, and those of prediction modules' lookups."""
        lookups = self.trained("tokens").all if self.last and self._looks_up else 0
        return self.waiting_head + self.own * lookups

    @property
    def waiting_head(self) -> Number:
        return self.own * self.trained("head").all if self.last else 0

    def whole(self, unit: int | str) -> Number:
        """A layer's own gathered parameters."""
        return self.job.gathered_element * self.holding(unit).all

    def ahead(self, unit: int | str) -> Number:
        """What is gathered ahead of time of the layer whose backward comes next: its dense unit."""
        return self.job.gathered_element * self.holding(unit).dense

    def behind(self, unit: int | str) -> Number:
        """The input of the last reduction of the layer whose backward came before."""
        return self.job.reduced_element * self.trained(unit).dense

    def waiting(self, unit: int | str, most: Number) -> Number:
        """A layer's own fullest moment (``LayerCost.waiting``) where padding makes its experts' reduction larger than counted there."""
        held, trained = unit_holding(self.job, self.degrees, unit, bare=True)
        padding, reduced = self.holding(unit).expert - held.expert, self.trained(unit).expert - trained.expert
        return most + self.job.reduced_element * reduced - self.job.gathered_element * padding

    def reduced(self, unit: int | str) -> Number:
        """A layer's gradients once reduced: this rank's shards."""
        return self._shards(self.trained(unit))

    def _shards(self, holding: Holding) -> Number:
        dense, expert = shards(self.degrees)
        return self.job.reduced_element * (holding.dense / dense + holding.expert / expert)

    @property
    def reduced_ends(self) -> Number:
        dense, _ = shards(self.degrees)
        return self.job.reduced_element * self.trained_ends / dense

    @cached_property
    def reducing_ends(self) -> Number:
        """The ends' reduction: their gradients and its input, the parameters being let go."""
        return (self.own + self.job.reduced_element) * self.trained_ends

    def reducing(self, unit: int | str) -> Number:
        """The same of a layer's dense unit, while the ends are still gathered."""
        return self.throughout + (self.own + self.job.reduced_element) * self.trained(unit).dense

    @cached_property
    def _layers(self) -> dict[int, LayerBytes]:
        return {}

    def layer(self, kind: int) -> LayerBytes:
        """A layer of this kind."""
        if kind not in self._layers:
            self._layers[kind] = LayerBytes(
                self.whole(kind), self.ahead(kind), self.behind(kind), self.waiting(kind, 0), self.reducing(kind) - self.throughout
            )
        return self._layers[kind]

    def at_loss(self, unit: int | str, transient: Number) -> Number:
        """The fullest moment around the loss beyond what is kept: ``transient`` beside the ends and the last gather's buffer (of
        layer ``unit``); or the ends gathered again, in the buffer and in place, as the backward begins."""
        held = self.holding(unit)
        last_gather = self.job.gathered_element * maximum(held.dense, held.expert)
        return self.gathered_ends + maximum(transient + last_gather, self.gathered_ends)


@lru_cache(maxsize=4096)
def _known(job: Job, layout: Layout, first: bool, last: bool) -> Units:
    return Units(job, layout, first, last)


def backward_by_unit(
    job: Job, degrees: Any, runs: tuple[Run, ...], kept: Number, *, first: bool, last: bool, once: bool
) -> tuple[Number, Number]:
    """``ChunkMemory``'s (loss, backward) where ZeRO-3 gathers and reduces unit by unit, whole parameters and gradients included.

    The states hold all reduced gradients; in the backward of a step's only microbatch (``once``) those of layers still to come do
    not exist yet.
    """
    units = _known(job, degrees, first, last) if isinstance(degrees, Layout) else Units(job, degrees, first, last)
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
        unit, layer = unit_memory(job, degrees, run.kind, run.rule), units.layer(run.kind)
        again = unit.saved - unit.kept if run.rule.mode == "full" else maximum(unit.saved - unit.kept, 0)
        beside = again + unit.waiting + layer.waiting + units.throughout + layer.whole
        for number in range(min(run.count, 3)):  # the first, the one behind it, and the last, behind which another run lies
            done = number if number < 2 else run.count - 1
            following = run.kind if done < run.count - 1 else runs[place - 1].kind if place else None
            ahead = 0 if following is None else units.layer(following).ahead
            gone = freed + unit.kept * done
            absent = missing - units.reduced(run.kind) * done if once else 0
            backward = maximum(backward, beside - gone + ahead + behind - absent)
            behind = layer.behind
        freed = freed + unit.kept * run.count
        missing = missing - units.reduced(run.kind) * run.count if once else 0
        backward = maximum(backward, units.throughout + layer.reducing + unit.stream - freed - missing)
    return loss, backward


def _losses_by_unit(job: Job, degrees: Any, units: Units, layer: Run) -> tuple[Number, Number, Number]:
    """Of ``_unit_by_unit``: the most around the losses and in the backward of prediction modules (their layer follows the rule of
    the model's last ``layer``), what is free when the model's layers begin, and the reduction's input that still lives then."""
    head = unit_memory(job, degrees, "head")
    if not job.model.mtp:
        return units.at_loss(layer.kind, head.transient), head.kept, 0
    inner, (kept, _) = unit_memory(job, degrees, layer.kind, layer.rule), prediction_module(job, degrees, layer)
    again = maximum(inner.saved - inner.kept, 0)
    most = units.at_loss("mtp", head.transient)
    freed: Number = 0
    behind: Number = 0
    waits: Number = 0
    for more in reversed(range(job.model.mtp)):
        most = maximum(most, head.transient + units.gathered_ends + waits + behind - freed)
        inside = again + units.waiting(layer.kind, inner.waiting) + units.whole("mtp") + units.gathered_ends
        ahead = units.ahead("mtp" if more else layer.kind)
        most = maximum(most, inside + maximum(waits, units.waiting_head) + ahead + behind - freed - head.kept)
        freed, behind, waits = freed + kept, units.behind("mtp"), units.waiting_ends
    return maximum(most, head.transient + units.throughout + ahead + behind - freed), freed + head.kept, behind
