"""What the DeepSpeed and Accelerate folders share: ``train.json`` for a training script on a transformers model.

The scripts (``templates/train-*.py.txt``) train ``$MODEL`` from its configuration on synthetic tokens or memory-mapped ones, under
the plan, and print axisplan's JSON lines; a user's own script needs only the configuration beside them.
"""

from __future__ import annotations

import json

from planner.emit.core import EmitSettings, Need, Word, in_folder
from planner.emit.options import plain_name
from planner.plan import Plan

DTYPES = {"fp32": "float32", "fp16": "float16"}


def settings_file(plan: Plan, settings: EmitSettings) -> str:
    """``train.json``: the batch, the degrees the script must know, and how long to train."""
    job, layout = plan.job(), plan.layout_object
    return (
        json.dumps(
            {
                "steps": settings.steps,
                "optimizer": job.optimizer,
                "learning_rate": settings.learning_rate,
                "data": list(settings.data),
                "seq_len": job.seq_len,
                "micro_batch": layout.micro_batch,
                "accumulation": layout.microbatches(job.global_batch),
                "world": layout.world,
                "tp": layout.tp,
                "cp": layout.cp,
                "recompute": layout.recompute == "full",
                "dtype": DTYPES.get(job.precision, "bfloat16"),
            },
            indent=1,
        )
        + "\n"
    )


def needs(plan: Plan) -> tuple[Need, ...]:
    """The model in Hugging Face's form: a plan holds shapes only."""
    what = f"the Hugging Face name or folder of {plan.model['name']}"
    return (Need("MODEL", what, f"/models/{plain_name(str(plan.model['name']))}"),)


def words() -> tuple[Word, ...]:
    return (in_folder("train.py"),)


NOTES = ("Without --data FILE.npy (token ids) when emitting, it trains on random tokens.",)
