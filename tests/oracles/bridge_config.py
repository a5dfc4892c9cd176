"""Hydra's own parser, and the configuration classes of a Megatron-Bridge and a Megatron-LM checkout: runs in a venv of its own
(docs/emit.md) that has hydra-core. Reads JSON lines {"overrides": [...]} and answers {"ok": true} or {"ok": false, "stage", "error"}.

The classes are read, not imported (they want a GPU's packages): an override is accepted when Hydra parses it and its section has a
field of that name. ``AXISPLAN_MEGATRON_BRIDGE`` and ``AXISPLAN_MEGATRON`` name the checkouts.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

BRIDGE = Path(os.environ["AXISPLAN_MEGATRON_BRIDGE"]) / "src" / "megatron" / "bridge"
MEGATRON = Path(os.environ["AXISPLAN_MEGATRON"]) / "megatron"
SECTIONS = {
    "model": ("GPTModelProvider", "TransformerConfig", "ModelParallelConfig"), "ddp": ("DistributedDataParallelConfig",),
    "optimizer": ("OptimizerConfig",), "train": ("TrainingConfig",), "validation": ("ValidationConfig",), "scheduler": ("SchedulerConfig",),
    "dataset": ("GPTDatasetConfig", "BlendedMegatronDatasetConfig"), "logger": ("LoggerConfig",), "tokenizer": ("TokenizerConfig",),
    "checkpoint": ("CheckpointConfig",), "rng": ("RNGConfig",), "dist": ("DistributedInitConfig",),
}  # fmt: skip


def sources() -> Iterator[Path]:
    yield BRIDGE / "models" / "gpt_provider.py"
    for folder in (BRIDGE / "training", MEGATRON / "training" / "config"):
        yield from folder.glob("**/*.py")
    core = MEGATRON / "core"
    yield from (core / "transformer" / "transformer_config.py", core / "model_parallel_config.py")
    yield from (core / "optimizer" / "optimizer_config.py", core / "distributed" / "distributed_data_parallel_config.py")
    yield from (core / "datasets" / "gpt_dataset.py", core / "datasets" / "blended_megatron_dataset_config.py")


def fields() -> dict[str, set[str]]:
    """Names of the fields of each section."""
    classes: dict[str, set[str]] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                named = {b.target.id for b in node.body if isinstance(b, ast.AnnAssign) and isinstance(b.target, ast.Name)}
                classes.setdefault(node.name, set()).update(named)
    return {section: set().union(*(classes.get(c, set()) for c in wanted)) for section, wanted in SECTIONS.items()}


def answer(overrides: list[str], known: dict[str, set[str]]) -> dict[str, Any]:
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except Exception as error:
        return {"ok": False, "stage": "parse", "error": str(error)[:400]}
    out: dict[str, Any] = {"ok": True, "values": {}}
    for override in parsed:
        key = override.key_or_group
        section, _, name = key.partition(".")
        if key != "mixed_precision" and name not in known.get(section, set()):
            return {"ok": False, "stage": "field", "error": f"{key} is no field"}
        out["values"][key] = json.loads(json.dumps(override.value(), default=str))
    return out


def main() -> None:
    known = fields()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line)["overrides"], known)), flush=True)


main()
