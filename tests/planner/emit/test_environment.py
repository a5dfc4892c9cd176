"""Shared environment: the allocator's rule table (cases.md I06), and nothing invented about the network."""

from __future__ import annotations

import pytest
from plans import job_of, plan_of

from planner.emit.environment import Facts, allocator, capability, network, shared, skypilot_name

ON, OFF, REGISTER = "expandable_segments:True", "expandable_segments:False", ("NCCL_GRAPH_REGISTER", "0")
RULES = [
    (Facts("megatron", 9), [ON]),
    (Facts("megatron", 9, cuda_graphs=True), [ON, REGISTER]),
    (Facts("megatron", 10, cuda_graphs=True), [ON]),
    (Facts("megatron", None, cuda_graphs=True), [ON, REGISTER]),
    (Facts("torchtitan", 9, cp=2, cuda_graphs=True), [OFF]),
    (Facts("torchtitan", 9, cp=2), [ON]),
    (Facts("torchtitan", 9, cuda_graphs=True), [ON, REGISTER]),
    (Facts("megatron", 9, uccl_ep=True), [OFF]),
    (Facts("deepspeed", 0), []),
]


@pytest.mark.parametrize(("facts", "wanted"), RULES)
def test_expandable_segments_where_nothing_breaks_with_them(facts: Facts, wanted: list[object]) -> None:
    found = [v.value if v.name == "PYTORCH_CUDA_ALLOC_CONF" else (v.name, v.value) for v in allocator(facts)]
    assert found == wanted
    assert all(len(v.reason) > 20 for v in allocator(facts))


def test_interfaces_are_suggested_in_comments_and_never_set() -> None:
    site = [v for v in network(Facts("megatron", 9, nodes=4)) if v.name.startswith(("NCCL_SOCKET", "NCCL_IB"))]
    assert {v.how for v in site} == {"suggest"}
    assert all(line.startswith("#") for v in site for line in v.shell().splitlines())
    assert not [v for v in network(Facts("megatron", 9, nodes=1)) if v.how == "suggest"]


def test_a_cpu_has_no_cuda_environment() -> None:
    job = job_of("llama-tiny", "cpu:1x2", "axisplan", seq_len=64, global_batch=8, precision="fp32")
    assert [v.name for v in shared(plan_of(job, "tp=2,zero=1"), "axisplan")] == ["OMP_NUM_THREADS"]


def test_every_built_in_gpu_is_known() -> None:
    from importlib import resources

    names = [f.name[:-5] for f in (resources.files("profiles") / "data" / "gpus").iterdir() if f.name.endswith(".yaml")]
    assert [n for n in names if not n.startswith("cpu") and capability(n) is None] == []
    assert (capability("h100-sxm-80gb"), capability("b200-sxm-180gb"), capability("mine")) == (9, 10, None)
    assert (skypilot_name("h100-sxm-80gb"), skypilot_name("mine")) == ("H100", None)
