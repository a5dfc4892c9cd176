"""Parameters counted here beside those of the model that transformers builds from the same config on the meta device.

    python benchmarks/model_exactness.py            # a few minutes: data, and the page docs/model-exactness.md
    python benchmarks/model_exactness.py --page     # the page again from the data

Compared are every built-in model at its released size, and every family at its class defaults and at odd sizes
(tests/profiles/model_cases.json), in total and part by part. Where transformers has no class, the published total stands beside ours.
``tests/profiles/test_models_exact.py`` compares with the functions of this file.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from profiles.families.registry import NO_CLASS, read_config
from profiles.files import write_text
from profiles.huggingface import DATA as BUILT_IN
from profiles.huggingface import model_names
from profiles.parameters import PARTS

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "benchmarks" / "results" / "model_exactness.csv"
PAGE = ROOT / "docs" / "model-exactness.md"
CASES: dict[str, list[dict[str, Any]]] = json.loads((ROOT / "tests" / "profiles" / "model_cases.json").read_text())
PUBLISHED: dict[str, tuple[float, str]] = {
    "grok-1": (314e9, "xai-org/grok-1, README: 314 B"),
    "kimi-k2": (1.0e12, "moonshotai/Kimi-K2, README: 1 T"),
    "minimax-text-01": (456e9, "arXiv:2501.08313, abstract: 456 B"),
}
"""Parameters as published, with the source, of models without a class."""


@dataclass(frozen=True)
class Row:
    """One config: its family, our total and parts, what transformers (or else the publisher) says, and the parts that differ."""

    config: str
    model_type: str
    sizes: str
    total: int
    reference: int
    against: str
    differing: str
    active: int
    mtp: int
    parts: tuple[int, ...]

    @property
    def difference(self) -> int:
        return self.total - self.reference

    def cells(self) -> dict[str, object]:
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "parts"}
        return {**own, "difference": self.difference, **dict(zip(PARTS, self.parts, strict=True))}


def build(raw: Mapping[str, Any]) -> tuple[Any, Any]:
    """(transformers config, its language model on the meta device) of a config.json's fields, ``model_type`` among them."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    whole = transformers.AutoConfig.for_model(**{key: value for key, value in raw.items() if not key.startswith("_")})
    config = getattr(whole, "text_config", whole)
    models: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return whole, models.from_config(config)


STATE_SPACE = ("A_log", "D", "dt_bias", "conv1d", "in_proj", "out_proj", "norm", "x_proj", "dt_proj", "qkv_proj", "output_gate")
EMBEDDING = ("embed_tokens", "wte", "wpe", "embed_in", "word_embeddings", "embed_positions", "embeddings", "project_in")


def part_of(name: str, lightning: set[str], has_experts: bool) -> str:
    """The part a transformers parameter belongs to, from its name alone."""
    words = name.split(".")
    if any(w in words for w in EMBEDDING):
        return "embedding"
    if "lm_head" in words or "project_out" in words:
        return "head"
    if "router" in words or "gate" in words:
        return "router"
    if "shared_mlp" in words:
        return "shared_experts" if has_experts else "dense_mlp"
    if any(w.startswith("shared_expert") for w in words):
        return "shared_experts"
    if "experts" in words:
        return "routed_experts"
    lit = ".self_attn." in name and name.rsplit(".self_attn.", 1)[0] in lightning
    if lit or ".mamba." in name or ".linear_attn." in name:
        return "state_space"
    if "mixer" in words:
        rest = words[words.index("mixer") + 1]
        if rest in STATE_SPACE:
            return "state_space"
        return "attention" if rest in ("q_proj", "k_proj", "v_proj", "o_proj") else "dense_mlp"
    if any(w in words for w in ("self_attn", "attn", "attention", "self_attention")):
        return "attention"
    if any("norm" in w or w.startswith("ln_") for w in words):
        return "norm"
    if any(w in words for w in ("mlp", "ffn", "feed_forward", "fc1", "fc2")):
        return "dense_mlp"
    raise ValueError(f"no part for {name}")


def parts_of(model: Any) -> Counter[str]:
    """Parameters of a transformers model by part."""
    names = dict(model.named_parameters())
    lightning = {n.rsplit(".self_attn.", 1)[0] for n in names if n.endswith("self_attn.output_gate.weight")}
    experts = any(".experts." in n for n in names)
    found: Counter[str] = Counter()
    for name, parameter in names.items():
        found[part_of(name, lightning, experts)] += parameter.numel()
    return found


def compared(config: str, sizes: str, raw: Mapping[str, Any], built: Any) -> Row:
    """Our count of a config's fields beside a transformers model's; without one (None), beside the published total."""
    spec = read_config(raw, config)
    counted = spec.parameters.as_dict()
    if built is None:
        reference, source = PUBLISHED[config]
        against, differing, total = f"no class: published total ({source})", "", round(reference)
    else:
        theirs = parts_of(built)
        differing = " ".join(part for part in PARTS if counted[part] != theirs[part])
        against, total = type(built).__name__, sum(parameter.numel() for parameter in built.parameters())
    family = raw.get("text_config", raw).get("model_type", raw["model_type"])
    return Row(
        config, family, sizes, spec.parameters.total, total, against, differing, spec.parameters.active, spec.parameters.mtp,
        tuple(counted[part] for part in PARTS),
    )  # fmt: skip


def released(name: str) -> Row:
    """The row of a built-in model."""
    raw = json.loads((BUILT_IN / "models" / f"{name}.json").read_text())
    return compared(name, "released", raw, None if raw["model_type"] in NO_CLASS else build(raw)[1])


def of_class(family: str, number: int) -> Row:
    """The row of a family's case: its class defaults, or the odd sizes numbered so."""
    config, built = build({"model_type": family, **CASES[family][number]})
    raw = json.loads(json.dumps(config.to_dict(), default=str))
    sizes = f"odd sizes {number}" if CASES[family][number] else "class defaults"
    return compared(family, sizes, raw, built)


def rows() -> Iterator[Row]:
    for name in model_names():
        yield released(name)
    for family, cases in CASES.items():
        for number in range(len(cases)):
            yield of_class(family, number)


def save(found: Sequence[Row]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(found[0].cells()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.cells() for row in found)
    write_text(TABLE, text.getvalue())


def load() -> list[Row]:
    """The rows of the kept table."""
    kept = []
    with TABLE.open(newline="", encoding="utf-8") as file:
        for r in csv.DictReader(file):
            parts = tuple(int(r[part]) for part in PARTS)
            words = (r["config"], r["model_type"], r["sizes"], int(r["total"]), int(r["reference"]), r["against"], r["differing"])
            kept.append(Row(*words, int(r["active"]), int(r["mtp"]), parts))
    return kept


def wrong(row: Row) -> bool:
    """Whether a row with a class to compare with differs from it, in total or in a part."""
    return row.model_type not in NO_CLASS and bool(row.difference or row.differing)


HEADER = (
    "| `model_type` | config | total here | transformers | difference | parts that differ | configs compared |\n"
    "|---|---|--:|--:|--:|---|--:|"
)
PARTS_HEADER = (
    "| config | " + " | ".join(part.replace("_", " ") for part in PARTS) + " | active | MTP |\n|---|" + "--:|" * (len(PARTS) + 2)
)


def page(kept: Sequence[Row]) -> str:
    """The page: a row a family (its largest released model, or its class defaults), published totals, parts of those models."""
    families: dict[str, list[Row]] = {}
    for row in kept:
        families.setdefault(row.model_type, []).append(row)
    shown = {family: max(own, key=lambda row: (row.sizes == "released", row.total)) for family, own in sorted(families.items())}
    exact = [
        f"| `{family}` | {named(row)} | {row.total:,} | {row.reference:,} | {row.difference:,} | {row.differing or 'none'} "
        f"| {len(families[family])} |"
        for family, row in shown.items()
        if family not in NO_CLASS
    ]
    published = [
        f"| `{family}` | {named(row)} | {row.total:,} | {row.against.removeprefix('no class: ')} | {row.difference / row.reference:+.1%} |"
        for family, row in shown.items()
        if family in NO_CLASS
    ]
    parts = [
        f"| {named(row)} | " + " | ".join(f"{n:,}" if n else "" for n in (*row.parts, row.active, row.mtp)) + " |"
        for row in shown.values()
    ]
    compared_rows = [row for row in kept if row.model_type not in NO_CLASS]
    released_rows = sum(row.sizes == "released" for row in compared_rows)
    return TEXT.format(
        rows=len(compared_rows), released=released_rows, families=len(exact), wrong=sum(map(wrong, kept)),
        exact="\n".join([HEADER, *exact]), parts="\n".join([PARTS_HEADER, *parts]),
        published="\n".join(["| `model_type` | config | total here | against | difference |", "|---|---|--:|---|--:|", *published]),
    )  # fmt: skip


def named(row: Row) -> str:
    return f"`{row.config}`" if row.sizes == "released" else row.sizes


TEXT = """# Exactness of parameter counts

Written by `python benchmarks/model_exactness.py`; every row, part by part, is in `benchmarks/results/model_exactness.csv`.

Each config is read here and built by transformers 5.24 on the meta device; compared are the total (`sum(p.numel())`, tied weights once) and
each part, to which a parameter of transformers belongs by its name. {rows} configs of {families} families: {released} built-in models
at their released sizes, each family at its class defaults and at odd sizes (biases on and off, tied or not, uneven steps of experts, odd
head widths). **Configs that differ: {wrong}.**

## A row a family

The largest released model of the family, or its class defaults where none is built in.

{exact}

## Families without a class

transformers has none under this `model_type`: the published total, which is rounded, is all there is to compare with. `axisplan inspect` says
so (`checked_against` in `--json`).

{published}

## By part

Of the same models; a part that is empty has no parameters.

{parts}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--page", action="store_true", help="write the page again from the data")
    if not parser.parse_args().page:
        found = []
        for row in rows():
            found.append(row)
            print(f"{row.config:28s}{row.sizes:16s}{row.total:>18,d}{row.difference:>16,d}  {row.differing}", flush=True)
        save(found)
    kept = load()
    write_text(PAGE, page(kept))
    differing = sum(map(wrong, kept))
    print(f"{PAGE.relative_to(ROOT)} written; {differing} of {len(kept)} rows differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
