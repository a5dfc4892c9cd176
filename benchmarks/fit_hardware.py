"""Fit the shipped curves to sample files, and say how far off they are on samples that were held out.

    python benchmarks/fit_hardware.py --samples PATH [--reference PATH] [--only gb200] [--write]

PATH is a folder with the files named in SAMPLES below (docs/hardware.md says where they come from and under which licence; those of
the RTX PRO 6000 are in benchmarks/data). ``--reference`` is a folder with held-out scores of other forms and of other fits to the same
samples. What was found is kept in benchmarks/results/hardware_fits.json and shown in docs/hardware.md (``hardware_errors.py``), unless
``--only`` looks at a part. ``--write`` puts the curves into ``profiles/data/gpus`` and ``profiles/data/links``.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from profiles.catalogue import dump_yaml, load_gpu
from profiles.files import read_yaml, write_text
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
from profiles.gpu import Constant, GpuProfile, MatmulCurve
from profiles.links import CollectiveCurve, Link
from profiles.operations import BYTES

ROOT = Path(__file__).resolve().parent.parent
DATA, HERE, KEPT = ROOT / "profiles" / "data", ROOT / "benchmarks" / "data", ROOT / "benchmarks" / "results" / "hardware_fits.json"
TABLES = "ai-dynamo/aiconfigurator tables (NVIDIA, Apache-2.0), fitted by benchmarks/fit_hardware.py"
BACKWARD = (
    "backward/forward: FA3 and cuDNN on H100, FA4 on Blackwell, SimuMax on A100 and B200: 2.6 at head 64, 2.9-3.05 at 128, "
    "3.2-3.4 for MLA 192/128"
)
RATIOS = {64: 2.6, 128: 2.93, 192: 3.2}


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
NCCL = "nccl-tests, 512 B to 512 MB, in ai-dynamo/aiconfigurator (NVIDIA, Apache-2.0), fitted by benchmarks/fit_hardware.py"
VTRAIN = "VIA-Research/vTrain V100 all-reduce table (MIT), 1 MB to 1 GB, fitted by benchmarks/fit_hardware.py"
V100_GROUPS = (2, 4, 8)
V100_RATES = {"all_gather": 0.94, "reduce_scatter": 0.97, "all_to_all": 0.90}
"""Rates beside the all-reduce's on a rank's wire, as on A100; their latency is half, as of one pass round the ring beside two."""
Record = dict[str, Any]
"""One fit: what of which GPU or link, its held-out errors, those of others (``reference``), and the curve."""


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


def record(kind: str, of: str, what: str, fit: Fit[Any], reference: dict[str, list[float]], **more: Any) -> Record:
    """A fit as it is kept, and a line of it on the screen."""
    errors = fit.errors
    same = reference.get("same form")
    beside = f"   elsewhere {same[0]:5.2f} %" if same else ""
    ours = f"held out {100 * errors.mean:5.2f} %  p90 {100 * errors.p90:5.2f} %"
    print(f"{of + ' ' + kind + ' ' + what:48s}{len(fit.samples):6d} samples   {ours}{beside}", flush=True)
    return {
        "kind": kind, "of": of, "what": what, "samples": len(fit.samples), "mean": errors.mean, "p90": errors.p90,
        "reference": reference, **more, "curve": plain(fit.curve),
    }  # fmt: skip


def off(fit: Fit[Any], chosen: Callable[[Any], bool]) -> list[float]:
    """[mean, 90th percentile] of the held-out error on some of the samples."""
    errors = fit.errors_where(chosen)
    return [errors.mean, errors.p90]


def sum_of_four(fit: Fit[MatmulCurve]) -> list[float]:
    """[mean, 90th percentile] of the held-out error of four products of different (n, k) at one m together, as a layer is."""
    rng, by_m = np.random.default_rng(0), defaultdict(list)
    for sample, ratio in zip(fit.samples, fit.ratios, strict=True):
        by_m[sample.m].append((sample.seconds, sample.seconds * ratio))
    ratios = []
    for times in by_m.values():
        table = np.array(times)
        drawn = np.array([rng.choice(len(table), 4, replace=False) for _ in range(200)])
        ratios.append(table[drawn, 1].sum(axis=1) / table[drawn, 0].sum(axis=1))
    wrong = np.abs(np.concatenate(ratios) - 1)
    return [float(wrong.mean()), float(np.quantile(wrong, 0.9))]


def plain(curve: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(curve).items() if not name.startswith("_") and value is not None}


def edit(path: Path, change: dict[str, Any]) -> None:
    """Replace these top-level sections, entry by entry, of a YAML file."""
    data = read_yaml(path, "data")
    for section, entries in change.items():
        data[section] = {**data.get(section, {}), **entries}
    write_text(path, dump_yaml(data))


def fit_products(source: Source, gpu: GpuProfile, folder: Path, reference: Reference) -> Iterator[Record]:
    """Each precision's curve; of bf16 also the error when rows from 128 are fitted with it, which is not shipped."""
    rate = source.memory_gigabytes_per_second * 1e9
    for dtype, peak in PRECISIONS.items():
        path = found(folder, f"gemm_{source.stem}_{dtype}.csv")
        if not path.exists():
            continue
        settings: dict[str, Any] = {
            "peak": gpu.peak_flops(peak), "item_bytes": BYTES[peak], "memory_bytes_per_second": rate, "cast": dtype == "fp8",
            "source": TABLES,
        }  # fmt: skip
        fit = fit_matmul(matmul_samples(path), **settings)
        fit = replace(fit, curve=replace(fit.curve, hot=dtype != "nvfp4"))
        four = {"sum_of_four": sum_of_four(fit), "sum_of_four_reference": reference.scores["sum of four", source.table, dtype]}
        if dtype == "bf16" and len(small := matmul_samples(path, rows_from=128, sides_from=256)) > len(fit.samples):
            wider = fit_matmul(small, **settings).errors
            four["from_128_rows"] = [wider.mean, wider.p90]
        scores = reference.scores["matmul", source.table, dtype]
        yield record("matmul", source.gpu, dtype, fit, scores, shipped=dtype in gpu.peaks, **four)


def fit_gpu(source: Source, folder: Path, reference: Reference) -> Iterator[Record]:
    """Products, attention, and grouped products bounded by the plain ones (and, not shipped, unbounded)."""
    gpu: GpuProfile = load_gpu(source.gpu)
    products = list(fit_products(source, gpu, folder, reference))
    yield from products
    own = "attention_rtx_pro_6000_bf16.csv" if source.stem == "rtx_pro_6000" else "attention_prefill_causal_bf16.csv"
    forward = fit_attention(
        attention_samples(found(folder, own), source.table, source.kernels), peak=gpu.peak_flops("bf16"), sms=gpu.sms,
        backward_ratio=RATIOS, source=f"{TABLES}; {BACKWARD}",
    )  # fmt: skip
    large = off(forward, lambda s: s.length >= 2048 and s.batch * s.heads >= 32 and s.length * s.batch <= 65536)
    scores = reference.scores["attention", source.table, "128"]
    yield record("attention", source.gpu, "head 128", forward, scores, shipped=True, large=large)
    for product in products:
        dtype = product["what"]
        samples = expert_samples(found(folder, "moe_fused_balanced.csv"), source.table, dtype) if dtype in ("bf16", "fp8") else []
        settings: dict[str, Any] = {
            "plain": MatmulCurve(**product["curve"]), "peak": gpu.peak_flops(PRECISIONS[dtype]), "item_bytes": BYTES[PRECISIONS[dtype]],
            "weight_gradient": 1.2,
            "source": f"{TABLES}; weight gradient: median of SimuMax grouped products (A100-PCIe, B200)",
        }  # fmt: skip
        for what, bound in ((dtype, 1.0), (f"{dtype}, unbounded", 1.6)) if samples else ():
            fit = fit_experts(samples, at_most=bound, **settings)
            yield record("grouped", source.gpu, what, fit, reference.scores["grouped", source.table, dtype], shipped=bound == 1.0)


def write_gpu(source: Source, records: list[Record]) -> None:
    """The shipped curves of a GPU into its file."""
    change: dict[str, dict[str, Any]] = defaultdict(dict)
    for r in records:
        if r["shipped"] and r["kind"] == "attention":
            change["attention"] = {name: value for name, value in r["curve"].items() if name not in ("fp8_speed", "latent_speed")}
        elif r["shipped"]:
            change[r["kind"]][r["what"]] = r["curve"]
    edit(DATA / "gpus" / f"{source.gpu}.yaml", change)


def fit_link(name: str, system: str, folder: Path, reference: Reference) -> Iterator[Record]:
    """A row for each collective and group size in the samples."""
    samples = collective_samples(found(folder, "collectives_intranode_nccl.csv"), system)
    for kind, fits in fit_collective(samples, source=NCCL, protocols=True).items():
        op = {"all_to_all": "alltoall"}.get(kind, kind)
        for fit in fits:
            key = (system, op, str(fit.curve.ranks))
            more = {
                "ranks": fit.curve.ranks, "collective": kind, "from_1_mb": off(fit, lambda s: s.bytes >= 1 << 20),
                "from_1_mb_reference": reference.scores["collective from 1 MB", *key],
            }  # fmt: skip
            yield record(
                "link", name, f"{kind} over {fit.curve.ranks}", fit, reference.scores["collective", *key], shipped=True, **more
            )


def fit_vtrain(folder: Path) -> Iterator[Record]:
    """All-reduce of vTrain's tables: V100's is shipped, A100's judges the form on messages up to 1 GB."""
    for gpu, link in (("v100", "nvlink2"), ("a100", "nvlink3")):
        samples = vtrain_samples(found(folder, "allreduce_vtrain_a100_v100.csv"), gpu)
        for fit in fit_collective(samples, source=VTRAIN)["all_reduce"]:
            more = {"ranks": fit.curve.ranks, "collective": "all_reduce", "shipped": gpu == "v100"}
            yield record("vtrain", link, f"{gpu} all_reduce over {fit.curve.ranks}", fit, {}, **more)


def write_link(name: str, records: list[Record]) -> None:
    """Rows of the group sizes fitted; a shipped row of another size (a whole rack) stays. Where only the all-reduce was measured
    (V100), the others are estimates from it."""
    path = DATA / "links" / f"{name}.yaml"
    standing = read_yaml(path, "data")["curves"]
    change: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for r in records:
        if r["shipped"]:
            change[r["collective"]].append(r["curve"])
    if set(change) == {"all_reduce"}:
        for kind, ratio in V100_RATES.items():
            change[kind] = [estimated(row, ratio) for row in change["all_reduce"]]
    for kind, fitted in change.items():
        kept = [row for row in standing.get(kind, []) if row["ranks"] not in [row["ranks"] for row in fitted]]
        change[kind] = sorted([*fitted, *kept], key=lambda row: row["ranks"])
    edit(path, {"curves": dict(change)})


def estimated(row: dict[str, Any], ratio: float) -> dict[str, Any]:
    """The row of another collective, by analogy."""
    alpha, rate = (float(f"{value:.5g}") for value in (row["alpha_seconds"] / 2, row["bytes_per_second"] * ratio))
    other = {name: value for name, value in row.items() if name != "heldout_error"}
    source = f"V100 all-reduce row with the ratio of A100; {VTRAIN}"
    return {**other, "alpha_seconds": alpha, "bytes_per_second": rate, "origin": "estimate", "source": source}


def unseen_sizes(records: list[Record], folder: Path) -> list[Record]:
    """Group sizes that a link has no row of: 4 from rows of 2 and 8, 8 from rows of 2 and 4, mean error in percent of samples."""
    out = []
    for name, system in LINKS.items():
        rows_of = [
            CollectiveCurve(**r["curve"])
            for r in records
            if r["of"] == name and r["kind"] == "link" and r["collective"] == "all_reduce"
        ]
        samples = collective_samples(found(folder, "collectives_intranode_nccl.csv"), system)
        for target, known in ((4, (2, 8)), (8, (2, 4))):
            own = [s for s in samples if s.kind == "all_reduce" and s.ranks == target]
            curves = tuple(row for row in rows_of if row.ranks in known)
            if own and len(curves) == 2:
                peak = Constant(1e12, "B/s", "estimate", "not used here")
                link = Link(name=name, peak_bytes_per_second=peak, curves={"all_reduce": curves})
                ratios = [float(link.seconds("all_reduce", s.bytes, target)) / s.seconds for s in own]
                out.append({"kind": "unseen size", "of": name, "what": f"{target} from {known[0]} and {known[1]}",
                            "mean": float(np.abs(np.array(ratios) - 1).mean())})  # fmt: skip
    return out


def transfers(records: list[Record], folder: Path) -> list[Record]:
    """The H100's bf16 parameters at the peak and memory rate of others: what a GPU without samples costs."""
    curve = next(
        MatmulCurve(**r["curve"]) for r in records if (r["of"], r["kind"], r["what"]) == ("h100-sxm-80gb", "matmul", "bf16")
    )
    out = []
    for source in SAMPLES:
        peak = load_gpu(source.gpu).peak_flops("bf16")
        other = replace(curve, memory_bytes_per_second=source.memory_gigabytes_per_second * 1e9)
        samples = matmul_samples(found(folder, f"gemm_{source.stem}_bf16.csv"))
        ratios = np.array([float(other.seconds(peak, s.m, s.n, s.k)) / s.seconds for s in samples])
        out.append({"kind": "transfer", "of": source.gpu, "what": "bf16", "mean": float(np.abs(ratios - 1).mean()),
                    "bias": float(np.median(ratios) - 1)})  # fmt: skip
    return out


def keep(records: list[Record]) -> None:
    """What was fitted, figures of five digits."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(v) for key, v in value.items()}
        if isinstance(value, list):
            return [short(v) for v in value]
        return float(f"{value:.5g}") if isinstance(value, float) else value

    write_text(KEPT, json.dumps([short(r) for r in records], indent=1) + "\n")


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
    reference, every = Reference(given.reference), []
    for source in SAMPLES:
        if given.only in source.gpu:
            own = list(fit_gpu(source, given.samples, reference))
            every += own
            write_gpu(source, own) if given.write else None
    links = {name: fit_link(name, system, given.samples, reference) for name, system in LINKS.items()}
    by_link: dict[str, list[Record]] = {name: list(fits) for name, fits in links.items() if given.only in name}
    if given.only in "nvlink2":
        by_link["nvlink2"] = list(fit_vtrain(given.samples))
    for name, own in by_link.items():
        every += own
        write_link(name, own) if given.write else None
    if not given.only:
        keep([*every, *transfers(every, given.samples), *unseen_sizes(every, given.samples)])
        print(f"{KEPT.relative_to(ROOT)} written; python benchmarks/hardware_errors.py puts it into docs/hardware.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
