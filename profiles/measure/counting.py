"""Counts what a call really does, as the dispatcher sees it: kernels, bytes they read and write, FLOPs, bytes alive.

``torch.utils.flop_counter`` is not used as a mode: on CPU it does not know attention, and it decomposes operators when other
modes are active. Its formulas are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

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
    if name.startswith("_scaled_dot_product") and "_for_cpu" in name:
        query, key, value = args[:3] if "backward" not in name else args[1:4]
        if "backward" in name:
            return int(sdpa_backward_flop_count(args[0].shape, query.shape, key.shape, value.shape))
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


class LiveBytes(TorchDispatchMode):
    """Within ``with LiveBytes(fixed) as live``: ``live.peak``, the most bytes of storages that were alive at once after any
    operator, without those of ``fixed``. Storages that existed before count from when they are ``hold``-ed; memory inside a kernel
    is not seen.

    A storage's Python object lives as long as the storage, so its finaliser says when the bytes are free.
    """

    def __init__(self, fixed: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._sizes = WeakIdKeyDictionary()
        self._now = 0
        self.peak = 0
        for tensor in fixed:
            self._sizes[tensor.untyped_storage()] = 0

    def hold(self, *tensors: torch.Tensor) -> None:
        """Counts the storages of ``tensors`` from now until they are freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage in self._sizes:
                continue
            size = storage.nbytes()
            self._sizes[storage] = size
            self._now += size
            weakref.finalize(storage, self._free, size)
        self.peak = max(self.peak, self._now)

    def _free(self, size: int) -> None:
        self._now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.hold(*(t for t in tree_leaves(out) if isinstance(t, torch.Tensor)))
        return out
