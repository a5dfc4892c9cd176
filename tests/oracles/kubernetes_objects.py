"""Kubeflow's API models and Kubernetes' own schemas, fed with objects: runs in a venv of its own (docs/launchers.md).

Reads JSON lines {"object"} (a TrainJob or a PyTorchJob) and answers {"ok": true, "dropped", "pods"} or {"ok": false, "stage", "error"}.
``dropped``: fields that the models do not know; ``pods``: how many pod specs were validated strictly.
"""

from __future__ import annotations

import json
import sys
import warnings
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")
answers = sys.stdout
sys.stdout = sys.stderr

import kubernetes_validate  # noqa: E402
from kubeflow.training import models as training  # noqa: E402
from kubeflow.training.api_client import ApiClient  # noqa: E402
from kubeflow_trainer_api import models as trainer  # noqa: E402


def dropped(given: Any, back: Any, path: str = "") -> list[str]:
    """Paths of ``given`` that ``back`` lacks or has otherwise."""
    if isinstance(given, dict):
        if not isinstance(back, dict):
            return [path]
        return [p for k, v in given.items() for p in ([f"{path}.{k}"] if k not in back else dropped(v, back[k], f"{path}.{k}"))]
    if isinstance(given, list):
        if not isinstance(back, list) or len(back) != len(given):
            return [path]
        return [p for i, (g, b) in enumerate(zip(given, back, strict=True)) for p in dropped(g, b, f"{path}[{i}]")]
    return [] if given == back else [f"{path}={given!r}"]


def round_trip(document: dict[str, Any]) -> Any:
    if document["kind"] == "TrainJob":
        return trainer.TrainerV1alpha1TrainJob.from_dict(document).to_dict()
    client = ApiClient()
    made = client.deserialize(SimpleNamespace(data=json.dumps(document)), training.KubeflowOrgV1PyTorchJob)
    return client.sanitize_for_serialization(made)


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"]
    if document["kind"] == "PyTorchJob":
        return [{**r["template"]["spec"], "restartPolicy": r["restartPolicy"]} for r in spec["pytorchReplicaSpecs"].values()]
    out = []
    for patch in spec.get("runtimePatches", []):
        for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            pod = job["template"]["spec"]["template"]["spec"]
            main = spec["trainer"]
            whole = {
                "image": main["image"],
                "command": main["command"],
                "resources": main["resourcesPerNode"],
                "env": main.get("env", []),
            }
            out.append({**pod, "restartPolicy": "Never", "containers": [{**c, **whole} for c in pod["containers"]]})
    return out


def judge(document: dict[str, Any]) -> dict[str, Any]:
    stage = "models"
    try:
        lost = dropped(document, round_trip(document))
        stage = "pods"
        version = kubernetes_validate.latest_version()
        found = pods(document)
        for pod in found:
            whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}
            kubernetes_validate.validate(whole, version, strict=True)
    except BaseException as error:
        return {"ok": False, "stage": stage, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"ok": True, "dropped": lost, "pods": len(found)}


print(json.dumps({"ready": True}), file=answers, flush=True)
for line in sys.stdin:
    print(json.dumps(judge(json.loads(line)["object"])), file=answers, flush=True)
