"""Curves from samples: the one place where a GPU's or a link's constants come from measured times.

Used by ``benchmarks/fit_hardware.py`` (the shipped curves) and by ``axisplan profile`` (this machine). Every fit minimises
relative error, nearly its absolute value (a soft L1), and states its error on samples that were held out; the curve returned is
then fitted to all of them. numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from profiles.errors import InputError
from profiles.gpu import AttentionCurve, GroupedCurve, MatmulCurve, Origin
from profiles.links import CollectiveCurve
from profiles.operations import wire_bytes

Array = Any
"""A float numpy array."""
Curve = TypeVar("Curve")
SOFT = 0.02
"""Relative error below which the loss is quadratic: about the repeat noise of a good measurement."""


@dataclass(frozen=True)
class MatmulSample:
    """One product [m, k] x [k, n], ``batch`` times, measured ``seconds``."""

    m: float
    n: float
    k: float
    seconds: float
    batch: float = 1


@dataclass(frozen=True)
class AttentionSample:
    """One forward of flash attention: ``batch`` sequences of ``length``, ``heads`` of ``head_dim``."""

    batch: float
    length: float
    heads: float
    head_dim: float
    seconds: float
    causal: bool = True


@dataclass(frozen=True)
class CollectiveSample:
    """One collective of full buffer ``bytes`` over ``ranks``."""

    kind: str
    ranks: int
    bytes: float
    seconds: float


@dataclass(frozen=True)
class ExpertSample:
    """The two grouped products of a gated MoE layer: ``tokens`` rows in all over ``groups`` experts, hidden h, expert width i."""

    tokens: float
    hidden: float
    inner: float
    groups: float
    seconds: float
    all_tokens: float = 0
    """Tokens before dispatch that the kernel also reads and writes (all of the batch, where it picks out its own experts')."""
    case: str = ""
    """Samples of one case (a model's shapes) are held out together."""


@dataclass(frozen=True, slots=True)
class Errors:
    """How far predictions are from ``count`` measured times: mean, median and 90th percentile of |predicted/measured - 1|, and the
    median of predicted/measured."""

    mean: float
    median: float
    p90: float
    ratio: float
    count: int

    @classmethod
    def of(cls, ratios: Sequence[float] | Array) -> Errors:
        """From predicted/measured of each (at least one)."""
        own = np.asarray(ratios, dtype=float)
        off = np.abs(own - 1)
        return cls(float(off.mean()), float(np.median(off)), float(np.quantile(off, 0.9)), float(np.median(own)), len(own))


@dataclass(frozen=True)
class Fit(Generic[Curve]):
    """A curve, the samples it was fitted to, and predicted/measured of each when it was held out (NaN where it never was)."""

    curve: Curve
    samples: tuple[Any, ...]
    ratios: Array

    @property
    def errors(self) -> Errors:
        """On every sample that was held out."""
        return self.errors_where(lambda sample: True)

    def errors_where(self, chosen: Callable[[Any], bool]) -> Errors:
        """On those held out that are ``chosen``."""
        pairs = zip(self.samples, self.ratios, strict=True)
        return Errors.of([ratio for sample, ratio in pairs if np.isfinite(ratio) and chosen(sample)])


def _off(predicted: Array, measured: Array) -> float:
    """Mean of |predicted/measured - 1|."""
    return float(np.abs(predicted / measured - 1).mean())


def _need(samples: Sequence[Any], least: int, what: str) -> None:
    if len(samples) < least:
        raise InputError("samples", len(samples), f"a fit of {what} needs at least {least}", least)
    if any(not (np.isfinite(s.seconds) and s.seconds > 0) for s in samples):
        raise InputError("samples", "seconds", f"{what}: every time must be positive and finite", None)


def minimise(model: Callable[[Array], Array], measured: Array, start: Array, low: Array, high: Array, rounds: int = 60) -> Array:
    """Parameters within [low, high] that minimise the soft L1 of ``model(p)/measured - 1``.

    Levenberg-Marquardt on log parameters with a forward-difference Jacobian; reweighted each round, which is what makes a square an
    absolute value (iteratively reweighted least squares).
    """
    floor, ceiling = np.log(low), np.log(high)
    point = np.clip(np.log(np.clip(start, low, high)), floor, ceiling)

    def off(x: Array) -> Array:
        return model(np.exp(x)) / measured - 1

    def loss(r: Array) -> float:
        return float((np.sqrt(SOFT**2 + r * r) - SOFT).mean())

    damping, residual = 1e-2, off(point)
    best = loss(residual)
    for _ in range(rounds):
        weight = 1 / np.sqrt(SOFT**2 + residual**2)
        jacobian = np.empty((len(measured), len(point)))
        for i in range(len(point)):
            step = 1e-5 if point[i] + 1e-5 <= ceiling[i] else -1e-5
            moved = point.copy()
            moved[i] += step
            jacobian[:, i] = (off(moved) - residual) / step
        normal = jacobian.T @ (jacobian * weight[:, None])
        slope = jacobian.T @ (residual * weight)
        improved = False
        for _ in range(12):
            scale = np.diag(normal) + 1e-12 * float(np.trace(normal)) + 1e-300
            trial = np.clip(point - np.linalg.solve(normal + damping * np.diag(scale), slope), floor, ceiling)
            candidate = off(trial)
            value = loss(candidate)
            if value < best:
                improved = best - value > 1e-9
                point, residual, best, damping = trial, candidate, value, max(damping / 5, 1e-9)
                break
            damping *= 4
        if not improved:
            break
    return np.exp(point)


def nonnegative(columns: Array, measured: Array, rounds: int = 30) -> Array:
    """Coefficients >= 0 of a linear model that minimise the soft L1 of relative error: exact over every choice of non-zero ones."""
    scaled = columns / measured[:, None]
    weight = np.ones(len(measured))
    width = columns.shape[1]
    best = np.zeros(width)
    for _ in range(rounds):
        found, lowest = best, np.inf
        root = np.sqrt(weight)
        for mask in range(1, 1 << width):
            chosen = [i for i in range(width) if mask >> i & 1]
            solution = np.linalg.lstsq(scaled[:, chosen] * root[:, None], root, rcond=None)[0]
            if np.any(solution < 0):
                continue
            value = float((weight * (scaled[:, chosen] @ solution - 1) ** 2).sum())
            if value < lowest:
                lowest, found = value, np.zeros(width)
                found[chosen] = solution
        if np.allclose(found, best, rtol=1e-6, atol=0):
            break
        best = found
        weight = 1 / np.sqrt(SOFT**2 + (scaled @ best - 1) ** 2)
    return best


def nondecreasing(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls (least squares): neighbours that fall share their mean (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (second, more), (first, count) = pools.pop(), pools.pop()
            pools.append(((first * count + second * more) / (count + more), count + more))
    return [mean for mean, count in pools for _ in range(count)]


def folds_of(keys: Sequence[Any], folds: int) -> list[Array]:
    """Masks of held-out samples; samples of one key stay together, keys dealt out in a fixed shuffle."""
    distinct = list(dict.fromkeys(keys))
    order = np.random.default_rng(0).permutation(len(distinct))
    fold = {distinct[index]: place % folds for place, index in enumerate(order)}
    member = np.array([fold[key] for key in keys])
    return [member == number for number in range(min(folds, len(distinct)))]


def thirds_of(values: Sequence[float]) -> list[Array]:
    """Masks of held-out samples: every third of the distinct values, in their order."""
    ordered = sorted(set(values))
    third = [np.array([ordered.index(value) % 3 == part for value in values]) for part in range(3)]
    return [mask for mask in third if mask.any() and not mask.all()]


def held_out(fit: Callable[[Array], Array], predict: Callable[[Array], Array], measured: Array, masks: Sequence[Array]) -> Array:
    """Predicted/measured of each sample, predicted by a fit that has not seen it; NaN where no mask holds it out."""
    predicted = np.full(len(measured), np.nan)
    for mask in masks:
        predicted[mask] = predict(fit(~mask))[mask]
    return predicted / measured


def best_of(
    seconds: Callable[[Array, Any], Array], measured: Array, keep: Array, starts: Sequence[Array], low: Array, high: Array
) -> Array:
    """Parameters of ``seconds(parameters, rows)`` fitted to the samples that ``keep`` chooses, from the best of ``starts``."""
    found = [minimise(lambda p: seconds(p, keep), measured[keep], start, low, high) for start in starts]
    return min(found, key=lambda p: _off(seconds(p, keep), measured[keep]))


def _stated(ratios: Array) -> float:
    """The held-out error that a curve states: the mean, three digits."""
    return float(f"{np.nanmean(np.abs(ratios - 1)):.3g}")


def fit_matmul(
    samples: Sequence[MatmulSample], *, peak: float, memory_bytes_per_second: float, item_bytes: float = 2.0,
    out_bytes: float = 2.0, derate: bool = True, cast: bool = False, folds: int = 5, origin: Origin = "fitted",
    source: str = "fit_matmul",
) -> Fit[MatmulCurve]:  # fmt: skip
    """The saturating form with power derate (module ``profiles.gpu``), whole (n, k) pairs held out in turn.

    ``peak`` in FLOP/s; where it is unknown (a CPU) any figure above the fastest sample does, as efficiency is relative to it.
    ``derate`` False pins g to 0; ``cast`` True fits the quantisation of the activation that such samples include.
    """
    _need(samples, 8, "matrix products")
    fields = ("m", "n", "k", "batch", "seconds")
    m, n, k, batch, measured = (np.array([getattr(s, field) for s in samples], dtype=float) for field in fields)
    blank = MatmulCurve(
        efficiency=0.5,
        t0_seconds=0,
        m0=0,
        n0=0,
        k0=0,
        origin=origin,
        source=source,
        memory_bytes_per_second=memory_bytes_per_second,
    )

    def curve(p: Array) -> MatmulCurve:
        values = [float(f"{value:.5g}") for value in p]
        return replace(
            blank, efficiency=values[0], t0_seconds=values[1], m0=values[2], n0=values[3], k0=values[4], f0_flops=values[5],
            g=values[6] if derate else 0.0, quantise_multiplier=values[7] if cast else 0.0,
        )  # fmt: skip

    def seconds(p: Array, at: Any = slice(None)) -> Array:
        rows, columns, depth, times = m[at], n[at], k[at], batch[at]
        flops = 2 * rows * columns * depth * times
        fill = (1 + p[2] / rows) * (1 + p[3] / columns) * (1 + p[4] / depth)
        hot = (1 + flops / p[5]) ** p[6] if derate else 1.0
        moved = (item_bytes * depth * (rows + columns) + out_bytes * rows * columns) * times
        extra = p[7] * 3 * rows * depth * times / memory_bytes_per_second if cast else 0.0
        return np.asarray(p[1] + extra + np.maximum(flops / (p[0] * peak) * fill * hot, moved / memory_bytes_per_second))

    small = float(measured.min())
    fastest = float((2 * m * n * k * batch / measured).max()) / peak
    low = np.array([0.02 * fastest, small * 1e-3, 0.1, 0.1, 0.1, 5e10, 1e-4, 0.02])
    high = np.array([min(1.19, 3 * fastest), small * 0.98, 4000, 4000, 4000, 5e13, 0.3, 4.0])
    starts = [np.array([0.9 * fastest, small / 2, 80, 80, 120, f0, g, 2.0]) for f0, g in ((5e11, 0.05), (5e12, 0.1), (5e13, 0.15))]

    def solve(keep: Array) -> Array:
        return best_of(seconds, measured, keep, starts if derate else starts[:1], low, high)

    everything = np.ones(len(measured), dtype=bool)
    ratios = held_out(solve, seconds, measured, folds_of(list(zip(n, k, strict=True)), folds))
    return Fit(replace(curve(solve(everything)), heldout_error=_stated(ratios)), tuple(samples), ratios)


def fit_attention(
    samples: Sequence[AttentionSample], *, peak: float, sms: float, head_dim: int = 128,
    backward_ratio: dict[int, float] | None = None, full_share: float = 0.45, origin: Origin = "fitted",
    source: str = "fit_attention",
) -> Fit[AttentionCurve]:  # fmt: skip
    """Efficiency, t0, s0 and w0 from the forward samples of ``head_dim``, every third length held out; speed at other head sizes is
    the median of what their samples say beside that curve. Backward samples are given as a ratio by the caller."""
    own = [s for s in samples if s.head_dim == head_dim]
    _need(own, 6, f"attention at head size {head_dim}")

    def columns(rows: Sequence[AttentionSample]) -> tuple[Array, Array, Array, Array]:
        length = np.array([s.length for s in rows], dtype=float)
        causal = np.array([s.causal for s in rows])
        lanes = np.array([s.batch * s.heads for s in rows], dtype=float)
        pairs = np.where(causal, length * (length + 1) / 2, length**2)
        flops = 4 * pairs * lanes * np.array([s.head_dim for s in rows], dtype=float)
        share = np.where(causal, full_share + (1 - full_share) * np.clip(1 - 1 / length, 0, 1), full_share)
        return flops, share * length / (2 * pairs), lanes * np.ceil(length / 128), np.array([s.seconds for s in rows], dtype=float)

    flops, shortness, tiles, measured = columns(own)

    def seconds(p: Array, at: Any = slice(None)) -> Array:
        return np.asarray(p[1] + flops[at] / (p[0] * peak) * (1 + p[2] * shortness[at]) * (1 + p[3] * sms / tiles[at]))

    small, fastest = float(measured.min()), float((flops / measured).max()) / peak
    low = np.array([0.1 * fastest, small * 1e-3, 1.0, 1e-6])
    high = np.array([min(1.19, 3 * fastest), small * 0.98, 5000.0, 8.0])
    starts = [np.array([fastest, small / 2, 400.0, w]) for w in (0.05, 1.5)]

    def solve(keep: Array) -> Array:
        return best_of(seconds, measured, keep, starts, low, high)

    ratios = held_out(solve, seconds, measured, thirds_of([s.length for s in own]))
    p = solve(np.ones(len(own), dtype=bool))
    speeds = {head_dim: 1.0}
    for other in sorted({s.head_dim for s in samples} - {head_dim}):
        rows = [s for s in samples if s.head_dim == other]
        work, short, tile, time = columns([s for s in rows if s.length >= 2048 and s.batch * s.heads >= 32] or rows)
        expected = work / (p[0] * peak) * (1 + p[2] * short) * (1 + p[3] * sms / tile)
        speeds[int(other)] = float(f"{np.median(expected / np.maximum(time - p[1], 0.1 * time)):.3g}")
    efficiency, t0, s0, w0 = (float(f"{value:.5g}") for value in p)
    curve = AttentionCurve(
        efficiency=efficiency, t0_seconds=t0, s0=s0, w0=w0 if w0 > 1e-3 else 0.0, head_dim_speed=dict(sorted(speeds.items())),
        backward_ratio=backward_ratio or {head_dim: 2.5}, full_share=full_share, origin=origin, source=source,
        heldout_error=_stated(ratios),
    )  # fmt: skip
    return Fit(curve, tuple(own), ratios)


def two_lines(wire: Array, measured: Array) -> tuple[Callable[..., Array], Callable[[Array], Array]]:
    """(seconds, fit) of the lower of two lines over the bytes on a rank's wire: of a protocol with little latency and of one with much
    bandwidth (NCCL's LL and Simple). ``seconds(p)`` of all samples or, ``seconds(p, rows)``, of some; ``fit(keep)`` to those chosen."""
    small, large = np.argmin(wire), np.argmax(wire)
    latency, rate = float(measured[small]), float(measured[large] / wire[large])

    def seconds(p: Array, at: Any = slice(None)) -> Array:
        return np.asarray(np.minimum(p[0] + p[1] * wire[at], p[2] + p[3] * wire[at]))

    starts = [np.array([latency, slower * rate, later * latency, rate]) for slower in (2.0, 6.0) for later in (1.5, 4.0)]
    unit = np.array([latency, rate, latency, rate])
    low, high = np.array([0.2, 0.5, 0.5, 0.2]) * unit, np.array([2, 50, 50, 2]) * unit
    return seconds, lambda keep: best_of(seconds, measured, keep, starts, low, high)


def protocol_switch(wire: Array, measured: Array) -> float | None:
    """The bytes on a rank's wire at which the two lines cross (``two_lines``). None where one line does as well, or they do not cross
    among the samples."""
    _, solve = two_lines(wire, measured)
    a1, b1, a2, b2 = solve(np.ones(len(wire), dtype=bool))
    if b1 <= b2 or a2 <= a1:
        return None
    crossing = float((a2 - a1) / (b1 - b2))
    return float(f"{crossing:.3g}") if wire.min() < crossing < wire.max() else None


def fit_collective(
    samples: Sequence[CollectiveSample], *, origin: Origin = "fitted", source: str = "fit_collective", protocols: bool = False
) -> dict[str, tuple[Fit[CollectiveCurve], ...]]:
    """One row (alpha, B, c) for each collective kind and group size in the samples; every second message size held out.
    ``protocols``: also from which size NCCL's bandwidth protocol is the faster one."""
    _need(samples, 4, "collectives")
    found: dict[str, tuple[Fit[CollectiveCurve], ...]] = {}
    for kind in dict.fromkeys(s.kind for s in samples):
        rows = []
        for ranks in sorted({s.ranks for s in samples if s.kind == kind}):
            own = sorted((s for s in samples if s.kind == kind and s.ranks == ranks), key=lambda s: s.bytes)
            _need(own, 4, f"{kind} over {ranks} ranks")
            wire = np.array([float(wire_bytes(kind, s.bytes, ranks)) for s in own])
            measured = np.array([s.seconds for s in own])
            table = np.stack([np.ones_like(wire), wire, np.sqrt(wire)], axis=1)
            even = np.arange(len(own)) % 2 == 0

            def solve(keep: Array, table: Array = table, measured: Array = measured) -> Array:
                return nonnegative(table[keep], measured[keep])

            ratios = held_out(solve, lambda p, table=table: table @ p, measured, [~even, even])  # type: ignore[misc]
            alpha, inverse, root = solve(np.ones(len(own), dtype=bool))
            curve = CollectiveCurve(
                ranks=ranks, alpha_seconds=float(f"{alpha:.5g}"), bytes_per_second=float(f"{1 / max(inverse, 1e-15):.5g}"),
                sqrt_seconds=float(f"{root:.5g}"), heldout_error=_stated(ratios), origin=origin, source=source,
                protocol_switch_bytes=protocol_switch(wire, measured) if protocols else None,
            )  # fmt: skip
            rows.append(Fit(curve, tuple(own), ratios))
        found[kind] = tuple(rows)
    return found


def fit_experts(
    samples: Sequence[ExpertSample], *, plain: MatmulCurve, peak: float, item_bytes: float, weight_gradient: float,
    at_most: float = 1.0, folds: int = 5, origin: Origin = "fitted", source: str = "fit_experts",
) -> Fit[GroupedCurve]:  # fmt: skip
    """Grouped products beside the ``plain`` product of their precision, from whole fused MoE layers (up [h, 2i] and down [i, h]);
    all samples of one ``case`` held out together.

    Such a kernel also gathers the tokens and sums the results: that traffic (bytes an element of routed and of all tokens x hidden)
    is fitted beside the products and left out of the curve, since a layer's operation list has it as Pointwise. ``at_most`` bounds
    the efficiency relative to the plain product: published grouped timings are bursts on quiet chips and would otherwise beat it.
    """
    _need(samples, 12, "grouped products")
    fields = ("tokens", "hidden", "inner", "groups", "all_tokens", "seconds")
    tokens, hidden, inner, groups, everyone, measured = (np.array([getattr(s, f) for s in samples], dtype=float) for f in fields)
    rows, rate = tokens / groups, plain.memory_bytes_per_second
    tiled = 128 * np.ceil(rows / 128) / rows

    def seconds(p: Array, at: Any = slice(None)) -> Array:
        t, h, i, g, r = tokens[at], hidden[at], inner[at], groups[at], rows[at]
        padded = r * tiled[at] ** p[2]
        curve = replace(plain, efficiency=1.0, m0=float(p[1]))
        total: Any = p[3] + (p[4] * t + p[5] * everyone[at]) * h / rate
        for n, k in ((2 * i, h), (h, i)):
            moved = item_bytes * (t * k + g * n * k) + 2 * t * n
            total = total + curve.busy(p[0] * plain.efficiency * peak, padded, n, k, g, moved, 0.0)
        return np.asarray(total)

    small = float(measured.min())
    low, high = np.array([0.1, 0.5, 1e-3, small * 0.05, 0.01, 0.01]), np.array([at_most, 2000, 1.0, small, 60.0, 60.0])
    starts = [np.array([0.9, tokens0, 0.3, small / 2, extra, extra]) for tokens0, extra in ((50.0, 12.0), (150.0, 4.0))]

    def solve(keep: Array) -> Array:
        return best_of(seconds, measured, keep, starts, low, high)

    ratios = held_out(solve, seconds, measured, folds_of([s.case for s in samples], folds))
    v = [float(f"{value:.4g}") for value in solve(np.ones(len(samples), dtype=bool))]
    curve = GroupedCurve(
        efficiency=min(v[0], 1.0), tokens0=v[1], padding=v[2], t0_seconds=float(f"{v[3] / 2:.4g}"), weight_gradient=weight_gradient,
        origin=origin, source=source, heldout_error=_stated(ratios),
    )  # fmt: skip
    return Fit(curve, tuple(samples), ratios)
