"""A layer's operations and kept tensors on one rank (``LayerCost``), and a rank's share of a microbatch (``Local``).

Degrees may be a ``Layout`` or anything with the same attributes, numpy arrays included (``Degrees``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from cost_models.arrays import ceil_div, maximum, where
from cost_models.execution import Execution
from cost_models.job import Job
from profiles.model import ModelSpec
from profiles.operations import GroupedMatmul, Matmul, Number, Operation

LOSS = ("logits", "loss_statistics")
"""Kept tensors of the loss."""
LOW_PRECISION = ("fp8", "mxfp8", "nvfp4")
"""Precisions whose linear layers run in fewer than 16 bits; attention, router and head stay in bf16."""


class Degrees(Protocol):
    """The degrees a layer's cost depends on: a ``Layout``, or arrays of one shape under the same names."""

    @property
    def tp(self) -> Number: ...
    @property
    def sp(self) -> Any: ...
    @property
    def ring(self) -> Number: ...
    @property
    def ulysses(self) -> Number: ...
    @property
    def cp_kind(self) -> str: ...
    @property
    def ep(self) -> Number: ...
    @property
    def etp(self) -> Number: ...
    @property
    def micro_batch(self) -> Number: ...
    @property
    def dispatcher(self) -> str: ...
    @property
    def capacity(self) -> Number: ...


class Saved(NamedTuple):
    """A tensor kept from a layer's forward to its backward: its bytes on one rank for one microbatch, and the block it belongs to
    (``norm``, ``attention``, ``mlp``, ``moe``, ``head``, ...). ``held_for_weight``: needed by the weight-gradient pass; the rest
    is free once the input-gradient pass is done."""

    name: str
    bytes: Number
    module: str
    held_for_weight: bool = False


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A layer (or embedding, or head) on one rank for one microbatch: operations in the order they run, and what is kept.

    ``transient`` is the most bytes alive in its backward beyond ``saved``, all of which exists when the backward begins.
    """

    forward: tuple[Operation, ...] = ()
    backward_input: tuple[Operation, ...] = ()
    backward_weight: tuple[Operation, ...] = ()
    saved: tuple[Saved, ...] = ()
    input_bytes: Number = 0
    """The layer's own input, which full recompute keeps instead of everything in ``saved``."""
    transient: Number = 0
    begun: Number = 0
    """The same from the layer's first complete weight gradient on (when ZeRO-2 begins a bucket)."""
    waiting: Number = 0
    """The same where the layer's weight gradients wait for each other (``Execution.reduces_by_unit``)."""
    left: Number = 0
    """What the backward of a block leaves beside the blocks before it, then: its weight gradients; for experts, which are reduced
    apart, the reduction's input less the parameters let go."""

    @property
    def saved_bytes(self) -> Number:
        return sum(s.bytes for s in self.saved)

    @property
    def weight_pass_bytes(self) -> Number:
        """What a schedule that runs the weight gradients apart holds between the two passes: their inputs, and the gradients of
        the linear layers' outputs (2 bytes an element)."""
        return sum(s.bytes for s in self.saved if s.held_for_weight) + self.output_gradient_bytes

    @property
    def output_gradient_bytes(self) -> Number:
        """Gradients of the linear layers' outputs, 2 bytes an element: what their weight gradients need beside their inputs."""
        total: Number = 0
        for op in self.backward_weight:
            if isinstance(op, Matmul):
                total = total + 2 * op.k * op.n
            elif isinstance(op, GroupedMatmul):
                total = total + 2 * op.tokens * op.n
        return total

    @property
    def retained_bytes(self) -> Number:
        """The same where the pass between keeps the whole graph: everything saved but the loss's (it lies above all weights), and
        the gradients of norms' outputs as well."""
        norms = sum(s.bytes for s in self.saved if s.name.endswith("_norm_input"))
        return sum(s.bytes for s in self.saved if s.name not in LOSS) + self.output_gradient_bytes + norms

    def operations(self) -> tuple[Operation, ...]:
        return self.forward + self.backward_input + self.backward_weight

    def __add__(self, other: LayerCost) -> LayerCost:
        """One after the other (``other`` runs later in forward, earlier in backward, and is free when this one's begins)."""
        return LayerCost(
            self.forward + other.forward,
            other.backward_input + self.backward_input,
            other.backward_weight + self.backward_weight,
            self.saved + other.saved,
            self.input_bytes,
            maximum(self.transient - other.saved_bytes, other.transient),
            maximum(self.transient - other.saved_bytes, other.begun),
            maximum(self.waiting - other.saved_bytes + other.left, other.waiting),
            self.left + other.left,
        )


@dataclass(frozen=True)
class Local:
    """One rank's share of one microbatch of ``job`` under ``degrees``: token counts, element sizes, dtypes."""

    job: Job
    degrees: Degrees

    @property
    def model(self) -> ModelSpec:
        return self.job.model

    @property
    def execution(self) -> Execution:
        return self.job.execution

    @cached_property
    def cp(self) -> Number:
        return self.degrees.ring * self.degrees.ulysses

    @cached_property
    def tokens(self) -> Number:
        """Tokens of a microbatch on this rank, all of its TP group's together."""
        return self.degrees.micro_batch * self.job.seq_len // self.cp

    @cached_property
    def sp(self) -> Number:
        """Ways in which the norm and residual regions are split: TP under sequence parallelism, else 1."""
        return where(self.degrees.sp, self.degrees.tp, 1)

    @cached_property
    def split_tokens(self) -> Number:
        """Tokens in norm and residual regions."""
        return ceil_div(self.tokens, self.sp)

    @cached_property
    def bytes(self) -> int:
        """Bytes of an activation element."""
        return 4 if self.job.precision == "fp32" else 2

    @cached_property
    def dtype(self) -> str:
        """Dtype of activations, attention, router and head."""
        return "bf16" if self.job.precision in LOW_PRECISION else self.job.precision

    @property
    def linear_dtype(self) -> str:
        """Dtype of the linear layers' matrix products."""
        return self.job.precision

    @property
    def low_precision(self) -> bool:
        return self.job.precision in LOW_PRECISION

    @property
    def input_bytes(self) -> float:
        """Bytes an element of a linear layer's kept input."""
        return self.execution.fp8_input_bytes if self.low_precision else float(self.bytes)


def axis_ranks(degrees: Any, axis: str) -> Number:
    """Ranks of the group a collective's ``axis`` names: tp, ring, ulysses (the two parts of cp), cp, ep, etp, tp_ep, pp, dp, edp,
    dp_shard, dp_replicate."""
    if axis == "cp":
        return degrees.ring * degrees.ulysses
    if axis == "etp_ep":
        return degrees.etp * degrees.ep
    return getattr(degrees, axis)
