"""ModernBERT's decoder (Ettin): LayerNorm without biases, windows, and a dense layer before the logits."""

from __future__ import annotations

from typing import Any

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    HIDDEN_ACT,
    LAYER_NORMED,
    WITH_BIASES,
    Family,
    decoder,
    fused_rows,
    module_names,
    rope,
    windows,
)
from foreword.models.keys import Key, only, table
from foreword.models.spec import DecoderSpec, LayerSpec, NormPlaces


def modern_bert_decoder(config: Config) -> DecoderSpec:
    """Return a spec whose first layer has no norm before attention. A window is half of ``local_attention``."""
    config, every = _with_ropes(config), config.size("global_attn_every_n_layers")
    half = config.count("local_attention") // 2 if config.value("local_attention") is not None else 0
    if config.value("sliding_window") not in (None, half or -1):  # which follows
        raise config.refused("sliding_window", config.value("sliding_window"))
    config = config.with_values({"sliding_window": half or None})
    spans = windows(config, lambda i: i % every != 0, is_optional=False)
    if (act := config.value("classifier_activation")) != config.value("hidden_act"):
        raise config.error(f"classifier_activation = {act!r:.80} is not hidden_activation", USE_ITS_CONFIG)
    ropes = {kind: rope(config, kind) for kind in ("full_attention", "sliding_attention")}
    layers = (
        LayerSpec(
            ropes["sliding_attention" if span else "full_attention"],
            span,
            norms=None if i else NormPlaces(False, False, True, False),
        )
        for i, span in enumerate(spans)
    )
    own: dict[str, Any] = dict.fromkeys(("layer_norm", "embed_norm", "head_dense"), True)
    has_bias = config.get("decoder_bias", bool)
    return decoder(config, "modernbert-decoder", tuple(layers), eps="norm_eps", logits_bias=has_bias, **own)


def _with_ropes(config: Config) -> Config:
    """Return the config with the rotary parameters of both kinds of layers, in the form of newer configurations."""
    given, scaling = ({} if config.value(key) is None else config.value(key) for key in _ROPES)
    thetas = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
    own = {kind: given.get(kind) or {} for kind in thetas} if isinstance(given, dict) else {}
    if not own or not isinstance(scaling, dict) or not all(isinstance(rules, dict) for rules in own.values()):
        reason = f"rope_parameters is {given!r:.80} and rope_scaling {scaling!r:.80}, not parameters of kinds of layers"
        raise config.error(reason, USE_ITS_CONFIG)
    kinds = {kind: {"rope_theta": config.positive(key), **own[kind], **scaling} for kind, key in thetas.items()}
    return config.with_values({"rope_parameters": {**given, **kinds}, "rope_scaling": None})


_ROPES = ("rope_parameters", "rope_scaling")
_NORMS = ("embed_norm", "attn_norm", "mlp_norm", "final_norm", "head_norm")
FAMILIES = {
    "modernbert-decoder": Family(
        "ModernBERT's decoder, Ettin",
        modern_bert_decoder,
        table(
            *(LAYER_NORMED, WITH_BIASES),
            [Key("hidden_act", "gelu", HIDDEN_ACT.values, own="hidden_activation"), Key("norm_eps", 1e-5)],
            [
                Key("local_attention", 128),
                Key("sliding_window", kind=int),
                Key("layer_types"),
                Key("global_attn_every_n_layers", 3),
            ],
            [Key("global_rope_theta", 160_000.0), Key("local_rope_theta", 10_000.0)],
            [Key("decoder_bias", True), Key("classifier_activation", "gelu")],
            [only("norm_bias", False), only("classifier_bias", False), only("rope_theta", 10000.0)],
            tie_word_embeddings=True,
        ),
        names={
            **module_names(
                "model.layers.{i}.",
                {
                    "attn_norm": "attn_norm",
                    "mlp_norm": "mlp_norm",
                    "o": "attn.Wo",
                    "gate_up": "mlp.Wi",
                    "down": "mlp.Wo",
                    **{name: f"attn.{name}_proj" for name in "qkv"},
                },
                {
                    "embed": "model.embeddings.tok_embeddings",
                    "embed_norm": "model.embeddings.norm",
                    "final_norm": "model.final_norm",
                    "head_dense": "lm_head.dense",
                    "head_norm": "lm_head.norm",
                    "lm_head": "decoder",
                },
            ),
            "logits_bias": "decoder.bias",
        },
        constants={f"{name}_bias": 0.0 for name in _NORMS},
        fused=lambda spec: {name: rows for name, rows in fused_rows(spec).items() if rows.name.startswith("gate_up")},
    )
}
