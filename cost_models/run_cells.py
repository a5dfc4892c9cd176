"""Cells of a runs file as people spell them -> the words of the cost models: GPUs, precisions, ZeRO stages, recompute modes.

What a spelling means is data (``data/run_cells.yaml``): lists of (regular expression, meaning), the first that is found deciding. A
meaning that had to be assumed is added to the run's guesses.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cost_models.layout import RECOMPUTE_MODULES
from profiles.errors import InputError
from profiles.files import read_shipped

PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
NARROWER = ("nvfp4", "mxfp8", "fp8", "bf16", "fp16", "fp32")
"""What runs where a GPU lacks a precision: the next of these that it has."""
MOST_DOMAIN = 72


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = read_shipped(Path(__file__).parent / "data" / "run_cells.yaml")
    return table


def _meaning(kind: str, text: str) -> Any:
    """The first meaning of ``kind`` whose expression is found in ``text``, or None."""
    return next((meaning for found, meaning in _table()[kind] if re.search(found, text)), None)


def gpu_cluster(text: str, guessed: list[str]) -> str:
    """The built-in cluster of a GPU as it is written; the text itself where no rule knows it (a cluster's name or a file)."""
    name = re.sub(r"[\s_/]+", "-", text.strip().lower())
    name = re.sub(r"^(nvidia|amd|instinct|geforce)-|-(instinct|tensor-core|gpus?)\b", "", re.sub(r"^amd-", "", name))
    found = _meaning("gpus", name)
    if found is None:
        return text
    cluster, assumed = found if isinstance(found, list) else (found, "")
    if assumed:
        guessed.append(f"GPU {text} {assumed}")
    return str(cluster)


def domain_of(cluster: str, gpus: int, per_node: int, guessed: list[str]) -> int:
    """GPUs of one fast domain that a run of ``gpus`` fills: racks of 72 are filled by 64 where that divides the run (a power of two);
    the largest that divides it otherwise."""
    wanted = min(gpus, int(_table()["domains"].get(cluster, per_node)), MOST_DOMAIN)
    if cluster in _table()["domains"] and gpus % wanted and gpus % MOST_DOMAIN == 0:
        return MOST_DOMAIN
    domain = next(size for size in range(wanted, 0, -1) if gpus % size == 0)
    if domain < wanted:
        guessed.append(f"domains of {domain} GPUs: {gpus} are no multiple of {wanted}")
    return domain


def precision_of(text: str, guessed: list[str], known: Iterable[str] = PRECISIONS) -> str:
    """``fp8-cs`` -> fp8, ``bfloat16`` -> bf16. ``known``: what the GPU has; a narrower format runs as the next wider one there.

    Raises InputError for a word that means no precision.
    """
    word = text.strip().lower()
    if not word:
        guessed.append("precision bf16")
    name: str | None = (word or "bf16") if word in ("", *PRECISIONS) else _meaning("precisions", word)
    if name is None:
        close = difflib.get_close_matches(word, PRECISIONS, 1)
        raise InputError("precision", text, f"is one of {', '.join(PRECISIONS)}", close[0] if close else "bf16")
    have = tuple(known)
    runs = name if name in have else next((p for p in NARROWER[NARROWER.index(name) + 1 :] if p in have), name)
    if runs != name:
        guessed.append(f"the GPU has no {name} products: {runs}")
    elif word and word not in PRECISIONS:
        guessed.append(f"precision {text.strip()} is {name}")
    return str(runs)


def zero_of(text: str, guessed: list[str]) -> int:
    """ZeRO stage: ``fsdp``, ``ZeRO-1``, ``distributed optimizer``, ``SHARD_GRAD_OP``, 0 to 3. Raises InputError."""
    word = text.strip().lower()
    if not word:
        guessed.append("zero 0")
        return 0
    stage = _meaning("zero", word)
    if stage is None:
        raise InputError("zero", text, "is 0 to 3, fsdp or hsdp", 1)
    return int(stage)


def recompute_of(text: str, layers: int, guessed: list[str], stages: int = 1) -> str:
    """A recompute choice as ``Layout`` takes it. ``full``, ``uniform`` with any number (Megatron's chunk size: every layer is
    recomputed); ``full:10`` or ``block 10`` (the first ten layers of each of ``stages`` pipeline ranks); ``every_second``,
    ``selective:2`` (every second layer); Megatron's and TorchTitan's module names; what nobody knows is said to be nothing."""
    word = text.strip().lower()
    mode = _meaning("recompute", word)
    if mode == "every":
        step = int(re.findall(r"\d+", word)[-1]) if re.search(r"\d", word) else 2
        return "/".join(f"{i}:full" for i in range(0, layers, max(1, step)))
    if mode == "full":
        counts = [int(n) for n in re.findall(r"\d+", word)] if re.search(r"block|^full\W*\d+\W*$", word) else []
        held = -(-layers // stages)
        if not counts or not 0 < counts[-1] < held or word == "1":
            return "full"
        starts = range(0, layers, held)
        return "/".join(f"{start}-{min(start + counts[-1], layers) - 1}:full" for start in starts)
    if mode is not None:
        if word not in ("", "none", mode):
            guessed.append(f"recompute {text.strip()} is {mode}")
        return str(mode)
    modules = []
    for part in re.split(r"[+,\s]+", re.sub(r"^selective\s*[:(]?\s*", "", word).rstrip(")")):
        module = part.replace("-", "_")
        name = module if module in RECOMPUTE_MODULES else _meaning("modules", module)
        if name is None:
            guessed.append(f"recompute of {part!r} is not known: none")
        elif name not in modules:
            modules.append(name)
    return f"selective({','.join(modules)})" if modules else "none"


def described(row: Mapping[str, str]) -> str:
    """Everything that a row says of itself in words, for rules that look for one anywhere."""
    return " ".join(row.get(column, "") for column in ("id", "model_name", "arch", "source_table", "notes"))
