"""Objectives beyond the step time of a fixed batch on a fixed cluster: a batch that may vary, fewer GPUs, a token budget, Pareto fronts.

Each is the step-time program (``planner.solve``) solved on several jobs: sub-clusters of whole nodes (or parts of one node), batches,
or memory limits. The answer is the best of those solved, and the certificate's notes name them: it is proved for each job by that
job's own certificate, not for GPU counts or batches that were not tried.

    tokens-per-second-per-gpu   most tokens a second, over the batches allowed
    fewest-gpus                 the fewest GPUs that meet the deadline (of a step, or of a token budget): the usual counts, then bisection
    gpu-hours, cost             least for a token budget, over GPU counts that meet the deadline where one is given
    pareto-gpus                 GPU counts with the step time of each, those that another beats on both left out
    pareto-memory               step time against free memory: solved again and again for a smaller limit
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cost_models.job import GIB, Job
from cost_models.layout import divisors
from planner.plan import Plan
from planner.solve import PlanRequest, solve
from planner.space import Space, read_wishes
from profiles.errors import DoesNotFit, InputError

OBJECTIVES = ("step-time", "tokens-per-second-per-gpu", "gpu-hours", "cost", "fewest-gpus", "pareto-gpus", "pareto-memory")
WITH_DEADLINE = ("fewest-gpus", "gpu-hours", "cost")
MOST_BATCHES = 8
FRONT_POINTS = 6
ROOMIER = 0.1
"""Each point of the memory front must use this share less device memory than the one before."""
Report = Callable[[float, str], None]


@dataclass(frozen=True)
class Failures:
    """What ``--mtbf`` and its companions say."""

    mtbf_hours: float
    checkpoint_seconds: float
    restart_seconds: float
    repair_hours: float = 24.0
    spare: int | None = None


@dataclass(frozen=True)
class Goal:
    """What is wanted of a plan besides the request. ``tokens``: to train on in all; ``deadline_seconds``: of all ``tokens``, or of one
    step where there is no budget; ``batches``: global batches (sequences) to choose from; ``failures``: waiting for them counts."""

    objective: str = "step-time"
    tokens: float | None = None
    deadline_seconds: float | None = None
    batches: tuple[int, ...] = ()
    failures: Failures | None = None

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InputError("--objective", self.objective, f"is one of {', '.join(OBJECTIVES)}", OBJECTIVES[0])
        if self.tokens is None and self.objective in ("gpu-hours", "cost"):
            raise InputError("--objective", self.objective, "needs a token budget (--tokens)", "--tokens 1e12")
        if self.deadline_seconds is None and self.objective == "fewest-gpus":
            raise InputError("--objective", self.objective, "needs a deadline (--deadline)", "--deadline 30d")
        if self.deadline_seconds is not None and self.objective not in WITH_DEADLINE:
            rule = f"is kept by the objectives {', '.join(WITH_DEADLINE)}; {self.objective} does not look at it"
            raise InputError("--deadline", f"{self.deadline_seconds / 3600:g} h", rule, "--objective fewest-gpus")


def read_deadline(text: str) -> float:
    """``30d``, ``12h``, ``15m`` or ``90s`` (or a number of seconds) in seconds. Raises InputError."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([dhms]?)\s*", text)
    try:
        value = float(match[1]) if match else 0.0
    except ValueError:
        value = 0.0
    if not match or not 0 < value < math.inf:
        raise InputError("--deadline", text, "is a time above 0 such as 30d, 12h or 90s", "30d")
    return value * {"d": 86400.0, "h": 3600.0, "m": 60.0}.get(match[2], 1.0)


def read_tokens(text: str) -> float:
    """``15T``, ``300B``, ``4M`` or ``1e12`` tokens (decimal). Raises InputError."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kKmMbBgGtT]?)\s*", text)
    try:
        value = float(match[1]) if match else 0.0
    except ValueError:
        value = 0.0
    if not match or not 0 < value < math.inf:
        raise InputError("--tokens", text, "is a count above 0 such as 15T, 300B or 1e12", "1T")
    return value * {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}.get(match[2].lower(), 1.0)


def read_batches(text: str, seq_len: int, gpus: int) -> tuple[int, ...]:
    """``512`` sequences, or ``4M..16M`` tokens (k = 1,024, M = 1,048,576, as in lengths): batches in sequences, the most divisible of
    the range, at most ``MOST_BATCHES``. Raises InputError."""
    from planner.command_line import Tokens

    read = Tokens()
    low, dots, high = text.partition("..")
    if not dots:
        return (read.convert(text, None, None),)
    try:
        least, most = (read.convert(part, None, None) for part in (low, high))
    except InputError:
        raise InputError(
            "--global-batch", text, "is a range of tokens a step, LOW..HIGH, such as 4M..16M", f"{seq_len}..{2 * seq_len}"
        ) from None
    if least > most:
        raise InputError("--global-batch", text, "is a range of tokens a step, the smaller number first", f"{high}..{low}")
    first, last = -(-least // seq_len), most // seq_len
    if first > last:
        near = max(1, round((least + most) / 2 / seq_len)) * seq_len
        raise InputError(
            "--global-batch",
            text,
            f"holds no whole number of sequences of {seq_len} tokens",
            f"{min(near, least)}..{max(near, most)}",
        )
    for unit in sorted({*divisors(gpus), 1}, reverse=True):
        found = list(range(-(-first // unit) * unit, last + 1, unit))
        if len(found) >= min(MOST_BATCHES // 2, last - first + 1):
            break
    step = -(-len(found) // MOST_BATCHES)
    return tuple(found[::step])


def answer(request: PlanRequest, goal: Goal, report: Report | None = None) -> Plan:
    """The plan that meets ``goal`` best, with its Pareto front and goodput. Raises InputError, and DoesNotFit where nothing does."""
    request = replace(request, objective=goal.objective)
    tell = report or (lambda share, what: None)
    if goal.objective == "fewest-gpus":
        plan = _fewest(request, goal, tell)
    elif goal.objective in ("gpu-hours", "cost"):
        plan = _cheapest(request, goal, tell)
    elif goal.objective == "pareto-gpus":
        plan = _front_of_gpus(request, goal, tell)
    elif goal.objective == "pareto-memory":
        plan = _front_of_memory(request, goal, tell)
    else:
        plan = best_batch(request, goal)
    return with_goodput(plan, goal)


def with_goodput(plan: Plan, goal: Goal) -> Plan:
    """The plan with what failures cost it, and what the token budget takes."""
    if goal.failures is None and goal.tokens is None:
        return plan
    record: dict[str, Any] = {}
    nodes, job = nodes_of(plan), plan.job()
    share = 1.0
    if goal.failures is not None:
        found = _goodput(nodes, goal.failures, plan.step_seconds)
        share = found.useful_fraction * found.availability
        record = found.to_json()
    if goal.tokens is not None:
        seconds = run_seconds(plan, goal)
        paid = job.cluster.gpus * (1 + record.get("spare_nodes", 0) / nodes)
        record |= {
            "tokens": goal.tokens, "steps": math.ceil(goal.tokens / job.tokens), "run_seconds": seconds, "gpu_hours": paid * seconds / 3600,
            "cost": paid * seconds / 3600 * job.cluster.price_per_gpu_hour.value or None, "share_of_time_that_trains": share,
        }  # fmt: skip
    return plan.model_copy(update={"goodput": record})


def _goodput(nodes: int, failures: Failures, step_seconds: float) -> Any:
    from planner.goodput import goodput

    f = failures
    return goodput(nodes, f.mtbf_hours, f.checkpoint_seconds, f.restart_seconds, repair_hours=f.repair_hours, spare=f.spare,
                   step_seconds=step_seconds)  # fmt: skip


def nodes_of(plan: Plan) -> int:
    return max(1, plan.job().cluster.nodes)


def run_seconds(plan: Plan, goal: Goal) -> float:
    """Wall seconds of the token budget (of one step without one), failures included where they are described."""
    steps = 1 if goal.tokens is None else math.ceil(goal.tokens / plan.job().tokens)
    share = 1.0
    if goal.failures is not None:
        found = _goodput(nodes_of(plan), goal.failures, plan.step_seconds)
        share = found.useful_fraction * found.availability
    return steps * plan.step_seconds / share if share > 0 else math.inf


def gpu_counts(job: Job) -> tuple[int, ...]:
    """GPU counts worth trying, ascending: parts of a node that divide it; beyond, divisors of the nodes, powers of two and halfway.
    A mixed cluster is used whole."""
    cluster = job.cluster
    if cluster.pools:
        return (cluster.gpus,)
    per = min(cluster.gpus_per_node, cluster.gpus)
    nodes = cluster.gpus // per
    counts = {*divisors(nodes), *(2**i for i in range(nodes.bit_length())), *(3 * 2**i for i in range(nodes.bit_length()))}
    return tuple(sorted({*divisors(per), *(per * n for n in counts if n <= nodes)}))


def best_batch(request: PlanRequest, goal: Goal) -> Plan:
    """The plan of the batch with most tokens a second, the smaller on ties; of the request's own where none are listed."""
    batches = goal.batches or (request.job.global_batch,)
    if len(batches) == 1:
        return solve(replace(request, job=replace(request.job, global_batch=batches[0])))
    plans, refused = [], None
    for batch in batches:
        try:
            plans.append(solve(replace(request, job=replace(request.job, global_batch=batch))))
        except (InputError, DoesNotFit) as error:
            refused = error
    if not plans:
        assert refused is not None
        raise refused
    best = min(plans, key=lambda p: (_a_sequence(p), p.job_settings.global_batch))
    return noted(best, f"global batches tried: {listed(batches)} sequences")


def noted(plan: Plan, *notes: str) -> Plan:
    certificate = plan.certificate.model_copy(update={"notes": [*plan.certificate.notes, *notes]})
    return plan.model_copy(update={"certificate": certificate})


def listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def _on(request: PlanRequest, gpus: int) -> PlanRequest:
    if gpus == request.job.cluster.gpus:
        return request
    return replace(request, job=replace(request.job, cluster=request.job.cluster.with_gpus(gpus)))


def least_run_seconds(job: Job, goal: Goal, gpus: int) -> float:
    """No layout on ``gpus`` GPUs takes less: the model's FLOPs at the dense peak of the fastest 16- or 8-bit format the GPU has."""
    from cost_models.flops import flops_per_token

    peak = max(job.cluster.gpu.peak_flops(d) for d in job.cluster.gpu.peaks)
    tokens = goal.tokens if goal.tokens is not None else job.tokens
    return tokens * flops_per_token(job.model, job.seq_len).forward / (peak * gpus)


def _solved(request: PlanRequest, goal: Goal, gpus: int) -> Plan | None:
    try:
        return best_batch(_on(request, gpus), goal)
    except (InputError, DoesNotFit):
        return None


def _fewest(request: PlanRequest, goal: Goal, tell: Report) -> Plan:
    """The first of the usual counts that meets the deadline, then bisection over the legal counts between it and the one before."""
    assert goal.deadline_seconds is not None
    counts = [n for n in gpu_counts(request.job) if least_run_seconds(request.job, goal, n) <= goal.deadline_seconds]
    fastest: Plan | None = None
    meets: Plan | None = None
    below, tried = 0, []
    for i, gpus in enumerate(counts):
        tell(i / len(counts), f"{gpus} GPUs")
        tried.append(gpus)
        plan = _solved(request, goal, gpus)
        if plan is not None and run_seconds(plan, goal) <= goal.deadline_seconds:
            meets = plan
            break
        below = gpus
        if plan is not None and (fastest is None or run_seconds(plan, goal) < run_seconds(fastest, goal)):
            fastest = plan
    if meets is None:
        if fastest is None:
            best_batch(request, goal)
        raise DoesNotFit(
            f"no plan on up to {request.job.cluster.gpus} GPUs meets the deadline of {goal.deadline_seconds:g} s; allow more GPUs, a later"
            " deadline or fewer tokens"
        )
    above = tried[-1]
    between = [
        n for n in counts_between(request.job, below, above) if least_run_seconds(request.job, goal, n) <= goal.deadline_seconds
    ]
    while between:
        middle = nearest_legal(request, goal, between)
        if middle is None:
            break
        tell(len(tried) / (len(tried) + 1), f"{middle} GPUs")
        tried.append(middle)
        plan = _solved(request, goal, middle)
        if plan is not None and run_seconds(plan, goal) <= goal.deadline_seconds:
            meets, between = plan, [n for n in between if n < middle]
        else:
            between = [n for n in between if n > middle]
    notes = [f"GPU counts tried: {listed(tried)}; fewer than {min(tried)} cannot meet the deadline at the GPU's peak"]
    if tried[-1] != above:
        notes.append(f"between {below} and {above} by bisection over the counts with a legal layout: more are taken to be faster")
    return noted(meets, *notes)


def counts_between(job: Job, below: int, above: int) -> list[int]:
    """GPU counts strictly between two: whole nodes, and inside a node every number."""
    per = min(job.cluster.gpus_per_node, job.cluster.gpus)
    if job.cluster.pools:
        return []
    return [*range(below + 1, min(above, per)), *(n for n in range(max(per, (below // per + 1) * per), above, per) if n > below)]


def nearest_legal(request: PlanRequest, goal: Goal, counts: Sequence[int]) -> int | None:
    """The count nearest to the middle of ``counts`` on which some layout is legal; None where there is none."""
    middle = counts[len(counts) // 2]
    return next((n for n in sorted(counts, key=lambda n: (abs(n - middle), n)) if _has_layout(request, goal, n)), None)


def _has_layout(request: PlanRequest, goal: Goal, gpus: int) -> bool:
    on = _on(request, gpus)
    pins, excluded = read_wishes(on.pins), [read_wishes(e) for e in on.exclude]
    batches = goal.batches or (on.job.global_batch,)
    return any(Space(replace(on.job, global_batch=b), pins, excluded, offload=on.offload).has_layout for b in batches)


def _cheapest(request: PlanRequest, goal: Goal, tell: Report) -> Plan:
    price = request.job.cluster.price_per_gpu_hour.value
    if goal.objective == "cost" and not price:
        raise InputError("--objective", "cost", "needs a price: set price_per_gpu_hour in the cluster's file", "gpu-hours")
    best: tuple[float, float, Plan] | None = None
    counts = gpu_counts(request.job)
    for i, gpus in enumerate(counts):
        tell(i / len(counts), f"{gpus} GPUs")
        plan = _solved(request, goal, gpus)
        if plan is None:
            continue
        seconds = run_seconds(plan, goal)
        if goal.deadline_seconds is not None and seconds > goal.deadline_seconds:
            continue
        spare = 0 if goal.failures is None else _goodput(nodes_of(plan), goal.failures, plan.step_seconds).spare_nodes
        hours = gpus * (1 + spare / nodes_of(plan)) * seconds / 3600
        if best is None or hours < best[0] * (1 - 1e-9):
            best = (hours, seconds, plan)
    if best is None:
        best_batch(request, goal)
        raise DoesNotFit(f"no plan on up to {request.job.cluster.gpus} GPUs meets the deadline of {goal.deadline_seconds:g} s")
    worth = f", {best[0] * price:,.0f} dollars" if price else ""
    return noted(best[2], f"GPU counts tried: {listed(counts)}", f"{best[0]:,.1f} GPU-hours{worth} for {goal.tokens:g} tokens")


def _point(plan: Plan) -> dict[str, Any]:
    device = max(s["device"] for s in plan.estimate["memory"])
    return {
        "gpus": plan.job().cluster.gpus, "layout": plan.layout_text, "global_batch": plan.job_settings.global_batch,
        "step_seconds": plan.step_seconds, "device_bytes": device, "headroom_bytes": plan.estimate["limit_bytes"] - device,
        "tokens_per_second_per_gpu": plan.estimate["tokens_per_second_per_gpu"], "gap": plan.certificate.gap,
    }  # fmt: skip


def _a_sequence(plan: Plan) -> float:
    """Seconds a sequence of the batch."""
    return plan.step_seconds / plan.job_settings.global_batch


def _front_of_gpus(request: PlanRequest, goal: Goal, tell: Report) -> Plan:
    """The plan on all GPUs that were found useful, and in ``front`` every count that no other beats on both count and speed."""
    counts = gpu_counts(request.job)
    plans: list[Plan] = []
    for i, gpus in enumerate(counts):
        tell(i / len(counts), f"{gpus} GPUs")
        plan = _solved(request, goal, gpus)
        if plan is not None and all(_a_sequence(plan) < _a_sequence(p) for p in plans):
            plans.append(plan)
    if not plans:
        return best_batch(request, goal)
    return noted(plans[-1].model_copy(update={"front": [_point(p) for p in plans]}), f"GPU counts tried: {listed(counts)}")


def _front_of_memory(request: PlanRequest, goal: Goal, tell: Report) -> Plan:
    """The fastest plan, and in ``front`` the fastest for ever smaller memory until nothing fits (epsilon-constraint method)."""
    first = best_batch(request, goal)
    request = replace(request, job=first.job(), top=0, tie=0.0)
    front = [_point(first)]
    while len(front) < FRONT_POINTS:
        tell(len(front) / FRONT_POINTS, f"below {front[-1]['device_bytes'] / GIB:.1f} GiB")
        limit = front[-1]["device_bytes"] * (1 - ROOMIER)
        try:
            plan = solve(replace(request, job=replace(request.job, memory_limit_bytes=limit, margin=0.0)))
        except (InputError, DoesNotFit):
            break
        point = _point(plan)
        front.append({**point, "headroom_bytes": first.estimate["limit_bytes"] - point["device_bytes"]})
    return first.model_copy(update={"front": front})
