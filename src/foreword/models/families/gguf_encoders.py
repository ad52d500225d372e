"""Encoders in GGUF files as llama.cpp's converter writes them. DistilBERT is a BERT without token types.

A file says nothing of the function of the MLPs, which is that of the published models, and its table of positions has
no rows of padding. Of classifiers it may have RoBERTa's head, as ``cls`` and ``cls.output`` (pooling_type 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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


GGUF_ENCODER_FAMILIES: Mapping[str, EncoderFamily] = {
    "bert": replace(
        ENCODER_FAMILIES["bert"],
        keys=_keys("bert", layer_norm_eps="attention.layer_norm_epsilon"),
        prefix="",
        names=_NAMES,
        fused=qkv_rows,
        fused_end=".attn_qkv.weight",
        unused=(),
    ),
    "nomic-bert": replace(
        ENCODER_FAMILIES["nomic_bert"],
        keys=_keys("nomic_bert", layer_norm_eps="attention.layer_norm_epsilon", rope_theta="rope.freq_base"),
        prefix="",
        names=_NAMES,
        fused_end=".attn_qkv.weight",
        head=no_head,
        other_names={},
        unused=(),
    ),
    "jina-bert-v3": replace(
        ENCODER_FAMILIES["jina_embeddings_v3"],
        keys=_keys("jina_embeddings_v3", layer_norm_eps="attention.layer_norm_epsilon"),
        prefix="",
        names=_NAMES,
        head=no_head,
        fused_end=".attn_qkv.weight",
        unused=(),
    ),
    "modern-bert": replace(
        ENCODER_FAMILIES["modernbert"],
        keys=_keys(
            "modernbert",
            norm_eps="attention.layer_norm_epsilon",
            local_attention="attention.sliding_window",
            global_attn_every_n_layers="attention.sliding_window_pattern",
            global_rope_theta="rope.freq_base",
            local_rope_theta="rope.freq_base_swa",
        ),
        prefix="",
        names=_MODERNBERT_NAMES,
        head=no_head,
        unused=(),
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
