"""Rules of pipeline schedules: how many chunks a rank holds, and what a schedule goes with."""

from __future__ import annotations

from collections.abc import Iterator

from cost_models.layout import SPLIT_BACKWARD, V_SHAPED
from planner.rules.core import Break, Case, listed, rule


def chunks_of(schedule: str) -> tuple[int, int | None]:
    """Least and most chunks a rank of ``schedule`` (None: no upper limit)."""
    if schedule == "interleaved":
        return 2, None
    if schedule in V_SHAPED:
        return 2, 2
    return 1, 1


@rule("schedule", "schedule", "the target runs this schedule")
def schedule_is_expressible(case: Case) -> Iterator[Break]:
    schedule, known = case.layout.schedule, case.limits.schedules
    if schedule not in known and case.layout.pp > 1:
        yield Break("schedule", schedule, f"{case.limits.target} runs {listed(known)}", tuple(known))


@rule("schedule", "pp vpp schedule", "the schedule holds as many chunks a rank as vpp says")
def chunks_suit_the_schedule(case: Case) -> Iterator[Break]:
    layout = case.layout
    low, high = chunks_of(layout.schedule)
    if layout.pp == 1:
        if layout.vpp > 1:
            yield Break("vpp", layout.vpp, "virtual stages need a pipeline (pp > 1)", (1,))
        return
    if layout.vpp < low or (high is not None and layout.vpp > high):
        legal = f"{low} or more" if high is None else str(low)
        yield Break("vpp", layout.vpp, f"{layout.schedule} holds {legal} chunks a rank", tuple(range(low, (high or 8) + 1)))


@rule("schedule", "pp schedule", "DualPipe pairs the ranks of a pipeline from both ends")
def dualpipe_needs_even_stages(case: Case) -> Iterator[Break]:
    if case.layout.schedule == "dualpipe" and case.layout.pp > 1 and case.layout.pp % 2:
        yield Break("pp", case.layout.pp, "DualPipe needs an even number of stages")


@rule(
    "schedule",
    "pp schedule zero",
    "sharded parameters are not released between the halves of a split backward, where the target would go wrong",
)
def zero3_and_split_backward(case: Case) -> Iterator[Break]:
    layout = case.layout
    if layout.pp > 1 and layout.zero == 3 and layout.schedule in SPLIT_BACKWARD and not case.limits.zero3_with_split_backward:
        yield Break(
            "zero", 3, f"{case.limits.target}: gradients go wrong when parameters are resharded inside {layout.schedule}", (2, 1, 0)
        )


@rule(
    "schedule",
    "pp schedule zero",
    "a tied embedding whose two ends share a rank (V-shaped schedules) keeps its parameters whole, where the target says so",
)
def tied_ends_and_sharding(case: Case) -> Iterator[Break]:
    layout = case.layout
    together = layout.pp > 1 and layout.schedule in V_SHAPED and case.job.model.tied
    if together and layout.zero == 3 and not case.limits.shards_tied_ends:
        yield Break(
            "zero",
            3,
            f"{case.limits.target} does not shard an embedding whose two ends share a rank ({layout.schedule})",
            (2, 1, 0),
        )
