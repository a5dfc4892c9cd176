"""The figures of a plan as a file must hold them: a plan that was edited by hand is refused by name, never met halfway through a report."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from profiles.errors import InputError

Positive = Annotated[float, Field(gt=0)]
Amount = Annotated[float, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)


class StageFigures(_Record):
    """Bytes of one stage (``cost_models.step.memory_json``)."""

    stage: Annotated[int, Field(ge=0)]
    parameters: Amount
    gradients: Amount
    optimizer: Amount
    activations: Amount
    temporary: Amount
    communication: Amount
    peak_allocated: Amount
    peak_reserved: Amount
    device: Amount


class Figures(_Record):
    """An estimate (``cost_models.step.StepEstimate.to_json``): seconds, bytes, shares."""

    step_seconds: Positive
    step_seconds_low: Positive
    step_seconds_high: Positive
    tokens_per_second_per_gpu: Amount
    mfu: float
    hfu: float
    bubble_fraction: float
    seconds: dict[str, float]
    memory: Annotated[list[StageFigures], Field(min_length=1)]
    limit_bytes: Positive
    bytes_sent: dict[str, dict[str, Amount]]
    guessed: list[str]
    busiest_stage: Annotated[int, Field(ge=0)]
    stage_seconds: list[Amount]


SUM_TOLERANCE = 0.02
"""How far the seconds by cause may be from the step they sum to, as a share of it."""
MOST_LIMITS = 1e4
"""More memory than this many times the limit is no estimate."""


def check_figures(estimate: Any, field: str, where: str) -> None:
    """Raise InputError naming the figure of ``field`` that is missing, no number, or contradicts the others."""
    try:
        found = Figures.model_validate(estimate)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(p) for p in (field, *first["loc"]))
        raise InputError(place, where, f"{first['msg']}: it was altered after planning; plan again") from None
    causes = sum(abs(s) for s in found.seconds.values())
    if abs(causes - found.step_seconds) > SUM_TOLERANCE * found.step_seconds:
        raise InputError(f"{field}.seconds", where, "do not sum to the step: it was altered after planning; plan again")
    if any(stage.device > MOST_LIMITS * found.limit_bytes or stage.peak_reserved > stage.device for stage in found.memory):
        raise InputError(f"{field}.memory", where, "contradicts itself or the limit: it was altered after planning; plan again")
