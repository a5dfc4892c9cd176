"""``model_type`` -> the function that reads such a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from profiles.errors import InputError
from profiles.families.classic import CLASSIC
from profiles.families.fields import Fields
from profiles.families.hybrid import HYBRIDS
from profiles.families.table import DECODERS
from profiles.model import ModelSpec

Reader = Callable[[Fields, str, str], ModelSpec]

READERS: dict[str, Reader] = {**{name: decoder.read for name, decoder in DECODERS.items()}, **CLASSIC, **HYBRIDS}
"""Every known model_type. A reader takes the fields, the model's name and its family."""

TEXT_PARTS = ("text_config", "llm_config", "language_config")
ALIASES = {
    "gemma3": "gemma3_text", "llama4": "llama4_text", "grok_1": "grok-1", "grok1": "grok-1", "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon", "minimax_text_01": "minimax", "MiniMaxText01": "minimax", "kimi_k25": "kimi_k2",
    "kimi_vl": "deepseek_v3", "mistral3": "mistral", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_text": "qwen3", "qwen3_vl_moe": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe", "stablelm_epoch": "stablelm", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
"""Other names of a known model_type: released remote code, multimodal wrappers (their text part)."""

NO_CLASS = frozenset({"grok-1", "grok_1", "grok1", "kimi_k2", "minimax_text_01", "MiniMaxText01"})
"""Models that transformers has no class for: their counts were compared with the published total, not with a model."""
NO_CLASS_NOTE = "transformers has no class of this model_type: parameters are checked against the published total only"


def text_part(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], str, tuple[str, ...]]:
    """(the text model's fields, where they stand, notes): of a multimodal config the nested text part."""
    for name in TEXT_PARTS:
        part = raw.get(name)
        if isinstance(part, dict) and part:
            inner = {"vocab_size": raw.get("vocab_size"), "model_type": raw.get("model_type"), **part}
            if raw.get("tie_word_embeddings") is not None:  # the wrapper owns the head, so its word holds
                inner["tie_word_embeddings"] = raw["tie_word_embeddings"]
            note = f"text part ({name}) of the multimodal config {raw.get('model_type', '')}; vision or audio parts are not counted"
            return inner, f"{name}.", (" ".join(note.split()),)
    return raw, "", ()


def read_config(raw: Mapping[str, Any], name: str) -> ModelSpec:
    """The ModelSpec of a parsed config.json. Raises InputError naming the field that is missing, wrong or contradictory."""
    part, where, notes = text_part(raw)
    model_type = part.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise InputError(where + "model_type", model_type, "missing: a config.json names its family", nearest_type(""))
    family = ALIASES.get(model_type, model_type)
    if family not in READERS:
        raise InputError(where + "model_type", model_type, UNKNOWN, nearest_type(model_type))
    model = READERS[family](Fields(part, where), name, family)
    notes += (NO_CLASS_NOTE,) if model_type in NO_CLASS else ()
    return model.model_copy(update={"notes": (*notes, *model.notes)}) if notes else model


def checked_against(model: ModelSpec) -> str:
    """What the parameter counts of such a model were compared with: ``transformers``, ``published total``, or ``nothing`` (a ModelSpec
    written by hand)."""
    if NO_CLASS_NOTE in model.notes:
        return "published total"
    return "transformers" if model.family in READERS else "nothing"


UNKNOWN = (
    "is no family axisplan knows; describe the model in a ModelSpec YAML instead: name, hidden, vocab, tied, kinds (each a mixer "
    "such as {kind: attention, heads: 32, kv_heads: 8, head_dim: 128} and an ffn such as {kind: mlp, width: 14336} or "
    '{kind: moe, experts: 64, top_k: 8, width: 1024}) and pattern ("0*32": 32 layers of kind 0)'
)


def nearest_type(model_type: str) -> str:
    """The known model types closest in spelling."""
    known = sorted({*READERS, *ALIASES})
    close = get_close_matches(model_type.lower(), known, n=3, cutoff=0.5)
    return ", ".join(close or ["llama", "qwen3", "mixtral"])
