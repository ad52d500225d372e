"""Shapes of one small random model per family, with layers as large as those of models with 0.5 to 1 billion
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
_YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                             "original_max_position_embeddings": 1024}}  # fmt: skip
_LOCAL = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                              "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}  # fmt: skip
_LAYERS = 8
_HYBRID = (["linear_attention"] * 3 + ["full_attention"]) * 2
_MAMBA = {"mamba_n_heads": 24, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4}
_STATES = {"intermediate_size": 1536, "num_hidden_layers": 16, "conv_kernel": 4}
_NEMOTRON = {"mamba_num_heads": 24, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
             "tie_word_embeddings": False, "num_hidden_layers": 18}  # fmt: skip
_DELTA = {"head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 6,
          "linear_num_value_heads": 12, "num_attention_heads": 6, "num_key_value_heads": 2}  # fmt: skip
_MLA = {"num_key_value_heads": 12, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        "v_head_dim": 64}  # fmt: skip
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 256}
_ROUTED = {"n_routed_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 256, "n_group": 4,
           "topk_group": 2}  # fmt: skip
_LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024}
_SLIDING = {"sliding_window": 512}

COMMON: Mapping[str, Any] = {
    "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": _LAYERS,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
"""The keys of a configuration that families share."""

SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Llama": ("llama", _ROPE),
    "Mistral": ("mistral", {**_ROPE, **_SLIDING}),
    "Qwen2": ("qwen2", _ROPE),
    "Qwen3": ("qwen3", {**_ROPE, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "Gemma 2": ("gemma2", {**_ROPE, **_SLIDING, "head_dim": 64}),
    "Gemma 3": ("gemma3_text", {**_LOCAL, **_SLIDING, "head_dim": 256, "num_attention_heads": 4,
                                "num_key_value_heads": 1, "query_pre_attn_scalar": 256}),
    "Gemma 3n": ("gemma3n_text", {**_LOCAL, **_SLIDING, "head_dim": 128, "num_attention_heads": 6,
                                  "num_key_value_heads": 2, "hidden_size_per_layer_input": 128,
                                  "vocab_size_per_layer_input": 8192, "num_kv_shared_layers": 2, "laurel_rank": 64,
                                  "activation_sparsity_pattern": [0.95] * 3 + [0.0] * 5}),
    "Gemma 4": ("gemma4_text", {"head_dim": 128, "num_attention_heads": 6, "num_key_value_heads": 2, **_SLIDING,
                                "global_head_dim": 256, "hidden_size_per_layer_input": 128,
                                "vocab_size_per_layer_input": 8192}),
    "Gemma 4 MoE": ("gemma4_text", {"head_dim": 128, "num_attention_heads": 6, "num_key_value_heads": 2, **_SLIDING,
                                    "global_head_dim": 256, "hidden_size_per_layer_input": 0,
                                    "enable_moe_block": True, "num_experts": 32, "top_k_experts": 8,
                                    "moe_intermediate_size": 128, "intermediate_size": 1024}),
    "Phi 3": ("phi3", {**_ROPE, "sliding_window": None}),
    "SmolLM3": ("smollm3", _ROPE),
    "OLMo 2": ("olmo2", _ROPE),
    "OLMo 3": ("olmo3", {**_LOCAL, **_SLIDING}),
    "GLM 4": ("glm4", {**_HALF, "head_dim": 64}),
    "StarCoder2": ("starcoder2", {**_ROPE, **_SLIDING, "intermediate_size": 3072}),
    "Arcee": ("arcee", {**_ROPE, "intermediate_size": 3072}),
    "Apertus": ("apertus", {**_ROPE, "intermediate_size": 3072}),
    "BitNet": ("bitnet", _ROPE),
    "Granite": ("granite", _ROPE),
    "MiniCPM": ("minicpm", {**_ROPE, "scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}),
    "ERNIE 4.5": ("ernie4_5", _ROPE),
    "Mixtral": ("mixtral", {**_ROPE, **_LOCAL_EXPERTS}),
    "Qwen3 MoE": ("qwen3_moe", {**_ROPE, **_EXPERTS, "head_dim": 64, "norm_topk_prob": True}),
    "OLMoE": ("olmoe", {**_ROPE, "num_experts": 32, "num_experts_per_tok": 8, "intermediate_size": 256}),
    "Granite MoE": ("granitemoe", {**_ROPE, **_LOCAL_EXPERTS, "num_local_experts": 32, "num_experts_per_tok": 8,
                                   "intermediate_size": 256}),
    "ERNIE 4.5 MoE": ("ernie4_5_moe", {**_ROPE, "moe_num_experts": 32, "moe_k": 8, "moe_intermediate_size": 256,
                                       "moe_num_shared_experts": 1, "moe_layer_start_index": 1}),
    "GLM 4.5": ("glm4_moe", {**_HALF, **_ROUTED, "n_group": 1, "topk_group": 1, "head_dim": 64,
                             "first_k_dense_replace": 1}),
    "Llama 4": ("llama4_text", {**_ROPE, "head_dim": 64, "intermediate_size": 1024, "intermediate_size_mlp": 2048,
                                "num_local_experts": 8, "num_experts_per_tok": 1, "attention_chunk_size": 512}),
    "gpt-oss": ("gpt_oss", {**_YARN, "head_dim": 64, "num_local_experts": 16, "intermediate_size": 512,
                            "num_experts_per_tok": 4, "sliding_window": 128}),
    "DeepSeek V2": ("deepseek_v2", {**_YARN, **_MLA, **_ROUTED, "n_shared_experts": 1, "q_lora_rank": None,
                                    "topk_method": "group_limited_greedy", "first_k_dense_replace": 1}),
    "DeepSeek V3": ("deepseek_v3", {**_YARN, **_MLA, **_ROUTED, "n_shared_experts": 1, "q_lora_rank": 384,
                                    "first_k_dense_replace": 1}),
    "DeepSeek V3.2": ("deepseek_v32", {**_YARN, **_MLA, **_ROUTED, "n_shared_experts": 1, "q_lora_rank": 384,
                                       "first_k_dense_replace": 1, "index_n_heads": 8, "index_head_dim": 64,
                                       "index_topk": 256}),
    "A.X K2": ("axk2", {**_YARN, **_MLA, **_ROUTED, "n_group": None, "topk_group": None, "n_shared_experts": 1,
                        "q_lora_rank": 384, "index_n_heads": 8, "index_head_dim": 64, "index_topk": 256,
                        "gated_norm_rank": 16}),
    "Hunyuan 4": ("hy_v4", {**_ROPE, **_MLA, **_ROUTED, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
                            "q_lora_rank": 384, "index_n_heads": 8, "index_head_dim": 64, "index_topk": 256}),
    "MiniCPM3": ("minicpm3", {**_ROPE, **_MLA, "q_lora_rank": 384, "scale_emb": 12, "dim_model_base": 256}),
    "Bamba": ("bamba", {**_HALF, **_MAMBA, "attn_layer_indices": [3, 7]}),
    "Granite 4 H": ("granitemoehybrid", {**_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 2048,
                                         "layer_types": _HYBRID}),
    "Granite 4 H MoE": ("granitemoehybrid", {**_MAMBA, "num_local_experts": 32, "num_experts_per_tok": 8,
                                             "intermediate_size": 256, "shared_intermediate_size": 512,
                                             "layer_types": _HYBRID}),
    "Falcon-H1": ("falcon_h1", {**_ROPE, **_MAMBA, "mamba_d_ssm": 1536, "head_dim": 64, "num_hidden_layers": 6}),
    "Nemotron-H": ("nemotron_h", {**_NEMOTRON, "head_dim": 64, "intermediate_size": 3072,
                                  "layers_block_type": ["linear_attention", "mlp", "linear_attention", "mlp",
                                                        "full_attention", "mlp"] * 3}),
    "Nemotron-H MoE": ("nemotron_h", {**_NEMOTRON, **_ROUTED, "head_dim": 64, "n_group": 1, "topk_group": 1,
                                      "moe_shared_expert_intermediate_size": 1024,
                                      "layers_block_type": ["linear_attention", "moe", "linear_attention", "moe",
                                                            "full_attention", "moe"] * 3}),
    "Mamba 2": ("mamba2", {**_STATES, "num_heads": 24, "head_dim": 64, "n_groups": 1, "state_size": 128}),
    "Mamba": ("mamba", _STATES),
    "Falcon Mamba": ("falcon_mamba", _STATES),
    "Jamba": ("jamba", {"num_experts": 1}),
    "Zamba 2": ("zamba2", {"num_key_value_heads": 12, "n_mamba_heads": 24, "mamba_d_state": 128, "use_mem_rope": True,
                            "use_shared_attention_adapter": True, "num_hidden_layers": 12,
                            "layers_block_type": (["linear_attention"] * 3 + ["hybrid"]) * 3}),
    "RecurrentGemma": ("recurrent_gemma", {"intermediate_size": 4096}),
    "ZAYA": ("zaya", {"num_experts": 16, "moe_intermediate_size": 2048, "head_dim": 128, "num_attention_heads": 8,
                      "num_key_value_heads": 2}),
    "Qwen3-Next": ("qwen3_next", {**_ROPE, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 512}),
    "Qwen3.5": ("qwen3_5_text", {**_ROPE, **_DELTA}),
    "Qwen3.5 MoE": ("qwen3_5_moe_text", {**_ROPE, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 512}),
    "LFM2": ("lfm2", {**_ROPE, "layer_types": ["conv", "conv", "conv", "full_attention"] * 2,
                      "intermediate_size": 3072, "block_multiple_of": 256}),
    "LFM2 MoE": ("lfm2_moe", {**_ROPE, **_EXPERTS, "layer_types": ["conv", "conv", "conv", "full_attention"] * 2,
                              "num_dense_layers": 1}),
}  # fmt: skip
"""Family → its ``model_type``, and the keys of its configuration besides `COMMON`."""

WHOLE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "lfm2-350m-random": ("lfm2", {
        **_ROPE, "vocab_size": 65536, "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 8, "intermediate_size": 4608, "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
        "max_position_embeddings": 128000,
    }),
}  # fmt: skip
"""Models with the sizes of published ones, for `benchmarks/peers/run.py --gguf`: name → as `SHAPES`."""
