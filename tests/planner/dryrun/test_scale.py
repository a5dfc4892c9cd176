"""The figures that large plans must keep: formula and program agree at full scale, in a process of less than 2 GiB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
BENCH = Path(__file__).resolve().parents[3] / "benchmarks" / "bench_dryrun.py"
GIB = 2**30


@pytest.mark.verify
@pytest.mark.parametrize(("name", "layers"), [("405b-8", 8), ("405b-126", 126), ("deepseek-v3", 3)])
def test_a_rank_of_a_large_plan_agrees_with_the_formula_in_a_small_process(name: str, layers: int) -> None:
    """Llama-3.1-405B on 16,384 GPUs, a rank of 8 layers and one of all 126; DeepSeek-V3 on 2,048, its last stage."""
    done = subprocess.run([sys.executable, str(BENCH), "--json", name], capture_output=True, text=True, timeout=1200, check=True)
    figures = json.loads(done.stdout)
    assert figures["differs"] == []
    assert figures["layers"] == layers
    assert figures["process_bytes"] < 2 * GIB
