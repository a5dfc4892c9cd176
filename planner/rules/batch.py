"""Rules of the batch and the sequence: what divides what, and how many microbatches a schedule needs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cost_models.layout import divisors
from planner.rules.core import Break, Case, rule

FP8_TOKENS = {"fp8": 16, "mxfp8": 32, "nvfp4": 16}
"""Rows of a matrix product that 8- and 4-bit kernels need in multiples (B08; MX blocks are 32 long)."""


def _multiples(unit: int, value: int) -> tuple[int, ...]:
    low = value // unit * unit
    return tuple(v for v in (low, low + unit) if v > 0)


@rule("batch", "micro_batch dp", "micro_batch * dp divides the global batch")
def batch_divides(case: Case) -> Iterator[Break]:
    layout, batch = case.layout, case.job.global_batch
    micro, dp = layout.micro_batch, layout.dp
    if batch % (micro * dp) == 0:
        return
    if batch % dp == 0:
        each = batch // dp
        message = f"global batch {batch} = {each} sequences for each of dp = {dp} does not divide by micro_batch {micro}"
        yield Break("micro_batch", micro, message, tuple(divisors(each)))
    else:
        unit = micro * dp
        yield Break(
            "global_batch",
            batch,
            f"does not divide by micro_batch*dp = {micro}*{dp} = {unit}; multiples of it do",
            _multiples(unit, batch),
        )


def _microbatches(case: Case) -> int:
    return max(1, int(case.job.global_batch // (case.layout.micro_batch * case.layout.dp)))


def _needed(case: Case) -> tuple[int, str]:
    """The least number of microbatches the schedule runs with, and why."""
    layout, limits = case.layout, case.limits
    pp = layout.pp
    if layout.schedule == "interleaved":
        return pp, "an interleaved pipeline needs at least pp microbatches"
    if layout.schedule == "dualpipe":
        return 2 * pp, "DualPipe feeds both ends and needs 2*pp microbatches"
    if layout.schedule == "dualpipe-v":
        return 2 * pp, "DualPipe-V needs as many microbatches as it has stages, 2*pp"
    if layout.schedule in ("1f1b", "zb-h1") and limits.first_full_microbatches:
        return pp, f"{layout.schedule} needs at least pp microbatches"
    return 1, ""


@rule("batch", "pp micro_batch dp schedule", "there are enough microbatches for the schedule")
def enough_microbatches(case: Case) -> Iterator[Break]:
    layout = case.layout
    if layout.pp == 1:
        return
    have, (need, why) = _microbatches(case), _needed(case)
    if have < need:
        unit = layout.micro_batch * layout.dp
        yield Break("global_batch", case.job.global_batch,
                    f"global batch {case.job.global_batch} / (micro_batch {layout.micro_batch} * dp {layout.dp}) = {have} microbatches,"
                    f" {why} (pp = {layout.pp}): a global batch of {need * unit} or more", (need * unit,))  # fmt: skip


@rule("batch", "pp micro_batch dp schedule", "the microbatches come in the groups that the schedule runs")
def microbatches_in_groups(case: Case) -> Iterator[Break]:
    layout = case.layout
    m, pp = _microbatches(case), layout.pp
    if pp == 1:
        return
    unit = layout.micro_batch * layout.dp
    if layout.schedule == "interleaved" and m >= pp:
        group = pp if case.limits.interleaved_multiple == "pp" else max(1, m // pp)
        if m % group:
            legal = [
                n for n in range(pp, 2 * m + pp) if n % (pp if case.limits.interleaved_multiple == "pp" else max(1, n // pp)) == 0
            ]
            message = (
                f"{m} microbatches (global batch / (micro_batch {layout.micro_batch} * dp {layout.dp})) do not divide by {group}, the"
                f" group of an interleaved pipeline of pp = {pp}"
            )
            yield Break("global_batch", case.job.global_batch, message, tuple(n * unit for n in legal))
    if layout.schedule == "dualpipe" and m % 2:
        yield Break(
            "global_batch",
            case.job.global_batch,
            f"DualPipe needs an even number of microbatches, has {m}",
            _multiples(2 * unit, m * unit),
        )


@rule("batch", "tp cp cp_kind sp", "the sequence divides over context and sequence parallelism")
def sequence_divides(case: Case) -> Iterator[Break]:
    layout, seq = case.layout, case.job.seq_len
    unit = (1 if layout.cp == 1 else layout.cp if layout.ring == 1 else 2 * layout.cp) * (layout.tp if layout.sp else 1)
    if seq % unit:
        parts = " * ".join(
            ([] if layout.cp == 1 else ["cp"] if layout.ring == 1 else ["2*cp"]) + (["tp"] if layout.sp and layout.tp > 1 else [])
        )
        up = math.ceil(seq / unit) * unit
        yield Break(
            "seq_len",
            seq,
            f"{seq} tokens a sequence do not divide by {parts} = {unit}; the next length that does is {up}",
            _multiples(unit, seq),
        )


@rule("batch", "cp micro_batch", "8- and 4-bit matrix products need a multiple of 16 (MX: 32) tokens a rank")
def tokens_suit_the_precision(case: Case) -> Iterator[Break]:
    layout, job = case.layout, case.job
    need = FP8_TOKENS.get(job.precision, 1)
    tokens = job.seq_len // layout.cp * layout.micro_batch
    if tokens % need:
        unit = layout.cp * need // math.gcd(layout.micro_batch, need)
        up = math.ceil(job.seq_len / unit) * unit
        yield Break("seq_len", job.seq_len, f"{tokens} tokens a rank are no multiple of {need}, which {job.precision} needs;"
                    f" the next length that suits is {up}", _multiples(unit, job.seq_len))  # fmt: skip


@rule("batch", "", "the sequence is no longer than the model's positions")
def sequence_within_positions(case: Case) -> Iterator[Break]:
    job = case.job
    rows = job.model.learned_positions
    limit = rows if rows else job.model.max_seq_len if case.limits.positions == "model" else 0
    if limit and job.seq_len > limit:
        yield Break("seq_len", job.seq_len, f"{job.model.name} has positions for {limit} tokens", (limit,))
