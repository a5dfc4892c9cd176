"""What saving and loading a checkpoint of axisplan's runtime takes beside a step: bytes on disk, in host memory, on the device.

Each rank copies to host memory what it alone writes: of every parameter its master value and moments, of what replicas hold alike
an equal part (``planner.runtime.checkpoint``). Nothing is made on the device, and no process ever holds a whole model. Reading
takes one stored box at a time, which is given to its place before the next is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.stage_states import Tensors, stage_holding, stage_units, tensors
from cost_models.state_bytes import bytes_of
from profiles.model import ModelSpec

WIDE = 4.0
"""Bytes of a master value."""
EXPORT_FILE = 4 << 30
"""Bytes of a file of an exported model."""


@dataclass(frozen=True)
class CheckpointBytes:
    """Bytes. ``save_host_rank``: what the rank with most copies while a save is written; ``save_host_node``: all ranks of the
    fullest node; ``load_host_rank``: the largest box that this layout writes, as stored and as read; ``device``: beyond the states of
    a step, either way."""

    files: float
    save_host_rank: float
    save_host_node: float
    load_host_rank: float
    load_host_node: float
    device: float = 0.0


def checkpoint_bytes(job: Job, layout: Layout) -> CheckpointBytes:
    """Of a checkpoint of ``job`` under ``layout``: all trained parameters with their moments."""
    each = bytes_of(job.execution, job.precision, job.optimizer, layout.zero)
    saved = (each.master or WIDE) + each.moments
    trained = [stage_holding(job, layout, rank)[1] for rank in range(layout.pp)]
    elements = [float(t.dense / (layout.dp * layout.cp) + t.expert / layout.edp) for t in trained]
    node = min(job.cluster.gpus_per_node, layout.world)
    stages = [layout.coordinates(rank)["pp"] for rank in range(layout.world)]
    nodes = [sum(elements[s] for s in stages[first : first + node]) for first in range(0, layout.world, node)]
    held = {unit for rank in range(layout.pp) for unit, _ in stage_units(job, layout, rank)}
    largest = max(float(w.local(layout, job.execution)) for unit in held for w in tensors(job).units[unit])
    box = 2 * WIDE * largest
    whole = float(stage_holding(job, Layout(), 0)[1].all)
    return CheckpointBytes(saved * whole, saved * max(elements), saved * max(nodes), box, box * node)


def export_bytes(model: ModelSpec) -> float:
    """Host memory of ``axisplan export``, which runs in one process: the file being filled (at most ``EXPORT_FILE`` and one
    parameter more), and the largest parameter (all experts of a layer) as stored, as read and as written."""
    largest = max(weight.elements for weights in Tensors.of(model).units.values() for weight in weights)
    return EXPORT_FILE + (2 * WIDE + 2) * largest
