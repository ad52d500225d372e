"""MiniCPM 1, 2 and 4: Llama with scaled embeddings, residual branches and logits."""

from __future__ import annotations

import math

from foreword.models.config import Config
from foreword.models.families.base import DECODER, HIDDEN_ACT, Family, decoder, num_layers, rope
from foreword.models.keys import Key, of_gguf, only, table
from foreword.models.spec import DecoderSpec, LayerSpec

_BASE, _DEPTH, _EMBEDDING = 256, 1.4, 12.0
"""The values of a GGUF file that has none of them."""


def minicpm(config: Config) -> DecoderSpec:
    count, hidden = num_layers(config), config.size("hidden_size")
    if config.prefix:
        residual = config.positive(_RESIDUAL, _DEPTH / math.sqrt(count))
        logits = 1 / config.positive(_LOGITS, hidden / _BASE)
    else:
        residual = config.positive("scale_depth") / math.sqrt(count)
        logits = config.size("dim_model_base") / hidden
    return decoder(
        config,
        "minicpm",
        (LayerSpec(rope(config)),) * count,
        embedding_scale=config.positive("scale_emb"),
        residual_scale=residual,
        logit_scale=logits,
    )


_RESIDUAL, _LOGITS = "*.residual_scale", "*.logit_scale"
_KEYS = (
    *(*DECODER, HIDDEN_ACT),
    Key("scale_emb", 1.0, gguf="embedding_scale", gguf_default=_EMBEDDING),
    *(Key("scale_depth", 1.0), Key("dim_model_base", 1)),
    *(of_gguf(name, kind=float) for name in (_RESIDUAL, _LOGITS)),
    *(only("num_experts", 0), only("sparse_config", None)),
)
FAMILIES = {
    "minicpm": Family(
        "MiniCPM 1, 2 and 4", minicpm, table(_KEYS, tie_word_embeddings=True), gguf="minicpm", gguf_interleaved=True
    )
}
