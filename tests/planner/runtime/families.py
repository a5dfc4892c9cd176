"""Tiny random models of Hugging Face families, saved as a user has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
ROUTED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# fmt: off
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", {**ROUTED, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3MoeConfig", {**ROUTED, "head_dim": 8, "norm_topk_prob": True}),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**LATENT, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "deepseek_v3": ("DeepseekV3Config", {**LATENT, "num_nextn_predict_layers": 0, "n_group": 4, "topk_group": 2, "norm_topk_prob": True}),
    "llama3.1": ("LlamaConfig", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "deepseek_v3-yarn": ("DeepseekV3Config", {**LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
    }}),
    "qwen2-yarn": ("Qwen2Config", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    }}),
    "olmo2": ("Olmo2Config", {"tie_word_embeddings": False}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}
# fmt: on


def save(family: str, folder: Path) -> Any:
    """A model of ``family`` with random values, also where initial values would be trivial; saved in ``folder``."""
    import torch
    import transformers

    name, own = CONFIGS[family]
    fields = {k: v for k, v in SMALL.items() if family != "gpt2" or not k.startswith(("hidden", "inter", "num_", "max_"))}
    config = getattr(transformers, name)(**{**fields, **own})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for key, value in [*model.named_parameters(), *model.named_buffers()]:
        if "correction" in key:
            value.data.uniform_(-0.1, 0.1)
        elif "norm" in key or "bias" in key or "ln_" in key:
            value.data.add_(torch.randn_like(value) * 0.1)
        elif value.dim() > 1 and value.is_floating_point():
            value.data.mul_(3)
    model.save_pretrained(folder)
    return model
