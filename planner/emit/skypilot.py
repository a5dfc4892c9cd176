"""SkyPilot: ``sky launch task.yaml`` from the launch folder, which travels as the task's workdir."""

from __future__ import annotations

from typing import Any

from planner.emit.core import EmitSettings, Launch, Program, title
from planner.emit.environment import skypilot_name
from planner.emit.files import fill
from planner.emit.manifest import manifest
from planner.emit.options import IMAGE, WORD, Option, needed, plain_name, read_options
from planner.plan import Plan
from profiles.errors import InputError

OPTIONS = {
    "accelerators": Option(r"[A-Za-z0-9-]+", "is a GPU's name in `sky show-gpus`", "H100"),
    "infra": WORD,
    "image": IMAGE,
    "setup": Option(r"[^\x00]*", "is a line of shell", "pip install axisplan"),
    "spot": Option(r"true|false", "is true or false", "true"),
}


def takes(program: Program) -> dict[str, Option]:
    """What ``--set`` takes here, the variables that the program needs among it."""
    return {**OPTIONS, **needed(program)}


def launch(plan: Plan, program: Program, settings: EmitSettings) -> Launch:
    """``task.yaml``. Raises InputError for an option, or a GPU that SkyPilot's catalogue has no known name for."""
    options = read_options(settings.options, takes(program))
    files = {"task.yaml": manifest(title(plan), task(plan, program, options))}
    notes = ("Run it in this folder, the task's workdir.",)
    return Launch(files, "sky launch task.yaml", notes=notes)


def task(plan: Plan, program: Program, options: dict[str, str]) -> dict[str, Any]:
    """The task as SkyPilot's YAML has it."""
    cluster = plan.job().cluster
    hosts, per_node = cluster.hosts, cluster.gpus // cluster.hosts
    resources: dict[str, Any] = {}
    if not cluster.gpu.is_host:
        name = options["accelerators"] or skypilot_name(cluster.gpu.name)
        if not name:
            rule = "has no known name in SkyPilot's catalogue; say which with --set accelerators=NAME"
            raise InputError("--launcher", cluster.gpu.name, rule, "accelerators=H100")
        resources["accelerators"] = f"{name}:{per_node}"
        if hosts > 1:
            resources["network_tier"] = "best"
    if options["infra"]:
        resources["infra"] = options["infra"]
    if options["image"]:
        resources["image_id"] = f"docker:{options['image']}"
    if options["spot"] == "true":
        resources["use_spot"] = True
    made: dict[str, Any] = {"name": plain_name(str(plan.model["name"])), "num_nodes": hosts, "workdir": "."}
    if resources:
        made["resources"] = resources
    if given := {need.name: options[need.name] for need in program.needs if options[need.name]}:
        made["envs"] = given
    if options["setup"]:
        made["setup"] = options["setup"] + "\n"
    made["run"] = fill("task-run.sh", hosts=str(hosts))
    return made
