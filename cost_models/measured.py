"""Layers measured on the machine (``axisplan profile layer``), in place of the analytic price of what they cover.

What they do not cover of a layer kind is priced by the formula times the mean (geometric) of measured over analytic of those that were
measured: a planner that compared measured layers with formulas alone would choose by which of the two is kinder.

A row covers a layer kind where a rank's share of it is what was measured: the same micro batch, sequence length and TP degree, no
context parallelism, experts not spread. Forward and backward then take the measured seconds, host work included; of backward,
input and weight gradients get the shares of their analytic prices; recomputing runs at the measured pace of forward; collectives
are priced as ever. Rows are measured without sequence parallelism: under SP the norms and residual sums of a layer, which SP
divides by tp, are priced as measured, whole, and kept bytes stay the formula's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from cost_models.arrays import where
from cost_models.job import Job, MeasuredLayer
from cost_models.layout import Layout, RecomputeRule
from profiles.model import Moe
from profiles.operations import Number


@lru_cache(maxsize=64)
def _rows(job: Job) -> tuple[MeasuredLayer, ...]:
    return tuple(row for row in job.measured if row.seq_len == job.seq_len)


def rows_of(job: Job, unit: int | str) -> tuple[MeasuredLayer, ...]:
    """The job's rows of a layer kind, by its index; none for the ends of the model."""
    return tuple(row for row in _rows(job) if row.kind == unit) if job.measured else ()


def covers(job: Job, degrees: Any, row: MeasuredLayer) -> Any:
    """Where ``degrees`` (numbers or arrays) give a rank what ``row`` was measured with."""
    same = (degrees.tp == row.tp) & (degrees.micro_batch == row.micro_batch) & (degrees.ring * degrees.ulysses == 1)
    if isinstance(job.model.kinds[row.kind].ffn, Moe):
        same = same & (degrees.ep * degrees.etp == 1)
    return same


def measured_pace(
    job: Job, degrees: Any, unit: int | str, forward: Number, backward: Number, mean: tuple[float, float]
) -> tuple[Number, Number]:
    """(forward, backward): measured over analytic compute seconds (``forward``, ``backward``); ``mean`` where nothing was measured."""
    ahead: Number = mean[0]
    back: Number = mean[1]
    for row in rows_of(job, unit):
        same = covers(job, degrees, row)
        ahead = where(same, row.forward / forward, ahead)
        back = where(same, row.backward / backward, back)
    return ahead, back


def alone(row: MeasuredLayer) -> Layout:
    """The layout in which a rank's layer is what was measured; collectives apart."""
    return Layout(tp=row.tp, micro_batch=row.micro_batch, sp=False)


def measured_saved(
    job: Job, degrees: Any, unit: int | str, rule: RecomputeRule, kept: Number, saved: Number
) -> tuple[Number, Number]:
    """(kept under ``rule``, saved without recompute) bytes with the measured figure in place of the formula's ``saved``; a
    selective rule frees the formula's bytes of it, ``full`` keeps the layer's input alone."""
    for row in rows_of(job, unit):
        same = covers(job, degrees, row) & ((degrees.tp == 1) | np.logical_not(degrees.sp))
        if rule.mode != "full":
            kept = where(same, np.maximum(kept + row.saved_bytes - saved, 0.0), kept)
        saved = where(same, row.saved_bytes, saved)
    return kept, saved
