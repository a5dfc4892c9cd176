"""axisplan's own runtime: the plan, train.json, and the installed ``axisplan`` command as the worker."""

from __future__ import annotations

import json

from planner.emit.core import EmitSettings, Program, Variable, Word, admit, in_folder
from planner.plan import Plan


def program(plan: Plan, settings: EmitSettings) -> Program:
    """Raises InputError for a plan that the runtime cannot run."""
    job, _ = admit(plan, "axisplan")
    train = {"steps": settings.steps, "learning_rate": settings.learning_rate, "data": list(settings.data)}
    environment = [
        Variable("PYTHONSAFEPATH", "1", "No folder planner/ where this is started may take the place of axisplan's own."),
        Variable(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1",
            "Restarted workers must not share the first rendezvous store: with it a restart after a killed rank hangs on gloo.",
        ),
    ]  # fmt: skip
    if job.cluster.gpu.is_host:
        environment.append(Variable("OMP_NUM_THREADS", "1", "One thread a process: the processes share the cores.", "default"))
    return Program(
        target="axisplan",
        words=(Word("worker"), Word("train"), in_folder("plan.json"), Word("--settings"), in_folder("train.json")),
        files={"train.json": json.dumps(train, indent=1) + "\n"},
        environment=tuple(environment),
        executable="axisplan",
        starter=("worker", "start"),
    )
