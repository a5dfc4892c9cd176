"""Bulk lower bounds are bounds, and arrays cost what scalars cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.bounds import bulk_lower_bounds
from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.step import estimate
from profiles.hardware import load_cluster
from profiles.huggingface import load_model

JOBS = {
    name: Job(load_model(name), load_cluster("h100-sxm:4x8"), load_execution(execution), 4096, 128)
    for name, execution in (("llama-3.1-8b", "megatron"), ("mixtral-8x7b", "megatron"), ("gpt2-xl", "megatron-2022"))
}


def bound(job: Job, layout: Layout) -> float:
    kind = "ulysses" if layout.cp_kind == "ulysses" else "ring"
    return float(
        bulk_lower_bounds(
            job, tp=layout.tp, pp=layout.pp, micro_batch=layout.micro_batch, dp=layout.dp, cp=layout.cp, ep=layout.ep,
            etp=layout.etp,
            cp_kind=kind,
        )
    )  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_no_estimate_lies_below_the_bound_of_its_degrees(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(JOBS)))
    job = JOBS[name]
    tp = data.draw(st.sampled_from([1, 2, 4, 8] if name != "gpt2-xl" else [1]))
    cp = data.draw(st.sampled_from([1, 2])) if name != "gpt2-xl" else 1
    pp = data.draw(st.sampled_from([1, 2, 4]))
    dp = 32 // (tp * cp * pp)
    if dp < 1:
        return
    ep = data.draw(st.sampled_from([e for e in (1, 2, 4, 8) if (tp * cp * dp) % e == 0])) if "mixtral" in name else 1
    schedule, vpp = data.draw(st.sampled_from([("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]))
    if pp == 1:
        schedule, vpp = "1f1b", 1
    layout = Layout(
        tp=tp, cp=cp, cp_kind=data.draw(st.sampled_from(["ring", "ulysses"])), pp=pp, vpp=vpp, ep=ep, dp_shard=dp,
        schedule=schedule,
        micro_batch=data.draw(st.sampled_from([1, 2])), sp=data.draw(st.booleans()) and tp > 1,
        zero=data.draw(st.sampled_from([0, 1, 2, 3])), recompute=data.draw(st.sampled_from(["none", "selective", "full"])),
    )  # fmt: skip
    assert bound(job, layout) <= estimate(job, layout, detail=False).step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", sorted(JOBS))
def test_an_array_of_degrees_gives_what_each_gives_alone(name: str) -> None:
    job = JOBS[name]
    tp, pp = np.array([1, 1, 2, 2]), np.array([1, 2, 4, 1])
    micro, dp = np.array([1, 2, 1, 4]), 32 // (tp * pp)
    together = bulk_lower_bounds(job, tp=tp, pp=pp, micro_batch=micro, dp=dp)
    for i in range(4):
        alone = bulk_lower_bounds(job, tp=int(tp[i]), pp=int(pp[i]), micro_batch=int(micro[i]), dp=int(dp[i]))
        assert together[i] == pytest.approx(float(alone), rel=1e-12)


def test_the_bound_of_a_plain_data_parallel_layout_is_close() -> None:
    job = JOBS["llama-3.1-8b"]
    layout = Layout.parse("dp=32", 32)
    assert bound(job, layout) > 0.95 * estimate(job, layout, detail=False).step_seconds
