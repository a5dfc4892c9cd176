"""Legality: every rule once, by name, with its sentence and its nearest legal value.

The rules stand in ``planner/rules`` (by subject), what a target can express in ``planner/data/limits.yaml``. ``violations`` gives
every broken rule of a layout at once; ``check`` adds whether it fits in memory. The nearest legal value of a violation is the
change of that one field, the others kept (data parallelism fills the world again when tp, cp or pp changes), that repairs the rule
and breaks none that held; the closest in ratio, the smaller on ties; None where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from cost_models.job import GIB, Job
from cost_models.layout import SCHEDULES, Layout, divisors, with_defaults
from planner.rules import batch, cluster, combinations, model, schedule, target  # noqa: F401 - registers the rules
from planner.rules.core import RULES, Break, Case, Limits, Rule, limits_of, targets
from planner.rules.model import padded_vocab, ulysses_degrees
from planner.rules.planning import PLANNING
from profiles.errors import InputError

__all__ = [
    "RULES", "Limits", "Rule", "Violation", "check", "evaluation_violations", "limits_of", "padded_vocab", "read_layout", "repaired",
    "require", "require_job", "targets", "ulysses_degrees", "unrunnable", "violations",
]  # fmt: skip

JOB_FIELDS = ("global_batch", "seq_len", "precision", "optimizer")


@dataclass(frozen=True)
class Violation:
    """A broken rule: its name, what is wrong in one sentence, the field and value to blame, the nearest legal value (or None)."""

    rule: str
    message: str
    field: str
    value: Any
    nearest: Any

    def line(self) -> str:
        """``field=value: message; nearest: ...``."""
        tail = "" if self.nearest is None else f"; nearest: {self.nearest}"
        return f"{self.field}={self.value}: {self.message}{tail}"


def violations(job: Job, layout: Layout) -> list[Violation]:
    """Every broken rule of ``layout`` for ``job``, in the rules' order; empty when it is legal."""
    case = Case(job, layout, limits_of(job))
    broken = [(r, b) for r in RULES.values() for b in r.breaks(case)]
    return [Violation(r.name, b.message, b.field, b.value, _nearest(case, r, b, broken)) for r, b in broken]


def evaluation_violations(job: Job, layout: Layout, eval_batch: int) -> list[Violation]:
    """The rules that evaluating with ``eval_batch`` sequences a step breaks: it runs through the same pipeline (cases.md B05)."""
    trained = {(v.rule, v.field) for v in violations(job, layout)}
    there = replace(job, global_batch=eval_batch)
    new = [v for v in violations(there, layout) if (v.rule, v.field) not in trained]
    return [
        replace(v, message=f"evaluation: {v.message}", field="eval_batch" if v.field == "global_batch" else v.field) for v in new
    ]


def unrunnable(job: Job) -> list[Violation]:
    """What the target's own runtime does not run of the job, whatever the layout (``planner.rules.planning``)."""
    case = Case(job, Layout(), limits_of(job))
    broken = [(r, b) for r in PLANNING.values() for b in r.breaks(case)]
    return [Violation(r.name, b.message, b.field, b.value, next(iter(b.candidates or ()), None)) for r, b in broken]


def require(job: Job, layout: Layout) -> None:
    """Raise InputError, all broken rules in one line, unless ``layout`` is legal."""
    _refuse(violations(job, layout))


def require_job(job: Job) -> None:
    """Raise InputError where a rule that no layout can mend is broken (precision, optimizer, positions), or the target's own runtime
    would not run the job (``planner.rules.planning``)."""
    _refuse(unrunnable(job))
    case = Case(job, Layout(), limits_of(job))
    if any(r.breaks(case) for r in RULES.values() if not r.reads):
        _refuse([v for v in violations(job, case.layout) if not RULES[v.rule].reads])


def _refuse(found: list[Violation]) -> None:
    if found:
        first = found[0]
        rest = "".join(f" | {v.line()}" for v in found[1:])
        raise InputError(first.field, first.value, first.message + rest, first.nearest)


def _nearest(case: Case, rule: Rule, broken: Break, found: list[tuple[Rule, Break]]) -> Any:
    """The repair of this break; where other rules blame the same field, one that repairs those too comes first."""
    names = {r.name for r, _ in found}
    same = [b for _, b in found if b.field == broken.field]
    blamed = {r.name for r, b in found if b.field == broken.field}
    both = [v for b in same for v in (b.candidates if b.candidates is not None else _range(case, b.field))]
    own = broken.candidates if broken.candidates is not None else _range(case, broken.field)
    best = _closest(case, rule, broken, both, names - blamed) if len(same) > 1 else None
    return best if best is not None else _closest(case, rule, broken, own, names)


def _closest(case: Case, rule: Rule, broken: Break, candidates: Iterable[Any], excused: set[str]) -> Any:
    """The closest candidate after which ``rule`` holds and no rule is broken but the ``excused`` ones."""
    best, best_key = None, (math.inf, math.inf)
    for order, value in enumerate(candidates):
        if value == broken.value:
            continue
        key = _distance(broken.value, value, order)
        if key >= best_key:
            continue
        changed = _with(case, broken.field, value)
        if changed is None or rule.breaks(changed):
            continue
        if any(r.name not in excused and r.breaks(changed) for r in RULES.values()):
            continue
        best, best_key = value, key
    return best


def _distance(old: Any, new: Any, order: int) -> tuple[float, float]:
    if isinstance(new, bool) or not isinstance(new, (int, float)) or not isinstance(old, (int, float)):
        return (float(order), 0.0)
    if new <= 0 or old <= 0:
        return (abs(new - old), new)
    return (abs(math.log(new / old)), new)


def _range(case: Case, field: str) -> Iterable[Any]:
    """Values of a field worth trying, whatever the rule."""
    world = case.job.cluster.gpus
    if field in ("tp", "cp", "pp", "ep", "etp", "dp", "dp_shard", "dp_replicate"):
        return divisors(world)
    if field == "vpp":
        return range(1, case.job.model.num_layers + 1)
    if field == "micro_batch":
        return divisors(case.job.global_batch)
    if field == "zero":
        return range(4)
    if field == "schedule":
        return SCHEDULES
    return ()


def repaired(job: Job, layout: Layout, field: str, value: Any) -> tuple[Job, Layout] | None:
    """Job and layout with one field changed to a violation's ``nearest``; data parallelism refills the world. None where it cannot."""
    changed = _with(Case(job, layout, limits_of(job)), field, value)
    return None if changed is None else (changed.job, changed.layout)


def _with(case: Case, field: str, value: Any) -> Case | None:
    """The case with one field changed; data parallelism refills the world. None where that cannot be."""
    job, layout = case.job, case.layout
    if field in JOB_FIELDS:
        return Case(replace(job, **{field: value}), layout, case.limits)
    world = job.cluster.gpus
    changes: dict[str, Any] = {field: value}
    if field in ("tp", "cp", "pp", "dp"):
        degrees = {a: getattr(layout, a) for a in ("tp", "cp", "pp")} | ({field: value} if field != "dp" else {})
        changes = {} if field == "dp" else changes
        fixed = math.prod(degrees.values())
        if world % fixed:
            return None
        dp = world // fixed
        if dp != layout.dp:
            changes |= _split_dp(layout, dp)
        if field == "pp" and layout.stages:
            changes["stages"] = ()
        if field == "cp" and layout.ring * layout.ulysses != value and layout.cp_kind not in ("ring", "ulysses", "allgather"):
            changes["cp_kind"] = "ring"
        if field == "tp":
            changes["sp"] = layout.sp and value > 1
    elif field in ("dp_shard", "dp_replicate"):
        if layout.dp % value:
            return None
        changes["dp_replicate" if field == "dp_shard" else "dp_shard"] = layout.dp // value
    elif field == "offload":
        changes["offload"] = ()
    return Case(job, layout.with_(**changes), case.limits)


def _split_dp(layout: Layout, dp: int) -> dict[str, int]:
    if layout.zero == 0 or (layout.dp_shard == 1 and layout.dp_replicate > 1):
        return {"dp_replicate": dp, "dp_shard": 1}
    replicate = math.gcd(layout.dp_replicate, dp)
    return {"dp_replicate": replicate, "dp_shard": dp // replicate}


def read_layout(job: Job, text: str) -> Layout:
    """Read a LAYOUT string for ``job``: what is left out is derived; product identities are left to the rules.

    ``etp`` left out is 1, or tp where the target's default is tp and the model has experts. Raises InputError for a key or value that
    cannot be read.
    """
    values = Layout.read(text)
    limits = limits_of(job)
    if "etp" not in values and limits.etp_default == "tp" and job.model.moe is not None:
        values["etp"] = values.get("tp", 1)
    fixed = values.get("tp", 1) * values.get("cp", 1) * values.get("pp", 1)
    dp = values.pop("dp", None)
    shard, replicate = values.get("dp_shard"), values.get("dp_replicate")
    if dp is None:
        dp = job.cluster.gpus // fixed if job.cluster.gpus % fixed == 0 else (shard or 1) * (replicate or 1)
    if "zero" not in values and limits.zero_always:
        values["zero"] = 3 if (shard or dp) > 1 or values.get("cp", 1) > 1 else 0
    if shard is None and replicate is None:
        values["dp_shard"], values["dp_replicate"] = (dp, 1) if values.get("zero", 1) else (1, dp)
    elif shard is None:
        values["dp_shard"] = max(1, dp // (replicate or 1))
    elif replicate is None:
        values["dp_replicate"] = max(1, dp // shard)
    if not limits.sequence_parallel:
        values.setdefault("sp", False)
    if "cp_kind" not in values and values.get("cp", 1) > 1 and "ring" not in limits.cp_kinds and limits.cp_kinds:
        values["cp_kind"] = limits.cp_kinds[0]
    return Layout(**with_defaults(values))


def check(job: Job, layout: Layout | str, eval_batch: int | None = None) -> dict[str, Any]:
    """The check document (DESIGN.md): legal, violations, fits, binding. ``fits`` and ``binding`` are None for an illegal layout.
    ``eval_batch``: sequences of an evaluation step, to be legal as well.

    ``binding`` names the fullest stage, its largest category, and by how many bytes the stage exceeds the limit (0 when it fits);
    ``would_fit``: single changes of the layout after which it fits, where it does not; ``warnings``, where it does.
    ``fits_if_balanced``: whether it would fit if every expert-parallel rank got as many tokens (where it does not as it is).
    """
    if isinstance(layout, str):
        layout = read_layout(job, layout)
    found = violations(job, layout)
    if eval_batch is not None:
        found += evaluation_violations(job, layout, eval_batch)
    document: dict[str, Any] = {"legal": not found, "violations": [asdict(v) for v in found], "fits": None, "binding": None}
    if not found:
        from cost_models.memory import fits

        inside, worst = fits(job, layout)
        over = worst.needed - job.limit_bytes
        document["fits"] = bool(inside)
        document["binding"] = {
            "stage": int(worst.stage), "category": binding_category(worst), "over_bytes": max(0, int(over)), "headroom_bytes": int(-over),
        }  # fmt: skip
        if not inside:
            from planner.remedies import layout_changes

            document["would_fit"] = layout_changes(job, layout)
        elif whole := built_whole(job):
            document["warnings"] = [whole]
        if not inside and job.model.moe is not None and (job.routing or job.moe_imbalance != 1):
            document["binding"]["fits_if_balanced"] = bool(fits(job.with_imbalance(1.0), layout)[0])
    return document


def built_whole(job: Job) -> str | None:
    """A warning where the launch script, not the framework, sees to it that a device builds only its part of a model that is too
    large for one (cases.md A35: out of memory before the first step)."""
    whole = job.execution.parameter_bytes * job.model.parameters.total
    if job.execution.builds_in_place or whole <= job.limit_bytes:
        return None
    return (
        f"the whole model takes {whole / GIB:.1f} GiB and a rank may use {job.limit_bytes / GIB:.1f}: build it in place (meta device,"
        " deepspeed.zero.Init), or initialisation runs out of memory"
    )


CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary", "communication")


def binding_category(stage: Any) -> str:
    """The largest memory category of a stage, or ``initialisation`` where building the model needs more than a step."""
    if stage.init_peak > stage.device:
        return "initialisation"
    return max(CATEGORIES, key=lambda c: getattr(stage, c))
