"""BERT, RoBERTa and ModernBERT, and the heads of their classifiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.encoder_spec import EncoderLayerSpec, EncoderSpec
from foreword.models.families.base import ACTIVATIONS, SIZES, Rows, layers_of, num_layers
from foreword.models.keys import Key, Keys, only, table
from foreword.models.pooling import HeadLayer
from foreword.models.rope import ROPE_KEYS, rope_parameters, rope_spec


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """The description of one family of encoders: how its files are read.

    title: its name on pages. spec: its `EncoderSpec` from a config. keys: those of the config, all of them.
    names: canonical names in its files, without the prefix that the tensors of the encoder have in the files of a
    classifier. fused: weights that are rows of another tensor. unused: beginnings of the names of heads that are not
    run.
    head: of a classifier, from the config and its number of labels; head_pooling: which states it takes.
    constants: values of weights that its files do not have. fused_end: the end of the name of a tensor without which
    ``fused`` does not hold; empty: it holds for all files. other_names: keys of a config that stand for others.
    """

    title: str
    spec: Callable[[Config], EncoderSpec]
    keys: Keys
    prefix: str
    names: Mapping[str, str]
    head: Callable[[Config, int], tuple[HeadLayer, ...]]
    fused: Callable[[EncoderSpec], Mapping[str, Rows]] = field(default=lambda spec: {})
    head_pooling: Callable[[Config], str] = field(default=lambda config: "cls")
    unused: tuple[str, ...] = ("pooler.", "cls.", "lm_head.", "classifier.", "qa_outputs.")
    constants: Mapping[str, float] = field(default_factory=dict)
    fused_end: str = ""
    other_names: Mapping[str, str] = field(default_factory=dict)

    def read(self, config: Config) -> EncoderSpec:
        """Return the spec of a config. Raise ModelError for a key with a value that the family does not compute."""
        config = self.declared(config)
        config.check()
        return self.spec(config)

    def declared(self, config: Config) -> Config:
        """Return the config with the family's keys, their usual names and their defaults."""
        return replace(config.with_usual_names(self.other_names), keys=self.keys)


def _encoder(config: Config, architecture: str, **differences: Any) -> EncoderSpec:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads", most=512)
    if hidden % heads:
        raise config.error(f"hidden_size {hidden} is not a multiple of {heads} heads", USE_ITS_CONFIG)
    spec: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": config.size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": config.size("intermediate_size"),
        "num_heads": heads,
        "head_dim": hidden // heads,
        "max_model_len": config.size("max_position_embeddings"),
    }
    return EncoderSpec(**spec, **differences)


def _bert(config: Config, architecture: str, *, first_position: int = 0) -> EncoderSpec:
    positions = config.size("max_position_embeddings") - first_position
    if positions < 1:
        raise config.error(f"max_position_embeddings leaves {positions} positions", USE_ITS_CONFIG)
    return _encoder(
        config.with_values({"max_position_embeddings": positions}),
        architecture,
        layers=(EncoderLayerSpec(),) * num_layers(config),
        norm_eps=config.positive("layer_norm_eps"),
        activation=ACTIVATIONS[config.get("hidden_act", str)],
        num_positions=positions,
        first_position=first_position,
        num_token_types=config.size("type_vocab_size"),
    )


def bert(config: Config) -> EncoderSpec:
    return _bert(config, "bert")


def roberta(config: Config) -> EncoderSpec:
    """Return the spec of a RoBERTa, whose positions begin behind that of the padding token."""
    return _bert(config, "roberta", first_position=_first_position(config))


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
    return _encoder(
        config,
        "modernbert",
        layers=layers,
        norm_eps=config.positive("norm_eps"),
        activation=ACTIVATIONS[config.get("hidden_activation", str)],
        norms_before=True,
        gated=True,
        biases=False,
    )


def nomic_bert(config: Config) -> EncoderSpec:
    """Return the spec of a Nomic BERT, whose positions are rotated, and whose products have no biases. Positions beyond
    those of its training would change the rotation, and are not used.
    """
    dim = config.size("hidden_size") // config.size("num_attention_heads")
    if config.size("head_dim", dim) != dim:
        raise config.error(f"head_dim = {config.value('head_dim')} is not supported", f"Use a model with {dim}")
    rope = rope_spec(config, dim, rope_parameters(config))
    positions = config.size("max_position_embeddings")
    return _encoder(
        config.with_values({"max_position_embeddings": min(positions, config.size(_TRAINED, positions))}),
        "nomic_bert",
        layers=(EncoderLayerSpec(rope),) * num_layers(config),
        norm_eps=config.positive("layer_norm_eps"),
        activation=ACTIVATIONS[config.get("hidden_act", str)],
        num_token_types=config.count("type_vocab_size"),
        gated=True,
    )


def _bert_head(config: Config, labels: int) -> tuple[HeadLayer, ...]:
    hidden = config.size("hidden_size")
    return HeadLayer(hidden, hidden, activation="tanh"), HeadLayer(hidden, labels)


def no_head(config: Config, labels: int) -> tuple[HeadLayer, ...]:
    """Refuse a classifier of a family that has none."""
    raise config.error("a classifier of this family is not supported", "Use a model of embeddings")


def _modernbert_head(config: Config, labels: int) -> tuple[HeadLayer, ...]:
    hidden, bias = config.size("hidden_size"), config.get("classifier_bias", bool)
    activation = ACTIVATIONS[config.get("classifier_activation", str)]
    return HeadLayer(hidden, hidden, bias=bias, activation=activation, norm=True), HeadLayer(hidden, labels)


def weight_and_bias(names: Mapping[str, str]) -> dict[str, str]:
    """Return each canonical name with its module in files: the weight, and the bias."""
    weights = {name: f"{module}.weight" for name, module in names.items()}
    return weights | {f"{name}_bias": f"{module}.bias" for name, module in names.items()}


_TRAINED = "max_trained_positions"
_COMMON = (
    *SIZES,
    Key("tie_word_embeddings", values=(True, False)),  # with the head of masked language models
    only("is_causal", False),
    *(only(name, False) for name in ("is_decoder", "is_encoder_decoder", "add_cross_attention")),
)
_BERT = table(
    _COMMON,
    [
        Key("hidden_act", "gelu", tuple(ACTIVATIONS)),
        Key("layer_norm_eps", 1e-12),
        Key("type_vocab_size", 2),
        only("position_embedding_type", "absolute"),
        only("pruned_heads", {}),
    ],
)
_MODERNBERT = table(
    *(_COMMON, ROPE_KEYS),
    [
        only("rope_theta", None),  # each type of layers has its own
        *(Key(name, "gelu", tuple(ACTIVATIONS)) for name in ("hidden_activation", "classifier_activation")),
        Key("norm_eps", 1e-5),
        *(only(name, False) for name in ("attention_bias", "mlp_bias", "norm_bias")),
        *(Key("layer_types"), Key("global_attn_every_n_layers", 3), Key("local_attention", 128)),
        *(Key("global_rope_theta", 160000.0), Key("local_rope_theta", 10000.0)),
        *(Key("classifier_pooling", "cls", ("cls", "mean")), Key("classifier_bias", False)),
    ],
)

_NOMIC_BERT = table(
    *(_COMMON, ROPE_KEYS),
    [
        Key("hidden_act", "silu", ("silu",)),
        *(Key("layer_norm_eps", 1e-12), Key("type_vocab_size", 2), Key("head_dim", kind=int)),
        Key("rope_theta", 1000.0, gguf="rope.freq_base", gguf_default=1000.0),
        # The files of nomic-ai also have these:
        *(Key(_TRAINED, kind=int), Key("rotary_scaling_factor", kind=float)),
        *(only(name, False) for name in ("prenorm", "rotary_emb_interleaved", "causal", "use_rms_norm")),
        *(only(name, False) for name in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "parallel_block")),
        *(only("rotary_emb_fraction", 1.0), only("activation_function", "swiglu"), only("rotary_emb_scale_base", None)),
        *(only("num_experts", 0), only("moe_every_n_layers", 0)),
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
_ROBERTA = EncoderFamily(
    "RoBERTa, XLM-RoBERTa",
    roberta,
    table(_BERT.values(), [Key("pad_token_id", 1)]),
    "roberta.",
    {
        **_BERT_NAMES,
        **weight_and_bias({"head.0": "classifier.dense", "head.1": "classifier.out_proj"}),
        "table": _BERT_NAMES["positions"],
    },
    _bert_head,
    fused=lambda spec: {"positions": Rows("table", spec.first_position, spec.first_position + spec.num_positions)},
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


_NOMIC_LAYER = "encoder.layers.{i}."
_NOMIC_BERT_NAMES = {
    **{name: source for name, source in _BERT_NAMES.items() if name in ("embed", "token_types")},
    **weight_and_bias(
        {
            "embed_norm": "emb_ln",
            "qkv": _NOMIC_LAYER + "attn.Wqkv",
            "o": _NOMIC_LAYER + "attn.out_proj",
            "attn_norm": _NOMIC_LAYER + "norm1",
            "up": _NOMIC_LAYER + "mlp.fc11",
            "gate": _NOMIC_LAYER + "mlp.fc12",
            "down": _NOMIC_LAYER + "mlp.fc2",
            "mlp_norm": _NOMIC_LAYER + "norm2",
        }
    ),
}
NO_BIASES = {f"{name}_bias": 0.0 for name in ("q", "k", "v", "o", "gate", "up", "down")}
"""The biases of products of a model that has biases of norms alone."""


def qkv_rows(spec: EncoderSpec) -> Mapping[str, Rows]:
    """Return the rows of queries, keys and values, and of their biases, in one tensor."""
    size = spec.num_heads * spec.head_dim
    parts = ((name, end, i) for i, name in enumerate("qkv") for end in ("", "_bias"))
    return {name + end: Rows(f"qkv{end}", i * size, (i + 1) * size) for name, end, i in parts}


def _modernbert_rows(spec: EncoderSpec) -> Mapping[str, Rows]:
    inner = spec.intermediate_size
    return {**qkv_rows(spec), "gate": Rows("gate_up", 0, inner), "up": Rows("gate_up", inner, 2 * inner)}


ENCODER_FAMILIES: Mapping[str, EncoderFamily] = {
    "bert": EncoderFamily(
        "BERT",
        bert,
        _BERT,
        "bert.",
        {**_BERT_NAMES, **weight_and_bias({"head.0": "pooler.dense", "head.1": "classifier"})},
        _bert_head,
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "nomic_bert": EncoderFamily(
        "Nomic BERT",
        nomic_bert,
        _NOMIC_BERT,
        "nomic_bert.",
        _NOMIC_BERT_NAMES,
        no_head,
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
    ),
    "modernbert": EncoderFamily(
        "ModernBERT",
        modernbert,
        _MODERNBERT,
        "model.",
        _MODERNBERT_NAMES,
        _modernbert_head,
        _modernbert_rows,
        lambda config: config.get("classifier_pooling", str),
        ("head.", "decoder.", "classifier."),
    ),
}
"""By ``model_type`` of a config.json."""
