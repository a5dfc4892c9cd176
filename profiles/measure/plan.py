"""Which operations to time, in an order of which every prefix is a sensible experiment.

Matrix products: sizes spread evenly over the logarithms of (m, n, k) by an additive recurrence (the R sequence of Roberts, 2018:
multiples of the inverse of the generalised golden ratio), interleaved with the shapes that training small and large models really
has, and with products of a second such sequence (sides >= 256) that are held out of the fit to judge it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

from profiles.measure.samples import Sample
from profiles.operations import Attend, Matmul, Pointwise

GOLDEN_3 = 1.2207440846057596
"""Root of x^4 = x + 1: its inverse powers spread points evenly in three dimensions."""
LARGE = 256
"""Products with every side at least this judge the fit: the ones training is made of."""
FORMS = ("forward", "input_gradient", "weight_gradient")
MODELS = ((256, 768), (512, 1408), (768, 2048), (1024, 2816), (2048, 5632), (4096, 14336), (8192, 28672))
"""(hidden, MLP width) of Llama-style models, small to large."""

LAYER_MIX = {"add": 15.0, "swiglu": 22.0, "norm": 10.0}
"""Of a Llama-style layer's pointwise bytes, forward and backward, the part of each form (two residual additions and the rotary
embedding; a gate 2.75 times as wide as the hidden size; two norms)."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is worth timing on a device: smallest and largest side of a product, most FLOPs and bytes of tensors of one call."""

    smallest: int
    largest: int
    flops: float
    bytes: float


def matmuls(dtype: str, bounds: Bounds, tokens: Sequence[int]) -> Iterator[Sample]:
    """Products to time: training shapes and spread ones in turn, after each second pair one that is held out of the fit."""
    spread = spread_products(dtype, bounds)
    judges = spread_products(dtype, replace(bounds, smallest=max(bounds.smallest, LARGE)), offset=0.25, held_out=True)
    for place, trained in enumerate(chain(training_products(dtype, bounds, tokens), repeat(None, 400))):
        yield from (s for s in (trained, next(spread, None), next(judges, None) if place % 2 else None) if s is not None)


def training_products(dtype: str, bounds: Bounds, tokens: Sequence[int]) -> Iterator[Sample]:
    count = 0
    for hidden, width in MODELS:
        for rows in tokens:
            for out, into in ((hidden, hidden), (width, hidden), (hidden, width)):
                form = FORMS[count % 3]
                sides = {"forward": (rows, out, into), "input_gradient": (rows, into, out), "weight_gradient": (out, into, rows)}[
                    form
                ]
                sample = product(dtype, *sides, form)
                if _within(sample, bounds):
                    count += 1
                    yield sample


def spread_products(dtype: str, bounds: Bounds, *, offset: float = 0.5, held_out: bool = False) -> Iterator[Sample]:
    """Products spread evenly over the logarithms of their sides, within bounds, in turn of each form."""
    low, span = math.log2(bounds.smallest), math.log2(bounds.largest / bounds.smallest)
    kept = 0
    for index in range(1, 20000):
        m, n, k = (_round(2 ** (low + span * ((offset + index / GOLDEN_3**power) % 1)), dtype) for power in (1, 2, 3))
        sample = product(dtype, m, n, k, FORMS[kept % 3], held_out=held_out)
        if _within(sample, bounds):
            kept += 1
            yield sample


def _round(side: float, dtype: str) -> int:
    """To a multiple of an eighth of its power of two, at least 16 bytes: sides that tensor cores take, and not only powers of
    two."""
    step = max(16 if dtype == "fp8" else 8, 2 ** (int(math.log2(side)) - 3))
    return max(step, round(side / step) * step)


def product(dtype: str, m: int, n: int, k: int, form: str = "forward", *, held_out: bool = False) -> Sample:
    """A matrix product to time, in one of the three forms of training."""
    return Sample(Matmul(m, n, k, dtype, weight_gradient=form == "weight_gradient"), form=form, held_out=held_out)


def _within(sample: Sample, bounds: Bounds) -> bool:
    op = sample.operation
    assert isinstance(op, Matmul)
    return bool(op.flops <= bounds.flops and 4.0 * (op.m * op.k + op.k * op.n + op.m * op.n) <= bounds.bytes)


SEQUENCES = (
    (512, 4, 1), (1024, 4, 1), (256, 8, 1), (2048, 2, 1), (384, 8, 1), (768, 4, 1), (512, 8, 2), (1024, 8, 1), (128, 8, 4),
    (2048, 8, 1), (1024, 32, 2), (4096, 8, 1), (4096, 32, 1), (8192, 32, 1), (16384, 16, 1),
)  # fmt: skip
"""(tokens, heads, batch) of causal attention."""
JUDGES = ((640, 4, 1), (320, 8, 2), (896, 8, 1), (1536, 8, 1), (3072, 16, 1), (6144, 32, 1), (12288, 32, 1))
"""Lengths between those, which are held out of the fit."""


def attentions(dtype: str, bounds: Bounds, *, head_dims: Sequence[int], longest: int) -> Iterator[Sample]:
    """Causal attention over sequence lengths, heads and batches at the first of ``head_dims``, forward and backward; from the fifth on also
    at the others. After each second of them one of ``JUDGES``, both ways."""
    judges = iter(JUDGES)
    for place, (length, heads, batch) in enumerate(SEQUENCES):
        for head_dim in head_dims[:1] if place < 4 else head_dims:
            for backward in (False, True):
                yield from _attention(dtype, bounds, (length, heads, batch, head_dim), backward, longest)
        judge = next(judges, None) if place % 2 else None
        if judge is not None:
            for backward in (False, True):
                yield from _attention(dtype, bounds, (*judge, head_dims[0]), backward, longest, held_out=True)


def _attention(
    dtype: str, bounds: Bounds, shape: tuple[int, int, int, int], backward: bool, longest: int, *, held_out: bool = False
) -> Iterator[Sample]:
    """One candidate, (tokens, heads, batch, head size), if it is within bounds."""
    length, heads, batch, head_dim = shape
    op = Attend(batch, heads, max(1, heads // 4), length, length, head_dim, head_dim, length * (length + 1) // 2, dtype, backward)
    if length <= longest and op.flops <= bounds.flops and 16.0 * batch * heads * length * head_dim <= bounds.bytes:
        yield Sample(op, form="causal", held_out=held_out)


def pointwises(bounds: Bounds, *, forms: dict[str, int], sizes: Sequence[int], judges: Sequence[int] = ()) -> Iterator[Sample]:
    """Memory traffic of each form of layer work (its kernels beside it) at each of ``sizes`` bytes a kernel; after the first two, those of
    ``LAYER_MIX`` also at ``judges``, held out of the fit."""
    judged = {form: kernels for form, kernels in forms.items() if form in LAYER_MIX}
    for size in (*sizes[:2], *judges, *sizes[2:]):
        held_out = size in judges
        for form, kernels in (judged if held_out else forms).items():
            if size * kernels <= bounds.bytes:
                yield Sample(Pointwise(size * kernels, kernels), form=form, held_out=held_out)
