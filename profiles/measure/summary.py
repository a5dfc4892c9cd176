"""A measurement in rows of text for a table: what was found, how well it fits, what failed, how noisy it was."""

from __future__ import annotations

from collections import Counter

from profiles.measure.fitting import Errors
from profiles.measure.gpu import GpuMeasurement, describe
from profiles.measure.layer_profile import LayerProfile
from profiles.measure.links import LinkMeasurement

Rows = list[tuple[str, str]]
"""(what, what was found)."""
GIB = 2.0**30


def scaled(value: float, unit: str) -> str:
    """1.234e11, FLOP/s -> 123 GFLOP/s."""
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"


def seconds(value: float) -> str:
    """2.5e-5 -> 25 us."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def _judged(errors: Errors | None, of: str) -> str:
    if errors is None:
        return "no held-out " + of
    return f"error on {errors.count} held-out {of}: median {100 * errors.median:.0f} %, 90th percentile {100 * errors.p90:.0f} %"


def gpu_rows(measured: GpuMeasurement) -> Rows:
    """Of a device: each dtype's products, attention, memory, launches, failures, noise."""
    rows: Rows = []
    profile = measured.profile
    if profile is None:
        rows.append(("fit", f"none: interrupted after {len(measured.samples)} samples"))
    else:
        for dtype in profile.matmul:
            rate = scaled(profile.peak_flops(dtype), "FLOP/s")
            rows.append((f"products, {dtype}", f"up to {rate}; {_judged(measured.held_out.get(f'matmul {dtype}'), 'shapes')}"))
        error, origin = profile.attention.heldout_error, profile.attention.origin
        how = profile.attention.source if origin != "measured" else f"error on held-out lengths: mean {100 * (error or 0):.0f} %"
        rows.append(("attention", f"{origin}; {how}"))
        rows.append(("pointwise work", scaled(profile.memory_bytes_per_second, "B/s")))
        rows.append(("launch", seconds(profile.launch_seconds)))
        rows.append(("usable memory", f"{profile.usable_bytes / GIB:.2f} GiB of {profile.memory_bytes / GIB:.2f} a worker"))
    for reason, count in Counter(s.failed for s in measured.failures).items():
        example = next(s for s in measured.failures if s.failed == reason)
        rows.append(("not measured", f"{count}: {describe(example)}"))
    return [*rows, ("noise", str(measured.noise))]


def link_rows(measured: LinkMeasurement) -> Rows:
    """Of links: each collective and group size, contention, failures, noise."""
    rows: Rows = []
    if measured.link is None:
        rows.append(("fit", f"none: interrupted after {len(measured.samples)} samples"))
    else:
        for kind, curves in measured.link.curves.items():
            for row in curves:
                text = f"{seconds(row.alpha_seconds)} + {scaled(row.bytes_per_second, 'B/s')}"
                judged = _judged(measured.held_out.get(f"{kind} over {row.ranks}"), "sizes")
                rows.append((f"{kind.replace('_', '-')} over {row.ranks}", f"{text}; {judged}"))
    for axis, ratio in measured.contention.items():
        rows.append(
            (
                f"contention, {axis}",
                f"{ratio:.2f} x the time of one group alone, when all communicate at once (messages from 1 MiB)",
            )
        )
    for reason, count in Counter(s.failed for s in measured.failures).items():
        rows.append(("not measured", f"{count}: {reason}"))
    return [*rows, ("noise", str(measured.noise))]


LAYER_HEADER = ("layer", "tp", "micro batch", "tokens", "forward", "backward", "GFLOP", "kept MiB", "peak MiB")


def layer_rows(profile: LayerProfile) -> list[tuple[str, ...]]:
    """Of layers: one row a shape, under ``LAYER_HEADER``."""
    rows: list[tuple[str, ...]] = []
    for row in profile.rows:
        shape = (row.name, str(row.tp), str(row.micro_batch), str(row.seq_len))
        if row.failed:
            rows.append((*shape, row.failed, "", "", "", ""))
            continue
        work = f"{(row.forward_flops + row.backward_flops) / 1e9:.2f}"
        kept, peak = f"{row.saved_bytes / 2**20:.1f}", f"{row.peak_bytes / 2**20:.1f}"
        rows.append((*shape, seconds(row.forward_seconds), seconds(row.backward_seconds), work, kept, peak))
    return rows
