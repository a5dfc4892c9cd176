"""Other forms for the samples that the shipped curves are fitted to, judged on the same held-out samples: what the form chosen was chosen over.

Each function yields (title of the form, predicted/measured of each sample when it was held out). ``fit_hardware.py`` keeps their mean and
90th percentile beside the chosen form's; docs/hardware.md shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from profiles.fit import (
    Array,
    AttentionSample,
    CollectiveSample,
    ExpertSample,
    MatmulSample,
    best_of,
    fit_matmul,
    folds_of,
    held_out,
    nonnegative,
    two_lines,
)
from profiles.operations import wire_bytes

Ratios = tuple[str, Array]
Seconds = Callable[..., Array]
"""(parameters, rows) -> seconds of those samples."""
TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (256, 64), (128, 256), (256, 128))
"""Output tiles (rows, columns) of the matrix product kernels that a library chooses among."""
NEIGHBOURS = 6


def judged(
    seconds: Seconds, measured: Array, masks: Sequence[Array], start: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> Array:
    """Predicted/measured of each sample under a form fitted to those of other folds."""
    bounds = np.array(low, float), np.array(high, float)
    return held_out(lambda keep: best_of(seconds, measured, keep, [np.array(start, float)], *bounds), seconds, measured, masks)


def products(
    samples: Sequence[MatmulSample], *, peak: float, sms: float, item_bytes: float, memory_bytes_per_second: float, cast: bool
) -> Iterator[Ratios]:
    """Constant efficiency, rooflines, tiles in waves, and the table of efficiencies itself; whole (n, k) pairs are held out. ``cast``: the
    samples include casting the activation, which every form but the first pays for as the chosen one does."""
    m, n, k, measured = (np.array([getattr(s, field) for s in samples], float) for field in ("m", "n", "k", "seconds"))
    masks = folds_of(list(zip(n, k, strict=True)), 5)
    flops = 2 * m * n * k
    moved = (item_bytes * k * (m + n) + 2 * m * n) / memory_bytes_per_second
    casts = 3 * m * k / memory_bytes_per_second if cast else np.zeros_like(m)
    top, small = float((flops / measured).max()) / peak, float(measured.min())
    bounds = {
        "efficiency": (0.02 * top, 3 * top), "memory": (0.3, 20.0), "casts": (0.02, 4.0), "t0": (1e-3 * small, 0.98 * small),
        "k0": (0.1, 4000.0), "loss": (1e-2, 200.0), "part": (1e-3, 1.0),
    }  # fmt: skip
    start = {"efficiency": 0.9 * top, "memory": 1.0, "casts": 1.0, "t0": small / 2, "k0": 100.0, "loss": 5.0, "part": 0.5}

    def fitted(form: Seconds, names: Sequence[str]) -> Array:
        return judged(form, measured, masks, [start[name] for name in names], *zip(*(bounds[name] for name in names), strict=True))

    def constant(p: Array, at: Any = slice(None)) -> Array:
        return np.asarray(flops[at] / (p[0] * peak))

    def roofline(p: Array, at: Any = slice(None)) -> Array:
        """p: efficiency, memory rate over the achieved one, casts, t0."""
        return np.asarray(
            (p[3] if len(p) > 3 else 0.0) + p[2] * casts[at] + np.maximum(flops[at] / (p[0] * peak), moved[at] / p[1])
        )

    def waves(tiles: Sequence[tuple[int, int]], p: Array, at: Any) -> Array:
        """p: those of the roofline, k0, what small tiles lose, part of the last wave that is waited for."""
        best: Any = np.inf
        for rows, columns in tiles:
            count = np.ceil(m[at] / rows) * np.ceil(n[at] / columns) / sms
            full = count + p[6] * (np.ceil(count) - count)
            loss = 1 + p[5] * (1 / rows + 1 / columns)
            best = np.minimum(best, full * sms * 2 * rows * columns * (k[at] + p[4]) / (p[0] * peak) * loss)
        return np.asarray(p[3] + p[2] * casts[at] + np.maximum(best, moved[at] / p[1]))

    def one_tile(p: Array, at: Any = slice(None)) -> Array:
        return waves(((128, 256),), np.array([*p, 0.0, 1.0]), at)

    def hard(p: Array, at: Any = slice(None)) -> Array:
        return waves(TILES, np.array([*p, 1.0]), at)

    def soft(p: Array, at: Any = slice(None)) -> Array:
        return waves(TILES, p, at)

    names = list(bounds)
    yield "constant efficiency", fitted(constant, names[:1])
    yield "roofline", fitted(roofline, names[:3])
    yield "roofline + t0", fitted(roofline, names[:4])
    settings: dict[str, Any] = {"memory_bytes_per_second": memory_bytes_per_second, "item_bytes": item_bytes, "cast": cast}
    yield "without derate", fit_matmul(samples, peak=peak, derate=False, **settings).ratios
    yield "one tile, hard waves", fitted(one_tile, names[:5])
    yield "best tile, hard waves", fitted(hard, names[:6])
    yield "best tile, soft waves", fitted(soft, names)
    yield "interpolated table", interpolated(m, n, k, flops / measured, masks)
    places, (low, high) = np.log(np.stack([m, n, k], axis=1)), zip(*bounds.values(), strict=True)
    yield "waves x neighbours", corrected(soft, places, measured, masks, list(start.values()), low, high)


def interpolated(m: Array, n: Array, k: Array, speed: Array, masks: Sequence[Array]) -> Array:
    """The table of speeds with the held-out entries filled in: straight lines in logarithms along n and along k, the mean of those that have
    an entry on both sides; where neither has, drawn on beyond the last ones."""
    ratios, table = np.full(len(m), np.nan), np.log(speed)
    sides = [(np.log(n), k), (np.log(k), n)]
    for mask in masks:
        for i in np.flatnonzero(mask):
            found: list[tuple[bool, float]] = []
            for along, fixed in sides:
                line = np.flatnonzero((m == m[i]) & (fixed == fixed[i]) & ~mask)
                line = line[np.argsort(along[line])]
                if len(line) > 1:
                    inside = bool(along[line[0]] <= along[i] <= along[line[-1]])
                    found.append((inside, float(drawn_on(along[line], table[line], along[i]))))
            if found:
                ratios[i] = speed[i] / np.exp(np.mean([v for inside, v in found if inside] or [v for _, v in found]))
    return ratios


def drawn_on(x: Array, y: Array, at: Array) -> Array:
    """Straight lines between points (x ascending), the first and the last drawn on beyond the ends."""
    place = np.clip(np.searchsorted(x, at), 1, len(x) - 1)
    slope = (y[place] - y[place - 1]) / (x[place] - x[place - 1])
    return np.asarray(y[place - 1] + slope * (at - x[place - 1]))


def corrected(
    seconds: Seconds,
    places: Array,
    measured: Array,
    masks: Sequence[Array],
    start: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
) -> Array:
    """A form times what it is off, in the geometric mean, on the nearest samples that it was fitted to (``places``: a row each)."""
    ratios = np.full(len(measured), np.nan)
    for mask in masks:
        p = best_of(seconds, measured, ~mask, [np.array(start, float)], np.array(low, float), np.array(high, float))
        predicted, known = seconds(p), places[~mask]
        off = np.log(measured[~mask] / predicted[~mask])
        for i in np.flatnonzero(mask):
            near = np.argpartition(((known - places[i]) ** 2).sum(axis=1), NEIGHBOURS)[:NEIGHBOURS]
            ratios[i] = predicted[i] * np.exp(off[near].mean()) / measured[i]
    return ratios


def attention(samples: Sequence[AttentionSample], *, peak: float, masks: Sequence[Array]) -> Iterator[Ratios]:
    """Causal forwards: constant efficiency, a start, and short sequences."""
    batch, length, heads, size, measured = (
        np.array([getattr(s, f) for s in samples], float) for f in ("batch", "length", "heads", "head_dim", "seconds")
    )
    flops = 2 * length * (length + 1) * batch * heads * size
    top, small = float((flops / measured).max()) / peak, float(measured.min())
    bounds = ((0.05 * top, 3 * top), (1e-3 * small, 0.98 * small), (1.0, 5000.0))

    def seconds(p: Array, at: Any = slice(None)) -> Array:
        t0, s0 = p[1] if len(p) > 1 else 0.0, p[2] if len(p) > 2 else 0.0
        return np.asarray(t0 + flops[at] / (p[0] * peak) * (1 + s0 / length[at]))

    start = [0.8 * top, small / 2, 400.0]
    for title, count in (("constant", 1), ("+ t0", 2), ("x (1 + s0/s)", 3)):
        yield title, judged(seconds, measured, masks, start[:count], *zip(*bounds[:count], strict=True))


def experts(samples: Sequence[ExpertSample], *, peak: float, item_bytes: float, memory_bytes_per_second: float) -> Iterator[Ratios]:
    """Fused MoE layers as one product of three matrices: constant efficiency, roofline, tokens an expert, padding and width; whole models are
    held out."""
    fields = ("tokens", "hidden", "inner", "groups", "all_tokens", "seconds")
    tokens, hidden, inner, groups, everyone, measured = (np.array([getattr(s, f) for s in samples], float) for f in fields)
    masks, rows = folds_of([s.case for s in samples], 5), tokens / groups
    flops, weights = 6 * tokens * hidden * inner, 3 * groups * hidden * inner
    moved = (item_bytes * weights + 2 * (2 * everyone * hidden + tokens * (2 * hidden + 3 * inner))) / memory_bytes_per_second
    tiled = 128 * np.ceil(rows / 128) / rows
    top, small = float((flops / measured).max()) / peak, float(measured.min())

    def constant(p: Array, at: Any = slice(None)) -> Array:
        return np.asarray(flops[at] / (p[0] * peak))

    def seconds(p: Array, at: Any = slice(None)) -> Array:
        """p: efficiency, memory rate over the achieved one, t0, tokens0, padding, i0."""
        fill: Any = 1 + p[3] / rows[at] if len(p) > 3 else 1.0
        if len(p) > 4:
            fill = fill * tiled[at] ** p[4] * (1 + p[5] / inner[at])
        return np.asarray(p[2] + np.maximum(flops[at] / (p[0] * peak) * fill, moved[at] / p[1]))

    bounds = ((0.05 * top, 3 * top), (0.3, 5.0), (0.02 * small, small), (0.5, 2000.0), (1e-3, 1.0), (1.0, 5000.0))
    start = [0.7 * top, 1.0, small / 2, 80.0, 0.3, 300.0]
    yield "constant", judged(constant, measured, masks, [0.5 * top], [0.02 * top], [3 * top])
    for title, count in (("roofline + t0", 3), ("+ T0", 4), ("+ padding, i0", 6)):
        yield title, judged(seconds, measured, masks, start[:count], *zip(*bounds[:count], strict=True))


def collectives(samples: Sequence[CollectiveSample]) -> Iterator[Ratios]:
    """One kind over one group size, ordered by size, every second size held out: a line, the same from 1 MB on, the lower of two lines, a
    free exponent, and the table itself."""
    bytes_, measured = (np.array([getattr(s, f) for s in samples], float) for f in ("bytes", "seconds"))
    wire = np.array([float(wire_bytes(s.kind, s.bytes, s.ranks)) for s in samples])
    line = np.stack([np.ones_like(wire), wire], axis=1)
    even = np.arange(len(wire)) % 2 == 0
    masks, large = [~even, even], bytes_ >= 1 << 20
    yield "latency + bandwidth", held_out(lambda keep: nonnegative(line[keep], measured[keep]), lambda p: line @ p, measured, masks)
    yield (
        "the same, fitted from 1 MB",
        held_out(lambda keep: nonnegative(line[keep & large], measured[keep & large]), lambda p: line @ p, measured, masks),
    )
    lower, solve = two_lines(wire, measured)
    yield "lower of two protocols", held_out(solve, lower, measured, masks)

    def power(p: Array, at: Any = slice(None)) -> Array:
        return np.asarray(p[0] + wire[at] / p[1] + p[2] * wire[at] ** p[3])

    first, rate = float(measured.min()), float((wire / measured).max())
    start, low, high = [first, rate, 1e-8, 0.5], [1e-2 * first, 0.3 * rate, 1e-14, 0.1], [2 * first, 30 * rate, 1e-3, 0.95]
    yield "free exponent", judged(power, measured, masks, start, low, high)

    def between(keep: Array) -> Array:
        return np.asarray(np.exp(drawn_on(np.log(wire[keep]), np.log(measured[keep]), np.log(wire))))

    yield "interpolated table", held_out(lambda keep: keep, between, measured, masks)
