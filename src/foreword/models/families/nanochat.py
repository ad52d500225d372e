"""nanochat: norms without weights, also of embeddings and of rotated queries and keys, and squared ReLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foreword.models.config import Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    DECODER,
    HIDDEN_ACT,
    Family,
    decoder,
    normed_after_rotation,
    num_layers,
    rope,
)
from foreword.models.families.gemma import cap
from foreword.models.keys import Key, table
from foreword.models.spec import DecoderSpec


def nanochat(config: Config) -> DecoderSpec:
    """Return a spec whose heads rotate backwards, with norms after the rotation."""
    of_model = rope(config)
    backwards = replace(of_model, inv_freq=tuple(-f for f in of_model.inv_freq))
    layers = (normed_after_rotation(backwards, config.positive("rms_norm_eps")),) * num_layers(config)
    own: dict[str, Any] = {
        "embed_norm": True,
        "gated_mlp": False,
        "final_softcap": cap(config, "final_logit_softcapping"),
    }
    return decoder(config, "nanochat", layers, **own)


_MLP = "model.layers.{i}.mlp."
_OF_ITS_TRAINING = {
    "transformer.h.": "model.layers.",
    "transformer.wte.": "model.embed_tokens.",
    **{f".attn.c_{name}.": f".self_attn.{own}_proj." for name, own in (*zip("qkv", "qkv", strict=True), ("proj", "o"))},
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}
"""The names of the code that trains it, which MLX keeps."""
FAMILIES = {
    "nanochat": Family(
        "nanochat",
        nanochat,
        table(DECODER, ATTENTION_BIAS, [HIDDEN_ACT, Key("final_logit_softcapping", 15.0)], hidden_act="relu2"),
        names={"up": _MLP + "fc1.weight", "down": _MLP + "fc2.weight"},
        renamed=_OF_ITS_TRAINING,
        constants=dict.fromkeys(("embed_norm", "attn_norm", "mlp_norm", "final_norm"), 1.0),
    )
}
