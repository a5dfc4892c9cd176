"""An Accelerate YAML -> layout. Micro batch and sequence length are the script's: taken from an emitted ``train.json`` beside it, or
noted."""

from __future__ import annotations

from typing import Any

import yaml

from planner.emit.deepspeed_reading import count, section, settings_beside
from planner.emit.imported import Imported, fill_world
from planner.emit.let_pass import unread_keys
from profiles.errors import InputError

STRATEGIES = {
    "1": 3,
    "full_shard": 3,
    "2": 2,
    "shard_grad_op": 2,
    "3": 0,
    "no_shard": 0,
    "4": 3,
    "hybrid_shard": 3,
    "5": 2,
    "hybrid_shard_zero2": 2,
}
"""FSDP 1's ``fsdp_sharding_strategy`` as a ZeRO stage; the hybrid ones shard in a node."""
PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}


def read(text: str, where: str, world: int | None) -> Imported:
    """Data parallelism (DDP, FSDP 1 and 2, HSDP), TP, CP and Ulysses of a ParallelismConfig, precision, offload and recompute.

    Raises InputError for what is not such a YAML, or does not add up.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError("FILE", where, f"is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(document, dict):
        raise InputError("FILE", where, "is not a YAML mapping")
    notes: list[str] = []
    said = count(document, "num_processes", notes)
    if said and world and said != world:
        raise InputError("num_processes", said, f"is not the {world} GPUs that --gpus says", world)
    world = world or said
    kind = str(document.get("distributed_type", "NO")).upper()
    if kind == "MEGATRON_LM":
        raise InputError(
            "distributed_type", kind, "is not read here; import its Megatron-LM arguments with --from megatron", "FSDP"
        )
    sections = {name: section(document, name, where) for name in ("parallelism_config", "fsdp_config")}
    problems = [problem for name, given in sections.items() for problem in unread_keys("accelerate", name, given)]
    degrees = {k.removeprefix("parallelism_config_"): v for k, v in sections["parallelism_config"].items()}
    fsdp = {k.removeprefix("fsdp_"): v for k, v in sections["fsdp_config"].items()}
    problems += _degrees_are_in_vain(kind, degrees, fsdp)
    values: dict[str, Any] = {"sp": False, "zero": 0}
    for axis in ("tp", "cp", "dp_replicate", "dp_shard"):
        values[axis] = count(degrees, f"{axis}_size", notes) or 1
    if not degrees:
        del values["dp_replicate"], values["dp_shard"]
    execution = "accelerate"
    ulysses = count(degrees, "sp_size", notes) or 1
    if ulysses > 1 or kind == "DEEPSPEED":
        execution = "deepspeed"
        deepspeed = section(document, "deepspeed_config", where)
        values["zero"] = count(deepspeed, "zero_stage", notes) or 0
        if "deepspeed_config_file" in deepspeed:
            notes.append(f"ZeRO is in {deepspeed['deepspeed_config_file']}: import that with --from deepspeed")
        if ulysses > 1:
            values |= {"cp": ulysses, "cp_kind": "ulysses"}
            values.pop("dp_shard", None)
            values.pop("dp_replicate", None)
    elif values["cp"] > 1:
        values["cp_kind"] = "allgather" if degrees.get("cp_comm_strategy") == "allgather" else "ring"
    if kind == "FSDP":
        values |= _sharding(fsdp, document, world, degrees, notes)
        if _true(fsdp.get("offload_params")):
            values["offload"] = ("optimizer",)
    beside = settings_beside(where)
    values["micro_batch"] = count(beside, "micro_batch", notes) or 1
    if "micro_batch" not in beside:
        notes.append("micro batch and accumulation are the script's, not in the YAML; micro batch taken as 1")
    values["recompute"] = "full" if _true(fsdp.get("activation_checkpointing")) or beside.get("recompute") else "none"
    layout = fill_world(values, world, where)
    mixed = str(document.get("mixed_precision", "no")).lower()
    if mixed not in PRECISIONS:
        raise InputError("mixed_precision", mixed, f"is one of {', '.join(PRECISIONS)}", "bf16")
    job: dict[str, Any] = {"precision": PRECISIONS[mixed]}
    job |= {name: beside[name] for name in ("seq_len", "optimizer") if name in beside}
    if steps := count(beside, "accumulation", notes):
        job["global_batch"] = layout.micro_batch * steps * layout.dp
    return Imported(execution, layout, job, {}, tuple(notes), tuple(problems))


def _degrees_are_in_vain(kind: str, degrees: dict[str, Any], fsdp: dict[str, Any]) -> list[str]:
    """A parallelism_config beside what knows none of its degrees: the launcher's check runs before the YAML is merged."""
    if not degrees or kind == "DEEPSPEED":
        return []
    if kind != "FSDP":
        return [f"a parallelism_config beside distributed_type {kind} has no effect: its degrees need FSDP with fsdp_version 2"]
    if str(fsdp.get("version", 1)) != "2":
        return ["a parallelism_config beside fsdp_version 1 has no effect: its degrees need fsdp_version 2"]
    return []


def _sharding(
    fsdp: dict[str, Any], document: dict[str, Any], world: int | None, degrees: dict[str, Any], notes: list[str]
) -> dict[str, Any]:
    version = count(fsdp, "version", notes) or 1
    if version == 2:
        return {"zero": 3 if _true(fsdp.get("reshard_after_forward", True)) else 2}
    strategy = str(fsdp.get("sharding_strategy", fsdp.get("reshard_after_forward", "FULL_SHARD"))).lower()
    if strategy not in STRATEGIES:
        raise InputError("fsdp_sharding_strategy", strategy, f"is one of {', '.join(STRATEGIES)}", "FULL_SHARD")
    out: dict[str, Any] = {"zero": STRATEGIES[strategy]}
    machines = count(document, "num_machines", notes) or 1
    if strategy in ("4", "5", "hybrid_shard", "hybrid_shard_zero2") and world and not degrees:
        out |= {"dp_replicate": machines, "dp_shard": world // machines}
    return out


def _true(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "1", "yes")
