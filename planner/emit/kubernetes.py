"""Kubernetes: Kubeflow's ``TrainJob`` (Trainer v2) and ``PyTorchJob`` (training operator v1), one of which the cluster has.

The launch folder reaches the pods as a ConfigMap made from it; node rank and master come from what the operator sets. Pods of one
job are given the nodes' GPUs whole, so that a tensor-parallel group stays in its node.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.emit.core import EmitSettings, Launch, Program, title
from planner.emit.manifest import manifest
from planner.emit.options import IMAGE, NAME, PATH, WORD, Option, needed, plain_name, read_options
from planner.plan import Plan
from profiles.errors import InputError

FOLDER = "/axisplan"
MAP_LIMIT = 1 << 20
"""Bytes that etcd lets a ConfigMap hold."""
RESOURCE = Option(r"[a-z0-9.-]+/[A-Za-z0-9._-]+", "is a device resource", "nvidia.com/gpu", "nvidia.com/gpu")
OPTIONS = {
    "image": IMAGE,
    "name": NAME,
    "namespace": NAME,
    "claim": NAME,
    "mount": PATH,
    "runtime": replace(NAME, example="torch-distributed", default="torch-distributed"),
    "resource": RESOURCE,
    "network-resource": replace(RESOURCE, example="rdma/hca", default=""),
    "service-account": NAME,
    "priority-class": WORD,
}
"""``claim``: a PersistentVolumeClaim mounted at ``mount`` (default /data). ``network-resource``: e.g. rdma/hca, one of it a pod."""


def takes(program: Program) -> dict[str, Option]:
    """What ``--set`` takes here, the variables that the program needs among it."""
    return {**OPTIONS, **needed(program)}


def launch(plan: Plan, program: Program, settings: EmitSettings) -> Launch:
    """``trainjob.yaml`` and ``pytorchjob.yaml``. Raises InputError for an option, a missing image, or files too large for a
    ConfigMap."""
    options = read_options(settings.options, takes(program))
    if not options["image"]:
        raise InputError(
            "--set image", "", f"names the container image that has torchrun and {program.target}", f"image={IMAGE.example}"
        )
    size = len(plan.text().encode()) + sum(len(text.encode()) for text in program.files.values())
    if size > 0.9 * MAP_LIMIT:
        raise InputError("plan", f"{size} bytes", f"is more than a ConfigMap holds ({MAP_LIMIT} bytes); plan with a smaller --top")
    name = options["name"] or plain_name(str(plan.model["name"]))
    files = {
        "trainjob.yaml": manifest(title(plan), train_job(plan, program, name, options)),
        "pytorchjob.yaml": manifest(title(plan), pytorch_job(plan, program, name, options)),
    }
    space = f" -n {options['namespace']}" if options["namespace"] else ""
    start = f"kubectl create configmap {name}-files --from-file=.{space} && kubectl apply -f trainjob.yaml"
    notes = (
        "Run it in this folder (training operator v1: pytorchjob.yaml), a pod a node with its GPUs whole; `kubectl logs POD > log.txt` "
        "keeps node 0's output.",
    )
    return Launch(files, start, notes=notes)


def train_job(plan: Plan, program: Program, name: str, options: dict[str, str]) -> dict[str, Any]:
    """``trainer.kubeflow.org/v1alpha1``; the runtime sets PET_* for torchrun, which launch.sh's own arguments override."""
    hosts, per_node = _shape(plan)
    pod: dict[str, Any] = {"volumes": _volumes(name, options), "containers": [{"name": "node", "volumeMounts": _mounts(options)}]}
    if options["service-account"]:
        pod["serviceAccountName"] = options["service-account"]
    patched = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"manager": "axisplan.dev/emit", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patched]}}}}
    trainer = {
        "image": options["image"],
        "numNodes": hosts,
        "numProcPerNode": per_node,
        "command": ["bash", "-c", _command("$PET_NODE_RANK", "$PET_MASTER_ADDR", "$PET_MASTER_PORT"), "launch"],
        "env": _environment(program, options),
        "resourcesPerNode": _resources(plan, per_node, options),
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(name, options),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": options["runtime"]},
            "trainer": {k: v for k, v in trainer.items() if v != []},
            "runtimePatches": [patch],
        },
    }


def pytorch_job(plan: Plan, program: Program, name: str, options: dict[str, str]) -> dict[str, Any]:
    """``kubeflow.org/v1``: a master pod and a worker pod for each further host."""
    hosts, per_node = _shape(plan)
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": options["image"],
        "command": ["bash", "-c", _command("${PET_NODE_RANK:-$RANK}", "$MASTER_ADDR", "$MASTER_PORT"), "launch"],
        "resources": _resources(plan, per_node, options),
        "volumeMounts": _mounts(options),
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    }
    if environment := _environment(program, options):
        container["env"] = environment
    pod: dict[str, Any] = {"containers": [container], "volumes": _volumes(name, options)}
    if options["service-account"]:
        pod["serviceAccountName"] = options["service-account"]
    if options["priority-class"]:
        pod["priorityClassName"] = options["priority-class"]

    def replicas(count: int) -> dict[str, Any]:
        return {"replicas": count, "restartPolicy": "Never", "template": {"spec": pod}}

    specs = {"Master": replicas(1)}
    if hosts > 1:
        specs["Worker"] = replicas(hosts - 1)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(name, options),
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
            "nprocPerNode": str(per_node),
            "pytorchReplicaSpecs": specs,
        },
    }


def _shape(plan: Plan) -> tuple[int, int]:
    cluster = plan.job().cluster
    return cluster.hosts, cluster.gpus // cluster.hosts


def _environment(program: Program, options: dict[str, str]) -> list[dict[str, str]]:
    """The variables that were given; Kubernetes would expand ``$(NAME)`` in a value, ``$$(`` is literal."""
    return [{"name": need.name, "value": options[need.name].replace("$(", "$$(")} for need in program.needs if options[need.name]]


def _metadata(name: str, options: dict[str, str]) -> dict[str, Any]:
    return {"name": name, **({"namespace": options["namespace"]} if options["namespace"] else {})}


def _command(rank: str, address: str, port: str) -> str:
    """What a pod runs; a ConfigMap's files are not executable, hence bash."""
    return f'export NODE_RANK="{rank}" MASTER_ADDR="{address}" MASTER_PORT="{port}"; exec bash {FOLDER}/launch.sh "$@"'


def _resources(plan: Plan, per_node: int, options: dict[str, str]) -> dict[str, Any]:
    if plan.job().cluster.gpu.is_host:
        return {"requests": {"cpu": str(per_node)}}
    wanted = {options["resource"]: str(per_node)}
    if options["network-resource"]:
        wanted[options["network-resource"]] = "1"
    return {"limits": wanted, "requests": dict(wanted)}


def _volumes(name: str, options: dict[str, str]) -> list[dict[str, Any]]:
    """The launch folder, shared memory (NCCL's transport inside a node; a pod has 64 MiB otherwise), and the user's claim."""
    volumes: list[dict[str, Any]] = [
        {"name": "axisplan", "configMap": {"name": f"{name}-files"}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    if options["claim"]:
        volumes.append({"name": "claim", "persistentVolumeClaim": {"claimName": options["claim"]}})
    return volumes


def _mounts(options: dict[str, str]) -> list[dict[str, Any]]:
    mounts = [{"name": "axisplan", "mountPath": FOLDER}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    if options["claim"]:
        mounts.append({"name": "claim", "mountPath": options["mount"] or "/data"})
    return mounts
