"""Why this plan: what binds and the documents' remedy, what each runner-up loses, why not another layout, every term with its numbers.

``explain`` is a document (``--json`` prints it); ``planner.screen`` shows it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cost_models.checkpoints import checkpoint_bytes
from cost_models.execution import load_execution
from cost_models.formulas import memory_formulas
from cost_models.job import GIB, Job
from cost_models.layout import Layout
from cost_models.state_bytes import table
from cost_models.states import embedding_weights
from cost_models.step import StepEstimate, estimate
from cost_models.uncertainty import chance_faster, flipping_cause
from planner.legality import binding_category, read_layout, violations
from planner.plan import Plan
from planner.remedies import REMEDIES
from planner.screen import seconds
from profiles.hardware import describe

NEAR_LIMIT = 0.85
"""Memory binds where the fullest stage uses more than this share of the limit."""


def explain(plan: Plan, why: str | None = None) -> dict[str, Any]:
    """Everything that stands behind ``plan``; with ``why``, a LAYOUT string, also why that layout is not the one proposed.

    Raises InputError for a ``why`` that cannot be read.
    """
    job, layout = plan.job(), plan.layout_object
    chosen = estimate(job, layout)
    document: dict[str, Any] = {
        "layout": plan.layout_text,
        "stages": [s.model_dump() for s in plan.stages],
        "step_seconds": chosen.step_seconds,
        "seconds": chosen.seconds,
        "binding": binding(job, chosen),
        "runners_up": [r.model_dump(include={"layout_text", "slower", "loses", "chance_faster", "flips"}) for r in plan.runners_up],
        "certificate": plan.certificate.model_dump(),
        "memory_formulas": [asdict(f) for f in memory_formulas(job, layout, binding_stage(chosen))],
        "checkpoint": asdict(checkpoint_bytes(job, layout)) if job.execution.name == "axisplan" else None,
        "execution": [*execution_facts(job), vocabulary(job, layout)],
        "constants": [dict(zip(("field", "value", "unit", "origin", "source"), row, strict=True)) for row in describe(job.cluster)],
        "guessed": list(chosen.guessed),
    }
    if why is not None:
        document["why_not"] = why_not(job, chosen, read_layout(job, why))
    return document


def binding_stage(chosen: StepEstimate) -> int:
    """The pipeline rank that holds most."""
    return max(range(len(chosen.memory)), key=lambda i: chosen.memory[i].device)


def binding(job: Job, chosen: StepEstimate) -> dict[str, Any]:
    """What binds: memory where the fullest stage is near the limit, else the largest cause of time; and the remedy for it."""
    worst = chosen.memory[binding_stage(chosen)]
    share = worst.device / job.limit_bytes
    category = binding_category(worst)
    causes = sorted(chosen.seconds.items(), key=lambda item: -item[1])
    out: dict[str, Any] = {
        "stage": int(worst.stage),
        "category": category,
        "share_of_limit": float(share),
        "headroom_bytes": float(job.limit_bytes - worst.device),
        "largest_causes": [{"cause": c, "seconds": s, "share": s / chosen.step_seconds} for c, s in causes[:3]],
    }
    if share >= NEAR_LIMIT:
        out["says"] = f"memory binds: stage {worst.stage} fills {100 * share:.0f} % of the limit, most of it {category}"
        out["remedy"] = REMEDIES[remedy_key(job, category)]
    else:
        cause, spent = causes[0]
        free = (job.limit_bytes - worst.device) / GIB
        out["says"] = (
            f"time binds, not memory ({free:.1f} GiB free on the fullest stage): {cause.replace('_', ' ')} takes "
            f"{100 * spent / chosen.step_seconds:.0f} % of the step"
        )
        out["remedy"] = time_remedy(cause)
    return out


def remedy_key(job: Job, category: str) -> str:
    """Expert weights have a remedy of their own where they are most of the parameters."""
    parameters = job.model.parameters
    most = parameters.routed_experts > 0.5 * parameters.total
    return "experts" if category == "parameters" and most else category


def time_remedy(cause: str) -> str:
    """What would shorten a step that spends most on ``cause``."""
    if cause.startswith("communication"):
        axis = cause.partition(".")[2]
        return f"a smaller degree on the {axis} axis, faster links for its groups, or more overlap (--set execution...)"
    return {
        "bubble": "more microbatches (a smaller micro batch or a larger global batch), fewer stages, or an interleaved or zero-bubble schedule",
        "recompute": "more memory a rank (more GPUs, optimizer offload), so that less is recomputed",
        "optimizer": "shard the optimizer over more ranks (ZeRO-1), or a fused optimizer",
        "host": "larger micro batches or CUDA graphs: the GPU waits for the host",
    }.get(cause, "useful work: a lower precision, faster GPUs, or more of them")


def why_not(job: Job, chosen: StepEstimate, other: Layout) -> dict[str, Any]:
    """Why ``other`` is not proposed: the rules it breaks, that it does not fit, or by how much and on what it is slower."""
    broken = violations(job, other)
    out: dict[str, Any] = {"layout": other.text(), "violations": [asdict(v) for v in broken]}
    if broken:
        out["says"] = f"it is not legal: {broken[0].line()}"
        return out
    found = estimate(job, other)
    worst = found.memory[binding_stage(found)]
    if not found.fits:
        over = worst.needed - job.limit_bytes
        category = binding_category(worst)
        out["says"] = f"it does not fit: stage {worst.stage} needs {over / GIB:.1f} GiB more than there is, most of it {category}"
        out["remedy"] = REMEDIES[remedy_key(job, category)]
        return out
    loses = {c: found.seconds.get(c, 0.0) - chosen.seconds.get(c, 0.0) for c in {*chosen.seconds, *found.seconds}}
    out |= {
        "step_seconds": found.step_seconds,
        "slower": found.step_seconds / chosen.step_seconds - 1,
        "loses": dict(sorted(loses.items(), key=lambda item: -item[1])),
        "chance_faster": chance_faster(job, chosen.seconds, found.seconds),
        "flips": flipping_cause(job, chosen.seconds, found.seconds),
    }
    most = max(loses, key=lambda c: loses[c])
    word = "slower" if found.step_seconds >= chosen.step_seconds else "faster"
    out["says"] = (
        f"it is {100 * abs(out['slower']):.1f} % {word}: {most.replace('_', ' ')} takes {seconds(loses[most])} more; "
        f"the chance that it is really faster is {100 * out['chance_faster']:.0f} %"
    )
    return out


def execution_facts(job: Job) -> list[dict[str, Any]]:
    """The execution's facts that have a source, with it."""
    execution = job.execution
    return [{"fact": k, "value": str(getattr(execution, k)), "source": s} for k, s in sorted(dict(execution.sources).items())]


def vocabulary(job: Job, layout: Layout) -> dict[str, Any]:
    """How the vocabulary's rows are padded and split under ``layout``."""
    model, execution = job.model, job.execution
    (rows,) = (w.local(layout, execution) // w.columns for w in embedding_weights(model) if w.name == "embedding")
    padded = rows * layout.tp if execution.vocab_parallel else rows
    text = f"{model.vocab} rows, {padded} with padding, {rows} a rank"
    return {"fact": "vocabulary", "value": text, "source": f"padded to a multiple of {execution.vocab_multiple} x tp"}


PRECISIONS = ("fp32", "fp16", "bf16", "fp8")
OPTIMIZERS = ("adamw", "adamw8bit", "muon", "sgd")


def bytes_table(execution: str, ranks: int) -> list[dict[str, Any]]:
    """Device bytes of state a parameter under ``execution``, by precision, optimizer and ZeRO stage, what is sharded over ``ranks``."""
    chosen = load_execution(execution)
    precisions = tuple(p for p in PRECISIONS if not chosen.precisions or p in chosen.precisions)
    return [asdict(row) for row in table(chosen, precisions, OPTIMIZERS, ranks)]
