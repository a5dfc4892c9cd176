"""Accelerate: ``accelerate.yaml`` (FSDP2, HSDP, TP, CP of its ParallelismConfig), and a training script on a transformers model.

``launch.sh`` starts torchrun with the environment that ``accelerate launch --config_file accelerate.yaml`` would set (the tests compare
the two), so either starts the same job. Not expressible, and refused: pipelines, expert parallelism, Ulysses (it is DeepSpeed's),
layer-wise recompute, sequence parallelism beside TP, TP or CP without FSDP2; the rules stand in ``planner/data/limits.yaml``.
"""

from __future__ import annotations

from typing import Any

from cost_models.job import Job
from cost_models.layout import Layout
from planner.emit import environment, transformers_trainer
from planner.emit.core import EmitSettings, Program, Variable, admit, refuse, title
from planner.emit.files import fill
from planner.emit.manifest import manifest
from planner.plan import Plan

REASONS = {
    "ACCELERATE_MIXED_PRECISION": "Compute in this dtype; parameters and optimizer states stay in fp32.",
    "ACCELERATE_USE_CPU": "The plan's cluster is CPUs.",
    "ACCELERATE_FP8_BACKEND": "torchao, the one that goes with FSDP2.",
    "ACCELERATE_USE_FSDP": "FSDP with the choices that follow, as `accelerate launch` would set them from accelerate.yaml.",
    "FSDP_VERSION": "Version 2: Accelerate's degrees (TP, CP, HSDP) go with no other.",
    "FSDP_AUTO_WRAP_POLICY": "A unit a layer, as the plan's memory counts them.",
    "FSDP_RESHARD_AFTER_FORWARD": "true: ZeRO 3, parameters are gathered again for backward; false: ZeRO 2.",
    "FSDP_STATE_DICT_TYPE": "Checkpoints in shards.",
    "FSDP_OFFLOAD_PARAMS": "Whether parameters and optimizer states live in host memory.",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "The model is made from its configuration; there is nothing to load.",
    "FSDP_ACTIVATION_CHECKPOINTING": "The plan's recompute: full, or none.",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "The degrees of the mesh that follow, outermost first: dp_replicate, dp_shard, cp, tp.",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "Replicas of the shards.",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "Ranks that FSDP shards over, beside cp's.",
    "PARALLELISM_CONFIG_TP_SIZE": "Tensor parallelism, innermost.",
    "PARALLELISM_CONFIG_CP_SIZE": "Context parallelism.",
    "PARALLELISM_CONFIG_CP_BACKEND": "PyTorch's context parallelism, the only one beside FSDP2.",
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall passes K and V round a ring, allgather gathers them at once.",
}


def program(plan: Plan, settings: EmitSettings) -> Program:
    """Raises InputError for a plan that Accelerate cannot run."""
    job, layout = admit(plan, "accelerate")
    document = config(job, layout)
    files = {
        "accelerate.yaml": manifest(title(plan), document),
        "train.json": transformers_trainer.settings_file(plan, settings),
        "train.py": fill("train-accelerate.py.txt"),
    }
    weights = ("With tp, MODEL must hold weights, not only a configuration.",) if layout.tp > 1 else ()
    variables = [Variable(name, value, REASONS[name]) for name, value in exported(document).items()]
    return Program(
        target="accelerate",
        words=transformers_trainer.words(),
        files=files,
        environment=(*environment.shared(plan, "accelerate"), *variables),
        needs=transformers_trainer.needs(plan),
        notes=(*transformers_trainer.NOTES, *weights),
    )


def config(job: Job, layout: Layout) -> dict[str, Any]:
    """The YAML of Accelerate 1.15. Raises InputError for an optimizer the script does not make."""
    if job.optimizer not in ("adamw", "sgd"):
        raise refuse("accelerate", f"its script makes adamw and sgd, not {job.optimizer}")
    cpu = job.cluster.gpu.is_host
    sharded = layout.zero > 0 and layout.dp_shard * layout.cp > 1
    if sharded and cpu:
        raise refuse("accelerate", "on CPUs it has neither FSDP nor its degrees, only plain data parallelism (zero=0)")
    made: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded else "MULTI_CPU" if cpu else "MULTI_GPU",
        "num_machines": job.cluster.hosts,
        "num_processes": job.cluster.gpus,
        "machine_rank": 0,
        "mixed_precision": "no" if job.precision == "fp32" else job.precision,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "use_cpu": cpu,
    }
    if job.precision == "fp8":
        made["fp8_config"] = {"backend": "AO"}
    if sharded:
        made["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": layout.zero == 3,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_offload_params": "optimizer" in layout.offload,
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_activation_checkpointing": layout.recompute == "full",
        }
        made["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": layout.dp_replicate,
            "parallelism_config_dp_shard_size": layout.dp_shard,
            "parallelism_config_tp_size": layout.tp,
            "parallelism_config_cp_size": layout.cp,
            "parallelism_config_cp_backend": "torch",
            "parallelism_config_cp_comm_strategy": "allgather" if layout.cp_kind == "allgather" else "alltoall",
        }
    return made


def exported(document: dict[str, Any]) -> dict[str, str]:
    """The environment that the YAML stands for."""
    out = {"ACCELERATE_MIXED_PRECISION": str(document["mixed_precision"])}
    if document["use_cpu"]:
        out["ACCELERATE_USE_CPU"] = "true"
    if "fp8_config" in document:
        out["ACCELERATE_FP8_BACKEND"] = document["fp8_config"]["backend"]
    if "fsdp_config" in document:
        out["ACCELERATE_USE_FSDP"] = "true"
        out |= {key.upper(): _text(value) for key, value in document["fsdp_config"].items()}
        out["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        degrees = document["parallelism_config"]
        skip = () if degrees["parallelism_config_cp_size"] > 1 else ("parallelism_config_cp_comm_strategy",)
        out |= {key.upper(): _text(value) for key, value in degrees.items() if key not in skip}
    return out


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
