"""``solve``: from a request to a plan, with its certificate.

The mathematics stands in ``planner.program`` (the integer program and its constraint families), ``planner.bounds`` (what is known without
it) and ``planner.search`` (how columns are cut and counted); here the answer becomes a plan: the tie between near-equal ones, the
runners-up and what each loses, and, when nothing fits, what would.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.step import StepEstimate, estimate
from cost_models.uncertainty import chance_faster, flipping_cause
from planner.answers import family
from planner.books import Found, Outcome
from planner.chunked_loss import chunked
from planner.columns import takes_turns
from planner.legality import require_job
from planner.plan import (
    Certificate,
    Plan,
    RunnerUp,
    cluster_dump,
    execution_dump,
    hashes,
    job_record,
    layout_dump,
    model_dump,
    stages_of,
)
from planner.search import Search
from planner.solve_column import PROVED
from planner.space import UNEVEN_VPP, Space, read_wishes
from profiles.errors import DoesNotFit, InputError

if TYPE_CHECKING:
    from planner.pools import Pools


@dataclass(frozen=True)
class PlanRequest:
    """What ``axisplan plan`` is asked for.

    ``pins``: wishes such as ``tp=8,pp<=4``; ``exclude``: layouts that meet all wishes of an entry are left out; ``top``: runners-up
    wanted; ``similar``: also ones that differ only in micro batch, schedule or sharding; ``tie``: how much slower than the fastest
    the plan proposed may be for fewer axes or more headroom; ``prove``: search until the gap is 1e-4; ``time_limit``: seconds after which the
    search ends with what it has, the gap said (the plan then depends on the machine); ``offload``: host memory may
    be used.
    """

    job: Job
    pins: str = ""
    exclude: tuple[str, ...] = ()
    objective: str = "step-time"
    top: int = 3
    similar: bool = False
    tie: float = 0.01
    prove: bool = False
    offload: bool = False
    time_limit: float | None = None
    report: Callable[[float, str], None] | None = field(default=None, compare=False)
    """Is told how far the search is."""

    def __post_init__(self) -> None:
        if not 0 <= self.tie < 1:
            raise InputError("tie", self.tie, "is a share between 0 and 1", 0.01)
        if self.time_limit is not None and not self.time_limit > 0:
            raise InputError("time_limit", self.time_limit, "is a number of seconds above 0", 60)
        if self.top < 0:
            raise InputError("top", self.top, "must not be negative", 0)

    def deadline(self) -> float | None:
        """``time.monotonic()`` at which a search that starts now ends; None without a limit."""
        return None if self.time_limit is None else time.monotonic() + self.time_limit


def search(request: PlanRequest, *, extra: int | None = None) -> tuple[Search, Outcome]:
    """Run the search of a request. Raises InputError where pins leave no legal layout."""
    job = request.job
    require_job(job)
    space = Space(job, read_wishes(request.pins), [read_wishes(e) for e in request.exclude], offload=request.offload)
    found = Search(
        job, space, request.prove, request.top if extra is None else extra, deadline=request.deadline(), report=request.report
    )
    outcome = found.run()
    if not outcome.books.legal:
        raise InputError("layout", request.pins or "any", no_legal_layout(request), None)
    return found, outcome


def solve(request: PlanRequest) -> Plan:
    """The plan for a request. Raises InputError for pins that nothing legal meets, DoesNotFit where no legal layout fits."""
    if request.job.cluster.pools:
        return _solve_pools(request)
    found, outcome = search(request)
    if outcome.fastest is None:
        from planner.remedies import does_not_fit

        raise DoesNotFit(does_not_fit(request, found, outcome))
    chosen = propose(request, outcome)
    job, remark = chunked(request.job, layout_of(chosen))
    if job is not request.job:
        plan = solve(replace(request, job=job))
    else:
        plan = plan_of(request, found, outcome, chosen)
    return plan.model_copy(update={"warnings": [*plan.warnings, remark]}) if remark else plan


def _solve_pools(request: PlanRequest) -> Plan:
    """The plan of a cluster of several GPU types (``planner.pools``); its cluster has the pools in the order in which stages stand on them."""
    from planner.pools import search_pools

    require_job(request.job)
    wishes = read_wishes(request.pins), [read_wishes(e) for e in request.exclude]
    found, outcome = search_pools(request.job, *wishes, offload=request.offload, prove=request.prove, deadline=request.deadline())
    pools = found.job.cluster.pools
    if outcome.fastest is None:
        sizes = ", ".join(f"{p.gpus} x {p.gpu.name}" for p in pools)
        raise DoesNotFit(
            f"no feasible layout: {request.job.model.name} on {sizes} ({outcome.books.legal} legal columns, the likely ones tried)"
        )
    request = replace(request, job=found.job)
    plan = plan_of(request, found, outcome, propose(request, outcome))
    first, ranks = 0, []
    for pool in pools:
        ranks.append(f"{first} to {first + pool.gpus - 1} on {pool.gpu.name}")
        first += pool.gpus
    return plan.model_copy(update={"warnings": [*plan.warnings, f"ranks {', '.join(ranks)}: list the hosts in this order"]})


def propose(request: PlanRequest, outcome: Outcome) -> Found:
    """The fastest, or one within ``tie`` of it that has fewer axes, then the shorter description, then the smaller time."""
    assert outcome.fastest is not None
    bar = outcome.fastest.answer.seconds * (1 + request.tie)
    near = [f for f in outcome.found if f.answer.seconds <= bar] if request.tie else [outcome.fastest]
    return min(near, key=lambda f: (axes(f), f.batch.vpp, recomputed(f), f.answer.seconds, layout_of(f).text()))


def axes(found: Found) -> int:
    """Axes of the layout whose degree exceeds one."""
    p = found.prefix
    return (
        sum(d > 1 for d in (p.tp, p.ring, p.ulysses, p.pp, p.ep, p.etp))
        + (found.shard.dp_replicate > 1)
        + (found.shard.dp_shard > 1)
    )


def recomputed(found: Found) -> int:
    return sum(n for mix in found.answer.mixes for row in mix for n in row[1:])


def layout_of(found: Found) -> Layout:
    return found.answer.column.layout_of(found.answer.stages, found.answer.mixes)


def plan_of(request: PlanRequest, search: Search | Pools, outcome: Outcome, chosen: Found) -> Plan:
    """The artefact."""
    job = request.job
    assert outcome.fastest is not None
    layout = layout_of(chosen)
    detail = estimate(job, layout)
    seconds = outcome.fastest.answer.seconds
    gap = max(0.0, 1 - outcome.best_bound / seconds)
    books = outcome.books
    certificate = Certificate(
        columns_legal=books.legal, cut_by_memory=books.by_memory, cut_by_bound=books.by_bound, cut_by_dominance=books.by_dominance,
        solved=books.solved,
        unexplored=books.unexplored,
        best_bound_seconds=outcome.best_bound, fastest_seconds=seconds, gap=gap, proved=gap <= PROVED, proposed_seconds=detail.step_seconds,
        tie=request.tie, objective=request.objective, solver=solver_name(), cuts=books.cuts, space=declared(search),
        pins={str(i): str(w) for i, w in enumerate(search.space.pins)},
    )  # fmt: skip
    runners = runners_up(request, outcome, chosen, detail)
    return Plan(
        model=model_dump(job.model), cluster=cluster_dump(job.cluster), execution=execution_dump(job.execution), inputs=hashes(job),
        job_settings=job_record(job), layout=layout_dump(layout), layout_text=layout.text(), stages=stages_of(job, layout),
        estimate=detail.to_json(), certificate=certificate, runners_up=runners, warnings=warnings(job, layout, detail),
    )  # fmt: skip


def runners_up(request: PlanRequest, outcome: Outcome, chosen: Found, detail: StepEstimate) -> list[RunnerUp]:
    """The next best really different layouts, and what each loses."""
    if not request.top:
        return []
    job = request.job
    seen = set() if request.similar else {family(chosen.prefix, chosen.shard)}
    out = []
    for found in sorted(outcome.found, key=lambda f: (f.answer.seconds, layout_of(f).text())):
        kind = family(found.prefix, found.shard)
        if found is chosen or (not request.similar and kind in seen):
            continue
        seen.add(kind)
        layout = layout_of(found)
        other = estimate(job, layout)
        loses = {c: other.seconds.get(c, 0.0) - detail.seconds.get(c, 0.0) for c in sorted({*detail.seconds, *other.seconds})}
        flip = flipping_cause(job, detail.seconds, other.seconds)
        out.append(
            RunnerUp(
                layout=layout_dump(layout), layout_text=layout.text(), estimate=other.to_json(),
                slower=other.step_seconds / detail.step_seconds - 1, loses={c: s for c, s in loses.items() if abs(s) > 1e-12},
                chance_faster=chance_faster(job, detail.seconds, other.seconds),
                flips="" if flip is None else f"{flip[0]} {flip[1]:+.0%}",
            )
        )  # fmt: skip
        if len(out) == request.top:
            break
    return out


def warnings(job: Job, layout: Layout, detail: StepEstimate) -> list[str]:
    """What a reader of the plan should know before launching it."""
    out = []
    worst = max(detail.memory, key=lambda s: s.needed)
    if worst.init_peak > worst.device:
        out.append(f"building the model needs more memory on stage {worst.stage} than training it does")
    moe = job.model.moe
    if moe is not None and layout.pp > 1:
        empty = [s.stage for s in stages_of(job, layout) if not any(_has_moe(job, r) for r in s.layers)]
        if empty:
            out.append(f"stage {empty[0]} holds no MoE layer; some frameworks hang there (megatron-core 0.11)")
    if moe is not None and layout.zero == 3 and not job.execution.grouped_gemm:
        out.append("ZeRO-3 with experts in a loop: an expert without tokens must still gather its parameters on every rank")
    return out


def _has_moe(job: Job, layers: list[int]) -> bool:
    return bool(layers) and any(getattr(job.model.layer(i).ffn, "kind", "") == "moe" for i in range(layers[0], layers[1] + 1))


def solver_name() -> str:
    """The solver behind PuLP."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"PuLP {version('pulp')} with HiGHS {version('highspy')}"
    except PackageNotFoundError:
        return "PuLP with CBC"


TURNS = ", fitting both in their order and with the layers of a kind together"
"""What is planned where kinds of layers take turns."""


def declared(search: Search | Pools) -> str:
    """The declared space in words."""
    limits, modes = search.space.limits, [_mode(m) for m in search.modes]
    turns = takes_turns(search.job.model.pattern)
    how = {
        "layer": "a chunk mixes two of them for its most frequent layer kind, one for each other kind",
        "block": "one for the whole model, or the first n layers of every chunk in full",
        "model": "one for the whole model",
    }["model" if limits.recompute == "block" and turns else limits.recompute]
    return (
        f"tp, pp, cp ({', '.join(limits.cp_kinds)}), ep: every divisor; etp: 1 or tp;"
        f" vpp to {UNEVEN_VPP}, beyond where chunks are even; orders {', '.join(limits.orders)}; ZeRO"
        f" {', '.join(map(str, limits.zero))} over every split of dp; every micro batch; {', '.join(search.space.schedules(2))};"
        " uneven stages, each with a layer; a rank's chunks alike, or either of two, the last ones of more, with one more;"
        f" recompute {', '.join(modes)}: {how}{TURNS if turns else ''}; offload {'allowed' if search.space.offload else 'not used'}"
        + ("; every order of the pools, a stage inside one, DualPipe's pairs left out" if search.job.cluster.pools else "")
    )


def _mode(rule: Any) -> str:
    return f"{rule.mode}({','.join(rule.modules)})" if rule.modules else str(rule.mode)


def no_legal_layout(request: PlanRequest) -> str:
    """Why the job, its pins and what is excluded leave nothing: the rules that a pinned layout breaks."""
    from planner.legality import read_layout, violations

    pinned = [w for w in read_wishes(request.pins) if w.op == "=" and len(w.values) == 1 and w.field != "offload"]
    left = " and is not excluded" if request.exclude else ""
    if not pinned:
        job = request.job
        return (
            f"no layout of {job.cluster.gpus} GPUs is legal for {job.model.name} under {job.execution.name} with {job.global_batch} "
            f"sequences of {job.seq_len} tokens a step{left}"
        )
    try:
        layout = read_layout(request.job, ",".join(f"{w.field}={w.values[0]}" for w in pinned))
        broken = violations(request.job, layout)
    except InputError as error:
        return str(error)
    return f"no legal layout meets the pins{left}" + "".join(f" | {v.line()}" for v in broken)
