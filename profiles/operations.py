"""The vocabulary of what can be measured and costed.

A layer under a layout is a list of these (``cost_models.layers``); ``profiles.measure`` times them, ``profiles.hardware`` prices
them, and FLOPs, memory and communication are interpreters of the same list. Sizes are those *of one rank*, may be numbers or
numpy arrays of one shape (so that one formula costs one layout or ten thousand), and are in elements unless a name says bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Number = Any
"""An int, a float, or a numpy array of them."""

Dtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
BYTES: dict[str, float] = {
    "fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16,
}  # fmt: skip
"""Bytes an element is stored in, scale factors of block formats included (MX: one byte per 32; NVFP4: one per 16)."""

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast"]


@dataclass(frozen=True, slots=True)
class Matmul:
    """C[m, n] = A[m, k] B[k, n], ``batch`` times: 2 m n k FLOPs each. ``weight_gradient``: a product over tokens that
    accumulates in fp32 (a few per cent slower than forward and input gradient)."""

    m: Number
    n: Number
    k: Number
    dtype: str = "bf16"
    batch: Number = 1
    name: str = ""
    weight_gradient: bool = False

    @property
    def flops(self) -> Number:
        return 2.0 * self.m * self.n * self.k * self.batch


@dataclass(frozen=True, slots=True)
class GroupedMatmul:
    """``groups`` products that share n and k and split ``tokens`` rows among them (experts of a MoE layer). Sizes are those of
    the forward product also where ``weight_gradient`` says that it is the one that sums over each group's tokens."""

    tokens: Number
    n: Number
    k: Number
    groups: Number
    dtype: str = "bf16"
    name: str = ""
    weight_gradient: bool = False

    @property
    def flops(self) -> Number:
        return 2.0 * self.tokens * self.n * self.k


@dataclass(frozen=True, slots=True)
class Attend:
    """Scaled dot-product attention of ``batch`` sequences: ``pairs`` query-key pairs a head really computed (causal, window
    and context-parallel splits counted exactly by whoever builds it), of ``q_len`` queries against ``k_len`` keys.

    FLOPs of a forward: 2 pairs (qk_dim + v_dim) heads batch; of a backward 2.5 times that (five products for two).
    """

    batch: Number
    heads: Number
    kv_heads: Number
    q_len: Number
    k_len: Number
    qk_dim: Number
    v_dim: Number
    pairs: Number
    dtype: str = "bf16"
    backward: bool = False
    fused: bool = True
    name: str = ""

    @property
    def flops(self) -> Number:
        return 2.0 * self.pairs * (self.qk_dim + self.v_dim) * self.heads * self.batch * (2.5 if self.backward else 1.0)


@dataclass(frozen=True, slots=True)
class Pointwise:
    """Work bound by memory traffic: ``bytes`` read and written in all, in ``kernels`` launches."""

    bytes: Number
    kernels: Number = 1
    name: str = ""

    @property
    def flops(self) -> Number:
        return 0.0


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective over mesh axis ``axis``. ``bytes`` is the *full* buffer: what is reduced, or what each rank holds after a gather
    or before a scatter; for all-to-all what one rank sends in all (its own part included); for send_recv the message."""

    kind: str
    axis: str
    bytes: Number
    name: str = ""
    count: Number = 1
    """Times it runs, one after the other (the passes of a ring)."""

    @property
    def flops(self) -> Number:
        return 0.0


Operation = Matmul | GroupedMatmul | Attend | Pointwise | Collective


def larger(a: Number, b: Number) -> Number:
    """The larger of two numbers, or of two arrays element by element; plain Python for numbers, which is ten times faster."""
    return np.maximum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else (a if a > b else b)


def smaller(a: Number, b: Number) -> Number:
    """The smaller of two numbers, or of two arrays element by element."""
    return np.minimum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else (a if a < b else b)


def ceiling(a: Number) -> Number:
    """Rounded up to whole numbers."""
    return np.ceil(a) if isinstance(a, np.ndarray) else math.ceil(a)


def between(table: Mapping[int, float], at: Number) -> Number:
    """Linear between the entries of ``table`` (keys ascending), constant beyond its ends."""
    keys = list(table)
    if isinstance(at, np.ndarray) or (len(keys) > 1 and keys[0] < at < keys[-1]):
        return np.interp(at, keys, list(table.values()))
    return table[keys[0]] if at <= keys[0] else table[keys[-1]]


def wire_bytes(kind: str, bytes: Number, ranks: Number) -> Number:
    """Bytes one rank puts on the wire for a collective of full buffer ``bytes`` over ``ranks`` (ring algorithms)."""
    share = (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return share * bytes
    return 2 * share * bytes if kind == "all_reduce" else bytes * (share > 0)
