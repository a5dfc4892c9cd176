"""What a target's parser lets pass and its run does not (targets.md 1.4, 2, 4, 5): said of a configuration that is imported.

Layouts are held against the rules of legality. A file seldom holds all of model, batch and cluster: what it does not hold is taken so
that no rule can break for it (widths and heads that every degree divides, a batch for every schedule).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from planner.legality import violations
from profiles.errors import InputError
from profiles.files import read_shipped
from profiles.hardware import load_cluster
from profiles.huggingface import load_model
from profiles.model import Attention, LatentAttention, Layer, Mlp, ModelSpec, Moe, uniform

UNSAID = frozenset({"tensor_groups_fit_nodes"})
"""Rules of what no configuration says: how many GPUs a node has."""


def broken_rules(execution: str, layout: Layout, said: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    """A sentence for each rule that the layout breaks under ``execution``. ``said``: seq_len, global_batch, precision, optimizer as far
    as they are known; ``model``: its name, or facts of its shape (layers, hidden, heads, ...)."""
    easy = layout.world * layout.chunks * 64
    job = Job(
        load_model(str(model["name"])) if "name" in model else model_of(model, layout), load_cluster(f"h100-sxm:1x{layout.world}"),
        load_execution(execution), said.get("seq_len") or easy, said.get("global_batch") or layout.dp * layout.micro_batch * layout.pp,
        said.get("precision", "bf16"), said.get("optimizer", "adamw"),
    )  # fmt: skip
    try:
        found = violations(job, layout)
    except InputError as error:
        return [str(error)]
    return [f"{v.rule}: {v.line()}" for v in found if v.rule not in UNSAID]


def model_of(facts: Mapping[str, Any], layout: Layout) -> ModelSpec:
    """A decoder of these facts; where one is missing, a size that every degree of the layout divides."""
    easy = layout.world * 64
    heads = facts.get("heads") or layout.world
    hidden = facts.get("hidden") or heads * 64
    mixer: Attention | LatentAttention
    if facts.get("latent"):
        mixer = LatentAttention(heads=heads, q_rank=None, kv_rank=64, nope_dim=64, rope_dim=64, value_dim=64)
    else:
        head_dim = facts.get("head_dim") or max(1, hidden // heads)
        mixer = Attention(heads=heads, kv_heads=facts.get("kv_heads") or heads, head_dim=head_dim)
    experts = facts.get("experts") or (layout.ep if layout.ep * layout.etp > 1 else 0)
    ffn: Mlp | Moe = Mlp(width=facts.get("ffn") or easy)
    if experts:
        ffn = Moe(
            experts=experts, top_k=min(facts.get("top_k") or 1, experts), width=facts.get("expert_ffn") or facts.get("ffn") or easy
        )
    layers = facts.get("layers") or sum(layout.stages) or layout.chunks
    return uniform("the configuration", Layer(mixer=mixer, ffn=ffn), layers, hidden=hidden, vocab=facts.get("vocab") or easy)


# -- keys ----------------------------------------------------------------------------------------------------------------------


@cache
def known_keys(target: str) -> dict[str, frozenset[str]]:
    """Keys that the target reads, by section."""
    table: dict[str, list[list[str]]] = read_shipped(Path(__file__).parents[1] / "data" / "target_keys.yaml")[target]
    return {section: frozenset(key for row in rows for key in row) for section, rows in table.items()}


def unread_keys(target: str, section: str, given: Iterable[str]) -> list[str]:
    """A sentence for each key of a section that the target does not read and does not refuse either."""
    known, out = known_keys(target)[section], []
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), sorted(known), 1)
            near = f"; nearest: {close[0]}" if close else ""
            out.append(f"{section + '.' if section else ''}{key} is no key that {target} reads, and it does not say so{near}")
    return out
