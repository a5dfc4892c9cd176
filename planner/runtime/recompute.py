"""Recompute: which parts of a layer keep only their inputs and run again in backward (``Layout.recompute``).

``full`` wraps the layer; ``selective`` wraps the named parts where the layer calls them: core_attn (attention's kernel, context
parallelism included), mlp_act (the product of gate and up), mlp, layernorm, moe, moe_act, shared_experts, mla_up_proj.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def again(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run ``function`` keeping its inputs only; it runs again in backward. It must not draw random numbers."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
