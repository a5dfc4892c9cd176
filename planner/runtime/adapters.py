"""What is trained: every weight, all but some parts of the model, or low-rank adapters alone (LoRA, arXiv:2106.09685).

Beside a linear layer's weight W [outputs, inputs] stand A [rank, inputs] and B [outputs, rank]: ``y = W x + (alpha / rank) B (A x)``,
B zero at the start. Under tensor parallelism the half on the split side is split as W is, the other is whole on every rank and has a
share of its gradient on each: a layer whose outputs are split splits B, one whose inputs are split splits A and adds ``B (A x)`` to
its partial sum before the layer's own reduction, so neither costs a collective. Experts carry a pair each, on the expert's rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from planner.runtime.expert import Experts
from planner.runtime.parameter import Block, parameter
from planner.runtime.tensor import Linear, OutputLinear

PARTS: tuple[tuple[str, str], ...] = (
    ("embed_norm", "norm"), ("embed_", "embedding"), ("lm_head.", "head"), (".mlp.gate.", "router"), (".mlp.experts.", "experts"),
    (".mlp.shared_expert", "shared"), (".mlp.", "mlp"), (".self_attn.", "attention"), (".eh_proj.", "mtp"),
)  # fmt: skip
"""A piece of a parameter's name -> the part of the model it is counted under (``cost_models.states``); norms are the rest."""


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to."""
    return next((part for piece, part in PARTS if piece in name), "norm")


@dataclass(frozen=True)
class Trained:
    """What a job trains (the fields of ``cost_models.job.Job``): adapters of ``rank`` in ``targets`` (all parts when empty) with
    everything else frozen, or without a rank all but the ``frozen`` parts."""

    rank: int = 0
    targets: tuple[str, ...] = ()
    alpha: float = 0.0
    frozen: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.rank and self.alpha else 1.0

    def adapts(self, name: str) -> bool:
        """Whether the linear layer that holds parameter ``name`` carries an adapter."""
        part = part_of(name)
        return self.rank > 0 and (part in self.targets if self.targets else part not in ("embedding", "head", "router", "norm"))

    def trains(self, name: str) -> bool:
        """Whether parameter ``name`` is trained."""
        return is_adapter(name) if self.rank else part_of(name) not in self.frozen


def is_adapter(name: str) -> bool:
    return "lora_" in name.rpartition(".")[2]


def attach(decoder: nn.Module, trained: Trained, tp: int, etp: int, dtype: torch.dtype, frozen_dtype: torch.dtype) -> None:
    """Give the linear layers of a decoder their adapters and freeze what is not trained: it is kept in ``frozen_dtype``."""
    for name, module in list(decoder.named_modules()) if trained.rank else ():
        if isinstance(module, Linear) and trained.adapts(f"{name}.weight"):
            _beside(module, "lora", module.weight, isinstance(module, OutputLinear), tp, "tp", trained, dtype)
        elif isinstance(module, Experts) and trained.adapts(f"{name}.up_proj"):
            for one in ("gate_proj", "up_proj", "down_proj") if module.gated else ("up_proj", "down_proj"):
                _beside(module, f"{one}_lora", getattr(module, one), one == "down_proj", etp, "etp", trained, dtype)
    for name, module in decoder.named_modules():
        for own, value in list(module.named_parameters(recurse=False)):
            if not trained.trains(f"{name}.{own}"):
                kept = nn.Parameter(torch.empty_like(value, dtype=frozen_dtype), requires_grad=False)
                kept.block = value.block  # type: ignore[attr-defined]
                setattr(module, own, kept)


Held = tuple[int, tuple[str, ...]]
"""``copies`` and ``partial`` of a ``Block``."""


def _beside(
    module: nn.Module, name: str, weight: nn.Parameter, by_input: bool, ways: int, axis: str, trained: Trained, dtype: torch.dtype
) -> None:  # fmt: skip
    block: Block = weight.block  # type: ignore[attr-defined]
    split = block.sizes[-2:] != block.shape[-2:]
    own: Held = (1, ()) if split and by_input else (block.copies, block.partial)
    shared: Held = (ways, (axis,)) if split else own
    a = _half(block, -2, trained.rank, own if by_input else shared)
    b = _half(block, -1, trained.rank, shared if by_input else own)
    setattr(module, f"{name}_a", parameter(replace(a, init="normal", std=block.shape[-1] ** -0.5), dtype, weight.device))
    setattr(module, f"{name}_b", parameter(replace(b, init="zeros"), dtype, weight.device))
    module.scale = trained.scale  # type: ignore[assignment]


def _half(block: Block, dim: int, rank: int, held: Held) -> Block:
    """``block`` with ``rank`` in the place of dim -2 or -1."""
    shape, offsets, sizes = list(block.shape), list(block.offsets), list(block.sizes)
    shape[dim], offsets[dim], sizes[dim] = rank, 0, rank
    return replace(block, shape=tuple(shape), offsets=tuple(offsets), sizes=tuple(sizes), copies=held[0], partial=held[1])
