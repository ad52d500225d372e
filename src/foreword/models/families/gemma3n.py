"""Gemma 3n (text): several residual streams, a low-rank branch beside attention, inputs of layers, sparse gates."""

from __future__ import annotations

import math

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    ACTIVATIONS,
    ATTENTION_BIAS,
    DECODER,
    WINDOWS,
    Family,
    Rows,
    decoder,
    num_layers,
    rope,
    sliding_flags,
    windows,
)
from foreword.models.families.gemma import cap
from foreword.models.families.gemma4 import (
    PER_LAYER_GGUF_NAMES,
    PER_LAYER_NAMES,
    per_layer_inputs,
    read_layers,
    sizes_of_layers,
)
from foreword.models.keys import Key, of_gguf, only, table
from foreword.models.spec import DecoderSpec, LayerSpec, StreamsSpec

_PATTERN, _LOCAL_THETA = "*.attention.sliding_window_pattern", "rope_local_base_freq"
_CUTOFFS = "*.activation_sparsity_scale"
_MOST_STREAMS = 8


def gemma3n(config: Config) -> DecoderSpec:
    """Return a spec of four layers with a window for each one without. The last layers read keys of earlier ones."""
    count = num_layers(config)
    listed = sliding_flags(config, _PATTERN, count)
    sliding = windows(config, lambda i: listed[i] if listed else (i + 1) % 5 != 0)
    theta = config.positive(_LOCAL_THETA)
    local = config.with_values({"rope_theta": theta, "rope_scaling": None})
    full_rope, local_rope = rope(config, "full_attention"), rope(local, "sliding_attention")
    inner, cutoffs = sizes_of_layers(config, "intermediate_size", count), _cutoffs(config, count)
    reads = read_layers(config, [window is not None for window in sliding])
    layers = tuple(
        LayerSpec(
            full_rope if window is None else local_rope,
            window,
            reads_layer=reads[i],
            unit_v=True,
            intermediate_size=inner[i],
            gate_cutoff=cutoffs[i],
        )
        for i, window in enumerate(sliding)
    )
    if config.get("altup_num_inputs", int) not in range(2, _MOST_STREAMS + 1):
        raise config.refused("altup_num_inputs", config.value("altup_num_inputs"))
    per_layer = per_layer_inputs(config)
    if per_layer is None:
        raise config.refused("hidden_size_per_layer_input", 0)
    return decoder(
        config,
        "gemma3n",
        layers,
        act="hidden_activation",
        intermediate_size=max(inner),
        query_scale=1.0,
        qk_norm=True,
        embedding_scale=math.sqrt(config.size("hidden_size")),
        post_norms=True,
        per_layer=per_layer,
        streams=StreamsSpec(
            config.size("altup_num_inputs"), config.size("laurel_rank"), config.get("altup_correct_scale", bool)
        ),
        final_softcap=cap(config, "final_logit_softcapping"),
    )


def _cutoffs(config: Config, count: int) -> list[float | None]:
    """Return how many standard deviations above its mean the gate of each layer begins; None: everywhere. The share of
    a normal distribution below that is ``activation_sparsity_pattern``; GGUF files have the deviations.
    """
    found, shares = config.sequence(_CUTOFFS), config.value("activation_sparsity_pattern")
    if found:
        if len(found) != count or not all(type(cutoff) is float for cutoff in found):
            raise config.error(f"{config.label(_CUTOFFS)} {found!r:.80} is not {count} numbers", USE_ITS_CONFIG)
        return [cutoff if math.isfinite(cutoff) else None for cutoff in found]
    if shares is None:
        shares = [0.95 if count > 10 and i < 10 else 0.0 for i in range(count)]
    shares = shares if isinstance(shares, list) else [shares] * count
    if len(shares) != count or not all(type(share) in (int, float) and 0 <= share < 1 for share in shares):
        reason = f"activation_sparsity_pattern {shares!r:.80} is not {count} numbers from 0 to below 1"
        raise config.error(reason, USE_ITS_CONFIG)
    from statistics import NormalDist  # here: it imports a dozen modules for this one family

    return [NormalDist().inv_cdf(share) if share else None for share in shares]


def _gguf_streams(spec: DecoderSpec) -> dict[str, Rows]:
    """Return the rows of the streams' matrices, which are one below the other."""
    d, count = spec.hidden_size, spec.streams.num_streams if spec.streams else 0
    return {f"{name}.{k}": Rows(name, (k - 1) * d, k * d) for name in _STREAMS for k in range(1, count)}


_STREAMS = {"stream_in": "altup_projections", "stream_out": "altup_unembed_projections"}
_LAYER, _BLOCK = "model.layers.{i}.", "blk.{i}."
_KEYS = (
    *(*DECODER, *ATTENTION_BIAS, *WINDOWS),
    Key("hidden_activation", "gelu_pytorch_tanh", tuple(ACTIVATIONS)),
    Key("intermediate_size", 16384, gguf="feed_forward_length", kind=object),
    Key("num_kv_shared_layers", 15, gguf="attention.shared_kv_layers", gguf_default=15),
    Key("hidden_size_per_layer_input", 256, gguf="embedding_length_per_layer_input", gguf_default=256),
    Key("vocab_size_per_layer_input", 262144),
    only("altup_active_idx", 0, gguf="altup.active_idx"),
    Key("altup_num_inputs", 4, gguf="altup.num_inputs", gguf_default=4),
    *(Key("altup_correct_scale", True), Key("laurel_rank", 64)),
    Key("altup_coef_clip", 120.0),  # in training alone
    Key("activation_sparsity_pattern", kind=object),
    of_gguf(_CUTOFFS, kind=list),
    Key("final_logit_softcapping", 30.0, gguf="final_logit_softcapping", gguf_default=30.0, kind=float),
    of_gguf(_PATTERN, kind=list),
    Key(_LOCAL_THETA, 10000.0, gguf="rope.freq_base_swa", gguf_default=10000.0),
)
_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512, "tie_word_embeddings": True}
FAMILIES = {
    "gemma3n_text": Family(
        "Gemma 3n (text)",
        gemma3n,
        table(_KEYS, rope_theta=1e6, **_DEFAULTS),
        names={
            "post_attn_norm": _LAYER + "post_attention_layernorm.weight",
            "mlp_norm": _LAYER + "pre_feedforward_layernorm.weight",
            "post_mlp_norm": _LAYER + "post_feedforward_layernorm.weight",
            **PER_LAYER_NAMES,
            **{
                f"{name}.{k}": f"model.{part}.{k - 1}.weight"
                for name, part in _STREAMS.items()
                for k in range(1, _MOST_STREAMS)
            },
            "streams_norm": _LAYER + "altup.router_norm.weight",
            "streams_router": _LAYER + "altup.modality_router.weight",
            "streams_scale": _LAYER + "altup.correct_output_scale",
            "streams_predict": _LAYER + "altup.prediction_coefs.weight",
            "streams_correct": _LAYER + "altup.correction_coefs.weight",
            "laurel_left": _LAYER + "laurel.linear_left.weight",
            "laurel_right": _LAYER + "laurel.linear_right.weight",
            "laurel_norm": _LAYER + "laurel.post_laurel_norm.weight",
        },
        gguf="gemma3n",
        gguf_names={
            **PER_LAYER_GGUF_NAMES,
            "stream_in": "altup_proj.weight",
            "stream_out": "altup_unembd_proj.weight",
            "streams_norm": _BLOCK + "altup_router_norm.weight",
            "streams_router": _BLOCK + "altup_router.weight",
            "streams_scale": _BLOCK + "altup_correct_scale.weight",
            "streams_predict": _BLOCK + "altup_predict_coef.weight",
            "streams_correct": _BLOCK + "altup_correct_coef.weight",
            "laurel_left": _BLOCK + "laurel_l.weight",
            "laurel_right": _BLOCK + "laurel_r.weight",
            "laurel_norm": _BLOCK + "laurel_post_norm.weight",
        },
        gguf_fused=_gguf_streams,
    )
}
