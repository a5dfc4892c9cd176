"""A user's own module under a plan's tensor and data parallelism: parameters, FLOPs, activations, collectives of one rank."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from cost_models.layout import Layout
from planner.dryrun.report import collectives
from planner.dryrun.trace import Tracer, most_bytes
from planner.dryrun.world import fake_rank, replaced, without_fakes
from planner.plan import Plan
from planner.runtime.mesh import Mesh
from profiles.errors import AxisplanError, InputError, one_line


def load(text: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names, found as Python finds modules from the current folder. Raises InputError."""
    name, separator, attribute = text.partition(":")
    if not separator or not name or not attribute:
        raise InputError("--module", text, "must read package.module:function", "mypackage.model:build")
    sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(name), attribute)
    except AttributeError:
        raise InputError("--module", text, f"module {name} has no {attribute}") from None
    except Exception as error:
        raise InputError("--module", text, f"cannot be imported: {one_line(error)}") from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise InputError("--module", text, f"{attribute} is not a function")
    return found  # type: ignore[no-any-return]


def module_of(function: Callable[..., Any], text: str, plan: Plan) -> tuple[nn.Module, tuple[Any, ...]]:
    """What ``function`` builds, on no device: the module and its example inputs (shapes of one microbatch)."""
    wants = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    try:
        with torch.device("meta"):
            made = function(*([plan] if wants else []))
    except Exception as error:
        raise InputError("--module", text, f"failed while building: {one_line(error)}") from None
    module, inputs = made if isinstance(made, tuple) else (made, getattr(made, "example_inputs", None))
    if not isinstance(module, nn.Module) or inputs is None:
        raise InputError("--module", text, "must return (module, inputs), or a module with example_inputs")
    return module, inputs if isinstance(inputs, tuple) else (inputs,)


def trace_module(text: str, plan: Plan, rank: int = 0) -> dict[str, Any]:
    """Forward, backward and an AdamW step of one microbatch on ``rank``.

    Tensor parallelism where the module has ``parallel_plan`` (``parallelize_module``'s mapping), FSDP2 around the members of every
    ModuleList and the module itself under ZeRO-3; what else the plan asks for is listed as not applied. Raises InputError with the
    operation that cannot be traced.
    """
    layout, job = plan.layout_object, plan.job()
    function = load(text)
    patch = (DeviceMesh, "_get_mesh_tensor_from_full_mesh", staticmethod(without_fakes(DeviceMesh._get_mesh_tensor_from_full_mesh)))
    with fake_rank(rank, layout.world), replaced(patch):
        module, inputs = module_of(function, text, plan)
        whole = sum(p.numel() for p in module.parameters())
        mesh = Mesh(layout, job.model, torch.device("cpu"))
        applied = parallelise(module, mesh, text)
        tracer = Tracer(mesh.axis_of)
        gc.collect()
        with FakeTensorMode(allow_non_fake_inputs=True):
            module.to_empty(device="cpu")
            real = tuple(torch.empty_like(x, device="cpu") if isinstance(x, Tensor) else x for x in inputs)
            optimizer = torch.optim.AdamW(module.parameters())
            try:
                with tracer:
                    _step(module, real, optimizer, tracer)
                    tracer.begin()
                    _step(module, real, optimizer, tracer)
            except AxisplanError:
                raise
            except Exception as error:
                where = tracer.failed.replace(".default", "")
                raise InputError("--module", text, f"operation {where} could not be traced: {one_line(error)[:160]}") from None
    record = tracer.record
    return {
        "rank": rank, "module": text, "parallel": applied, "not_applied": not_applied(layout), "parameters": whole,
        "peak_bytes": record.peak_bytes, "peak_at": record.peak_at, "bytes": dict(record.at_peak), "most_bytes": most_bytes(record),
        "flops": {**record.flops, "total": sum(record.flops.values())}, "collectives": collectives(record.calls),
    }  # fmt: skip


def not_applied(layout: Layout) -> list[str]:
    """What the plan asks for and a module of one's own does not get: it runs one microbatch of given inputs in one piece."""
    names = [name for name in ("pp", "cp", "ep", "etp") if getattr(layout, name) > 1]
    names += ["zero"] if layout.zero < 3 and layout.dp * layout.cp > 1 else []
    names += ["recompute"] if layout.recompute != "none" else []
    return [f"{name}={getattr(layout, name)}" for name in names]


def parallelise(module: nn.Module, mesh: Mesh, text: str) -> list[str]:
    """Apply what the plan asks for and the module has; the axes applied."""
    layout, applied = mesh.layout, []
    if layout.tp > 1:
        tensor_plan = getattr(module, "parallel_plan", None)
        if tensor_plan is None:
            raise InputError("--module", text, f"the plan has tp={layout.tp}, the module no parallel_plan for parallelize_module")
        parallelize_module(module, mesh.dense["tp"], tensor_plan)
        applied.append("tp")
    if layout.zero == 3 and layout.dp_shard * layout.cp > 1:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shards = sharding(mesh)
        for part in [child for m in module.modules() if isinstance(m, nn.ModuleList) for child in m] + [module]:
            fully_shard(part, mesh=shards, mp_policy=policy)
        applied.append("dp_shard")
    return applied


def sharding(mesh: Mesh) -> DeviceMesh:
    """The mesh to shard over, of the same root as that of tensor parallelism: DTensors over both cannot have two roots."""
    real = [name for name in ("dp_shard", "ring", "ulysses") if mesh.axis(name).size > 1]
    name = real[0] if len(real) == 1 else "dp_shard_cp"
    return mesh.dense["dp_replicate", name] if mesh.layout.dp_replicate > 1 else mesh.dense[name]


def _step(module: nn.Module, inputs: tuple[Any, ...], optimizer: torch.optim.Optimizer, tracer: Tracer) -> None:
    for parameter in module.parameters():
        tracer.see(parameter, "parameters")
    for held in (*module.buffers(), *(x for x in inputs if isinstance(x, Tensor))):
        tracer.see(held, "buffers")
    for value in (v for state in optimizer.state.values() for v in state.values()):
        tracer.see(value, "optimizer")
    tracer.enter_phase("forward", "activations")
    out = module(*inputs)
    loss = out if isinstance(out, Tensor) else next(iter(out.values())) if isinstance(out, dict) else out[0]
    tracer.enter_phase("backward", "temporary")
    loss.sum().backward()
    del out, loss
    for parameter in module.parameters():
        if parameter.grad is not None:
            tracer.see(parameter.grad, "gradients")
    tracer.enter_phase("optimizer", "temporary")
    optimizer.step()
    for value in (v for state in optimizer.state.values() for v in state.values()):
        tracer.see(value, "optimizer")
    optimizer.zero_grad()
    tracer.enter_phase("end", "buffers")
