"""Fit the shipped curves to sample files, and say how far off they are on samples that were held out.

    python benchmarks/fit_hardware.py --samples PATH [--reference PATH] [--only gb200] [--write]

PATH is a folder with the files named in SAMPLES below (docs/hardware.md says where they come from and under which licence);
``--reference`` is a folder with held-out scores of other fits to the same samples, shown beside ours. ``--write`` puts the curves
into ``profiles/data/gpus`` and ``profiles/data/links``.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from profiles.catalogue import dump_yaml, load_gpu
from profiles.fit import (
    AttentionSample,
    CollectiveSample,
    ExpertSample,
    Fit,
    MatmulSample,
    fit_attention,
    fit_collective,
    fit_experts,
    fit_matmul,
)
from profiles.gpu import GpuProfile, MatmulCurve
from profiles.operations import BYTES

DATA = Path(__file__).resolve().parent.parent / "profiles" / "data"
TABLES = "ai-dynamo/aiconfigurator tables (NVIDIA, Apache-2.0), fitted by benchmarks/fit_hardware.py"
BACKWARD = (
    "backward/forward: FA3 and cuDNN on H100, FA4 on Blackwell, SimuMax on A100 and B200: 2.6 at head 64, 2.9-3.05 at 128, "
    "3.2-3.4 for MLA 192/128"
)
RATIOS = {64: 2.6, 128: 2.93, 192: 3.2}


@dataclass(frozen=True)
class Source:
    """Where one GPU's samples are: the stem of its gemm files, its name in the attention and expert tables, and its memory rate."""

    gpu: str
    stem: str
    table: str
    memory_gigabytes_per_second: float


SAMPLES = (
    Source("a100-sxm-80gb", "a100_sxm", "A100-SXM", 0.85 * 2039),
    Source("h100-sxm-80gb", "h100_sxm", "H100-SXM", 0.88 * 3350),
    Source("h200-sxm-141gb", "h200_sxm", "H200-SXM", 0.85 * 4800),
    Source("b200-sxm-180gb", "b200_sxm", "B200-SXM", 0.85 * 7700),
    Source("b300-sxm-288gb", "b300_sxm", "B300-SXM", 0.85 * 7750),
    Source("gb200", "gb200", "GB200", 0.85 * 8000),
    Source("gb300", "gb300", "GB300", 0.85 * 8000),
    Source("l40s-48gb", "l40s", "L40S", 0.85 * 864),
)
LINKS = {
    "nvlink3": "a100_sxm", "nvlink4": "h100_sxm", "nvlink4-h200": "h200_sxm", "nvlink5": "b200_sxm", "nvlink5-b300": "b300_sxm",
    "nvlink5-gb200": "gb200", "nvlink5-gb300": "gb300", "pcie5": "rtx_pro_6000_server",
}  # fmt: skip


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def matmul_samples(path: Path) -> list[MatmulSample]:
    """Shapes of training: m >= 1024 and a multiple of 64 (the others are unaligned repeats), n and k >= 512."""
    every = [MatmulSample(float(r["m"]), float(r["n"]), float(r["k"]), float(r["time_us"]) * 1e-6) for r in rows(path)]
    return [s for s in every if s.m >= 1024 and s.m % 64 == 0 and s.n >= 512 and s.k >= 512 and s.seconds > 0]


def attention_samples(path: Path, gpu: str) -> list[AttentionSample]:
    """Causal forwards of the fast kernels, s >= 1024 and at least eight heads in all."""
    fast = ("flash_attention", "fa3", "trtllm_mha")
    return [
        AttentionSample(float(r["b"]), float(r["s"]), float(r["h"]), float(r["d"]), float(r["us"]) * 1e-6)
        for r in rows(path)
        if r["gpu"] == gpu and r["kernel_source"] in fast and float(r["s"]) >= 1024 and float(r["b"]) * float(r["h"]) >= 8
    ]


def expert_samples(path: Path, gpu: str, dtype: str) -> list[ExpertSample]:
    """Balanced fused MoE layers with at least 64 tokens an expert."""
    found = []
    for r in rows(path):
        tokens, topk, experts, parts = (float(r[c]) for c in ("num_tokens", "topk", "num_experts", "moe_ep_size"))
        if r["gpu"] == gpu and r["dtype"] == dtype and tokens * topk / experts >= 64:
            hidden, inner = float(r["hidden_size"]), float(r["inter_size"]) / float(r["moe_tp_size"])
            case = "/".join(r[c] for c in ("hidden_size", "inter_size", "num_experts", "topk"))
            seconds = float(r["us"]) * 1e-6
            found.append(ExpertSample(tokens * topk / parts, hidden, inner, experts / parts, seconds, tokens, case))
    return found


def collective_samples(path: Path, system: str) -> list[CollectiveSample]:
    names = {"alltoall": "all_to_all"}
    return [
        CollectiveSample(names.get(r["op"], r["op"]), int(r["n"]), float(r["bytes"]), float(r["us"]) * 1e-6)
        for r in rows(path)
        if r["system"] == system
    ]


class Reference:
    """Held-out scores of other fits to the same samples, percent; empty where there is no such folder."""

    def __init__(self, folder: Path | None) -> None:
        self.scores: dict[tuple[str, ...], float] = {}
        if folder is None or not folder.is_dir():
            return
        for r in rows(folder / "gemm_power_saturating_params.csv"):
            self.scores["matmul", r["gpu"], r["dtype"]] = float(r["heldout_mape"])
        for r in rows(folder / "attention_heldout_scores.csv"):
            if r["model"].startswith("eff*sat(s)*sat(tiles)"):
                self.scores["attention", r["gpu"], r["d"]] = float(r["mape"])
        for r in rows(folder / "moe_params.csv"):
            self.scores["grouped", r["gpu"], r["dtype"]] = float(r["heldout_mape"])
        for r in rows(folder / "collective_3param_heldout_scores.csv"):
            self.scores["collective", r["sys"], r["op"], r["n"]] = float(r["mape"])

    def line(self, what: str, fit: Fit[Any], *key: str) -> str:
        other = self.scores.get(key)
        beside = f"   reference {other:5.2f} %" if other is not None else ""
        ours = f"held out {100 * fit.heldout_mean:5.2f} %  p90 {100 * fit.heldout_p90:5.2f} %"
        return f"{what:44s}{fit.samples:6d} samples   {ours}{beside}"


def plain(curve: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(curve).items() if not name.startswith("_") and value is not None}


def edit(path: Path, change: dict[str, Any]) -> None:
    """Replace these top-level sections, entry by entry, of a YAML file."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    for section, entries in change.items():
        data[section] = {**data.get(section, {}), **entries}
    beside = path.with_suffix(".tmp")
    beside.write_text(dump_yaml(data), encoding="utf-8")
    os.replace(beside, path)


def fit_gpu(source: Source, folder: Path, reference: Reference, write: bool) -> None:
    gpu: GpuProfile = load_gpu(source.gpu)
    rate = source.memory_gigabytes_per_second * 1e9
    products: dict[str, MatmulCurve] = {}
    for dtype in ("bf16", "fp8", "nvfp4"):
        path = folder / f"gemm_{source.stem}_{dtype}.csv"
        if not path.exists():
            continue
        fit = fit_matmul(
            matmul_samples(path), peak=gpu.peak_flops(dtype), item_bytes=BYTES[dtype], memory_bytes_per_second=rate,
            cast=dtype == "fp8", source=TABLES,
        )  # fmt: skip
        products[dtype] = fit.curve
        print(reference.line(f"{source.gpu} matmul {dtype}", fit, "matmul", source.table, dtype), flush=True)
    forward = fit_attention(
        attention_samples(folder / "attention_prefill_causal_bf16.csv", source.table), peak=gpu.peak_flops("bf16"), sms=gpu.sms,
        backward_ratio=RATIOS, source=f"{TABLES}; {BACKWARD}",
    )  # fmt: skip
    print(reference.line(f"{source.gpu} attention", forward, "attention", source.table, "128"), flush=True)
    grouped: dict[str, Any] = {}
    for dtype in ("bf16", "fp8"):
        samples = expert_samples(folder / "moe_fused_balanced.csv", source.table, dtype)
        if not samples or dtype not in products:
            continue
        settings: dict[str, Any] = {
            "plain": products[dtype], "peak": gpu.peak_flops(dtype), "item_bytes": BYTES[dtype], "weight_gradient": 1.2,
            "source": f"{TABLES}; weight gradient: median of SimuMax grouped products (A100-PCIe, B200)",
        }  # fmt: skip
        fit_free, experts = fit_experts(samples, at_most=1.6, **settings), fit_experts(samples, **settings)
        print(reference.line(f"{source.gpu} experts {dtype}, unbounded", fit_free, "grouped", source.table, dtype))
        print(reference.line(f"{source.gpu} experts {dtype}, at most plain", experts, "grouped", source.table, dtype), flush=True)
        grouped[dtype] = plain(experts.curve)
    if write:
        attention = plain(forward.curve)
        attention.pop("fp8_speed")
        change: dict[str, Any] = {"matmul": {dtype: plain(curve) for dtype, curve in products.items()}, "attention": attention}
        for dtype, curve in change["matmul"].items():
            curve["hot"] = dtype != "nvfp4"
        edit(DATA / "gpus" / f"{source.gpu}.yaml", {**change, **({"grouped": grouped} if grouped else {})})


def fit_link(name: str, system: str, folder: Path, reference: Reference, write: bool) -> None:
    """Rows of the group sizes in the samples; a shipped row of another size (a whole rack) stays."""
    path = DATA / "links" / f"{name}.yaml"
    standing = yaml.safe_load(path.read_text(encoding="utf-8"))["curves"]
    change: dict[str, Any] = {}
    for kind, fits in fit_collective(collective_samples(folder / "collectives_intranode_nccl.csv", system), source=NCCL).items():
        op = {"all_to_all": "alltoall"}.get(kind, kind)
        for fit in fits:
            what = f"{name} {kind} over {fit.curve.ranks}"
            print(reference.line(what, fit, "collective", system, op, str(fit.curve.ranks)))
        measured = [fit.curve.ranks for fit in fits]
        kept = [row for row in standing.get(kind, []) if row["ranks"] not in measured]
        change[kind] = sorted([*(plain(fit.curve) for fit in fits), *kept], key=lambda row: row["ranks"])
    if write:
        edit(path, {"curves": change})


NCCL = "nccl-tests, 512 B to 512 MB, in ai-dynamo/aiconfigurator (NVIDIA, Apache-2.0), fitted by benchmarks/fit_hardware.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if not given.samples.is_dir():
        print(f"samples: {str(given.samples)!r}: no such folder", file=sys.stderr)
        return 2
    reference = Reference(given.reference)
    for source in SAMPLES:
        if given.only in source.gpu:
            fit_gpu(source, given.samples, reference, given.write)
    for name, system in LINKS.items():
        if given.only in name:
            fit_link(name, system, given.samples, reference, given.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
