"""Llama and those that differ in little: windows, experts, biases, layers without rotation, another order of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreword.models.config import O_BIAS, USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    CAUSAL_OR_NOT,
    DECODER,
    HIDDEN_ACT,
    MAX_WINDOW,
    NORMED_EXPERTS,
    SPARSE_MOE_NAMES,
    SPARSE_MOE_RENAMED,
    WINDOWS,
    WITH_BIASES,
    Family,
    Rows,
    by_head,
    decoder,
    experts,
    module_names,
    num_layers,
    rope,
    same_window,
    windows,
)
from foreword.models.families.encoder_base import dense_head
from foreword.models.keys import Key, of_gguf, only, table
from foreword.models.pooling import HeadPooling
from foreword.models.spec import DecoderSpec, LayerSpec


def llama(config: Config) -> DecoderSpec:
    """Return the spec of Llama; in a GGUF file also that of Mistral, with a window, and of Mixtral, with experts."""
    moe = experts(config) if config.value("num_experts") else None
    window = config.size(_WINDOW, most=MAX_WINDOW) if config.value(_WINDOW) else None
    layer = LayerSpec(rope(config), window, moe)
    return decoder(config, "llama", (layer,) * num_layers(config))


def internlm3(config: Config) -> DecoderSpec:
    """Return the spec of InternLM 3 and of IQuest-Coder, which are Llama. Either all products have biases, or none."""
    if (has_bias := config.get("mlp_bias", bool)) != config.get("attention_bias", bool):
        raise config.refused("mlp_bias", has_bias)
    return decoder(config, "llama", (LayerSpec(rope(config)),) * num_layers(config))


def internlm2(config: Config) -> DecoderSpec:
    """Return the spec of InternLM 2 and 2.5: a Llama whose attention may have biases."""
    has_bias, layers = config.get("bias", bool), (LayerSpec(rope(config)),) * num_layers(config)
    return decoder(config, "llama", layers, qkv_bias=has_bias, o_bias=has_bias and config.get(O_BIAS, bool, True))


def exaone(config: Config) -> DecoderSpec:
    """Return the spec of EXAONE 3 and 3.5, and of EXAONE Deep, which are Llama with other names."""
    inner = config.size("intermediate_size", 4 * config.size("hidden_size"))
    return decoder(config, "llama", (LayerSpec(rope(config)),) * num_layers(config), intermediate_size=inner)


def eurobert(config: Config) -> DecoderSpec:
    """Return the spec of EuroBERT, a Llama whose tokens see later ones."""
    return decoder(config, "eurobert", (LayerSpec(rope(config)),) * num_layers(config))


def mistral(config: Config) -> DecoderSpec:
    return decoder(config, "mistral", (LayerSpec(rope(config), same_window(config)),) * num_layers(config))


def ministral(config: Config) -> DecoderSpec:
    """Return the spec of Ministral of 2024, which is Mistral with layers that may differ in their windows."""
    rotary = rope(config)
    return decoder(config, "ministral", tuple(LayerSpec(rotary, w) for w in windows(config, lambda i: True)))


def cwm(config: Config) -> DecoderSpec:
    """Return the spec of Code World Model: the first layer and every fourth one after it have no window."""
    rotary = rope(with_rope(config, _CWM_ROPE))
    layers = tuple(LayerSpec(rotary, window) for window in windows(config, lambda i: i % 4 != 0))
    return decoder(config, "cwm", layers)


def with_rope(config: Config, parameters: Mapping[str, Any]) -> Config:
    """Return the config with these rotary parameters, if it has none."""
    if config.value("rope_scaling") is not None or config.value("rope_parameters") is not None:
        return config
    return config.with_values({"rope_parameters": parameters})


def helium(config: Config) -> DecoderSpec:
    return decoder(config, "helium", (LayerSpec(rope(config)),) * num_layers(config), o_bias=False)


def mixtral(config: Config) -> DecoderSpec:
    layer = LayerSpec(rope(config), same_window(config), experts(config))
    return decoder(config, "mixtral", (layer,) * num_layers(config))


def ernie4_5(config: Config) -> DecoderSpec:
    return decoder(config, "ernie4_5", (LayerSpec(rope(config)),) * num_layers(config))


def arcee(config: Config) -> DecoderSpec:
    """Return the spec of a Llama whose MLP has squared ReLU and no gate."""
    return decoder(config, "arcee", (LayerSpec(rope(config)),) * num_layers(config), gated_mlp=False)


def seed_oss(config: Config) -> DecoderSpec:
    layers = (LayerSpec(rope(config)),) * num_layers(config)
    return decoder(config, "seed_oss", layers, o_bias=config.get("attention_out_bias", bool))


def smollm3(config: Config) -> DecoderSpec:
    """Return a spec in which every fourth layer has no rotary embedding, or those with a 0 in ``no_rope_layers``.
    With ``use_sliding_window`` these layers have the window.
    """
    rotary, count = rope(config), num_layers(config)
    every = config.size("no_rope_layer_interval")
    flags = config.sequence("no_rope_layers")
    if config.value("no_rope_layers") is None:
        flags = [(i + 1) % every != 0 for i in range(count)]
    if len(flags) != count or not all(isinstance(flag, int) and flag in (0, 1) for flag in flags):
        raise config.error(f"no_rope_layers {flags!r:.80} is not {count} of 0 and 1", USE_ITS_CONFIG)
    slides = config.get("use_sliding_window", bool)
    spans = windows(config, lambda i: slides and not flags[i])
    layers = tuple(LayerSpec(rotary if flag else None, w) for flag, w in zip(flags, spans, strict=True))
    return decoder(config, "smollm3", layers)


def _grouped_rows(spec: DecoderSpec) -> Mapping[str, Rows]:
    """Return the rows of wqkv, which has the queries of each key/value head before that and its value."""
    queries = spec.num_heads // spec.num_kv_heads * spec.head_dim
    return by_head(("q", queries), ("k", spec.head_dim), ("v", spec.head_dim))


_WINDOW = "*.attention.sliding_window"
_COMMON = (*DECODER, HIDDEN_ACT)
_BIASED = (*DECODER, HIDDEN_ACT, *WITH_BIASES)
_POOLINGS: Mapping[str, HeadPooling] = {"bos": "cls", "mean": "mean", "late": "late"}
_POOLING = Key("classifier_pooling", "late", tuple(_POOLINGS))
_CWM_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
FAMILIES = {
    "llama": Family(
        "Llama 2 and 3",
        llama,
        table(_BIASED, NORMED_EXPERTS, [CAUSAL_OR_NOT, of_gguf(_WINDOW, kind=int)]),
        gguf="llama",
        gguf_interleaved=True,
    ),
    "eurobert": Family(
        "EuroBERT",
        eurobert,
        table([*_BIASED, only("is_causal", False, gguf="attention.causal"), _POOLING], rms_norm_eps=1e-5),
        names=module_names("", {}, {"head.0": "dense", "head.1": "classifier"}),
        unused=("lm_head.", "dense.", "classifier."),
        pooling="mean",
        head=dense_head("gelu"),
        head_pooling=lambda config: _POOLINGS[config.get(_POOLING.name, str)],
        aliases={"clf_pooling": _POOLING.name},  # EuroBERT's own code wrote it so
        gguf="eurobert",
    ),
    "internlm3": Family(
        "InternLM 3",
        internlm3,
        table(_BIASED, num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5),
        aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        shared_gguf="llama",
    ),
    "internlm2": Family(
        "InternLM 2 and 2.5",
        internlm2,
        table(_COMMON, [Key("bias", True)]),
        names=module_names(
            "model.layers.{i}.",
            {
                "qkv": "attention.wqkv",
                "o": "attention.wo",
                "attn_norm": "attention_norm",
                "mlp_norm": "ffn_norm",
                "gate": "feed_forward.w1",
                "up": "feed_forward.w3",
                "down": "feed_forward.w2",
            },
            {"embed": "model.tok_embeddings", "lm_head": "output"},
        ),
        fused=_grouped_rows,
        gguf="internlm2",
        gguf_interleaved=True,
        gguf_fused=lambda spec: {},
    ),
    "exaone": Family(
        "EXAONE 3 and 3.5",
        exaone,
        table(
            *(_COMMON, [Key("num_hidden_layers", gguf="block_count", own="num_layers", is_alias=True)]),
            [Key("intermediate_size", gguf="feed_forward_length", kind=int)],
            [Key("hidden_act", HIDDEN_ACT.default, HIDDEN_ACT.values, own="activation_function")],
            [Key("rms_norm_eps", 1e-5, gguf="attention.layer_norm_rms_epsilon", own="layer_norm_epsilon")],
            tie_word_embeddings=True,
        ),
        names=module_names(
            "transformer.h.{i}.",
            {
                **{name: f"attn.attention.{name}_proj" for name in "qkv"},
                "o": "attn.attention.out_proj",
                "attn_norm": "ln_1",
                "mlp_norm": "ln_2",
                "gate": "mlp.c_fc_0",
                "up": "mlp.c_fc_1",
                "down": "mlp.c_proj",
            },
            {"embed": "transformer.wte", "final_norm": "transformer.ln_f"},
        ),
        gguf="exaone",
    ),
    "iquestcoder": Family(
        "IQuest-Coder",
        internlm3,
        table(
            [*_BIASED, only("clip_qkv", None), only("use_sliding_window", False)],
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
        ),
        shared_gguf="llama",
    ),
    "mistral": Family(
        "Mistral",
        mistral,
        table(_COMMON, WINDOWS, num_key_value_heads=8, sliding_window=4096),
        unused=("score.", "vision_tower.", "multi_modal_projector."),
        shared_gguf="llama",
    ),
    "ministral": Family(
        "Ministral (2024)", ministral, table(_COMMON, WINDOWS, num_key_value_heads=8, sliding_window=4096)
    ),
    "cwm": Family(
        "Code World Model",
        cwm,
        {
            **table(
                *(_COMMON, WINDOWS, [Key("mlp_bias", False)]),
                num_key_value_heads=8,
                head_dim=128,
                rms_norm_eps=1e-5,
                rope_theta=1e6,
            ),
            "sliding_window": Key("sliding_window", 8192, kind=int),
        },
    ),
    "helium": Family(
        "Helium",
        helium,
        table(_BIASED, num_key_value_heads=20, head_dim=128, rms_norm_eps=1e-8, rope_theta=1e5),
        interleaved=True,
    ),
    "mixtral": Family(
        "Mixtral",
        mixtral,
        table(_COMMON, WINDOWS, NORMED_EXPERTS, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6),
        names=SPARSE_MOE_NAMES,
        renamed=SPARSE_MOE_RENAMED,
        shared_gguf="llama",
    ),
    "ernie4_5": Family(
        "ERNIE 4.5",
        ernie4_5,
        table(
            *(_COMMON, [Key("use_bias", False)]),
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            rope_theta=5e5,
            head_dim=128,
        ),
        interleaved=True,
        gguf="ernie4_5",
        gguf_interleaved=True,
    ),
    "arcee": Family(
        "Arcee (AFM)",
        arcee,
        table(_BIASED, [only("hidden_act", "relu2")], rms_norm_eps=1e-5),
        gguf="arcee",
        gguf_interleaved=True,
    ),
    "seed_oss": Family(
        "Seed-OSS",
        seed_oss,
        table([*_BIASED, Key("attention_out_bias", False)], attention_bias=True, num_key_value_heads=8, head_dim=128),
        gguf="seed_oss",
        gguf_names={"mlp_norm": "blk.{i}.post_attention_norm.weight"},
    ),
    "smollm3": Family(
        "SmolLM3",
        smollm3,
        table(
            *(_BIASED, WINDOWS),
            [Key("no_rope_layers"), Key("no_rope_layer_interval", 4), Key("use_sliding_window", False)],
            num_key_value_heads=4,
            tie_word_embeddings=True,
            rope_theta=2e6,
        ),
        gguf="smollm3",
        gguf_interleaved=True,
    ),
}
