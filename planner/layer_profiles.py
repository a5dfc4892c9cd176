"""Layers of a model, or any module of the user's: measured on this machine, and given to the planner (``--profile FILE``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models.job import Job, MeasuredLayer
from cost_models.layout import Layout
from cost_models.measured import alone, covers, rows_of
from cost_models.passes import unit_seconds
from cost_models.units import unit_cost
from profiles.errors import InputError
from profiles.measure.layer_profile import LayerProfile, LayerRow
from profiles.model import ModelSpec


def measure(what: str, name: str | None = None, **options: Any) -> LayerProfile:
    """``what`` is ``package.module:function`` (see ``profiles.measure.layer``), or a model: one row a layer kind and shape.

    ``name``: what the rows are called (default: the function, or the model; ``MODEL.KIND`` is what ``--profile`` looks for).
    ``options``: those of ``measure_layer``. Raises InputError for a model or function that cannot be found.
    """
    from profiles.measure.layer import measure_layer

    if ":" in what and "/" not in what:
        return measure_layer(what, name=name, **options)
    from profiles.huggingface import load_model

    model = load_model(what)
    share = options.pop("budget_seconds") / len(model.kinds)
    parts = [
        measure_layer(
            "planner.runtime.one_layer:build",
            name=row_name(name or model.name, kind),
            arguments={"model": model.model_dump(mode="json"), "kind": kind},
            budget_seconds=share,
            **options,
        )
        for kind in range(len(model.kinds))
    ]
    return parts[0].model_copy(update={"rows": rows_together(parts)})


def rows_together(parts: Sequence[LayerProfile]) -> tuple[LayerRow, ...]:
    return tuple(row for part in parts for row in part.rows)


def row_name(model: str, kind: int) -> str:
    """What a row of layer kind ``kind`` of a model is called."""
    return f"{model}.{kind}"


def with_profile(job: Job, path: str | Path) -> Job:
    """``job`` with the layers of a profile: rows of its model's kinds, its sequence length and precision.

    Rows of a ``package.module:function`` stand for a model of one layer kind where the file has no other name. Raises InputError for a
    file that is no profile or covers nothing of the job, and for jobs whose layers are not what was measured (adapters, frozen parts, packed
    documents, mixed clusters).
    """
    profile = LayerProfile.load(path)
    for field, given, why in (
        ("--lora", job.lora_rank, "adapters"), ("--freeze", job.frozen, "frozen parts"), ("--documents", job.documents, "packed documents"),
        ("--cluster", job.cluster.pools, "a mixed cluster"),
    ):  # fmt: skip
        if given:
            shown = job.cluster.name if field == "--cluster" else given
            raise InputError(field, shown, f"layers of a --profile were measured without {why}: leave out one of the two")
    found = matching(profile, job.model, path)
    rows = [
        MeasuredLayer(kind, r.tp, r.micro_batch, r.seq_len, r.forward_seconds, r.backward_seconds, r.saved_bytes)
        for kind, r in found
        if r.seq_len == job.seq_len and r.dtype == job.precision and r.forward_seconds > 0 and r.backward_seconds > 0
    ]
    if not rows:
        have = sorted({f"{r.seq_len} tokens in {r.dtype}" for _, r in found})
        raise InputError(
            "--profile",
            str(path),
            f"has {', '.join(have)}; the job needs {job.seq_len} tokens in {job.precision}: measure those too",
        )
    return replace(job, measured=tuple(sorted(rows)))


def matching(profile: LayerProfile, model: ModelSpec, path: str | Path) -> list[tuple[int, LayerRow]]:
    """(layer kind, row) of the profile's rows that are of ``model``. Raises InputError where there are none."""
    kinds = {row_name(model.name, kind): kind for kind in range(len(model.kinds))}
    rows = [row for row in profile.rows if not row.failed]
    found = [(kinds[row.name], row) for row in rows if row.name in kinds]
    names = sorted({row.name for row in rows})
    if not found and len(kinds) == 1 and len(names) == 1 and ":" in names[0]:
        found = [(0, row) for row in rows]
    if not found:
        wanted = ", ".join(kinds)
        raise InputError(
            "--profile", str(path), f"has rows of {', '.join(names) or 'nothing'}; {model.name} has the layers {wanted}", wanted
        )
    return found


@dataclass(frozen=True)
class Compared:
    """A measured layer beside its price from the formulas: seconds of forward and backward, bytes kept."""

    kind: int
    tp: int
    micro_batch: int
    forward: float
    backward: float
    saved_bytes: float
    analytic_forward: float
    analytic_backward: float
    analytic_saved_bytes: float
    used: bool
    """Whether the layout at hand has layers that it covers (always, where there is none)."""


def compare(job: Job, layout: Layout | None = None) -> list[Compared]:
    """Every measured layer of a job beside the formulas' value; ``layout``: the one that is asked about."""
    plain = replace(job, measured=())
    out = []
    for row in (row for kind in range(len(job.model.kinds)) for row in rows_of(job, kind)):
        price, cost = unit_seconds(plain, alone(row), row.kind), unit_cost(plain, alone(row), row.kind)
        tp = (
            sum(price.forward.exposed.values()),
            sum(sum(one.exposed.values()) for one in (price.backward_input, price.backward_weight)),
        )
        used = layout is None or bool(covers(job, layout, row))
        out.append(
            Compared(
                row.kind, row.tp, row.micro_batch, row.forward, row.backward, row.saved_bytes, price.f - tp[0],
                price.b + price.w - tp[1], float(cost.saved_bytes), used,
            )
        )  # fmt: skip
    return out
