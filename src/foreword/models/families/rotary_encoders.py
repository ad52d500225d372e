"""Encoders as BERT whose positions are rotated: Nomic BERT, GTE, and Jina Embeddings 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreword.models.config import Config
from foreword.models.encoder_spec import EncoderLayerSpec, EncoderSpec
from foreword.models.families.base import ACTIVATIONS, Rows, num_layers
from foreword.models.families.encoder_base import (
    BERT_HEAD,
    COMMON,
    NO_BIASES,
    ROBERTA_HEAD,
    EncoderFamily,
    dense_head,
    encoder,
    qkv_rows,
    weight_and_bias,
)
from foreword.models.keys import Key, only, table
from foreword.models.rope import ROPE_KEYS, rope_parameters, rope_spec


def _rotary(config: Config, architecture: str, **differences: Any) -> EncoderSpec:
    dim = config.size("hidden_size") // config.size("num_attention_heads")
    rope = rope_spec(config, max(1, dim), rope_parameters(config))
    return encoder(
        config,
        architecture,
        layers=(EncoderLayerSpec(rope),) * num_layers(config),
        norm_eps=config.positive("layer_norm_eps"),
        activation=ACTIVATIONS[config.get("hidden_act", str)],
        num_token_types=config.count("type_vocab_size"),
        **differences,
    )


def nomic_bert(config: Config) -> EncoderSpec:
    """Return the spec of a Nomic BERT, whose products have no biases. Positions beyond those of its training would
    change the rotation, and are not used.
    """
    dim = config.size("hidden_size") // config.size("num_attention_heads")
    if config.size("head_dim", dim) != dim:
        raise config.error(f"head_dim = {config.value('head_dim')} is not supported", f"Use a model with {dim}")
    positions = config.size("max_position_embeddings")
    positions = min(positions, config.size(_TRAINED, positions))
    return _rotary(config.with_values({"max_position_embeddings": positions}), "nomic_bert", gated=True)


def gte(config: Config) -> EncoderSpec:
    """Return the spec of a GTE, whose MLP has a gate, and no biases but the last."""
    return _rotary(config, "gte", gated=True)


def jina_embeddings_v3(config: Config) -> EncoderSpec:
    """Return the spec of Jina Embeddings 3: a RoBERTa with rotary positions."""
    return _rotary(config, "jina_embeddings_v3")


def _gte_rows(spec: EncoderSpec) -> Mapping[str, Rows]:
    inner = spec.intermediate_size
    return {**qkv_rows(spec), "up": Rows("up_gate", 0, inner), "gate": Rows("up_gate", inner, 2 * inner)}


_TRAINED = "max_trained_positions"
_EMBEDDINGS = {"embed": "embeddings.word_embeddings.weight", "token_types": "embeddings.token_type_embeddings.weight"}
_KEYS = (
    *(*COMMON, *ROPE_KEYS),
    *(Key("hidden_act", "gelu", tuple(ACTIVATIONS)), Key("layer_norm_eps", 1e-12), Key("type_vocab_size", 1)),
)
_NOMIC_BERT = table(
    _KEYS,
    [
        *(Key("hidden_act", "silu", ("silu",)), Key("type_vocab_size", 2), Key("head_dim", kind=int)),
        Key("rope_theta", 1000.0, gguf="rope.freq_base", gguf_default=1000.0),
        # The files of nomic-ai also have these:
        *(Key(_TRAINED, kind=int), Key("rotary_scaling_factor", kind=float)),
        *(only(name, False) for name in ("prenorm", "rotary_emb_interleaved", "causal", "use_rms_norm")),
        *(only(name, False) for name in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "parallel_block")),
        *(only("rotary_emb_fraction", 1.0), only("activation_function", "swiglu"), only("rotary_emb_scale_base", None)),
        *(only("num_experts", 0), only("moe_every_n_layers", 0)),
    ],
)
_LAYERS, _GTE_LAYER = "encoder.layers.{i}.", "encoder.layer.{i}."
_NORMS = {"embed_norm": "emb_ln", "attn_norm": _LAYERS + "norm1", "mlp_norm": _LAYERS + "norm2"}
_NOMIC_NAMES = {
    **_NORMS,
    "qkv": _LAYERS + "attn.Wqkv",
    "o": _LAYERS + "attn.out_proj",
    "up": _LAYERS + "mlp.fc11",
    "gate": _LAYERS + "mlp.fc12",
    "down": _LAYERS + "mlp.fc2",
}
_GTE_NAMES = {
    "embed_norm": "embeddings.LayerNorm",
    "qkv": _GTE_LAYER + "attention.qkv_proj",
    "o": _GTE_LAYER + "attention.o_proj",
    "attn_norm": _GTE_LAYER + "attn_ln",
    "up_gate": _GTE_LAYER + "mlp.up_gate_proj",
    "down": _GTE_LAYER + "mlp.down_proj",
    "mlp_norm": _GTE_LAYER + "mlp_ln",
}
_JINA_NAMES = {
    **_NORMS,
    "qkv": _LAYERS + "mixer.Wqkv",
    "o": _LAYERS + "mixer.out_proj",
    "up": _LAYERS + "mlp.fc1",
    "down": _LAYERS + "mlp.fc2",
}
_ATTENTION = {name: f"layers.{{i}}.self_attn.{name}_proj.weight" for name in "qkvo"}
_MODULES = _ATTENTION | {name: f"layers.{{i}}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
_JINA_MODULES = _ATTENTION | {"up": "layers.{i}.mlp.fc1.weight", "down": "layers.{i}.mlp.fc2.weight"}
FAMILIES = {
    "nomic_bert": EncoderFamily(
        "Nomic BERT",
        nomic_bert,
        _NOMIC_BERT,
        "nomic_bert.",
        {**_EMBEDDINGS, **weight_and_bias(_NOMIC_NAMES | BERT_HEAD)},
        dense_head("tanh"),
        qkv_rows,
        constants=NO_BIASES,
        other_names={
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_inner": "intermediate_size",
            "n_layer": "num_hidden_layers",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "layer_norm_eps",
            "rotary_emb_base": "rope_theta",
        },
        modules=_MODULES,
    ),
    "gte": EncoderFamily(
        "GTE",
        gte,
        table(_KEYS, rope_theta=160000.0),
        "gte.",
        {**_EMBEDDINGS, **weight_and_bias(_GTE_NAMES | BERT_HEAD)},
        dense_head("tanh"),
        _gte_rows,
        constants={"gate_bias": 0.0, "up_bias": 0.0},
        modules=_MODULES,
    ),
    "jina_embeddings_v3": EncoderFamily(
        "Jina Embeddings 3",
        jina_embeddings_v3,
        table(_KEYS, layer_norm_eps=1e-5, rope_theta=20000.0),
        "roberta.",
        {**_EMBEDDINGS, **weight_and_bias(_JINA_NAMES | ROBERTA_HEAD)},
        dense_head("tanh"),
        qkv_rows,
        modules=_JINA_MODULES,
    ),
}
