"""DeepSpeed: ``ds_config.json`` (ZeRO, AutoTP, Ulysses, AutoEP) and a training script on a transformers model.

Not expressible, and refused: pipelines (a PipelineModule is the model's code, not configuration), ring context parallelism, expert
tensor parallelism, sequence parallelism beside AutoTP, layer-wise recompute, replicas of shards (DeepSpeed 0.19 refuses MiCS); the
rules stand in ``planner/data/limits.yaml``.
"""

from __future__ import annotations

import json
from typing import Any

from cost_models.job import Job
from cost_models.layout import Layout
from planner.emit import environment, transformers_trainer
from planner.emit.core import EmitSettings, Program, admit, refuse
from planner.emit.files import fill
from planner.plan import Plan

OPTIONS = environment.DEEPEP
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}


def program(plan: Plan, settings: EmitSettings) -> Program:
    """Raises InputError for a plan that DeepSpeed cannot run."""
    job, layout = admit(plan, "deepspeed")
    files = {
        "ds_config.json": json.dumps(config(job, layout, settings.learning_rate), indent=1) + "\n",
        "train.json": transformers_trainer.settings_file(plan, settings),
        "train.py": fill("train-deepspeed.py.txt"),
    }
    return Program(
        target="deepspeed",
        words=transformers_trainer.words(),
        files=files,
        environment=environment.shared(plan, "deepspeed", settings.options),
        needs=transformers_trainer.needs(plan),
        notes=transformers_trainer.NOTES,
    )


def config(job: Job, layout: Layout, learning_rate: float = 3e-4) -> dict[str, Any]:
    """The JSON of DeepSpeed 0.19. Raises InputError for an optimizer that it does not have."""
    if job.optimizer not in OPTIMIZERS:
        raise refuse("deepspeed", f"it has no optimizer {job.optimizer} ({', '.join(OPTIMIZERS)})")
    made: dict[str, Any] = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.microbatches(job.global_batch),
        "gradient_clipping": 1.0,
        "steps_per_print": 1,
        "wall_clock_breakdown": False,
        "optimizer": _optimizer(job, learning_rate),
        "zero_optimization": _zero(layout),
    }
    if job.precision in ("bf16", "fp16"):
        made[job.precision] = {"enabled": True}
    if layout.tp > 1:
        # Without an mpu the check of train_batch_size counts every GPU as a replica (targets.md 4).
        del made["train_batch_size"]
        made["tensor_parallel"] = {"autotp_size": layout.tp, "vocab_parallel_lm_head": False}
    if layout.cp > 1:
        made["sequence_parallel_size"] = layout.cp
    if layout.ep > 1:
        made["expert_parallel"] = {
            "enabled": True,
            "autoep_size": layout.ep,
            "expert_tensor_parallel_size": 1,
            "comm_backend": "comm",
        }
        if layout.dispatcher == "deepep":
            made["expert_parallel"] |= {"comm_backend": "deepep", "comm_max_tokens_per_rank": layout.micro_batch * job.seq_len}
    return made


def _optimizer(job: Job, learning_rate: float) -> dict[str, Any]:
    parameters: dict[str, Any] = {"lr": learning_rate, "weight_decay": 0.1}
    if job.optimizer == "sgd":
        parameters["momentum"] = 0.9
    if job.optimizer == "adamw":
        parameters["betas"] = [0.9, 0.95]
        if job.cluster.gpu.is_host:
            parameters["torch_adam"] = True
    return {"type": OPTIMIZERS[job.optimizer], "params": parameters}


def _zero(layout: Layout) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": layout.zero}
    if layout.zero:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if layout.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return zero
