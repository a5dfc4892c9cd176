"""Plans of given layouts, made without the solver."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.step import estimate
from planner import plan as plans
from planner.legality import read_layout
from planner.plan import Plan, RunnerUp
from profiles.hardware import load_cluster
from profiles.huggingface import load_model


def plan_of(
    model: str, cluster: str, layout: str, *others: str, seq_len: int = 4096, batch: int = 64, execution: str = "megatron"
) -> Plan:
    """A plan of a given layout, with other layouts as runners-up."""
    job = Job(load_model(model), load_cluster(cluster), load_execution(execution), seq_len, batch, "bf16")
    chosen = read_layout(job, layout)
    figures_of = estimate(job, chosen)
    seconds = figures_of.step_seconds
    certificate = plans.Certificate(
        columns_legal=10, cut_by_memory=4, cut_by_bound=3, cut_by_dominance=1, solved=2, best_bound_seconds=seconds,
        fastest_seconds=seconds, gap=0, proved=True, proposed_seconds=seconds, tie=0.01, space="every divisor & <more>",
    )  # fmt: skip
    runners = []
    for text in others:
        other = read_layout(job, text)
        cost = estimate(job, other)
        loses = {cause: s - figures_of.seconds.get(cause, 0.0) for cause, s in cost.seconds.items()}
        runners.append(
            RunnerUp(
                layout=plans.layout_dump(other), layout_text=other.text(), estimate=cost.to_json(), loses=loses, chance_faster=0.1,
                slower=cost.step_seconds / seconds - 1,
            )
        )  # fmt: skip
    return Plan(
        model=plans.model_dump(job.model), cluster=plans.cluster_dump(job.cluster), execution=plans.execution_dump(job.execution),
        inputs=plans.hashes(job), job_settings=plans.job_record(job), layout=plans.layout_dump(chosen), layout_text=chosen.text(),
        stages=plans.stages_of(job, chosen), estimate=figures_of.to_json(), certificate=certificate, runners_up=runners,
    )  # fmt: skip


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    """``make_plan(model, cluster, layout, *runners_up, seq_len=, batch=, execution=)``."""
    return plan_of
