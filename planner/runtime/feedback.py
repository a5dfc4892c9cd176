"""What a run measured, as a row of the measured-runs table that ``axisplan regress`` and ``calibrate`` read (docs/accuracy.md).

Beside the columns of that table the row holds what the plan predicted; nothing reads those two for judging.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles.files import write_text
from profiles.model import Attention, LatentAttention, Mlp, Moe

if TYPE_CHECKING:
    from planner.plan import Plan

WARM_SHARE = 0.25
"""Share of the steps, at the start, that warms up caches and allocators and is not judged."""
GIB = 2**30


def row(plan: Plan, records: Sequence[dict[str, Any]], name: str = "run") -> dict[str, str]:
    """One row: what ran, its median step after warm-up, its peak, and the prediction. ``records`` as ``train.run`` makes them."""
    job, layout = plan.job(), plan.layout_object
    model, cluster = job.model, job.cluster
    warm = list(records)[int(len(records) * WARM_SHARE) :] or list(records)
    seconds = statistics.median(r["seconds"] for r in warm)
    mixer = next((k.mixer for k in model.kinds if isinstance(k.mixer, Attention | LatentAttention)), None)
    dense = next((k.ffn for k in model.kinds if isinstance(k.ffn, Mlp)), None)
    moe = next((k.ffn for k in model.kinds if isinstance(k.ffn, Moe)), None)
    ffn = dense or moe
    worst = max((m["peak_allocated"] for m in plan.estimate.get("memory", [])), default=None)
    values: dict[str, Any] = {
        "id": f"axisplan-{name}", "source": "axisplan run", "source_table": plan.layout_text, "model_name": model.name,
        "arch": "moe" if moe else "dense", "layers": model.num_layers, "hidden": model.hidden, "vocab": model.vocab,
        "heads": mixer.heads if mixer else "", "kv_heads": mixer.kv_heads if mixer else "", "head_dim": mixer.head_dim if mixer else "",
        "ffn_hidden": dense.width if dense else "", "gated_mlp": int(ffn.gated) if ffn else "",
        "mla": int(isinstance(mixer, LatentAttention)), "seq_len": job.seq_len, "global_batch": job.global_batch,
        "gpu": cluster.gpu.name, "gpus_per_node": cluster.gpus_per_node, "gpus": layout.world, "precision": job.precision,
        "framework": "axisplan", "tp": layout.tp, "pp": layout.pp, "vp": layout.vpp, "cp": layout.cp, "ep": layout.ep,
        "etp": layout.etp, "dp": layout.dp, "sp": int(layout.sp), "zero": layout.zero, "micro_batch": layout.micro_batch,
        "schedule": layout.schedule, "recompute": layout.recompute, "attention": "flash",
        "measured_step_s": f"{seconds:.6g}", "measured_tokens_per_s_per_gpu": f"{job.tokens / seconds / layout.world:.6g}",
        "measured_peak_mem_GiB": f"{max(r['peak_bytes'] for r in records) / GIB:.6g}",
        "mem_counter": "" if cluster.gpu.is_host else "torch peak allocated",
        "predicted_step_s": f"{plan.step_seconds:.6g}", "predicted_peak_mem_GiB": f"{worst / GIB:.6g}" if worst else "",
        "stage_seconds": ";".join(f"{s:.6g}" for s in _stages(warm)),
    }  # fmt: skip
    if moe is not None:
        first = next((i for i in range(model.num_layers) if isinstance(model.layer(i).ffn, Moe)), 0)
        values |= {
            "experts": moe.experts, "topk": moe.top_k, "moe_ffn_hidden": moe.width, "shared_expert_ffn": moe.shared_width or "",
            "first_dense_layers": first or "",
        }  # fmt: skip
    return {key: str(value) for key, value in values.items()}


def _stages(records: Sequence[dict[str, Any]]) -> list[float]:
    """Median busy seconds of each pipeline stage."""
    every = [r["stage_seconds"] for r in records if "stage_seconds" in r]
    return [statistics.median(column) for column in zip(*every, strict=True)] if every else []


def write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write rows as CSV, whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
