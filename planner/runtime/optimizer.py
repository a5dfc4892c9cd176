"""AdamW on shards, gradient clipping by the norm over all meshes, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.runtime.data_parallel import Bucket, Piece


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
    """AdamW over each bucket's shard: master values (the parameters themselves where they are wide enough) and two moments."""

    def __init__(self, buckets: Sequence[Bucket], wide: torch.dtype, betas: tuple[float, float], eps: float, decay: float) -> None:
        self.buckets = list(buckets)
        self.masters: list[Tensor] = []
        for bucket in self.buckets:
            own = bucket.parameter_shard
            self.masters.append(own if own.dtype == wide else own.to(wide))
        groups = [
            {"params": [m], "weight_decay": decay if b.decay else 0.0}
            for m, b in zip(self.masters, self.buckets, strict=True)
            if m.numel()
        ]
        self.engine = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared gradient norm: summed over all ranks it is the whole."""
        device = self.buckets[0].parameters.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for bucket in self.buckets:
            gradient = bucket.gradient
            if gradient.numel():
                total += (
                    bucket.weight
                    * torch.linalg.vector_norm(gradient, dtype=torch.float64 if gradient.is_cpu else None).double().square()
                )
        return total

    def step(self, rate: float, scale: float) -> None:
        """Update with gradients times ``scale``."""
        for master, bucket in zip(self.masters, self.buckets, strict=True):
            gradient = bucket.gradient
            if scale != 1.0:
                gradient.mul_(scale)
            master.grad = gradient
        for group in self.engine.param_groups:
            group["lr"] = rate
        self.engine.step()
        for master, bucket in zip(self.masters, self.buckets, strict=True):
            master.grad = None
            if master.data_ptr() != bucket.parameter_shard.data_ptr():
                bucket.parameter_shard.copy_(master)
            bucket.gather()

    def pieces(self, what: str) -> Iterator[Piece]:
        """Boxes of ``parameter`` (masters), ``gradient``, ``exp_avg`` or ``exp_avg_sq`` that this rank holds."""
        for master, bucket in zip(self.masters, self.buckets, strict=True):
            if what == "parameter":
                yield from bucket.pieces(master)
            elif what == "gradient":
                yield from bucket.pieces(bucket.gradient)
            else:
                state = self.engine.state[master]
                if what in state:
                    yield from bucket.pieces(state[what])
