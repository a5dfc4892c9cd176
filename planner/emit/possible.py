"""Whether a plan can be emitted for the target it was planned for: asked before anything is launched."""

from __future__ import annotations

import importlib
from typing import Any

from planner.emit.core import TARGETS, EmitSettings
from planner.legality import limits_of
from planner.plan import Plan
from profiles.errors import InputError

NO_FILES = "axisplan emit has no files for it: "


def own_target(plan: Plan) -> str | None:
    """The target of ``TARGETS`` that the plan was made for; None where its execution is no target (``fsdp``)."""
    target = limits_of(plan.job()).target
    return target if target in TARGETS else None


def refusal(plan: Plan) -> str | None:
    """Why ``axisplan emit`` would refuse the plan for its own target (a model that the target does not build); None where it would not,
    or the execution is no target."""
    target = own_target(plan)
    if target is None:
        return None
    module: Any = importlib.import_module(TARGETS[target])
    try:
        module.program(plan, EmitSettings())
    except InputError as error:
        return str(error.rule)
    return None


def with_refusal(plan: Plan) -> Plan:
    """The plan, warned where its own target could not be given the files to run it."""
    why = refusal(plan)
    return plan if why is None else plan.model_copy(update={"warnings": [*plan.warnings, f"{NO_FILES}{why}"]})
