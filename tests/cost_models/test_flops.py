"""FLOPs of a token: against PyTorch's FlopCounterMode on the model transformers builds, and against published values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cost_models.flops import (
    attention_per_token,
    flops_per_token,
    inspect_model,
    layer_per_token,
    model_flops,
    pairs,
    recurrence_per_token,
)
from profiles.errors import InputError
from profiles.families.registry import checked_against, read_config
from profiles.huggingface import load_model, model_names
from profiles.model import Attention, LatentAttention, Layer, LinearAttention, Mlp, ModelSpec, Moe, StateSpace, uniform
from profiles.parameters import PARTS

CASES: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parents[1] / "profiles" / "model_cases.json").read_text())
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"kv_lora_rank": 18, "num_key_value_heads": 6, "topk_method": "greedy"},
    "deepseek_v3": {"num_key_value_heads": 6},
    "deepseek_v32": {"n_group": 2, "topk_group": 1},
}
"""What an odd-sized case needs to run at all in transformers."""
SAMPLE = {"llama", "qwen2_moe", "gpt2", "deepseek_v3", "gpt_oss", "falcon", "nemotron_h", "gemma3_text"}
EVERY_EXPERT = {"llama4_text"}
"""transformers runs every expert on every token there, so the routed experts are left out of the comparison."""
SEQUENCE = 16


def run(family: str, override: dict[str, Any]) -> tuple[ModelSpec, dict[str, float]]:
    """(spec, FLOPs a token by operator) of one forward of the tiny model on the CPU."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**override, **CHANGES.get(family, {})}, experts_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(SEQUENCE).reshape(1, -1) + 2, use_cache=False)
    by_operator = {str(op): flops / SEQUENCE for op, flops in counter.get_flop_counts()["Global"].items()}
    return read_config(json.loads(json.dumps(config.to_dict(), default=str)), family), by_operator


def eager_attention(spec: ModelSpec, seq_len: int) -> float:
    """What eager attention computes: every query with every key, masked or not."""
    softmax = [m for kind in spec.pattern for m in spec.kinds[kind].mixers if isinstance(m, (Attention, LatentAttention))]
    return float(sum(2 * m.heads * (m.head_dim + m.value_width) * seq_len for m in softmax))


def cases() -> list[Any]:
    return [
        pytest.param(family, overrides[-1] if family != "deepseek_v3" else overrides[2], id=family,
                     marks=() if family in SAMPLE else pytest.mark.slow)
        for family, overrides in CASES.items()
    ]  # fmt: skip


@pytest.mark.parametrize(("family", "override"), cases())
def test_matrix_products_equal_what_pytorch_counts(family: str, override: dict[str, Any]) -> None:
    spec, counted = run(family, override)
    ours = flops_per_token(spec, SEQUENCE)
    recurrences = sum(recurrence_per_token(m) for kind in spec.pattern for m in spec.kinds[kind].mixers)
    dense = ours.forward - ours.attention_causal - recurrences
    batched = sum(flops for name, flops in counted.items() if "bmm" in name)
    products = sum(flops for name, flops in counted.items() if "mm" in name) - batched
    if family in EVERY_EXPERT:
        moe = spec.moe
        assert moe is not None
        layers = sum(isinstance(spec.kinds[kind].ffn, Moe) for kind in spec.pattern)
        dense -= layers * 6 * spec.hidden * moe.width * moe.top_k
        batched -= layers * 6 * spec.hidden * moe.width * moe.experts
    assert products == dense
    indexed = any(isinstance(kind.mixer, LatentAttention) and kind.mixer.index_heads for kind in spec.kinds)
    if recurrences == 0 and not indexed:
        assert batched == eager_attention(spec, SEQUENCE)


def released() -> list[Any]:
    """The built-in model of fewest layers of each family that transformers traces on the meta device; a handful in the default tier."""
    smallest: dict[str, str] = {}
    for name in model_names():
        spec = load_model(name)
        if checked_against(spec) == "transformers" and spec.family not in UNTRACED:
            known = smallest.setdefault(spec.family, name)
            smallest[spec.family] = min(known, name, key=lambda n: load_model(n).num_layers)
    return [
        pytest.param(name, id=name, marks=() if name in ("qwen3-0.6b", "mixtral-8x7b", "mpt-7b") else pytest.mark.slow)
        for name in {*smallest.values(), "llama-3.2-1b", "llama-2-7b"}
    ]


UNTRACED = {"dbrx", "llama4_text"}
"""transformers asks which experts were chosen, or runs every one: not countable on the meta device (above they are, on the CPU)."""
OWN_MASK = {"bloom", "mamba", "mamba2"}
"""Those that take no mask of queries by keys."""
META_SEQUENCE = 32


@pytest.mark.parametrize("name", sorted(released(), key=lambda case: str(case.id)))
def test_a_released_model_equals_pytorchs_count_on_the_meta_device(name: str) -> None:
    """Eager attention counts the whole square; rotary embedding is no product there. What is subtracted: the masked half, and of
    state-space and linear-attention layers the recurrence, which transformers writes in chunks."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    transformers.logging.set_verbosity_error()
    raw = json.loads((Path(__file__).parents[2] / "profiles" / "data" / "models" / f"{name}.json").read_text())
    whole = transformers.AutoConfig.for_model(**{key: value for key, value in raw.items() if not key.startswith("_")})
    seq_len, spec = META_SEQUENCE, load_model(name)
    with torch.device("meta"):
        config = getattr(whole, "text_config", whole)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        model.set_experts_implementation("batched_mm")
        places = torch.zeros(1, seq_len, dtype=torch.long)
        given = {"position_ids": places, "attention_mask": torch.zeros(1, 1, seq_len, seq_len)}
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(places, use_cache=False, **(given if spec.family not in OWN_MASK else {}))
    ours = flops_per_token(spec, seq_len)
    by_operator = {str(op): flops / seq_len for op, flops in counter.get_flop_counts()["Global"].items()}
    routed = routed_per_token(spec)
    recurrences = sum(recurrence_per_token(m) for kind in spec.pattern for m in spec.kinds[kind].mixers)
    products = ours.forward - ours.attention_causal - recurrences - routed
    assert sum(flops for op, flops in by_operator.items() if op in ("aten.mm", "aten.addmm")) == products
    if not recurrences:
        assert sum(by_operator.values()) == products + routed + eager_attention(spec, seq_len)
        assert ours.attention_full == eager_attention(spec, seq_len)


def routed_per_token(spec: ModelSpec) -> float:
    """FLOPs a token of the routed experts chosen for it, over all layers."""
    mixtures = [ffn for kind in spec.pattern if isinstance(ffn := spec.kinds[kind].ffn, Moe)]
    return float(sum(m.top_k * 2 * spec.hidden * m.width * (3 if m.gated else 2) for m in mixtures))


@pytest.mark.parametrize(
    ("seq_len", "window", "chunk"),
    [(8, None, None), (8, 3, None), (8, 1, None), (8, 20, None), (9, None, 4), (8, None, 4), (5, None, 9)],
)
def test_pairs_equal_counting_the_mask(seq_len: int, window: int | None, chunk: int | None) -> None:
    seen = 0
    for query in range(seq_len):
        for key in range(query + 1):
            inside = window is None or query - key < window
            together = chunk is None or query // chunk == key // chunk
            seen += inside and together
    assert pairs(seq_len, window, chunk) == seen


def test_eight_tokens_have_36_causal_pairs() -> None:
    assert pairs(8) == 36


PUBLISHED = [
    ("gpt3-175b", 2048, 1061.9, 1076.4), ("llama-2-70b", 4096, 428.39, 444.49), ("llama-3.1-405b", 8192, 2524.0, 2625.4),
    ("llama-3-8b", 1048576, 869.66, 1694.3), ("mixtral-8x22b", 4096, 242.18, 250.64), ("qwen2-57b-a14b", 4096, 84.692, 87.158),
    ("deepseek-v3", 4096, 250.45, 281.15), ("llama-4-maverick", 8192, 108.98, 121.06), ("nemotron-4-15b", 4096, 89.163, 93.994),
    ("nemotron-4-340b", 4096, 2061.3, 2104.8),
]  # fmt: skip
"""GFLOP a token of training, causal and full attention, as computed for the rows of published runs by others."""


@pytest.mark.parametrize(("name", "seq_len", "causal", "full"), PUBLISHED)
def test_training_flops_equal_the_gigaflops_a_token_of_published_runs(name: str, seq_len: int, causal: float, full: float) -> None:
    spec = load_model(name)
    assert model_flops(spec, seq_len, 1) / 1e9 == pytest.approx(causal, rel=2e-4)
    assert model_flops(spec, seq_len, 1, "full") / 1e9 == pytest.approx(full, rel=2e-4)


def test_training_is_three_times_forward_and_layers_sum_to_it() -> None:
    flops = flops_per_token(load_model("deepseek-v3"), 4096)
    assert flops.training == 3 * flops.forward
    assert flops.forward == sum(layer.count * layer.forward for layer in flops.layers) + flops.head
    assert [layer.count for layer in flops.layers] == [3, 58]
    assert flops.mtp == flops.layers[-1].forward + 4 * 7168**2 + flops.head


def test_deepseek_v3_costs_what_its_report_says() -> None:
    """The report's 37 B activated parameters: 2 of forward a parameter but the embedding's, and MLA's 192 + 128 wide heads."""
    spec = load_model("deepseek-v3")
    flops = flops_per_token(spec, 4096)
    assert flops.attention_full == 61 * 2 * 128 * (192 + 128) * 4096
    products = flops.forward - flops.attention_causal
    parameters = spec.parameters
    norms_inside = 61 * (1536 + 512)
    assert products == 2 * (parameters.active - parameters.embedding - parameters.norm - norms_inside)


def test_a_window_bounds_attention_and_a_chunk_resets_it() -> None:
    plain = Attention(heads=2, kv_heads=1, head_dim=4)
    assert attention_per_token(plain, 8) == (2 * 2 * 8 * 36 / 8, 2 * 2 * 8 * 8)
    assert attention_per_token(plain.model_copy(update={"window": 3}), 8) == (2 * 2 * 8 * 21 / 8, 2 * 2 * 8 * 3)
    assert attention_per_token(plain.model_copy(update={"chunk": 4}), 8) == (2 * 2 * 8 * 20 / 8, 2 * 2 * 8 * 4)


def test_linear_mixers_cost_the_same_at_every_length() -> None:
    mamba = StateSpace(heads=4, head_dim=8, state=16, groups=2, convolution=4)
    assert recurrence_per_token(mamba) == 2 * 4 * (32 + 2 * 2 * 16) + 7 * 32 * 16
    delta = LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=8)
    assert recurrence_per_token(delta) == 2 * 4 * (2 * 16 + 32) + 7 * 4 * 8 * 8
    spec = uniform("m", Layer(mixer=mamba, norms=1), 3, hidden=16, vocab=32)
    assert flops_per_token(spec, 8).forward == flops_per_token(spec, 1 << 20).forward
    assert flops_per_token(spec, 8).attention_full == 0


def test_mixers_side_by_side_add_up() -> None:
    attention = Attention(heads=2, kv_heads=2, head_dim=4)
    mamba = StateSpace(heads=2, head_dim=4, state=4)
    both = layer_per_token(Layer(mixer=attention, beside=mamba, ffn=Mlp(width=8)), 8, 16)
    one, other = layer_per_token(Layer(mixer=attention, ffn=Mlp(width=8)), 8, 16), layer_per_token(Layer(mixer=mamba), 8, 16)
    assert both.forward == one.forward + other.forward


def test_inspect_holds_the_agreed_keys_and_the_parts_sum_to_the_total() -> None:
    report = inspect_model(load_model("deepseek-v3"), 4096)
    parameters = report["parameters"]
    assert {*PARTS, "total", "active", "mtp"} == set(parameters)
    assert sum(parameters[part] for part in PARTS) == parameters["total"] == 671_026_404_352
    assert {"forward", "training", "attention_causal", "attention_full"} <= set(report["flops_per_token"])
    assert [(group["first"], group["count"]) for group in report["layers"]] == [(0, 3), (3, 58)]
    outside = parameters["embedding"] + parameters["head"] + 7168
    assert sum(group["count"] * group["parameters"] for group in report["layers"]) + outside == parameters["total"]
    json.dumps(report)


@pytest.mark.parametrize(
    ("name", "given", "used", "says"),
    [
        ("gpt2", None, 1024, "1,024 tokens, the longest"), ("llama-tiny", None, 2048, "2,048 tokens, the longest"),
        ("llama-3.1-8b", None, 4096, ""), ("mamba2-2.7b", None, 4096, ""), ("gpt2", 512, 512, ""), ("gpt2", 2048, 2048, "longer than"),
    ],
)  # fmt: skip
def test_inspect_takes_no_more_tokens_than_the_model_has_positions_for_and_says_so(
    name: str, given: int | None, used: int, says: str
) -> None:
    spec = load_model(name)
    report = inspect_model(spec, given)
    assert report["seq_len"] == used
    assert report["flops_per_token"]["forward"] == flops_per_token(spec, used).forward
    assert [note for note in report["notes"] if note not in spec.notes] == ([] if not says else [report["notes"][-1]])
    assert says in (report["notes"] or [""])[-1]


def test_inspect_says_what_the_counts_were_compared_with() -> None:
    assert inspect_model(load_model("kimi-k2"))["checked_against"] == "published total"
    assert inspect_model(load_model("deepseek-v3"))["checked_against"] == "transformers"


def test_a_length_below_one_and_an_unknown_convention_are_named() -> None:
    spec = load_model("llama-tiny")
    with pytest.raises(InputError, match="seq_len: 0"):
        flops_per_token(spec, 0)
    with pytest.raises(InputError, match="convention"):
        model_flops(spec, 8, 1, "half")  # type: ignore[arg-type]
