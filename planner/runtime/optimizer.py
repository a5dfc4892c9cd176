"""AdamW on shards, gradient clipping by the norm over all meshes, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.runtime.data_parallel import Piece, Shards
from planner.runtime.mesh import Axis


@dataclass(frozen=True)
class Schedule:
    """Learning rate: linear warm-up, then cosine, linear or constant to ``floor`` (a share of ``peak``)."""

    peak: float
    warmup: int
    steps: int
    shape: str
    floor: float

    def at(self, step: int) -> float:
        """The rate of step ``step`` (0 is the first)."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.shape == "constant":
            return self.peak
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        left = 0.5 * (1 + math.cos(math.pi * done)) if self.shape == "cosine" else 1 - done
        return self.peak * (self.floor + (1 - self.floor) * left)


class ShardedAdamW:
    """AdamW over this rank's shards: master values (the shards themselves where they are wide enough) and two moments."""

    def __init__(
        self, shards: Sequence[Shards], wide: torch.dtype, betas: tuple[float, float], eps: float, decay: float,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.shards, self.device = list(shards), device
        self.masters = [[v if v.dtype == wide else v.to(wide) for v in s.values] for s in self.shards]
        groups = []
        for masters, owner in zip(self.masters, self.shards, strict=True):
            trained = [m for m in masters if m.numel()]
            if trained:
                groups.append({"params": trained, "weight_decay": decay if owner.decay else 0.0})
        if not groups:  # a stage of which nothing is trained
            groups = [{"params": [torch.zeros(0, dtype=wide, device=device)], "weight_decay": 0.0}]
        self.engine = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared gradient norm: summed over all ranks it is the whole (fp64)."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for owner in self.shards:
            parts = [g for g in owner.gradients if g.numel()]
            if parts:
                total += owner.weight * (square_sum if parts[0].is_cpu else square_sum_fused)(parts)
        return total

    def step(self, rate: float, scale: float) -> None:
        """Update with gradients times ``scale``."""
        for masters, owner in zip(self.masters, self.shards, strict=True):
            gradients = owner.gradients
            if scale != 1.0:
                torch._foreach_mul_(gradients, scale)
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient
        for group in self.engine.param_groups:
            group["lr"] = rate
        self.engine.step()
        self.publish()

    def prepare(self, steps: int) -> None:
        """Make the state that exists after ``steps`` updates (moments zero), for a checkpoint to be read into."""
        for masters in self.masters:
            for master in masters:
                if master.numel() and steps:
                    state = self.engine.state[master]
                    state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=master.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)

    def publish(self) -> None:
        """Masters to the model (after an update, or after a checkpoint was read)."""
        for masters, owner in zip(self.masters, self.shards, strict=True):
            for master, value in zip(masters, owner.values, strict=True):
                master.grad = None
                if master.dtype != value.dtype:
                    value.copy_(master)
            owner.publish()

    def pieces(self, what: str, *, once: bool = False) -> Iterator[Piece]:
        """Boxes of ``parameter`` (masters), ``gradient``, ``exp_avg`` or ``exp_avg_sq`` that this rank holds; ``once``: of those that
        replicas hold too, this rank's part alone."""
        for masters, owner in zip(self.masters, self.shards, strict=True):
            if what == "parameter":
                found = owner.pieces(masters)
            elif what == "gradient":
                found = owner.pieces(owner.gradients)
            elif all(what in self.engine.state[m] for m in masters if m.numel()):
                found = owner.pieces([self.engine.state[m][what] if m.numel() else m for m in masters])
            else:
                continue
            yield from dealt_out(found, owner.replicate) if once else found


def dealt_out(pieces: Iterable[Piece], replicas: Axis) -> Iterator[Piece]:
    """This replica's part of pieces that all replicas hold alike: rows of a large one, and of the small ones each goes to the
    replica with least so far."""
    loads = [0] * replicas.size
    for piece in pieces:
        if replicas.size > 1 and piece.tensor.numel() > DEALT_WHOLE and piece.sizes[0] >= replicas.size:
            yield piece.rows(*(piece.sizes[0] * n // replicas.size for n in (replicas.rank, replicas.rank + 1)))
            continue
        place = loads.index(min(loads))
        loads[place] += piece.tensor.numel()
        if place == replicas.rank:
            yield piece


DEALT_WHOLE = 1 << 16
"""Elements of a box that is not cut among replicas."""
PIECE = 1 << 17
"""Elements of a gradient that are widened at a time for its norm."""


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares in fp64. (PyTorch's norm with a wider dtype widens a whole CPU tensor.)"""
    wide = (piece.double() for values in tensors for piece in values.flatten().split(PIECE))
    return torch.stack([torch.dot(piece, piece) for piece in wide]).sum()


def square_sum_fused(tensors: Sequence[Tensor]) -> Tensor:
    """The same of a GPU's tensors, whose norms one kernel takes."""
    return torch.stack(torch._foreach_norm(list(tensors))).double().square().sum()
