"""A DeepSpeed JSON -> layout. What the JSON does not hold (recompute, sequence length) is taken from an emitted ``train.json`` beside
it, or noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner.emit.imported import Imported, fill_world
from planner.emit.let_pass import unread_keys
from profiles.errors import InputError


def read(text: str, where: str, world: int | None) -> Imported:
    """ZeRO, AutoTP, Ulysses, AutoEP, batch, precision and offload. ``auto`` values (of the Hugging Face Trainer) are noted.

    The world follows from the batch where it is not given. Raises InputError for what is not such a JSON, or does not add up.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InputError("FILE", where, f"is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InputError("FILE", where, "is not a JSON object")
    notes: list[str] = []
    problems = unread_keys("deepspeed", "", document)
    zero = section(document, "zero_optimization", where)
    tp = count(section(document, "tensor_parallel", where), "autotp_size", notes) or 1
    sp = count(document, "sequence_parallel_size", notes) or 1
    micro = count(document, "train_micro_batch_size_per_gpu", notes)
    steps = count(document, "gradient_accumulation_steps", notes)
    total = count(document, "train_batch_size", notes)
    if world is None and micro and steps and total:
        if total % (micro * steps):
            raise InputError(
                "train_batch_size", total, f"must be a multiple of micro batch x accumulation = {micro * steps}", micro * steps
            )
        world = total // (micro * steps) * tp * sp
    stage = count(zero, "stage", notes) or 0
    values: dict[str, Any] = {"tp": tp, "cp": sp, "zero": stage, "sp": False, "micro_batch": micro or 1}
    if sp > 1:
        values["cp_kind"] = "ulysses"
    experts = section(document, "expert_parallel", where)
    problems += unread_keys("deepspeed", "expert_parallel", experts)
    if tp > 1 and total:
        problems.append(
            f"train_batch_size beside AutoTP is checked against every GPU instead of GPUs / {tp}, unless an mpu is passed"
        )
    if experts.get("enabled"):
        values["ep"] = count(experts, "autoep_size", notes) or 1
        if experts.get("comm_backend") == "deepep":
            values["dispatcher"] = "deepep"
    if zero.get("mics_shard_size", 0) not in (0, -1, None):
        values["dp_shard"] = count(zero, "mics_shard_size", notes) or 1
    offload = zero.get("offload_optimizer")
    if isinstance(offload, dict) and offload.get("device", "none") not in ("none", None):
        values["offload"] = ("optimizer",)
    if isinstance(zero.get("offload_param"), dict):
        notes.append("offload_param is not modelled: parameters are taken to stay on the device")
    if "pipeline" in document:
        notes.append("a pipeline's degree is in the model's code (PipelineModule), not in the JSON; taken as 1")
    beside = settings_beside(where)
    job = {"precision": precision(document)} | {k: beside[k] for k in ("seq_len",) if k in beside}
    if "recompute" in beside:
        values["recompute"] = "full" if beside["recompute"] else "none"
    else:
        notes.append("recompute is the model's, not in the JSON; taken as none")
    layout = fill_world(values, world, where)
    optimizer = section(document, "optimizer", where).get("type")
    if isinstance(optimizer, str):
        job["optimizer"] = {"adam": "adamw"}.get(optimizer.lower(), optimizer.lower())
    if total or steps:
        job["global_batch"] = total or layout.micro_batch * (steps or 1) * layout.dp
    expected = layout.micro_batch * (steps or 1) * layout.dp
    if total and micro and steps and total != expected:
        raise InputError(
            "train_batch_size", total, f"is not micro batch x accumulation x replicas = {expected} on {layout.world} GPUs", expected
        )
    return Imported("deepspeed", layout, job, {}, tuple(notes), tuple(problems))


def section(document: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """A nested object; empty where it is absent."""
    value = document.get(key, {})
    if not isinstance(value, dict):
        raise InputError(key, value, f"is not an object in {where}")
    return value


def count(document: dict[str, Any], key: str, notes: list[str]) -> int | None:
    """A whole number; None where it is absent or ``auto``."""
    value = document.get(key)
    if value is None:
        return None
    if value == "auto":
        notes.append(f"{key} is auto: set by the trainer that reads the file")
        return None
    try:
        found = int(value)
    except (TypeError, ValueError):
        found = -1
    if isinstance(value, bool) or found < 0 or found != float(value):
        raise InputError(key, value, "must be a whole number", 1)
    return found


def precision(document: dict[str, Any]) -> str:
    for name in ("bf16", "fp16"):
        value = document.get(name)
        if isinstance(value, dict) and value.get("enabled"):
            return name
    return "fp32"


def settings_beside(where: str) -> dict[str, Any]:
    """The ``train.json`` of an emitted folder, where the file lies in one."""
    try:
        found = json.loads((Path(where).parent / "train.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
