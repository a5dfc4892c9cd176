"""What one rank allocates, computes and sends, seen operation by operation.

``Tracer`` is a dispatch mode: every operation below autograd passes through it, with fake or real tensors. A storage counts from
the operation that makes it to its last reference, under the category of the phase that made it (an activation is what a forward
made and still exists).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from planner.dryrun.counting import Call, call_of, flops_of

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "held", "temporary", "gathered", "buffers")
"""``held``: gradients that an input-gradient pass leaves for its weight-gradient pass; ``gathered``: whole parameters that ZeRO-3
brings together; ``buffers``: batch, tables, tensors received and not yet used."""


LIBRARY = "library"
FINENESS = 0.005
"""Share of the peak by which memory must change to be drawn."""


@dataclass
class Span:
    """A piece of work on the trace's clock (operations done): ``F0.3`` is chunk 0's forward of microbatch 3."""

    name: str
    start: int
    end: int = 0


@dataclass
class Record:
    """What a step did. ``at_peak``: bytes by category at the fullest moment; ``most``: each category's own maximum; ``kept``: most
    activations and held gradients alive between two actions; ``curve``: (operation, bytes alive by category), where an action begins
    or memory has changed visibly."""

    peak_bytes: int = 0
    peak_at: str = ""
    peak_clock: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)
    most: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    flops: Counter[str] = field(default_factory=Counter)
    calls: list[Call] = field(default_factory=list)
    curve: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    operations: int = 0
    library: int = 0
    """Most bytes that the communication library took for copies of its own, which no other figure holds: gloo's reduce-scatter sums a
    copy of its input. NCCL takes none, nor does a group that is not there."""


def most_bytes(record: Record) -> dict[str, int]:
    """The most of each category, between actions or at the peak."""
    most = {c: max(record.most[c], record.at_peak.get(c, 0)) for c in CATEGORIES}
    return {c: size for c, size in most.items() if size}


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered. ``phase`` names the moment, ``category`` is what new storages are; ``axis_of`` names a group."""

    def __init__(self, axis_of: Callable[[tuple[int, ...]], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axis_of = axis_of
        self.record = Record()
        self.bytes: Counter[str] = Counter()
        self.total = 0
        self.phase, self.category = "build", "buffers"
        self.failed = ""
        """The operation that raised last."""
        self._drawn = 0
        self._known: dict[int, list[Any]] = {}

    # -- memory -------------------------------------------------------------------------------------------------------

    def see(self, tensor: Any, category: str | None = None, new: str | None = None) -> None:
        """Count the storage of a tensor; with ``category``, count it as that from now on. ``new``: what a storage not seen before
        is; a view of a real tensor that no operation was seen to make is of the communication library's own."""
        storage = storage_of(tensor)
        if storage is None:
            return
        key = storage._cdata
        entry = self._known.get(key)
        if entry is None:
            size = storage.nbytes()
            entry = self._known[key] = [size, category or new or self.category]
            self._change(entry[1], size)
            weakref.finalize(storage, self._gone, key)
            return
        if category is not None and entry[1] != category:
            self._change(entry[1], -entry[0])
            self._change(category, entry[0])
            entry[1] = category
        size = storage.nbytes()
        if size != entry[0]:
            self._change(entry[1], size - entry[0])
            entry[0] = size

    def _change(self, category: str, size: int) -> None:
        self.bytes[category] += size
        if category == LIBRARY:
            self.record.library = max(self.record.library, self.bytes[category])
        else:
            self.total += size

    def _gone(self, key: int) -> None:
        size, category = self._known.pop(key)
        self._change(category, -size)

    def _look(self, name: str) -> None:
        record = self.record
        if abs(self.total - self._drawn) > record.peak_bytes * FINENESS:
            self._drawn = self.total
            record.curve.append((record.operations, {c: self.bytes[c] for c in CATEGORIES}))
        if self.total > record.peak_bytes:
            record.peak_bytes, record.peak_at, record.peak_clock = self.total, f"{self.phase}: {name}", record.operations
            record.at_peak = {c: self.bytes[c] for c in CATEGORIES}

    # -- phases -------------------------------------------------------------------------------------------------------

    def enter_phase(self, phase: str, category: str) -> None:
        """A new piece of work begins."""
        record = self.record
        record.kept = max(record.kept, self.bytes["activations"] + self.bytes["held"])
        for name in CATEGORIES:
            record.most[name] = max(record.most[name], self.bytes[name])
        if record.spans:
            record.spans[-1].end = record.operations
        record.spans.append(Span(phase, record.operations))
        record.curve.append((record.operations, {c: self.bytes[c] for c in CATEGORIES}))
        self.phase, self.category = phase, category

    @contextmanager
    def as_category(self, category: str) -> Iterator[None]:
        """What is made inside counts as ``category``."""
        before, self.category = self.category, category
        try:
            yield
        finally:
            self.category = before

    def begin(self) -> None:
        """A step begins: counts start again, what is alive stays."""
        self.record = Record()
        self._look("start")

    def __enter__(self) -> Tracer:
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int, _real: Any = self._resize) -> Any:
            out = _real(storage, size)
            entry = self._known.get(storage._cdata)
            if entry is not None:
                self._change(entry[1], storage.nbytes() - entry[0])
                entry[0] = storage.nbytes()
                self._look("resize")
            return out

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    # -- operations ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(t is not Tensor and t is not FakeTensor and t.__name__ == "DTensor" for t in types):
            return NotImplemented
        answer = HOST_READS.get(func)
        name = func._schema.name
        if answer is not None and any(isinstance(a, FakeTensor) for a in args):
            out = answer(*args, **kwargs)
        else:
            self.failed = func.__name__
            out = func(*args, **kwargs)
        record = self.record
        record.operations += 1
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, Tensor):
                self.see(item, new=LIBRARY if func.is_view and not isinstance(item, FakeTensor) else None)
        self._look(func.__name__)
        if (flops := flops_of(name, args, out)) is not None:
            kind, number = flops
            record.flops[kind] += number
        if "c10d" in name:
            call = call_of(name, args, out, self.axis_of, self.phase, record.operations)
            if call is not None:
                record.calls.append(call)
        return out


def _answered(x: Tensor) -> int | float | bool:
    return 1.0 if x.is_floating_point() else x.dtype == torch.bool or 1


def _bincount(x: Tensor, weights: Any = None, minlength: int = 0) -> Tensor:
    return x.new_empty(minlength)


HOST_READS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._local_scalar_dense.default: _answered,
    torch.ops.aten.bincount.default: _bincount,
    torch.ops._c10d_functional.wait_tensor.default: lambda x: x,  # its fake kernel would allocate
}
"""Operations whose result depends on data, and what stands for it: 1 for a number, a histogram of the least length."""


def storage_of(tensor: Any) -> Any:
    """The storage below a tensor's wrappers; None where there is none."""
    while hasattr(tensor, "_local_tensor"):
        tensor = tensor._local_tensor
    return tensor.untyped_storage() if isinstance(tensor, Tensor) and tensor.layout == torch.strided else None
