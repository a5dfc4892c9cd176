"""What a block of a layer is written with: ``Builder`` collects its operations forward and backward, the tensors it keeps, the
collectives around it, and the adapters beside its linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from cost_models.arrays import always_one, maximum, nowhere, where
from cost_models.layer_cost import LOW_PRECISION, LayerCost, Local, Saved, axis_ranks
from profiles.operations import Attend, Collective, GroupedMatmul, Matmul, Number, Operation, Pointwise

Entry = Literal["norm", "input", "shared", "again"]
"""How a block starts: with a norm; with the residual stream; on what another block of its layer normed and gathered; or on what
another block normed, gathering it again."""

PART = {
    **dict.fromkeys(("qkv", "q", "k", "v", "projection", "q_down", "q_up", "kv_down", "kv_up"), "attention"),
    **dict.fromkeys(("in_proj", "x_proj", "dt_proj", "step_proj", "out_proj"), "state_space"),
    "head": "head", "head_projection": "head", "embedding": "embedding", "embedding_projection": "embedding", "router": "router",
    "mtp_projection": "mtp",
}  # fmt: skip
"""The part of the model (``states.Weight.part``) whose weights a linear layer multiplies with; else the name's first word."""
BESIDE = {"qkv": 3}
"""Weights that one product multiplies with, each with an adapter of its own (1 where not named)."""
NEVER_ADAPTED = ("router", "shared_gate")
OTHERWISE_KEPT = ("attention_output",)
"""Inputs of linear layers that backward needs even where the layer's weight is frozen."""


class Gradients(NamedTuple):
    """Bytes of a block's own gradients at its backward's fullest: ``most`` where each weight's is taken away at once, ``begun``,
    ``waiting`` and ``left`` as in ``LayerCost``."""

    most: Number
    begun: Number
    waiting: Number
    left: Number


@dataclass
class Builder:
    """Collects a block's operations. Blocks add in forward order; backward lists are reversed at the end."""

    local: Local
    module: str
    forward: list[Operation] = field(default_factory=list)
    _backward_input: list[Operation] = field(default_factory=list)
    _backward_weight: list[Operation] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)

    def done(
        self,
        input_bytes: Number = 0,
        transient: Number = 0,
        begun: Number | None = None,
        waiting: Number | None = None,
        left: Number = 0,
    ) -> LayerCost:
        return LayerCost(
            tuple(self.forward),
            tuple(reversed(self._backward_input)),
            tuple(reversed(self._backward_weight)),
            tuple(s for s in self.saved if not s.held_for_weight or s.name in OTHERWISE_KEPT or self._learns(s.name)),
            input_bytes,
            transient,
            transient if begun is None else begun,
            transient if waiting is None else waiting,
            left,
        )

    def _learns(self, name: str) -> bool:
        """Whether weights that multiply with the tensor called ``name`` have gradients, their adapters' included."""
        parts: tuple[str, ...] = (self.module,)
        if self.module == "moe":
            parts = (
                ("experts",) if name.startswith("experts") else ("shared",) if name.startswith("shared") else ("router", "shared")
            )
        return any(self.local.job.trains(part) or self.local.job.adapts(part) for part in parts)

    @property
    def weights(self) -> Number:
        """Elements of the weights whose gradients the block makes."""
        total: Number = 0
        for op in self._backward_weight:
            if isinstance(op, Matmul):
                total = total + op.m * op.n
            elif isinstance(op, GroupedMatmul):
                total = total + op.groups * op.n * op.k
        return total

    def keep(self, name: str, bytes: Number, *, weight: bool = False, module: str | None = None) -> None:
        self.saved.append(Saved(name, bytes, module or self.module, weight))

    def pointwise(self, name: str, forward: Number, backward: Number, kernels: int = 1) -> None:
        """Memory-bound work of ``forward`` bytes, and of ``backward`` bytes in the input-gradient pass."""
        self.forward.append(Pointwise(forward, kernels, name))
        self._backward_input.append(Pointwise(backward, kernels, name))

    def weight_pass(self, name: str, bytes: Number) -> None:
        """Memory-bound work of the weight-gradient pass, where the weight is trained."""
        if self.local.job.trains(part_of(name)):
            self._backward_weight.append(Pointwise(bytes, 1, name))

    def weight_product(self, op: Operation) -> None:
        """A product of the weight-gradient pass."""
        self._backward_weight.append(op)

    def attend(self, op: Attend) -> None:
        """Fused attention, forward and backward (which recomputes the scores: 2.5 times the FLOPs)."""
        self.forward.append(op)
        self._backward_input.append(replace(op, backward=True))

    def only_forward(self, *ops: Operation) -> None:
        self.forward += ops

    def only_backward_input(self, *ops: Operation) -> None:
        """``ops`` in the order they run."""
        self._backward_input += reversed(ops)

    def linear(self, name: str, m: Number, n: Number, k: Number, *, pieces: int = 1, dtype: str | None = None) -> None:
        """y[m, n] = x[m, k] w[k, n], its two backward products (one where the weight is frozen), what a low precision adds, and the
        adapters beside it. ``pieces``: separate products of n / pieces columns each."""
        kind = dtype or self.local.linear_dtype
        execution = self.local.execution
        if kind in LOW_PRECISION:
            self.forward.append(Pointwise(execution.quantise_bytes * m * k, 1, f"{name}.quantise"))
            self._backward_input.append(Pointwise(execution.quantise_bytes * m * n, 1, f"{name}.quantise"))
        trained = self.local.job.trains(part_of(name))
        for _ in range(pieces):
            part = n // pieces
            self.forward.append(Matmul(m, part, k, kind, 1, name))
            self._backward_input.append(Matmul(m, k, part, kind, 1, name))
            if trained:
                if execution.accumulate_bytes:
                    self._backward_weight.append(Pointwise(execution.accumulate_bytes * part * k, 1, f"{name}.accumulate"))
                self._backward_weight.append(Matmul(k, part, m, kind, 1, name, weight_gradient=True))
        if self.local.job.adapts(part_of(name)) and name not in NEVER_ADAPTED:
            rank, dtype = self.local.job.lora_rank, self.local.dtype
            down = rank * max(BESIDE.get(name, 1), pieces)
            first, second = Matmul(m, down, k, dtype, 1, f"{name}.adapter"), Matmul(m, n, rank, dtype, 1, f"{name}.adapter")
            back = Matmul(m, rank, n, dtype, 1, first.name), Matmul(m, k, down, dtype, 1, first.name)
            weights = (Matmul(k, down, m, dtype, 1, first.name, weight_gradient=True),
                       Matmul(rank, n, m, dtype, 1, first.name, weight_gradient=True))  # fmt: skip
            self._adapter(name, (first, second), back, weights, m * n, m * k, m * down)

    def grouped(self, name: str, tokens: Number, n: Number, k: Number, groups: Number, *, pieces: int = 1) -> None:
        """Experts' linear layer: ``tokens`` rows shared among ``groups`` weights of k x n, each with its adapter (``pieces``: one for
        each n / pieces columns)."""
        kind = self.local.linear_dtype
        execution = self.local.execution
        if kind in LOW_PRECISION:
            self.forward.append(Pointwise(execution.quantise_bytes * tokens * k, 1, f"{name}.quantise"))
            self._backward_input.append(Pointwise(execution.quantise_bytes * tokens * n, 1, f"{name}.quantise"))
        self.forward.append(GroupedMatmul(tokens, n, k, groups, kind, name))
        self._backward_input.append(GroupedMatmul(tokens, k, n, groups, kind, name))
        if self.local.job.trains(part_of(name)):
            if execution.accumulate_bytes:
                self._backward_weight.append(Pointwise(execution.accumulate_bytes * groups * n * k, 1, f"{name}.accumulate"))
            self._backward_weight.append(GroupedMatmul(tokens, n, k, groups, kind, name, weight_gradient=True))
        if self.local.job.adapts(part_of(name)):
            rank, of = self.local.job.lora_rank, f"{name}.adapter"
            down = rank * pieces
            sides = ((down, k), (n, rank))
            forward = [GroupedMatmul(tokens, out, inside, groups, self.local.dtype, of) for out, inside in sides]
            back = [GroupedMatmul(tokens, inside, out, groups, self.local.dtype, of) for out, inside in reversed(sides)]
            weights = [GroupedMatmul(tokens, o, i, groups, self.local.dtype, of, weight_gradient=True) for o, i in sides]
            self._adapter(name, forward, back, weights, tokens * n, tokens * k, tokens * down)

    def _adapter(
        self, name: str, forward: Sequence[Operation], back: Sequence[Operation], weights: Sequence[Operation], output: Number,
        entering: Number, inner: Number,
    ) -> None:  # fmt: skip
        """LoRA (arXiv:2106.09685, section 4.1) beside a frozen linear layer: y += B (A x). Its output of ``output`` elements is added
        to the layer's, and so is the gradient of their ``entering`` common input; its ``inner`` activation is kept. TP adds no
        collective: the half that is split is split as the layer is, and partial sums are added before the layer's own reduction."""
        size, of = self.local.bytes, f"{name}.adapter"
        self.only_forward(*forward, Pointwise(3 * output * size, 1, of))
        self.only_backward_input(*back, Pointwise(3 * entering * size, 1, of))
        self._backward_weight += reversed(weights)
        self.keep(of, inner * size, weight=True)

    def collective(self, phase: str, kind: str, axis: str, bytes: Number, name: str, count: Number = 1) -> None:
        """A collective in ``phase`` (forward, backward_input, backward_weight), ``count`` times in a row; left out where it moves
        nothing or its axis has one rank everywhere."""
        ranks = axis_ranks(self.local.degrees, axis)
        if nowhere(bytes) or nowhere(count) or always_one(ranks):
            return
        bytes = where(ranks > 1, bytes, 0)
        target = {"forward": self.forward, "backward_input": self._backward_input, "backward_weight": self._backward_weight}[phase]
        target.append(Collective(kind, axis, bytes, name, count))

    def enter_tensor_parallel(self, name: str, elements: Number, *, regather: bool = True) -> None:
        """Into a TP region with an input of ``elements`` (full, over the TP group): all-gather under SP, whose gradient is a
        reduce-scatter; without SP the input is whole already and its gradient is an all-reduce. Under SP the weight gradient
        needs the gathered input again unless the Execution keeps it. Source: Korthikanti et al. 2022, section 4.2.2."""
        size = elements * self.local.bytes
        split, whole = self._by_sequence_parallel(size)
        self.collective("forward", "all_gather", "tp", split, name)
        self.collective("backward_input", "reduce_scatter", "tp", split, name)
        self.collective("backward_input", "all_reduce", "tp", whole, name)
        if regather and not self.local.execution.keeps_gathered_input and self._learns(name):
            self.collective("backward_weight", "all_gather", "tp", split, name)

    def leave_tensor_parallel(self, name: str, elements: Number, *, reached: bool = True) -> None:
        """Out of a TP region with partial sums of ``elements``: reduce-scatter under SP (gradient: all-gather), all-reduce without
        (gradient: nothing); ``reached``: its gradient is wanted. Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022,
        section 4.2.2."""
        split, whole = self._by_sequence_parallel(elements * self.local.bytes)
        self.collective("forward", "reduce_scatter", "tp", split, name)
        self.collective("forward", "all_reduce", "tp", whole, name)
        if reached:
            self.collective("backward_input", "all_gather", "tp", split, name)

    def _by_sequence_parallel(self, size: Number) -> tuple[Number, Number]:
        """``size`` where sequence parallelism is on, and ``size`` where it is off."""
        return where(self.local.degrees.sp, size, 0), where(self.local.degrees.sp, 0, size)

    def norm(self, name: str, tokens: Number, width: Number, *, output: bool, gathered: Number | None = None) -> None:
        """A normalisation of ``width`` over ``tokens`` rows: its work, the input it keeps, and (``output``) its output as the kept
        input of the linear layer behind it; ``gathered`` = rows of that input where the gathered one is kept. What is compiled is
        the layer; the final norm stays eager. An eager RMSNorm is a chain of kernels in fp32 (transformers, TorchTitan of 2024); a
        LayerNorm is one kernel (``torch.nn.functional.layer_norm``), which keeps its 16-bit input."""
        local, execution = self.local, self.local.execution
        size = tokens * width
        self.pointwise(name, 2 * size * local.bytes, 3 * size * local.bytes)
        eager = execution.elementwise == "eager" or (execution.elementwise == "compiled" and name == "final_norm")
        chain = eager and local.model.norm != "layer"
        self.keep(f"{name}_input", size * (4 if chain else local.bytes), module="norm")
        if chain:
            self.keep(f"{name}_normalised", size * local.bytes, module="norm")
        if execution.statistics:
            self.keep(f"{name}_statistics", 4 * tokens * (2 if local.model.norm == "layer" else 1), module="norm")
        if output and (execution.elementwise != "compiled" or eager or gathered is not None):
            rows = tokens if gathered is None else gathered
            self.keep(f"{name}_output", rows * width * local.input_bytes, weight=True, module="norm_output")

    def entry(self, block: str, entry: Entry, *, parallel: bool = True) -> None:
        """Start of a block: a norm, or the residual stream itself, as the kept input of its linear layers, and the way into the TP
        region (``parallel``)."""
        local, width = self.local, self.local.model.hidden
        if entry == "shared":
            return
        gathered = local.tokens if parallel and local.execution.keeps_gathered_input else None
        if entry == "norm":
            self.norm(f"{block}_norm", local.split_tokens, width, output=True, gathered=gathered)
        elif entry == "again":
            if gathered is not None:
                self.keep(f"{block}_input", where(local.sp > 1, gathered, 0) * width * local.input_bytes, weight=True)
        else:
            self.linear_input(f"{block}_input", (local.split_tokens if gathered is None else gathered) * width, kept=False)
        if parallel:
            self.enter_tensor_parallel(f"{block}_in", local.tokens * width)

    def backward_peak(
        self,
        entering: tuple[Number, Number],
        core: Number,
        leaving: tuple[Number, Number],
        *,
        products: int,
        free: Number,
        done: Number = 0,
    ) -> Gradients:
        """The most bytes of gradients alive in a block's backward, beyond what it saved, the residual stream's apart.

        Three moments: the last linear layer's (``leaving``: bytes of its input, elements of its weight), with its output's gradient
        gathered under SP; the ``core``'s; the first linear layers' (``entering``: bytes of their outputs, elements of the largest
        weight) with the gradients of their input from up to two of ``products``, when ``free`` bytes of the saved are gone, and with the first
        product ``done`` bytes of those outputs.
        """
        local = self.local
        whole = local.tokens * local.model.hidden * local.bytes
        gathered = where(local.sp > 1, whole, 0)
        last = gathered + leaving[0] + self.weight_gradient(leaving[1])
        before = self.weight_gradient(leaving[1])
        first = entering[0] - free + where(products > 1, maximum(whole, 2 * whole - done), products * whole)
        every = self.weight_gradient(self.weights)
        end = every + min(max(products, 1), 2) * whole - sum(s.bytes for s in self.saved)
        waiting = maximum(maximum(last, core + before), maximum(first + (every if products else before), end))
        begun = maximum(core, first + self.weight_gradient(entering[1]))
        return Gradients(maximum(last, begun), maximum(begun, last - gathered), waiting, every)

    def gradients(self, most: Number) -> Gradients:
        """A block of which only the fullest moment is known: its weight gradients may all exist then."""
        every = self.weight_gradient(self.weights)
        return Gradients(most, most, most + every, every)

    def weight_gradient(self, elements: Number) -> Number:
        """Bytes of a fresh weight gradient; none where the product accumulates (or has its lasting dummy)."""
        execution = self.local.execution
        none = execution.dummy_weight_gradients or not self.local.job.trains("experts" if self.module == "moe" else self.module)
        each = 0.0 if none else execution.weight_gradient_bytes
        return each * self.local.bytes / 2 * elements

    def residual(self, block: str, *, post_norm: bool, gradients: Gradients, reduce: bool = True) -> LayerCost:
        """End of a block: out of the TP region (``reduce``), an optional norm behind the block, dropout, the residual addition.

        ``gradients``: the block's own; the residual stream's is added."""
        local = self.local
        size = local.split_tokens * local.model.hidden
        if reduce:
            self.leave_tensor_parallel(f"{block}_out", local.tokens * local.model.hidden)
        if post_norm:
            self.norm(f"{block}_post_norm", local.split_tokens, local.model.hidden, output=False)
        dropout = local.execution.hidden_dropout
        if dropout:
            self.keep(f"{block}_dropout_mask", size)
        traffic = size * (3 * local.bytes + (4 if dropout else 0))
        self.pointwise(f"{block}_residual", traffic, traffic)
        stream = size * local.bytes
        most, begun, waiting = (size + stream for size in (gradients.most, gradients.begun, gradients.waiting))
        return self.done(stream, most, begun, waiting, gradients.left)

    def linear_input(self, name: str, elements: Number, *, kept: bool) -> None:
        """The kept input of a linear layer: nothing new where a 16-bit tensor of the same values is ``kept`` already and serves."""
        if not kept:
            self.keep(name, elements * self.local.input_bytes, weight=True)
        elif self.local.low_precision and self.local.execution.fp8_input_bytes != self.local.bytes:
            self.keep(f"{name}_quantised", elements * self.local.input_bytes, weight=True)


def part_of(name: str) -> str:
    """The part of the model whose weights the linear layer ``name`` multiplies with (``PART``)."""
    stem = name.split(".")[0]
    return PART.get(stem) or stem.split("_")[0]
