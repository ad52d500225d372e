"""Tiny random models of every causal model type of transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCAB_SIZE, LENGTH, WINDOW = 96, 128, 8

SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim", "dim_model"), 32
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "num_decoder_layers"), 4
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2
    ),
    **dict.fromkeys(("swa_num_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(
        ("head_dim", "attention_head_dim", "dim_head", "kv_channels", "swa_head_dim", "global_head_dim"), 8
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "dim_ff"), 48),
    **dict.fromkeys(("ffn_hidden_dim", "encoder_ffn_dim", "dff", "feed_forward_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_total"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "v_head_dim": 4,
    "n_shared_experts": 1,
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), LENGTH),
    **dict.fromkeys(("sliding_window", "attention_window", "window_size", "sliding_window_size"), WINDOW),
    "attention_chunk_size": WINDOW,
    "num_kv_shared_layers": 2,
    "is_decoder": True,
    "use_cache": False,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1),
    **dict.fromkeys(("encoder_layers", "vision_layers"), 1),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_num_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_head_dim"), 8),
    "mamba_n_groups": 2,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 8,
}
"""Sizes by the names that configurations have for them."""

OPTIONAL = frozenset({"head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_shared_experts"})
"""Sizes that a model needs although the default of some configurations is None."""

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
OWN: dict[str, dict[str, Any]] = {
    **{key: {"rotary_dim": 4} for key in ("gptj", "codegen")},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "xlm": {"causal": True},
    "zamba": {"layers_block_type": ["linear_attention"] * 2 + ["hybrid"] * 2},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8},
    "falcon_h1": {"mamba_n_heads": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "n_groups": 2, "chunk_size": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"lru_width": 32},
    "xlstm": {"num_blocks": 4, "chunk_size": 8, "hidden_size": 128},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_ngroups": 2, "chunk_size": 8},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"] * 2, "hash_seed": 0},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    **{name: {"sliding_window": WINDOW} for name in ("mistral", "mixtral", "phi3", "phimoe", "starcoder2")},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "xmod": {"default_language": "en_XX"},
}
"""Further sizes of single types."""


def causal_types() -> list[str]:
    """Return all model types with a causal language model."""
    return sorted(config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING)


def causal_class(model_type: str) -> type[PreTrainedModel]:
    """Return the class of models of a type."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return found[0] if isinstance(found, tuple) else found


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a configuration of the type with every size made small."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    chosen = _chosen(default, OWN.get(model_type, {}))
    for name, part in kind.sub_configs.items():
        of_part = getattr(default, name, None) or (None if part is AutoConfig else part())
        if of_part is not None and name not in chosen:
            chosen[name] = _chosen(of_part, OWN.get(of_part.model_type, {}))
    return kind(**chosen)


def _chosen(default: PreTrainedConfig, own: dict[str, Any]) -> dict[str, Any]:
    given, names = default.to_dict(), default.attribute_map
    chosen = {
        name: size
        for name, size in SIZES.items()
        if (at := names.get(name, name)) in given and (given[at] is not None or name in OPTIONAL)
    }
    if "kv_lora_rank" in chosen:  # MLA: keys are made for every head
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    kinds = sorted(set(given.get("layer_types") or ()))
    if len(kinds) == 2 and all(kind.endswith("attention") for kind in kinds):
        chosen["layer_types"] = [kinds[i % 2] for i in range(4)]
    return chosen | own


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """Return a model with weights large enough that every token depends on all that it attends to."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0, weight.shape[-1] ** -0.5 if "embed" not in name else 1.0)
            elif weight.ndim == 1 and name.endswith("bias"):
                weight.normal_(0, 0.1)
    return model
