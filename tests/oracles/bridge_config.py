"""Megatron-Bridge's generic recipe under overrides, and its own ``validate``: runs in a venv of its own (docs/emit.md).

Reads JSON lines {"world", "arch", "overrides"} and answers {"ok": true, "values", "dp"} or {"ok": false, "stage", "error"}.
``AXISPLAN_MEGATRON_BRIDGE`` and ``AXISPLAN_MEGATRON`` name the checkouts. The recipe's function is called, the overrides are parsed by
Hydra and merged into its configuration, then the run's own update and check of it are called, as ``scripts/training/run_recipe.py``
does. What wants a GPU's packages or the Hugging Face hub is a stand-in: Transformer Engine, transformers, data sets, conversion of
checkpoints; the packages' ``__init__`` (every model and recipe there is) are left out.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import sys
import types
import typing
import warnings
from pathlib import Path

from stand_ins import StandIn, without_triton

warnings.filterwarnings("ignore")
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
SOURCES = Path(os.environ["AXISPLAN_MEGATRON_BRIDGE"]) / "src" / "megatron"
OUTSIDE = (
    "accelerate", "datasets", "diffusers", "modelopt", "nvidia_resiliency_ext", "peft", "qwen_vl_utils", "transformer_engine", "transformers",
    "megatron.energon",
)  # fmt: skip
INSIDE = ("conversion", "hf_pretrained", "hybrid", "megatron_mimo", "t5_provider")
"""Parts of megatron.bridge.models that read and write other people's checkpoints, or build other models than GPT."""


def empty_package(name: str, folder: Path, **found_in: str) -> None:
    """A package whose modules are found and whose ``__init__`` is not run; ``found_in``: names it has all the same."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def attribute(wanted: str) -> typing.Any:
        if wanted not in found_in:
            raise AttributeError(wanted)
        return getattr(importlib.import_module(found_in[wanted]), wanted)

    module.__getattr__ = attribute  # type: ignore[method-assign]
    sys.modules[name] = module


def prepare() -> None:
    without_triton()
    sys.meta_path.insert(0, StandIn(*OUTSIDE, *(f"megatron.bridge.models.{part}" for part in INSIDE)))
    sys.path[:0] = [os.environ["AXISPLAN_MEGATRON"], str(SOURCES.parent)]
    import megatron

    if str(SOURCES) not in megatron.__path__:
        megatron.__path__.append(str(SOURCES))
    models = "megatron.bridge.models"
    empty_package("megatron.bridge", SOURCES / "bridge")
    empty_package("megatron.bridge.recipes", SOURCES / "bridge" / "recipes")
    empty_package(
        models, SOURCES / "bridge" / "models", GPTModelProvider=f"{models}.gpt_provider", T5ModelProvider=f"{models}.t5_provider"
    )


prepare()

import torch  # noqa: E402

ARCH = {"major": 9}
torch.cuda.get_device_capability = lambda *_: (ARCH["major"], 0)
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(
    major=ARCH["major"], minor=0, name="GPU", total_memory=80 << 30, multi_processor_count=132
)

from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config  # noqa: E402
from megatron.bridge.training.config import runtime_config_update  # noqa: E402
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides  # noqa: E402


def answer(case: dict[str, typing.Any]) -> dict[str, typing.Any]:
    stage = "recipe"
    ARCH["major"] = case.get("arch", 9)
    before = dict(os.environ)
    os.environ.update({"WORLD_SIZE": str(case["world"]), "RANK": "0", "LOCAL_RANK": "0", **case.get("environment", {})})
    try:
        config = vanilla_gpt_pretrain_config()
        stage = "overrides"
        config = process_config_with_overrides(config, cli_overrides=case["overrides"])
        stage = "runtime_config_update"
        runtime_config_update(config)
        stage = "validate"
        config.validate()
        return {
            "ok": True,
            "dp": config.data_parallel_size,
            "values": {name: value_of(config, name) for name in case.get("values", ())},
        }
    except BaseException as error:
        if os.environ.get("AXISPLAN_ORACLE_TRACE"):
            import traceback

            traceback.print_exc()
        return {"ok": False, "stage": stage, "error": f"{type(error).__name__}: {error}"[:400]}
    finally:
        os.environ.clear()
        os.environ.update(before)


def value_of(config: object, dotted: str) -> typing.Any:
    """A field by its dotted name, as JSON has it."""
    for name in dotted.split("."):
        config = getattr(config, name)
    return json.loads(json.dumps(config, default=str))


print(json.dumps({"ready": True}), file=answers)
for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), file=answers)
