"""Rules that come from the ranks: world, expert factoring, node alignment, pools, memory-sharding groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from cost_models.layout import divisors
from planner.rules.core import Break, Case, listed, rule


@rule("cluster", "tp cp pp dp_replicate dp_shard", "tp * cp * pp * dp is the number of GPUs")
def degrees_fill_the_world(case: Case) -> Iterator[Break]:
    layout, gpus = case.layout, case.job.cluster.gpus
    fixed = layout.tp * layout.cp * layout.pp
    if fixed * layout.dp == gpus:
        return
    if gpus % fixed == 0:
        yield Break("dp", layout.dp, f"tp*cp*pp*dp = {fixed * layout.dp} must equal the {gpus} GPUs", (gpus // fixed,))
        return
    blamed = max(("pp", "cp", "tp"), key=lambda f: (gpus % getattr(layout, f) != 0, getattr(layout, f)))
    yield Break(blamed, getattr(layout, blamed), f"tp*cp*pp = {fixed} must divide the {gpus} GPUs")


@rule("cluster", "tp cp pp dp ep etp", "etp * ep divides tp * cp * dp, the ranks of a pipeline stage")
def experts_fill_the_stage(case: Case) -> Iterator[Break]:
    layout = case.layout
    stage, used = layout.tp * layout.cp * layout.dp, layout.etp * layout.ep
    if stage % used == 0:
        return
    hint = "; etp left out is tp for this target" if case.limits.etp_default == "tp" and layout.etp == layout.tp > 1 else ""
    field = "etp" if hint and stage % layout.ep == 0 else "ep"
    yield Break(field, getattr(layout, field), f"etp*ep = {layout.etp}*{layout.ep} = {used} must divide tp*cp*dp = {stage}"
                f" (so etp*ep*pp = {used * layout.pp} the {stage * layout.pp} GPUs){hint}")  # fmt: skip


@rule(
    "cluster", "tp cp dp_shard ep etp", "an expert group lies inside one sharded replica where the target says so",
    lambda _, limits: limits.ep_in_replica,
)  # fmt: skip
def experts_inside_a_replica(case: Case) -> Iterator[Break]:
    layout = case.layout
    replica, used = layout.tp * layout.cp * layout.dp_shard, layout.etp * layout.ep
    apart = layout.dp_shard == 1 and case.limits.ep_over_replicas
    if used > 1 and replica % used and not apart:
        yield Break(
            "ep",
            layout.ep,
            f"etp*ep = {used} must divide tp*cp*dp_shard = {replica}: {case.limits.target} keeps experts in a replica",
        )


@rule("cluster", "cp cp_kind", "the parts of a hybrid context parallelism multiply to cp")
def context_parts_multiply(case: Case) -> Iterator[Break]:
    layout = case.layout
    if layout.ring * layout.ulysses != layout.cp:
        yield Break(
            "cp_kind",
            layout.cp_kind,
            f"ring {layout.ring} x ulysses {layout.ulysses} must equal cp = {layout.cp}",
            ("ring", "ulysses"),
        )


@rule("cluster", "tp", "a tensor-parallel group lies inside a node, or fills whole nodes")
def tensor_groups_fit_nodes(case: Case) -> Iterator[Break]:
    tp, cluster = case.layout.tp, case.job.cluster
    node = min(cluster.gpus_per_node, cluster.gpus)
    if node % tp and tp % node:
        yield Break("tp", tp, f"a group of {tp} would straddle nodes of {node} GPUs; legal inside a node: {listed(divisors(node))}")


OUTERMOST = "tp-cp-dp-pp"
"""The order whose stages are consecutive ranks."""


def pool_sizes(cluster: Any) -> tuple[int, ...]:
    """GPUs of each pool of a mixed cluster, () for one of a single type."""
    return tuple(int(p.gpus) for p in (getattr(cluster, "pools", None) or ()))


@rule(
    "cluster", "tp cp pp dp", "on mixed GPU types a stage lies in one pool, and every pool holds whole stages",
    lambda job, _: len(pool_sizes(job.cluster)) > 1,
)  # fmt: skip
def stages_inside_a_pool(case: Case) -> Iterator[Break]:
    sizes = pool_sizes(case.job.cluster)
    layout = case.layout
    stage = layout.tp * layout.cp * layout.dp
    if any(size % stage for size in sizes):
        legal = [p for p in divisors(sum(sizes)) if all(size % (sum(sizes) // p) == 0 for size in sizes)]
        yield Break("pp", layout.pp, f"stages of {stage} ranks do not fill pools of {listed(sizes)} GPUs", tuple(legal))


@rule(
    "cluster", "tp cp pp dp order", "on mixed GPU types the pipeline is the outermost axis, so that a stage's ranks are neighbours",
    lambda job, _: len(pool_sizes(job.cluster)) > 1,
)  # fmt: skip
def pools_need_the_pipeline_outermost(case: Case) -> Iterator[Break]:
    layout = case.layout
    if not same_placement(layout, layout.order, OUTERMOST):
        yield Break("order", layout.order, "would spread a stage over GPUs of several types", (OUTERMOST,))


@rule("cluster", "tp cp pp dp order", "the target can place ranks in this order")
def order_is_expressible(case: Case) -> Iterator[Break]:
    layout, orders = case.layout, case.limits.orders
    if layout.order in orders:
        return
    if same_placement(layout, layout.order, orders[0]):
        return
    yield Break("order", layout.order, f"{case.limits.target} places ranks as {listed(orders)}", tuple(orders))


@rule(
    "cluster",
    "tp cp pp dp ep etp order",
    "with another order than the default, expert data parallelism equals data parallelism where the target says so",
    lambda job, limits: limits.edp_equals_dp_unless_default_order and job.model.moe is not None,
)
def folding_needs_the_default_order(case: Case) -> Iterator[Break]:
    layout = case.layout
    default = case.limits.orders[0]
    if same_placement(layout, layout.order, default):
        return
    edp = layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp)
    if edp != layout.dp:
        message = f"edp = {edp} differs from dp = {layout.dp}, which {case.limits.target} only allows in order {default}"
        yield Break("order", layout.order, message, (default,))


def same_placement(layout: Any, one: str, other: str) -> bool:
    """Whether two orders put every rank in the same place: axes of degree 1 do not count."""
    degree = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp}

    def kept(order: str) -> list[str]:
        axes = order.split("-")
        if "cp" not in axes:
            axes.insert(1, "cp")
        return [a for a in axes if degree.get(a, 1) > 1]

    return kept(one) == kept(other)


@rule(
    "cluster",
    "tp cp dp ep etp dp_replicate zero",
    "replicas of a sharded optimizer divide expert data parallelism where the target says so",
    lambda job, limits: limits.replicas_divide_edp and job.model.moe is not None,
)
def replicas_divide_expert_replicas(case: Case) -> Iterator[Break]:
    layout = case.layout
    if layout.zero == 0:
        return
    edp, rest = divmod(layout.tp * layout.cp * layout.dp, layout.ep * layout.etp)
    if rest == 0 and edp % layout.dp_replicate:
        message = f"{case.limits.target} needs a divisor of the expert data parallelism, edp = tp*cp*dp/(ep*etp) = {edp}"
        yield Break("dp_replicate", layout.dp_replicate, message, tuple(divisors(math.gcd(edp, layout.dp))))
