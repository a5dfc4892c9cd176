"""Layers of a model, or any module of the user's, measured on this machine (``axisplan profile layer``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profiles.measure.layer import measure_layer
from profiles.measure.layer_profile import LayerProfile


def measure(what: str, **options: Any) -> LayerProfile:
    """``what`` is ``package.module:function`` (see ``profiles.measure.layer``), or a model: one row a layer kind and shape.

    ``options``: those of ``measure_layer``. Raises InputError for a model or function that cannot be found.
    """
    if ":" in what and "/" not in what:
        return measure_layer(what, **options)
    from profiles.huggingface import load_model

    model = load_model(what)
    share = options.pop("budget_seconds") / len(model.kinds)
    parts = [
        measure_layer(
            "planner.runtime.one_layer:build",
            name=f"{model.name}.{kind}",
            arguments={"model": model.model_dump(mode="json"), "kind": kind},
            budget_seconds=share,
            **options,
        )
        for kind in range(len(model.kinds))
    ]
    return parts[0].model_copy(update={"rows": rows_of(parts)})


def rows_of(parts: Sequence[LayerProfile]) -> tuple[Any, ...]:
    return tuple(row for part in parts for row in part.rows)
