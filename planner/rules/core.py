"""What a rule is, and the case it looks at.

A rule is one sentence and one function that yields a ``Break`` for each way the case breaks it. ``reads`` names the layout fields
it looks at, so that the enumeration of the space (``planner.space``) can ask it as soon as those are chosen, and once per value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cost_models.job import Job
from profiles.errors import AxisplanError
from profiles.files import read_shipped


class Break(NamedTuple):
    """A broken rule: the field to blame, its value, what is wrong in words with numbers, and values worth trying instead.

    ``candidates`` None: the field's own range is tried.
    """

    field: str
    value: Any
    message: str
    candidates: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Limits:
    """What the target of an execution can express: one row of ``planner/data/limits.yaml``, narrowed by the execution's own facts."""

    target: str
    values: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def __hash__(self) -> int:
        return hash(self.target)


class Case:
    """A job and a layout, or the part of a layout that is chosen so far (any object with the layout's attributes)."""

    __slots__ = ("job", "layout", "limits")

    def __init__(self, job: Job, layout: Any, limits: Limits) -> None:
        self.job, self.layout, self.limits = job, layout, limits


Check = Callable[[Case], Iterator[Break]]
When = Callable[[Job, Limits], bool]


@dataclass(frozen=True)
class Rule:
    name: str
    group: str
    sentence: str
    reads: frozenset[str]
    check: Check
    when: When | None = None
    """Whether any layout of a job may break it; None: it always may."""

    def may_break(self, job: Job, limits: Limits) -> bool:
        return self.when is None or self.when(job, limits)

    def breaks(self, case: Case) -> list[Break]:
        return list(self.check(case)) if self.may_break(case.job, case.limits) else []


RULES: dict[str, Rule] = {}


def rule(group: str, reads: str, sentence: str, when: When | None = None) -> Callable[[Check], Check]:
    """Register the decorated function as the rule of its name. ``reads`` lists the layout fields it looks at; ``when`` says of which jobs
    a layout may break it."""

    def register(check: Check) -> Check:
        name = check.__name__
        if name in RULES:
            raise AxisplanError(f"rule {name} is defined twice")
        RULES[name] = Rule(name, group, sentence, frozenset(reads.split()), check, when)
        return check

    return register


@cache
def _table() -> dict[str, dict[str, Any]]:
    data: dict[str, dict[str, Any]] = read_shipped(Path(__file__).parents[1] / "data" / "limits.yaml")
    base = {"like": "", **data["any"]}
    for target, row in data.items():
        unknown = set(row) - set(base)
        if unknown:
            raise AxisplanError(f"limits.yaml: {target} names {sorted(unknown)}, which `any` does not")
    return {target: {**base, **data.get(row.get("like", ""), {}), **row} for target, row in data.items()}


def family(target: str) -> str:
    """The target whose execution it shares (``like`` in limits.yaml), else itself."""
    return _table()[target]["like"] or target


def limits_row(target: str) -> dict[str, Any]:
    """What limits.yaml says of a target, with what it leaves out."""
    return dict(_table()[target])


def targets() -> tuple[str, ...]:
    """Names of the targets that limits.yaml describes, ``any`` included."""
    return tuple(_table())


FACTS = (
    ("schedules", "schedules"), ("cp_kinds", "cp_kinds"), ("dispatchers", "dispatchers"), ("axes", "axes"),
)  # fmt: skip
OWN = ("schedules", "cp_kinds")
"""What a preset of an older generation states for itself: it may have had what its family has dropped since."""


def limits_of(job: Job) -> Limits:
    """The limits of the job's execution. A preset of an older generation (``megatron-2021``) has those of its family, but for the schedules,
    kinds of context parallelism and ZeRO stages that it states itself."""
    table = _table()
    name = job.execution.name
    target = name if name in table else next((t for t in table if name.startswith(t + "-")), "any")
    values = dict(table[target])
    execution: Any = job.execution
    for key, fact in FACTS:
        allowed = getattr(execution, fact, None)
        if allowed is not None:
            values[key] = [v for v in (table["any"] if key in OWN and name != target else values)[key] if v in allowed]
    stages = getattr(execution, "zero_stages", None)
    if stages is not None and name != target:
        values["zero"] = [z for z in values["zero"] if str(z) in stages]
    if execution.ep_overlap and job.model.moe is not None:
        values["recompute_modes"] = [m for m in values["recompute_modes"] if m not in values["ep_overlap_without"]]
        values["modules"] = [m for m in values["modules"] if m not in values["ep_overlap_without"]]
    for key in ("uneven_stages", "window_ring", "tied_pipeline"):
        if getattr(execution, key, True) is False:
            values[key] = False
    return Limits(target, values)


def listed(values: Iterable[Any]) -> str:
    return ", ".join(str(v) for v in values)
