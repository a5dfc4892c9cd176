"""Put the held-out errors of the shipped curves into docs/hardware.md, beside those of other forms and other fits to the same samples.

``python benchmarks/hardware_errors.py`` reads benchmarks/results/hardware_fits.json, which ``fit_hardware.py`` writes.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from profiles.files import write_text

ROOT = Path(__file__).resolve().parent.parent
KEPT, PAGE = ROOT / "benchmarks" / "results" / "hardware_fits.json", ROOT / "docs" / "hardware.md"
MARKS = ("<!-- held-out errors: benchmarks/hardware_errors.py -->", "<!-- end of held-out errors -->")
Record = dict[str, Any]

PRODUCT_FORMS = {
    "constant efficiency": "const-eff", "roofline": "roofline", "roofline + t0": "roofline+latency",
    "without derate": "saturating eff (m0,n0,k0)", "one tile, hard waves": "wave 128x256 only+k0", "best tile, hard waves": "tile/wave (hard)",
    "best tile, soft waves": "tile/wave (soft w)", "interpolated table": "log-space linear interp of eff table",
    "waves x neighbours": "soft wave x kNN-6 residual",
}  # fmt: skip
ATTENTION_FORMS = {"constant": "const-eff", "+ t0": "eff+t0", "x (1 + s0/s)": "eff*s/(s+s0)+t0"}
EXPERT_FORMS = {
    "constant": "const-eff",
    "roofline + t0": "roofline+t0",
    "+ T0": "+T0 (tokens/expert)",
    "+ padding, i0": "+T0+pad to 128 + i0",
}
LINK_FORMS = {
    "latency + bandwidth": "alpha-beta", "the same, fitted from 1 MB": "alpha-beta fit>=1MB", "lower of two protocols": "2-protocol min",
    "free exponent": "alpha+S/B+c*S^g", "interpolated table": "log-log interp",
}  # fmt: skip
"""Title of a column -> the form's name in the reference."""


def share(value: float) -> str:
    """A fraction as a percentage without its sign."""
    return f"{100 * value:.1f}"


def ours(r: Record) -> str:
    return f"**{share(r['mean'])}/{share(r['p90'])}**"


def theirs(scores: dict[str, list[float]], form: str) -> str:
    """Mean and 90th percentile, percent, of a form in the reference; empty where it has none."""
    return f"{scores[form][0]:.1f}/{scores[form][1]:.1f}" if form in scores else ""


def both(r: Record, title: str, form: str) -> str:
    """Another form's mean and 90th percentile here and, in brackets, the mean elsewhere."""
    beside = f" ({r['reference'][form][0]:.1f})" if form in r["reference"] else ""
    return "/".join(map(share, r["forms"][title])) + beside


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], words: int = 2) -> str:
    """Markdown; the first ``words`` columns are words."""
    rule = "|" + "---|" * words + "--:|" * (len(columns) - words)
    return "\n".join(["| " + " | ".join(columns) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)])


def products(records: Sequence[Record]) -> str:
    columns = ("GPU", "precision", "here", "same form, elsewhere", *PRODUCT_FORMS)
    own = [r for r in records if r["kind"] == "matmul"]
    return table(columns, ((r["of"], r["what"], ours(r), theirs(r["reference"], "same form"), *(both(r, *f) for f in PRODUCT_FORMS.items()))
                           for r in own))  # fmt: skip


def sums(records: Sequence[Record]) -> str:
    """Of products: four at once, and rows from 128; the transfer of H100's parameters."""
    moved = {r["of"]: r for r in records if r["kind"] == "transfer"}
    rows = []
    for r in records:
        if r["kind"] == "matmul":
            small, other = r.get("from_128_rows"), moved.get(r["of"], {}) if r["what"] == "bf16" else {}
            rows.append(
                (
                    r["of"], r["what"], "/".join(map(share, r["sum_of_four"])), theirs(r["sum_of_four_reference"], "same form"),
                    "/".join(map(share, small)) if small else "", f"{share(other['mean'])} ({100 * other['bias']:+.0f})" if other else "",
                )
            )  # fmt: skip
    columns = (
        "GPU",
        "precision",
        "sum of four products, here",
        "elsewhere",
        "fitted and judged from 128 rows",
        "with H100's parameters (bias)",
    )
    return table(columns, rows)


def attention(records: Sequence[Record]) -> str:
    columns = ("GPU", "head size", "here", "same form, elsewhere", *ATTENTION_FORMS, "here, s >= 2,048 and 32 heads")
    form = "eff*sat(s)*sat(tiles)+t0"
    return table(columns, ((r["of"], r["what"].removeprefix("head "), ours(r), theirs(r["reference"], form),
                            *(both(r, *f) for f in ATTENTION_FORMS.items()), "/".join(map(share, r["large"])))
                           for r in records if r["kind"] == "attention"))  # fmt: skip


def experts(records: Sequence[Record]) -> str:
    own = [r for r in records if r["kind"] == "grouped"]
    free = {(r["of"], r["what"].removesuffix(", unbounded")): r for r in own if not r["bounded"]}
    columns = ("GPU", "precision", "here, at most the plain product", "here, unbounded", *EXPERT_FORMS)
    return table(columns, ((r["of"], r["what"], ours(r), ours(free[r["of"], r["what"]]).strip("*"),
                            *(both(r, *f) for f in EXPERT_FORMS.items()))
                           for r in own if r["bounded"]))  # fmt: skip


def mean(values: Iterable[float]) -> str:
    """One digit; empty where there is nothing."""
    kept = list(values)
    return f"{statistics.fmean(kept):.1f}" if kept else ""


def links(records: Sequence[Record]) -> str:
    """Means over the group sizes of a collective; other forms here and, in brackets, elsewhere."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        if r["kind"] == "link":
            groups.setdefault((r["of"], r["collective"]), []).append(r)
    rows = []
    for (link, kind), own in groups.items():
        here = f"**{mean(100 * r['mean'] for r in own)}/{mean(100 * r['p90'] for r in own)}**"
        same = [r["reference"]["same form"] for r in own if "same form" in r["reference"]]
        beside = f"{mean(s[0] for s in same)}/{mean(s[1] for s in same)}" if same else ""
        rows.append((link, kind.replace("_", "-"), here, beside, *(here_and_there(own, *form, "") for form in LINK_FORMS.items())))
    return table(("link", "collective", "here", "same form, elsewhere", *LINK_FORMS), rows)


def here_and_there(own: Sequence[Record], title: str, form: str, where: str) -> str:
    """A form's mean error over rows, percent, here and, in brackets, elsewhere; ``where``: of all sizes, or ``from_1_mb``."""
    forms, reference = (f"forms_{where}", f"{where}_reference") if where else ("forms", "reference")
    there = mean(r[reference][form][0] for r in own if form in r[reference])
    return mean(100 * r[forms][title][0] for r in own) + (f" ({there})" if there else "")


FAMILIES = {"A100": ("nvlink3",), "H100, H200": ("nvlink4", "nvlink4-h200"), "RTX PRO 6000 over PCIe": ("pcie5",)}


def link_means(records: Sequence[Record]) -> str:
    """Over every row of a family of links: the form chosen and the others, all sizes and from 1 MB on."""
    rows, own = [], [r for r in records if r["kind"] == "link"]
    known = {name for names in FAMILIES.values() for name in names}
    families = {"all": tuple(r["of"] for r in own), **FAMILIES, "Blackwell": tuple(r["of"] for r in own if r["of"] not in known)}
    for family, names in families.items():
        some = [r for r in own if r["of"] in names]
        for where in ("", "from_1_mb"):
            chosen = mean(100 * (r[where][0] if where else r["mean"]) for r in some)
            there = mean(s["same form"][0] for r in some if "same form" in (s := r[f"{where}_reference" if where else "reference"]))
            others = (here_and_there(some, *form, where) for form in LINK_FORMS.items())
            rows.append((family, "from 1 MB" if where else "all", f"**{chosen}** ({there})", *others))
    return table(("links", "sizes", "chosen", *LINK_FORMS), rows)


def vtrain(records: Sequence[Record]) -> str:
    columns = ("table", "each size that was kept alike", "every megabyte", "GB/s, fitted to every megabyte")
    return table(columns, ((r["what"].replace("_", "-"), ours(r), "/".join(f"{100 * v:.2f}" for v in r["whole"]),
                            f"{r['whole_bytes_per_second'] / 1e9:.0f}") for r in records if r["kind"] == "vtrain"), words=1)  # fmt: skip


def layouts(records: Sequence[Record]) -> str:
    columns = ("GPU", "product", "samples", "time over the curve (median)", "off that factor")
    return table(columns, ((r["of"], r["what"], str(r["samples"]), f"x {r['factor']:.2f}", share(r["mean"]))
                           for r in records if r["kind"] == "layout"))  # fmt: skip


def unseen(records: Sequence[Record]) -> str:
    own = [r for r in records if r["kind"] == "unseen size"]
    names = list(dict.fromkeys(r["of"] for r in own))
    found = {(r["of"], r["what"]): share(r["mean"]) for r in own}
    columns = ("link", "4 from 2 and 8", "8 from 2 and 4")
    return table(columns, ((name, *(found.get((name, what), "") for what in columns[1:])) for name in names), words=1)


TEXT = """
Mean and 90th percentile of |predicted/measured - 1|, percent, on samples that were held out; of other forms on the same samples as well, which
`benchmarks/other_forms.py` fits. In brackets, or under *elsewhere*: the mean of an independent fit of the same form to the same samples.

**Matrix products**, whole (n, k) pairs held out, m >= 1,024, n and k >= 512. `fp8_block` (DeepGEMM, a scale for each 1 x 128) is fitted to
be seen: nothing is priced with it. Two runs of one grid differ by 3-5 % themselves.

{products}

{sums}

*From 128 rows*: the same form fitted to m >= 128, n and k >= 256 (7.4-9.7 elsewhere). *With H100's parameters*: what a GPU without samples
may cost (4.8 on H200, 5.7 on GB300, 7.8 on A100, 10.7 on B200 elsewhere).

Products in the layouts of training (SimuMax), as measured beside the forward's curve above; the A100 PCIe beside the SXM board's (elsewhere
x 1.07 with 2.6-3.6 left; weight gradients x 1.05 of the forward's on it, x 1.08 on B200):

{layouts}

**Attention**, causal forward, bf16, every third length held out. Head size 128 is shipped, with the speed of others beside it.

{attention}

**Grouped products**, whole models held out, at least 64 tokens an expert. Bounded by the plain product, which costs two points on
Blackwell and is what training shows.

{experts}

**Collectives**, every second message size held out; means over groups of 2, 4 and 8 GPUs.

{links}

{link_means}

vTrain's all-reduce tables, 1 MB to 1 GB. They had every megabyte; what is at hand keeps twenty sizes of each, mostly small ones. Judged on
every megabyte (straight lines between the sizes kept) the form is as near as elsewhere (0.6-1.2 on A100, 237 GB/s over 8):

{vtrain}

A group size that has no row (7-9 for 4 from 2 and 8 elsewhere, 9-17 for 8 from 2 and 4), mean:

{unseen}
"""


def section(records: Sequence[Record]) -> str:
    """The part of the page between the marks."""
    return TEXT.format(
        products=products(records), sums=sums(records), attention=attention(records), experts=experts(records), links=links(records),
        vtrain=vtrain(records), unseen=unseen(records), layouts=layouts(records), link_means=link_means(records),
    )  # fmt: skip


def page(text: str, records: Sequence[Record]) -> str:
    """The page with its section written again."""
    first, last = map(re.escape, MARKS)
    return re.sub(f"{first}.*{last}", lambda _: f"{MARKS[0]}\n{section(records)}\n{MARKS[1]}", text, count=1, flags=re.S)


if __name__ == "__main__":
    write_text(PAGE, page(PAGE.read_text(encoding="utf-8"), json.loads(KEPT.read_text(encoding="utf-8"))))
    print(f"{PAGE.relative_to(ROOT)} written")
