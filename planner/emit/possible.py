"""Whether a target can run a job or a plan: asked before anything is planned, and again of what was."""

from __future__ import annotations

import importlib
from typing import Any

from cost_models.job import Job
from planner.emit.core import TARGETS, EmitSettings, program_of
from planner.legality import limits_of
from planner.plan import Plan
from profiles.errors import InputError

NO_FILES = "axisplan emit has no files for it: "


def target_of(job: Job) -> str | None:
    """The target of ``TARGETS`` that the job is for; None where its execution is no target (``fsdp``)."""
    target = limits_of(job).target
    return target if target in TARGETS else None


def own_target(plan: Plan) -> str | None:
    """The target that the plan was made for, as ``target_of``."""
    return target_of(plan.job())


def model_refusal(job: Job) -> str | None:
    """Why the job's own target would refuse every plan of it: it does not build the model. None where it does, or there is no target."""
    target = target_of(job)
    check: Any = getattr(importlib.import_module(TARGETS[target]), "require_model", None) if target else None
    if check is None:
        return None
    try:
        check(job)
    except InputError as error:
        return str(error.rule)
    return None


def refusal(plan: Plan) -> str | None:
    """Why ``axisplan emit`` would refuse the plan for its own target (a model that the target does not build); None where it would not,
    or the execution is no target."""
    target = own_target(plan)
    if target is None:
        return None
    try:
        program_of(plan, target, EmitSettings())
    except InputError as error:
        return str(error.rule)
    return None


def with_refusal(plan: Plan) -> Plan:
    """The plan, warned where its own target could not be given the files to run it."""
    why = refusal(plan)
    return plan if why is None else plan.model_copy(update={"warnings": [*plan.warnings, f"{NO_FILES}{why}"]})
