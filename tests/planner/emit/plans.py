"""Plans for the tests of emission, made from a job and a layout without the planner."""

from __future__ import annotations

from dataclasses import replace

from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.step import estimate
from planner import plan as plans
from planner.legality import read_layout, require
from planner.plan import Plan
from profiles.hardware import load_cluster
from profiles.huggingface import load_model
from profiles.model import ModelSpec


def job_of(
    model: str | ModelSpec = "llama-3.1-8b", cluster: str = "h100-sxm:8x8", execution: str = "megatron", seq_len: int = 8192,
    global_batch: int = 128,
    precision: str = "bf16",
) -> Job:  # fmt: skip
    spec = load_model(model) if isinstance(model, str) else model
    return Job(spec, load_cluster(cluster), load_execution(execution), seq_len, global_batch, precision)


def plan_of(job: Job, layout: str | Layout, *, legal: bool = True) -> Plan:
    """A plan of ``layout``; with ``legal`` False it may break rules (then without an estimate of its own)."""
    made = read_layout(job, layout) if isinstance(layout, str) else layout
    if legal:
        require(job, made)
        figures = estimate(job, made).to_json()
    else:
        memory = [{"stage": 0, "device": 1e9, "peak_allocated": 1e9}]
        figures = {"step_seconds": 1.0, "step_seconds_low": 0.9, "step_seconds_high": 1.1, "memory": memory}
    certificate = plans.Certificate(
        columns_legal=1, cut_by_memory=0, cut_by_bound=0, cut_by_dominance=0, solved=1, best_bound_seconds=1, fastest_seconds=1, gap=0,
        proved=True, proposed_seconds=1, tie=0,
    )  # fmt: skip
    return Plan(
        model=plans.model_dump(job.model), cluster=plans.cluster_dump(job.cluster), execution=plans.execution_dump(job.execution),
        inputs=plans.hashes(job), job_settings=plans.job_record(job), layout=plans.layout_dump(made), layout_text=made.text(),
        stages=plans.stages_of(job, made), estimate=figures, certificate=certificate,
    )  # fmt: skip


def renamed(model: str, name: str) -> ModelSpec:
    """A built-in model under another, perhaps hostile, name."""
    return load_model(model).model_copy(update={"name": name})


def with_execution(job: Job, execution: str) -> Job:
    return replace(job, execution=load_execution(execution))
