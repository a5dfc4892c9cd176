"""Samples -> curves: the forms of ``profiles.gpu`` and ``profiles.links``, fitted to what was measured on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from profiles import fit
from profiles.hardware import AttentionCurve, CollectiveCurve, Constant, GpuFacts, GpuProfile, Link, MatmulCurve, TrafficCurve
from profiles.measure.plan import LAYER_MIX
from profiles.measure.samples import Sample, usable
from profiles.operations import BYTES, Attend, Collective, Matmul, Pointwise, wire_bytes

FEWEST, FEWEST_PRODUCTS = 6, 8
"""Samples below which a curve of attention, or of matrix products, is not fitted."""
FEWEST_SIZES = 4


class TooFew(Exception):
    """There is not enough to fit a profile from."""


def source_of(facts: dict[str, Any]) -> str:
    """Where, when and with how many workers it was measured."""
    workers = facts.get("processes", facts.get("world", 1))
    return f"axisplan profile on {facts.get('host') or 'this machine'}, {facts.get('date', '')}, {workers} at once"


def gpu_profile(samples: Sequence[Sample], facts: dict[str, Any]) -> GpuProfile:
    """The profile that ``samples`` and ``facts`` (see ``gpu_worker``) give. Raises TooFew."""
    if "launch_seconds" not in facts:
        raise TooFew("the launch cost was not measured yet")
    source, cuda = source_of(facts), facts["device"] == "cuda"
    products: dict[str, list[Sample[Matmul]]] = {}
    for sample in usable(samples, Matmul):
        products.setdefault(sample.operation.dtype, []).append(sample)
    mixed = (
        {} if cuda else mixed_rates(samples, facts["launch_seconds"])
    )  # exponentials and unfused norms cost a CPU more than traffic
    rate = float(np.exp(np.mean(np.log(list(mixed.values()))))) if mixed else memory_rate(samples, facts["launch_seconds"])
    traffic = fastest_traffic(samples, rate)
    fitted = {d: fit_products(s, source, memory=traffic, derate=cuda) for d, s in products.items() if len(s) >= FEWEST_PRODUCTS}
    if not fitted:
        raise TooFew(f"fewer than {FEWEST_PRODUCTS} matrix products of one dtype were measured")

    def constant(value: float, unit: str) -> Constant:
        return Constant(float(value), unit, "measured", source)

    peaks = {d: constant(peak, "FLOP/s") for d, (peak, _, _) in fitted.items()}
    matmul = {d: curve for d, (_, curve, _) in fitted.items()}
    attention = fit_attention(samples, peaks, matmul, facts, source)
    return GpuProfile(
        name=gpu_name(str(facts["name"])) if cuda else f"cpu-{facts.get('host') or 'here'}",
        description=f"{facts['name']}, processes measured at once: {facts.get('processes', 1)}, threads of each: {facts.get('threads', 1)}",
        facts=GpuFacts(
            sms=constant(facts["sms"], "multiprocessors" if cuda else "process"),
            memory_reported_bytes=constant(facts["memory_reported_bytes"], "bytes"),
            memory_usable_bytes=constant(facts["memory_usable_bytes"], "bytes"),
            context_bytes=constant(facts["context_bytes"], "bytes"),
            memory_datasheet_bytes_per_second=constant(traffic, "bytes/s"),
            memory_achieved_bytes_per_second=constant(rate, "bytes/s"),
            launch_seconds=constant(facts["launch_seconds"], "s"),
            sustained_flops=constant(0.0, "FLOP"),
            sustained_matmul_speed=constant(1.0, "of measured"),
            weight_gradient_ratio=constant(float(np.median([ratio for _, _, ratio in fitted.values()])), "x forward"),
        ),
        peaks=peaks,
        matmul=matmul,
        attention=attention,
        traffic=TrafficCurve(rates=mixed, origin="measured", source=source) if len(mixed) > 1 else None,
        host=str(facts.get("host", "")),
        date=str(facts.get("date", "")),
    )


def gpu_name(reported: str) -> str:
    """``NVIDIA H100 80GB HBM3`` -> ``h100-80gb-hbm3``: the part that tells its generation comes first, as in built-in names."""
    return reported.lower().removeprefix("nvidia ").removeprefix("amd instinct ").replace(" ", "-")


def fit_products(
    samples: Sequence[Sample[Matmul]], source: str, *, memory: float, derate: bool
) -> tuple[float, MatmulCurve, float]:
    """(peak = best FLOP/s seen, curve, weight-gradient ratio) of one dtype's samples.

    The ratio is how much further weight gradients are above the curve of all than the other products are; the curve is then fitted
    again with their times divided by it.
    """
    ops = [s.operation for s in samples]
    peak = max(float(op.flops) / s.seconds for op, s in zip(ops, samples, strict=True))
    item = BYTES[ops[0].dtype]

    def curve(ratio: float) -> MatmulCurve:
        rows = [
            fit.MatmulSample(op.m, op.n, op.k, s.seconds / (ratio if op.weight_gradient else 1.0), op.batch)
            for op, s in zip(ops, samples, strict=True)
        ]
        return fit.fit_matmul(
            rows, peak=peak, item_bytes=item, out_bytes=max(item, 2.0), memory_bytes_per_second=memory, derate=derate,
            origin="measured", source=source,
        ).curve  # fmt: skip

    first = curve(1.0)
    off: dict[bool, list[float]] = {True: [1.0], False: [1.0]}
    for op, s in zip(ops, samples, strict=True):
        expected = first.seconds(peak, op.m, op.n, op.k, op.batch, item=item, out=max(item, 2.0))
        off[op.weight_gradient].append(s.seconds / float(expected))
    ratio = float(np.clip(np.median(off[True]) / np.median(off[False]), 0.8, 1.6))
    return peak, curve(ratio), ratio


def fit_attention(
    samples: Sequence[Sample], peaks: dict[str, Constant], matmul: dict[str, MatmulCurve], facts: dict[str, Any], source: str
) -> AttentionCurve:
    """Attention's curve, of the dtype and head size measured most; where too few were measured, half the matrix products' speed
    (an estimate). Backward over forward: the median over shapes timed both ways, by head size."""
    dtype = "bf16" if "bf16" in peaks else next(iter(peaks))
    timed = usable(samples, Attend)
    own = timed[0].operation.dtype if timed else dtype
    passes: dict[bool, dict[tuple[int, int, int, int], float]] = {False: {}, True: {}}
    for s in timed:
        op = s.operation
        if op.dtype == own:
            passes[op.backward][int(op.batch), int(op.q_len), int(op.heads), int(op.qk_dim)] = s.seconds
    forward, backward = passes[False], passes[True]
    counts = Counter(key[3] for key in forward)
    if not counts or max(counts.values()) < FEWEST:
        why = "half the speed of matrix products: too little attention was timed"
        return AttentionCurve(
            efficiency=0.5 * matmul[dtype].efficiency, t0_seconds=1e-5, s0=100, w0=0, head_dim_speed={128: 1.0},
            backward_ratio={128: 2.5}, origin="estimate", source=why,
        )  # fmt: skip
    ratios: dict[int, list[float]] = {}
    for key in forward.keys() & backward.keys():
        ratios.setdefault(key[3], []).append(backward[key] / forward[key])
    base = counts.most_common(1)[0][0]
    rows = [fit.AttentionSample(batch, length, heads, dim, seconds) for (batch, length, heads, dim), seconds in forward.items()]
    return fit.fit_attention(
        rows, peak=peaks[dtype].value, sms=float(facts["sms"]), head_dim=base, origin="measured", source=source,
        backward_ratio={dim: float(np.median(r)) for dim, r in sorted(ratios.items())} or None,
    ).curve  # fmt: skip


def memory_rate(samples: Sequence[Sample], launch_seconds: float) -> float:
    """Bytes/s of plain traffic on large tensors, ``launch_seconds`` a kernel taken off."""
    rates = traffic_rates(samples, launch_seconds)
    plain = [found["add"] for found in rates.values() if "add" in found] or [max(found.values()) for found in rates.values()]
    return max(plain)


def mixed_rates(samples: Sequence[Sample], launch_seconds: float) -> dict[int, float]:
    """Bytes/s of a layer's mix of pointwise forms by what a kernel moves, where all of the mix was timed; more bytes never take less
    time."""
    whole = {s: found for s, found in traffic_rates(samples, launch_seconds).items() if LAYER_MIX.keys() <= found.keys()}
    parts = sum(LAYER_MIX.values())
    times = [np.log(size * sum(part / found[form] for form, part in LAYER_MIX.items()) / parts) for size, found in whole.items()]
    return {size: float(f"{size / np.exp(time):.4g}") for size, time in zip(whole, fit.nondecreasing(times), strict=True)}


def traffic_rates(samples: Sequence[Sample], launch_seconds: float) -> dict[int, dict[str, float]]:
    """Bytes/s by what a kernel moves, ascending, and form; launches taken off. Raises TooFew where there are none."""
    rates: dict[int, dict[str, float]] = {}
    for s in usable(samples, Pointwise):
        op = s.operation
        busy = max(s.seconds - op.kernels * launch_seconds, 0.2 * s.seconds)
        rates.setdefault(round(op.bytes / op.kernels), {})[s.form] = op.bytes / busy
    if not rates:
        raise TooFew("no memory traffic was measured")
    return dict(sorted(rates.items()))


def fastest_traffic(samples: Sequence[Sample], rate: float) -> float:
    """The best bytes/s any form reached."""
    return max([rate, *(float(s.operation.bytes) / s.seconds for s in usable(samples, Pointwise))])


def link(samples: Sequence[Sample], facts: dict[str, Any], *, name: str = "") -> tuple[Link, dict[str, fit.Errors]]:
    """The link that ``samples`` show, one row a collective and group size, from the samples with most groups at once (as in
    training), and each row's errors on message sizes held out of it. Raises TooFew."""
    source = source_of(facts)
    rows: dict[str, tuple[CollectiveCurve, ...]] = {}
    errors: dict[str, fit.Errors] = {}
    best = 0.0
    for (kind, ranks), timed in sorted(by_curve(samples).items()):
        if len(timed) < FEWEST_SIZES:
            continue
        points = [fit.CollectiveSample(kind, ranks, s.operation.bytes, s.seconds) for s in timed]
        found = fit.fit_collective(points, origin="measured", source=source)[kind][0]
        fastest = max(float(wire_bytes(kind, p.bytes, ranks)) / p.seconds for p in points)
        best = max(best, fastest)
        rows[kind] = (*rows.get(kind, ()), bounded(found.curve, points, fastest))
        errors[f"{kind} over {ranks}"] = found.errors
    if not rows:
        raise TooFew(f"fewer than {FEWEST_SIZES} message sizes of any collective were measured")
    peak = Constant(best, "bytes/s", "measured", source)
    made = Link(
        name=name or f"{facts.get('backend', 'gloo')} on {facts.get('host') or 'this machine'}",
        peak_bytes_per_second=peak,
        curves=rows,
    )
    return made, errors


def bounded(curve: CollectiveCurve, points: Sequence[fit.CollectiveSample], fastest: float) -> CollectiveCurve:
    """The curve, unless it says that large messages go over twice as fast as any that was measured (the square root took all of
    the growth, as with few sizes it may): then latency and bandwidth alone."""
    if curve.bytes_per_second <= 2 * fastest:
        return curve
    wire = np.array([float(wire_bytes(p.kind, p.bytes, p.ranks)) for p in points])
    alpha, inverse = fit.nonnegative(np.stack([np.ones_like(wire), wire], axis=1), np.array([p.seconds for p in points]))
    return replace(curve, alpha_seconds=float(alpha), bytes_per_second=float(1 / max(inverse, 0.5 / fastest)), sqrt_seconds=0.0)


def no_link(source: str) -> Link:
    """The link of a machine with one worker: never used, and never fast."""
    row = CollectiveCurve(
        ranks=2, alpha_seconds=1e-3, bytes_per_second=1e9, origin="estimate", source="one worker: nothing to measure"
    )
    return Link(name="none", peak_bytes_per_second=Constant(1e9, "bytes/s", "estimate", source), curves={"all_reduce": (row,)})


def by_curve(samples: Sequence[Sample]) -> dict[tuple[str, int], list[Sample[Collective]]]:
    """Samples by (collective, group size), of each axis those with most groups at once and no other axis beside them."""
    timed = [s for s in usable(samples, Collective) if not s.beside]
    most: dict[str, int] = {}
    for s in timed:
        axis = s.operation.axis
        most[axis] = max(most.get(axis, 1), s.groups)
    found: dict[tuple[str, int], list[Sample[Collective]]] = {}
    for s in timed:
        op = s.operation
        if s.groups == most[op.axis]:
            found.setdefault((op.kind, s.ranks), []).append(s)
    return found
