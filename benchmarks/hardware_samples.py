"""The sample files that the shipped curves are fitted to, read as ``profiles.fit`` wants them, and the held-out scores of others' fits."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from profiles.fit import AttentionSample, CollectiveSample, ExpertSample, MatmulSample

HERE = Path(__file__).resolve().parent / "data"
"""Samples that are kept here: those of the RTX PRO 6000."""
KERNELS = ("flash_attention", "fa3", "trtllm_mha")


@dataclass(frozen=True)
class Source:
    """Where one GPU's samples are: the stem of its gemm files, its name in the attention and expert tables, its memory rate, and the
    attention kernels that count."""

    gpu: str
    stem: str
    table: str
    memory_gigabytes_per_second: float
    kernels: tuple[str, ...] = KERNELS


SAMPLES = (
    Source("a100-sxm-80gb", "a100_sxm", "A100-SXM", 0.85 * 2039),
    Source("h100-sxm-80gb", "h100_sxm", "H100-SXM", 0.88 * 3350),
    Source("h200-sxm-141gb", "h200_sxm", "H200-SXM", 0.85 * 4800),
    Source("b200-sxm-180gb", "b200_sxm", "B200-SXM", 0.85 * 7700),
    Source("b300-sxm-288gb", "b300_sxm", "B300-SXM", 0.85 * 7750),
    Source("gb200", "gb200", "GB200", 0.85 * 8000),
    Source("gb300", "gb300", "GB300", 0.85 * 8000),
    Source("l40s-48gb", "l40s", "L40S", 0.85 * 864),
    Source("rtx-pro-6000", "rtx_pro_6000", "RTXPRO6000", 0.85 * 1597, ("flashinfer", "triton")),
)
PRECISIONS = {"bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "nvfp4"}
"""Of the product files, and whose peak each is a part of. ``fp8_block`` (a scale for each 1 x 128 of the activation, DeepGEMM) is fitted
to be shown: no execution trains with it here."""
LINKS = {
    "nvlink3": "a100_sxm", "nvlink4": "h100_sxm", "nvlink4-h200": "h200_sxm", "nvlink5": "b200_sxm", "nvlink5-b300": "b300_sxm",
    "nvlink5-gb200": "gb200", "nvlink5-gb300": "gb300", "pcie5": "rtx_pro_6000_server",
}  # fmt: skip
V100_GROUPS = (2, 4, 8)


def found(folder: Path, name: str) -> Path:
    """A sample file, in the folder given or among those kept here."""
    return folder / name if (folder / name).exists() else HERE / name


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def matmul_samples(path: Path, *, rows_from: int = 1024, sides_from: int = 512) -> list[MatmulSample]:
    """Shapes of training: m >= 1024 and a multiple of 64 (the others are unaligned repeats), n and k >= 512."""
    every = [MatmulSample(float(r["m"]), float(r["n"]), float(r["k"]), float(r["time_us"]) * 1e-6) for r in rows(path)]
    return [s for s in every if s.m >= rows_from and s.m % 64 == 0 and min(s.n, s.k) >= sides_from and s.seconds > 0]


def attention_samples(path: Path, gpu: str, kernels: tuple[str, ...] = KERNELS) -> list[AttentionSample]:
    """Causal forwards of the fast kernels, s >= 1024 and at least eight heads in all."""
    return [
        AttentionSample(float(r["b"]), float(r["s"]), float(r["h"]), float(r["d"]), float(r["us"]) * 1e-6)
        for r in rows(path)
        if r["gpu"] == gpu and r["kernel_source"] in kernels and float(r["s"]) >= 1024 and float(r["b"]) * float(r["h"]) >= 8
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


def vtrain_samples(path: Path, gpu: str) -> list[CollectiveSample]:
    own = [r for r in rows(path) if r["gpu"] == gpu and int(r["n"]) in V100_GROUPS]
    return [CollectiveSample("all_reduce", int(r["n"]), float(r["bytes"]), float(r["us"]) * 1e-6) for r in own]


def every_megabyte(samples: Sequence[CollectiveSample]) -> list[CollectiveSample]:
    """The same at each megabyte between the smallest and the largest message of a group size, as the whole table had it: between the sizes
    that were kept of it, along straight lines."""
    dense = []
    for ranks in dict.fromkeys(s.ranks for s in samples):
        own = sorted((s for s in samples if s.ranks == ranks), key=lambda s: s.bytes)
        sizes = np.arange(own[0].bytes, own[-1].bytes + 1, 1 << 20)
        times = np.interp(sizes, [s.bytes for s in own], [s.seconds for s in own])
        dense += [CollectiveSample(own[0].kind, ranks, float(b), float(t)) for b, t in zip(sizes, times, strict=True)]
    return dense


def training_samples(path: Path, gpu: str, layout: str) -> list[MatmulSample]:
    """Products of one training layout: TN forward, NN the input's gradient, NT the weight's."""
    own = [r for r in rows(path) if (r["gpu"], r["op"], r["layout"]) == (gpu, "matmul", layout)]
    return [MatmulSample(float(r["m"]), float(r["n"]), float(r["k"]), float(r["time_us"]) * 1e-6) for r in own]


class Reference:
    """Held-out scores, [mean, 90th percentile] in percent, by form: of the other forms, and of other fits of ours (``same form``), to
    the same samples. Nothing where there is no such folder."""

    SCORES = (
        ("gemm_heldout_scores.csv", "matmul", ("gpu", "dtype"), "model", ("mape", "p90")),
        ("gemm_power_saturating_params.csv", "matmul", ("gpu", "dtype"), "", ("heldout_mape", "heldout_p90")),
        ("gemm_power_saturating_params.csv", "sum of four", ("gpu", "dtype"), "", ("sum4_mape", "sum4_p90")),
        ("attention_heldout_scores.csv", "attention", ("gpu", "d"), "model", ("mape", "p90")),
        ("moe_heldout_scores.csv", "grouped", ("gpu", "dtype"), "model", ("mape", "p90")),
        ("collective_heldout_scores.csv", "collective", ("sys", "op", "n"), "model", ("mape", "p90")),
        ("collective_heldout_scores.csv", "collective from 1 MB", ("sys", "op", "n"), "model", ("mape_ge1MB", "p90_ge1MB")),
        ("collective_3param_heldout_scores.csv", "collective", ("sys", "op", "n"), "", ("mape", "p90")),
        ("collective_3param_heldout_scores.csv", "collective from 1 MB", ("sys", "op", "n"), "", ("mape_ge1MB", "p90_ge1MB")),
    )
    """(file, what, columns of the key, column of the form or none: ours, columns of the scores)."""

    def __init__(self, folder: Path | None) -> None:
        self.scores: defaultdict[tuple[str, ...], dict[str, list[float]]] = defaultdict(dict)
        if folder is None or not folder.is_dir():
            return
        for name, what, key, form, scores in self.SCORES:
            for r in rows(folder / name):
                if "trito" in r.get("src", ""):
                    continue  # untuned kernels, as slow as nothing that trains
                self.scores[what, *(r[c] for c in key)][r[form] if form else "same form"] = [float(r[c]) for c in scores]
