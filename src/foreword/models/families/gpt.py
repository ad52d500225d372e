"""GPT-2 and its successors: LayerNorm, an MLP without a gate, and biases; learned positions or a rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from foreword.arrays import F32
from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    ACTIVATIONS,
    HIDDEN_ACT,
    LAYER_NORM_EPS,
    LAYER_NORMED,
    LEARNED_POSITIONS,
    MAX_WINDOW,
    Family,
    Rows,
    by_head,
    decoder,
    fused_rows,
    module_names,
    num_layers,
    rope,
)
from foreword.models.keys import Key, only, table
from foreword.models.rope import rope_parameters, rope_spec
from foreword.models.spec import DecoderSpec, LayerSpec, NormPlaces, QueryGrowth

_BIASED = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


def gpt_neox(config: Config) -> DecoderSpec:
    """Return the spec of GPT-NeoX and Pythia, whose attention and MLP may read the same input, each with its norm."""
    is_parallel, has_biases = config.get("use_parallel_residual", bool), config.get("attention_bias", bool)
    biases = {"qkv_bias": has_biases, "o_bias": has_biases, "mlp_bias": True}
    layers = (LayerSpec(rope(config)),) * num_layers(config)
    return gpt_decoder(config, "gptneox", layers, parallel_mlp=is_parallel, parallel_norm=is_parallel, **biases)


def gpt_neox_japanese(config: Config) -> DecoderSpec:
    """Return the spec of a GPT-NeoX with one bias, of the attention of the last layer; that of others is zero."""
    hidden = config.size("hidden_size")
    inner = hidden * config.size("intermediate_multiple_size")
    layers = (LayerSpec(rope(config)),) * num_layers(config)
    return gpt_decoder(config, "gpt_neox_japanese", layers, intermediate_size=inner, o_bias=True)


def gptj(config: Config) -> DecoderSpec:
    """Return the spec of GPT-J and CodeGen, whose attention and MLP read the same input. The head has a bias."""
    dim = config.size("hidden_size") // config.size("num_attention_heads")
    rotary = config.size("rotary_dim", dim)
    if rotary > dim or rotary % 2:
        raise config.error(f"rotary_dim = {rotary} is not an even number of the {dim} of a head", USE_ITS_CONFIG)
    layers = (LayerSpec(rope_spec(config, rotary, rope_parameters(config))),) * num_layers(config)
    return gpt_decoder(config, "gptj", layers, parallel_mlp=True, mlp_bias=True, logits_bias=True)


def codegen(config: Config) -> DecoderSpec:
    key = "num_attention_heads"
    if (heads := config.size(key)) % _PARTS:
        raise config.error(f"{config.label(key)} = {heads} is not a multiple of {_PARTS}", USE_ITS_CONFIG)
    return gptj(config)


def gpt2(config: Config) -> DecoderSpec:
    is_inverse = config.get("scale_attn_by_inverse_layer_idx", bool)
    growths = (_inverse(i) if is_inverse else None for i in range(num_layers(config)))
    layers = tuple(LayerSpec(None, query_growth=growth) for growth in growths)
    return gpt_decoder(config, "gpt2", layers, **_scale(config), **_learned(config), **_BIASED)


def _inverse(layer: int) -> QueryGrowth:
    """Return a growth of queries that is 1 / (layer + 1) at every position: the logarithm in it is always ln 2."""
    return QueryGrowth(_FAR, (1 / (layer + 1) - 1) / math.log(2), offset=_FAR)


def openai_gpt(config: Config) -> DecoderSpec:
    """Return the spec of GPT-1, whose norms are those of the sums after attention and MLP. The norm of the sum after an
    MLP is, in the spec, that before the next attention, or the final one.
    """
    inner, acts = 4 * config.size("hidden_size"), {"gelu": "gelu_new"}
    if config.size("intermediate_size", inner) != inner:
        raise config.refused("intermediate_size", config.value("intermediate_size"))
    name = config.get("hidden_act", str)
    places = (NormPlaces(i > 0, False, True, False) for i in range(num_layers(config)))
    layers = tuple(LayerSpec(None, norms=norms, kept=(1.0, 1.0)) for norms in places)
    act = ACTIVATIONS[acts.get(name, name)]
    return gpt_decoder(config, "openai-gpt", layers, activation=act, **_learned(config), **_BIASED)


def gpt_bigcode(config: Config) -> DecoderSpec:
    """Return the spec of StarCoder and SantaCoder: a GPT-2 with one head of keys and values."""
    layers, heads = (LayerSpec(None),) * num_layers(config), config.size("num_attention_heads")
    kv_heads = 1 if config.get("multi_query", bool) else heads
    given = config.size("num_key_value_heads", kv_heads)
    if not config.prefix and given != kv_heads:
        raise config.refused("num_key_value_heads", given)
    own = {"num_kv_heads": given, **_scale(config), **_learned(config)}
    return gpt_decoder(config, "starcoder", layers, **own, **_BIASED)


def gpt_neo(config: Config) -> DecoderSpec:
    """Return the spec of GPT-Neo: ``attention_types`` lists which layers have a window, and scores have no scale."""
    kinds = _kinds(config, num_layers(config))
    window = config.size("window_size", most=MAX_WINDOW)
    layers = tuple(LayerSpec(None, window if kind == "local" else None) for kind in kinds)
    biases = {"o_bias": True, "mlp_bias": True}
    return gpt_decoder(config, "gpt_neo", layers, query_scale=1.0, **_learned(config), **biases)


def _kinds(config: Config, count: int) -> list[str]:
    """Return the kind of each layer: kinds that repeat so many times, one such list after the other."""
    listed = config.sequence("attention_types")
    if config.value("attention_types") is None:
        listed = [[["global", "local"], 12]]
    kinds: list[str] = []
    for item in listed:
        match item:
            case [[*names], int(times)] if {*names} <= {"global", "local"} and 0 <= times <= count:
                kinds += names * times
            case _:
                kinds = []
                break
    if len(kinds) != count:
        reason = f"attention_types {listed!r:.80} are not the kinds global and local of {count} layers"
        raise config.error(reason, USE_ITS_CONFIG)
    if (given := config.value("attention_layers")) not in (None, kinds):  # which follow from the types
        raise config.refused("attention_layers", given)
    return kinds


def opt(config: Config) -> DecoderSpec:
    layers, has_biases = (LayerSpec(None),) * num_layers(config), config.get("enable_bias", bool)
    size = config.size("hidden_size")
    if config.size("word_embed_proj_dim", size) != size:
        raise config.refused("word_embed_proj_dim", config.value("word_embed_proj_dim"))
    own = {**_learned(config), **dict.fromkeys(_BIASED, has_biases)}
    return decoder(config, "opt", layers, layer_norm=True, gated_mlp=False, norm_eps=_FIXED_EPS, **own)


def biogpt(config: Config) -> DecoderSpec:
    layers = (LayerSpec(None),) * num_layers(config)
    scale = math.sqrt(config.size("hidden_size")) if config.get("scale_embedding", bool) else 1.0
    config.value("layer_norm_eps")  # which the reference does not compute with
    own = {"embedding_scale": scale, **_learned(config), **_BIASED}
    return decoder(config, "biogpt", layers, layer_norm=True, gated_mlp=False, norm_eps=_FIXED_EPS, **own)


def xglm(config: Config) -> DecoderSpec:
    """Return the spec of XGLM, whose vectors of positions are sines and cosines."""
    layers = (LayerSpec(None),) * num_layers(config)
    scale = math.sqrt(config.size("hidden_size")) if config.get("scale_embedding", bool) else 1.0
    own = {"embedding_scale": scale, **_learned(config), **_BIASED}
    return decoder(config, "xglm", layers, layer_norm=True, gated_mlp=False, norm_eps=_FIXED_EPS, **own)


def _sinusoids(shape: tuple[int, ...]) -> F32:
    """Return the vectors of positions p, [count, size]: sin(q f_j) for half of the numbers, then cos(q f_j), with
    q = p + 2 and f_j = 10000^(−j / (half − 1)).
    """
    half = shape[1] // 2
    frequencies = np.exp(np.arange(half) * (-math.log(10000) / max(half - 1, 1)))
    angles = (np.arange(shape[0])[:, None] + 2) * frequencies
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.pad(table, ((0, 0), (0, shape[1] % 2))).astype(np.float32)


def gpt_decoder(config: Config, architecture: str, layers: tuple[LayerSpec, ...], **own: Any) -> DecoderSpec:
    """Return a spec whose MLP is four times as wide as the residual stream, if the config does not say how wide."""
    inner = config.size("intermediate_size", 4 * config.size("hidden_size"))
    own = {"layer_norm": True, "gated_mlp": False, "intermediate_size": inner, **own}
    act = None if "activation" in own else "hidden_act"
    return decoder(config, architecture, layers, act, eps="layer_norm_eps", **own)


def _learned(config: Config) -> dict[str, Any]:
    count = config.size("max_position_embeddings")
    return {"num_positions": count, "max_model_len": count}


def _scale(config: Config) -> dict[str, Any]:
    return {} if config.get("scale_attn_weights", bool) else {"query_scale": 1.0}


def rows_by_head(spec: DecoderSpec) -> Mapping[str, Rows]:
    """Return the rows of one tensor that has queries, keys and values of one head after the other."""
    return by_head(*((name, spec.head_dim) for name in "qkv"))


def _of_parts(spec: DecoderSpec) -> Mapping[str, Rows]:
    """Return the rows of one tensor that has queries, values and keys of a quarter of the heads after the other."""
    return by_head(*((name, spec.num_heads * spec.head_dim // _PARTS) for name in "qvk"))


def _bigcode_rows(spec: DecoderSpec) -> Mapping[str, Rows]:
    return fused_rows(spec) if spec.num_kv_heads == 1 else rows_by_head(spec)


def _normed_sums(spec: DecoderSpec) -> Mapping[str, str | Rows]:
    """Return the rows of queries, keys and values, and the names of norms after the MLP of each layer."""
    norms = [*(f"layers.{i}.attn_norm" for i in range(1, spec.num_layers)), "final_norm"]
    ends = {"": "weight", "_bias": "bias"}.items()
    names = {f"{norm}{end}": f"transformer.h.{i}.ln_2.{part}" for i, norm in enumerate(norms) for end, part in ends}
    return {**fused_rows(spec), **names}


def _shifted(spec: DecoderSpec) -> Mapping[str, Rows]:
    """Return the rows of positions in a table whose first two rows are of no position."""
    return {"positions": Rows("position_table", 2, 2 + spec.num_positions)}


_PARTS = 4
_FAR = 1 << 30
"""A number of tokens that no text has."""
_FIXED_EPS = 1e-5
OWN_EPS = replace(LAYER_NORM_EPS, own="layer_norm_epsilon")
_GPT = (
    OWN_EPS,
    Key("hidden_size", gguf="embedding_length", own="n_embd", is_alias=True),
    Key("num_hidden_layers", gguf="block_count", own="n_layer", is_alias=True),
    Key("num_attention_heads", gguf="attention.head_count", own="n_head", is_alias=True),
    Key("max_position_embeddings", gguf="context_length", own="n_positions", is_alias=True),
    Key("intermediate_size", gguf="feed_forward_length", own="n_inner"),
    Key("hidden_act", HIDDEN_ACT.default, HIDDEN_ACT.values, own="activation_function"),
)
"""The keys that GPT-2, GPT-J and others have other names for."""
_GPTJ = (
    Key("rotary_dim", 64),
    *(only("rope_theta", 10000.0), only("rope_scaling", None), only("rope_parameters", None)),
)
_LAYER, _BLOCK = "gpt_neox.layers.{i}.", "transformer.h.{i}."
_GPT_NAMES = module_names(
    _BLOCK,
    {"attn_norm": "ln_1", "mlp_norm": "ln_2", "qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc",
     "down": "mlp.c_proj"},
    {"embed": "transformer.wte", "positions": "transformer.wpe", "final_norm": "transformer.ln_f"},
)  # fmt: skip
_NEOX = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "qkv": "attention.query_key_value",
    "o": "attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
_GPTJ_NAMES = module_names(
    _BLOCK,
    {"attn_norm": "ln_1", "qkv": "attn.qkv_proj", "o": "attn.out_proj", "up": "mlp.fc_in", "down": "mlp.fc_out",
     **{name: f"attn.{name}_proj" for name in "qkv"}},
    {"embed": "transformer.wte", "final_norm": "transformer.ln_f", "lm_head": "lm_head"},
) | {"logits_bias": "lm_head.bias"}  # fmt: skip
_FC = {"mlp_norm": "final_layer_norm", "attn_norm": "self_attn_layer_norm", "o": "self_attn.out_proj", "up": "fc1",
       "down": "fc2", **{name: f"self_attn.{name}_proj" for name in "qkv"}}  # fmt: skip
_OF_MLX = {f"model.{name}.": f"transformer.{name}." for name in ("h", "wte", "wpe", "ln_f")}
_IN_GGUF = {"positions": "position_embd.weight"}
_NO_CROSS = only("add_cross_attention", False)
FAMILIES = {
    "gpt_neox": Family(
        "GPT-NeoX, Pythia",
        gpt_neox,
        table(
            *(LAYER_NORMED, [HIDDEN_ACT, LAYER_NORM_EPS, Key("attention_bias", True), only("is_decoder", False, True)]),
            [
                Key("partial_rotary_factor", 0.25, own="rotary_pct"),
                Key("rope_theta", 10000.0, gguf="rope.freq_base", gguf_default=10000.0, own="rotary_emb_base"),
                Key("use_parallel_residual", True, gguf="use_parallel_residual"),
            ],
            hidden_act="gelu",
        ),
        names=module_names(_LAYER, _NEOX, {"embed": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm"}),
        renamed={
            "model.h.": "gpt_neox.layers.",
            "model.embed_out.": "lm_head.",
            "embed_out.": "lm_head.",
            **{f"model.{name}.": f"gpt_neox.{name}." for name in ("embed_in", "final_layer_norm")},
        },
        fused=rows_by_head,
        gguf="gptneox",
        gguf_fused=fused_rows,
    ),
    "gpt_neox_japanese": Family(
        "GPT-NeoX, Japanese",
        gpt_neox_japanese,
        table(
            *(LAYER_NORMED, [HIDDEN_ACT, LAYER_NORM_EPS, only("is_decoder", False, True)]),
            [
                Key("partial_rotary_factor", 1.0, own="rotary_pct"),
                Key("rope_theta", 10000.0, own="rotary_emb_base"),
                Key("intermediate_multiple_size", 4),
            ],
            hidden_act="gelu",
            tie_word_embeddings=True,
        ),
        names={
            **module_names(
                "gpt_neox_japanese.layers.{i}.",
                _NEOX,
                {
                    "embed": "gpt_neox_japanese.embed_in",
                    "final_norm": "gpt_neox_japanese.final_layer_norm",
                    "lm_head": "embed_out",
                },
            ),
            "o_bias": "gpt_neox_japanese.layers.{i}.attention.dense_bias",
        },
        optional={"o_bias": 0.0},
        fused=rows_by_head,
    ),
    "gptj": Family(
        "GPT-J",
        gptj,
        table(LAYER_NORMED, _GPT, _GPTJ, hidden_act="gelu_new"),
        names=_GPTJ_NAMES,
        interleaved=True,
        renamed=_OF_MLX,
    ),
    "codegen": Family(
        "CodeGen",
        codegen,
        table(LAYER_NORMED, _GPT, _GPTJ, hidden_act="gelu_new"),
        names=_GPTJ_NAMES,
        fused=_of_parts,
        interleaved=True,
    ),
    "gpt2": Family(
        "GPT-2",
        gpt2,
        table(
            *(LEARNED_POSITIONS, _GPT, [_NO_CROSS, Key("scale_attn_weights", True)]),
            [Key("scale_attn_by_inverse_layer_idx", False)],
            hidden_act="gelu_new",
            tie_word_embeddings=True,
        ),
        names=_GPT_NAMES,
        renamed=_OF_MLX,
        transposed=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
        fused=fused_rows,
        gguf="gpt2",
        gguf_names=_IN_GGUF,
    ),
    "openai-gpt": Family(
        "GPT (2018)",
        openai_gpt,
        table(
            *(LEARNED_POSITIONS, _GPT, [Key("intermediate_size", kind=int)]),
            [Key("hidden_act", "gelu", ("gelu", "relu", "silu", "swish"), own="afn")],
            tie_word_embeddings=True,
        ),
        names=module_names(
            _BLOCK,
            {"mlp_norm": "ln_1", "qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
            {"embed": "transformer.tokens_embed", "positions": "transformer.positions_embed"},
        ),
        transposed=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
        fused=_normed_sums,
    ),
    "gpt_bigcode": Family(
        "StarCoder, SantaCoder",
        gpt_bigcode,
        table(
            *(LEARNED_POSITIONS, _GPT, [_NO_CROSS, Key("scale_attn_weights", True), Key("multi_query", True)]),
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=True,
        ),
        names=_GPT_NAMES,
        fused=_bigcode_rows,
        gguf="starcoder",
        gguf_names=_IN_GGUF,
        gguf_fused=fused_rows,
    ),
    "gpt_neo": Family(
        "GPT-Neo, TinyStories",
        gpt_neo,
        table(
            *(LEARNED_POSITIONS, [Key("window_size", 256), Key("attention_types"), Key("attention_layers"), OWN_EPS]),
            [
                Key("num_hidden_layers", own="num_layers", is_alias=True),
                Key("num_attention_heads", own="num_heads", is_alias=True),
            ],
            [Key("hidden_act", "gelu_new", HIDDEN_ACT.values, own="activation_function")],
            tie_word_embeddings=True,
        ),
        names=_GPT_NAMES
        | module_names(_BLOCK + "attn.attention.", {"o": "out_proj", **{name: f"{name}_proj" for name in "qkv"}}),
    ),
    "opt": Family(
        "OPT",
        opt,
        table(
            *(LEARNED_POSITIONS, [only("do_layer_norm_before", True), only("_remove_final_layer_norm", False)]),
            [only("layer_norm_elementwise_affine", True), Key("enable_bias", True)],
            [Key("word_embed_proj_dim", kind=int), Key("intermediate_size", own="ffn_dim")],
            [Key("hidden_act", "relu", HIDDEN_ACT.values, own="activation_function")],
            tie_word_embeddings=True,
        ),
        names=module_names(
            "model.decoder.layers.{i}.",
            _FC,
            {
                "embed": "model.decoder.embed_tokens",
                "position_table": "model.decoder.embed_positions",
                "final_norm": "model.decoder.final_layer_norm",
            },
        ),
        fused=_shifted,
    ),
    "xglm": Family(
        "XGLM",
        xglm,
        table(
            *(LEARNED_POSITIONS, [_NO_CROSS, Key("scale_embedding", True), only("pad_token_id", 1, 0, None)]),
            [
                Key("hidden_size", own="d_model", is_alias=True),
                Key("intermediate_size", own="ffn_dim"),
                Key("num_hidden_layers", own="num_layers", is_alias=True),
                Key("num_attention_heads", own="attention_heads", is_alias=True),
                Key("hidden_act", "gelu", HIDDEN_ACT.values, own="activation_function"),
            ],
            tie_word_embeddings=True,
        ),
        names=module_names("model.layers.{i}.", _FC, {"embed": "model.embed_tokens", "final_norm": "model.layer_norm"}),
        constants={"positions": _sinusoids},
        unused=("score.", "model.embed_positions."),
    ),
    "biogpt": Family(
        "BioGPT",
        biogpt,
        table(
            *(LEARNED_POSITIONS, [HIDDEN_ACT, Key("scale_embedding", True), Key("layer_norm_eps", 1e-12)]),
            hidden_act="gelu",
            tie_word_embeddings=True,
        ),
        names=module_names(
            "biogpt.layers.{i}.",
            _FC,
            {
                "embed": "biogpt.embed_tokens",
                "position_table": "biogpt.embed_positions",
                "final_norm": "biogpt.layer_norm",
                "lm_head": "output_projection",
            },
        ),
        fused=_shifted,
    ),
}
