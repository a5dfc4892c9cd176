"""What every pipeline stage did in a step, and when: the measured counterpart of the simulator's timeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from planner.runtime.metrics import Mark
from planner.runtime.train import Trainer

NAMES = {"F": "forward", "B": "backward_input", "W": "backward_weight", "BW": "backward"}


def measured_spans(trainer: Trainer, began: Mark, give: Callable[[list[dict[str, Any]]], None]) -> None:
    """Gather the last step of one rank of every stage (the first of each), in seconds from ``began``, and ``give`` it on rank 0.

    A span: ``stage``, ``kind`` (forward, backward, backward_input, backward_weight, reduce, optimizer), ``microbatch`` and
    ``chunk`` (-1 for what is done once a step), ``start``, ``end``.
    """
    pipeline, mesh = trainer.pipeline, trainer.mesh
    first = all(place == 0 for axis, place in mesh.coordinates.items() if axis != "pp")
    mine = [
        {
            "stage": mesh.pp.rank, "kind": NAMES.get(action.kind, action.kind), "microbatch": action.microbatch, "chunk": action.chunk,
            "start": pipeline.clock.seconds(began, start), "end": pipeline.clock.seconds(began, end),
        }
        for action, start, end in (pipeline.times if first else ())
    ]  # fmt: skip
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        give(sorted((span for part in everyone for span in part), key=lambda s: (s["stage"], s["start"])))
