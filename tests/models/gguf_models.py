"""The tiny models as GGUF files: names, metadata and conventions of converters, written out by hand."""

import math
import re
from statistics import NormalDist

import numpy as np

from foreword.models.families import FAMILIES, OF_CLASSES
from foreword.models.quants import Quant
from models import gguf_writer

# model_type → general.architecture
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "smollm3": "smollm3", "phi3": "phi3", "qwen2": "qwen2",
    "qwen3": "qwen3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "qwen3_next": "qwen3next", "ernie4_5": "ernie4_5", "arcee": "arcee", "seed_oss": "seed_oss", "olmo2": "olmo2",
    "olmo3": "olmo2", "glm4": "glm4", "starcoder2": "starcoder2", "granite": "granite", "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe", "granitemoehybrid": "granitehybrid", "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe", "lfm2": "lfm2", "nemotron_h": "nemotron_h", "lfm2_moe": "lfm2moe",
    "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "minicpm3": "minicpm3",
    "deepseek_v32": "deepseek32", "glm_moe_dsa": "glm-dsa",
    "minicpm": "minicpm", "llama4_text": "llama4", "falcon_h1": "falcon-h1", "glm4_moe": "glm4moe",
    "gemma4_text": "gemma4", "gemma3n_text": "gemma3n", "ernie4_5_moe": "ernie4_5-moe", "olmoe": "olmoe",
    "ministral3": "mistral3", "qwen2_vl_text": "qwen2vl", "qwen2_5_vl_text": "qwen2vl", "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "dots1": "dots1", "minimax_m2": "minimax-m2", "afmoe": "afmoe", "cohere": "command-r", "cohere2": "cohere2",
    "olmo": "olmo", "hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe",
    "exaone4": "exaone4", "gemma": "gemma", "nemotron": "nemotron", "stablelm": "stablelm", "jais2": "jais2",
    "internlm3": "llama", "iquestcoder": "llama", "youtu": "deepseek2", "solar_open": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "bitnet": "bitnet", "apertus": "apertus",
    "exaone": "exaone", "internlm2": "internlm2", "deepseek": "deepseek", "bailing_moe": "bailingmoe",
    "bailing_moe_v2": "bailingmoe2", "glm": "chatglm", "laguna": "laguna", "mellum": "mellum",
    "cohere2_moe": "cohere2moe", "mimo_v2_flash": "mimo2", "exaone_moe": "exaone-moe", "phimoe": "phimoe",
    "mamba2": "mamba2", "mamba": "mamba", "falcon_mamba": "mamba", "jamba": "jamba",
    "gpt_neox": "gptneox", "gpt2": "gpt2", "gpt_bigcode": "starcoder", "falcon": "falcon", "phi": "phi2",
    "bloom": "bloom", "mpt": "mpt", "dbrx": "dbrx",
    "kimi_linear": "kimi-linear", "bailing_hybrid": "bailingmoe3", "eurobert": "eurobert",
}  # fmt: skip
# Models of the same model_type: with experts, for embeddings.
MORE_ARCHITECTURES = {"nemotron_h_moe", "gemma-embedding"}
# test_mmproj.py compares decoders of images together with their encoders, test_pooling_models.py those of embeddings.
ELSEWHERE = {"qwen2vl", "qwen3vl", "gemma-embedding", "eurobert"}
INTERLEAVED = {
    "llama",
    "smollm3",
    "arcee",
    "granite",
    "granitemoe",
    "granitehybrid",
    "minicpm",
    "mistral3",
    "olmo",
    "internlm2",
    "deepseek",
    "bailingmoe",
}  # architectures whose q and k rows are in interleaved rotary order
STATES_ALONE = {"mamba2", "mamba"}
KDA = {"kimi-linear", "bailingmoe3"}
DELTA = {"qwen3next", "qwen35", "qwen35moe"}
GEMMA = {"gemma", "nemotron", "gemma2", "gemma3", "gemma-embedding"}  # GGUF files hold their norm weights as 1 + w

KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "context_length": "max_position_embeddings",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "shortconv.l_cache": "conv_L_cache",
    "leading_dense_block_count": "num_dense_layers",
}
MAMBA_KEYS = {"ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
              "ssm.time_step_rank": "mamba_n_heads", "expert_shared_feed_forward_length": "shared_intermediate_size",
}  # fmt: skip
FLOATS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "attn_logit_softcapping": "attn_logit_softcapping",
          "final_logit_softcapping": "final_logit_softcapping", "attention.layer_norm_epsilon": "norm_epsilon",
          "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
          "logit_scale": "logits_scaling", "attention.scale": "attention_multiplier"}  # fmt: skip

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
         "model.embedding_norm": "token_embd_norm", "model.embed_tokens_per_layer": "per_layer_token_embd",
         "model.per_layer_model_projection": "per_layer_model_proj",
         "model.per_layer_projection_norm": "per_layer_proj_norm",
         "model.embeddings": "token_embd", "model.norm_f": "output_norm",
         "model.final_layernorm": "output_norm", "transformer.wte": "token_embd", "transformer.ln_f": "output_norm",
         "model.tok_embeddings": "token_embd", "model.word_embeddings": "token_embd", "output": "output"}  # fmt: skip
BLOCK = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",  # names of the experts
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "block_sparse_moe.output_linear": "ffn_down_exps", "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d", "mamba.norm": "ssm_norm", "mamba.out_proj": "ssm_out",
    **{f"{module}.{part}_proj": f"ssm_{part}" for module in ("mixer", "mamba") for part in ("x", "dt")},
    **{f"mamba.{part}_layernorm": f"ssm_{part}_norm" for part in ("dt", "b", "c")},
    "feed_forward.router": "ffn_gate_inp",
    "mixer.in_proj": "ssm_in", "mixer.conv1d": "ssm_conv1d", "mixer.out_proj": "ssm_out", "norm": "attn_norm",
    "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v", "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp", "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp", "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "feed_forward.gate_proj": "ffn_gate", "feed_forward.up_proj": "ffn_up", "feed_forward.down_proj": "ffn_down",
    "feed_forward.shared_expert.gate_proj": "ffn_gate_shexp", "feed_forward.shared_expert.up_proj": "ffn_up_shexp",
    "feed_forward.shared_expert.down_proj": "ffn_down_shexp",
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm", "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp", "self_attn.kv_b_proj": "attn_kv_b",
    **{name: f"nextn.{name}" for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{f"shared_head.{name}": f"nextn.shared_head_{name}" for name in ("norm", "head")},
    "altup.correction_coefs": "altup_correct_coef", "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router", "altup.router_norm": "altup_router_norm",
    "altup.correct_output_scale": "altup_correct_scale", "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r", "laurel.post_laurel_norm": "laurel_post_norm",
    "layer_scalar": "layer_output_scale", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm", "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "self_attn.gate_proj": "attn_gate", "pre_mlp_layernorm": "ffn_norm", "post_mlp_layernorm": "post_ffw_norm",
    "mlp.router.gate": "ffn_gate_inp", "mlp.gate.wg": "ffn_gate_inp",
    "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp", "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
    "self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm",
    "attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm",
    "attn.attention.q_proj": "attn_q", "attn.attention.k_proj": "attn_k", "attn.attention.v_proj": "attn_v",
    "attn.attention.out_proj": "attn_output", "ln_1": "attn_norm", "ln_2": "ffn_norm", "mlp.c_fc_0": "ffn_gate",
    "mlp.c_fc_1": "ffn_up", "attention.wo": "attn_output", "attention_norm": "attn_norm",
    "self_attn.g_proj": "attn_gate",
    "attention.query_key_value": "attn_qkv", "attention.dense": "attn_output",
    "attention.query_layernorm": "attn_q_norm", "attention.key_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj", "conv.conv": "shortconv.conv", "conv.out_proj": "shortconv.out_proj",
}  # fmt: skip
DELTA_BLOCK = {
    "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
KDA_BLOCK = {
    **{f"self_attn.{part}_{turn}_proj": f"ssm_{part}_{turn}" for part in "fg" for turn in "ab"},
    "final_layernorm": "layer_output_norm", "self_attn.f_proj": "ssm_f_a", "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
}  # fmt: skip
POST_NORMS = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
              "post_feedforward_layernorm": "post_ffw_norm"}  # fmt: skip
OWN_BLOCK = {
    **dict.fromkeys(
        ("gemma2", "gemma3", "gemma-embedding", "gemma3n", "gemma4", "olmo2", "seed_oss", "exaone4"), POST_NORMS
    ),
    **dict.fromkeys(DELTA, DELTA_BLOCK),
    **dict.fromkeys(KDA, KDA_BLOCK),
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    "glm4moe": {"post_attention_layernorm": "post_attention_norm"},
    "afmoe": {"post_attention_layernorm": "post_attention_norm"},
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
}

GPT = {"gptneox", "gpt2", "starcoder", "falcon", "bloom", "mpt", "dbrx"}
GPT_WHOLE = {"embed_out": "output", "gpt_neox.embed_in": "token_embd", "lm_head": "output",
             "gpt_neox.final_layer_norm": "output_norm",
             "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
             "transformer.word_embeddings": "token_embd", "transformer.word_embeddings_layernorm": "token_embd_norm",
             "transformer.norm_f": "output_norm"}  # fmt: skip
DBRX_EXPERTS = {"w1": "gate", "v1": "up", "w2": "down"}
GPT_BLOCK = {
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "ln_attn": "attn_norm_2", "ln_mlp": "attn_norm",
    "attention.dense": "attn_output", "self_attention.dense": "attn_output", "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down", "attention.query_key_value": "attn_qkv",
    "self_attention.query_key_value": "attn_qkv", "norm_1": "attn_norm", "norm_2": "ffn_norm",
    "attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output", "ffn.up_proj": "ffn_up", "ffn.down_proj": "ffn_down",
    "norm_attn_norm.norm_1": "attn_norm", "norm_attn_norm.norm_2": "attn_output_norm",
    "norm_attn_norm.attn.Wqkv": "attn_qkv", "norm_attn_norm.attn.out_proj": "attn_output",
    "ffn.router.layer": "ffn_gate_inp",
}  # fmt: skip

XIELU = ".mlp.act_fn."
AS_FLOATS = (".conv.", "conv1d", "ffn_gate_inp", "ssm_a", "ssm_d", "norm")  # tensors that llama.cpp reads as floats
EXPRESSIBLE = {
    "apertus": {"hidden_act": "xielu"},
    "deepseek_v3": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "deepseek_v32": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "bailing_hybrid": {"kda_safe_gate": True},
    "dots1": {"sliding_window": None, "layer_types": None},
    "falcon_h1": {"mamba_norm_before_gate": False},
    "mamba2": {"use_bias": False}, "mamba": {"use_bias": False}, "jamba": {"mamba_proj_bias": False},
    "falcon_mamba": {"use_bias": False, "layer_norm_epsilon": 1e-5, "mixer_rms_eps": 1e-5},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "internlm3": {"attention_bias": False, "mlp_bias": False},
    "youtu": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "gemma2": {"query_pre_attn_scalar": 8, "layer_types": None, "head_dim": 8},
    "gemma3_text": {
        "query_pre_attn_scalar": 8, "head_dim": 8, "layer_types": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "gpt2": {"scale_attn_by_inverse_layer_idx": False},
    "mpt": {"attn_config": {"softmax_scale": None}},
    "olmoe": {"clip_qkv": None, "norm_topk_prob": False},
    "dbrx": {"ffn_config": {"moe_normalize_expert_weights": 1.0, "ffn_act_fn": None}},
    "gpt_oss": {"swiglu_limit": 7.0, "layer_types": None},
    "lfm2_moe": {"routed_scaling_factor": 1.0, "norm_topk_prob": True},
    "llama4_text": {
        "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "layer_types": None,
        "no_rope_layers": None, "moe_layers": None, "use_qk_norm": True, "attn_temperature_tuning": True,
    },
    "cohere2_moe": {"shared_expert_combination_strategy": "average"},
    "phimoe": {"router_jitter_noise": 0.01},
    "mimo_v2_flash": {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    "laguna": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "mellum": {"mlp_layer_types": ["sparse", "sparse", "sparse", "sparse"]},
    "minicpm3": {"scale_emb": 12.0, "dim_model_base": 256},
    "llama": {"hidden_act": "silu"},
    "qwen2": {"hidden_act": "silu", "use_sliding_window": False, "sliding_window": None, "layer_types": None},
    "qwen2_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_next": {"decoder_sparse_step": 1, "mlp_only_layers": []},
}  # fmt: skip
"""The values of keys of a model_type that its GGUF files cannot express otherwise."""


def architecture_of(config):
    """The ``general.architecture`` of the file of a model."""
    if config.get("use_bidirectional_attention") is True:
        return "gemma-embedding"
    more = "_moe" if "moe" in config.get("layers_block_type", ()) else ""
    family = OF_CLASSES.get((config.get("architectures") or [""])[0], config["model_type"])
    return ARCHITECTURES[family] + more


def interleave(tensor, head_dim, rotated=None):
    """Rows of each head from split halves to interleaved rotary order."""
    n = rotated or head_dim
    heads = tensor.reshape(-1, head_dim, tensor.shape[1])
    first = heads[:, :n].reshape(len(heads), 2, n // 2, -1).swapaxes(1, 2).reshape(len(heads), n, -1)
    return np.concatenate([first, heads[:, n:]], axis=1).reshape(tensor.shape)


def usual(config):
    """The configuration with the usual names of keys that its family has other names for."""
    family = FAMILIES.get(config["model_type"])  # none for a decoder beside an encoder
    own = family.other_names if family else {}
    return {own.get(name, name): value for name, value in config.items()}


def head_dim_of(config):
    """The width of a head; that of the layer for states alone."""
    return config.get("head_dim") or config["hidden_size"] // config.get("num_attention_heads", 1)


def expressible(config):
    """The configuration with values that GGUF files can express."""
    own = EXPRESSIBLE.get(config["model_type"], {})
    parts = ("attn_config", "ffn_config")
    return {**config, **{key: {**config[key], **value} if key in parts else value for key, value in own.items()}}


def kv_heads_of(config):
    """The number of key/value heads of a successor of GPT-2."""
    if config.get("multi_query", False) and not config.get("new_decoder_architecture"):
        return 1
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def gpt_tensors(config, tensors):
    """The tensors of successors of GPT-2: queries, keys and values of all heads one below the other."""
    written = {}
    for name, value in tensors.items():
        stem, kind = name.rsplit(".", 1)
        if found := re.fullmatch(r"transformer\.blocks\.(\d+)\.ffn\.experts\.mlp\.(\w+)", name):
            stacked = value.reshape(config["ffn_config"]["moe_num_experts"], -1, value.shape[1])
            turned = np.ascontiguousarray(stacked.swapaxes(1, 2)) if found[2] == "w2" else stacked
            written[f"blk.{found[1]}.ffn_{DBRX_EXPERTS[found[2]]}_exps.weight"] = turned
            continue
        if stem in GPT_WHOLE:
            written[f"{GPT_WHOLE[stem]}.{kind}"] = value
            continue
        layer, rest = re.fullmatch(r"(?:transformer\.(?:h|blocks)|gpt_neox\.layers)\.(\d+)\.(.+)", stem).groups()
        if config["model_type"] == "gpt2":
            value = np.ascontiguousarray(value.T)
        elif GPT_BLOCK[rest] == "attn_qkv" and config["model_type"] not in ("mpt", "dbrx"):
            heads, groups = config["num_attention_heads"], kv_heads_of(config)
            if config["model_type"] != "gpt_bigcode" or groups > 1:
                size = config["hidden_size"] // heads
                parts = value.reshape(groups, heads // groups + 2, size, *value.shape[1:])
                q, k, v = parts[:, :-2], parts[:, -2], parts[:, -1]
                value = np.concatenate([part.reshape(-1, *value.shape[1:]) for part in (q, k, v)])
        written[f"blk.{layer}.{GPT_BLOCK[rest]}.{kind}"] = value
    return written


def with_norms_of_heads(tensors):
    """The tensors with the weights of the norms of all heads as rows of one."""
    found = {}
    for name, value in tensors.items():
        stem, _, row = name.removesuffix(".weight").partition(".norms.")
        if not row:
            found[name] = value
        elif row == "0":
            count = sum(other.startswith(f"{stem}.norms.") for other in tensors)
            found[f"{stem}.weight"] = np.stack([tensors[f"{stem}.norms.{h}.weight"] for h in range(count)])
    return found


def gguf_tensors(config, tensors):
    """{name in a GGUF file: float32 array} of a checkpoint; the experts of a layer stacked in one tensor."""
    architecture, config = architecture_of(config), usual(config)
    tensors = {name: value for name, value in tensors.items() if XIELU not in name}
    if architecture in GPT:
        return gpt_tensors(config, tensors)
    head_dim = head_dim_of(config)
    block = {**BLOCK, **OWN_BLOCK.get(architecture, {})}
    experts, written, streams = {}, {}, {}
    tensors = with_norms_of_heads(tensors)
    if architecture == "gemma4":
        written["rope_freqs.weight"] = rotary_divisors(config)
    for name, value in tensors.items():
        name = further_layer(config, name.replace("backbone.", "model.", 1).replace("transformer.h.", "model.layers."))
        if architecture in KDA:
            name = name.replace(".attention.", ".self_attn.").replace(".block_sparse_moe.", ".mlp.")
        name += ".weight" if name.endswith((".layer_scalar", ".correct_output_scale")) else ""
        if architecture == "falcon-h1":
            value = multiplied(config, name, value)
        if found := re.fullmatch(r"model\.(altup|altup_unembed)_projections\.(\d)\.weight", name):
            part = {"altup": "altup_proj", "altup_unembed": "altup_unembd_proj"}[found[1]]
            streams.setdefault(f"{part}.weight", {})[int(found[2])] = value
            continue
        more = converted(config, name, value)
        if more:
            written |= more
            continue
        value = value.squeeze(1) if ".conv" in name and value.ndim == 3 else value
        if architecture in DELTA and name.endswith("norm.weight") and ".linear_attn." not in name:
            value = value + np.float32(1)
        if architecture in GEMMA and name.endswith("norm.weight"):
            value = value + np.float32(1)
        if architecture in INTERLEAVED and name.endswith(("q_proj.weight", "k_proj.weight")):
            value = interleave(value, head_dim)
        if architecture in INTERLEAVED and name.endswith(("q_proj.bias", "k_proj.bias")):
            value = interleave(value[:, None], head_dim)[:, 0]
        stem, kind = name.rsplit(".", 1)
        if stem in WHOLE:
            written[f"{WHOLE[stem]}.{kind}"] = value
            continue
        layer, rest = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem).groups()
        if expert := re.fullmatch(r".*\.experts\.(\d+)\.(.+)", rest):
            number, part = expert.groups()
            experts.setdefault(f"blk.{layer}.{block[part]}.{kind}", {})[int(number)] = value
        else:
            written[f"blk.{layer}.{block[rest]}.{kind}"] = value
    stacked = {name: np.stack([parts[e] for e in sorted(parts)]) for name, parts in (experts | streams).items()}
    return written | stacked


HEAD = {"mtp.fc": "eh_proj", "mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm",
        "mtp.norm": "shared_head.norm"}  # fmt: skip


def further_layer(config, name):
    """The name of a tensor of a head for further tokens in the place of a further layer."""
    stem, kind = name.rsplit(".", 1)
    place = f"model.layers.{config.get('num_hidden_layers')}."
    if stem in HEAD:
        return f"{place}{HEAD[stem]}.{kind}"
    return name.replace("mtp.layers.0.", place, 1)


def multiplied(config, name, value):
    """A weight of Falcon-H1 times its multipliers."""
    into, gates = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors = {
        "down_proj": gates[1], "gate_proj": gates[0], "k_proj": config["key_multiplier"] * into, "q_proj": into,
        "v_proj": into, "o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    stem = name.split(".")[-2]
    if stem == "in_proj":
        keys = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = config["mamba_d_ssm"], config["mamba_d_ssm"], keys, keys, config["mamba_n_heads"]
        rows = np.repeat(config["ssm_multipliers"], sizes) * config["ssm_in_multiplier"]
        return (value * rows[:, None]).astype(np.float32)
    return value * np.float32(factors.get(stem, 1))


def converted(config, name, value):
    """The tensors that are not only renamed; none if the tensor is."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(\w+)\.(.+)", name)
    if found is None:
        return {}
    layer, module, part = found.groups()
    match module:
        case "attention" if part == "wqkv.weight" or (
            part.startswith("query_key_value.") and not config.get("n_group")
        ):
            return separate(config, layer, value, by_head=part == "wqkv.weight")
        case "mlp" if part in ("gate.expert_bias", "experts.e_score_correction_bias", "e_score_correction_bias"):
            return {f"blk.{layer}.exp_probs_b.bias": value}
        case "linear_attn" if config["model_type"] == "qwen3_next":
            return delta_net(config, layer, part, value)
        case "linear_attn":
            return tiled_delta_net(config, layer, part, value)
        case "mamba":
            return mamba(config, layer, part, value)
        case "mixer" if part == "gate.e_score_correction_bias":
            return {f"blk.{layer}.exp_probs_b.bias": value}
        case "pre_ff_layernorm":
            return {f"blk.{layer}.ffn_norm": value}  # as converters name it
        case "feed_forward" if part == "experts.gate_up_proj":
            gate, up = np.split(value.swapaxes(1, 2), 2, axis=1)
            return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
        case "feed_forward" if part == "experts.down_proj":
            return {f"blk.{layer}.ffn_down_exps.weight": value.swapaxes(1, 2)}
        case "router" if part == "scale":
            return {f"blk.{layer}.ffn_gate_inp.scale": value}
        case "router" if part == "per_expert_scale":
            return {f"blk.{layer}.ffn_down_exps.scale": value}
        case "experts":
            kind = {"gate_up_proj": "gate_up", "down_proj": "down"}[part]
            return {f"blk.{layer}.ffn_{kind}_exps.weight": value}
        case "mixer":
            return mamba({"mamba_n_groups": config.get("n_groups"), **config}, layer, part, value)
        case "block_sparse_moe" if part == "e_score_correction_bias":
            return {f"blk.{layer}.exp_probs_b.bias": value}
        case "block_sparse_moe" if part == "input_linear.weight":
            gate, up = np.split(value, 2, axis=1)
            return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
        case "shared_mlp":
            end = "_shexp" if config.get("num_local_experts") else ""
            if part == "output_linear.weight":
                return {f"blk.{layer}.ffn_down{end}.weight": value}
            gate, up = np.split(value, 2)
            return {f"blk.{layer}.ffn_gate{end}.weight": gate, f"blk.{layer}.ffn_up{end}.weight": up}
        case "mlp" if config["model_type"] == "qwen3_vl_moe_text" and part == "experts.gate_up_proj":
            gate, up = np.split(value, 2, axis=1)
            return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
        case "mlp" if config["model_type"] == "qwen3_vl_moe_text" and part == "experts.down_proj":
            return {f"blk.{layer}.ffn_down_exps.weight": value}
        case "mlp" if config["model_type"] == "gpt_oss":
            return gpt_oss_experts(layer, part, value)
        case "mlp" if part in ("gate.e_score_correction_bias", "moe_statics.e_score_correction_bias"):
            return {f"blk.{layer}.exp_probs_b.bias": value}
        case "self_attn" if part == "kv_b_proj.weight" and not config.get("old_file"):
            nope, rank = config["qk_nope_head_dim"], config["kv_lora_rank"]
            heads = value.reshape(config["num_attention_heads"], -1, rank)
            k, v = heads[:, :nope].swapaxes(1, 2), heads[:, nope:]
            return {f"blk.{layer}.attn_k_b.weight": k, f"blk.{layer}.attn_v_b.weight": v}
        case "self_attn" if architecture_of(config) in KDA:
            return channel_delta_net(config, layer, part, value)
        case "mlp" if part == "expert_bias":
            return {f"blk.{layer}.exp_probs_b.bias": value}
        case "self_attn" if part in ("sinks", "attention_sink_bias"):
            return {f"blk.{layer}.attn_sinks.weight": value}
        case "feed_forward" if part == "expert_bias":
            return {f"blk.{layer}.exp_probs_b.bias": value}
    return {}


def separate(config, layer, value, by_head):
    """Queries, keys and values in interleaved order, of rows that stack them, or those of each key/value head."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    dim = value.shape[0] // (heads + 2 * groups)
    turns = groups if by_head else 1
    rows = value.reshape(turns, -1, value.shape[1])
    ends = np.array([heads, heads + groups]) * dim // turns
    q, k, v = (part.reshape(-1, value.shape[1]) for part in np.split(rows, ends, axis=1))
    parts = {"q": interleave(q, dim), "k": interleave(k, dim), "v": v}
    return {f"blk.{layer}.attn_{name}.weight": part for name, part in parts.items()}


def gpt_oss_experts(layer, part, value):
    """A checkpoint has the inputs of all experts as [in, out], gate and up in turns."""
    if part.startswith("router."):
        return {f"blk.{layer}.ffn_gate_inp.{part.removeprefix('router.')}": value}
    kind = "bias" if part.endswith("_bias") else "weight"
    value = value if kind == "bias" else value.swapaxes(1, 2)
    if part.startswith("experts.down_proj"):
        return {f"blk.{layer}.ffn_down_exps.{kind}": value}
    return {f"blk.{layer}.ffn_{name}_exps.{kind}": value[:, first::2] for first, name in enumerate(("gate", "up"))}


def mamba(config, layer, part, value):
    heads = value if value.ndim == 2 or config["model_type"] in ("mamba", "falcon_mamba", "jamba") else value[:, None]
    match part:
        case "A_log":
            return {f"blk.{layer}.ssm_a": -np.exp(heads)}
        case "D":
            return {f"blk.{layer}.ssm_d": heads}
        case "dt_bias":
            return {f"blk.{layer}.ssm_dt.bias": value}
        case "norm.weight":
            return {f"blk.{layer}.ssm_norm.weight": value.reshape(config["mamba_n_groups"], -1)}
    return {}


def mamba1(architecture, config):
    """The metadata of layers of the first Mamba."""
    inner = config.get("mamba_inner") or config["mamba_expand"] * config["hidden_size"]
    sizes = {"conv_kernel": config["mamba_d_conv"], "state_size": config["mamba_d_state"], "inner_size": inner,
             "time_step_rank": config["mamba_dt_rank"]}  # fmt: skip
    found = {f"{architecture}.ssm.{key}": ("u32", value) for key, value in sizes.items()}
    if architecture == "mamba":
        found["mamba.ssm.dt_b_c_rms"] = ("bool", config["model_type"] == "falcon_mamba")
        return found
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    layers = range(config["num_hidden_layers"])
    heads = [config["num_key_value_heads"] if i % period == offset else 0 for i in layers]
    return found | {"jamba.attention.head_count_kv": ("[i32]", heads)}


def tiled_delta_net(config, layer, part, value):
    """The value heads of a checkpoint are in groups, one per key head; a file has the first of every group first."""
    keys, heads, dim = (config[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "value_head_dim"))

    def tiled(x, size, axis=0):
        grouped = np.moveaxis(x, axis, 0).reshape(keys, heads // keys, size, -1)
        return np.moveaxis(grouped.swapaxes(0, 1).reshape(np.moveaxis(x, axis, 0).shape), 0, axis)

    split = 2 * keys * config["linear_key_head_dim"]
    match part:
        case "A_log":
            return {f"blk.{layer}.ssm_a": tiled(-np.exp(value), 1)}
        case "dt_bias":
            return {f"blk.{layer}.ssm_dt.bias": tiled(value, 1)}
        case "in_proj_a.weight":
            return {f"blk.{layer}.ssm_alpha.weight": tiled(value, 1)}
        case "in_proj_b.weight":
            return {f"blk.{layer}.ssm_beta.weight": tiled(value, 1)}
        case "in_proj_z.weight":
            return {f"blk.{layer}.attn_gate.weight": tiled(value, dim)}
        case "in_proj_qkv.weight":
            return {f"blk.{layer}.attn_qkv.weight": np.concatenate([value[:split], tiled(value[split:], dim)])}
        case "conv1d.weight":
            value = value.squeeze(1)
            return {f"blk.{layer}.ssm_conv1d.weight": np.concatenate([value[:split], tiled(value[split:], dim)])}
        case "out_proj.weight":
            return {f"blk.{layer}.ssm_out.weight": tiled(value, dim, axis=1)}
    return {}


def channel_delta_net(config, layer, part, value):
    """A layer of Kimi Delta Attention; the gate of one of latent attention has a row for each head."""
    if part == "A_log":
        rates = np.exp(value.reshape(1, 1, -1, 1))
        return {f"blk.{layer}.ssm_a": rates.reshape(-1, 1) if "kda_lower_bound" in config else -rates}
    if part == "dt_bias":
        return {f"blk.{layer}.ssm_dt.bias": value}
    if part == "g_proj.weight" and len(value) > config["num_attention_heads"]:
        return {f"blk.{layer}.ssm_g_a.weight": value}
    if found := re.fullmatch(r"([qkv])_conv1d\.weight", part):
        return {f"blk.{layer}.ssm_conv1d_{found[1]}.weight": value.reshape(1, len(value), 1, -1)}
    return {}


def channel_delta_nets(architecture, config, types):
    """The metadata of delta-nets with decays by channel, and of the experts beside them."""
    own = {
        "attention.head_count_kv": ("[i32]", [int(kind == "full_attention") for kind in types]),
        "kda.head_dim": ("u32", config.get("linear_head_dim") or config["head_dim"]),
        "ssm.conv_kernel": ("u32", config.get("short_conv_kernel_size") or config["linear_conv_kernel_dim"]),
    }
    if architecture == "bailingmoe3":
        own |= {
            "kda.safe_gate": ("bool", config["kda_safe_gate"]),
            "kda.gate_lower_bound": ("f32", config["kda_lower_bound"]),
            "expert_shared_feed_forward_length": ("u32", config["moe_intermediate_size"]),
        }  # fmt: skip
    dense = config["mlp_layer_types"].count("dense")
    found = routed(architecture, {"first_k_dense_replace": dense, "n_routed_experts": config["num_experts"], **config})
    if architecture == "kimi-linear":
        del found["kimi-linear.expert_weights_norm"]
    return found | {f"{architecture}.{key}": typed for key, typed in own.items()}


def delta_net(config, layer, part, value):
    """For each key head, a checkpoint has q, k, v and z."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"] * config["linear_value_head_dim"]
    match part:
        case "A_log":
            return {f"blk.{layer}.ssm_a": -np.exp(value)}
        case "dt_bias":
            return {f"blk.{layer}.ssm_dt.bias": value}
        case "in_proj_qkvz.weight":
            dim, each = config["linear_key_head_dim"], values // keys
            ends = np.cumsum([dim, dim, each])
            q, k, v, z = np.split(value.reshape(keys, -1, value.shape[1]), ends, axis=1)
            flat = [part.reshape(-1, value.shape[1]) for part in (q, k, v, z)]
            return {f"blk.{layer}.attn_qkv.weight": np.concatenate(flat[:3]), f"blk.{layer}.attn_gate.weight": flat[3]}
    return {}


def latent(architecture, config):
    """The metadata of latent attention. Older files have the lengths of a head of q and v."""
    rank, query = config["kv_lora_rank"], config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    found = {"rope.dimension_count": config["qk_rope_head_dim"], "attention.kv_lora_rank": rank}
    if config.get("q_lora_rank"):
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    if config.get("old_file") or architecture == "minicpm3":
        found |= {"attention.key_length": query, "attention.value_length": config["v_head_dim"]}
    else:
        found |= {
            "attention.key_length": rank + config["qk_rope_head_dim"], "attention.value_length": rank,
            "attention.key_length_mla": query, "attention.value_length_mla": config["v_head_dim"],
            "attention.head_count_kv": 1,
        }  # fmt: skip
    found = {f"{architecture}.{key}": ("u32", value) for key, value in found.items()}
    if "index_topk" in config:
        sizes = {"head_count": config["index_n_heads"], "key_length": config["index_head_dim"],
                 "top_k": config["index_topk"]}  # fmt: skip
        found |= {f"{architecture}.attention.indexer.{key}": ("u32", value) for key, value in sizes.items()}
    return found


def routed(architecture, config):
    """The metadata of experts in groups."""
    found = {
        "leading_dense_block_count": config["first_k_dense_replace"], "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_gating_func": 1 if config["model_type"] == "deepseek_v2" else 2,
    }  # fmt: skip
    if "n_group" in config:
        found |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    if architecture in ("deepseek", "bailingmoe"):
        del found["expert_gating_func"]
    return {f"{architecture}.{key}": ("u32", value) for key, value in found.items()} | {
        f"{architecture}.expert_weights_scale": ("f32", config.get("routed_scaling_factor", 1.0)),
        f"{architecture}.expert_weights_norm": ("bool", config.get("norm_topk_prob", architecture != "deepseek")),
    }


def gemma4(config):
    """The metadata of heads, windows and inputs of layers."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    own = {int(i): values for i, values in config["per_layer_config"].items()}
    full = own[slides.index(False)]
    heads = [own.get(i, {}).get("num_key_value_heads", config["num_key_value_heads"]) for i in range(len(slides))]
    shared, inner = config["num_kv_shared_layers"], config["intermediate_size"]
    wide = len(slides) - shared if config["use_double_wide_mlp"] else len(slides)
    found = {
        "attention.head_count_kv": ("[i32]", heads), "attention.sliding_window_pattern": ("[bool]", slides),
        "attention.key_length_swa": ("u32", config["head_dim"]),
        "attention.value_length_swa": ("u32", config["head_dim"]),
        "attention.key_length": ("u32", full["head_dim"]), "attention.value_length": ("u32", full["head_dim"]),
        "attention.shared_kv_layers": ("u32", shared),
        "embedding_length_per_layer_input": ("u32", config["hidden_size_per_layer_input"]),
        "feed_forward_length": ("[i32]", [inner if i < wide else 2 * inner for i in range(len(slides))]),
        "rope.dimension_count": ("u32", full["head_dim"]), "rope.dimension_count_swa": ("u32", config["head_dim"]),
        "rope.freq_base_swa": ("f32", config["rope_parameters"]["sliding_attention"]["rope_theta"]),
    }  # fmt: skip
    if config["enable_moe_block"]:
        found["expert_used_count"] = ("u32", config["top_k_experts"])
    return {f"gemma4.{key}": typed for key, typed in found.items()}


def of_kinds(config):
    """The metadata of Laguna and Mellum 2: of windows, heads and rotations by kind of layer, and of the experts."""
    local = config["rope_parameters"]["sliding_attention"]
    found = {
        "attention.sliding_window_pattern": ("[bool]", [kind == "sliding_attention" for kind in config["layer_types"]]),
        "rope.freq_base_swa": ("f32", local["rope_theta"]),
        "rope.dimension_count_swa": ("u32", int(config["head_dim"] * local.get("partial_rotary_factor", 1))),
    }
    if config["model_type"] == "laguna":
        found |= {
            "attention.head_count": ("[i32]", config["num_attention_heads_per_layer"]),
            "leading_dense_block_count": ("u32", config["mlp_layer_types"].count("dense")),
            "expert_weights_scale": ("f32", config["moe_routed_scaling_factor"]),
            "expert_weights_norm": ("bool", True),
            "expert_gating_func": ("u32", 2),
            "router_logit_softcapping": ("f32", config["moe_router_logit_softcapping"]),
        }
    return {f"{config['model_type']}.{key}": typed for key, typed in found.items()}


def mimo2(config):
    """The metadata of MiMo V2 Flash: of windows, heads and rotations by kind of layer, and of the experts."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    full, local = config["num_key_value_heads"], 2 * config["num_key_value_heads"]
    found = {
        "attention.head_count_kv": ("[i32]", [local if slide else full for slide in slides]),
        "attention.sliding_window_pattern": ("[i32]", [int(slide) for slide in slides]),
        "attention.value_length": ("u32", config["v_head_dim"]),
        "attention.value_scale": ("f32", config["attention_value_scale"]),
        "rope.freq_base_swa": ("f32", config["rope_parameters"]["sliding_attention"]["rope_theta"]),
        "expert_count": ("u32", config["n_routed_experts"]),
    }
    return {f"mimo2.{key}": typed for key, typed in found.items()}


def gemma3n(config):
    """The metadata of streams, gates and inputs of layers."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    shares = config["activation_sparsity_pattern"]
    cutoffs = [NormalDist().inv_cdf(share) if share else -math.inf for share in shares]
    found = {
        "attention.sliding_window_pattern": ("[bool]", slides), "activation_sparsity_scale": ("[f32]", cutoffs),
        "attention.shared_kv_layers": ("u32", config["num_kv_shared_layers"]),
        "embedding_length_per_layer_input": ("u32", config["hidden_size_per_layer_input"]),
        "feed_forward_length": ("[i32]", config["intermediate_size"]),
        "altup.active_idx": ("u32", 0), "altup.num_inputs": ("u32", config["altup_num_inputs"]),
        "rope.freq_base_swa": ("f32", config["rope_parameters"]["sliding_attention"]["rope_theta"]),
        "rope.scaling.type": ("str", "linear"),
        "rope.scaling.factor": ("f32", config["rope_parameters"]["full_attention"]["factor"]),
    }  # fmt: skip
    return {f"gemma3n.{key}": typed for key, typed in found.items()}


def rotary_divisors(config):
    """The tensor of Gemma 4 that leaves most pairs of full layers as they are."""
    full = next(values for values in config["per_layer_config"].values())["head_dim"]
    turned = int(config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * full / 2)
    return np.array([1.0] * turned + [1e30] * (full // 2 - turned), np.float32)


def experts_everywhere(tiny, like):
    """The shapes of a model in which every layer has the experts of layer ``like``."""
    mlp = re.compile(r"model\.layers\.(\d+)\.mlp\.")
    shapes = {name: shape for name, shape in tiny["shapes"].items() if not mlp.match(name)}
    for name, shape in tiny["shapes"].items():
        if name.startswith(f"model.layers.{like}.mlp."):
            for i in range(tiny["config"]["num_hidden_layers"]):
                shapes[mlp.sub(f"model.layers.{i}.mlp.", name)] = shape
    return shapes


def rotary(config):
    """The metadata of rotary scaling and of heads that rotate in part, and the divisors of frequencies by name."""
    config = usual(config)
    architecture, of_types = architecture_of(config), config.get("rope_parameters") or {}
    rope = of_types.get("full_attention", of_types)
    head_dim = head_dim_of(config)
    found, tensors = {}, {}
    turned = int(head_dim * rope.get("partial_rotary_factor", 1))
    if "partial_rotary_factor" in rope and architecture != "gemma4":
        found["rope.dimension_count"] = ("u32", turned)
    if sections := rope.get("mrope_section"):
        found["rope.dimension_sections"] = ("[i32]", [*sections, 0])
    match rope.get("rope_type"):
        case "linear":
            found |= {"rope.scaling.type": ("str", "linear"), "rope.scaling.factor": ("f32", rope["factor"])}
        case "yarn":
            found |= yarn(rope, architecture)
        case "llama3":
            tensors["rope_freqs.weight"] = llama3(rope, turned)
        case "longrope":
            original = rope["original_max_position_embeddings"]
            factor = math.sqrt(1 + math.log(config["max_position_embeddings"] / original) / math.log(original))
            found["rope.scaling.original_context_length"] = ("u32", original)
            found["rope.scaling.attn_factor"] = ("f32", rope.get("attention_factor", factor))
            for side in ("short", "long"):
                tensors[f"rope_factors_{side}.weight"] = np.array(rope[f"{side}_factor"], np.float32)
    return {f"{architecture}.{key}": typed for key, typed in found.items()}, tensors


def yarn(rope, architecture):
    """The metadata of YaRN. A file has the factor of attention relative to the usual one, and one of DeepSeek has a
    tenth of ``mscale_all_dim``.
    """
    found = {
        "rope.scaling.type": ("str", "yarn"), "rope.scaling.factor": ("f32", rope["factor"]),
        "rope.scaling.original_context_length": ("u32", rope["original_max_position_embeddings"]),
    }  # fmt: skip
    found |= {f"rope.scaling.yarn_{key}": ("f32", rope[key]) for key in ("beta_fast", "beta_slow") if key in rope}
    if (factor := rope.get("attention_factor")) is not None:
        found["rope.scaling.attn_factor"] = ("f32", factor / (1 + 0.1 * math.log(rope["factor"])))
    if "mscale_all_dim" in rope:
        share = 0.1 if architecture in ("deepseek2", "deepseek32", "glm-dsa") else 1.0
        found["rope.scaling.yarn_log_multiplier"] = ("f32", share * rope["mscale_all_dim"])
    if "llama_4_scaling_beta" in rope:
        found["attention.temperature_scale"] = ("f32", rope["llama_4_scaling_beta"])
    return found


def llama3(rope, dim):
    """The divisor of each frequency of Llama 3."""
    plain = rope["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    waves = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = np.clip((waves - low) / (high - low) if high != low else np.where(waves > low, 1.0, 0.0), 0, 1)
    return 1 / (kept + (1 - kept) / rope["factor"])


def metadata(config):
    """The metadata of the architecture, and a vocabulary of single characters with one merge."""
    architecture = architecture_of(config)
    rope = config.get("rope_parameters") or {"rope_theta": 10000.0}
    rope = rope.get("full_attention", rope)
    types = config.get("layer_types") or []
    config = {**usual(config), "num_experts": config.get("num_experts") or config.get("num_local_experts")}
    found = {"general.architecture": ("str", architecture),
             f"{architecture}.rope.freq_base": ("f32", rope["rope_theta"])}  # fmt: skip
    found |= {f"{architecture}.{k}": ("u32", config[v]) for k, v in KEYS.items() if config.get(v)}
    found |= {f"{architecture}.{k}": ("f32", config[v]) for k, v in FLOATS.items() if config.get(v)}
    if architecture in STATES_ALONE or architecture == "jamba":
        del found[f"{architecture}.rope.freq_base"]
    if architecture in STATES_ALONE:
        of_none = dict.fromkeys(("attention.head_count", "feed_forward_length"), ("u32", 0))
        found |= {
            f"{architecture}.{key}": typed for key, typed in {"context_length": ("u32", 1 << 20), **of_none}.items()
        }
    if "mamba_dt_rank" in config:
        found |= mamba1(architecture, config)
    if architecture == "falcon-h1":  # in its weights
        del found["falcon-h1.embedding_scale"]
    if "linear_value_head_dim" in config:
        inner = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        found[f"{architecture}.ssm.inner_size"] = ("u32", inner)
    if "mamba_n_heads" in config:
        found |= {f"{architecture}.{k}": ("u32", config[v]) for k, v in MAMBA_KEYS.items() if v in config}
        found[f"{architecture}.ssm.inner_size"] = ("u32", config["mamba_n_heads"] * config["mamba_d_head"])
        if "position_embedding_type" in config:
            found[f"{architecture}.rope.scaling.finetuned"] = ("bool", config["position_embedding_type"] == "rope")
    elif config.get("shared_intermediate_size"):
        found[f"{architecture}.expert_shared_feed_forward_length"] = ("u32", config["shared_intermediate_size"])
    if ("mamba_n_heads" in config and types) or "conv_L_cache" in config:
        heads = [config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in types]
        found[f"{architecture}.attention.head_count_kv"] = ("[i32]", heads)
    if config["model_type"] == "nemotron_h":
        kinds = config["layers_block_type"]
        heads = [config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds]
        has_experts = "moe" in kinds
        width = config["moe_intermediate_size" if has_experts else "intermediate_size"]
        widths = [width if kind in ("mlp", "moe") else 0 for kind in kinds]
        own = {
            "block_count": ("u32", len(kinds)),
            "attention.head_count_kv": ("[i32]", heads),
            "feed_forward_length": ("[i32]", widths),
            "attention.layer_norm_rms_epsilon": ("f32", config["layer_norm_epsilon"]),
            "ssm.conv_kernel": ("u32", config["conv_kernel"]),
            "ssm.state_size": ("u32", config["ssm_state_size"]),
            "ssm.group_count": ("u32", config["n_groups"]),
            "ssm.time_step_rank": ("u32", config["mamba_num_heads"]),
            "ssm.inner_size": ("u32", config["mamba_num_heads"] * config["mamba_head_dim"]),
        }
        if has_experts:
            own |= {
                "expert_count": ("u32", config["n_routed_experts"]),
                "expert_shared_count": ("u32", config["n_shared_experts"]),
                "expert_shared_feed_forward_length": ("u32", config["moe_shared_expert_intermediate_size"]),
                "expert_group_count": ("u32", config["n_group"]),
                "expert_group_used_count": ("u32", config["topk_group"]),
                "expert_weights_norm": ("bool", config["norm_topk_prob"]),
                "expert_weights_scale": ("f32", config["routed_scaling_factor"]),
            }
            if config["moe_latent_size"]:
                own["moe_latent_size"] = ("u32", config["moe_latent_size"])
        else:
            del found["nemotron_h.expert_feed_forward_length"]
        found |= {f"{architecture}.{name}": typed for name, typed in own.items()}
    if config["model_type"] == "llama4_text":
        found |= {
            "llama4.feed_forward_length": ("u32", config["intermediate_size_mlp"]),
            "llama4.expert_feed_forward_length": ("u32", config["intermediate_size"]),
            "llama4.interleave_moe_layer_step": ("u32", config["interleave_moe_layer_step"]),
        }
    if config["model_type"] == "gemma4_text":
        found |= gemma4(config)
    if config["model_type"] == "ernie4_5_moe":
        keys = {"expert_count": "moe_num_experts", "expert_used_count": "moe_k", "expert_shared_count":
                "moe_num_shared_experts", "leading_dense_block_count": "moe_layer_start_index",
                "interleave_moe_layer_step": "moe_layer_interval"}  # fmt: skip
        found |= {f"ernie4_5-moe.{key}": ("u32", config[name]) for key, name in keys.items()}
        shared = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
        found["ernie4_5-moe.expert_shared_feed_forward_length"] = ("u32", shared)
    if config["model_type"] == "gemma3n_text":
        found |= gemma3n(config)
    if config["model_type"] in ("laguna", "mellum"):
        found |= of_kinds(config)
    if config["model_type"] == "minimax_m2":
        found["minimax-m2.expert_feed_forward_length"] = ("u32", config["intermediate_size"])
        found["minimax-m2.expert_gating_func"] = ("u32", 2)
    if config["model_type"] == "afmoe":
        found |= {
            "afmoe.expert_shared_count": ("u32", config["num_shared_experts"]),
            "afmoe.expert_gating_func": ("u32", 2),
            "afmoe.expert_weights_norm": ("bool", True),
            "afmoe.expert_weights_scale": ("f32", config["route_scale"]),
        }
    if config["model_type"] == "cohere2_moe":
        inner, shared = config["intermediate_size"], config["num_shared_experts"]
        found |= {
            "cohere2moe.feed_forward_length": ("u32", config.get("prefix_dense_intermediate_size") or inner),
            "cohere2moe.expert_feed_forward_length": ("u32", inner),
            "cohere2moe.expert_shared_count": ("u32", shared),
            "cohere2moe.expert_shared_feed_forward_length": ("u32", shared * inner),
            "cohere2moe.leading_dense_block_count": ("u32", config["mlp_layer_types"].count("dense")),
            "cohere2moe.expert_gating_func": ("u32", 2 if config["expert_selection_fn"] == "sigmoid" else 1),
            "cohere2moe.expert_weights_norm": (
                "bool",
                config["expert_selection_fn"] == "softmax" or config["norm_topk_prob"],
            ),
            "cohere2moe.attention.sliding_window_pattern": ("[bool]", [kind == "sliding_attention" for kind in types]),
        }
    if config["model_type"] in ("cohere", "cohere2", "cohere2_moe"):
        found |= {
            f"{architecture}.attention.layer_norm_epsilon": ("f32", config["layer_norm_eps"]),
            f"{architecture}.logit_scale": ("f32", config["logit_scale"]),
            f"{architecture}.rope.scaling.type": ("str", "none"),
        }
    if config["model_type"] == "olmo":
        found["olmo.attention.layer_norm_epsilon"] = ("f32", 1e-5)
    if config["model_type"] == "hunyuan_v1_moe":
        found |= {
            "hunyuan-moe.expert_used_count": ("u32", config["moe_topk"]),
            "hunyuan-moe.expert_feed_forward_length": ("u32", config["intermediate_size"]),
            "hunyuan-moe.expert_shared_feed_forward_length": ("u32", config["intermediate_size"]),
            "hunyuan-moe.expert_shared_count": ("u32", 1),
        }
    if "alpha" in rope:
        dim = config["head_dim"]
        found[f"{architecture}.rope.freq_base"] = ("f32", rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2)))
    if config["model_type"] == "minicpm":
        found |= {
            "minicpm.embedding_scale": ("f32", config["scale_emb"]),
            "minicpm.residual_scale": ("f32", config["scale_depth"] / config["num_hidden_layers"] ** 0.5),
            "minicpm.logit_scale": ("f32", config["hidden_size"] / config["dim_model_base"]),
        }
    if "kv_lora_rank" in config:
        found |= latent(architecture, config)
    if architecture in KDA:
        found |= channel_delta_nets(architecture, config, types)
    if config["model_type"] == "solar_open":  # the files of Upstage have the size of a dense MLP, which no layer has
        found["glm4moe.feed_forward_length"] = ("u32", 40)
    if config["model_type"] == "youtu":
        dense = {"leading_dense_block_count": config["num_hidden_layers"], "expert_shared_count": 0}
        dense["expert_feed_forward_length"] = config["intermediate_size"]
        found |= {f"deepseek2.{key}": ("u32", value) for key, value in dense.items()}
    elif config["model_type"] == "mimo_v2_flash":
        found |= mimo2(config)
    elif "n_routed_experts" in config and config["model_type"] != "nemotron_h":
        dense = config.get("mlp_layer_types", ()).count("dense")
        found |= routed(architecture, {"first_k_dense_replace": dense, **config})
    if config["model_type"].startswith("bailing_moe"):
        names = {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
        found |= routed(architecture, {"first_k_dense_replace": 0, **config, **names})
    if config["model_type"] == "exaone_moe":
        dense = {"first_k_dense_replace": config["mlp_layer_types"].count("dense")}
        names = {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
        found |= routed(architecture, {**config, **dense, **names})
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        shared = config["num_shared_experts"] * config["moe_intermediate_size"]
        found |= {
            "exaone-moe.attention.sliding_window_pattern": ("[bool]", slides),
            "exaone-moe.expert_shared_feed_forward_length": ("u32", shared),
            "exaone-moe.rope.scaling.type": ("str", "none"),
        }
    if config.get("block_auto_adjust_ff_dim"):
        inner = int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3))
        unit = config["block_multiple_of"]
        found[f"{architecture}.feed_forward_length"] = ("u32", -(-inner // unit) * unit)
    if config["model_type"] in ("nemotron", "stablelm"):
        eps = config["norm_eps" if config["model_type"] == "nemotron" else "layer_norm_eps"]
        found[f"{architecture}.attention.layer_norm_epsilon"] = ("f32", eps)
        found[f"{architecture}.use_parallel_residual"] = ("bool", config.get("use_parallel_residual", False))
    elif config["model_type"] == "jais2":
        found["jais2.attention.layer_norm_epsilon"] = ("f32", config["layer_norm_eps"])
        found["jais2.rope.dimension_count"] = ("u32", config["head_dim"])
    elif "norm_eps" in config:
        found[f"{architecture}.attention.layer_norm_rms_epsilon"] = ("f32", config["norm_eps"])
    if architecture in GPT | {"phi2"}:
        inner, kv_heads = config.get("intermediate_size") or 4 * config["hidden_size"], kv_heads_of(config)
        if architecture == "dbrx":
            ffn, limit = config["ffn_config"], config["attn_config"]["clip_qkv"]
            inner, kv_heads = ffn["ffn_hidden_size"], config["attn_config"]["kv_n_heads"]
            found |= {"dbrx.expert_count": ("u32", ffn["moe_num_experts"]), "dbrx.attention.clamp_kqv": ("f32", limit),
                      "dbrx.expert_used_count": ("u32", ffn["moe_top_k"])}  # fmt: skip
        found |= {
            f"{architecture}.attention.layer_norm_epsilon": ("f32", config.get("layer_norm_eps", 1e-5)),
            f"{architecture}.feed_forward_length": ("u32", inner),
            f"{architecture}.attention.head_count_kv": ("u32", kv_heads),
        }
        if architecture == "gptneox":
            found["gptneox.use_parallel_residual"] = ("bool", config["use_parallel_residual"])
        if architecture in ("gpt2", "starcoder", "bloom", "mpt"):
            del found[f"{architecture}.rope.freq_base"]
        if architecture == "bloom":
            found["bloom.context_length"] = ("u32", config.get("max_position_embeddings", 64))
        if architecture == "mpt":
            attention = config["attn_config"]
            found["mpt.attention.max_alibi_bias"] = ("f32", attention["alibi_bias_max"])
            if attention["clip_qkv"] is not None:
                found["mpt.attention.clamp_kqv"] = ("f32", attention["clip_qkv"])
    if config["model_type"] == "olmo" and config["clip_qkv"] is not None:
        found["olmo.attention.clamp_kqv"] = ("f32", config["clip_qkv"])
    if config["model_type"] == "bitnet" and config["hidden_act"] != "silu":
        found["bitnet.hidden_activation"] = ("str", config["hidden_act"])
    if config["model_type"] == "olmo3":
        pattern = [kind == "sliding_attention" for kind in types]
        found["olmo2.attention.sliding_window_pattern"] = ("[bool]", pattern)
    size = config["vocab_size"]
    tokens = [chr(0x100 + i) if i < 0xD000 else f"token {i}" for i in range(size - 1)]
    return found | {
        "tokenizer.ggml.model": ("str", "gpt2"), "tokenizer.ggml.pre": ("str", "gpt-2"),
        "tokenizer.ggml.tokens": ("[str]", [*tokens, tokens[0] + tokens[1]]),
        "tokenizer.ggml.merges": ("[str]", [f"{tokens[0]} {tokens[1]}"]),
        "tokenizer.ggml.token_type": ("[i32]", [1] * size),
        "tokenizer.ggml.eos_token_id": ("u32", 2),
    }  # fmt: skip


def xielu(tensors):
    """The metadata of the numbers of an activation: of each one those of all layers."""
    found = {}
    for name, value in sorted(tensors.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]):
        if XIELU in name:
            found.setdefault(f"xielu.{name.split(XIELU)[1]}", []).append(float(value.ravel()[0]))
    return {key: ("[f32]", values) for key, values in found.items()}


def write(path, config, tensors, more=(), extra_tensors=()):
    """The model as a GGUF file. more: additional metadata; extra_tensors: additional {name: array}."""
    arrays = gguf_tensors(config, tensors) | dict(extra_tensors)
    more = xielu(tensors) | dict(more)
    found = {name: (Quant.F32, array.shape, gguf_writer.f32(array).ravel()) for name, array in arrays.items()}
    return gguf_writer.write(path, metadata(config) | dict(more), found)
