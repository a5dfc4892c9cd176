"""A worker's part of ``measure_layer``: times a module's forward and backward, and counts what it computes and keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from profiles.errors import InputError
from profiles.measure.bench import Bench, Report
from profiles.measure.counting import Counter, LiveBytes
from profiles.measure.gpu_worker import device_facts
from profiles.measure.kernels import DTYPES
from profiles.measure.layer import call_with
from profiles.measure.layer_profile import LayerRow
from profiles.measure.together import Together


class Layer:
    """A module and the inputs to call it with; forward and backward as functions without arguments."""

    def __init__(self, made: Any, device: torch.device, dtype: torch.dtype) -> None:
        if not (isinstance(made, Sequence) and len(made) == 2 and callable(made[0])):
            raise InputError("layer", type(made).__name__, "the function returns (module, example_inputs)")
        module, inputs = made
        self.module: Any = module.to(device=device, dtype=dtype) if isinstance(module, torch.nn.Module) else module
        inputs = tree_map(lambda leaf: _placed(leaf, device, dtype), inputs)
        self.positional: tuple[Any, ...] = ()
        self.named: Mapping[str, Any] = {}
        if isinstance(inputs, Mapping):
            self.named = inputs
        elif isinstance(inputs, (list, tuple)):
            self.positional = tuple(inputs)
        else:
            self.positional = (inputs,)
        is_module = isinstance(module, torch.nn.Module)
        self.fixed: list[torch.Tensor] = [*module.parameters(), *module.buffers()] if is_module else []
        self.differentiated = [t for t in (*self.fixed, *_tensors(inputs)) if t.requires_grad]

    def forward(self) -> list[torch.Tensor]:
        """Outputs that have gradients."""
        outputs = [t for t in _tensors(self.module(*self.positional, **self.named)) if t.requires_grad]
        if not outputs:
            raise InputError("layer", "output", "has nothing to differentiate")
        return outputs

    def backward(self, outputs: list[torch.Tensor], upstream: list[torch.Tensor]) -> object:
        """Gradients of inputs and parameters."""
        return torch.autograd.grad(outputs, self.differentiated, upstream, allow_unused=True)

    @property
    def parameter_bytes(self) -> int:
        return sum(t.numel() * t.itemsize for t in self.fixed)


def _placed(leaf: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not leaf.is_floating_point():
        return leaf.to(device)
    return leaf.detach().to(device=device, dtype=dtype).requires_grad_()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def saved_bytes(layer: Layer) -> tuple[int, list[torch.Tensor]]:
    """(bytes of storages that autograd keeps from a forward, each once, without those of parameters and buffers; the outputs)."""
    fixed = {t.untyped_storage().data_ptr() for t in layer.fixed}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = layer.forward()
    return sum(kept.values()), outputs


def count(layer: Layer) -> dict[str, float]:
    """FLOPs and bytes of a ``LayerRow``, from two passes that are not timed."""
    kept, outputs = saved_bytes(layer)
    upstream = [torch.randn_like(o) for o in outputs]
    del outputs
    with Counter() as forward:
        outputs = layer.forward()
    with Counter() as backward:
        layer.backward(outputs, upstream)
    del outputs
    with LiveBytes(layer.fixed) as live:
        live.hold(*_tensors((layer.positional, layer.named)))
        outputs = layer.forward()
        layer.backward(outputs, [torch.ones_like(o) for o in outputs])
    return {
        "forward_flops": forward.flops,
        "backward_flops": backward.flops,
        "parameter_bytes": layer.parameter_bytes,
        "saved_bytes": kept,
        "peak_bytes": live.peak,
    }


def measure_here(
    device: torch.device,
    together: Together,
    *,
    report: Report,
    make: Callable[..., Any],
    name: str,
    arguments: Mapping[str, Any],
    shapes: Sequence[Sequence[int]],
    dtype: str,
    seconds: float,
) -> None:
    """Measures each (tp, micro batch, tokens) of ``shapes`` for about ``seconds`` in step with the other workers."""
    bench = Bench(device, together)
    report({"type": "facts", "facts": device_facts(device, together.size)})
    for place, (tp, micro_batch, seq_len) in enumerate(shapes):
        given = {"micro_batch": micro_batch, "seq_len": seq_len, "tp": tp, "device": device, "dtype": DTYPES[dtype]}
        row: dict[str, Any] = {"name": name, "tp": tp, "micro_batch": micro_batch, "seq_len": seq_len, "dtype": dtype}
        row.update(_measure(bench, partial(_make, make, arguments, given), seconds))
        report({"type": "row", "done": (place + 1) / len(shapes), "row": LayerRow.model_validate(row).model_dump()})


def _make(make: Callable[..., Any], arguments: Mapping[str, Any], given: Mapping[str, Any]) -> Layer:
    return Layer(call_with(make, arguments, given), given["device"], given["dtype"])


def _measure(bench: Bench, make: Callable[[], Layer], seconds: float) -> dict[str, Any]:
    """Times and counts; backward is the time of both passes less that of forward, so that no pass waits for the clock."""
    made: dict[str, Layer] = {}
    counts: dict[str, float] = {}

    def forward() -> Callable[[], object]:
        made["layer"] = make()
        counts.update(count(made["layer"]))
        return made["layer"].forward

    def both() -> Callable[[], object]:
        layer = made["layer"]
        upstream = [torch.randn_like(o) for o in layer.forward()]
        return lambda: layer.backward(layer.forward(), upstream)

    first, problem = bench.time_call(forward, 0.3 * seconds)
    if first is None:
        return {"failed": problem}
    second, problem = bench.time_call(both, 0.6 * seconds)
    if second is None:
        return {"failed": problem}
    return {
        **counts,
        "forward_seconds": first.seconds,
        "backward_seconds": max(second.seconds - first.seconds, 0.0),
        "forward_spread": first.spread,
        "backward_spread": second.spread,
    }
