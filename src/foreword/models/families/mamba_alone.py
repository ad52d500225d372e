"""Mamba and Mamba 2 models, which have neither attention nor MLPs."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.config import Config
from foreword.models.families.base import DECODER, NO_ROTATION, SIZES, Family
from foreword.models.families.mamba import MAMBA, fused_mamba, mamba2, time_step_rank
from foreword.models.families.mamba1 import MAMBA1, MAMBA1_NAMES_IN_GGUF, fused_mamba1, mamba1, mamba1_names
from foreword.models.families.states import ANY_LENGTH, STATE_NAMES_IN_GGUF, check_state, state_names
from foreword.models.keys import Key, of_gguf, only, only_in_gguf, table
from foreword.models.recurrent import INNER_NORMS, RecurrentSpec
from foreword.models.spec import DecoderSpec, LayerSpec


def mamba2_alone(config: Config) -> DecoderSpec:
    time_step_rank(config, "time_step_rank")  # without effect, as each head has a step
    return _states(config, "mamba2", mamba2(config))


def mamba(config: Config) -> DecoderSpec:
    """Return the spec of Mamba, or of a GGUF file of Falcon Mamba. As in llama.cpp, the inner norms of such a file have
    the eps of the other norms.
    """
    has_norms = config.get(_NORMS, bool, False)
    return _states(config, "mamba", mamba1(config, config.positive("rms_norm_eps") if has_norms else None))


def falcon_mamba(config: Config) -> DecoderSpec:
    return _states(config, "falcon_mamba", mamba1(config, config.positive("mixer_rms_eps")))


def _states(config: Config, architecture: str, recurrent: RecurrentSpec) -> DecoderSpec:
    """Return a spec whose layers are a state each. Sizes of attention and MLP are 1, since no layer has either."""
    check_state(config, recurrent)
    layer = LayerSpec(None, recurrent=recurrent, has_mlp=False)
    return DecoderSpec(
        architecture,
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        max_model_len=config.size("max_position_embeddings"),
        layers=(layer,) * config.size("num_hidden_layers", most=4096),
        norm_eps=config.positive("rms_norm_eps"),
        query_scale=1.0,
        tie_embeddings=config.get("tie_word_embeddings", bool),
    )


_IN_NO_FILE = ("feed_forward_length", *(f"attention.{name}" for name in ("head_count", "head_count_kv")))
_KEYS = (
    *(key for key in DECODER if key.values or key.name == "pooling_type"),
    *(key for key in SIZES if key.name in ("vocab_size", "hidden_size", "num_hidden_layers")),
    *(only_in_gguf(name, 0) for name in _IN_NO_FILE),
    *(only_in_gguf(f"attention.{name}", None) for name in ("key_length", "value_length")),
    *NO_ROTATION,
    Key("max_position_embeddings", ANY_LENGTH, gguf="context_length", gguf_default=ANY_LENGTH),
    Key("rms_norm_eps", 1e-5, gguf="attention.layer_norm_rms_epsilon", gguf_default=1e-5, own="layer_norm_epsilon"),
    Key("tie_word_embeddings", False),
    only("hidden_act", "silu", "swish"),
)
_NORMS = "*.ssm.dt_b_c_rms"
_OWN_NAMES = {
    "mamba_n_heads": "num_heads",
    "mamba_d_head": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
_OWN_NAMES_OF_MAMBA1 = {**_OWN_NAMES, "mamba_inner": "intermediate_size", "mamba_dt_rank": "time_step_rank"}
_MAMBA1 = (*_KEYS, *(replace(key, own=_OWN_NAMES_OF_MAMBA1[key.name]) for key in MAMBA1), of_gguf(_NORMS, kind=bool))
_NAMES = {
    "embed": "backbone.embeddings.weight",
    "attn_norm": "backbone.layers.{i}.norm.weight",
    "final_norm": "backbone.norm_f.weight",
}
_RENAMED = {"backbone.embedding.": "backbone.embeddings."}
_ONES = {f"state.{name}": 1.0 for name in INNER_NORMS}
"""The inner norms of Falcon Mamba have no weights."""
FAMILIES = {
    "mamba2": Family(
        "Mamba 2",
        mamba2_alone,
        table(
            (*_KEYS, Key("time_step_rank", "auto", kind=object)),
            (replace(key, own=_OWN_NAMES.get(key.name, "")) for key in MAMBA),
            mamba_d_head=64,
            mamba_n_groups=8,
            mamba_d_state=128,
        ),
        names={**_NAMES, **state_names("mixer", "backbone")},
        renamed=_RENAMED,
        fused=fused_mamba,
        gguf="mamba2",
        gguf_names=STATE_NAMES_IN_GGUF,
    ),
    "mamba": Family(
        "Mamba",
        mamba,
        table(_MAMBA1, tie_word_embeddings=True),
        names={**_NAMES, **mamba1_names("mixer", "backbone")},
        renamed=_RENAMED,
        constants=_ONES,
        fused=fused_mamba1,
        gguf="mamba",
        gguf_names=MAMBA1_NAMES_IN_GGUF,
    ),
    "falcon_mamba": Family(
        "Falcon Mamba",
        falcon_mamba,
        table((*_MAMBA1, Key("mixer_rms_eps", 1e-6)), tie_word_embeddings=True),
        names={**_NAMES, **mamba1_names("mixer", "backbone")},
        constants=_ONES,
        fused=fused_mamba1,
        shared_gguf="mamba",
    ),
}
