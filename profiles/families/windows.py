"""What each layer's attention sees (whole sequence, sliding window, chunk) and whether it rotates, family by family.

Each rule gives, for every layer, (window, chunk) in tokens, None where there is none.
"""

from __future__ import annotations

from collections.abc import Callable

from profiles.errors import InputError
from profiles.families.fields import Fields

Reach = tuple[int | None, int | None]
Rule = Callable[[Fields, int], list[Reach]]

LEGACY = {"attention": "full_attention", "mamba": "linear_attention"}


def kinds(fields: Fields, layers: int, default: Callable[[int], str]) -> list[str]:
    """layer_types in transformers' words, or ``default(index)`` where the file has none."""
    given = fields.per_layer("layer_types", layers)
    if given is None:
        return [default(i) for i in range(layers)]
    for value in given:
        if not isinstance(value, str):
            raise InputError(fields.where + "layer_types", value, "must be a list of text")
    return [LEGACY.get(value, value) for value in given]


def reach(fields: Fields, kind: str) -> Reach:
    """(window, chunk) of a layer type."""
    if kind == "full_attention":
        return None, None
    if kind == "sliding_attention":
        return fields.optional("sliding_window"), None
    if kind == "chunked_attention":
        return None, fields.optional("attention_chunk_size")
    known = "full_attention, sliding_attention, chunked_attention"
    raise InputError(fields.where + "layer_types", kind, f"is no attention this family has ({known})", "full_attention")


def choose(fields: Fields, layers: int, local: Callable[[int], bool], name: str = "sliding_attention") -> list[Reach]:
    """What each layer sees: as layer_types says, else ``name`` where ``local(index)`` and everything elsewhere."""
    return [reach(fields, kind) for kind in kinds(fields, layers, lambda i: name if local(i) else "full_attention")]


def whole(fields: Fields, layers: int) -> list[Reach]:
    """Every layer sees all earlier tokens, unless layer_types says otherwise."""
    return choose(fields, layers, lambda i: False)


def everywhere(fields: Fields, layers: int) -> list[Reach]:
    """sliding_window, where it is given, holds in every layer (Mistral, Mixtral, Phi-3, Starcoder2)."""
    return [(fields.optional("sliding_window"), None)] * layers


def when_used(fields: Fields, layers: int) -> list[Reach]:
    """sliding_window in every layer if use_sliding_window (Qwen3-MoE)."""
    return everywhere(fields, layers) if fields.flag("use_sliding_window", False) else [(None, None)] * layers


def after_max_window_layers(fields: Fields, layers: int) -> list[Reach]:
    """Qwen2/Qwen3: from max_window_layers on, if use_sliding_window; ignored otherwise."""
    if not fields.flag("use_sliding_window", False):
        return [(None, None)] * layers
    first = fields.count("max_window_layers", 28, least=0)
    return choose(fields, layers, lambda i: i >= first)


def alternate_before_max(fields: Fields, layers: int) -> list[Reach]:
    """Qwen2-MoE: even layers below max_window_layers, if use_sliding_window."""
    if not fields.flag("use_sliding_window", False):
        return [(None, None)] * layers
    first = fields.count("max_window_layers", 28, least=0)
    return choose(fields, layers, lambda i: i % 2 == 0 and i < first)


def every_full(period: int) -> Rule:
    """Every ``period``-th layer sees all, the others slide (Gemma-2: 2, Cohere2 and OLMo 3: 4, Gemma-3: 6, gpt-oss: 2)."""

    def rule(fields: Fields, layers: int) -> list[Reach]:
        step = fields.count("sliding_window_pattern", fields.count("_sliding_window_pattern", period))
        return choose(fields, layers, lambda i: (i + 1) % step != 0)

    return rule


def llama4(fields: Fields, layers: int) -> list[Reach]:
    """Layers that rotate see their chunk, the others everything."""
    turning = rotating(fields, layers)
    return choose(fields, layers, lambda i: turning[i], "chunked_attention")


def smollm3(fields: Fields, layers: int) -> list[Reach]:
    """Layers that do not rotate slide, if use_sliding_window."""
    used, turning = fields.flag("use_sliding_window", False), rotating(fields, layers)
    return choose(fields, layers, lambda i: used and not turning[i])


def rotating(fields: Fields, layers: int) -> list[bool]:
    """no_rope_layers (1 = rotates, in spite of its name), or all but every no_rope_layer_interval-th layer."""
    given = fields.items("no_rope_layers")
    if not given:
        step = fields.count("no_rope_layer_interval", 4)
        return [(i + 1) % step != 0 for i in range(layers)]
    if len(given) < layers:
        raise InputError(fields.where + "no_rope_layers", f"{len(given)} entries", f"fewer than {layers} layers", layers)
    return [bool(value) for value in given[:layers]]


def always(fields: Fields, layers: int) -> list[bool]:
    return [True] * layers
