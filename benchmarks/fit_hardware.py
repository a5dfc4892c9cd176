"""Fit the shipped curves to sample files, and say how far off they are on samples that were held out.

    python benchmarks/fit_hardware.py --samples PATH [--reference PATH] [--only gb200] [--write]

PATH is a folder with the files of ``hardware_samples.py`` (docs/hardware.md says where they come from and under which licence). Other
forms are judged on the same held-out samples (``other_forms.py``); ``--reference`` is a folder with held-out scores that others found
with the same forms on them, shown beside. What was found is kept in benchmarks/results/hardware_fits.json and shown in docs/hardware.md
(``hardware_errors.py``), unless ``--only`` looks at a part. ``--write`` puts the curves into ``profiles/data``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hardware_samples import (
    LINKS,
    PRECISIONS,
    SAMPLES,
    Reference,
    Source,
    attention_samples,
    collective_samples,
    every_megabyte,
    expert_samples,
    found,
    matmul_samples,
    training_samples,
    vtrain_samples,
)
from other_forms import Ratios, attention, collectives, experts, products

from profiles.catalogue import dump_yaml, load_gpu
from profiles.files import read_yaml, write_text
from profiles.fit import Errors, Fit, fit_attention, fit_collective, fit_experts, fit_matmul, thirds_of
from profiles.gpu import Constant, GpuProfile, MatmulCurve
from profiles.links import CollectiveCurve, Link
from profiles.operations import BYTES

ROOT = Path(__file__).resolve().parent.parent
DATA, KEPT = ROOT / "profiles" / "data", ROOT / "benchmarks" / "results" / "hardware_fits.json"
TABLES = "ai-dynamo/aiconfigurator tables (NVIDIA, Apache-2.0), fitted by benchmarks/fit_hardware.py"
BACKWARD = (
    "backward/forward: FA3 and cuDNN on H100, FA4 on Blackwell, SimuMax on A100 and B200: 2.6 at head 64, 2.9-3.05 at 128, "
    "3.2-3.4 for MLA 192/128"
)
RATIOS = {64: 2.6, 128: 2.93, 192: 3.2}
NCCL = "nccl-tests, 512 B to 512 MB, in ai-dynamo/aiconfigurator (NVIDIA, Apache-2.0), fitted by benchmarks/fit_hardware.py"
VTRAIN = "VIA-Research/vTrain V100 all-reduce table (MIT), 1 MB to 1 GB, fitted by benchmarks/fit_hardware.py"
V100_RATES = {"all_gather": 0.94, "reduce_scatter": 0.97, "all_to_all": 0.90}
"""Rates beside the all-reduce's on a rank's wire, as on A100; their latency is half, as of one pass round the ring beside two."""
Record = dict[str, Any]
"""One fit: what of which GPU or link, its held-out errors and those of other forms (``forms``), both as others found them
(``reference``), and the curve. Errors are [mean, 90th percentile]."""
FEWEST = 100
"""Samples of another head size from which its own curve is fitted too, to be shown."""


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


def scores(forms: Iterable[Ratios], samples: Iterable[Any] = (), chosen: Callable[[Any], bool] = bool) -> dict[str, list[float]]:
    """[mean, 90th percentile] of the held-out error of each form, on every sample or on those ``chosen``."""
    counted = np.array([chosen(s) for s in samples])
    out = {}
    for title, ratios in forms:
        errors = Errors.of(ratios[np.isfinite(ratios) & (counted if counted.size else True)])
        out[title] = [errors.mean, errors.p90]
    return out


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
        other = products(
            fit.samples,
            peak=settings["peak"],
            sms=gpu.sms,
            item_bytes=BYTES[peak],
            memory_bytes_per_second=rate,
            cast=dtype != "bf16",
        )
        published = reference.scores["matmul", source.table, dtype]
        yield record("matmul", source.gpu, dtype, fit, published, shipped=dtype in gpu.peaks, forms=scores(other), **four)


def fit_forwards(source: Source, gpu: GpuProfile, folder: Path, reference: Reference) -> Iterator[Record]:
    """Attention at head size 128, which is shipped, and at others of which there are enough samples."""
    peak = gpu.peak_flops("bf16")
    own = "attention_rtx_pro_6000_bf16.csv" if source.stem == "rtx_pro_6000" else "attention_prefill_causal_bf16.csv"
    samples = attention_samples(found(folder, own), source.table, source.kernels)
    for size in sorted({s.head_dim for s in samples}, key=lambda size: size != 128):
        settings: dict[str, Any] = {"peak": peak, "sms": gpu.sms, "head_dim": int(size), "backward_ratio": RATIOS}
        if sum(s.head_dim == size for s in samples) >= FEWEST:
            fit = fit_attention(samples, source=f"{TABLES}; {BACKWARD}", **settings)
            large = off(fit, lambda s: s.length >= 2048 and s.batch * s.heads >= 32 and s.length * s.batch <= 65536)
            other = attention(fit.samples, peak=peak, masks=thirds_of([s.length for s in fit.samples]))
            published = reference.scores["attention", source.table, str(int(size))]
            more = {"shipped": size == 128, "large": large, "forms": scores(other)}
            yield record("attention", source.gpu, f"head {size:.0f}", fit, published, **more)


def fit_grouped(source: Source, gpu: GpuProfile, plain: Iterable[Record], folder: Path, reference: Reference) -> Iterator[Record]:
    """Grouped products bounded by the plain ones and, not shipped, unbounded."""
    for product in plain:
        dtype, rate = product["what"], source.memory_gigabytes_per_second * 1e9
        samples = expert_samples(found(folder, "moe_fused_balanced.csv"), source.table, dtype)
        settings: dict[str, Any] = {"peak": gpu.peak_flops(PRECISIONS[dtype]), "item_bytes": BYTES[PRECISIONS[dtype]]}
        if not samples:
            continue
        forms = scores(experts(samples, memory_bytes_per_second=rate, **settings))
        for what, bound in ((dtype, 1.0), (f"{dtype}, unbounded", 1.6)):
            fit = fit_experts(
                samples, at_most=bound, plain=MatmulCurve(**product["curve"]), weight_gradient=1.2,
                source=f"{TABLES}; weight gradient: median of SimuMax grouped products (A100-PCIe, B200)", **settings,
            )  # fmt: skip
            shipped = bound == 1.0 and product["shipped"]
            published = reference.scores["grouped", source.table, dtype]
            yield record("grouped", source.gpu, what, fit, published, shipped=shipped, bounded=bound == 1.0, forms=forms)


def fit_gpu(source: Source, folder: Path, reference: Reference) -> Iterator[Record]:
    """Products, attention, grouped products."""
    gpu: GpuProfile = load_gpu(source.gpu)
    plain = list(fit_products(source, gpu, folder, reference))
    yield from plain
    yield from fit_forwards(source, gpu, folder, reference)
    yield from fit_grouped(source, gpu, plain, folder, reference)


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
            key, other = (system, op, str(fit.curve.ranks)), list(collectives(fit.samples))
            more = {
                "ranks": fit.curve.ranks, "collective": kind, "forms": scores(other), "from_1_mb": off(fit, _large),
                "forms_from_1_mb": scores(other, fit.samples, _large),
                "from_1_mb_reference": reference.scores["collective from 1 MB", *key],
            }  # fmt: skip
            published = reference.scores["collective", *key]
            yield record("link", name, f"{kind} over {fit.curve.ranks}", fit, published, shipped=True, **more)


def _large(sample: Any) -> bool:
    return bool(sample.bytes >= 1 << 20)


def fit_vtrain(folder: Path) -> Iterator[Record]:
    """All-reduce of vTrain's tables: V100's is shipped, A100's judges the form on messages up to 1 GB. ``whole``: the same form fitted to,
    and judged on, each megabyte, as the table was before it was thinned to sizes that are mostly small."""
    for gpu, link in (("v100", "nvlink2"), ("a100", "nvlink3")):
        samples = vtrain_samples(found(folder, "allreduce_vtrain_a100_v100.csv"), gpu)
        dense = fit_collective(every_megabyte(samples))["all_reduce"]
        for fit, whole in zip(fit_collective(samples, source=VTRAIN)["all_reduce"], dense, strict=True):
            more = {
                "ranks": fit.curve.ranks, "collective": "all_reduce", "shipped": gpu == "v100",
                "whole": [whole.errors.mean, whole.errors.p90], "whole_bytes_per_second": whole.curve.bytes_per_second,
            }  # fmt: skip
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


def layouts(records: list[Record], folder: Path) -> list[Record]:
    """Products in the three layouts of training (SimuMax) beside the forward's curve: times over it, and how far from that factor they
    are. The A100 PCIe is held against the curve of the SXM board."""
    out = []
    for table, gpu in (("A100-80-PCIe", "a100-sxm-80gb"), ("B200-SXM", "b200-sxm-180gb")):
        curve = MatmulCurve(**next(r["curve"] for r in records if (r["of"], r["kind"], r["what"]) == (gpu, "matmul", "bf16")))
        peak = load_gpu(gpu).peak_flops("bf16")
        for layout, what in (("TN", "forward"), ("NN", "input gradient"), ("NT", "weight gradient")):
            samples = training_samples(found(folder, "training_gemm_simumax.csv"), table, layout)
            factors = np.array([s.seconds / float(curve.seconds(peak, s.m, s.n, s.k)) for s in samples])
            factor = float(np.median(factors))
            out.append({"kind": "layout", "of": table, "what": what, "samples": len(samples), "factor": factor,
                        "mean": float(np.abs(factor / factors - 1).mean())})  # fmt: skip
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
        judged = (transfers, unseen_sizes, layouts)
        keep([*every, *(r for judge in judged for r in judge(every, given.samples))])
        print(f"{KEPT.relative_to(ROOT)} written; python benchmarks/hardware_errors.py puts it into docs/hardware.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
