"""SkyPilot tasks: shape, names, hostile values inert, and that SkyPilot's own Task takes them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from plans import job_of, plan_of, renamed

from planner.emit.core import EmitSettings, Need, Program
from planner.emit.skypilot import launch
from profiles.errors import InputError

PROGRAM = Program("axisplan", (), needs=(Need("MODEL", "the model", "/models/x"),))


def task(
    model: object = "llama-3.1-8b", cluster: str = "h100-sxm:2x8", layout: str = "tp=8,micro_batch=1", **options: str
) -> dict[str, Any]:
    plan = plan_of(job_of(model, cluster, "axisplan", global_batch=144), layout)  # type: ignore[arg-type]
    made: dict[str, Any] = yaml.safe_load(launch(plan, PROGRAM, EmitSettings(options=options)).files["task.yaml"])
    return made


def test_nodes_gpus_and_the_order_of_ranks() -> None:
    made = task()
    assert (made["num_nodes"], made["resources"]["accelerators"]) == (2, "H100:8")
    assert 'NODE_RANK="$SKYPILOT_NODE_RANK"' in made["run"]
    assert 'head -n1 <<< "$SKYPILOT_NODE_IPS"' in made["run"]


def test_run_is_clean_under_shellcheck(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/bash\n" + task()["run"])
    assert subprocess.run(["shellcheck", script], capture_output=True, text=True).stdout == ""


def test_a_gpu_that_the_catalogue_lacks_must_be_named() -> None:
    with pytest.raises(InputError, match="SkyPilot's catalogue"):
        task(cluster="h800-sxm:2x8")
    assert task(cluster="h800-sxm:2x8", accelerators="H800")["resources"]["accelerators"] == "H800:8"


def test_a_hostile_name_and_values_are_inert() -> None:
    hostile = "x: $(id)\n- `id`"
    made = task(renamed("llama-3.1-8b", hostile), MODEL=hostile)
    assert made["name"] == "x-id-id"
    assert made["envs"] == {"MODEL": hostile}
    with pytest.raises(InputError, match="--set infra"):
        task(infra=hostile)
