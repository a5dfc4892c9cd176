import pytest

from cost_models.execution import Execution, execution_names, load_execution
from profiles.errors import AxisplanError, InputError

PRESETS = ("axisplan", "megatron", "torchtitan", "deepspeed", "fsdp", "accelerate")


@pytest.mark.parametrize("name", PRESETS)
def test_the_presets_people_name_are_built_in(name: str) -> None:
    assert load_execution(name).name == name


@pytest.mark.parametrize("name", execution_names())
def test_every_fact_of_a_preset_names_its_source(name: str) -> None:
    execution = load_execution(name)
    plain = Execution()
    differing = [
        f for f in plain.__dataclass_fields__ if f not in ("name", "sources") and getattr(execution, f) != getattr(plain, f)
    ]
    assert [f for f in differing if execution.source_of(f) == "default"] == []


@pytest.mark.parametrize(
    ("fact", "text", "value"),
    [
        ("causal_skip", "false", False),
        ("gradient_bytes", "2", 2.0),
        ("loss_chunk_tokens", "1024", 1024),
        ("attention", "unfused", "unfused"),
        ("schedules", "1f1b+zb-v", ("1f1b", "zb-v")),
        ("execution.hidden_dropout", "on", True),
    ],
)
def test_a_fact_can_be_set_and_is_typed(fact: str, text: str, value: object) -> None:
    execution = load_execution("megatron", {fact: text})
    name = fact.removeprefix("execution.")
    assert getattr(execution, name) == value
    assert execution.source_of(name) == "set by the user"


@pytest.mark.parametrize(
    ("fact", "text", "nearest"),
    [
        ("atention", "fa2", "execution.attention"),
        ("attention", "fa22", "fa2"),
        ("causal_skip", "maybe", "true"),
        ("gradient_bytes", "-1", 0),
        ("gradient_bytes", "inf", 0),
        ("gradient_bytes", "nan", 0),
        ("loss_chunk_tokens", "1.5", 0),
        ("name", "x", None),
        ("sources", "x", None),
    ],
)
def test_a_bad_fact_or_value_names_the_field_and_the_nearest(fact: str, text: str, nearest: object) -> None:
    with pytest.raises(InputError) as caught:
        load_execution("axisplan", {fact: text})
    assert caught.value.nearest == nearest or nearest is None
    assert fact in str(caught.value)


def test_an_unknown_preset_is_refused_with_the_closest_name() -> None:
    with pytest.raises(InputError) as caught:
        load_execution("megatorn")
    assert caught.value.nearest == "megatron"
    assert isinstance(caught.value, AxisplanError)


def test_a_preset_that_extends_another_keeps_its_facts_and_sources() -> None:
    base, later = load_execution("megatron"), load_execution("simumax")
    assert later.vocab_multiple == base.vocab_multiple == 128
    assert later.source_of("vocab_multiple") == base.source_of("vocab_multiple")
