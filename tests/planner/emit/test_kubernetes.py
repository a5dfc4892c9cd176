"""TrainJob and PyTorchJob: what they say, hostile values inert, and that Kubeflow's and Kubernetes' own schemas know every field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from oracles import Oracle
from plans import job_of, plan_of, renamed

from planner.emit.core import EmitSettings, Need, Program, emit
from planner.emit.kubernetes import launch
from profiles.errors import InputError

IMAGE = {"image": "nvcr.io/nvidia/pytorch:25.09-py3"}
PROGRAM = Program("axisplan", (), needs=(Need("MODEL", "the model", "/models/x"),))


def objects(
    layout: str = "tp=8,micro_batch=1", cluster: str = "h100-sxm:2x8", program: Program = PROGRAM, **options: str
) -> list[dict[str, Any]]:
    plan = plan_of(job_of("llama-3.1-8b", cluster, "axisplan", global_batch=144), layout)
    made = launch(plan, program, EmitSettings(options={**IMAGE, **options}))
    return [yaml.safe_load(made.files[name]) for name in ("trainjob.yaml", "pytorchjob.yaml")]


def test_a_pod_a_host_with_its_gpus() -> None:
    train, torch = objects()
    assert (train["spec"]["trainer"]["numNodes"], train["spec"]["trainer"]["numProcPerNode"]) == (2, 8)
    assert train["spec"]["trainer"]["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8"}
    replicas = torch["spec"]["pytorchReplicaSpecs"]
    assert {name: r["replicas"] for name, r in replicas.items()} == {"Master": 1, "Worker": 1}


def test_a_rack_is_as_many_pods_as_it_has_hosts() -> None:
    train, torch = objects("tp=8,micro_batch=1", "gb200-nvl72:1x72")
    assert train["spec"]["trainer"]["numNodes"] == 18
    assert torch["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 17


def test_node_ranks_come_from_the_operator() -> None:
    train, torch = objects()
    assert 'NODE_RANK="$PET_NODE_RANK"' in train["spec"]["trainer"]["command"][2]
    container = torch["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert 'NODE_RANK="${PET_NODE_RANK:-$RANK}"' in container["command"][2]


def test_an_image_is_needed_and_options_are_checked() -> None:
    plan = plan_of(job_of("llama-3.1-8b", "h100-sxm:2x8", "axisplan"), "tp=8,micro_batch=1")
    with pytest.raises(InputError, match="--set image"):
        launch(plan, PROGRAM, EmitSettings())
    for name, value in (("image", "a b"), ("namespace", "A;b"), ("claim", "x\ny"), ("mount", "data"), ("resource", "gpu")):
        with pytest.raises(InputError, match=f"--set {name}"):
            objects(**{name: value})


def test_what_the_program_needs_is_given_as_an_option_and_never_expanded() -> None:
    hostile = "$(HOME) $(id) `id` \"'\nx: y"
    train, torch = objects(MODEL=hostile)
    for found in (
        train["spec"]["trainer"]["env"],
        torch["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["env"],
    ):
        assert found == [{"name": "MODEL", "value": hostile.replace("$(", "$$(")}]


def test_a_hostile_model_name_is_inert(tmp_path: Path) -> None:
    plan = plan_of(job_of(renamed("llama-3.1-8b", "a'\n---\nkind: Secret\n#"), "h100-sxm:2x8", "axisplan"), "tp=8,micro_batch=1")
    emit(plan, "axisplan", "kubernetes", tmp_path / "out", EmitSettings(options=IMAGE))
    for name in ("trainjob.yaml", "pytorchjob.yaml"):
        documents = list(yaml.safe_load_all((tmp_path / "out" / name).read_text()))
        assert [d["metadata"]["name"] for d in documents] == ["a-kind-secret"]


@pytest.fixture(scope="module")
def schemas() -> Iterator[Oracle]:
    oracle = Oracle("kubernetes_objects.py", "AXISPLAN_ORACLE_KUBERNETES")
    yield oracle
    oracle.close()


@pytest.mark.slow
def test_a_misspelt_field_is_seen(schemas: Oracle) -> None:
    train, torch = objects()
    train["spec"]["trainer"]["nodes"] = train["spec"]["trainer"].pop("numNodes")
    assert schemas.ask({"object": train})["dropped"] == [".spec.trainer.nodes"]
    torch["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["comand"] = ["x"]
    answer = schemas.ask({"object": torch})
    assert not answer["ok"] or answer["dropped"]
