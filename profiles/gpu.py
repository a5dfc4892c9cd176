"""What a GPU can do: ``GpuProfile.seconds(operation)``, its memory, and where every number comes from.

Forms (constants and held-out errors: docs/hardware.md; F the FLOPs, P the datasheet peak of the precision):

* matrix product: ``t = t0 + max(F/(eff P) (1+m0/m)(1+n0/n)(1+k0/k)(1+F/F0)^g, bytes/(memory rate))``. The last factor is the power
  derate of a hot chip; in training the chip is hot all the time, so ``sustained=True`` evaluates it at ``max(F, F*)``.
* grouped product: the same with T tokens a group for m, T0 for m0, and T padded to the kernel's tile
* attention: ``t = t0 + F/(eff P) (1 + s0/s) (1 + w0 SM/tiles)``, s = twice the mean keys a query sees (the length, when causal)
* pointwise: ``kernels t_launch + bytes/(memory rate)``; on a CPU the rate depends on what a kernel moves (``TrafficCurve``)

Operation sizes may be numpy arrays; the seconds are then an array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from profiles.errors import InputError
from profiles.operations import BYTES, Attend, GroupedMatmul, Matmul, Number, Pointwise, between, ceiling, larger, smaller

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)
Origin = Literal["datasheet", "measured", "fitted", "estimate"]
TILE_ROWS = 128
"""Query rows of one attention tile, and the row tile to which grouped products pad (FlashAttention, CUTLASS defaults)."""


LIKE: dict[str, tuple[str, ...]] = {
    "fp16": ("bf16",), "bf16": ("fp16", "fp32"), "fp8": ("mxfp8", "bf16", "fp16"), "mxfp8": ("fp8", "bf16"),
    "nvfp4": ("mxfp8", "fp8", "bf16"), "tf32": ("bf16", "fp16", "fp32"), "fp32": ("bf16", "fp16"), "fp64": ("fp32", "bf16"),
}  # fmt: skip
"""Whose curve prices a precision that has none of its own, best first."""


@dataclass(frozen=True, config=STRICT)
class Constant:
    """One number with its unit (scope in the field's name), origin and source."""

    value: float
    unit: str
    origin: Origin
    source: str = Field(min_length=3)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MatmulCurve:
    """Parameters of the matrix product's form for one precision; ``heldout_error`` is the fraction off on shapes not in the fit.

    ``quantise_multiplier`` > 0 says that the samples behind ``t0_seconds`` included casting the activation: a product priced
    inside a step then starts in the bf16 curve's t0, and the cast is a Pointwise of its own. ``hot`` = False: the derate was no
    power law (NVFP4), so it is never evaluated beyond the product's own FLOPs.
    """

    efficiency: float = Field(gt=0, le=1.2)
    t0_seconds: float = Field(ge=0)
    m0: float = Field(ge=0)
    n0: float = Field(ge=0)
    k0: float = Field(ge=0)
    origin: Origin
    source: str = Field(min_length=3)
    f0_flops: float = Field(default=1e12, gt=0)
    g: float = Field(default=0.0, ge=0, le=1)
    memory_bytes_per_second: float = Field(default=1e12, gt=0)
    quantise_multiplier: float = Field(default=0.0, ge=0)
    hot: bool = True
    heldout_error: float | None = None

    def busy(self, peak: float, m: Number, n: Number, k: Number, batch: Number, moved: Number, floor_flops: float) -> Number:
        """Seconds without t0 of ``batch`` products in one kernel that move ``moved`` bytes; ``floor_flops`` is F*."""
        flops = 2.0 * m * n * k * batch
        fill = (1 + self.m0 / m) * (1 + self.n0 / n) * (1 + self.k0 / k)
        derate = (1 + larger(flops, floor_flops if self.hot else 0.0) / self.f0_flops) ** self.g
        return larger(flops / (self.efficiency * peak) * fill * derate, moved / self.memory_bytes_per_second)

    def seconds(
        self,
        peak: float,
        m: Number,
        n: Number,
        k: Number,
        batch: Number = 1,
        *,
        item: float = 2.0,
        out: float = 2.0,
        floor_flops: float = 0.0,
    ) -> Number:
        """Seconds as the samples were measured, cast of the activation included where it was; ``item``/``out`` bytes an element."""
        moved = (item * k * (m + n) + out * m * n) * batch
        cast = self.quantise_multiplier * 3.0 * m * k * batch / self.memory_bytes_per_second
        return self.t0_seconds + cast + self.busy(peak, m, n, k, batch, moved, floor_flops)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GroupedCurve:
    """How grouped products (experts, balanced) differ from a plain product of the same precision: T tokens a group stand for m,
    ``tokens0`` for m0, rows are padded towards whole tiles (``padding`` 0: not at all, 1: fully), ``efficiency`` is relative to the
    plain product and never above it. ``weight_gradient`` multiplies the time of the product that sums over each group's tokens;
    ``t0_seconds`` is one grouped product's share of what the kernel does besides."""

    tokens0: float = Field(ge=0)
    padding: float = Field(ge=0, le=1)
    efficiency: float = Field(gt=0, le=1)
    t0_seconds: float = Field(ge=0)
    weight_gradient: float = Field(ge=1, le=4)
    origin: Origin
    source: str = Field(min_length=3)
    heldout_error: float | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AttentionCurve:
    """Flash attention, causal, bf16, head size 128; factors by head size and direction beside it.

    ``head_dim_speed`` and ``backward_ratio`` map a head size to speed relative to 128 and to backward / forward time (between
    two sizes: linear); ``full_share`` is the share of s0 that is left where no block is cut by a mask (0.45: FlashAttention-3's
    figures for both masks); ``latent_speed`` applies where keys and values differ in size (MLA 192/128: 0.94-0.95 in SimuMax's A100
    and B200 files); ``fp8_speed`` is against bf16.
    """

    efficiency: float = Field(gt=0, le=1.2)
    t0_seconds: float = Field(ge=0)
    s0: float = Field(ge=0)
    w0: float = Field(ge=0)
    head_dim_speed: dict[int, float]
    backward_ratio: dict[int, float]
    origin: Origin
    source: str = Field(min_length=3)
    full_share: float = Field(default=0.45, ge=0, le=1)
    latent_speed: float = Field(default=0.95, gt=0)
    fp8_speed: float = Field(default=1.0, gt=0)
    heldout_error: float | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrafficCurve:
    """Memory rate by what a kernel moves, where caches and page faults make it depend on that (a CPU): ``rates`` maps bytes to bytes/s;
    straight lines in logarithms between the sizes, the same rate beyond the ends."""

    rates: dict[int, float] = Field(min_length=2)
    origin: Origin
    source: str = Field(min_length=3)

    @cached_property
    def _logs(self) -> tuple[np.ndarray, np.ndarray]:
        sizes = sorted(self.rates)
        return np.log(sizes), np.log([self.rates[size] for size in sizes])

    def rate(self, moved: Number) -> Number:
        """Bytes/s of kernels that move ``moved`` bytes (at least one) each."""
        found = np.exp(np.interp(np.log(larger(moved, 1.0)), *self._logs))
        return found if isinstance(moved, np.ndarray) else float(found)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GpuFacts:
    """The constants of a GPU that are not curves. Memory figures are bytes, rates bytes/s, both per GPU."""

    sms: Constant
    memory_reported_bytes: Constant
    memory_usable_bytes: Constant
    context_bytes: Constant
    memory_datasheet_bytes_per_second: Constant
    memory_achieved_bytes_per_second: Constant
    launch_seconds: Constant
    sustained_flops: Constant
    sustained_matmul_speed: Constant
    weight_gradient_ratio: Constant
    board_watts: Constant | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GpuProfile:
    """A GPU (or a CPU process): capacities and curves. ``peaks`` are dense FLOP/s by precision; a precision with a peak but no
    curve of its own borrows the nearest precision's, and says ``estimate``."""

    name: str
    description: str
    facts: GpuFacts
    peaks: dict[str, Constant]
    matmul: dict[str, MatmulCurve]
    attention: AttentionCurve
    grouped: dict[str, GroupedCurve] = Field(default_factory=dict)
    traffic: TrafficCurve | None = None
    """Where there is none, pointwise work of every size runs at the achieved rate."""
    aliases: list[str] = Field(default_factory=list)
    host: str = ""
    date: str = ""

    def __hash__(self) -> int:
        return hash((self.name, self.host, self.date, self.facts.memory_usable_bytes.value))

    def __post_init__(self) -> None:
        for field, keys in (("peaks", self.peaks), ("matmul", self.matmul), ("grouped", self.grouped)):
            for dtype in keys:
                if dtype not in BYTES:
                    raise ValueError(f"{field}.{dtype}: no such precision (one of {', '.join(BYTES)})")
        lacking = [dtype for dtype in (*self.matmul, *self.grouped) if dtype not in self.peaks]
        if lacking or not self.matmul:
            raise ValueError(f"every matmul curve needs a peak, and there must be one ({', '.join(lacking) or 'matmul is empty'})")
        if any(peak.value <= 0 for peak in self.peaks.values()):
            raise ValueError("peaks must be positive FLOP/s")
        facts = self.facts
        positive = (
            "sms",
            "memory_reported_bytes",
            "memory_usable_bytes",
            "memory_achieved_bytes_per_second",
            "sustained_matmul_speed",
        )
        for name in positive:
            if getattr(facts, name).value <= 0:
                raise ValueError(f"facts.{name} must be positive")
        for name, constant in vars(facts).items():
            if isinstance(constant, Constant) and constant.value < 0:
                raise ValueError(f"facts.{name} is {constant.value:g}: it must not be negative")

    @property
    def sms(self) -> float:
        return self.facts.sms.value

    @property
    def memory_bytes(self) -> float:
        """What the driver reports."""
        return self.facts.memory_reported_bytes.value

    @property
    def usable_bytes(self) -> float:
        """What torch says the device's capacity is: context, communicators and the allocator's pool all come out of it."""
        return self.facts.memory_usable_bytes.value

    @property
    def is_host(self) -> bool:
        """Whether the device is the host itself (processes on a CPU)."""
        return self.name.lower().startswith("cpu")

    @property
    def context_bytes(self) -> float:
        """Device context and library workspaces of one process, outside the allocator."""
        return self.facts.context_bytes.value

    @property
    def memory_bytes_per_second(self) -> float:
        return self.facts.memory_achieved_bytes_per_second.value

    @property
    def launch_seconds(self) -> float:
        """The shortest a kernel takes on the device. What the host spends on it is a fact of the Execution."""
        return self.facts.launch_seconds.value

    def peak_flops(self, dtype: str) -> float:
        """Dense datasheet peak, FLOP/s. InputError where the GPU has no such precision."""
        if dtype not in self.peaks:
            rule = f"{self.name} has no {dtype} products (it has {', '.join(self.peaks)})"
            raise InputError("precision", dtype, rule, self._nearest(dtype))
        return self.peaks[dtype].value

    def _nearest(self, dtype: str) -> str:
        return next((other for other in (*LIKE[dtype], "bf16", "fp16", "fp32") if other in self.peaks), next(iter(self.peaks)))

    @cached_property
    def curves(self) -> Mapping[str, MatmulCurve]:
        """A curve for every precision that has a peak: measured, or borrowed from the nearest one that has its own."""
        found: dict[str, MatmulCurve] = {}
        for dtype in self.peaks:
            like = next(d for d in (dtype, *LIKE[dtype], *self.matmul) if d in self.matmul)
            curve = self.matmul[like]
            if like != dtype:
                at = "" if self.peaks[like].value == self.peaks[dtype].value else f" at the {dtype} peak"
                curve = replace(curve, origin="estimate", heldout_error=None, source=f"{like} curve{at}: {curve.source}")
            found[dtype] = curve
        return found

    @cached_property
    def grouped_curves(self) -> Mapping[str, GroupedCurve]:
        """A curve of grouped products for every precision that has a peak."""
        return {dtype: self._grouped(dtype) for dtype in self.peaks}

    @cached_property
    def _grouped_products(self) -> dict[str, MatmulCurve]:
        """The plain curve of each precision with what its grouped curve changes in it."""
        return {
            dtype: replace(
                plain, efficiency=plain.efficiency * self.grouped_curves[dtype].efficiency, m0=self.grouped_curves[dtype].tokens0
            )
            for dtype, plain in self.curves.items()
        }

    @cached_property
    def _first_byte(self) -> float:
        """t0 of a product whose operands are there already: the 16-bit curve's."""
        return (self.matmul.get("bf16") or self.matmul.get("fp16") or next(iter(self.matmul.values()))).t0_seconds

    def _grouped(self, dtype: str) -> GroupedCurve:
        like = next((d for d in (dtype, "bf16", "fp16") if d in self.grouped), None)
        if like is not None:
            known = self.grouped[like]
            return (
                known
                if like == dtype
                else replace(known, origin="estimate", heldout_error=None, source=f"as {like}: {known.source}")
            )
        own = self.curves[dtype]
        return GroupedCurve(
            tokens0=own.m0, padding=0.5, efficiency=1.0, t0_seconds=own.t0_seconds, weight_gradient=1.2, origin="estimate",
            source="as plain products of that many rows",
        )  # fmt: skip

    def seconds(self, op: Matmul | GroupedMatmul | Attend | Pointwise, *, sustained: bool = True, kernel: Number = 1.0) -> Number:
        """Seconds of one operation on one GPU, alone; a number, or an array where the operation's sizes are arrays.

        ``sustained``: at the clock of a chip that has been busy for minutes (training), not of a short burst. ``kernel``: speed of
        the attention kernel's generation, 1 = the one the curve was measured with.
        """
        if isinstance(op, Matmul):
            return self._matmul(op, sustained)
        if isinstance(op, GroupedMatmul):
            return self._grouped_matmul(op, sustained)
        if isinstance(op, Attend):
            return self._attend(op, sustained, kernel)
        return op.kernels * self.launch_seconds + op.bytes / self.memory_rate(op)

    def memory_rate(self, op: Pointwise) -> Number:
        """Bytes/s at which pointwise work of this size runs."""
        return self.traffic.rate(op.bytes / larger(op.kernels, 1)) if self.traffic else self.memory_bytes_per_second

    def _speed(self, sustained: bool) -> tuple[float, float]:
        """(FLOPs at which the derate is evaluated at least, speed factor)."""
        return (self.facts.sustained_flops.value, self.facts.sustained_matmul_speed.value) if sustained else (0.0, 1.0)

    def _matmul(self, op: Matmul, sustained: bool) -> Number:
        peak, curve = self.peak_flops(op.dtype), self.curves[op.dtype]
        floor, speed = self._speed(sustained)
        t0 = self._first_byte if curve.quantise_multiplier else curve.t0_seconds
        item, ratio = BYTES[op.dtype], self.facts.weight_gradient_ratio.value if op.weight_gradient else 1.0
        moved = (item * op.k * (op.m + op.n) + max(item, 2.0) * op.m * op.n) * op.batch
        return t0 + curve.busy(peak, op.m, op.n, op.k, op.batch, moved, floor) * ratio / speed

    def _grouped_matmul(self, op: GroupedMatmul, sustained: bool) -> Number:
        peak, group, plain = self.peak_flops(op.dtype), self.grouped_curves[op.dtype], self._grouped_products[op.dtype]
        floor, speed = self._speed(sustained)
        rows = larger(op.tokens / op.groups, 1.0)
        padded = rows * (TILE_ROWS * ceiling(rows / TILE_ROWS) / rows) ** group.padding
        item = BYTES[op.dtype]
        weights, rows_in, rows_out = 1.0 * op.groups * op.n * op.k, 1.0 * op.tokens * op.k, 1.0 * op.tokens * op.n
        if op.weight_gradient:
            moved = item * (rows_in + rows_out) + max(item, 2.0) * weights
        else:
            moved = item * (rows_in + weights) + max(item, 2.0) * rows_out
        busy = plain.busy(peak, padded, op.n, op.k, op.groups, moved, floor)
        return group.t0_seconds + busy * (group.weight_gradient if op.weight_gradient else 1.0) / speed

    def _attend(self, op: Attend, sustained: bool, kernel: Number) -> Number:
        if not op.fused:
            return self._unfused(op, sustained)
        curve = self.attention
        dtype = "bf16" if "bf16" in self.peaks else next(iter(self.peaks))
        speed = between(curve.head_dim_speed, op.v_dim) * (1.0 if op.qk_dim == op.v_dim else curve.latent_speed)
        if op.dtype in ("fp8", "mxfp8", "nvfp4"):
            speed = speed * curve.fp8_speed
        ratio = between(curve.backward_ratio, op.qk_dim) if op.backward else 1.0
        cut = smaller(larger(2 * (1 - op.pairs / (op.q_len * op.k_len)), 0.0), 1.0)
        reach = 2 * op.pairs / op.q_len
        tiles = op.batch * op.heads * ceiling(op.q_len / TILE_ROWS)
        short = 1 + curve.s0 * (curve.full_share + (1 - curve.full_share) * cut) / reach
        forward = 2.0 * op.pairs * (op.qk_dim + op.v_dim) * op.heads * op.batch
        busy = forward / (curve.efficiency * self.peaks[dtype].value * speed * kernel) * short * (1 + curve.w0 * self.sms / tiles)
        return (curve.t0_seconds + busy / self._speed(sustained)[1]) * ratio

    def _unfused(self, op: Attend, sustained: bool) -> Number:
        """Scores and context as batched products over all q_len x k_len pairs: a mask skips nothing. Score traffic is Pointwise."""
        batch = op.batch * op.heads
        scores = Matmul(op.q_len, op.k_len, op.qk_dim, op.dtype, batch)
        context = Matmul(op.q_len, op.v_dim, op.k_len, op.dtype, batch)
        forward = self._matmul(scores, sustained) + self._matmul(context, sustained)
        return 2 * forward if op.backward else forward

    def faster(self, **changes: float) -> GpuProfile:
        """The same GPU with some facts at other values (calibration): ``faster(sustained_matmul_speed=0.8)``; origin ``fitted``. Another
        memory rate moves those by size with it."""
        facts: dict[str, Any] = {}
        for name, value in changes.items():
            old = getattr(self.facts, name, None)
            if old is None:
                raise InputError("constant", name, f"{self.name} has no such constant", None)
            facts[name] = Constant(value, old.unit, "fitted", f"calibrated; was {old.value:g} ({old.origin})")
        traffic, name = self.traffic, "memory_achieved_bytes_per_second"
        if traffic and name in changes:
            factor = changes[name] / self.memory_bytes_per_second
            traffic = replace(traffic, rates={size: rate * factor for size, rate in traffic.rates.items()}, origin="fitted")
        return replace(self, facts=replace(self.facts, **facts), traffic=traffic)
