"""Record tiny.json: the logits transformers computes for a tiny random model of each family.

Needs torch, transformers and safetensors, so it runs in an environment of its own:
    PYTHONPATH=tests python tests/data/models/make_tiny.py [NAME...]
Models that are not named keep their record, unless none is named.
Weights are not recorded: `models.tiny.random_tensors` draws them again from the names and shapes.
"""

import copy
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open

from models.tiny import random_tensors, write_model

NUM_TOKENS, KEPT = 24, 6
PREFIXES, NUM_GREEDY = (5, 9, 17, 24), 10  # recorded for models with prefix_lm
MORE_TOKENS = {"phi3-longrope-past": 40}  # than the model's original length
SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 500.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
MINISTRAL = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4,
             "original_max_position_embeddings": 8}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.3, 1.7, 2.0],
        "long_factor": [2.0, 4.0, 6.0, 8.0], "original_max_position_embeddings": 32}  # fmt: skip
LONG_HALF = {**LONG, "short_factor": [1.0, 1.7], "long_factor": [2.0, 6.0], "original_max_position_embeddings": 16,
             "partial_rotary_factor": 0.5, "attention_factor": 1.4}  # fmt: skip
GEMMA_ROPE = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
              "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}  # fmt: skip
GEMMA4_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
                 "full_attention"]  # fmt: skip
OLMO_ROPE = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
HALF = {**ROPE, "partial_rotary_factor": 0.5}
MROPE = {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.5, "attention_multiplier": 0.2}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_d_conv": 3,
         "mamba_chunk_size": 8}  # fmt: skip
DELTA = {"head_dim": 16, "linear_key_head_dim": 10, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4}  # fmt: skip
LFM3_LAYERS = ["conv", "full_attention", "sliding_attention", "sliding_attention"]
LFM_LAYERS = ["conv", "full_attention", "conv", "full_attention"]
FALCON = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "key_multiplier": 1.5, "ssm_in_multiplier": 1.25,
          "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.8, "ssm_out_multiplier": 0.7,
          "mlp_multipliers": [0.6, 1.3], "ssm_multipliers": [0.35, 0.8, 1.4, 0.5, 1.2]}  # fmt: skip
ZAYA = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 4, "max_position_embeddings": 64,
        "moe_intermediate_size": 24, "num_experts": 4, "bos_token_id": None, "eos_token_id": 2,
        "pad_token_id": 0}  # fmt: skip
STATES = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 4, "bos_token_id": None, "eos_token_id": 2,
          "pad_token_id": 0}  # fmt: skip
# The eps of norms of Zamba are large below: rounding errors of averages would be as large as these.
ZAMBA = {**{key: size for key, size in SIZES.items() if key != "num_key_value_heads"}, "n_mamba_heads": 4,
         "mamba_ngroups": 2, "mamba_d_state": 10, "mamba_d_conv": 3, "chunk_size": 8}  # fmt: skip
HRM = {key: size for key, size in SIZES.items() if key != "num_key_value_heads"}
JAMBA = {"mamba_d_state": 10, "mamba_d_conv": 3, "mamba_expand": 2, "mamba_dt_rank": 5}
NEMOTRON = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 4, "topk_group": 2,
            "moe_shared_expert_intermediate_size": 20, "routed_scaling_factor": 1.5}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}

MLA = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12}
OWN_HEADS = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
BERT_SIZES = {**OWN_HEADS, "bos_token_id": 1}
LAST = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
TOKENS = {"vocab_size": 48, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
GPT = {**TOKENS, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
GPT_SIZES = {**TOKENS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
             "max_position_embeddings": 64}  # fmt: skip
GROUPS = {"moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
          "first_k_dense_replace": 1}  # fmt: skip

INDEXER = {"index_n_heads": 12, "index_head_dim": 14, "index_topk": 5}

KIMI = {"linear_head_dim": 10, "linear_num_heads": 4, "moe_intermediate_size": 12, "num_local_experts": 8,
        "num_experts_per_tok": 2}  # fmt: skip

MODELS = {
    "llama3": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-linear-tied": transformers.LlamaConfig(
        **SIZES, head_dim=10, tie_word_embeddings=True, rope_parameters={**ROPE, "rope_type": "linear", "factor": 3.0}
    ),
    "llama-gelu": transformers.LlamaConfig(**SIZES, hidden_act="gelu", rope_parameters=ROPE),
    "llama-yarn": transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "mistral": transformers.MistralConfig(**SIZES, head_dim=8, sliding_window=7, rope_parameters=ROPE),
    "ministral3": transformers.Ministral3Config(**SIZES, head_dim=12, rope_parameters=MINISTRAL),
    "ministral3-sliding": transformers.Ministral3Config(
        **SIZES, head_dim=12, sliding_window=7,
        rope_parameters={**MINISTRAL, "mscale_all_dim": 0.7, "original_max_position_embeddings": 5},
    ),
    "qwen2": transformers.Qwen2Config(**SIZES, rope_parameters=ROPE),
    "qwen2-sliding": transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=2, rope_parameters=ROPE
    ),
    "qwen2-relu": transformers.Qwen2Config(**SIZES, hidden_act="relu", rope_parameters=ROPE),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=True, rope_parameters=ROPE),
    "gemma2": transformers.Gemma2Config(
        **SIZES, head_dim=8, sliding_window=7, query_pre_attn_scalar=20, attn_logit_softcapping=3.0,
        final_logit_softcapping=2.0, rope_parameters=ROPE,
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 7}, head_dim=8, sliding_window=5, query_pre_attn_scalar=12,
        rope_parameters=GEMMA_ROPE,
    ),
    "gemma3n-plain": transformers.Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 3}, head_dim=8, sliding_window=5, layer_types=GEMMA4_LAYERS[:3],
        hidden_size_per_layer_input=6, vocab_size_per_layer_input=40, num_kv_shared_layers=0, altup_num_inputs=2,
        altup_correct_scale=False, laurel_rank=10, tie_word_embeddings=False, rope_parameters=GEMMA_ROPE,
    ),
    "gemma3n": transformers.Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 6, "intermediate_size": [40, 48, 40, 40, 80, 40]}, head_dim=8,
        sliding_window=5, layer_types=GEMMA4_LAYERS, hidden_size_per_layer_input=6, vocab_size_per_layer_input=48,
        num_kv_shared_layers=2, laurel_rank=10, activation_sparsity_pattern=[0.8, 0.3, 0.0, 0.0, 0.9, 0.0],
        final_logit_softcapping=2.0, rope_parameters=GEMMA_ROPE,
    ),
    "gemma4-moe": transformers.Gemma4TextConfig(
        **SIZES, head_dim=8, global_head_dim=16, sliding_window=5, layer_types=GEMMA4_LAYERS[:4],
        hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=12,
    ),
    "gemma4-plain": transformers.Gemma4TextConfig(
        **{**SIZES, "num_hidden_layers": 7}, head_dim=8, global_head_dim=16, sliding_window=5,
        hidden_size_per_layer_input=0, tie_word_embeddings=False,
    ),
    "gemma4": transformers.Gemma4TextConfig(
        **{**SIZES, "num_hidden_layers": 6}, head_dim=8, global_head_dim=12, num_global_key_value_heads=1,
        attention_k_eq_v=True, sliding_window=5, layer_types=GEMMA4_LAYERS, hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=48, num_kv_shared_layers=2, use_double_wide_mlp=True, final_logit_softcapping=2.0,
    ),
    "gemma4-unified": transformers.Gemma4UnifiedTextConfig(
        **SIZES, head_dim=8, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=5,
        layer_types=GEMMA4_LAYERS[:4],
    ),
    "phi3": transformers.Phi3Config(**SIZES, sliding_window=9, rope_parameters=ROPE),
    "phi3-longrope": transformers.Phi3Config(
        **SIZES, rope_parameters=LONG, original_max_position_embeddings=32, sliding_window=None
    ),
    "phi3-longrope-past": transformers.Phi3Config(
        **SIZES, rope_parameters=LONG, original_max_position_embeddings=32, sliding_window=None
    ),
    "phi3-longrope-half-past": transformers.Phi3Config(
        **SIZES, rope_parameters=LONG_HALF, original_max_position_embeddings=16, sliding_window=None
    ),
    "smollm3": transformers.SmolLM3Config(**SIZES, tie_word_embeddings=True, rope_parameters=ROPE),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, rope_parameters=ROPE),
    "qwen2-moe": transformers.Qwen2MoeConfig(
        **SIZES, **EXPERTS, num_experts=4, shared_expert_intermediate_size=20, norm_topk_prob=False,
        decoder_sparse_step=2, rope_parameters=ROPE,
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_experts=6, head_dim=12, norm_topk_prob=True, mlp_only_layers=[1], rope_parameters=ROPE
    ),
    "qwen3-vl-moe": transformers.Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_experts=6, head_dim=12, norm_topk_prob=True,
        rope_parameters={**ROPE, "mrope_section": [2, 2, 2]},
    ),
    "exaone": transformers.LlamaConfig(**SIZES, head_dim=12, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "internlm2": transformers.LlamaConfig(**SIZES, rope_parameters={**ROPE, "rope_type": "dynamic", "factor": 2.0}),
    "deepseek": transformers.Qwen2MoeConfig(
        **SIZES, **EXPERTS, num_experts=6, shared_expert_intermediate_size=24, norm_topk_prob=False,
        mlp_only_layers=[0], rope_parameters=ROPE,
    ),
    "bailing": transformers.Qwen2MoeConfig(
        **SIZES, **EXPERTS, num_experts=6, shared_expert_intermediate_size=24, norm_topk_prob=True, rope_parameters=ROPE
    ),
    "bailing2": transformers.Glm4MoeConfig(
        **SIZES, **GROUPS, n_shared_experts=1, head_dim=12, use_qk_norm=True, norm_topk_prob=True,
        rope_parameters=HALF, routed_scaling_factor=1.5,
    ),
    "bamba": transformers.BambaConfig(
        **SIZES, attn_layer_indices=[2], mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=12,
        mamba_chunk_size=8, rope_parameters={**ROPE, "partial_rotary_factor": 0.5},
    ),
    "bamba-groups": transformers.BambaConfig(
        **SIZES, attn_layer_indices=[0, 2], mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=10,
        mamba_d_conv=3, mamba_conv_bias=False, mamba_chunk_size=8, tie_word_embeddings=True, rope_parameters=ROPE,
    ),
    "qwen3-next": transformers.Qwen3NextConfig(
        **SIZES, **EXPERTS, num_experts=4, shared_expert_intermediate_size=20, mlp_only_layers=[1], head_dim=16,
        linear_key_head_dim=10, linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4,
        rope_parameters={**ROPE, "partial_rotary_factor": 0.25},
    ),
    "ernie4_5": transformers.Ernie4_5Config(**SIZES, head_dim=10, tie_word_embeddings=True, rope_parameters=ROPE),
    "arcee": transformers.ArceeConfig(**SIZES, rope_parameters=ROPE),
    "seed-oss": transformers.SeedOssConfig(**SIZES, head_dim=10, attention_out_bias=True, rope_parameters=ROPE),
    "olmo2": transformers.Olmo2Config(**SIZES, rope_parameters=ROPE),
    "olmo3": transformers.Olmo3Config(**SIZES, sliding_window=6, rope_parameters=OLMO_ROPE),
    "olmoe": transformers.OlmoeConfig(**SIZES, num_experts=6, num_experts_per_tok=2, rope_parameters=ROPE),
    "ernie4_5-moe": transformers.Ernie4_5_MoeConfig(
        **SIZES, moe_num_experts=6, moe_k=2, moe_intermediate_size=12, moe_num_shared_experts=2,
        moe_layer_start_index=1, moe_layer_end_index=3, moe_layer_interval=2, rope_parameters=ROPE,
    ),
    "exaone4": transformers.Exaone4Config(**SIZES, sliding_window=6, rope_parameters=LLAMA3),
    "exaone4-full": transformers.Exaone4Config(**SIZES, sliding_window=None, layer_types=["full_attention"] * 4,
                                               rope_parameters=ROPE),
    "ministral": transformers.MinistralConfig(
        **SIZES, head_dim=12, sliding_window=5, layer_types=["full_attention", *["sliding_attention"] * 3],
        rope_parameters=ROPE,
    ),
    "cwm": transformers.CwmConfig(
        **{**SIZES, "bos_token_id": 1}, head_dim=12, sliding_window=6, rope_parameters=LLAMA3,
    ),
    "helium": transformers.HeliumConfig(**SIZES, head_dim=8, rope_parameters=ROPE),
    "gemma": transformers.GemmaConfig(**{**SIZES, "num_hidden_layers": 2}, head_dim=12, rope_parameters=ROPE),
    "nemotron": transformers.NemotronConfig(**SIZES, head_dim=12, rope_parameters=HALF),
    "stablelm": transformers.StableLmConfig(**SIZES, use_qkv_bias=True, rope_parameters=HALF),
    "internlm3": transformers.InternLM3Config(**SIZES, head_dim=12, rope_parameters=LLAMA3),
    "internlm3-biases": transformers.InternLM3Config(
        **SIZES, head_dim=12, attention_bias=True, mlp_bias=True, rope_parameters=ROPE
    ),
    "iquestcoder": transformers.IQuestCoderConfig(**SIZES, head_dim=12, rope_parameters=ROPE),
    "vaultgemma": transformers.VaultGemmaConfig(
        **SIZES, head_dim=8, sliding_window=7, query_pre_attn_scalar=20, attn_logit_softcapping=3.0,
        final_logit_softcapping=2.0, rope_parameters=ROPE,
    ),
    "youtu": transformers.YoutuConfig(**{**SIZES, **MLA, "pad_token_id": None}, q_lora_rank=20, rope_parameters=YARN),
    "dots1": transformers.Dots1Config(
        **SIZES, **GROUPS, n_shared_experts=2, norm_topk_prob=True, routed_scaling_factor=1.5, sliding_window=6,
        max_window_layers=2, rope_parameters=ROPE,
    ),
    "solar-open": transformers.SolarOpenConfig(
        **{key: size for key, size in SIZES.items() if key != "intermediate_size"},
        **{key: value for key, value in GROUPS.items() if key != "first_k_dense_replace"}, head_dim=12,
        routed_scaling_factor=1.5, rope_parameters=ROPE,
    ),
    "minimax-m2": transformers.MiniMaxM2Config(
        **SIZES, num_local_experts=6, num_experts_per_tok=2, head_dim=12, rope_parameters=HALF
    ),
    "minimax": transformers.MiniMaxConfig(
        **SIZES, num_local_experts=6, num_experts_per_tok=2, head_dim=12, block_size=5, rope_parameters=ROPE
    ),
    "minimax-factors": transformers.MiniMaxConfig(
        **SIZES, num_local_experts=4, sliding_window=7, rms_norm_eps=0.01, full_attn_alpha_factor=1.5,
        full_attn_beta_factor=0.7, linear_attn_alpha_factor=3, linear_attn_beta_factor=1.2, mlp_alpha_factor=2.5,
        mlp_beta_factor=0.8, layer_types=["linear_attention", "full_attention", *["linear_attention"] * 2],
        rope_parameters=LLAMA3,
    ),
    "flex-olmo": transformers.FlexOlmoConfig(**SIZES, num_experts=6, num_experts_per_tok=2, rope_parameters=ROPE),
    "jais2": transformers.Jais2Config(**SIZES, head_dim=12, rope_parameters=ROPE),
    "llama-biases": transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=ROPE),
    "ernie4_5-biases": transformers.Ernie4_5Config(**SIZES, head_dim=10, use_bias=True, rope_parameters=ROPE),
    "olmo2-biases": transformers.Olmo2Config(**SIZES, attention_bias=True, rope_parameters=ROPE),
    "afmoe": transformers.AfmoeConfig(
        **SIZES, **EXPERTS, num_experts=6, num_shared_experts=2, num_dense_layers=1, head_dim=12, sliding_window=6,
        mup_enabled=True, route_scale=1.5, rope_parameters=ROPE,
    ),
    "exaone-moe": transformers.ExaoneMoeConfig(
        **SIZES, **EXPERTS, num_experts=8, n_group=4, topk_group=2, num_shared_experts=2, sliding_window=6,
        routed_scaling_factor=1.5, rope_parameters=ROPE,
    ),
    "longcat": transformers.LongcatFlashConfig(
        **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", *LAST)}, **MLA,
        q_lora_rank=20, num_layers=2, ffn_hidden_size=40, moe_topk=3, n_routed_experts=4, zero_expert_num=3,
        expert_ffn_hidden_size=12, routed_scaling_factor=1.5, rope_parameters=ROPE, head_dim=8,
    ),
    "mimo-v2": transformers.MiMoV2FlashConfig(
        **SIZES, **EXPERTS, n_routed_experts=8, n_group=4, topk_group=2, head_dim=12, v_head_dim=8, sliding_window=6,
        layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"], routed_scaling_factor=1.5,
        rope_parameters={
            "full_attention": HALF,
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
    ),
    "kolibri": transformers.Kolibri1Config(
        **{name: size for name, size in SIZES.items() if name != "intermediate_size"}, **EXPERTS, num_experts=6,
        shared_expert_intermediate_size=20, head_dim=12, sliding_window=6, rope_parameters=ROPE,
        layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"],
    ),
    "hy-v3": transformers.HYV3Config(
        **SIZES, **EXPERTS, num_experts=6, num_shared_experts=2, head_dim=12, router_scaling_factor=1.5,
        rope_parameters=ROPE,
    ),
    "flint": transformers.FlintConfig(
        **SIZES, **EXPERTS, num_experts=6, shared_expert_intermediate_size=20, head_dim=12, sliding_window=6,
        rope_parameters=ROPE, layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"],
        mlp_only_layers=[1],
    ),
    "mellum": transformers.MellumConfig(
        **SIZES, **EXPERTS, num_experts=6, head_dim=12, sliding_window=6, rope_parameters=OLMO_ROPE,
        layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"],
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
    ),
    "aria": transformers.AriaTextConfig(
        **SIZES, moe_num_experts=6, moe_topk=2, moe_num_shared_experts=2, rope_parameters=ROPE
    ),
    "granite-swa": transformers.GraniteSWAConfig(
        **SIZES, **GRANITE, sliding_window=6, layer_rope_theta=[500.0, 0, 100, 0], rope_parameters=ROPE
    ),
    "granite-moe-swa": transformers.GraniteMoeSWAConfig(
        **SIZES, **GRANITE, num_local_experts=6, num_experts_per_tok=2, shared_intermediate_size=20, sliding_window=6,
        rope_parameters=ROPE,
    ),
    "cohere": transformers.CohereConfig(**SIZES, logit_scale=0.4, rope_parameters=ROPE),
    "cohere-plus": transformers.CohereConfig(
        **SIZES, logit_scale=0.4, use_qk_norm=True, layer_norm_eps=0.1, rope_parameters=ROPE
    ),
    "cohere2": transformers.Cohere2Config(
        **SIZES, logit_scale=0.4, sliding_window=6, tie_word_embeddings=False, rope_parameters=ROPE
    ),
    "cohere-compass": transformers.CohereCompassTextConfig(
        **SIZES, logit_scale=0.4, sliding_window=6, tie_word_embeddings=False,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"sliding_attention": {**ROPE, "mrope_section": [2, 1, 1]}, "full_attention": None},
    ),
    "cohere-compass-plain": transformers.CohereCompassTextConfig(
        **SIZES, attention_bias=True, rope_parameters={"full_attention": {**ROPE, "mrope_section": [2, 1, 1]}}
    ),
    "olmo": transformers.OlmoConfig(**SIZES, rope_parameters=ROPE),
    "hunyuan": transformers.HunYuanDenseV1Config(
        **SIZES, head_dim=12, rope_parameters={**ROPE, "rope_type": "dynamic", "factor": 1.0, "alpha": 3.0}
    ),
    "hunyuan-moe": transformers.HunYuanMoEV1Config(
        **SIZES, head_dim=12, num_experts=6, moe_topk=2, tie_word_embeddings=True, rope_parameters=YARN
    ),
    "hyperclovax": transformers.HyperCLOVAXConfig(**SIZES, **GRANITE, rope_parameters=ROPE),
    "glm": transformers.GlmConfig(**SIZES, head_dim=12, attention_bias=False, rope_parameters=HALF),
    "glm4": transformers.Glm4Config(**SIZES, head_dim=12, rope_parameters=HALF),
    "glm4-moe": transformers.Glm4MoeConfig(
        **SIZES, **{**GROUPS, "n_group": 1, "topk_group": 1}, head_dim=12, attention_bias=True, use_qk_norm=True,
        rope_parameters=HALF, routed_scaling_factor=1.5,
    ),
    "starcoder2": transformers.Starcoder2Config(**SIZES, sliding_window=9, rope_parameters=ROPE),
    "granite": transformers.GraniteConfig(**SIZES, **GRANITE, rope_parameters=ROPE),
    "granite-moe": transformers.GraniteMoeConfig(
        **SIZES, **GRANITE, num_local_experts=4, num_experts_per_tok=2, rope_parameters=ROPE
    ),
    "granite-moe-shared": transformers.GraniteMoeSharedConfig(
        **SIZES, **GRANITE, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=20,
        rope_parameters=ROPE,
    ),
    "granite-hybrid-dense": transformers.GraniteMoeHybridConfig(
        **SIZES, **GRANITE, **MAMBA, num_local_experts=0, shared_intermediate_size=28, position_embedding_type="rope",
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"], rope_parameters=ROPE,
    ),
    "granite-hybrid": transformers.GraniteMoeHybridConfig(
        **SIZES, **GRANITE, **MAMBA, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=20,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    ),
    "qwen3_5": transformers.Qwen3_5TextConfig(**SIZES, **DELTA, rope_parameters=MROPE),
    "qwen3_5-moe": transformers.Qwen3_5MoeTextConfig(
        **{name: size for name, size in SIZES.items() if name != "intermediate_size"}, **EXPERTS,
        **{**DELTA, "linear_key_head_dim": 8},
        num_experts=4, shared_expert_intermediate_size=20, rope_parameters=HALF,
    ),
    "nemotron-h": transformers.NemotronHConfig(
        **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"}, head_dim=10, mamba_num_heads=4,
        mamba_head_dim=12, n_groups=2, ssm_state_size=10, conv_kernel=3, chunk_size=8,
        layers_block_type=["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
    ),
    "nemotron-h-moe": transformers.NemotronHConfig(
        **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"}, head_dim=10, mamba_num_heads=4,
        mamba_head_dim=12, n_groups=2, ssm_state_size=10, conv_kernel=3, chunk_size=8, time_step_min=0.2,
        layers_block_type=["linear_attention", "moe", "mlp", "full_attention", "moe"], **NEMOTRON,
    ),
    "mamba2": transformers.Mamba2Config(**STATES, num_heads=4, head_dim=16, n_groups=2, state_size=10, conv_kernel=3,
                                        chunk_size=8),
    "mamba2-plain": transformers.Mamba2Config(
        **STATES, num_heads=6, head_dim=16, expand=3, n_groups=3, state_size=7, use_conv_bias=False,
        layer_norm_epsilon=0.01, tie_word_embeddings=True,
    ),
    "mamba": transformers.MambaConfig(**STATES, state_size=10, conv_kernel=3, time_step_rank=5),
    "mamba-plain": transformers.MambaConfig(
        **STATES, state_size=7, use_conv_bias=False, intermediate_size=52, layer_norm_epsilon=0.01,
        tie_word_embeddings=False,
    ),
    "falcon-mamba": transformers.FalconMambaConfig(
        **STATES, state_size=10, conv_kernel=3, expand=16, intermediate_size=72, mixer_rms_eps=0.1
    ),
    "falcon-mamba-even": transformers.FalconMambaConfig(
        **STATES, state_size=18, time_step_rank=3, layer_norm_epsilon=0.02, mixer_rms_eps=0.02,
        tie_word_embeddings=False,
    ),
    "jamba": transformers.JambaConfig(
        **SIZES, **JAMBA, num_experts=4, num_experts_per_tok=2, attn_layer_period=3, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1,
    ),
    "jamba-dense": transformers.JambaConfig(
        **SIZES, **{**JAMBA, "mamba_dt_rank": "auto", "mamba_conv_bias": False}, num_experts=1, attn_layer_period=4,
        attn_layer_offset=2, tie_word_embeddings=True, head_dim=12, rms_norm_eps=0.01,
    ),
    "recurrent-gemma": transformers.RecurrentGemmaConfig(
        **SIZES, lru_width=48, block_types=["recurrent", "attention"], attention_window_size=7, conv1d_width=3,
        logits_soft_cap=5.0,
    ),
    "recurrent-gemma-plain": transformers.RecurrentGemmaConfig(
        **{**SIZES, "num_key_value_heads": None, "intermediate_size": 51}, head_dim=12, attention_window_size=100,
        tie_word_embeddings=False, rms_norm_eps=0.01, rope_parameters=ROPE,
    ),
    "zamba2": transformers.Zamba2Config(
        **{**ZAMBA, "num_hidden_layers": 5}, num_mem_blocks=2, use_shared_attention_adapter=True, adapter_rank=3,
        use_mem_rope=True, layers_block_type=["mamba", "hybrid", "hybrid", "mamba", "hybrid"],
        rope_parameters=ROPE, time_step_min=0.2, rms_norm_eps=0.5,
    ),
    "zamba2-plain": transformers.Zamba2Config(
        **ZAMBA, adapter_rank=5, layers_block_type=["hybrid", "mamba", "hybrid", "mamba"], rms_norm_eps=0.3,
        hidden_act="silu",
    ),
    "hrm-text": transformers.HrmTextConfig(
        **{**HRM, "num_hidden_layers": 2}, head_dim=12, L_cycles=2, embedding_scale=3.0, rope_parameters=ROPE,
        rms_norm_eps=0.01,
    ),
    "hrm-text-biased": transformers.HrmTextConfig(
        **{**HRM, "num_hidden_layers": 1}, head_dim=8, H_cycles=3, L_cycles=1, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True, rope_parameters=YARN,
    ),
    "nemotron-h-latent": transformers.NemotronHConfig(
        **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"}, head_dim=10, mamba_num_heads=4,
        mamba_head_dim=12, n_groups=2, ssm_state_size=10, conv_kernel=3, chunk_size=8,
        layers_block_type=["linear_attention", "moe", "linear_attention", "full_attention", "moe"], **NEMOTRON,
        moe_latent_size=20,
    ),
    "llama4-plain": transformers.Llama4TextConfig(
        **SIZES, head_dim=12, intermediate_size_mlp=52, num_local_experts=4, moe_layers=[0], use_qk_norm=False,
        no_rope_layers=[1, 0, 1, 0], attn_temperature_tuning=False, tie_word_embeddings=True,
        rope_parameters={**LLAMA3, "high_freq_factor": 1.0},
        layer_types=["chunked_attention", "full_attention", "full_attention", "chunked_attention"],
        attention_chunk_size=6,
    ),
    "llama4-yarn": transformers.Llama4TextConfig(
        **SIZES, head_dim=12, intermediate_size_mlp=52, num_local_experts=4, interleave_moe_layer_step=2,
        rms_norm_eps=0.01, attention_chunk_size=7, rope_parameters=YARN,
    ),
    "llama4": transformers.Llama4TextConfig(
        **SIZES, head_dim=12, intermediate_size_mlp=52, num_local_experts=4, num_experts_per_tok=2,
        interleave_moe_layer_step=2, attention_chunk_size=7, floor_scale=5, attn_scale=0.3, rope_parameters=LLAMA3,
    ),
    "falcon-h1-normed": transformers.FalconH1Config(
        **SIZES, **MAMBA, mamba_d_ssm=64, mamba_rms_norm=True, head_dim=12, tie_word_embeddings=True,
        rope_parameters=ROPE,
    ),
    "falcon-h1-normed-last": transformers.FalconH1Config(
        **SIZES, **MAMBA, mamba_d_ssm=64, mamba_rms_norm=True, mamba_norm_before_gate=False, rope_parameters=ROPE,
    ),
    "falcon-h1": transformers.FalconH1Config(
        **SIZES, **MAMBA, **FALCON, mamba_d_ssm=64, head_dim=12, rope_parameters=ROPE,
    ),
    "deepseek-v2": transformers.DeepseekV2Config(
        **{**SIZES, **MLA}, **GROUPS, n_shared_experts=2, q_lora_rank=None, topk_method="group_limited_greedy",
        rope_parameters=YARN,
    ),
    "deepseek-v2-greedy": transformers.DeepseekV2Config(
        **{**SIZES, **MLA}, **{**GROUPS, "first_k_dense_replace": 0}, n_shared_experts=1, q_lora_rank=20,
        routed_scaling_factor=1.5, rope_parameters=ROPE,
    ),
    "deepseek-v3": transformers.DeepseekV3Config(
        **{**SIZES, **MLA}, **GROUPS, n_shared_experts=1, q_lora_rank=20,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "deepseek-v32": transformers.DeepseekV32Config(
        **{**SIZES, **MLA}, **GROUPS, **INDEXER, n_shared_experts=1, q_lora_rank=20,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "glm-moe-dsa": transformers.GlmMoeDsaConfig(
        **{**SIZES, **MLA}, **GROUPS, **INDEXER, n_shared_experts=1, q_lora_rank=20, rope_parameters=ROPE,
        indexer_types=["full", "shared", "full", "shared"],
    ),
    "glm-moe-dsa-all": transformers.GlmMoeDsaConfig(
        **{**SIZES, **MLA}, **GROUPS, **INDEXER, n_shared_experts=1, q_lora_rank=20, rope_parameters=ROPE,
    ),
    "glm4-moe-lite": transformers.Glm4MoeLiteConfig(
        **{**SIZES, **MLA}, **{key: value for key, value in GROUPS.items() if key != "first_k_dense_replace"},
        q_lora_rank=20, mlp_layer_types=["dense", "sparse", "dense", "sparse"], rope_parameters=ROPE,
    ),
    "minicpm3": transformers.MiniCPM3Config(
        **{**SIZES, **MLA}, q_lora_rank=20, scale_emb=3, dim_model_base=16, rope_parameters=ROPE,
    ),
    "minicpm": transformers.GraniteConfig(
        **SIZES, embedding_multiplier=3.0, residual_multiplier=0.35, logits_scaling=2.0, attention_multiplier=8**-0.5,
        tie_word_embeddings=True, rope_parameters=ROPE,
    ),
    "gpt-oss": transformers.GptOssConfig(
        **SIZES, head_dim=12, num_local_experts=4, num_experts_per_tok=2, sliding_window=6, swiglu_limit=0.7,
        rope_parameters={**YARN, "truncate": False},
    ),
    "lfm2": transformers.Lfm2Config(
        **SIZES, layer_types=LFM_LAYERS, block_multiple_of=12, block_ffn_dim_multiplier=1.5, rope_parameters=ROPE
    ),
    "lfm2-moe": transformers.Lfm2MoeConfig(
        **SIZES, **EXPERTS, layer_types=LFM_LAYERS, num_experts=4, num_dense_layers=1, routed_scaling_factor=1.5,
        rope_parameters=ROPE,
    ),
    "lfm3": transformers.Lfm3Config(
        **SIZES, head_dim=12, layer_types=LFM3_LAYERS, conv_L_cache=7, sliding_window=5,
        rope_parameters={"sliding_attention": ROPE, "full_attention": {**HALF, "rope_type": "proportional"}},
    ),
    "lfm3-plain": transformers.Lfm3Config(
        **SIZES, head_dim=8, layer_types=LFM_LAYERS, conv_L_cache=2, use_sandwich_norm=False, use_attention_gate=False,
        tie_word_embeddings=False, rope_parameters={"full_attention": YARN},
    ),
    "gpt-neox": transformers.GPTNeoXConfig(**GPT_SIZES, intermediate_size=40, rope_parameters=HALF),
    "gpt-neox-in-turn": transformers.GPTNeoXConfig(
        **GPT_SIZES, intermediate_size=40, use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True,
        hidden_act="gelu_new", rope_parameters={**HALF, "rope_type": "linear", "factor": 2.0},
    ),
    "gpt-neox-japanese": transformers.GPTNeoXJapaneseConfig(
        **{name: size for name, size in GPT_SIZES.items() if name != "intermediate_size"},
        intermediate_multiple_size=2, rope_parameters=HALF,
    ),
    "phi": transformers.PhiConfig(**SIZES, rope_parameters=HALF),
    "phi-normed": transformers.PhiConfig(
        **SIZES, qk_layernorm=True, layer_norm_eps=0.1, tie_word_embeddings=True, rope_parameters=HALF
    ),
    "persimmon": transformers.PersimmonConfig(
        **OWN_HEADS, rope_parameters=HALF,
        layer_norm_eps=0.1,
    ),
    "persimmon-plain": transformers.PersimmonConfig(
        **OWN_HEADS, rope_parameters=ROPE,
        qk_layernorm=False, hidden_act="gelu",
    ),
    "modernbert-decoder": transformers.ModernBertDecoderConfig(
        **BERT_SIZES, local_attention=12,
        layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"], norm_eps=0.1,
        rope_parameters={"full_attention": ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "modernbert-decoder-biased": transformers.ModernBertDecoderConfig(
        **BERT_SIZES, local_attention=12,
        attention_bias=True, mlp_bias=True, decoder_bias=False, tie_word_embeddings=False,
    ),
    "xglm": transformers.XGLMConfig(
        **TOKENS, d_model=32, ffn_dim=40, num_layers=4, attention_heads=4, max_position_embeddings=64
    ),
    "xglm-unscaled": transformers.XGLMConfig(
        **TOKENS, d_model=36, ffn_dim=40, num_layers=2, attention_heads=4, max_position_embeddings=64,
        scale_embedding=False, activation_function="relu", tie_word_embeddings=False,
    ),
    "gptj": transformers.GPTJConfig(**GPT, n_inner=40, rotary_dim=4),
    "codegen": transformers.CodeGenConfig(**GPT, rotary_dim=6, tie_word_embeddings=True),
    "openai-gpt": transformers.OpenAIGPTConfig(**GPT),
    "openai-gpt-untied": transformers.OpenAIGPTConfig(
        **{**GPT, "n_layer": 2}, afn="silu", tie_word_embeddings=False, layer_norm_epsilon=0.1
    ),
    "gpt2": transformers.GPT2Config(**GPT, n_inner=40),
    "gpt2-inverse": transformers.GPT2Config(**GPT, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
    "starcoder": transformers.GPTBigCodeConfig(**GPT, n_inner=40),
    "starcoder-heads": transformers.GPTBigCodeConfig(**GPT, multi_query=False, tie_word_embeddings=False),
    "gpt-neo": transformers.GPTNeoConfig(
        **{key: value for key, value in GPT_SIZES.items() if not key.startswith("num_")},
        num_layers=4, num_heads=4, intermediate_size=40, window_size=7, attention_types=[[["global", "local"], 2]],
    ),
    "opt": transformers.OPTConfig(**GPT_SIZES, ffn_dim=40),
    "opt-plain": transformers.OPTConfig(**GPT_SIZES, ffn_dim=40, enable_bias=False, tie_word_embeddings=False),
    "biogpt": transformers.BioGptConfig(**GPT_SIZES, intermediate_size=40),
    "falcon": transformers.FalconConfig(**GPT_SIZES, ffn_hidden_size=40, rope_parameters=ROPE),
    "falcon-heads": transformers.FalconConfig(
        **GPT_SIZES, multi_query=False, parallel_attn=False, bias=True, rope_parameters=ROPE
    ),
    "falcon-two-norms": transformers.FalconConfig(
        **GPT_SIZES, new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=40, rope_parameters=ROPE
    ),
    "falcon-grouped": transformers.FalconConfig(
        **GPT_SIZES, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, rope_parameters=ROPE
    ),
    "nanochat": transformers.NanoChatConfig(**SIZES, final_logit_softcapping=2.0, rope_parameters=ROPE),
    "nanochat-yarn": transformers.NanoChatConfig(
        **SIZES, rms_norm_eps=0.1,
        rope_parameters={**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "cohere2-moe": transformers.Cohere2MoeConfig(
        **SIZES, head_dim=12, num_experts=4, num_experts_per_tok=2, num_shared_experts=1, logit_scale=0.3,
        sliding_window=7, first_k_dense_replace=1, prefix_dense_intermediate_size=24, rope_parameters=ROPE,
    ),
    "cohere2-moe-sigmoid": transformers.Cohere2MoeConfig(
        **SIZES, head_dim=12, num_experts=4, num_experts_per_tok=2, num_shared_experts=2, logit_scale=0.3,
        sliding_window=7, expert_selection_fn="sigmoid", shared_expert_combination_strategy="sum", rms_norm_eps=1e-5,
        sliding_window_pattern=2, rope_parameters=ROPE,
    ),
    "olmo-hybrid": transformers.OlmoHybridConfig(
        **SIZES, linear_num_key_heads=2, rms_norm_eps=0.01,
        rope_parameters={"rope_type": "default", "rope_theta": None},
    ),
    "olmo-hybrid-rope": transformers.OlmoHybridConfig(
        **SIZES, linear_key_head_dim=10, linear_value_head_dim=12, linear_num_value_heads=8,
        linear_allow_neg_eigval=False, layer_types=["full_attention", "linear_attention"] * 2, rope_parameters=LLAMA3,
    ),
    "laguna": transformers.LagunaConfig(
        **SIZES, **EXPERTS, num_experts=6, shared_expert_intermediate_size=20, head_dim=12, sliding_window=6,
        num_attention_heads_per_layer=[4, 2, 6, 4], moe_routed_scaling_factor=1.5, moe_router_logit_softcapping=2.0,
        layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"],
        rope_parameters={"full_attention": HALF, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "laguna-elements": transformers.LagunaConfig(
        **SIZES, **EXPERTS, num_experts=4, shared_expert_intermediate_size=20, gating="per-element", head_dim=8,
        num_attention_heads_per_layer=[2, 8, 8, 2], mlp_layer_types=["sparse", "dense", "sparse", "dense"],
    ),
    "bloom": transformers.BloomConfig(**TOKENS, hidden_size=48, n_layer=3, n_head=6),
    "bloom-untied": transformers.BloomConfig(
        **TOKENS, hidden_size=32, n_layer=2, n_head=4, layer_norm_epsilon=0.1, tie_word_embeddings=False
    ),
    "mpt": transformers.MptConfig(**TOKENS, d_model=48, n_layers=3, n_heads=6, max_seq_len=64),
    "mpt-limited": transformers.MptConfig(
        **TOKENS, d_model=32, n_layers=3, n_heads=4, max_seq_len=64, layer_norm_epsilon=0.1, tie_word_embeddings=False,
        attn_config={"clip_qkv": 0.4, "softmax_scale": 0.7},
    ),
    "dbrx": transformers.DbrxConfig(
        **TOKENS, d_model=32, n_layers=3, n_heads=4, max_seq_len=64, rope_parameters=ROPE,
        attn_config={"clip_qkv": 0.6, "kv_n_heads": 2, "rope_theta": 500.0},
        ffn_config={"ffn_hidden_size": 20, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "dbrx-plain": transformers.DbrxConfig(
        **TOKENS, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, rope_parameters=LLAMA3,
        attn_config={"clip_qkv": 8, "kv_n_heads": 4, "rope_theta": 500.0},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 3, "moe_normalize_expert_weights": None,
                    "ffn_act_fn": {"name": "gelu"}},
    ),
    "olmo-limited": transformers.OlmoConfig(**SIZES, clip_qkv=0.5, attention_bias=True, rope_parameters=ROPE),
    "olmoe-limited": transformers.OlmoeConfig(
        **SIZES, num_experts=6, num_experts_per_tok=2, clip_qkv=0.5, norm_topk_prob=True, rope_parameters=ROPE
    ),
    "axk1": transformers.AXK1Config(
        **{**SIZES, **MLA}, **{key: value for key, value in GROUPS.items() if key != "first_k_dense_replace"},
        q_lora_rank=20, n_shared_experts=2, routed_scaling_factor=1.5,
        mlp_layer_types=["dense", "sparse", "dense", "sparse"], rope_parameters=YARN,
    ),
    "axk2": transformers.AXK2Config(
        **{**SIZES, **MLA}, **{key: GROUPS[key] for key in ("n_routed_experts", "num_experts_per_tok",
        "moe_intermediate_size")}, **INDEXER, q_lora_rank=20, gated_norm_rank=6, rope_parameters=ROPE,
    ),
    "axk2-groups": transformers.AXK2Config(
        **{**SIZES, **MLA}, **{key: value for key, value in GROUPS.items() if key != "first_k_dense_replace"},
        **INDEXER, q_lora_rank=12, gated_norm_rank=3, n_shared_experts=2, routed_scaling_factor=1.5,
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "hy-v4": transformers.HYV4Config(
        **{**SIZES, **MLA}, **{key: GROUPS[key] for key in ("n_routed_experts", "num_experts_per_tok",
        "moe_intermediate_size")}, **INDEXER, q_lora_rank=20, swiglu_limit=0.6, rope_parameters=ROPE,
    ),
    "hy-v4-three": transformers.HYV4Config(
        **{**SIZES, **MLA}, **{key: value for key, value in GROUPS.items() if key != "first_k_dense_replace"},
        **INDEXER, q_lora_rank=12, hc_mult=3, hc_magnitude=0.7, hc_eps=0.01, n_shared_experts=2, norm_topk_prob=False,
        mlp_layer_types=["sparse", "dense", "sparse", "dense"], indexer_types=["full", "shared", "full", "shared"],
        rms_norm_eps=0.01, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "kimi-linear": transformers.KimiLinearConfig(
        **{**SIZES, **MLA}, **KIMI, layer_types=["linear_attention", "full_attention"] * 2, rms_norm_eps=0.01
    ),
    "kimi-linear-groups": transformers.KimiLinearConfig(
        **{**SIZES, **MLA}, **{**KIMI, "linear_num_heads": 3}, n_group=4, topk_group=2, q_lora_rank=20,
        norm_topk_prob=False, n_shared_experts=2, mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    ),
    "bailing-hybrid": transformers.BailingHybridConfig(
        **{**SIZES, **MLA}, **{key: value for key, value in GROUPS.items() if key != "n_routed_experts"},
        num_local_experts=8, head_dim=8, layer_group_size=2, routed_scaling_factor=1.5, rope_parameters=ROPE,
    ),
    "bailing-hybrid-unbounded": transformers.BailingHybridConfig(
        **{**SIZES, **MLA}, **{key: value for key, value in GROUPS.items() if key != "n_routed_experts"},
        num_local_experts=8, head_dim=8, layer_group_size=3, kda_safe_gate=False, short_conv_kernel_size=2,
        n_shared_experts=2, rope_parameters=YARN,
    ),
    "phimoe": transformers.PhimoeConfig(
        **SIZES, num_local_experts=6, router_jitter_noise=0.2, sliding_window=7, rope_parameters=ROPE
    ),
    "phimoe-longrope": transformers.PhimoeConfig(
        **SIZES, num_local_experts=4, router_jitter_noise=0.01, attention_bias=True, lm_head_bias=True,
        rope_parameters={**LONG, "short_mscale": 1.3, "long_mscale": 1.2},
    ),
    "zaya": transformers.ZayaConfig(
        **ZAYA, num_attention_heads=4, num_key_value_heads=2, head_dim=12, router_hidden_size=20, cca_time1=3,
        sliding_window=7, layer_types=["hybrid", "hybrid_sliding", "hybrid_sliding", "hybrid"],
        rope_parameters={"hybrid": HALF, "hybrid_sliding": {**ROPE, "rope_theta": 100.0}},
    ),
    "zaya-one": transformers.ZayaConfig(
        **ZAYA, num_attention_heads=3, num_key_value_heads=1, head_dim=20, router_hidden_size=12, cca_time0=3,
        cca_time1=1, lm_head_bias=True, tie_word_embeddings=False, rms_norm_eps=0.01,
    ),
    "bitnet": transformers.BitNetConfig(**SIZES, rope_parameters=ROPE),
    "bitnet-tied": transformers.BitNetConfig(
        **SIZES, hidden_act="silu", tie_word_embeddings=True, rms_norm_eps=0.1, rope_parameters=LLAMA3
    ),
    "apertus": transformers.ApertusConfig(**SIZES, head_dim=10, rope_parameters=ROPE),
    "apertus-llama3": transformers.ApertusConfig(**SIZES),
    "apertus-relu2": transformers.ApertusConfig(**SIZES, hidden_act="relu2", rope_parameters=ROPE),
    "stablelm-parallel": transformers.StableLmConfig(
        **SIZES, use_qkv_bias=True, use_parallel_residual=True, rope_parameters=HALF
    ),
    "stablelm-normed": transformers.StableLmConfig(
        **SIZES, use_parallel_residual=True, qk_layernorm=True, layer_norm_eps=0.1, rope_parameters=HALF
    ),
}  # fmt: skip
BIASES = {
    "gemma3n": ("attention_bias",), "gemma4": ("attention_bias",), "deepseek-v2": ("attention_bias", "mlp_bias"),
    "deepseek-v3": ("attention_bias",), "deepseek-v32": ("attention_bias",), "glm4-moe-lite": ("attention_bias",),
    "minicpm3": ("attention_bias", "mlp_bias"), "qwen3-next": ("attention_bias",), "qwen3_5-moe": ("attention_bias",),
    "llama4": ("attention_bias",), "falcon-h1": ("attention_bias", "mlp_bias", "projectors_bias"),
    "ernie4_5-moe": ("use_bias",), "flex-olmo": ("attention_bias",), "vaultgemma": ("attention_bias",),
    "nemotron-h": ("use_bias", "mlp_bias"), "lfm2": ("conv_bias",), "lfm3": ("attention_bias", "conv_bias"),
    "bamba": ("mamba_proj_bias", "mlp_bias"), "bitnet": ("attention_bias",), "apertus": ("attention_bias",),
    "granite-hybrid": ("mamba_proj_bias",), "hy-v3": ("attention_bias", "mlp_bias"),
    "aria": ("attention_bias", "mlp_bias"), "afmoe": ("attention_bias",), "olmo-hybrid": ("attention_bias",),
    "mamba2": ("use_bias",), "mamba": ("use_bias",), "falcon-mamba": ("use_bias",), "jamba": ("mamba_proj_bias",),
    "laguna": ("attention_bias",), "axk1": ("attention_bias",), "axk2": ("attention_bias",),
    "hy-v4": ("attention_bias",),
    "kimi-linear": ("attention_bias",), "recurrent-gemma": ("attention_bias",), "zaya": ("attention_bias",),
}  # fmt: skip
"""The biases of further models, which are otherwise those of these names."""


def biased(name):
    config = copy.deepcopy(MODELS[name])
    for key in BIASES[name]:
        setattr(config, key, True)
    if hasattr(config, "attention_in_multiplier"):  # beside which biases are not computed
        config.attention_in_multiplier = 1.0
    return config


MODELS |= {f"{name}-biased": biased(name) for name in BIASES}


@dataclass(frozen=True)
class SameArithmetic:
    """A model that transformers lacks, or does not run without an encoder of images, computed by another.

    without: the keys that are left out of the other's configuration. own: those that replace them. modules: the modules
    of the other for each own one, whose rows it stacks: as often as ``groups`` in turns. zeros: ends of the names of
    the other's tensors that are 0. doubled: an own module whose weights are doubled in the other.
    """

    without: tuple = ()
    own: dict = field(default_factory=dict)
    modules: dict = field(default_factory=dict)
    groups: int = 1
    zeros: tuple = ()
    doubled: str = "-"

    def parts(self, names):
        """{own name: the names of the other's tensors that it stacks}, the tensors that are zeros under None."""
        order = [module for modules in self.modules.values() for module in modules]
        found = {}
        for name in sorted(names, key=lambda name: [f".{module}." in f".{name}." for module in reversed(order)]):
            own = f".{name}."
            for new, modules in self.modules.items():
                for module in modules:
                    own = own.replace(f".{module}.", f".{new}.")
            found.setdefault(None if name.endswith(self.zeros or "-") else own[1:-1], []).append(name)
        return found

    def shapes(self, shapes):
        """{own name: shape} for the shapes of the other."""
        return {
            own: [sum(shapes[name][0] for name in names), *shapes[names[0]][1:]]
            for own, names in self.parts(shapes).items() if own
        }  # fmt: skip

    def as_other(self, shapes, tensors):
        """The tensors of the other, of these shapes, for own ones."""
        found = {}
        for own, names in self.parts(shapes).items():
            if own is None:
                found |= {name: np.zeros(shapes[name], "<f4") for name in names}
                continue
            groups = self.groups if len(names) > 1 else 1
            rows = tensors[own].reshape(groups, -1, *shapes[names[0]][1:])
            ends = np.cumsum([shapes[name][0] // groups for name in names])
            factor = np.float32(2 if self.doubled in own else 1)
            for name, part in zip(names, np.split(rows, ends[:-1], axis=1), strict=True):
                found[name] = np.ascontiguousarray(part).reshape(shapes[name]) * factor
        return found


_QWEN2_MOE = (
    "norm_topk_prob", "sliding_window", "use_sliding_window", "max_window_layers", "decoder_sparse_step", "num_experts",
    "mlp_only_layers", "shared_expert_intermediate_size", "layer_types", "qkv_bias", "output_router_logits",
    "router_aux_loss_coef",
)  # fmt: skip
_QWEN2_MOE_ZEROS = ("_proj.bias", "shared_expert_gate.weight")  # without a bias; half of the shared expert
_SHARED = {f"mlp.shared_experts.{name}_proj": (f"mlp.shared_expert.{name}_proj",) for name in ("gate", "up", "down")}
_BAILING = {
    "attention.query_key_value": tuple(f"self_attn.{name}_proj" for name in "qkv"),
    "attention.dense": ("self_attn.o_proj",),
    "word_embeddings": ("embed_tokens",),
}
SAME_ARITHMETIC = {
    "minicpm": SameArithmetic(
        ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"),
        {"model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"], "scale_emb": 3.0, "scale_depth": 0.7,
         "dim_model_base": 16},
    ),
    "qwen3-vl-moe": SameArithmetic(
        ("norm_topk_prob", "sliding_window", "use_sliding_window"),
        {"model_type": "qwen3_vl_moe_text", "architectures": ["Qwen3VLMoeForConditionalGeneration"]},
    ),
    "exaone": SameArithmetic(
        ("num_hidden_layers", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias"),
        {"model_type": "exaone", "architectures": ["ExaoneForCausalLM"], "num_layers": 4, "layer_norm_epsilon": 1e-6,
         "activation_function": "silu"},
        {"transformer.wte": ("model.embed_tokens",), "transformer.ln_f": ("model.norm",),
         "transformer.h": ("model.layers",),
         **{f"attn.attention.{name}_proj": (f"self_attn.{name}_proj",) for name in "qkv"},
         "attn.attention.out_proj": ("self_attn.o_proj",), "mlp.c_fc_0": ("mlp.gate_proj",),
         "mlp.c_fc_1": ("mlp.up_proj",), "mlp.c_proj": ("mlp.down_proj",),
         "ln_1": ("input_layernorm",), "ln_2": ("post_attention_layernorm",)},
    ),
    "internlm2": SameArithmetic(
        ("attention_bias", "mlp_bias"),
        {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "bias": False},
        {"attention.wqkv": tuple(f"self_attn.{name}_proj" for name in "qkv"), "attention.wo": ("self_attn.o_proj",),
         "model.tok_embeddings": ("model.embed_tokens",), "output": ("lm_head",), "feed_forward.w1": ("mlp.gate_proj",),
         "feed_forward.w3": ("mlp.up_proj",), "feed_forward.w2": ("mlp.down_proj",),
         "attention_norm": ("input_layernorm",), "ffn_norm": ("post_attention_layernorm",)},
        groups=SIZES["num_key_value_heads"],
    ),
    "deepseek": SameArithmetic(
        _QWEN2_MOE,
        {"model_type": "deepseek", "architectures": ["DeepseekForCausalLM"], "n_routed_experts": 6,
         "n_shared_experts": 2, "first_k_dense_replace": 1},
        _SHARED,
        zeros=_QWEN2_MOE_ZEROS,
        doubled="shared_experts.down_proj",
    ),
    "bailing": SameArithmetic(
        _QWEN2_MOE,
        {"model_type": "bailing_moe", "architectures": ["BailingMoeForCausalLM"], "num_experts": 6,
         "num_shared_experts": 2, "use_bias": False},
        {**_SHARED, **_BAILING},
        zeros=_QWEN2_MOE_ZEROS,
        doubled="shared_experts.down_proj",
    ),
    "bailing2": SameArithmetic(
        ("n_routed_experts", "n_shared_experts", "attention_bias", "norm_topk_prob", "num_nextn_predict_layers"),
        {"model_type": "bailing_moe_v2", "architectures": ["BailingMoeV2ForCausalLM"], "num_experts": 8,
         "num_shared_experts": 1},
        {**_BAILING, "attention.query_layernorm": ("self_attn.q_norm",),
         "attention.key_layernorm": ("self_attn.k_norm",), "expert_bias": ("e_score_correction_bias",)},
    ),
}  # fmt: skip


BUFFERS = ("_decay", "slope_rate")
"""The ends of the names of tensors that follow from a configuration, which transformers computes again."""


def record(config, folder, num_tokens, same):
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith(BUFFERS)}
    written = json.loads((folder / "config.json").read_text())
    own = same.shapes(shapes)
    write_model(folder, written, same.as_other(shapes, random_tensors(own)))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    ids = np.random.default_rng(1).integers(3, config.vocab_size, num_tokens)
    kept = last_logits(model.eval(), ids)
    changed = {k: v for k, v in written.items() if k not in same.without} | same.own
    found = {"config": changed, "shapes": own, "token_ids": ids.tolist(), "last_logits": kept}
    if getattr(config, "prefix_lm", False):
        found["prefixes"] = {n: with_prefix(model, ids, n) for n in PREFIXES}
    return found


def last_logits(model, ids, **inputs):
    with torch.no_grad():
        logits = model(torch.tensor(ids[None]), **inputs).logits[0, -KEPT:].numpy()
    return [[float(f"{x:.7g}") for x in row] for row in logits]


def with_prefix(model, ids, count):
    """The last logits of all tokens, the first of which see each other, and the greedy tokens after these alone."""
    types, prompt = torch.arange(len(ids))[None] < count, torch.tensor(ids[None, :count])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), token_type_ids=torch.ones_like(prompt), do_sample=False,
        max_new_tokens=NUM_GREEDY, eos_token_id=None,
    )  # fmt: skip
    return {"last_logits": last_logits(model, ids, token_type_ids=types.long()), "greedy": output[0, count:].tolist()}


def main():
    here = Path(__file__).parent
    old = json.loads((here / "tiny.json").read_text())["models"]
    recorded = {}
    for name, config in MODELS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            recorded[name] = old[name]
            continue
        with tempfile.TemporaryDirectory() as folder:
            same = SAME_ARITHMETIC.get(name, SameArithmetic())
            recorded[name] = record(config, Path(folder), MORE_TOKENS.get(name, NUM_TOKENS), same)
        spread = np.std(recorded[name]["last_logits"])
        print(f"{name}: {len(recorded[name]['shapes'])} tensors, logits vary by {spread:.3f}")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in recorded.items())
    (here / "tiny.json").write_text(f'{{"transformers": "{transformers.__version__}", "models": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
