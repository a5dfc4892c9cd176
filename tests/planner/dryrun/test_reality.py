"""The trace against real processes: bytes that the allocator really handed out, collectives that were really called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from planner.dryrun.rank import trace
from planner.plan import Plan

CASES = [
    ("dense", 2, "tp=2,zero=1"), pytest.param("dense", 2, "pp=2,dp=1", marks=pytest.mark.verify),
    pytest.param("dense", 2, "zero=2", marks=pytest.mark.verify),
    pytest.param("dense", 4, "tp=2,pp=2", marks=pytest.mark.verify), pytest.param("dense", 2, "zero=3", marks=pytest.mark.verify),
    pytest.param("dense", 2, "cp=2", marks=pytest.mark.verify), pytest.param("moe", 2, "ep=2", marks=pytest.mark.verify),
    pytest.param("mla", 2, "tp=2,recompute=full", marks=pytest.mark.verify),
    pytest.param("dense", 2, "pp=2,vpp=2,schedule=zb-v", marks=pytest.mark.verify),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "world", "layout"), CASES)
def test_traced_peak_and_collectives_are_the_real_ones(
    kind: str, world: int, layout: str, make_plan: Callable[..., Plan], processes: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Within 2 % either way of the same tracer on the real tensors; no more than the allocator's events tell; each
    collective with its axis, kind, ranks and bytes as often as it was called (experts: real tokens choose their own)."""
    plan = make_plan(kind, world, layout, layers=2 if "vpp" not in layout else 4, seq_len=512)
    plan.save(tmp_path / "plan.json")
    routed = "ep" in layout
    for real in processes(world, "really", path=str(tmp_path / "plan.json")):
        traced = trace(plan.job(), plan.layout_object, real["rank"]).record
        assert traced.peak_bytes == pytest.approx(real["peak"], rel=0.02)
        assert real["allocated"] >= 0.98 * traced.peak_bytes  # gloo's own copies are among what the allocator handed out
        here, there = Counter(), Counter()  # type: Counter[Any], Counter[Any]
        for call in traced.calls:
            here[call.axis, call.kind, call.ranks, 0 if routed else call.bytes] += 1
        for axis, kind_of, ranks, size, count in real["calls"]:
            there[axis, kind_of, ranks, 0 if routed else size] += count
        assert here == there
