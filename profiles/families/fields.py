"""Reading a config.json: every spelling of a field, checked types, and errors that name the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from profiles.errors import InputError
from profiles.model import RopeScaling

SPELLINGS: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "kv_n_heads"),
    "head_dim": ("kv_channels",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_k", "moe_top_k", "num_experts_per_token"),
    "n_shared_experts": ("moe_num_shared_experts",),
    "num_nextn_predict_layers": ("num_mtp_layers", "mtp_num_hidden_layers"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length"),
    "hidden_act": ("hidden_activation", "activation_function", "mlp_hidden_act", "activation"),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "layer_types": ("layers_block_type",),
}
"""Other names a field goes by in released files and in what transformers writes (../shared/targets.md, section 8)."""

FREE = {"max_position_embeddings", "hidden_act", "norm_eps"}
"""Fields whose spellings may differ in value in one released file (Gemma carries two activations): the first one counts."""

MAX_COUNT = 10**9
"""No width, vocabulary or number of layers is larger; keeps arithmetic and memory bounded whatever a file says."""

_ABSENT: Any = object()


class Fields:
    """The fields of one config, by any of their spellings. ``defaults`` are the class defaults of fields that files leave out."""

    def __init__(self, raw: Mapping[str, Any], where: str = "", defaults: Mapping[str, Any] | None = None) -> None:
        self.raw, self.where, self.defaults = raw, where, defaults or {}

    def inside(self, name: str, defaults: Mapping[str, Any] | None = None) -> Fields:
        """The fields of the nested object ``name`` (empty when absent)."""
        value = self.raw.get(name) or {}
        if not isinstance(value, dict):
            raise InputError(self.where + name, value, "must be an object")
        return Fields(value, f"{self.where}{name}.", defaults)

    def spelled(self, name: str) -> tuple[str, Any]:
        """The spelling in use and its value; (name, absent) when none is, null counts as absent. Raises on contradictions."""
        present = [(s, self.raw[s]) for s in (name, *SPELLINGS.get(name, ())) if self.raw.get(s) is not None]
        if not present:
            return name, _ABSENT
        first, value = present[0]
        for other, second in present[1:]:
            if second != value and name not in FREE:
                raise InputError(self.where + other, second, f"contradicts {self.where}{first} = {value}", value)
        return first, value

    def has(self, name: str) -> bool:
        """Whether the field is given, under any spelling, and is not null."""
        return self.spelled(name)[1] is not _ABSENT

    def _value(self, name: str, default: Any) -> tuple[str, Any]:
        spelling, value = self.spelled(name)
        if value is _ABSENT:
            value = self.defaults.get(name, default)
        if value is _ABSENT:
            also = SPELLINGS.get(name, ())
            raise InputError(self.where + name, None, "missing" + (f" (also spelled {', '.join(also)})" if also else ""))
        return self.where + spelling, value

    def count(self, name: str, default: Any = _ABSENT, least: int = 1) -> int:
        """A whole number of at least ``least``."""
        spelling, value = self._value(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(spelling, value, "must be a whole number")
        if not least <= value <= MAX_COUNT:
            raise InputError(spelling, value, f"must be between {least} and {MAX_COUNT}", min(max(value, least), MAX_COUNT))
        return value

    def optional(self, name: str) -> int | None:
        """A positive whole number; None when the field is null or 0, or absent without a class default."""
        if not self.has(name) and (self._null(name) or self.defaults.get(name) is None):
            return None
        return self.count(name, least=0) or None

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        spelling, value = self._value(name, default)
        if not isinstance(value, bool):
            raise InputError(spelling, value, "must be true or false")
        return value

    def number(self, name: str, default: Any = _ABSENT) -> float:
        """A finite number."""
        spelling, value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:
            raise InputError(spelling, value, "must be a number")
        return float(value)

    def text(self, name: str, default: Any = _ABSENT) -> str:
        """A string."""
        spelling, value = self._value(name, default)
        if not isinstance(value, str):
            raise InputError(spelling, value, "must be text")
        return value

    def items(self, name: str) -> list[Any] | None:
        """A list, or None when absent."""
        spelling, value = self.spelled(name)
        if value is _ABSENT:
            return None
        if not isinstance(value, list):
            raise InputError(self.where + spelling, value, "must be a list")
        return value

    def layers(self) -> int:
        """num_hidden_layers, bounded so that a wild value cannot fill memory."""
        from profiles.model import MAX_LAYERS

        count = self.count("num_hidden_layers")
        if count > MAX_LAYERS:
            raise InputError(self.where + self.spelled("num_hidden_layers")[0], count, f"more than {MAX_LAYERS} layers", MAX_LAYERS)
        return count

    def per_layer(self, name: str, layers: int) -> list[Any] | None:
        """A list with one entry a layer, or None when absent. Raises when its length contradicts the number of layers."""
        values = self.items(name)
        if values is not None and len(values) != layers:
            spelling = self.where + self.spelled(name)[0]
            raise InputError(spelling, f"{len(values)} entries", f"contradicts {layers} layers: one entry a layer", layers)
        return values

    def divides(self, name: str, part: int, whole_name: str, whole: int) -> None:
        """Raise unless ``part`` divides ``whole``; nearest is the divisor of ``whole`` closest in ratio."""
        if whole % part:
            near = min((d for d in range(1, min(whole, 4096) + 1) if whole % d == 0), key=lambda d: (max(d / part, part / d), d))
            raise InputError(self.where + self.spelled(name)[0], part, f"must divide {whole_name} = {whole}", near)

    def heads(self) -> int:
        return self.count("num_attention_heads")

    def kv_heads(self, heads: int) -> int:
        """num_key_value_heads; absent or null means as many as heads. Raises unless it divides them."""
        given = self.spelled("num_key_value_heads")[1]
        kv = heads if given is _ABSENT and self._null("num_key_value_heads") else self.count("num_key_value_heads", heads)
        self.divides("num_key_value_heads", kv, "num_attention_heads", heads)
        return kv

    def _null(self, name: str) -> bool:
        """Whether the file writes the field at all; with no value given, it wrote null."""
        return any(s in self.raw for s in (name, *SPELLINGS.get(name, ())))

    def head_dim(self, heads: int) -> int:
        """head_dim; absent means the class default, else hidden_size / num_attention_heads."""
        given = self.spelled("head_dim")[1] is not _ABSENT
        if given or (self.defaults.get("head_dim") and not self._null("head_dim")):
            return self.count("head_dim")
        hidden = self.count("hidden_size")
        if hidden < heads:
            raise InputError(self.where + "num_attention_heads", heads, f"more than hidden_size = {hidden}", hidden)
        return hidden // heads

    def tied(self, default: bool) -> bool:
        return self.flag("tie_word_embeddings", default)

    def rope_scaling(self, longest: int) -> RopeScaling | None:
        """How rotary frequencies are scaled, None where they are not. Raises InputError for a kind that is not known."""
        nested = next((f for n in ("rope_parameters", "rope_scaling") if (f := self.inside(n)).raw), self.inside("rope_scaling"))
        if isinstance(nested.raw.get("full_attention"), dict):
            nested = nested.inside("full_attention")
        kind = nested.raw.get("rope_type", nested.raw.get("type", "default"))
        if kind in ("default", "mrope", None):
            return None
        original = int(nested.number("original_max_position_embeddings", longest))
        if kind not in ("linear", "llama3", "yarn"):
            return None
        factor = nested.number("factor", longest / max(original, 1))
        if kind == "linear":
            return RopeScaling(kind="linear", factor=factor)
        if kind == "llama3":
            low, high = nested.number("low_freq_factor", 1.0), nested.number("high_freq_factor", 4.0)
            return RopeScaling(kind="llama3", factor=factor, original=original, low=low, high=high)
        mscale, every = nested.number("mscale", 0.0), nested.number("mscale_all_dim", 0.0)

        def grown(by: float) -> float:
            return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

        ratio = grown(mscale) / grown(every) if mscale and every else grown(1.0)
        return RopeScaling(
            kind="yarn", factor=factor, original=original, fast=nested.number("beta_fast", 32.0), slow=nested.number("beta_slow", 1.0),
            attention=nested.number("attention_factor", ratio), latent_attention=grown(every) ** 2 if every else 1.0,
        )  # fmt: skip

    def rope(self) -> tuple[float, float]:
        """(theta, share of a head that rotates), from rope_parameters (transformers 5) or the older flat fields."""
        nested = self.inside("rope_parameters")
        if "rope_theta" not in nested.raw and isinstance(nested.raw.get("full_attention"), dict):
            nested = nested.inside("full_attention")
        theta = nested.number("rope_theta", self.number("rope_theta", self.number("rotary_emb_base", 10000.0)))
        share = nested.number("partial_rotary_factor", self.number("partial_rotary_factor", self.number("rotary_pct", 1.0)))
        return theta, share
