"""Case A19: the planner takes a chunked loss where whole logits need more than a tenth of the memory, and says so."""

from __future__ import annotations

import pytest

from cost_models.execution import load_execution
from cost_models.job import GIB, Job
from cost_models.layout import Layout
from planner.chunked_loss import CHUNK, chunked, logit_bytes
from planner.solve import PlanRequest, solve
from profiles.hardware import load_cluster
from profiles.huggingface import load_model


def job(execution: str = "fsdp", seq_len: int = 8192, **facts: object) -> Job:
    return Job(load_model("llama-3-8b"), load_cluster("h100-sxm:1x8"), load_execution(execution).with_(**facts), seq_len, 64)


@pytest.mark.parametrize(("tokens", "gib"), [(8192, 4.637), (1024, 0.580)])
def test_a19_fp32_logits_of_a_152k_vocabulary(tokens: int, gib: float) -> None:
    facts = load_execution("megatron").with_(logit_peak_bytes=4.0, vocab_multiple=1)
    work = Job(load_model("qwen3-8b"), load_cluster("h100-sxm:1x8"), facts, tokens, 8)
    assert logit_bytes(work, Layout()) / GIB == pytest.approx(gib, rel=1e-3)


def test_a19_the_plan_chunks_the_loss_where_the_framework_can_and_says_what_it_would_save_where_it_cannot() -> None:
    plain = solve(PlanRequest(job(), pins="zero=3,micro_batch=1", top=0))
    able = solve(PlanRequest(job(chunks_loss=True), pins="zero=3,micro_batch=1", top=0))
    assert plain.job().execution.loss_chunk_tokens == 0
    assert any("whole logits take 13.7 GiB, 19%" in w and "1.7 GiB" in w for w in plain.warnings)
    assert able.job().execution.loss_chunk_tokens == CHUNK
    assert any(w.startswith("the loss is computed in chunks of 1024 tokens") for w in able.warnings)
    peaks = [p.estimate["memory"][-1]["peak_allocated"] for p in (plain, able)]
    assert peaks[0] - peaks[1] > 0.7 * logit_bytes(job(), Layout(zero=3, dp_shard=8)) * (1 - CHUNK / 8192)
    assert plain.step_seconds < able.step_seconds < 1.05 * plain.step_seconds


def test_small_logits_and_a_loss_that_is_chunked_already_are_left_alone() -> None:
    for work in (job(seq_len=2048), job(loss_chunk_tokens=2048), job(chunks_loss=True, logit_peak_bytes=2.0)):
        assert chunked(work, Layout(zero=3, dp_shard=8)) == (work, "")
