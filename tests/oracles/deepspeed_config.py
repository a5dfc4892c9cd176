"""DeepSpeed's own configuration, fed with JSON: runs in a venv of its own (docs/launchers.md), with DS_ACCELERATOR=cpu.

Reads JSON lines {"world", "replicas", "sp", "config"} and answers {"ok": true, "train_batch_size", "unread"} or {"ok": false, "stage",
"error"}. ``replicas``: what an mpu would say of data parallelism (null: none is passed). ``unread``: keys that no source file of
DeepSpeed's runtime names, since its parser ignores unknown ones outside its pydantic sections.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
os.environ["DS_ACCELERATOR"] = "cpu"
answers = sys.stdout
sys.stdout = sys.stderr

import deepspeed  # noqa: E402
import deepspeed.comm  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.module_inject.auto_ep_config import validate_autoep_config  # noqa: E402
from deepspeed.runtime.config import DeepSpeedConfig  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

# It would compile a minute of C++ for collectives in shared memory, which are not used here; deepspeed.comm.torch is PyTorch itself.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None


class Groups:
    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def get_data_parallel_world_size(self) -> int:
        return self.replicas


def sources() -> str:
    home = Path(deepspeed.__file__).parent
    folders = ("runtime", "module_inject", "zero")
    return "\n".join(p.read_text(errors="replace") for f in folders if (home / f).is_dir() for p in (home / f).rglob("*.py"))


SOURCES = sources()


def keys(config: Any) -> set[str]:
    out: set[str] = set()
    for key, value in config.items():
        out.add(key)
        if isinstance(value, dict) and key not in ("params",):
            out |= keys(value)
    return out


def judge(case: dict[str, Any]) -> dict[str, Any]:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case["world"])
    with contextlib.suppress(Exception):
        deepspeed.comm.init_distributed("fake", dist_init_required=False)
    config = case["config"]
    stage = "DeepSpeedConfig"
    try:
        made = DeepSpeedConfig(dict(config), Groups(case["replicas"]) if case["replicas"] else None)
        if made.expert_parallel_config is not None and made.expert_parallel_config.enabled:
            stage = "validate_autoep_config"
            offload = made.zero_config.offload_optimizer is not None
            validate_autoep_config(
                made.expert_parallel_config, case["world"], 1, max(made.tensor_parallel_config.autotp_size, 1), case["sp"],
                zero_stage=made.zero_config.stage, zero_offload_optimizer=offload,
            )  # fmt: skip
    except BaseException as error:
        return {"ok": False, "stage": stage, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    unread = sorted(k for k in keys(config) if f'"{k}"' not in SOURCES and f"'{k}'" not in SOURCES and f"{k}:" not in SOURCES)
    return {"ok": True, "train_batch_size": made.train_batch_size, "unread": unread}


print(json.dumps({"ready": True}), file=answers, flush=True)
for line in sys.stdin:
    print(json.dumps(judge(json.loads(line))), file=answers, flush=True)
