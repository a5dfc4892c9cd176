"""The least seconds of recompute of a rank whose layers are known, but not how they lie in its chunks: a bound by what memory asks for.

Where they are known, ``planner.least_recompute`` says it exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planner.columns import Column, Mix
from planner.fitting import Fitting
from planner.recompute_tables import counts_by_mode
from planner.shapes import Costs, Shape

Floats = npt.NDArray[np.float64]
TRIED = 10_000
"""Numbers of layers by mode tried at most for one rank."""


def recompute_bound(column: Column, fitting: Fitting, shape: Shape, c: Costs, rank: int, layers: int) -> float:
    """The least seconds that recompute adds to one microbatch where a rank holds ``layers`` (inf: they do not fit).

    What the layers need without recompute is counted exactly where its chunks are as even as can be, moment by moment; laid in another way
    they may need less by what the chunks differ in microbatches in flight. What recompute saves is its layers' kept bytes, those first whose
    chunk has most in flight.
    """
    flying, held = shape.flying, fitting.held(rank)
    other = c.lighter[0, rank] + 2 * (flying.alive_off[rank] * c.kept[0].max() + flying.waiting_off[rank] * c.waits[0])
    spans = some_spans(column, held, layers)
    mixes = [plain(column, fitting, span, int(c.kept[0].argmax())) for span in spans]
    chunks = {chunk: fitting.chunk(chunk, mix) for chunk, mix in zip(held, mixes, strict=True)}
    static, worst = fitting.static(rank, spans), 0.0
    hull, most = _hull(c.kept[0], c.again[0]), max(b - a for a, b in spans)
    for snapshot in fitting.snapshots[rank]:
        over = (fitting.total(static, chunks, [snapshot]) - fitting.limit) / column.job.execution.slack - other
        if over > 0:
            alive = sorted(((a, most) for _, a, _ in snapshot), reverse=True)
            worst = max(worst, _cheapest(over, alive, layers, hull), _whole_layers(over, alive, layers, c.kept[0], c.again[0]))
    return worst


def _hull(kept: Floats, again: Floats) -> list[tuple[float, float]]:
    """(bytes saved of a layer and microbatch, seconds a byte) of each further step of recompute, cheapest first."""
    out: list[tuple[float, float]] = []
    at = int(kept.argmax())
    while True:
        gain = kept[at] - kept
        better = [m for m in range(len(kept)) if gain[m] > 0]
        if not better:
            return out
        price = {m: max(0.0, again[m] - again[at]) / gain[m] for m in better}
        step = min(better, key=lambda m: (price[m], -gain[m]))
        out.append((float(gain[step]), float(price[step])))
        at = step


def _cheapest(over: float, alive: Sequence[tuple[int, int]], layers: int, hull: Sequence[tuple[float, float]]) -> float:
    """The least seconds of recompute that saves ``over`` bytes where chunks have so many microbatches in flight and at most so many layers
    each; inf where nothing does."""
    steps = []
    left = layers
    for some, most in alive:
        size = min(left, most)
        left -= size
        if some:
            steps += [(price / some, gain * size * some) for gain, price in hull]
    seconds = 0.0
    for price, bytes_ in sorted(steps):
        take = min(over, bytes_)
        seconds += take * price
        over -= take
        if over <= 0:
            return seconds
    return float("inf")


def _whole_layers(over: float, alive: Sequence[tuple[int, int]], layers: int, kept: Floats, again: Floats) -> float:
    """``_cheapest`` in whole layers, exactly: for numbers of layers by mode, modes that save most go where most is in flight. 0 where there
    are too many to try."""
    gain = kept.max() - kept
    modes = sorted((m for m in range(len(kept)) if gain[m] > 0), key=lambda m: -gain[m])
    if not modes or (layers + 1) ** len(modes) > TRIED:
        return 0.0
    flying = [a for a, most in alive for _ in range(most)][:layers]
    total = np.concatenate([[0.0], np.cumsum(flying)])
    rows, _ = counts_by_mode(len(flying), len(modes))
    until = rows.cumsum(axis=1).astype(int)
    saved = np.diff(total[until], axis=1, prepend=0.0) @ gain[modes]
    good = saved >= over * (1 - 1e-12)
    return float((rows @ again[modes])[good].min(initial=np.inf))


def some_spans(column: Column, held: Sequence[int], layers: int) -> list[tuple[int, int]]:
    """Layers for a rank's chunks, as even as can be, somewhere in the model."""
    each, more = divmod(layers, len(held))
    sizes = [each + (place < more) for place in range(len(held))]
    out, at = [], 0
    for place, (chunk, size) in enumerate(zip(held, sizes, strict=True)):
        rest = sum(sizes[place:])
        at = 0 if chunk == 0 else column.layers - size if chunk == column.chunks - 1 else max(at, min(chunk, column.layers - rest))
        out.append((at, at + size))
        at += size
    return out


def plain(column: Column, fitting: Fitting, span: tuple[int, int], mode: int) -> Mix:
    """The mix in which all layers of a chunk have one mode."""
    return tuple(tuple(n if m == mode else 0 for m in range(len(column.modes))) for n in fitting.counts(*span))
