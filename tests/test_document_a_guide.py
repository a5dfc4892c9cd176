"""Document A's decision guide: what binds a plan, named, and the document's remedy for it, one case a binding constraint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.job import Job
from cost_models.memory import stage_memory
from cost_models.step import estimate
from planner.explain import binding
from planner.legality import read_layout
from planner.remedies import REMEDIES
from tests.planner.jobs import decoder, job


def filled(of: Job, text: str) -> dict:
    """What binds when the layout fills nine tenths of the limit."""
    layout = read_layout(of, text)
    worst = max(s.device for s in stage_memory(of, layout))
    tight = replace(of, memory_limit_bytes=worst / 0.9, margin=0.0)
    return binding(tight, estimate(tight, layout))


BIG = {"layers": 8, "hidden": 2048, "heads": 16, "width": 8192}


@pytest.mark.parametrize(
    ("of", "layout", "category", "remedy"),
    [
        (job(decoder(**BIG), "h100-sxm:1x2", 8192, 64), "zero=3,micro_batch=4", "activations", "micro batch"),
        (job(decoder(**BIG), "h100-sxm:1x2", 512, 64), "zero=0,recompute=full", "optimizer", "ZeRO-1"),
        (job(decoder(**BIG), "h100-sxm:1x8", 128, 64, "megatron"), "zero=1,recompute=full", "gradients", "ZeRO-2"),
        (job(decoder(**BIG, vocab=256_000), "h100-sxm:1x8", 8192, 64, "fsdp"), "zero=3,recompute=full", "temporary", "chunked loss"),
    ],
)  # fmt: skip
def test_each_category_that_binds_has_the_documents_remedy(of, layout, category, remedy):
    found = filled(of, layout)
    assert found["category"] == category
    assert found["share_of_limit"] == pytest.approx(0.9)
    assert found["says"].startswith("memory binds: stage 0")
    assert found["remedy"] == REMEDIES[category]
    assert remedy in found["remedy"]


def test_a_layer_that_is_too_large_at_once_calls_for_tensor_parallelism() -> None:
    of = job(decoder(layers=2, hidden=8192, heads=64, width=65536), "h100-sxm:1x8", 2048, 64, "fsdp")
    found = filled(of, "zero=3,recompute=full")
    assert found["category"] == "temporary"
    assert "tensor parallelism" in found["remedy"]


def test_parameters_that_bind_call_for_a_pipeline() -> None:
    of = job(decoder(**BIG), "h100-sxm:1x8", 128, 64, "deepspeed", optimizer="sgd")
    found = filled(of, "zero=2,recompute=full")
    assert found["category"] == "parameters"
    assert found["remedy"].startswith("split the layers over a pipeline")


def test_expert_weights_that_bind_call_for_expert_parallelism():
    of = job(decoder(**BIG, experts=16, expert_width=4096), "h100-sxm:1x8", 128, 64, "deepspeed", optimizer="sgd")
    found = filled(of, "zero=2,recompute=full,ep=1")
    assert found["category"] == "parameters"
    assert found["remedy"] == REMEDIES["experts"]


def test_the_decision_guide_orders_its_advice():
    """Activations first by a smaller micro batch, then recompute, then sequence or context parallelism."""
    text = REMEDIES["activations"]
    assert text.index("micro batch") < text.index("recompute") < text.index("context")
    assert "pipeline" in REMEDIES["parameters"]
    assert "expert parallelism" in REMEDIES["experts"]
