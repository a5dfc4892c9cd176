"""Recompute: which parts of a layer keep only their inputs and run again in backward (``Layout.recompute``).

``full`` wraps the layer; ``selective`` wraps the named parts where the layer calls them: core_attn (attention's kernel, context
parallelism included), mlp, moe and shared_experts keep their input and run again as a whole. Of layernorm, mlp_act (the product of
gate and up), moe_act and mla_up_proj it is the *output* that would be kept, by the products that read it: these run as ever, and
what they made is not kept but made again when the first of its readers asks for it in backward (``Recomputed.through``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from cost_models.layout import RecomputeRule
from profiles.errors import InputError

PARTS = ("core_attn", "mlp_act", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj")


class Recomputed:
    """The rule of one layer: called with a part's name, it runs the part, or runs it keeping its inputs only."""

    def __init__(self, rule: RecomputeRule) -> None:
        unknown = [m for m in rule.modules if m not in PARTS]
        if rule.mode == "selective" and unknown:
            raise InputError("recompute", unknown[0], f"the runtime recomputes {', '.join(PARTS)}", "core_attn")
        self.full = rule.mode == "full"
        self.parts = frozenset(rule.modules) if rule.mode == "selective" else frozenset()

    def __call__(self, part: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return again(function, *arguments) if part in self.parts else function(*arguments)

    def through(self, part: str, make: Callable[..., Any], arguments: tuple[Any, ...], use: Callable[[Any], Any]) -> Any:
        """``use(make(*arguments))``; where the part is recomputed, what ``make`` returns is not among the tensors that ``use`` saves
        for backward. ``make`` may communicate: every rank of its axis then makes it again at the same place of its backward."""
        if part not in self.parts or not torch.is_grad_enabled():
            return use(make(*arguments))
        made = make(*arguments)
        remake = Remake(make, arguments, made if isinstance(made, tuple) else (made,))
        with saved_tensors_hooks(remake.pack, remake.unpack):
            return use(made)


Token = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""Which output, and the size, stride and offset of the view of it that was to be saved."""


class Remake:
    """Stands for the outputs of ``make`` among saved tensors, and makes them again, once for all that ask in one backward."""

    def __init__(self, make: Callable[..., Any], arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        self.make, self.arguments = make, arguments
        self.storages = {t.untyped_storage()._cdata: i for i, t in enumerate(outputs)}
        self.asked, self.answered = 0, 0
        self.outputs: tuple[Tensor, ...] | None = None

    def pack(self, saved: Tensor) -> Tensor | Token:
        place = self.storages.get(saved.untyped_storage()._cdata)
        if place is None:
            return saved.detach()  # itself it would keep alive the graph that keeps it
        self.asked += 1
        return place, tuple(saved.shape), saved.stride(), int(saved.storage_offset())

    def unpack(self, kept: Tensor | Token) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self.outputs is None:
            with torch.no_grad():
                made = self.make(*self.arguments)
            self.outputs = made if isinstance(made, tuple) else (made,)
        place, size, stride, offset = kept
        found = self.outputs[place].as_strided(size, stride, offset)
        self.answered += 1
        if self.answered == self.asked:
            self.outputs, self.answered = None, 0
        return found


def again(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run ``function`` keeping its inputs only; it runs again in backward. It must not draw random numbers."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
