"""Measures whole layers: forward and backward time, FLOPs, kept and peak bytes, for any module that a function returns.

The function is given by name, ``package.module:function``, or as a callable; it returns ``(module, example_inputs)`` and is passed
those of ``micro_batch``, ``seq_len``, ``tp``, ``device`` and ``dtype`` that it has parameters for.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from profiles.errors import AxisplanError, InputError, one_line
from profiles.measure.gpu import Progress, check
from profiles.measure.layer_profile import LayerProfile, LayerRow
from profiles.measure.timing import noise, others_busy, patience
from profiles.measure.together import Alone

Make = Callable[..., Any]
"""Returns (module, inputs): inputs are a tensor, or a sequence of positional or a mapping of keyword arguments."""


def resolve(target: str, folder: str | None = None) -> Make:
    """The function ``package.module:function`` names, looked for after the installed packages in ``folder`` (default: the current
    one). InputError where there is none."""
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise InputError("layer", target, "is written package.module:function")
    path = folder or os.getcwd()
    if path not in sys.path:
        sys.path.append(path)
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError("layer", target, f"cannot be imported ({one_line(error)})") from None
    function = getattr(found, function_name, None)
    if not callable(function):
        raise InputError("layer", target, f"{module_name} has no function {function_name}")
    return function


def call_with(make: Make, arguments: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Calls ``make`` with ``arguments`` and with those of ``given`` that it has parameters for."""
    parameters = inspect.signature(make).parameters
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    fitting = {k: v for k, v in given.items() if everything or k in parameters}
    return make(**{**fitting, **arguments})


def measure_layer(
    layer: str | Make,
    *,
    micro_batches: Sequence[int] = (1,),
    seq_lens: Sequence[int] = (1024,),
    tp: Sequence[int] = (1,),
    name: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    dtype: str = "fp32",
    device: str | None = None,
    processes: int = 1,
    threads: int = 1,
    budget_seconds: float = 60.0,
    progress: Progress | None = None,
) -> LayerProfile:
    """Measures a layer at every combination of ``micro_batches``, ``seq_lens`` and ``tp`` (its local shapes: whoever makes the
    module divides them).

    ``arguments`` are passed to the function as they are (JSON values where ``processes`` > 1, which also needs ``layer`` by name).
    A combination that runs out of memory is a row that says so. Ctrl-C returns the rows there are. Raises InputError for a function
    that cannot be found or returns something else, AxisplanError where nothing was measured.
    """
    device, _ = check(device, [dtype], processes, budget_seconds)
    for field, values in (("micro_batches", micro_batches), ("seq_lens", seq_lens), ("tp", tp)):
        if not values or min(values) < 1:
            raise InputError(field, ", ".join(map(str, values)), "positive numbers", 1)
    shapes = [(t, b, s) for t in tp for b in micro_batches for s in seq_lens]
    label = name or (layer if isinstance(layer, str) else getattr(layer, "__name__", "layer"))
    job = {
        "name": label,
        "arguments": dict(arguments or {}),
        "shapes": shapes,
        "dtype": dtype,
        "seconds": budget_seconds / len(shapes),
    }
    if isinstance(layer, str):
        make = resolve(layer)
    elif processes > 1:
        raise InputError("layer", label, "measured by several processes it is given by name, package.module:function")
    else:
        make = layer
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        if record["type"] != "start":
            records.append(record)
        if progress and record["type"] == "row":
            row = record["row"]
            progress(record["done"], f"{label} tp {row['tp']}, micro batch {row['micro_batch']}, {row['seq_len']} tokens")

    others = others_busy()
    try:
        if processes == 1:
            _measure_alone(make, device, threads, keep, job)
        else:
            from profiles.measure.launch import run_workers

            sent = {"device": device, "layer": {**job, "layer": layer, "folder": os.getcwd()}}
            limit = patience(budget_seconds, parts=len(shapes))
            run_workers(sent, processes, timeout_seconds=limit, on_record=keep, threads=threads)
    except KeyboardInterrupt:
        pass
    rows = tuple(LayerRow.model_validate(r["row"]) for r in records if r["type"] == "row")
    if not rows:
        raise AxisplanError("profile: nothing was measured")
    facts: dict[str, Any] = next((r["facts"] for r in records if r["type"] == "facts"), {})
    spreads = [row.forward_spread for row in rows if not row.failed]
    found = noise(spreads, others=others, threads=processes * threads)
    return LayerProfile(
        host=facts.get("host", ""),
        date=facts.get("date", ""),
        device=facts.get("name", device),
        processes=processes,
        noise=str(found),
        rows=rows,
    )


def _measure_alone(make: Make, device: str, threads: int, keep: Callable[[dict[str, Any]], None], job: dict[str, Any]) -> None:
    import torch

    from profiles.measure.layer_worker import measure_here

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        measure_here(torch.device("cuda", 0) if device == "cuda" else torch.device("cpu"), Alone(), report=keep, make=make, **job)
    finally:
        torch.set_num_threads(before)
