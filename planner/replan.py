"""A new plan after the number of GPUs has changed: the best one that can load the checkpoint, and what changes.

What a target's checkpoint asks of the layout that loads it is data (``planner/data/checkpoints.yaml``). The global batch is kept where
some layout of the new GPUs divides it; else the nearest batch that does is taken and the plan warns of it, unless it is to be kept.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from cost_models.job import Job
from cost_models.layout import Layout
from planner.legality import limits_of, padded_vocab
from planner.plan import Plan
from planner.solve import PlanRequest, solve
from profiles.errors import DoesNotFit, InputError
from profiles.files import read_shipped

MOST_BATCHES_TRIED = 4
WORTH_SAYING = 1.05
"""Another batch is mentioned where the kept one trains this much more slowly for each GPU than before."""


@dataclass(frozen=True)
class Change:
    """One field of the layout, the batch or the prediction that differs."""

    field: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Replan:
    """The new plan; what changes; what to know about the checkpoint and the batch."""

    plan: Plan
    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"plan": self.plan.to_json(), "changes": [asdict(c) for c in self.changes], "notes": list(self.notes)}


@cache
def checkpoint_rules() -> dict[str, dict[str, Any]]:
    """By target: ``keep``, the layout fields a checkpoint fixes, and ``says``, why."""
    data: dict[str, dict[str, Any]] = read_shipped(Path(__file__).parent / "data" / "checkpoints.yaml")
    return data


def kept_fields(job: Job, layout: Layout) -> dict[str, Any]:
    """The fields of ``layout`` that a checkpoint of the job's target can only be loaded under."""
    row = checkpoint_rules()[limits_of(job).target]
    return {name: getattr(layout, name) for name in row["keep"]}


def replan(
    plan: Plan,
    gpus: int,
    *,
    global_batch: int | None = None,
    keep_batch: bool = False,
    pins: str = "",
    top: int = 3,
    prove: bool = False,
) -> Replan:
    """The best plan on ``gpus`` GPUs of the same cluster that loads the checkpoints of ``plan``.

    ``global_batch``: sequences, instead of the old ones; ``keep_batch``: no others. Raises InputError where no legal layout remains (the
    fields that the checkpoint fixes are named), DoesNotFit where none fits.
    """
    if keep_batch and global_batch:
        raise InputError("--keep-batch", True, "and --global-batch exclude each other", None)
    job, layout = plan.job(), plan.layout_object
    there = replace(job, cluster=job.cluster.with_gpus(gpus))
    kept = kept_fields(job, layout)
    wishes = ",".join(x for x in (pins, *(f"{k}={v}" for k, v in kept.items())) if x)
    notes = [checkpoint_rules()[limits_of(job).target]["says"]]
    near = nearest_batches(job, layout, gpus)
    batches = [global_batch or job.global_batch, *([] if global_batch or keep_batch else near)]
    found = _first(PlanRequest(there, pins=wishes, top=top, prove=prove, offload=bool(layout.offload)), batches)
    chosen = found.job_settings.global_batch
    if chosen != job.global_batch and not global_batch:
        found = found.model_copy(update={"warnings": [_another_batch(job.global_batch, chosen, gpus, near), *found.warnings]})
    elif chosen == job.global_batch:
        slower = plan.estimate["tokens_per_second_per_gpu"] / found.estimate["tokens_per_second_per_gpu"]
        others = [b for b in near if b != chosen]
        if slower > WORTH_SAYING and others and chosen % _data_parallel(layout, gpus) and not global_batch:
            notes.append(
                f"the kept batch of {chosen} divides badly over {gpus} GPUs (each trains {1 - 1 / slower:.0%} slower than before);"
                f" try --global-batch {others[0]}"
            )
    notes += padding_notes(job, layout, found.layout_object)
    return Replan(found, tuple(changes(plan, found)), tuple(notes))


def _another_batch(old: int, new: int, gpus: int, near: list[int]) -> str:
    """What a batch that had to change means for the training, and the choices there are."""
    others = ", ".join(str(b) for b in near if b != new)
    return (
        f"the global batch changes from {old} to {new} sequences ({new / old - 1:+.1%} tokens a step), because no layout of {gpus} GPUs that"
        f" loads the checkpoint divides {old}: learning rate and schedule were for the old one; --global-batch takes another ({others}),"
        " --keep-batch refuses to change it"
    )


def _first(request: PlanRequest, batches: list[int]) -> Plan:
    """The plan of the first batch for which there is one."""
    refused: Exception | None = None
    for batch in batches[: 1 + MOST_BATCHES_TRIED]:
        try:
            return solve(replace(request, job=replace(request.job, global_batch=batch)))
        except InputError as error:
            refused = refused or error
        except DoesNotFit as error:
            refused = error
    assert refused is not None
    raise refused


def _data_parallel(layout: Layout, gpus: int) -> int:
    """What the old tp, cp and pp leave on ``gpus`` GPUs for data parallelism, or its largest factor where they do not divide the GPUs."""
    model_ranks = layout.tp * layout.cp * layout.pp
    return gpus // model_ranks if gpus % model_ranks == 0 else gpus // math.gcd(gpus, model_ranks)


def nearest_batches(job: Job, layout: Layout, gpus: int) -> list[int]:
    """Batches near the old one that divide over ``_data_parallel``, nearest first in ratio, the smaller on ties."""
    dp, old = _data_parallel(layout, gpus), job.global_batch
    low = old // dp * dp
    candidates = {low - dp, low, low + dp, low + 2 * dp} - {old}
    return sorted((b for b in candidates if b > 0), key=lambda b: (abs(math.log(b / old)), b))


def changes(old: Plan, new: Plan) -> list[Change]:
    """What differs, layout first."""
    one, other = old.layout_object, new.layout_object
    out = [Change("gpus", old.job().cluster.gpus, new.job().cluster.gpus)]
    out += [
        Change(f.name, getattr(one, f.name), getattr(other, f.name))
        for f in fields(Layout)
        if getattr(one, f.name) != getattr(other, f.name)
    ]
    batches = old.job_settings.global_batch, new.job_settings.global_batch
    if batches[0] != batches[1]:
        out.append(Change("global_batch", *batches))
    counts = one.microbatches(batches[0]), other.microbatches(batches[1])
    if counts[0] != counts[1]:
        out.append(Change("microbatches", *counts))
    for key in ("step_seconds", "tokens_per_second_per_gpu", "mfu"):
        out.append(Change(key, old.estimate[key], new.estimate[key]))
    out.append(Change("fullest_device_bytes", *(max(s["device"] for s in p.estimate["memory"]) for p in (old, new))))
    return out


def padding_notes(job: Job, one: Layout, other: Layout) -> list[str]:
    """A target that pads the vocabulary with tp stores more or fewer rows under another tp (B09)."""
    multiple = limits_of(job).pads_vocab
    if job.execution.name.split("-")[0] != "megatron" or not multiple:
        return []
    rows = [padded_vocab(job.model.vocab, layout.tp, multiple) for layout in (one, other)]
    if rows[0] == rows[1]:
        return []
    return [
        f"the vocabulary is padded to {rows[1]} rows at tp {other.tp}, the checkpoint holds {rows[0]}: pin tp={one.tp}, or convert it"
    ]
