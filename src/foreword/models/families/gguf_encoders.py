"""Encoders in GGUF files as llama.cpp's converter writes them. DistilBERT is a BERT without token types.

A file says nothing of the function of the MLPs, which is that of the published models, and its table of positions has
no rows of padding. Of classifiers it may have RoBERTa's head, as ``cls`` and ``cls.output`` (pooling_type 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foreword.models.families.base import GGUF_LAYER
from foreword.models.families.encoder_base import EncoderFamily, no_head, qkv_rows, weight_and_bias
from foreword.models.families.encoders import ENCODER_FAMILIES
from foreword.models.keys import Key, Keys, only, only_in_gguf, table

LABELS = "classifier_labels"
RANK = 4
"""The pooling_type of a classifier."""
_COMMON = (
    only("is_causal", False, gguf="attention.causal"),
    Key("pooling_type", 0, (0, 1, 2, 3, RANK), gguf="pooling_type", gguf_default=0),
    Key(LABELS, gguf="classifier.output_labels", kind=list),
    Key("type_vocab_size", 0),  # the loader takes it from the tensor
    only_in_gguf("nextn_predict_layers", 0),
)
_NAMES = {
    "embed": "token_embd.weight",
    "positions": "position_embd.weight",
    "token_types": "token_types.weight",
    **weight_and_bias(
        {
            "embed_norm": "token_embd_norm",
            **{name: f"{GGUF_LAYER}attn_{name}" for name in ("q", "k", "v", "qkv")},
            "o": f"{GGUF_LAYER}attn_output",
            "attn_norm": f"{GGUF_LAYER}attn_output_norm",
            **{name: f"{GGUF_LAYER}ffn_{name}" for name in ("gate", "up", "down")},
            "mlp_norm": f"{GGUF_LAYER}layer_output_norm",
            "head.0": "cls",
            "head.1": "cls.output",
        }
    ),
}
_MODERNBERT_NAMES = {
    **{name: source for name, source in _NAMES.items() if not name.endswith("_bias")},
    "attn_norm": f"{GGUF_LAYER}attn_norm.weight",
    "gate_up": f"{GGUF_LAYER}ffn_up.weight",
    "mlp_norm": f"{GGUF_LAYER}ffn_norm.weight",
    "final_norm": "output_norm.weight",
}


def _keys(family: str, **names: str) -> Keys:
    """Return the keys of a family, with the names that GGUF files have for some of them."""
    own = ENCODER_FAMILIES[family].keys.values()
    named = [replace(key, gguf=names[key.name], gguf_default=key.default) for key in own if key.name in names]
    return table(own, _COMMON, named)


def _family(of: str, keys: Mapping[str, str], **differences: Any) -> EncoderFamily:
    """Return a family with its names in GGUF files. keys: see `_keys`."""
    own = ENCODER_FAMILIES[of]
    return replace(own, keys=_keys(of, **keys), **{"prefix": "", "names": _NAMES, "unused": (), **differences})


_EPS = {"layer_norm_eps": "attention.layer_norm_epsilon"}
_QKV_END = ".attn_qkv.weight"
GGUF_ENCODER_FAMILIES: Mapping[str, EncoderFamily] = {
    "bert": _family("bert", _EPS, fused=qkv_rows, fused_end=_QKV_END),
    "nomic-bert": _family(
        "nomic_bert", {**_EPS, "rope_theta": "rope.freq_base"}, fused_end=_QKV_END, head=no_head, other_names={}
    ),
    "jina-bert-v3": _family("jina_embeddings_v3", _EPS, fused_end=_QKV_END, head=no_head),
    "modern-bert": _family(
        "modernbert",
        {
            "norm_eps": "attention.layer_norm_epsilon",
            "local_attention": "attention.sliding_window",
            "global_attn_every_n_layers": "attention.sliding_window_pattern",
            "global_rope_theta": "rope.freq_base",
            "local_rope_theta": "rope.freq_base_swa",
        },
        names=_MODERNBERT_NAMES,
        head=no_head,
    ),
}
"""By ``general.architecture``."""

GGUF_ENCODER_TYPES: Mapping[str, tuple[str, ...]] = {
    "bert": ("bert", "distilbert", "roberta", "xlm-roberta"),
    "nomic-bert": ("nomic_bert",),
    "jina-bert-v3": ("jina_embeddings_v3",),
    "modern-bert": ("modernbert",),
}
"""The types of models that an architecture stands for."""
