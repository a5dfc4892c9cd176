"""The files that run a plan on axisplan's own runtime: plan.json, train.json and a launch.sh that becomes torchrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cost_models.layout import pairs
from planner.emit.files import fill, write_folder
from planner.plan import Plan
from planner.screen import gib, seconds
from profiles.errors import InputError


def emit_axisplan(plan: Plan, out: Path, settings: dict[str, Any], launcher: str = "torchrun") -> list[Path]:
    """Write the launch folder ``out`` for ``plan``; ``settings``: the training settings (``planner.runtime.train.TrainSettings``).

    Returns the files written. Raises InputError for a plan made for another target, or a folder that holds other files.
    """
    execution = plan.execution.get("name", "axisplan")
    if execution != "axisplan":
        raise InputError(
            "--target", "axisplan", f"the plan was made for --execution {execution}; plan again for this target", execution
        )
    contents = {
        "plan.json": plan.text(),
        "train.json": json.dumps(settings, indent=1) + "\n",
        "launch.sh": launch_script(plan),
        "README.md": readme(plan),
    }
    return write_folder(out, contents, executable=("launch.sh",))


def launch_script(plan: Plan) -> str:
    """A bash script that starts one torchrun on this node."""
    cluster = plan.job().cluster
    nodes, per_node = cluster.nodes, cluster.gpus // cluster.nodes
    if nodes == 1:
        rendezvous = "rendezvous=(--standalone)"
    else:
        rendezvous = (
            ': "${NODE_RANK:?set NODE_RANK to this node\'s number}" "${MASTER_ADDR:?set MASTER_ADDR to the address of node 0}"\n'
            'rendezvous=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")'
        )
    return fill(
        "launch-torchrun.sh",
        title=one_line_title(plan),
        processes=str(cluster.gpus),
        nodes=str(nodes),
        per_node=str(per_node),
        last_node=str(nodes - 1),
        environment=environment(plan),
        rendezvous=rendezvous,
    )


def environment(plan: Plan) -> str:
    """Exports that the runtime needs, each with its reason."""
    lines = [
        "# Restarted workers must not share the first rendezvous store: with it a restart after a killed rank hangs on gloo.",
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    ]
    if plan.job().cluster.gpu.name.startswith("cpu"):
        lines += [
            "# One thread a process: the processes share the cores.",
            'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"',
        ]
    return "\n".join(lines)


def one_line_title(plan: Plan) -> str:
    """Names the plan; control characters of a model's name cannot leave the comment they stand in."""
    name = "".join(c if c.isprintable() else " " for c in str(plan.model["name"]))
    return f"{name} on {plan.job().cluster.gpus} x {plan.job().cluster.gpu.name}: {plan.layout_text}"


def readme(plan: Plan) -> str:
    """Ten lines: what this is, the plan, how to start, what to expect."""
    job, estimate = plan.job(), plan.estimate
    worst = max(estimate["memory"], key=lambda s: s["device"])
    rows = ["| key | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in pairs(plan.layout_text))]
    proof = "proved fastest" if plan.certificate.proved else f"within {100 * plan.certificate.gap:.2g} % of the proven bound"
    return fill(
        "readme.md",
        title=one_line_title(plan),
        summary=(
            f"Trains `{plan.model['name']}` with sequences of {job.seq_len} tokens, {job.global_batch} a step, in {job.precision}; "
            f"the layout is {proof} under axisplan's cost model."
        ),
        table="\n".join(rows),
        start="./launch.sh --steps 100",
        expected=(
            f"{seconds(estimate['step_seconds'])} a step (80 % interval {seconds(estimate['step_seconds_low'])} to "
            f"{seconds(estimate['step_seconds_high'])}), {gib(worst['device'])} on the fullest rank (stage {worst['stage']})"
        ),
        version=plan.axisplan,
    )
