"""Counts what a call really does: kernels, bytes they read and write, FLOPs, as the dispatcher sees them.

``torch.utils.flop_counter`` is not used as a mode: on CPU it does not know attention, and it decomposes operators when other
modes are active. Its formulas are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view", "alias", "lift_fresh"}
"""Operators that launch nothing."""


class Counter(TorchDispatchMode):
    """Within ``with Counter() as c``: ``c.kernels``, ``c.bytes`` (inputs read and outputs written once each) and ``c.flops``."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.bytes, self.flops = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::").split(".")[0]
        if func.is_view or name in FREE:
            return out
        self.kernels += 1
        self.bytes += sum(t.numel() * t.itemsize for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor))
        self.flops += _flops(func, name, args, kwargs, out)
        return out


def _flops(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
    if name.startswith("_scaled_dot_product") and name.endswith("_for_cpu"):
        query, key, value = args[:3] if "backward" not in name else args[1:4]
        if "backward" in name:
            return int(sdpa_backward_flop_count(args[0].shape, query.shape, key.shape, value.shape))
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0
