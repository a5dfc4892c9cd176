"""Bytes of parameters, gradients and optimizer state on one rank: ZeRO stages 0-3, precisions, optimizers, frozen weights, LoRA.

Source of the sharding: ZeRO (arXiv:1910.02054). Stage 1 shards the optimizer's state (master copy included), 2 gradients as well,
3 parameters as well; dense weights over dp_shard x cp, experts over edp_shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cost_models.arrays import maximum
from cost_models.execution import Execution
from cost_models.job import Job
from cost_models.states import Holding, Split, Weight
from profiles.errors import InputError
from profiles.operations import Number

ADAM_8BIT_MOMENT = 1 + 4 / 256
"""Bytes of an 8-bit moment: one, and an fp32 scale for each block of 256 (bitsandbytes, block-wise optimizers)."""
LOW_PRECISION_BYTES = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}
"""Bytes of an element: MXFP8 has one byte of scale for 32 elements, NVFP4 one for 16 (OCP Microscaling Formats 1.0; NVIDIA's NVFP4)."""


class Bytes(NamedTuple):
    """Per parameter, unsharded: ``weight`` (working copy; ``linear_weight`` for linear layers), ``gradient``, ``master`` copy,
    ``moments`` (``matrix_moments`` for matrices under Muon), ``extra`` gradient copy of the optimizer."""

    weight: float
    linear_weight: float
    gradient: float
    master: float
    moments: float
    matrix_moments: float
    extra: float

    @property
    def optimizer(self) -> float:
        return self.master + self.moments + self.extra


def bytes_of(execution: Execution, precision: str, optimizer: str, zero: int = 0) -> Bytes:
    """The bytes per parameter that ``execution`` keeps under a precision and an optimizer (adamw, adamw8bit, muon, sgd).

    ZeRO-3 updates group by group, so that a gradient and the optimizer's copy of it are not both whole: the larger counts.
    """
    full = precision == "fp32"
    weight = 4.0 if full else execution.parameter_bytes
    linear = weight
    if precision in LOW_PRECISION_BYTES:
        stored = execution.fp8_parameters and execution.parameter_bytes < 4 and precision != "nvfp4"
        linear = LOW_PRECISION_BYTES[precision] * (execution.fp8_parameter_copies if stored else execution.fp8_weight_cache)
        linear += 0.0 if stored else weight
    moment = 4.0 if full else execution.moment_bytes
    known = {"adamw": 2 * moment, "adamw8bit": 2 * ADAM_8BIT_MOMENT, "muon": 2 * moment, "sgd": moment}
    if optimizer not in known:
        raise InputError("optimizer", optimizer, f"is one of {', '.join(known)}", "adamw")
    moments = known[optimizer]
    gradient = 4.0 if full else execution.gradient_bytes
    extra = 0.0 if full else execution.optimizer_gradient_bytes
    if zero == 3:
        gradient, extra = max(gradient, extra), 0.0
    master = 0.0 if full else execution.master_bytes
    if zero == 3 and execution.sharded_masters and not full:
        weight = linear = 4.0
        master = 0.0
    return Bytes(weight, linear, gradient, master, moments, moment if optimizer == "muon" else moments, extra)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes on one rank. ``host``: what lives in the node's memory instead (offloaded optimizer)."""

    parameters: Number = 0
    gradients: Number = 0
    optimizer: Number = 0
    host: Number = 0

    def __add__(self, other: States) -> States:
        return States(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.host + other.host,
        )

    @property
    def total(self) -> Number:
        return self.parameters + self.gradients + self.optimizer


def shards(degrees: Any) -> tuple[Number, Number]:
    """Ranks over which ZeRO shards (dense, expert) weights."""
    return degrees.dp_shard * degrees.ring * degrees.ulysses, degrees.edp_shard


def states(job: Job, degrees: Any, held: Holding, trained: Holding | None = None) -> States:
    """Parameters, gradients and optimizer state of ``held`` weights; ``trained``: those that have gradients (default: all).

    With 16-bit parameters ZeRO-2 keeps them whole; with fp32 storage (FSDP) it keeps the fp32 shard and the gathered 16-bit copy
    from forward to backward. Muon needs whole matrices, so its momentum is dealt out matrix by matrix: a rank holds at least the
    largest one.
    """
    execution, zero = job.execution, degrees.zero
    each = bytes_of(execution, job.precision, job.optimizer, zero)
    dense_shards, expert_shards = shards(degrees)
    train = held if trained is None else trained
    offloaded = "optimizer" in degrees.offload
    as_masters = zero == 3 and execution.sharded_masters and job.precision != "fp32"
    frozen_bytes = execution.parameter_bytes if as_masters else None  # what is not trained needs no master

    def part(count: Number, linear: Number, trained_count: Number, trained_linear: Number, ways: Number) -> States:
        weights = each.weight * (count - linear) + each.linear_weight * linear
        if frozen_bytes is not None:
            weights = each.weight * trained_count + frozen_bytes * (count - trained_count)
        if zero == 3:
            parameters = weights / ways
        elif zero == 2 and each.weight == 4.0 and job.precision != "fp32":
            parameters = weights / ways + execution.gather_bytes * count
        else:
            parameters = weights
        gradients = each.gradient * trained_count / (ways if zero >= 2 else 1)
        divide = ways if zero >= 1 else 1
        vectors = trained_count - trained_linear
        moments = each.moments * vectors / divide + each.matrix_moments * trained_linear / divide
        if job.optimizer == "muon":
            whole = maximum(trained_linear / divide, train.largest * (trained_linear > 0))
            moments = each.moments * vectors / divide + each.matrix_moments * whole
        optimizer = (each.master + each.extra) * trained_count / divide + moments
        if not offloaded:
            return States(parameters, gradients, optimizer)
        stays = 0.0 if execution.offload_takes_gradients and zero >= 2 else gradients
        return States(parameters, stays, 0.0, optimizer + (gradients - stays))

    return part(held.dense, held.dense_linear, train.dense, train.dense_linear, dense_shards) + part(
        held.expert, held.expert_linear, train.expert, train.expert_linear, expert_shards
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table that ``axisplan explain --bytes-per-parameter`` prints."""

    execution: str
    precision: str
    optimizer: str
    zero: int
    parameters: str
    gradients: str
    optimizer_state: str
    total: float
    """Bytes per parameter at ``shards`` ranks."""


def bytes_per_parameter(
    execution: Execution, precision: str, optimizer: str, zero: int, shards: int, offload: tuple[str, ...] = ()
) -> float:
    """Device bytes per parameter, states only, when ZeRO shards over ``shards`` ranks. ``offload``: ``optimizer``, ``parameters``.

    Examples: DeepSpeed ZeRO-2 2 + 18/N, ZeRO-3 18/N (with the gathered layer apart); Megatron's distributed optimizer 6 + 12/N.
    """
    each = bytes_of(execution, precision, optimizer, zero)
    weight = each.linear_weight
    if zero == 3:
        parameters = weight / shards
    elif zero == 2 and weight == 4.0 and precision != "fp32":
        parameters = weight / shards + execution.gather_bytes
    else:
        parameters = weight
    gradients = each.gradient / (shards if zero >= 2 else 1)
    state = (each.master + each.extra + each.matrix_moments) / (shards if zero >= 1 else 1)
    if "parameters" in offload:
        parameters = 0.0
    if "optimizer" in offload:
        state = 0.0
        gradients = 0.0 if execution.offload_takes_gradients and zero >= 2 else gradients
    return parameters + gradients + state


def table(execution: Execution, precisions: tuple[str, ...], optimizers: tuple[str, ...], ranks: int) -> list[Row]:
    """Bytes per parameter by precision, optimizer and ZeRO stage, ``ranks`` of them sharing what is sharded."""
    rows = []
    for precision in precisions:
        for optimizer in optimizers:
            for zero in (0, 1, 2, 3):
                each = bytes_of(execution, precision, optimizer, zero)
                state = each.master + each.extra + each.matrix_moments
                whole, split = "", f"/{ranks}"
                rows.append(
                    Row(
                        execution.name, precision, optimizer, zero,
                        f"{each.linear_weight:g}{split if zero == 3 else whole}",
                        f"{each.gradient:g}{split if zero >= 2 else whole}",
                        f"{state:g}{split if zero >= 1 else whole}",
                        bytes_per_parameter(execution, precision, optimizer, zero, ranks),
                    )
                )  # fmt: skip
    return rows


def adapter_weights(weights: tuple[Weight, ...], rank: int, *, fused_gate_up: bool = True) -> tuple[Weight, ...]:
    """LoRA (arXiv:2106.09685): beside each linear layer A (rank x inputs) and B (outputs x rank); the one on the split side of the
    layer is split with it. Gate and up projection have a pair each where the framework does not fuse them."""
    out = []
    apart = [(w._replace(rows=w.rows // 2),) * 2 if w.gated and not fused_gate_up else (w,) for w in weights if w.linear]
    for w in (half for halves in apart for half in halves):
        expert = w.split == "expert"
        by_input = not expert and w.by_input
        a_split: Split = w.split if by_input or expert else "none"
        b_split: Split = "none" if by_input else w.split
        out.append(Weight(f"{w.name}.a", w.part, rank, w.columns, w.copies, a_split, linear=True))
        out.append(Weight(f"{w.name}.b", w.part, w.rows, rank, w.copies, b_split, w.whole, linear=True))
    return tuple(out)
