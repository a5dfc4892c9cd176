"""Slurm: ``sbatch job.sbatch`` from the launch folder.

One task a node. A node's rank is its place in the allocation's host list, not the order in which tasks arrive (cases.md I02), and
before training starts every node says which host it is and how many GPUs it sees: a tensor-parallel group that would leave its
node (its rack, where one NVLink domain spans hosts) stops the job with the map of ranks.
"""

from __future__ import annotations

from planner.emit.core import EmitSettings, Launch, Program, title
from planner.emit.files import fill
from planner.emit.options import IMAGE, TIME, WORD, Option, plain_name, read_options
from planner.emit.readme import comment
from planner.placement import domain, group_place, per_host
from planner.plan import Plan

MOUNTS = Option(r"/[\w./+@-]*:/[\w./+@-]*(,/[\w./+@-]*:/[\w./+@-]*)*", "lists FROM:TO pairs of absolute paths", "/data:/data")
OPTIONS = {
    "partition": WORD, "account": WORD, "qos": WORD, "time": TIME, "constraint": WORD, "reservation": WORD, "mem": WORD,
    "container": IMAGE, "mounts": MOUNTS,
}  # fmt: skip
"""``container`` and ``mounts`` are pyxis' ``--container-image`` and ``--container-mounts``."""


def takes(program: Program) -> dict[str, Option]:
    """What ``--set`` takes here."""
    return OPTIONS


def launch(plan: Plan, program: Program, settings: EmitSettings) -> Launch:
    """``job.sbatch`` and ``node.sh``. Raises InputError for an option Slurm does not take."""
    options = read_options(settings.options, takes(program))
    cluster, layout = plan.job().cluster, plan.layout_object
    per_node = per_host(cluster)
    lines = [f"#SBATCH --{name}={options[name]}" for name in OPTIONS if name not in ("container", "mounts") and options[name]]
    if not cluster.gpu.is_host:
        lines.append(f"#SBATCH --gpus-per-node={per_node}")
    within = group_place(layout.tp, per_node, domain(cluster))
    if within == "rack":
        lines.append(
            f"##SBATCH --segment={-(-layout.tp // per_node)}  # Slurm 23.11 and later: hosts of one NVLink domain together"
        )
    container = [
        f"--container-image={options['container']}",
        '--container-mounts="$here:$here' + (f",{options['mounts']}" if options["mounts"] else "") + '"',
    ]
    name = plain_name(str(plan.model["name"]))
    job = fill(
        "job.sbatch",
        title=comment(title(plan)),
        name=name,
        nodes=str(cluster.hosts),
        per_node=str(per_node),
        processes=str(cluster.hosts * per_node),
        tp=str(layout.tp),
        within=within,
        options="\n".join(lines),
        container=" ".join(container) if options["container"] else "",
    )
    files = {"job.sbatch": job, "node.sh": fill("node.sh"), "places.awk": fill("places.awk")}
    arguments = " ".join(program.arguments)
    notes = (
        "Submit it from this folder; it stops before training, with the map of ranks, when a node is missing or has too few GPUs, or a "
        "tensor-parallel group would leave its node.",
    )
    start = f"sbatch job.sbatch {arguments}".strip()
    return Launch(files, start, executable=("job.sbatch", "node.sh"), notes=notes, log=f"{name}-JOBID.log")
