"""BERT and its like, the heads of their classifiers, and all families of encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.encoder_spec import EncoderLayerSpec, EncoderSpec
from foreword.models.families import rotary_encoders
from foreword.models.families.base import ACTIVATIONS, Rows, layers_of, num_layers
from foreword.models.families.encoder_base import (
    BERT_HEAD,
    COMMON,
    ROBERTA_HEAD,
    EncoderFamily,
    dense_head,
    encoder,
    qkv_rows,
    weight_and_bias,
)
from foreword.models.keys import Key, only, table
from foreword.models.pooling import HeadLayer, HeadPooling
from foreword.models.rope import ROPE_KEYS, rope_parameters, rope_spec


def _bert(config: Config, architecture: str, *, first_position: int = 0) -> EncoderSpec:
    positions = config.size("max_position_embeddings") - first_position
    if positions < 1:
        raise config.error(f"max_position_embeddings leaves {positions} positions", USE_ITS_CONFIG)
    return encoder(
        config.with_values({"max_position_embeddings": positions}),
        architecture,
        layers=(EncoderLayerSpec(),) * num_layers(config),
        norm_eps=config.positive("layer_norm_eps"),
        activation=ACTIVATIONS[config.get("hidden_act", str)],
        num_positions=positions,
        first_position=first_position,
        num_token_types=config.count("type_vocab_size"),
    )


def bert(config: Config) -> EncoderSpec:
    return _bert(config, "bert")


def roberta(config: Config) -> EncoderSpec:
    """Return the spec of a RoBERTa, whose positions begin behind that of the padding token."""
    return _bert(config, "roberta", first_position=_first_position(config))


def distilbert(config: Config) -> EncoderSpec:
    """Return the spec of a DistilBERT, which has no token types."""
    return _bert(config, "distilbert")


def electra(config: Config) -> EncoderSpec:
    """Return the spec of an ELECTRA whose embeddings are as wide as its layers."""
    if (size := config.size("embedding_size")) != config.size("hidden_size"):
        raise config.error(f"embedding_size = {size} is not hidden_size", "Use a model with equal sizes")
    return _bert(config, "electra")


def mpnet(config: Config) -> EncoderSpec:
    """Return the spec of an MPNet: a RoBERTa without token types, whose scores depend on distances, too."""
    spec = _bert(config, "mpnet", first_position=_MPNET_PADDING + 1)
    return replace(spec, relative_buckets=config.size("relative_attention_num_buckets"))


def _first_position(config: Config) -> int:
    padding = config.get("pad_token_id", int)
    if padding < 0:
        raise config.error(f"pad_token_id = {padding} is below 0", USE_ITS_CONFIG)
    return padding + 1


def modernbert(config: Config) -> EncoderSpec:
    every = config.size("global_attn_every_n_layers")
    is_sliding = layers_of(config, "sliding_attention", lambda i: i % every > 0)
    dim = config.size("hidden_size") // config.size("num_attention_heads")
    ropes = {}
    for kind, key in (("full_attention", "global_rope_theta"), ("sliding_attention", "local_rope_theta")):
        values = {**config.values, "rope_theta": config.positive(key)}
        parameters = rope_parameters(replace(config, values=values), kind)
        ropes[kind] = rope_spec(config, max(1, dim), parameters)
    window = config.size("local_attention") // 2
    layers = tuple(
        EncoderLayerSpec(
            ropes["sliding_attention" if slides else "full_attention"], window if slides else None, has_attn_norm=i > 0
        )
        for i, slides in enumerate(is_sliding)
    )
    return encoder(
        config,
        "modernbert",
        layers=layers,
        norm_eps=config.positive("norm_eps"),
        activation=ACTIVATIONS[config.get("hidden_activation", str)],
        norms_before=True,
        gated=True,
        biases=False,
    )


def _modernbert_head(config: Config, labels: int) -> tuple[HeadLayer, ...]:
    hidden, bias = config.size("hidden_size"), config.get("classifier_bias", bool)
    activation = ACTIVATIONS[config.get("classifier_activation", str)]
    return HeadLayer(hidden, hidden, bias=bias, activation=activation, norm=True), HeadLayer(hidden, labels)


def _positions_after_padding(spec: EncoderSpec) -> Mapping[str, Rows]:
    return {"positions": Rows("table", spec.first_position, spec.first_position + spec.num_positions)}


_BERT = table(
    COMMON,
    [
        Key("hidden_act", "gelu", tuple(ACTIVATIONS)),
        Key("layer_norm_eps", 1e-12),
        Key("type_vocab_size", 2),
        only("position_embedding_type", "absolute"),
        only("pruned_heads", {}),
    ],
)
_POOLINGS: Mapping[str, HeadPooling] = {"cls": "cls", "mean": "mean"}
_MODERNBERT = table(
    *(COMMON, ROPE_KEYS),
    [
        only("rope_theta", None),  # each type of layers has its own
        *(Key(name, "gelu", tuple(ACTIVATIONS)) for name in ("hidden_activation", "classifier_activation")),
        Key("norm_eps", 1e-5),
        *(only(name, False) for name in ("attention_bias", "mlp_bias", "norm_bias")),
        *(Key("layer_types"), Key("global_attn_every_n_layers", 3), Key("local_attention", 128)),
        *(Key("global_rope_theta", 160000.0), Key("local_rope_theta", 10000.0)),
        *(Key("classifier_pooling", "cls", tuple(_POOLINGS)), Key("classifier_bias", False)),
    ],
)

_LAYER = "encoder.layer.{i}."
_BERT_NAMES = {
    "embed": "embeddings.word_embeddings.weight",
    "positions": "embeddings.position_embeddings.weight",
    "token_types": "embeddings.token_type_embeddings.weight",
    **weight_and_bias(
        {
            "embed_norm": "embeddings.LayerNorm",
            "q": _LAYER + "attention.self.query",
            "k": _LAYER + "attention.self.key",
            "v": _LAYER + "attention.self.value",
            "o": _LAYER + "attention.output.dense",
            "attn_norm": _LAYER + "attention.output.LayerNorm",
            "up": _LAYER + "intermediate.dense",
            "down": _LAYER + "output.dense",
            "mlp_norm": _LAYER + "output.LayerNorm",
        }
    ),
}
_DISTIL_LAYER = "transformer.layer.{i}."
_DISTIL_NAMES = {
    "embed_norm": "embeddings.LayerNorm",
    **{name: f"{_DISTIL_LAYER}attention.{name}_lin" for name in "qkv"},
    "o": _DISTIL_LAYER + "attention.out_lin",
    "attn_norm": _DISTIL_LAYER + "sa_layer_norm",
    "up": _DISTIL_LAYER + "ffn.lin1",
    "down": _DISTIL_LAYER + "ffn.lin2",
    "mlp_norm": _DISTIL_LAYER + "output_layer_norm",
    "head.0": "pre_classifier",
    "head.1": "classifier",
}
_MPNET_PADDING = 1  # whatever pad_token_id is
_MPNET_NAMES = {
    "embed_norm": "embeddings.LayerNorm",
    **{name: f"{_LAYER}attention.attn.{name}" for name in "qkvo"},
    "attn_norm": _LAYER + "attention.LayerNorm",
    "up": _LAYER + "intermediate.dense",
    "down": _LAYER + "output.dense",
    "mlp_norm": _LAYER + "output.LayerNorm",
}
_ROBERTA = EncoderFamily(
    "RoBERTa, XLM-RoBERTa",
    roberta,
    table(_BERT.values(), [Key("pad_token_id", 1)]),
    "roberta.",
    {**_BERT_NAMES, **weight_and_bias(ROBERTA_HEAD), "table": _BERT_NAMES["positions"]},
    dense_head("tanh"),
    fused=_positions_after_padding,
)
_MODERNBERT_NAMES = {
    "embed": "embeddings.tok_embeddings.weight",
    "embed_norm": "embeddings.norm.weight",
    "attn_norm": "layers.{i}.attn_norm.weight",
    "qkv": "layers.{i}.attn.Wqkv.weight",
    "o": "layers.{i}.attn.Wo.weight",
    "mlp_norm": "layers.{i}.mlp_norm.weight",
    "gate_up": "layers.{i}.mlp.Wi.weight",
    "down": "layers.{i}.mlp.Wo.weight",
    "final_norm": "final_norm.weight",
    "head.0_norm": "head.norm.weight",
    **weight_and_bias({"head.0": "head.dense", "head.1": "classifier"}),
}


def _modernbert_rows(spec: EncoderSpec) -> Mapping[str, Rows]:
    inner = spec.intermediate_size
    return {**qkv_rows(spec), "gate": Rows("gate_up", 0, inner), "up": Rows("gate_up", inner, 2 * inner)}


ENCODER_FAMILIES: Mapping[str, EncoderFamily] = {
    "bert": EncoderFamily(
        "BERT", bert, _BERT, "bert.", {**_BERT_NAMES, **weight_and_bias(BERT_HEAD)}, dense_head("tanh")
    ),
    "distilbert": EncoderFamily(
        "DistilBERT",
        distilbert,
        table(
            _BERT.values(),
            [only("layer_norm_eps", 1e-12), only("type_vocab_size", 0)],
            [Key("sinusoidal_pos_embds", False, (False, True))],  # the table of positions is in the file
        ),
        "distilbert.",
        {name: _BERT_NAMES[name] for name in ("embed", "positions")} | weight_and_bias(_DISTIL_NAMES),
        dense_head("relu"),
        unused=("vocab_", "qa_outputs.", "pre_classifier.", "classifier."),
        other_names={
            "dim": "hidden_size",
            "hidden_dim": "intermediate_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "activation": "hidden_act",
        },
    ),
    "electra": EncoderFamily(
        "ELECTRA",
        electra,
        table(_BERT.values(), [Key("embedding_size", 128)]),
        "electra.",
        {**_BERT_NAMES, **weight_and_bias(ROBERTA_HEAD)},
        dense_head("gelu"),
        unused=("discriminator_predictions.", "generator_predictions.", "generator_lm_head.", "classifier."),
    ),
    "mpnet": EncoderFamily(
        "MPNet",
        mpnet,
        table(_BERT.values(), [only("type_vocab_size", 0), only("relative_attention_num_buckets", 32)]),
        "mpnet.",
        {
            "embed": _BERT_NAMES["embed"],
            "table": _BERT_NAMES["positions"],
            "relative": "encoder.relative_attention_bias.weight",
            **weight_and_bias(_MPNET_NAMES | ROBERTA_HEAD),
        },
        dense_head("tanh"),
        fused=_positions_after_padding,
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "modernbert": EncoderFamily(
        "ModernBERT",
        modernbert,
        _MODERNBERT,
        "model.",
        _MODERNBERT_NAMES,
        _modernbert_head,
        _modernbert_rows,
        lambda config: _POOLINGS[config.get("classifier_pooling", str)],
        ("head.", "decoder.", "classifier."),
    ),
    **rotary_encoders.FAMILIES,
}
"""By ``model_type`` of a config.json."""
