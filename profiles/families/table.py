"""Facts of the families that are pre-norm decoders: one row a ``model_type``.

Sources: the modelling code of transformers 5.24 (parameter shapes compared in tests/profiles/test_models_exact.py) and, for
families without a class there, the code released with the model.
"""

from __future__ import annotations

from typing import Any

from profiles.families import experts, windows
from profiles.families.decoder import Decoder

_MISTRAL_KV = {"num_key_value_heads": 8}
_NO_BIAS: dict[str, Any] = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}
_GEMMA = {"head_dim": 256}
_DEEPSEEK_V3 = Decoder(
    latent=True, mlp_bias=False, ffn=experts.deepseek,
    defaults={"scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "norm_topk_prob": True, "num_nextn_predict_layers": 0},
)  # fmt: skip

_INDEXED = "approximate: the indexer's weights are counted, but attention is costed as dense, not over the tokens it picks"

DECODERS: dict[str, Decoder] = {
    "llama": Decoder(whole_heads=True),
    "mistral": Decoder(**_NO_BIAS, reach=windows.everywhere, defaults={**_MISTRAL_KV, "sliding_window": 4096}),
    "ministral": Decoder(**_NO_BIAS, reach=windows.whole, defaults=_MISTRAL_KV),
    "ministral3": Decoder(**_NO_BIAS, reach=windows.everywhere, defaults=_MISTRAL_KV),
    "mixtral": Decoder(**_NO_BIAS, reach=windows.everywhere, ffn=experts.mixtral, defaults=_MISTRAL_KV),
    "qwen2": Decoder(qkv_bias=True, output_bias=False, mlp_bias=False, reach=windows.after_max_window_layers,
                     defaults={"sliding_window": 4096}),
    "qwen3": Decoder(mlp_bias=False, qk_norm="head", reach=windows.after_max_window_layers,
                     defaults={"head_dim": 128, "sliding_window": 4096}),
    "qwen2_moe": Decoder(qkv_bias="qkv_bias", output_bias=False, mlp_bias=False, reach=windows.alternate_before_max,
                         ffn=experts.qwen,
                         defaults={"qkv_bias": True, "sliding_window": 4096, "shared_expert_intermediate_size": 5632}),
    "qwen3_moe": Decoder(mlp_bias=False, qk_norm="head", reach=windows.when_used, ffn=experts.qwen,
                         defaults={"num_key_value_heads": 4, "sliding_window": 4096}),
    "gemma": Decoder(mlp_bias=False, tied=True, activation="gelu_pytorch_tanh", defaults=_GEMMA),
    "gemma2": Decoder(mlp_bias=False, tied=True, norms=4, activation="gelu_pytorch_tanh", reach=windows.every_full(2),
                      defaults={**_GEMMA, "sliding_window": 4096}),
    "gemma3_text": Decoder(mlp_bias=False, tied=True, norms=4, qk_norm="head", activation="gelu_pytorch_tanh",
                           reach=windows.every_full(6),
                           defaults={**_GEMMA, "sliding_window": 4096, "vocab_size": 262208, "num_attention_heads": 8,
                                     "num_key_value_heads": 4, "rope_theta": 1e6}),
    "phi3": Decoder(**_NO_BIAS, reach=windows.everywhere),
    "stablelm": Decoder(whole_heads=True, norm="layer", norm_bias=True, qkv_bias="use_qkv_bias", output_bias=False, mlp_bias=False,
                        qk_norm="per_head", qk_norm_if="qk_layernorm", parallel="use_parallel_residual",
                        defaults={"num_key_value_heads": 32, "partial_rotary_factor": 0.25}),
    "cohere": Decoder(norm="layer", mlp_bias=False, parallel=True, tied=True, qk_norm="per_head", qk_norm_if="use_qk_norm"),
    "cohere2": Decoder(norm="layer", mlp_bias=False, parallel=True, tied=True, reach=windows.every_full(4),
                       defaults={"sliding_window": 4096}),
    "glm": Decoder(output_bias=False, mlp_bias=False,
                   defaults={"attention_bias": True, "num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5}),
    "glm4": Decoder(output_bias=False, mlp_bias=False, norms=4,
                    defaults={"attention_bias": True, "num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5}),
    "glm4_moe": Decoder(output_bias=False, mlp_bias=False, qk_norm="head", qk_norm_if="use_qk_norm", ffn=experts.deepseek,
                        defaults={"num_key_value_heads": 8, "scoring_func": "sigmoid", "partial_rotary_factor": 0.5,
                                  "norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1}),
    "olmo": Decoder(norm="layer", norm_weight=False, mlp_bias=False),
    "olmo2": Decoder(mlp_bias=False, qk_norm="full", post_norm=True),
    "olmo3": Decoder(mlp_bias=False, qk_norm="full", post_norm=True, reach=windows.every_full(4),
                     defaults={"sliding_window": 4096}),
    "olmoe": Decoder(mlp_bias=False, qk_norm="full", ffn=experts.mixtral, defaults={"norm_topk_prob": False}),
    "smollm3": Decoder(tied=True, reach=windows.smollm3, rotates=windows.rotating,
                       defaults={"num_key_value_heads": 4, "rope_theta": 2e6}),
    "ernie4_5": Decoder(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", tied=True,
                        defaults={"num_key_value_heads": 2, "head_dim": 128}),
    "ernie4_5_moe": Decoder(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", head_bias="use_bias", tied=True,
                            ffn=experts.ernie,
                            defaults={"num_key_value_heads": 4, "n_shared_experts": 2}),
    "granite": Decoder(),
    "granitemoe": Decoder(mlp_bias=False, ffn=experts.granite),
    "granitemoeshared": Decoder(mlp_bias=False, ffn=experts.granite),
    "nemotron": Decoder(norm="layer", norm_bias=True, gated=False, activation="relu2", defaults={"partial_rotary_factor": 0.5}),
    "starcoder2": Decoder(norm="layer", norm_bias=True, gated=False, qkv_bias="use_bias", output_bias="use_bias",
                          mlp_bias="use_bias", tied=True, activation="gelu_pytorch_tanh", reach=windows.everywhere,
                          defaults={"use_bias": True, "num_key_value_heads": 2}),
    "seed_oss": Decoder(output_bias="attention_out_bias", defaults={"attention_bias": True, "head_dim": 128}),
    "phimoe": Decoder(norm="layer", norm_bias=True, mlp_bias=False, head_bias="lm_head_bias", reach=windows.everywhere,
                      ffn=experts.mixtral, defaults=_MISTRAL_KV),
    "gpt_oss": Decoder(mlp_bias=False, sinks=True, reach=windows.every_full(2), ffn=experts.gpt_oss,
                       defaults={"attention_bias": True, "head_dim": 64, "sliding_window": 128}),
    "minimax_m2": Decoder(**_NO_BIAS, qk_norm="full", ffn=experts.minimax_m2, defaults={"head_dim": 128}),
    "llama4_text": Decoder(mlp_bias=False, reach=windows.llama4, rotates=windows.rotating, ffn=experts.llama4,
                           defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192,
                                     "intermediate_size_mlp": 16384, "rope_theta": 5e5}),
    "deepseek_v2": Decoder(latent=True, ffn=experts.deepseek, defaults={"norm_topk_prob": False}),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": Decoder(latent=True, mlp_bias=False, ffn=experts.deepseek,
                             defaults={"scoring_func": "sigmoid", "norm_topk_prob": True, "first_k_dense_replace": 1}),
    "deepseek_v32": Decoder(latent=True, indexed=True, mlp_bias=False, ffn=experts.deepseek, note=_INDEXED,
                            defaults={"scoring_func": "sigmoid", "norm_topk_prob": True, "first_k_dense_replace": 3}),
    "glm_moe_dsa": Decoder(latent=True, indexed=True, mlp_bias=False, ffn=experts.deepseek, note=_INDEXED,
                           defaults={"scoring_func": "sigmoid", "norm_topk_prob": True, "first_k_dense_replace": 3}),
    "grok-1": Decoder(**_NO_BIAS, norms=4, tied=True, activation="gelu", ffn=experts.mixtral),
}  # fmt: skip
