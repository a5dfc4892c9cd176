"""The jobs that ``gpu_checks.py`` runs on one GPU, their plans, and what the dry run says of them on a CPU beforehand.

``python benchmarks/gpu_jobs.py DIR`` writes ``NAME.plan.json`` of each job and ``expected.json``: the formulas' and the dry run's
bytes, and the predicted seconds by cause. ``--tiny`` makes jobs that a CPU trains in seconds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.step import estimate
from planner import plan as plans
from planner.dryrun.report import dry_run
from planner.legality import read_layout, require
from profiles.hardware import load_cluster
from profiles.huggingface import load_model
from profiles.model import ModelSpec, Moe

TRAINED = "dense"
"""The job whose time is compared: Llama-3.2-1B as released."""


@dataclass(frozen=True)
class GpuJob:
    """A model, its first ``layers`` (0 = all), the batch, and the layout."""

    name: str
    model: str
    layers: int
    seq_len: int
    global_batch: int
    layout: str


JOBS = (
    GpuJob("dense", "llama-3.2-1b", 0, 4096, 16, "micro_batch=8,recompute=none"),
    GpuJob("dense-full-recompute", "llama-3.2-1b", 0, 4096, 8, "micro_batch=4,recompute=full"),
    GpuJob("dense-core-recompute", "qwen3-0.6b", 0, 4096, 8, "micro_batch=2,recompute=selective(core_attn)"),
    GpuJob("moe", "qwen3-30b-a3b", 2, 4096, 8, "micro_batch=4,recompute=none"),
    GpuJob("mla", "deepseek-v2-lite", 2, 4096, 8, "micro_batch=4,recompute=none"),
)
"""Five jobs of one GPU: dense with no, full and selective recompute, a mixture of experts, latent attention with one."""
TINY = tuple(
    replace(job, model="llama-tiny" if job.layers == 0 else job.model, layers=min(job.layers, 2), seq_len=64, global_batch=8)
    for job in JOBS
)


def shortened(model: ModelSpec, layers: int) -> ModelSpec:
    """``model`` with its first ``layers`` layers alone."""
    return (
        model.model_copy(update={"pattern": model.pattern[:layers], "name": f"{model.name}-{layers}-layers"}) if layers else model
    )


def narrowed(model: ModelSpec) -> ModelSpec:
    """``model`` with an eighth of its experts, small ones, and a small vocabulary."""
    kinds = []
    for kind in model.kinds:
        if isinstance(kind.ffn, Moe):
            kind = kind.model_copy(update={"ffn": kind.ffn.model_copy(update={"experts": kind.ffn.experts // 8, "width": 64})})
        kinds.append(kind)
    return model.model_copy(update={"kinds": tuple(kinds), "vocab": 512})


def job_of(one: GpuJob, cluster: str, precision: str, tiny: bool) -> Job:
    model = shortened(load_model(one.model), one.layers)
    return Job(
        narrowed(model) if tiny and one.layers else model,
        load_cluster(cluster),
        load_execution("axisplan"),
        one.seq_len,
        one.global_batch,
        precision,
    )


def plan_of(job: Job, text: str) -> plans.Plan:
    """A plan of this layout, without a search: its certificate says that it is the only one looked at."""
    layout = read_layout(job, text)
    require(job, layout)
    found = estimate(job, layout)
    seconds = found.step_seconds
    certificate = plans.Certificate(
        columns_legal=1, cut_by_memory=0, cut_by_bound=0, cut_by_dominance=0, solved=1, best_bound_seconds=seconds,
        fastest_seconds=seconds, gap=0, proved=True, proposed_seconds=seconds, tie=0, space="one layout, given",
    )  # fmt: skip
    return plans.Plan(
        model=plans.model_dump(job.model), cluster=plans.cluster_dump(job.cluster), execution=plans.execution_dump(job.execution),
        inputs=plans.hashes(job), job_settings=plans.job_record(job), layout=plans.layout_dump(layout), layout_text=layout.text(),
        stages=plans.stages_of(job, layout), estimate=found.to_json(), certificate=certificate,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="", help="Names of jobs, commas between.")
    arguments = parser.parse_args()
    cluster, precision = ("cpu:1x1", "fp32") if arguments.tiny else ("h200-sxm:1x1", "bf16")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path = arguments.folder / "expected.json"
    expected: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for one in TINY if arguments.tiny else JOBS:
        if arguments.only and one.name not in arguments.only.split(","):
            continue
        found = plan_of(job_of(one, cluster, precision, arguments.tiny), one.layout)
        found.save(arguments.folder / f"{one.name}.plan.json")
        traced = dry_run(found).document()
        expected[one.name] = {
            "layout": found.layout_text,
            "parameters": found.job().model.parameters.total,
            "step_seconds": found.estimate["step_seconds"],
            "step_seconds_low": found.estimate["step_seconds_low"],
            "step_seconds_high": found.estimate["step_seconds_high"],
            "seconds": found.estimate["seconds"],
            "memory": found.estimate["memory"][0],
            "traced": {k: traced[k] for k in ("peak_bytes", "peak_at", "bytes", "named_bytes", "kept_activations")},
            "formula": traced["formula"]["bytes"] | {"peak_bytes": traced["formula"]["peak_bytes"]},
        }
        path.write_text(json.dumps(expected, indent=1))
        print(one.name, found.layout_text, f"{traced['peak_bytes'] / 2**30:.2f} GiB traced at {traced['peak_at']}")


if __name__ == "__main__":
    main()
