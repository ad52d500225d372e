"""Random other sizes, options and layers of a tiny model's configuration, equal for equal seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from foreword.models.families import FAMILIES

Config = dict[str, Any]

CHOICES: Mapping[str, Sequence[object]] = {
    "vocab_size": (48, 97, 199),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp"), (24, 40, 52, 61, 88)),
    **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), (8, 12, 20, 34)),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), (0, 12, 20, 36)),
    **dict.fromkeys(("sliding_window", "window_size"), (1, 2, 3, 7, 100)),
    "mamba_inner": (24, 52, 88),
    "mamba_dt_rank": (1, 3, 8),
    "attention_chunk_size": (3, 5, 16),
    **dict.fromkeys(
        ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "mixer_rms_eps"), (1e-6, 1e-5, 1e-2)
    ),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), (6, 10, 16)),
    "qk_rope_head_dim": (4, 8, 12),
    **dict.fromkeys(
        ("conv_L_cache", "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv1d_width"), (1, 2, 3, 4)
    ),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), (6, 8, 12)),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), (4, 8, 18)),
    **dict.fromkeys(("moe_num_shared_experts", "n_shared_experts", "num_shared_experts"), (0, 1, 2, 3)),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), (1, 2, 3)),
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts"), (3, 4, 5, 8)),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), (0, 1, 2)),
    **dict.fromkeys(("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"), (1, 2)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap"), (1.5, 30.0)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), (1.0, 0.4, 2.5)),
    "attention_multiplier": (0.1, 0.5),
    "query_pre_attn_scalar": (7, 30),
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor", "route_scale"), (1.0, 2.5)),
    "moe_routed_scaling_factor": (1.0, 2.5),
    "logit_scale": (0.3, 1.5),
    "laurel_rank": (3, 10),
    "altup_num_inputs": (2, 3, 4, 8),
    "hidden_size_per_layer_input": (4, 6, 10),
    "attn_scale": (0.1, 0.5),
    "block_ffn_dim_multiplier": (0.7, 1.0, 1.5),
    "block_multiple_of": (4, 12, 32),
    "mamba_expand": (1, 2, 3),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), (4, 8, 256)),
    **dict.fromkeys(("cca_time0", "cca_time1"), (1, 2, 3)),
    "router_hidden_size": (8, 20, 34),
    "swiglu_alpha": (1.0, 1.702),
    "moe_norm_min": (1e-12, 0.3),
    "index_topk": (2, 5, 9),
    "gated_norm_rank": (1, 6, 40),
    "index_n_heads": (1, 4, 12),
    "index_head_dim": (14, 20),
    "hc_mult": (1, 2, 3, 5),
    "hc_magnitude": (0.7, 2.0),
    "hc_eps": (0.0, 1e-6, 0.1),
    "zero_expert_num": (1, 3),
    "linear_head_dim": (6, 8, 10),
    "short_conv_kernel_size": (2, 3, 4),
    "attention_value_scale": (0.5, 0.707, 1.0),
    **dict.fromkeys(("linear_attn_alpha_factor", "linear_attn_beta_factor"), (1, 0.8, 2.5)),
    **dict.fromkeys(("mlp_alpha_factor", "mlp_beta_factor"), (1, 0.8, 2.5)),
    "clip_qkv": (0.5, 8.0),
    "time_step_rank": (1, 2, 3),
    "state_size": (8, 10, 18),
    **dict.fromkeys(("use_double_wide_mlp", "mup_enabled", "use_attention_gate", "use_sandwich_norm"), (True, False)),
    **dict.fromkeys(("block_auto_adjust_ff_dim", "moe_renormalize"), (True, False)),
    "max_window_layers": (0, 1, 3),
    "swiglu_limit": (0.5, 7.0),
    "max_position_embeddings": (64, 65),
    "tie_word_embeddings": (True, False),
    **dict.fromkeys(("norm_topk_prob", "attention_out_bias", "use_bias", "use_qkv_bias", "qkv_bias"), (True, False)),
    **dict.fromkeys(("use_qk_norm", "mamba_conv_bias", "conv_bias", "use_sliding_window"), (True, False)),
    **dict.fromkeys(("qk_layernorm", "use_parallel_residual", "use_post_norm", "use_conv_bias"), (True, False)),
    **dict.fromkeys(("mamba_rms_norm", "mamba_norm_before_gate", "use_expert_bias"), (True, False)),
    "linear_allow_neg_eigval": (True, False),
    **dict.fromkeys(("altup_correct_scale", "attention_k_eq_v", "attn_temperature_tuning"), (True, False)),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "key_multiplier"), (1.0, 0.6, 1.7)),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier", "lm_head_multiplier"), (1.0, 0.5, 1.4)),
    **dict.fromkeys(("q_lora_rank", "moe_latent_size"), (12, 18)),
    **dict.fromkeys(("adapter_rank", "num_mem_blocks"), (1, 2, 3)),
    **dict.fromkeys(("use_mem_rope", "use_shared_attention_adapter"), (True, False)),
    **dict.fromkeys(("scale_emb", "scale_depth", "embedding_scale"), (1.0, 0.7, 2.5)),
    **dict.fromkeys(("dim_model_base", "floor_scale"), (4, 16)),
    "time_step_min": (0.001, 0.2),
    "topk_method": ("greedy", "group_limited_greedy"),
    "rotary_dim": (2, 4, 6, 8),
    **dict.fromkeys(("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "multi_query", "bias"), (True, False)),
    **dict.fromkeys(("reorder_and_upcast_attn", "enable_bias", "scale_embedding", "parallel_attn"), (True, False)),
    "num_ln_in_parallel_attn": (1, 2),
    "prefix_dense_intermediate_size": (20, 36),
    "expert_selection_fn": ("softmax", "sigmoid"),
    "router_jitter_noise": (0.0, 0.01, 0.3),
    "gating": (True, "per-head", "per-element"),
    "moe_router_logit_softcapping": (0.0, 1.5),
    "shared_expert_combination_strategy": ("average", "sum"),
    **dict.fromkeys(("sliding_window_pattern", "prefix_dense_sliding_window_pattern"), (1, 2, 3)),
}
"""Values of keys under their usual names, of which each is drawn half of the time. Keys with null keep it."""
RARE: Mapping[str, Sequence[object]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), (True, False)),
    **dict.fromkeys(("rope_interleave", "prefix_lm"), (True, False)),
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("silu", "gelu_pytorch_tanh", "gelu", "relu")),
    "position_embedding_type": ("rope", None),
    **dict.fromkeys(("alibi", "do_layer_norm_before", "layer_norm_elementwise_affine"), (True, False)),
    "word_embed_proj_dim": (16, 24),
}
"""Values of keys, drawn less often, since many types refuse them."""
ROTARY: Sequence[Config] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 12, "beta_fast": 4.0, "beta_slow": 0.5,
     "attention_factor": 1.3},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
)  # fmt: skip
_OF_ZAMBA = ("head_dim", "attention_hidden_size", "hybrid_layer_ids", "kv_channels", "num_query_groups")
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "activation_sparsity_pattern",
         "layer_rope_theta", "indexer_types")  # fmt: skip
"""Keys with a value per layer."""


def drawn(config: Config, seed: int) -> Config:
    """Return another configuration of the same type. It may be one that transformers does not take."""
    rng = np.random.default_rng(seed)
    usual = FAMILIES[config["model_type"]].other_names

    def pick(values: Sequence[Any]) -> Any:
        return values[int(rng.integers(len(values)))]

    found = {usual.get(name, name): value for name, value in config.items()}
    is_zamba = found["model_type"].startswith("zamba")
    for name in _OF_ZAMBA if is_zamba else ():  # which follow from others
        found.pop(name, None)
    eps = found.get("rms_norm_eps")
    for choices, share in ((CHOICES, 0.5), (RARE, 0.05)):
        for key, values in choices.items():
            if isinstance(found.get(key), bool | int | float | str) and rng.random() < share:
                found[key] = pick(values)
    if found["model_type"] == "zaya":  # which takes no other number
        found["num_experts_per_tok"] = 1
    if is_zamba:  # where rounding errors of averages would be as large as these
        found["rms_norm_eps"] = eps
    if found.get("use_sliding_window"):
        found["sliding_window"] = pick((2, 5))
    if found["model_type"].startswith("gemma4"):  # which has a row for each token
        found["vocab_size_per_layer_input"] = found["vocab_size"]
    _heads(found, pick)
    _groups_of_experts(found, pick)
    _states(found, pick)
    if not found.get("num_kv_shared_layers") and not found.get("per_layer_config"):
        _layers(found, pick)
    _rotary(found, pick)
    own = {usual.get(name, name): name for name in config}
    return {own.get(name, name): value for name, value in found.items()}


def _heads(found: Config, pick: Callable[[Sequence[Any]], Any]) -> None:
    if "num_attention_heads" not in found:  # states alone
        found["hidden_size"] = pick((24, 32, 48))
        return
    before = found.get("hidden_size")
    heads = found["num_attention_heads"] = pick((4, 8) if found["model_type"] == "codegen" else (1, 2, 3, 4, 6, 8))
    if "kv_lora_rank" in found:
        rotary = found["qk_rope_head_dim"]
        sizes = {"num_key_value_heads": heads, "head_dim": rotary, "qk_head_dim": found["qk_nope_head_dim"] + rotary}
        found |= {key: size for key, size in sizes.items() if key in found}
        found["hidden_size"] = pick((24, 32, 40, 64, 96))
        return
    if "multi_query" in found and not found.get("new_decoder_architecture"):  # which says how many it has
        found["num_key_value_heads"] = 1 if found["multi_query"] else heads
    elif "num_key_value_heads" in found:
        found["num_key_value_heads"] = pick([n for n in range(1, heads + 1) if heads % n == 0])
        if found.get("use_shared_attention_adapter"):  # its outputs are as many as those of queries
            found["num_key_value_heads"] = heads
    size = pick((4, 8, 10, 12, 16, 20, 24))
    if found.get("head_dim") and found["model_type"] not in ("llama", "qwen2", "minicpm", "aria_text", "cohere2"):
        found |= {"head_dim": size, "hidden_size": pick((24, 32, 40, 64, 96))}
    else:
        found |= {"hidden_size": heads * size, **({"head_dim": size} if "head_dim" in found else {})}
    if "num_layers_per_stack" in found:
        found["hidden_size"] = heads * pick((4, 8, 12))
    if found.get("word_embed_proj_dim") == before:
        found["word_embed_proj_dim"] = found["hidden_size"]


def _groups_of_experts(found: Config, pick: Callable[[Sequence[Any]], Any]) -> None:
    if not found.get("n_group"):
        return
    groups, size = pick((1, 2, 4)), pick((2, 3))
    found |= {"n_group": groups, "topk_group": pick(range(1, groups + 1)), "n_routed_experts": groups * size}
    found["num_experts_per_tok"] = pick(range(1, min(4, found["topk_group"] * size + 1)))


def _states(found: Config, pick: Callable[[Sequence[Any]], Any]) -> None:
    if "lru_width" in found:
        found["lru_width"] = found["num_attention_heads"] * pick((4, 8, 12))
        found["block_types"] = pick((1, 2, 3)) * ["recurrent"] + pick((1, 2)) * ["attention"]
    if "linear_num_key_heads" in found:
        found["linear_num_key_heads"] = keys = pick((1, 2, 3))
        found["linear_num_value_heads"] = keys * pick((1, 2))
    names = ("mamba_n_groups", "mamba_n_heads", "mamba_d_head"), ("n_groups", "mamba_num_heads", "mamba_head_dim")
    for groups, heads, size in names:
        if heads not in found:
            continue
        found[groups] = pick((1, 2))
        if "mamba_expand" in found and "mamba_d_ssm" not in found:  # the sizes follow from the hidden size
            inner = found["mamba_expand"] * found["hidden_size"]
            found[heads] = pick([n for n in (2, 4, 6, 8) if inner % n == 0])
            found[size] = inner // found[heads]
        else:
            found |= {heads: found[groups] * pick((1, 2, 3)), size: pick((6, 8, 12))}
        if "mamba_d_ssm" in found:
            found["mamba_d_ssm"] = found[heads] * found[size]


def _layers(found: Config, pick: Callable[[Sequence[Any]], Any]) -> None:
    lists = {key: found[key] for key in LISTS if found.get(key)}
    count = pick((2, 3, 4, 5))
    if "num_hidden_layers" in found:
        found["num_hidden_layers"] = count
    if "num_layers_per_stack" in found:
        cycles = found["H_cycles"], found["L_cycles"] = pick((1, 2, 3)), pick((1, 2))
        found["num_layers_per_stack"] = own = pick((1, 2))
        found["num_hidden_layers"] = own * cycles[0] * (cycles[1] + 1)
    for part in ("attn", "expert"):
        if f"{part}_layer_period" in found:
            found[f"{part}_layer_period"] = period = pick((1, 2, 3))
            found[f"{part}_layer_offset"] = pick(range(period))
    for key, kinds in lists.items():
        found[key] = [pick(kinds) for _ in range(count)]
        if "full_attention" in kinds:
            found[key][pick(range(count))] = "full_attention"
        if key == "indexer_types":
            found[key][0] = "full"
    if found.get("attention_types"):
        kinds = [pick(("global", "local")) for _ in range(pick((1, count)))]
        found["attention_types"] = [[kinds, times := pick((1, 2))]]
        found |= {"attention_layers": kinds * times, "num_hidden_layers": len(kinds) * times}
    if isinstance(found.get("intermediate_size"), list):
        found["intermediate_size"] = [pick((24, 40, 52)) for _ in range(count)]
    if found.get("num_attention_heads_per_layer"):
        kv_heads = found["num_key_value_heads"]
        found["num_attention_heads_per_layer"] = [kv_heads * pick((1, 2, 3)) for _ in range(count)]
    for key in ("attn_layer_indices", "moe_layers", "mlp_only_layers"):
        if found.get(key):
            found[key] = sorted({pick(range(count)), pick(range(count))})


def _rotary(found: Config, pick: Callable[[Sequence[Any]], Any]) -> None:
    old, rule = found.get("rope_parameters"), {"rope_theta": pick((100.0, 1e4)), **pick(ROTARY)}
    if not old or old.get("rope_type") == "longrope" or found["model_type"] in ("phimoe", "recurrent_gemma"):
        return
    if "full_attention" in old:
        if old["full_attention"] is None:  # such layers do not rotate
            return
        own = old["full_attention"] | pick(({"rope_theta": rule["rope_theta"]}, rule))
        # In other families, the types but this one rotate whole heads.
        if own.get("rope_type") != "proportional" and found["model_type"] != "laguna":
            own.pop("partial_rotary_factor", None)
        found["rope_parameters"] = {**old, "full_attention": own}
        return
    if "hybrid" in old:
        parts = {"partial_rotary_factor": pick((0.5, 1.0))}
        found["rope_parameters"] = {**old, "hybrid": {**rule, **parts}}
        return
    kept = {key: old[key] for key in ("llama_4_scaling_beta",) if key in old}
    if old.get("partial_rotary_factor", 1.0) != 1:
        kept["partial_rotary_factor"] = pick((0.25, 0.5, 1.0))
    found["rope_parameters"] = {**kept, **rule}
