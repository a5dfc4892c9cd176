"""What a step of the runtime moves: collectives by axis, and bytes copied inside a process."""

from __future__ import annotations

import importlib.util
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch

from planner.dryrun.trace import Tracer

_spec = importlib.util.spec_from_file_location("runtime_programs", Path(__file__).resolve().parent / "programs.py")
assert _spec is not None
assert _spec.loader is not None
programs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(programs)


def collectives(layout: str, model: str = "llama") -> dict[str, int]:
    """``axis kind`` -> how often the second step calls it."""
    trainer, data = programs._trainer_and_data(layout, 2, model=model)
    trainer.step(0, trainer.batch(data, 0))
    tracer = Tracer(trainer.mesh.axis_of)
    with tracer:
        trainer.step(1, trainer.batch(data, 1))
    return dict(Counter(f"{call.axis} {call.kind}" for call in tracer.record.calls))


def copies(layout: str) -> dict[str, int]:
    """Inside which operation -> elements that the second step copies there, of more than one number a query and head; ``gradients``:
    elements of gradient that this rank holds."""
    trainer, data = programs._trainer_and_data(layout, 2, settings={"precision": "fp32", "seq_len": 64})
    statistics = 64 // trainer.layout.cp * trainer.layout.micro_batch * 8
    trainer.step(0, trainer.batch(data, 0))
    batch = trainer.batch(data, 1)
    with torch.autograd.profiler.profile(record_shapes=True) as seen:
        trainer.step(1, batch)
    found = Counter({"gradients": sum(piece.tensor.numel() for piece in trainer.optimizer.pieces("gradient"))})
    for event in seen.function_events or ():
        size = prod(event.input_shapes[0]) if event.name == "aten::copy_" and event.input_shapes[0] else 0
        if size > statistics:
            found[_inside(event)] += size
    return dict(found)


def _inside(event: Any) -> str:
    """The runtime's or the library's operation that an event is part of, else the outermost of PyTorch's own."""
    names = [event.name]
    while event.cpu_parent is not None:
        event = event.cpu_parent
        names.append(event.name)
    return next((n for n in names if n.startswith(("axisplan::", "c10d::", "aten::_scaled_dot"))), names[-1])
