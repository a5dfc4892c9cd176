"""ModelSpec: what a model written by hand holds, and what is derived from it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from profiles.huggingface import load_model
from profiles.model import (
    Attention,
    LatentAttention,
    Layer,
    LinearAttention,
    Mlp,
    ModelSpec,
    Moe,
    StateSpace,
    expand_pattern,
    uniform,
)
from profiles.parameters import convolved_channels, mixer_parameters, projections

ATTENTION = Attention(heads=4, kv_heads=2, head_dim=8)


def test_a_pattern_in_text_is_the_layers_it_names() -> None:
    assert expand_pattern("0*3 1*2") == (0, 0, 0, 1, 1)
    assert expand_pattern("1, 0*2") == (1, 0, 0)
    for wrong in ("a*3", "0*-1", "0**2", "0*1e9", "-1*3"):
        with pytest.raises(ValueError, match="KIND"):
            expand_pattern(wrong)


def test_groups_are_runs_of_equal_layers() -> None:
    spec = uniform("m", Layer(mixer=ATTENTION), 2, hidden=32, vocab=10)
    assert spec.groups == ((0, 2),)
    two = ModelSpec(name="m", hidden=32, vocab=10, kinds=(Layer(mixer=ATTENTION), Layer(ffn=Mlp(width=8))), pattern=(0, 1, 1, 0))
    assert two.groups == ((0, 1), (1, 2), (0, 1))
    assert two.attention == ATTENTION
    assert two.moe is None


def test_a_copy_with_other_layers_is_counted_anew() -> None:
    spec = load_model("llama-tiny")
    before, first = spec.parameters, spec.layer(0)
    half = spec.model_copy(update={"pattern": (0,) * 4})
    assert half.groups == ((0, 4),)
    assert before.total - half.parameters.total == 4 * 725_504
    assert spec.parameters == before
    assert half.layer(0) == first


def test_a_model_survives_json() -> None:
    for name in ("deepseek-v3", "falcon-h1-7b", "jamba-v0.1", "gpt-oss-20b", "qwen3-next-80b-a3b"):
        spec = load_model(name)
        assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec


def test_unknown_fields_empty_models_and_impossible_choices_are_refused() -> None:
    with pytest.raises(ValidationError, match="at least one layer"):
        ModelSpec(name="m", hidden=8, vocab=8, kinds=(Layer(),), pattern=())
    with pytest.raises(ValidationError, match="exceeds experts"):
        Moe(experts=4, top_k=5, width=8)
    with pytest.raises(ValidationError, match="width"):
        Attention(heads=4, kv_heads=2, head_dim=8, width=3)  # type: ignore[call-arg]


def test_attention_parameters_are_its_projections_and_what_stands_inside() -> None:
    hidden = 32
    assert mixer_parameters(ATTENTION, hidden) == ("attention", 32 * 32 + 2 * 32 * 16 + 32 * 32)
    biased = ATTENTION.model_copy(update={"qkv_bias": True, "output_bias": True, "sinks": True, "qk_norm": "head"})
    assert mixer_parameters(biased, hidden)[1] == 3072 + (32 + 16 + 16) + 32 + 4 + 2 * 8
    gated = ATTENTION.model_copy(update={"output_gate": True, "value_dim": 4})
    assert [(p.inputs, p.outputs) for p in projections(gated, hidden)] == [(32, 64), (32, 16), (32, 8), (16, 32)]


def test_mla_without_query_compression_has_one_query_projection() -> None:
    mla = LatentAttention(heads=2, kv_rank=6, nope_dim=4, rope_dim=2, value_dim=4)
    shapes = [(p.inputs, p.outputs) for p in projections(mla, 16)]
    assert shapes == [(16, 12), (16, 8), (6, 16), (8, 16)]
    compressed = mla.model_copy(update={"q_rank": 5})
    assert [(p.inputs, p.outputs) for p in projections(compressed, 16)][:2] == [(16, 5), (5, 12)]
    assert mixer_parameters(compressed, 16)[1] - sum(p.parameters for p in projections(compressed, 16)) == 5 + 6


def test_mamba_and_delta_rule_convolve_what_they_should() -> None:
    assert convolved_channels(StateSpace(heads=4, head_dim=8, state=16, groups=2)) == 32 + 2 * 2 * 16
    assert convolved_channels(StateSpace(version=1, heads=32, head_dim=1, state=16, dt_rank=2)) == 32
    assert convolved_channels(LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=8)) == 2 * 16 + 32


def test_tied_weights_are_counted_once_and_under_embedding() -> None:
    tied = uniform("m", Layer(mixer=ATTENTION), 1, hidden=32, vocab=10, tied=True)
    apart = tied.model_copy(update={"tied": False})
    assert (tied.parameters.head, apart.parameters.head) == (0, 320)
    assert apart.parameters.total - tied.parameters.total == 320
