"""Reading a model: names as users write them, config files in every spelling, and one clear line for whatever is wrong."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from profiles.errors import InputError
from profiles.families.registry import READERS, read_config
from profiles.files import LARGEST_YAML_BYTES
from profiles.huggingface import load_model, model_names, resolve
from profiles.model import Attention, LatentAttention, LinearAttention, Mlp, ModelSpec, Moe, StateSpace

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 128,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 4, "vocab_size": 100, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip


def without(config: dict[str, Any], *names: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**config, **changes}.items() if key not in names}


def shapes(spec: ModelSpec) -> dict[str, Any]:
    return spec.model_dump(exclude={"name", "family", "notes"})


# Names


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("llama-3.1-405b", "llama-3.1-405b"), ("Llama-3.1-405B", "llama-3.1-405b"), ("meta-llama/Meta-Llama-3.1-405B",
        "llama-3.1-405b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"), ("llama3.1_8b", "llama-3.1-8b"), ("LLAMA2-70B", "llama-2-70b"),
        ("Llama-2-7b-chat-hf", "llama-2-7b"), ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"), ("qwen2-57b-a14b", "qwen2-57b-a14b"),
        ("Qwen3-235B-A22B", "qwen3-235b-a22b"), ("qwen3-30b", "qwen3-30b-a3b"), ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("deepseek-v3", "deepseek-v3"), ("mixtral", "mixtral-8x7b"), ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("gpt-3", "gpt3-175b"), ("GPT3-175B", "gpt3-175b"), ("openai/gpt-oss-120b", "gpt-oss-120b"), ("gemma-2-9b-it",
        "gemma-2-9b"),
        ("kimi-k2-instruct", "kimi-k2"), ("glm4.5", "glm-4.5"), ("llama-tiny", "llama-tiny"), ("GPT2", "gpt2"),
    ],
)  # fmt: skip
def test_a_built_in_name_is_read_as_users_write_it(written: str, meant: str) -> None:
    assert resolve(written) == meant
    assert load_model(written).name == meant


def test_every_alias_names_a_built_in_model_and_hides_none() -> None:
    for name in model_names():
        assert resolve(name) == name
    path = Path(__file__).parents[2] / "profiles" / "data" / "model_aliases.json"
    for alias, name in json.loads(path.read_text()).items():
        assert resolve(alias) == name


@pytest.mark.parametrize(
    ("written", "nearest"), [("lama-3.1-405b", "llama-3.1-405b"), ("qwen3-253b", "qwen3-235b-a22b"), ("deepseek-v4", "deepseek-v3")]
)
def test_a_misspelt_name_is_answered_with_the_nearest(written: str, nearest: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(written)
    assert nearest in str(caught.value.nearest)
    assert caught.value.field == "model"


@pytest.mark.parametrize("text", ["", "   ", "zzzzqqqq", "a" * 5000, "no\0pe"])
def test_no_name_at_all_is_one_clear_line(text: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(text)
    assert "\n" not in str(caught.value)


# Files


def write(path: Path, config: Any) -> Path:
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def test_a_config_file_its_folder_and_a_path_object_read_alike(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    file = write(folder / "config.json", LLAMA)
    assert load_model(str(file)) == load_model(str(folder)) == load_model(folder)
    assert load_model(file).name == "my-model"
    assert load_model(file).num_layers == 2


def test_a_folder_named_like_a_built_in_model_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama-tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_model("llama-tiny").hidden == 256


BAD_FILES = [
    ("config.json", json.dumps(LLAMA)[:-20], "not valid JSON"),
    ("config.json", "", "not valid JSON"),
    ("config.json", "[1, 2]", "not an object"),
    ("config.json", "hello", "not valid JSON"),
    ("config.json", "[" * 100_000, "not usable JSON"),
    ("config.json", '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "not usable JSON"),
    ("config.json", "{}", "model_type"),
    ("model.yaml", "name: [", "not valid YAML"),
    ("model.yaml", "a: &x [1]\nb: *x\n", "aliases"),
    ("model.yaml", "- 1\n", "not a ModelSpec"),
    ("model.yaml", "!!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ("model.yaml", "name: x\nhidden: 8\n", "vocab"),
    ("model.yaml", "name: x\nhidden: 8\nhidden: 16\n", "hidden twice, in lines 2 and 3"),
    ("config.json", '{"model_type": "llama", "hidden_size": 64}', r"num_hidden_layers.*missing.*\(in .*config\.json\)"),
    ("config.json", '{"model_type": "lama"}', r"no family.*\(in .*config\.json\); nearest: llama"),
]


@pytest.mark.parametrize(("name", "content", "said"), BAD_FILES)
def test_an_unusable_file_is_one_clear_line(tmp_path: Path, name: str, content: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        load_model(write(tmp_path / name, content))
    assert "\n" not in str(caught.value)


def test_truncation_is_said_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 1 column \d+ \(truncated\?\)"):
        load_model(write(tmp_path / "config.json", json.dumps(LLAMA)[:-1]))


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"folder without a config\.json"):
        load_model(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        load_model(str(tmp_path / "config.json"))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InputError, match="UTF-8"):
        load_model(tmp_path / "binary.json")
    (tmp_path / "large.json").write_bytes(b" " * (LARGEST_YAML_BYTES + 1))
    with pytest.raises(InputError, match="larger than"):
        load_model(tmp_path / "large.json")


# A ModelSpec by hand

SPEC = """
name: mine
hidden: 64
vocab: 128
kinds:
  - mixer: {kind: attention, heads: 4, kv_heads: 2, head_dim: 16}
    ffn: {kind: mlp, width: 96}
  - mixer: {kind: attention, heads: 4, kv_heads: 2, head_dim: 16}
    ffn: {kind: moe, experts: 8, top_k: 2, width: 32}
pattern: "0*1 1*3"
"""


def test_a_model_spec_yaml_is_read_with_its_short_pattern(tmp_path: Path) -> None:
    spec = load_model(write(tmp_path / "mine.yaml", SPEC))
    assert spec.pattern == (0, 1, 1, 1)
    assert spec.groups == ((0, 1), (1, 3))
    assert (spec.name, spec.family) == ("mine", "custom")
    assert load_model(write(tmp_path / "mine.json", spec.model_dump_json())) == spec


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("hidden: 64", "hidden: -1", "hidden: -1"), ("hidden: 64", "hidden: wide", "hidden: 'wide'"),
        ('"0*1 1*3"', '"0*1 2*3"', "names kind 2"), ('"0*1 1*3"', '"0*99999999"', "more than 10000 layers"),
        ('"0*1 1*3"', '"0-3"', "KIND"), ("top_k: 2", "top_k: 9", "exceeds experts"), ("kind: mlp", "kind: mpl", "kinds.0.ffn"),
        ("vocab: 128", "vocab: 128\nwidth: 3", "width"), ("width: 96", "widht: 96", "kinds.0.ffn.mlp"),
    ],
)  # fmt: skip
def test_a_wrong_field_of_a_model_spec_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(write(tmp_path / "mine.yaml", SPEC.replace(old, new)))
    assert said in str(caught.value)


def test_the_example_in_the_documentation_is_a_model(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    spec = load_model(write(tmp_path / "mine.yaml", page.split("```yaml\n")[1].split("```")[0]))
    assert (spec.num_layers, spec.groups) == (24, ((0, 1), (1, 23)))


def test_the_documentation_names_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert {name.removesuffix("_text") for name in READERS} - {"ministral3"} <= set(
        page.replace("`", " ").replace(",", " ").split()
    )


# Fields


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(InputError, match=f"{name}.*missing"):
        read_config(without(LLAMA, name), "x")


@pytest.mark.parametrize("name", ["kv_lora_rank", "qk_rope_head_dim", "moe_intermediate_size", "num_experts_per_tok"])
def test_a_missing_field_of_a_mixture_is_named(name: str) -> None:
    with pytest.raises(InputError, match=f"{name}.*missing"):
        read_config(without(DEEPSEEK, name), "x")


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_size", "64"), ("hidden_size", 64.5), ("hidden_size", -64), ("hidden_size", 0), ("num_hidden_layers", True),
     ("num_hidden_layers", 10**8), ("vocab_size", 10**12), ("tie_word_embeddings", "yes"), ("attention_bias", 1),
     ("rms_norm_eps", "small"),
     ("rope_theta", float("nan")), ("rope_parameters", [1]), ("hidden_act", 3), ("num_key_value_heads", [2])],
)  # fmt: skip
def test_a_field_of_the_wrong_type_or_size_is_named(name: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        read_config({**LLAMA, name: value}, "x")
    assert caught.value.field == name


CONTRADICTIONS = [
    (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads", 4),
    (LLAMA, {"num_attention_heads": 5, "num_key_value_heads": 5}, "num_attention_heads", 4),
    (LLAMA, {"n_embd": 65}, "n_embd", 64),
    (LLAMA, {"n_layer": 3}, "n_layer", 2),
    (DEEPSEEK, {"num_experts_per_tok": 9}, "num_experts_per_tok", 8),
    (DEEPSEEK, {"moe_layer_freq": [0, 1, 1]}, "moe_layer_freq", 4),
    ({**LLAMA, "model_type": "qwen3", "use_sliding_window": True}, {"layer_types": ["full_attention"]}, "layer_types", 2),
    ({**LLAMA, "model_type": "gemma2"}, {"layer_types": ["full_attention", "mamba3"]}, "layer_types", "full_attention"),
    (
        {"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 10, "head_dim": 16},
        {"num_heads": 5},
        "num_heads",
        8,
    ),
    ({**LLAMA, "model_type": "nemotron_h", "hybrid_override_pattern": "M*M"}, {}, "hybrid_override_pattern", 2),
]


@pytest.mark.parametrize(("config", "change", "field", "nearest"), CONTRADICTIONS)
def test_a_contradiction_is_named_with_what_would_repair_it(
    config: dict[str, Any], change: dict[str, Any], field: str, nearest: object
) -> None:
    with pytest.raises(InputError) as caught:
        read_config({**config, **change}, "x")
    assert (caught.value.field, caught.value.nearest) == (field, nearest)


def test_an_unknown_family_is_answered_with_the_nearest_and_what_to_write_by_hand() -> None:
    with pytest.raises(InputError) as caught:
        read_config({**LLAMA, "model_type": "llamma"}, "x")
    message = str(caught.value)
    assert "llama" in str(caught.value.nearest)
    for word in ("ModelSpec YAML", "kinds", "pattern", "heads", "experts"):
        assert word in message


JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2.5, 1e300, float("nan"), "", "auto", "x", [], [1], ["a"], [None], {}, {"a": 1}, 10**9, 10**30,
    [0] * 3, ["full_attention"] * 3,
]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["llama-4-scout", "deepseek-v3", "dbrx", "falcon-h1-7b", "nemotron-h-8b", "minimax-text-01", "gemma-3-4b", "mamba-2.8b"]
)
def test_whatever_one_field_holds_the_answer_is_a_model_or_an_error_that_names_a_field(name: str) -> None:
    path = Path(__file__).parents[2] / "profiles" / "data" / "models" / f"{name}.json"
    chance = random.Random(0)

    def places(config: dict[str, Any]) -> list[tuple[str, ...]]:
        inner = [(key, *rest) for key, value in config.items() if isinstance(value, dict) for rest in places(value)]
        return [(key,) for key in config] + inner

    for place in places(json.loads(path.read_text())):
        for junk in chance.sample(JUNK, 8):
            config = json.loads(path.read_text())
            holder = config
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = junk
            try:
                total = read_config(config, "x").parameters.total
            except InputError as error:
                total = len(error.field)
            assert total > 0


# Old and new spellings

SPELLINGS = [
    (
        {"model_type": "falcon", "n_layer": 2, "n_head": 4, "n_head_kv": 2, "hidden_size": 64, "vocab_size": 100,
         "new_decoder_architecture": True},
        {"model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2, "hidden_size": 64,
        "vocab_size": 100,
         "new_decoder_architecture": True},
    ),
    (without(DEEPSEEK), without(DEEPSEEK, "n_routed_experts", num_local_experts=8)),
    (without(DEEPSEEK), without(DEEPSEEK, "num_nextn_predict_layers", num_mtp_layers=1)),
    ({**LLAMA, "rope_theta": 5e5}, {**LLAMA, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
    ({**LLAMA, "num_key_value_heads": 4}, without(LLAMA, "num_key_value_heads")),
    ({**LLAMA, "num_key_value_heads": 4}, {**LLAMA, "num_key_value_heads": None}),
    (
        {**LLAMA, "model_type": "nemotron_h", "hybrid_override_pattern": "M*-", "num_hidden_layers": 3},
        without({**LLAMA, "model_type": "nemotron_h", "layers_block_type": ["mamba", "attention", "mlp"]}, "num_hidden_layers"),
    ),
    (
        {"model_type": "bloom", "n_embed": 64, "n_layer": 2, "num_attention_heads": 4, "vocab_size": 100},
        {"model_type": "bloom", "hidden_size": 64, "num_hidden_layers": 2, "n_head": 4, "vocab_size": 100},
    ),
    (
        {**LLAMA, "model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2},
        {**LLAMA, "model_type": "gemma3_text", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    (
        {**LLAMA, "model_type": "gpt2", "n_inner": None, "intermediate_size": 256},
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 100},
    ),
    (
        {**LLAMA, "model_type": "minimax", "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["linear_attention",
        "full_attention"]},
        {**LLAMA, "model_type": "minimax_text_01", "num_local_experts": 4, "num_experts_per_tok": 2, "attn_type_list": [0, 1]},
    ),
    ({**DEEPSEEK, "num_nextn_predict_layers": 0}, {**DEEPSEEK, "model_type": "kimi_k2", "num_nextn_predict_layers": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), SPELLINGS)
def test_old_and_new_spellings_read_alike(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert shapes(read_config(old, "x")) == shapes(read_config(new, "x"))


def test_multi_query_wins_over_num_kv_heads_in_the_first_falcon() -> None:
    falcon = {
        "model_type": "falcon",
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_kv_heads": 4,
        "hidden_size": 64,
        "vocab_size": 10,
    }
    attention = read_config({**falcon, "multi_query": True}, "x").attention
    assert attention is not None
    assert attention.kv_heads == 1


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("gemma2", True), ("cohere", True), ("smollm3", True), ("qwen2", False)]
)
def test_an_absent_tie_means_the_class_default(family: str, tied: bool) -> None:
    assert read_config({**LLAMA, "model_type": family}, "x").tied is tied


# What families mean


def test_a_multimodal_config_gives_its_text_part_and_says_so() -> None:
    spec = read_config(
        {"model_type": "gemma3", "text_config": without(LLAMA, "model_type"), "vision_config": {"hidden_size": 9}}, "x"
    )
    assert (spec.hidden, spec.family) == (64, "gemma3_text")
    assert "text part" in spec.notes[0]
    with pytest.raises(InputError, match=r"text_config\.hidden_size.*missing"):
        read_config({"model_type": "mistral3", "text_config": without(LLAMA, "hidden_size", model_type="mistral")}, "x")


def test_windows_chunks_and_rotation_follow_the_family() -> None:
    def reach(family: str, layers: int = 6, **fields: Any) -> list[tuple[int | None, int | None, bool]]:
        spec = read_config({**LLAMA, "model_type": family, "num_hidden_layers": layers, **fields}, "x")
        mixers = [spec.layer(i).mixer for i in range(layers)]
        return [(m.window, m.chunk, m.rotary) for m in mixers if isinstance(m, Attention)]

    assert reach("gemma3_text", sliding_window=8) == [(8, None, True)] * 5 + [(None, None, True)]
    assert reach("gemma2", 4, sliding_window=8) == [(8, None, True), (None, None, True)] * 2
    assert reach("mistral", 2, sliding_window=8) == [(8, None, True)] * 2
    assert reach("qwen2", 2, sliding_window=8, use_sliding_window=False) == [(None, None, True)] * 2
    assert reach("qwen2", 2, sliding_window=8, use_sliding_window=True, max_window_layers=1) == [
        (None, None, True),
        (8, None, True),
    ]
    assert reach("mistral", 1) == [(4096, None, True)]
    assert reach("mistral", 1, sliding_window=None) == [(None, None, True)]
    assert reach("llama4_text", 1, num_local_experts=4, num_experts_per_tok=1, attention_chunk_size=None) == [(None, None, True)]
    llama4 = {"num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 8}
    assert reach("llama4_text", 4, **llama4) == [(None, 8, True)] * 3 + [(None, None, False)]
    assert reach("smollm3", 4) == [(None, None, True)] * 3 + [(None, None, False)]


def test_experts_stand_where_the_family_puts_them() -> None:
    def sparse(layers: int, **fields: Any) -> list[int]:
        spec = read_config({**LLAMA, "num_hidden_layers": layers, **fields}, "x")
        return [i for i in range(layers) if isinstance(spec.layer(i).ffn, Moe)]

    qwen = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    assert sparse(6, **qwen, decoder_sparse_step=2, mlp_only_layers=[3]) == [1, 5]
    assert sparse(4, **{**DEEPSEEK, "num_hidden_layers": 4, "moe_layer_freq": [0, 1, 0, 1]}) == [1, 3]
    assert sparse(4, **{**DEEPSEEK, "num_hidden_layers": 4, "first_k_dense_replace": 3}) == [3]
    llama4 = {"model_type": "llama4_text", "num_local_experts": 4, "num_experts_per_tok": 1}
    assert sparse(6, **llama4, interleave_moe_layer_step=2) == [1, 3, 5]
    assert sparse(6, **llama4, moe_layers=[0, 4]) == [0, 4]
    jamba = {"model_type": "jamba", "num_experts": 4, "num_experts_per_tok": 2}
    assert sparse(5, **jamba, expert_layer_period=2, expert_layer_offset=1) == [1, 3]


def test_each_kind_of_layer_is_what_its_model_has() -> None:
    kinds = {name: {type(m) for k in load_model(name).kinds for m in k.mixers} for name in model_names()}
    assert kinds["deepseek-v3"] == {LatentAttention}
    assert kinds["mamba2-2.7b"] == {StateSpace}
    assert kinds["jamba-v0.1"] == kinds["nemotron-h-8b"] == kinds["falcon-h1-7b"] == {StateSpace, Attention}
    assert kinds["qwen3-next-80b-a3b"] == kinds["minimax-text-01"] == {LinearAttention, Attention}
    falcon_h1 = load_model("falcon-h1-7b").layer(0)
    assert isinstance(falcon_h1.mixer, Attention)
    assert isinstance(falcon_h1.beside, StateSpace)
    assert isinstance(falcon_h1.ffn, Mlp)


def test_the_tiny_model_is_a_real_llama_config() -> None:
    spec = load_model("llama-tiny")
    attention = spec.attention
    assert isinstance(attention, Attention)
    assert (spec.hidden, spec.num_layers, spec.vocab, spec.max_seq_len) == (256, 8, 512, 2048)
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (8, 4, 32)
    assert spec.family in READERS


def test_reading_a_model_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from profiles.huggingface import load_model; from cost_models.flops import inspect_model;"
        "inspect_model(load_model('deepseek-v3'), 4096); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
