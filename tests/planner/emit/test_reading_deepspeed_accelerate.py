"""Import from DeepSpeed and Accelerate: real-world files are read, bad ones refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from planner.emit.imported import read_configuration
from profiles.errors import InputError


def test_a_trainers_json_with_auto_values_is_read_with_notes(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    }))  # fmt: skip
    with pytest.raises(InputError, match="--gpus"):
        read_configuration("deepspeed", path)
    found = read_configuration("deepspeed", path, 16)
    assert (found.layout.zero, found.layout.dp_shard, found.layout.offload) == (3, 16, ("optimizer",))
    assert any("auto" in note for note in found.notes)
    assert any("offload_param" in note for note in found.notes)


def test_the_world_follows_from_the_batch(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": 256,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
                "fp16": {"enabled": True},
            }
        )
    )
    found = read_configuration("deepspeed", path)
    assert (found.layout.world, found.layout.zero, found.job["precision"]) == (32, 0, "fp16")
    with pytest.raises(InputError, match="train_batch_size"):
        read_configuration("deepspeed", path, 64)


def test_fsdp_1_and_its_hybrid_strategy(tmp_path: Path) -> None:
    path = tmp_path / "default_config.yaml"
    document = {
        "distributed_type": "FSDP", "num_machines": 4, "num_processes": 32, "mixed_precision": "bf16",
        "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_activation_checkpointing": True, "fsdp_offload_params": "false"},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(document))
    found = read_configuration("accelerate", path).layout
    assert (found.dp_replicate, found.dp_shard, found.zero, found.recompute, found.offload) == (4, 8, 3, "full", ())


def test_ulysses_and_deepspeed_are_read_as_deepspeed(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump({
        "distributed_type": "DEEPSPEED", "num_processes": 16, "mixed_precision": "bf16", "deepspeed_config": {"zero_stage": 3},
        "parallelism_config": {"parallelism_config_sp_size": 8, "parallelism_config_dp_shard_size": 2},
    }))  # fmt: skip
    found = read_configuration("accelerate", path)
    assert (found.execution, found.layout.cp, found.layout.cp_kind, found.layout.dp_shard, found.layout.zero) == (
        "deepspeed",
        8,
        "ulysses",
        2,
        3,
    )


@pytest.mark.parametrize(
    ("source", "text", "reason"),
    [
        ("deepspeed", "{", "not JSON"),
        ("deepspeed", "[1]", "not a JSON object"),
        ("deepspeed", '{"zero_optimization": 3}', "not an object"),
        ("deepspeed", '{"zero_optimization": {"stage": "three"}}', "whole number"),
        ("deepspeed", '{"zero_optimization": {"stage": true}}', "whole number"),
        ("accelerate", "a: [", "not YAML"),
        ("accelerate", "- 1", "not a YAML mapping"),
        ("accelerate", "!!python/object/apply:os.system ['id']", "not YAML"),
        ("accelerate", "{num_processes: 8, mixed_precision: int8}", "mixed_precision"),
        ("accelerate", "{num_processes: 8, parallelism_config: {parallelism_config_tp_size: 3}}", "tp"),
        ("accelerate", "{num_processes: many}", "whole number"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, source: str, text: str, reason: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(InputError, match=reason):
        read_configuration(source, path)
