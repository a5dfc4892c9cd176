"""Accelerate's own loader and launcher, fed with YAML: runs in a venv of its own (docs/launchers.md).

Reads JSON lines {"world", "yaml"} and answers {"ok": true, "environment", "tp"} or {"ok": false, "stage", "error"}. ``environment``:
what ``accelerate launch`` would set; ``tp``: the first tensor-parallel group of its device mesh.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from typing import Any

warnings.filterwarnings("ignore")
answers = sys.stdout
sys.stdout = sys.stderr

import torch.distributed as dist  # noqa: E402
from accelerate.commands.config.config_args import load_config_from_file  # noqa: E402
from accelerate.commands.launch import _validate_launch_command, launch_command_parser  # noqa: E402
from accelerate.parallelism_config import ParallelismConfig  # noqa: E402
from accelerate.utils.launch import prepare_multi_gpu_env  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402


def judge(case: dict[str, Any]) -> dict[str, Any]:
    stage = "load_config_from_file"
    before = dict(os.environ)
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(case["yaml"])
            file.flush()
            load_config_from_file(file.name)
            stage = "launch"
            arguments = launch_command_parser().parse_args(["--config_file", file.name, "train.py"])
            arguments, _, _ = _validate_launch_command(arguments)
            set_by_it = prepare_multi_gpu_env(arguments)
        stage = "mesh"
        found: list[int] = []
        if "PARALLELISM_CONFIG_TP_SIZE" in set_by_it:
            os.environ.update({k: v for k, v in set_by_it.items() if k.startswith("PARALLELISM_CONFIG_")})
            mesh_of = ParallelismConfig()
            if mesh_of.total_size != case["world"]:
                raise ValueError(f"the mesh has {mesh_of.total_size} of {case['world']} ranks")
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case["world"])
            mesh = mesh_of.build_device_mesh("cpu")
            if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
                found = dist.get_process_group_ranks(mesh["tp"].get_group())
    except BaseException as error:
        return {"ok": False, "stage": stage, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
    kept = {k: v for k, v in set_by_it.items() if k.startswith(("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_"))}
    return {"ok": True, "environment": kept, "tp": found}


print(json.dumps({"ready": True}), file=answers, flush=True)
for line in sys.stdin:
    print(json.dumps(judge(json.loads(line))), file=answers, flush=True)
