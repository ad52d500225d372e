"""Shared by the families of encoders: their description, and the parts of a spec that are read from common keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.encoder_spec import EncoderSpec
from foreword.models.families.base import SIZES, Rows
from foreword.models.keys import Key, Keys, only
from foreword.models.pooling import HeadActivation, HeadLayer, HeadPooling

COMMON = (
    *SIZES,
    Key("tie_word_embeddings", values=(True, False)),  # with the head of masked language models
    only("is_causal", False),
    *(only(name, False) for name in ("is_decoder", "is_encoder_decoder", "add_cross_attention")),
)
"""Keys of every encoder."""
NO_BIASES = {f"{name}_bias": 0.0 for name in ("q", "k", "v", "o", "gate", "up", "down")}
"""The biases of products of a model that has biases of norms alone."""
BERT_HEAD = {"head.0": "pooler.dense", "head.1": "classifier"}
ROBERTA_HEAD = {"head.0": "classifier.dense", "head.1": "classifier.out_proj"}
"""The modules of the head of a classifier of BERT, and of RoBERTa."""


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
    modules: canonical name → linear layer of the model's class in transformers, if it has other ones than the files.
    """

    title: str
    spec: Callable[[Config], EncoderSpec]
    keys: Keys
    prefix: str
    names: Mapping[str, str]
    head: Callable[[Config, int], tuple[HeadLayer, ...]]
    fused: Callable[[EncoderSpec], Mapping[str, Rows]] = field(default=lambda spec: {})
    head_pooling: Callable[[Config], HeadPooling] = field(default=lambda config: "cls")
    unused: tuple[str, ...] = ("pooler.", "cls.", "lm_head.", "classifier.", "qa_outputs.")
    constants: Mapping[str, float] = field(default_factory=dict)
    fused_end: str = ""
    other_names: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)

    def read(self, config: Config) -> EncoderSpec:
        """Return the spec of a config. Raise ModelError for a key with a value that the family does not compute."""
        config = self.declared(config)
        config.check()
        return self.spec(config)

    def declared(self, config: Config) -> Config:
        """Return the config with the family's keys, their usual names and their defaults."""
        return replace(config.with_usual_names(self.other_names), keys=self.keys)


def encoder(config: Config, architecture: str, **differences: Any) -> EncoderSpec:
    """Return a spec of a config's common keys, with ``differences``."""
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


def dense_head(activation: HeadActivation) -> Callable[[Config, int], tuple[HeadLayer, ...]]:
    """Return a head of classifiers: a dense layer with this activation, as that of BERT with tanh, and the labels."""

    def head(config: Config, labels: int) -> tuple[HeadLayer, ...]:
        hidden = config.size("hidden_size")
        return HeadLayer(hidden, hidden, activation=activation), HeadLayer(hidden, labels)

    return head


def no_head(config: Config, labels: int) -> tuple[HeadLayer, ...]:
    """Refuse a classifier of a family that has none."""
    raise config.error("a classifier of this family is not supported", "Use a model of embeddings")


def weight_and_bias(names: Mapping[str, str]) -> dict[str, str]:
    """Return each canonical name with its module in files: the weight, and the bias."""
    weights = {name: f"{module}.weight" for name, module in names.items()}
    return weights | {f"{name}_bias": f"{module}.bias" for name, module in names.items()}


def qkv_rows(spec: EncoderSpec) -> Mapping[str, Rows]:
    """Return the rows of queries, keys and values, and of their biases, in one tensor."""
    size = spec.num_heads * spec.head_dim
    parts = ((name, end, i) for i, name in enumerate("qkv") for end in ("", "_bias"))
    return {name + end: Rows(f"qkv{end}", i * size, (i + 1) * size) for name, end, i in parts}
