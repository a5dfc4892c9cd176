"""TorchTitan's own ConfigManager and Trainer, fed with emitted configurations: runs in a venv of its own (docs/emit.md).

Reads JSON lines {"world", "rank", "files": {name: text}, "build"} and answers one JSON line each: {"ok": true, "dims", "parameters"} or
{"ok": false, "stage", "error"}. Each case is a process of its own forked from this one, which has everything imported: torch's
process groups cannot be made twice with other sizes. No GPU: the device is the CPU, groups are torch's fake ones, Triton is a stand-in.
``AXISPLAN_TORCHTITAN`` names a checkout that takes the place of the installed release (it wants grain beside it).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import tempfile
import traceback
import types
import typing
import warnings

from stand_ins import without_triton

warnings.filterwarnings("ignore")


def prepare() -> None:
    """No Triton, and the CPU as the device."""
    without_triton()
    import torch
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    cpu = torch.cpu
    for name, value in {
        "set_device": None,
        "get_device_name": "CPU",
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "memory_stats": {},
        "current_device": 0,
    }.items():
        setattr(cpu, name, lambda *_, value=value, **__: value)
    cpu.get_device_properties = lambda *_, **__: types.SimpleNamespace(total_memory=16 << 30, name="CPU")
    if not hasattr(cpu, "memory"):
        cpu.memory = types.SimpleNamespace(_record_memory_history=lambda *_, **__: None)


prepare()
if checkout := os.environ.get("AXISPLAN_TORCHTITAN"):
    sys.path.insert(0, checkout)
import torch  # noqa: E402
import torchtitan.hf_datasets.text_datasets  # noqa: E402
import torchtitan.trainer  # noqa: E402, F401
from torch.distributed.tensor import DTensor  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402

for module in ("llama3", "qwen3", "deepseek_v3", "gpt_oss"):
    importlib.import_module(f"torchtitan.models.{module}")


class NoData:
    """A data loader and a tokenizer that hold nothing: only the model is built."""

    def __getattr__(self, name: str) -> typing.Any:
        return lambda *_, **__: None


def answer(case: dict[str, typing.Any]) -> dict[str, typing.Any]:
    stage, said = "parse", io.StringIO()
    os.environ.update({"WORLD_SIZE": str(case["world"]), "RANK": str(case["rank"]), "LOCAL_RANK": "0", "NGPU": str(case["world"])})
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            for name, text in case["files"].items():
                with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                    file.write(text)
            sys.path.insert(0, folder)
            arguments = ["--module", "axisplan_config", "--config", "train", "--comm.mode=fake_backend", *case.get("arguments", [])]
            config = ConfigManager().parse_args(arguments)
            stage = "dims"
            dims = ParallelDims.from_config(config.parallelism, case["world"])
            out: dict[str, typing.Any] = {
                "ok": True, "dims": {k: getattr(dims, k) for k in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")},
            }  # fmt: skip
            if case.get("build"):
                stage = "build"
                out["parameters"] = build(config)
        return out
    except SystemExit:
        return {"ok": False, "stage": stage, "error": " ".join(said.getvalue().replace("│", "").split())[:600]}
    except BaseException as error:
        if os.environ.get("AXISPLAN_ORACLE_TRACE"):
            traceback.print_exc()
        return {"ok": False, "stage": stage, "error": f"{type(error).__name__}: {error}"[:600]}


def build(config: typing.Any) -> dict[str, int]:
    """Parameters of this rank: as they are before sharding over data parallelism is known, and the local shards."""
    for kind in (type(config.dataloader), type(config.tokenizer)):
        kind.build = lambda self, *_, **__: NoData()
    Module.init_states = lambda self, *_, **__: None  # the values of weights do not matter, and take a minute on a CPU
    trainer = config.build()
    parameters = [p for part in trainer.model_parts for p in part.parameters()]
    return {
        "whole": sum(p.numel() for p in parameters),
        "local": sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters),
    }


def main() -> None:
    """One answer a line, in order. ``ready`` comes first."""
    reply = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=reply)
    for line in sys.stdin:
        case = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            torch.set_num_threads(1)
            os.write(writing, json.dumps(answer(case)).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            text = pipe.read().decode()
        os.waitpid(child, 0)
        print(text or json.dumps({"ok": False, "stage": "process", "error": "the process ended"}), file=reply)


main()
