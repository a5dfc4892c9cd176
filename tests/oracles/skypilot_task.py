"""SkyPilot's own Task, fed with YAML documents: runs in a venv of its own (docs/launchers.md).

Reads JSON lines {"task"} and answers {"ok": true, "nodes", "resources"} or {"ok": false, "stage", "error"}.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

warnings.filterwarnings("ignore")
os.environ["SKYPILOT_DISABLE_USAGE_COLLECTION"] = "1"
answers = sys.stdout
sys.stdout = sys.stderr

import sky  # noqa: E402


def judge(task: dict[str, Any]) -> dict[str, Any]:
    try:
        made = sky.Task.from_yaml_config(task)
    except BaseException as error:
        return {"ok": False, "stage": "Task", "error": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"ok": True, "nodes": made.num_nodes, "resources": str(made.resources), "run": made.run}


print(json.dumps({"ready": True}), file=answers, flush=True)
for line in sys.stdin:
    print(json.dumps(judge(json.loads(line)["task"])), file=answers, flush=True)
