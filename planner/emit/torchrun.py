"""torchrun alone: one launch.sh on this machine, or started by hand (or by the site's own means) on every node."""

from __future__ import annotations

from planner.emit.core import EmitSettings, Launch, Program, nodes_of
from planner.emit.options import Option
from planner.plan import Plan


def takes(program: Program) -> dict[str, Option]:
    """None: launch.sh is all there is."""
    return {}


def launch(plan: Plan, program: Program, settings: EmitSettings) -> Launch:
    """Nothing to add to launch.sh; says how to start it."""
    nodes, _ = nodes_of(plan)
    arguments = " ".join(program.arguments)
    here = f"./launch.sh {arguments}".strip() + f" | tee {program.log}"
    if nodes == 1:
        return Launch({}, here)
    start = f"NODE_RANK=<0..{nodes - 1}> MASTER_ADDR=<address of node 0> {here}"
    return Launch({}, start, notes=("Start it on every node, node k of your list with NODE_RANK k.",))
