"""Gemma 4 (text): inputs of each layer of its own, keys that later layers share, and wider heads in full layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    ACTIVATIONS,
    ATTENTION_BIAS,
    DECODER,
    WINDOWS,
    Family,
    Rows,
    decoder,
    head_dim,
    num_layers,
    sliding_flags,
    windows,
)
from foreword.models.families.gemma import NORM_NAMES, cap
from foreword.models.keys import Key, of_gguf, only_in_gguf, table
from foreword.models.rope import ROTARY_DIM, check_bases, rope_parameters, rope_spec
from foreword.models.spec import DecoderSpec, HeadShape, LayerSpec, MoeSpec, PerLayerSpec, RopeSpec

_PATTERN = "*.attention.sliding_window_pattern"
_LOCAL_DIM = "*.rope.dimension_count_swa"
_LOCAL_THETA = "*.rope.freq_base_swa"


def gemma4(config: Config) -> DecoderSpec:
    """Return a spec whose last layers read keys of earlier ones. In layers without a window values may be keys."""
    count = num_layers(config)
    listed = sliding_flags(config, _PATTERN, count)
    sliding = windows(config, lambda i: listed[i] if listed else (i + 1) % 6 != 0)
    slides = [window is not None for window in sliding[:-1]] + [False]  # the last layer is full, whatever is listed
    dim = head_dim(config)
    local = HeadShape(_kv_heads(config, slides, is_local=True), dim, config.size("num_attention_heads"), dim)
    full = full_heads(config, slides, local, _full_kv_heads(config, slides, local))
    local_rope, full_rope = ropes(config, slides, local.head_dim, full.head_dim, _ROPES)
    moe = _experts(config)
    inner = _inner_sizes(config, count)
    layers = tuple(
        LayerSpec(
            local_rope if slide else full_rope,
            sliding[i] if slide else None,
            moe and replace(moe, shared_intermediate_size=inner[i]),
            heads=None if slide or full == local else full,
            reads_layer=reads,
            unit_v=True,
            values_are_keys=config.get("attention_k_eq_v", bool) and not slide and reads is None,
            intermediate_size=inner[i],
        )
        for i, (slide, reads) in enumerate(zip(slides, read_layers(config, slides), strict=True))
    )
    return decoder(
        config,
        "gemma4",
        layers,
        act="hidden_activation",
        same_as_head_dim=("v_head_dim_swa",),
        num_kv_heads=local.num_kv_heads,
        intermediate_size=max(inner),
        query_scale=1.0,
        qk_norm=True,
        embedding_scale=math.sqrt(config.size("hidden_size")),
        post_norms=True,
        per_layer=per_layer_inputs(config),
        layer_scales=True,
        final_softcap=cap(config, "final_logit_softcapping"),
        spans_in_windows=_has_spans(config),
    )


def _has_spans(config: Config) -> bool:
    """Return whether the vectors of an image see each other. GGUF files do not say it: in the published models they do
    so where no layer has inputs of its own.
    """
    if config.prefix:
        return per_layer_inputs(config) is None
    return bool(config.value("use_bidirectional_attention") == "vision")


def sizes_of_layers(config: Config, key: str, count: int) -> list[int]:
    """Return a size of each layer, of a key with a list of them or one of all."""
    given = config.value(key)
    if not isinstance(given, list):
        return [config.size(key)] * count
    if len(given) != count or not all(type(n) is int and 0 < n <= 1 << 28 for n in given):
        raise config.error(f"{config.label(key)} {given!r:.80} is not {count} sizes", USE_ITS_CONFIG)
    return given


def per_layer_inputs(config: Config) -> PerLayerSpec | None:
    """Return the inputs that each layer has of its own; None if their size is 0."""
    rows = config.size("vocab_size" if config.prefix else "vocab_size_per_layer_input")
    if not config.get("hidden_size_per_layer_input", int):
        return None
    size = config.size("hidden_size_per_layer_input", most=1 << 16)
    return PerLayerSpec(
        size,
        rows,
        # norm(x / sqrt(hidden)) with eps is norm(x) with hidden · eps
        norm_eps=config.positive("rms_norm_eps") * config.size("hidden_size"),
        embedding_scale=math.sqrt(size),
        scale=math.sqrt(0.5),
    )


def read_layers(config: Config, slides: Sequence[bool]) -> list[int | None]:
    """Return the layer whose keys each layer reads: of the last ones, the last one of its kind before them."""
    shared, count = config.get("num_kv_shared_layers", int), len(slides)
    label = config.label("num_kv_shared_layers")
    if not 0 <= shared < count:
        raise config.error(f"{label} = {shared} of {count} layers", USE_ITS_CONFIG)
    last = {slide: i for i, slide in enumerate(slides[: count - shared])}
    if shared and not last.keys() >= set(slides):
        reason = f"{label} = {shared}: some of them have no layer of their kind before them"
        raise config.error(reason, USE_ITS_CONFIG)
    return [last[slide] if i >= count - shared else None for i, slide in enumerate(slides)]


def _full_kv_heads(config: Config, slides: Sequence[bool], local: HeadShape) -> int:
    if config.prefix:
        return _kv_heads(config, slides, is_local=False)
    if config.get("attention_k_eq_v", bool) and config.value("num_global_key_value_heads") is not None:
        return config.size("num_global_key_value_heads")
    return local.num_kv_heads


def full_heads(config: Config, slides: Sequence[bool], local: HeadShape, kv_heads: int) -> HeadShape:
    """Return the heads of full layers: from the values of each layer if the config has them, else of ``kv_heads`` key
    heads.
    """
    own, width = config.value("per_layer_config"), config.optional("v_head_dim", int)
    if own is None:
        dim = config.size("global_head_dim", most=1 << 16)
        if width not in (None, dim):
            raise config.refused("v_head_dim", width)
        return local._replace(num_kv_heads=kv_heads, head_dim=dim, value_dim=dim)
    if not isinstance(own, Mapping):
        raise config.error(f"per_layer_config is {own!r:.80}, not an object", USE_ITS_CONFIG)
    found: dict[bool, set[HeadShape]] = {True: set(), False: set()}  # by whether a layer has a window
    given = {str(name).lstrip("0") or "0": values for name, values in own.items()}
    if unknown := sorted(given.keys() - {str(i) for i in range(len(slides))}):
        raise config.error(f"per_layer_config has {unknown[0]!r:.80}, which is not a layer", USE_ITS_CONFIG)
    for i, slide in enumerate(slides):
        values = given.get(str(i), {})
        if not isinstance(values, Mapping) or values.keys() - {"head_dim", "num_key_value_heads"}:
            reason = f"per_layer_config: {values!r:.80} of layer {i} is not of head_dim and num_key_value_heads"
            raise config.error(reason, "Use a model whose layers differ in these alone")
        layer = config.with_values(values)
        dim = head_dim(layer)
        found[slide].add(HeadShape(layer.size("num_key_value_heads"), dim, local.num_heads, dim))
    if found[True] - {local} or len(found[False]) != 1:
        reason = f"per_layer_config: layers of a kind have other heads, {sorted(found[True] | found[False])}"
        raise config.error(reason, "Use a model whose sliding layers have equal heads, and its full layers")
    return found[False].pop()


def _kv_heads(config: Config, slides: Sequence[bool], *, is_local: bool) -> int:
    """Return the key heads of sliding or full layers. GGUF files may list those of each layer."""
    value = config.value("num_key_value_heads")
    if not isinstance(value, list):
        return config.size("num_key_value_heads")
    found = {n for n, slide in zip(value, slides, strict=False) if slide is is_local}
    if len(value) != len(slides) or len(found) > 1 or not all(type(n) is int and 0 < n <= 1 << 9 for n in value):
        reason = f"{config.label('num_key_value_heads')} {value!r:.80} are not one number per kind of layer"
        raise config.error(reason, USE_ITS_CONFIG)
    return int(found.pop() if found else value[-1])


def ropes(
    config: Config, slides: Sequence[bool], local_dim: int, full_dim: int, default: Mapping[str, Mapping[str, object]]
) -> tuple[RopeSpec, RopeSpec]:
    """Return the rotary embeddings of sliding and of full layers. slides: which each layer is. default: the parameters
    of both kinds where the config has none.
    """
    if config.prefix:
        own = {"rope_theta": config.value(_LOCAL_THETA), "rope_scaling": None, ROTARY_DIM: config.value(_LOCAL_DIM)}
        local = config.with_values(own)
        return rope_spec(local, local_dim, rope_parameters(local)), rope_spec(config, full_dim, rope_parameters(config))
    if config.value("rope_parameters") is None:
        config = config.with_values({"rope_parameters": default})
    sliding, full = (rope_parameters(config, f"{kind}_attention") for kind in ("sliding", "full"))
    found = rope_spec(config, local_dim, sliding), rope_spec(config, full_dim, full)
    check_bases(config, {"sliding_attention" if one else "full_attention" for one in slides})
    return found


_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def _inner_sizes(config: Config, count: int) -> list[int]:
    """Return the width of each layer's MLP: twice as much in shared layers with ``use_double_wide_mlp``."""
    sizes, first = sizes_of_layers(config, "intermediate_size", count), count - config.get("num_kv_shared_layers", int)
    is_double = config.get("use_double_wide_mlp", bool)  # GGUF files list the sizes
    return [2 * size if is_double and i >= first else size for i, size in enumerate(sizes)]


def _experts(config: Config) -> MoeSpec | None:
    """Return the experts beside the MLP of each layer, which is their shared one; None for a model without them."""
    sizes = ("num_experts", "top_k_experts", "moe_intermediate_size")
    given, has_experts = [config.value(name) for name in sizes], config.get("enable_moe_block", bool)
    if not (given[0] if config.prefix else has_experts):
        return None
    num_experts, per_token, inner = map(config.size, sizes)
    moe = MoeSpec(num_experts, per_token, inner, shared_gate=False, own_norms=True)
    if moe.experts_per_token > moe.num_experts:
        reason = f"{config.label('top_k_experts')} = {moe.experts_per_token} of {moe.num_experts} experts"
        raise config.error(reason, USE_ITS_CONFIG)
    return moe


def _gate_up(spec: DecoderSpec) -> dict[str, Rows]:
    """Return where the rows of gate and up of each expert are: gate is above up."""
    inner = next((layer.moe.intermediate_size for layer in spec.layers if layer.moe), 0)
    return {"experts.gate": Rows("experts.gate_up", 0, inner), "experts.up": Rows("experts.gate_up", inner, 2 * inner)}


_LAYER, _BLOCK = "model.layers.{i}.", "blk.{i}."
PER_LAYER_NAMES = {
    "per_layer_embed": "model.embed_tokens_per_layer.weight",
    "per_layer_in": "model.per_layer_model_projection.weight",
    "per_layer_norm": "model.per_layer_projection_norm.weight",
    "per_layer_gate": _LAYER + "per_layer_input_gate.weight",
    "per_layer_out": _LAYER + "per_layer_projection.weight",
    "post_per_layer_norm": _LAYER + "post_per_layer_input_norm.weight",
}
PER_LAYER_GGUF_NAMES = {
    "per_layer_embed": "per_layer_token_embd.weight",
    "per_layer_in": "per_layer_model_proj.weight",
    "per_layer_norm": "per_layer_proj_norm.weight",
    "per_layer_gate": _BLOCK + "inp_gate.weight",
    "per_layer_out": _BLOCK + "proj.weight",
    "post_per_layer_norm": _BLOCK + "post_norm.weight",
}
_MLP = ("gate", "up", "down")
_KEYS = (
    *(*DECODER, *ATTENTION_BIAS, *WINDOWS),
    Key("hidden_activation", "gelu_pytorch_tanh", tuple(ACTIVATIONS)),
    Key("num_key_value_heads", 4, gguf="attention.head_count_kv", kind=object),
    Key("intermediate_size", 9216, gguf="feed_forward_length", kind=object),
    Key("global_head_dim", 512, gguf="attention.key_length"),
    Key("head_dim", 256, gguf="attention.key_length_swa"),
    Key("v_head_dim", gguf="attention.value_length", kind=int),
    Key("v_head_dim_swa", gguf="attention.value_length_swa", kind=int),
    *(Key("num_global_key_value_heads", kind=int), Key("per_layer_config", kind=object)),
    Key("num_kv_shared_layers", 0, gguf="attention.shared_kv_layers", gguf_default=0),
    Key("hidden_size_per_layer_input", 256, gguf="embedding_length_per_layer_input", gguf_default=0),
    Key("vocab_size_per_layer_input", 262144),
    *(Key("attention_k_eq_v", False), Key("use_double_wide_mlp", False)),
    Key("enable_moe_block", False),
    Key("num_experts", gguf="expert_count", kind=int),
    Key("top_k_experts", gguf="expert_used_count", kind=int),
    Key("moe_intermediate_size", gguf="expert_feed_forward_length", kind=int),
    Key("final_logit_softcapping", gguf="final_logit_softcapping", kind=float),
    Key("use_bidirectional_attention", None, (None, "vision")),  # whether the vectors of an image see each other
    of_gguf(_PATTERN, kind=object),
    of_gguf(_LOCAL_DIM, kind=int),
    of_gguf(_LOCAL_THETA, gguf_default=10000.0, kind=float),
    only_in_gguf("attention.scale", 0.0, 1.0),
)
_GEMMA4 = Family(
    "Gemma 4 (text)",
    gemma4,
    table(_KEYS, sliding_window=512, tie_word_embeddings=True, max_position_embeddings=131072),
    names={
        **NORM_NAMES,
        "layer_scale": _LAYER + "layer_scalar",
        **PER_LAYER_NAMES,
        "router": _LAYER + "router.proj.weight",
        "router_scale": _LAYER + "router.scale",
        "expert_scales": _LAYER + "router.per_expert_scale",
        "post_shared_norm": _LAYER + "post_feedforward_layernorm_1.weight",
        "experts_norm": _LAYER + "pre_feedforward_layernorm_2.weight",
        "post_experts_norm": _LAYER + "post_feedforward_layernorm_2.weight",
        "experts.gate_up": _LAYER + "experts.gate_up_proj",
        "experts.down": _LAYER + "experts.down_proj",
        **{f"shared.{name}": f"{_LAYER}mlp.{name}_proj.weight" for name in _MLP},
    },
    fused=_gate_up,
    gguf="gemma4",
    gguf_names={
        "layer_scale": _BLOCK + "layer_output_scale.weight",
        **PER_LAYER_GGUF_NAMES,
        "router_scale": _BLOCK + "ffn_gate_inp.scale",
        "expert_scales": _BLOCK + "ffn_down_exps.scale",
        "post_shared_norm": _BLOCK + "post_ffw_norm_1.weight",
        "experts_norm": _BLOCK + "pre_ffw_norm_2.weight",
        "post_experts_norm": _BLOCK + "post_ffw_norm_2.weight",
        "experts.gate_up": _BLOCK + "ffn_gate_up_exps.weight",
        **{f"shared.{name}": f"{_BLOCK}ffn_{name}.weight" for name in _MLP},
    },
)
_UNIFIED = {"sliding_window": 1024, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
FAMILIES = {
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(
        _GEMMA4,
        title="Gemma 4 without encoders (text)",
        keys=table(_KEYS, tie_word_embeddings=True, max_position_embeddings=262144, **_UNIFIED),
        gguf=None,
    ),
}
