"""Encoders of images of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: rotary positions by row and column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.encoder_spec import EncoderActivation, EncoderLayerSpec, EncoderSpec
from foreword.models.families.base import ACTIVATIONS, Rows
from foreword.models.families.encoder_base import weight_and_bias
from foreword.models.families.vision_base import (
    IMAGE_KEYS,
    LARGEST_SIDE,
    NAMES_IN_GGUF,
    GgufValues,
    Shapes,
    VisionConfigs,
    VisionFamily,
    axial_frequencies,
    ids_in_gguf,
    normalization,
    qkv_rows,
)
from foreword.models.keys import Key, of_gguf, only, table
from foreword.models.spec import RopeSpec
from foreword.models.vision_spec import AreaProcessing, ImagePrompt, VisionSpec


def qwen2_vl(given: VisionConfigs) -> VisionSpec:
    """Return a spec in which an image is one tile of its own proportions, with rotary positions by row and column."""
    config = given.tower
    hidden = config.size("embed_dim")
    tower = _rotated(config, hidden, config.size("mlp_ratio", most=64) * hidden)
    return _placed(given, tower)


def qwen2_5_vl(given: VisionConfigs) -> VisionSpec:
    """Return the spec of a Qwen2-VL with gated layers, most of which see only a window."""
    config = given.tower
    count = config.size("depth", most=4096)
    whole = config.indices("fullatt_block_indexes", count)
    tower = _rotated(config, config.size("hidden_size"), config.size("intermediate_size"))
    layers = tuple(replace(layer, is_windowed=i not in whole) for i, layer in enumerate(tower.layers))
    spec = _placed(given, replace(tower, layers=layers, rms_norm=True, gated=True))
    side = spec.patch_size * spec.factor
    if (window := config.size("window_size", most=LARGEST_SIDE)) < side:
        raise config.error(f"window_size {window} is below {side}, the pixels of a vector", USE_ITS_CONFIG)
    return replace(spec, window=window // side * spec.factor)


def qwen3_vl(given: VisionConfigs) -> VisionSpec:
    """Return the spec of a Qwen2-VL with learned positions, and with features for the first layers of the decoder."""
    config = given.tower
    count, num_positions = config.size("depth", most=4096), config.size("num_position_embeddings", most=1 << 20)
    if math.isqrt(num_positions) ** 2 != num_positions:
        raise config.error(f"num_position_embeddings = {num_positions} is not a square", USE_ITS_CONFIG)
    layers = tuple(config.indices("deepstack_visual_indexes", count))
    if list(layers) != sorted(set(layers)):
        raise config.error(f"deepstack_visual_indexes {layers} do not ascend", USE_ITS_CONFIG)
    spec = _placed(given, _rotated(config, config.size("hidden_size"), config.size("intermediate_size")))
    return replace(spec, num_positions=num_positions, placing="linear", feature_layers=layers)


def _rotated(config: Config, hidden: int, inner: int) -> EncoderSpec:
    """Return layers whose queries and keys are rotated by row and column, half of the pairs by each."""
    heads = config.size("num_heads", most=512)
    if hidden % (4 * heads):
        raise config.error(f"hidden size {hidden} is not a multiple of 4 times {heads} heads", USE_ITS_CONFIG)
    inv_freq = axial_frequencies(config, hidden // heads, 10000.0)
    rotary = RopeSpec((*inv_freq, *inv_freq), axes=(0,) * len(inv_freq) + (1,) * len(inv_freq))
    act = _ACTIVATIONS[config.get("hidden_act", str)]
    return EncoderSpec(
        architecture="qwen2_vl",
        vocab_size=0,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        head_dim=hidden // heads,
        max_model_len=LARGEST_SIDE**2 // config.size("patch_size", most=LARGEST_SIDE) ** 2,
        layers=(EncoderLayerSpec(rotary),) * config.size("depth", most=4096),
        norm_eps=config.positive(_EPS),
        activation=act,
        norms_before=True,
    )


def _placed(given: VisionConfigs, tower: EncoderSpec) -> VisionSpec:
    config, images = given.tower, given.images
    factor, patch = config.size("spatial_merge_size", most=64), config.size("patch_size", most=LARGEST_SIDE)
    frames = config.size("temporal_patch_size", most=64)
    width_key = "hidden_size" if "embed_dim" in config.keys else "out_hidden_size"
    if (width := config.optional(width_key, int)) not in (None, given.vector_size):
        reason = f"{width_key} {width} is not the hidden_size of the decoder, {given.vector_size}"
        raise config.error(reason, USE_ITS_CONFIG)
    for key, own in (("patch_size", patch), ("merge_size", factor), ("temporal_patch_size", frames)):
        if images.size(key) != own:
            raise images.error(f"{key} is {images.size(key)}, that of the encoder is {own}", USE_ITS_CONFIG)
    token = given.tokens.get(given.model.get("image_token_id", int))
    if token is None:
        raise given.model.error("its tokenizer has no token of image_token_id", USE_ITS_CONFIG)
    size = images.value("size")
    if not isinstance(size, Mapping) or {name for name, one in size.items() if one is not None} - set(_AREA):
        raise images.error(f"size is {size!r:.80}, not pixels of shortest_edge and longest_edge", USE_ITS_CONFIG)
    area = Config(images.path, size, part=f"{images.part}size.")
    least, most = (
        area.size(name, most=LARGEST_SIDE**2)
        if images.value(older) is None
        else images.size(older, most=LARGEST_SIDE**2)
        for name, older in _AREA.items()
    )
    if least > most:
        raise images.error(f"images have at least {least} and at most {most} pixels", USE_ITS_CONFIG)
    return VisionSpec(
        tower=tower,
        patch_size=patch,
        num_positions=0,
        placing="rows",
        factor=factor,
        projector="mlp",
        vector_size=given.vector_size,
        processing=AreaProcessing(patch * factor, least, most),
        normalization=normalization(images),
        prompt=ImagePrompt(placeholder=token, token=token, begin="", end=""),
        num_frames=frames,
        is_placed=True,
    )


def _qwen3_names(spec: VisionSpec) -> Mapping[str, str | Rows]:
    merger = "visual.deepstack_merger_list.{k}."
    parts = {"norm": merger + "norm", "proj": merger + "linear_fc1", "out": merger + "linear_fc2"}
    return {**_of_features(parts, range(len(spec.feature_layers))), **qkv_rows(spec)}


def _qwen3_names_in_gguf(spec: VisionSpec) -> Mapping[str, str | Rows]:
    """Return the names of the projectors of features, which have the numbers of their layers."""
    parts = {"norm": _FEATURE + "norm", "proj": _FEATURE + "fc1", "out": _FEATURE + "fc2"}
    return _of_features(parts, spec.feature_layers)


def _of_features(parts: Mapping[str, str], numbers: Sequence[int]) -> Mapping[str, str]:
    """Return the names of the projectors of features in a file, which have {k} as one of ``numbers``."""
    return weight_and_bias(
        {f"features.{i}.{name}": part.format(k=k) for i, k in enumerate(numbers) for name, part in parts.items()}
    )


def _qwen_in_gguf(least: int, most: int) -> GgufValues:
    """Return the function for files without bounds of pixels, which have those of the published configurations."""

    def values(tower: Config, ids: Mapping[str, int], shapes: Shapes) -> tuple[dict[str, object], dict[str, object]]:
        images: dict[str, object] = {
            "patch_size": tower.value("patch_size"),
            "merge_size": tower.value("spatial_merge_size"),
            "temporal_patch_size": tower.value("temporal_patch_size"),
            "min_pixels": tower.size(_LEAST, least),
            "max_pixels": tower.size(_MOST, most),
        }
        return ids_in_gguf(tower, ids, {"image_token_id": "<|image_pad|>"}), images

    return values


def _qwen2_tower_in_gguf(tower: Config, shapes: Shapes) -> dict[str, object]:
    """Return the width of the MLP from its tensor: files have the width of the decoder in its place."""
    hidden = tower.size("embed_dim")
    up = shapes.get(NAMES_IN_GGUF["up"].format(i=0), ())
    return {"mlp_ratio": max(1, math.prod(up) // hidden**2)}


def _qwen2_5_tower_in_gguf(tower: Config, shapes: Shapes) -> dict[str, object]:
    """Return the layers that see the whole image: the last one of every ``n_wa_pattern``."""
    every = tower.size(_EVERY, most=4096)
    return {"fullatt_block_indexes": list(range(every - 1, tower.size("depth", most=4096), every))}


def _qwen3_tower_in_gguf(tower: Config, shapes: Shapes) -> dict[str, object]:
    """Return the layers with features, from a flag per layer, and the number of positions from their tensor."""
    flags, positions = tower.sequence(_HAS_FEATURES), shapes.get(NAMES_IN_GGUF["positions"])
    count = tower.size("depth", most=4096)
    if flags and (len(flags) != count or not all(isinstance(flag, bool) for flag in flags)):
        reason = f"{tower.label(_HAS_FEATURES)} is {flags!r:.80}, not true or false for each of {count} layers"
        raise tower.error(reason, USE_ITS_CONFIG)
    found: dict[str, object] = {"deepstack_visual_indexes": [i for i, flag in enumerate(flags) if flag]}
    return found | ({"num_position_embeddings": positions[0]} if positions else {})


_ACTIVATIONS: Mapping[str, EncoderActivation] = {**ACTIVATIONS, "quick_gelu": "quick_gelu"}
_AREA = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}  # pixels of an image, and their older names
_EPS, _LEAST, _MOST = "*.attention.layer_norm_epsilon", "*.image_min_pixels", "*.image_max_pixels"
_EVERY, _HAS_FEATURES = "*.n_wa_pattern", "*.is_deepstack_layers"  # keys of GGUF files alone
_QWEN = table(
    [
        *(Key("model_type"), Key("spatial_patch_size"), Key("tokens_per_second")),  # the last one is of videos
        *(Key("depth", 32, gguf="block_count"), Key("num_heads", 16, gguf="attention.head_count")),
        *(only("in_channels", 3), only("in_chans", None, 3), Key("patch_size", 14, gguf="patch_size")),
        Key("spatial_merge_size", 2, gguf="spatial_merge_size", gguf_default=2),
        *(Key("temporal_patch_size", 2), Key("rope_parameters")),
        of_gguf(_EPS, 1e-6, gguf_default=1e-6),
        *(of_gguf(_LEAST, kind=int), of_gguf(_MOST, kind=int)),
    ]
)
_QWEN2_VL = table(
    _QWEN.values(),
    [
        *(Key("embed_dim", 1280, gguf="embedding_length"), Key("mlp_ratio", 4), Key("hidden_size", kind=int)),
        Key("hidden_act", "quick_gelu", tuple(_ACTIVATIONS)),
    ],
)
_QWEN2_5_VL = table(
    _QWEN.values(),
    [
        Key("hidden_size", 3584, gguf="embedding_length"),
        Key("intermediate_size", 3420, gguf="feed_forward_length"),
        Key("window_size", 112, gguf="window_size", gguf_default=112),
        Key("out_hidden_size", kind=int),
        *(Key("fullatt_block_indexes", [7, 15, 23, 31], kind=list), of_gguf(_EVERY)),
        Key("hidden_act", "silu", tuple(_ACTIVATIONS)),
    ],
)
_QWEN3_VL = table(
    _QWEN.values(),
    [
        Key("hidden_size", 1152, gguf="embedding_length"),
        Key("intermediate_size", 4304, gguf="feed_forward_length"),
        *(Key("num_position_embeddings", 2304), Key("out_hidden_size", kind=int)),
        Key("deepstack_visual_indexes", [8, 16, 24], kind=list),
        of_gguf(_HAS_FEATURES),
        Key("hidden_act", "gelu_pytorch_tanh", tuple(_ACTIVATIONS)),
    ],
    patch_size=16,
)
_QWEN_IMAGES = table(
    IMAGE_KEYS.values(),
    [
        *(Key("min_pixels"), Key("max_pixels"), Key("patch_size", 14), Key("temporal_patch_size", 2)),
        Key("merge_size", 2),
    ],
    size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    resample=3,
    image_mean=[0.48145466, 0.4578275, 0.40821073],
    image_std=[0.26862954, 0.26130258, 0.27577711],
)
_QWEN_MODEL = table([Key("image_token_id", 151655)])
_VISUAL, _FEATURE = "visual.blocks.{i}.", "v.deepstack.{k}."
_QWEN_NAMES = weight_and_bias(
    {
        "attn_norm": _VISUAL + "norm1",
        "mlp_norm": _VISUAL + "norm2",
        "qkv": _VISUAL + "attn.qkv",
        "o": _VISUAL + "attn.proj",
        "up": _VISUAL + "mlp.fc1",
        "down": _VISUAL + "mlp.fc2",
        "final_norm": "visual.merger.ln_q",
        "proj": "visual.merger.mlp.0",
        "out": "visual.merger.mlp.2",
    }
) | {"patch": "visual.patch_embed.proj.weight"}
_QWEN3_NAMES = weight_and_bias(
    {
        "patch": "visual.patch_embed.proj",
        "up": _VISUAL + "mlp.linear_fc1",
        "down": _VISUAL + "mlp.linear_fc2",
        "final_norm": "visual.merger.norm",
        "proj": "visual.merger.linear_fc1",
        "out": "visual.merger.linear_fc2",
    }
) | {"positions": "visual.pos_embed.weight"}
_QWEN_GGUF_NAMES = NAMES_IN_GGUF | weight_and_bias({"proj": "mm.0", "out": "mm.2"})
_QWEN2_IN_GGUF = _qwen_in_gguf(4 * 28**2, 16384 * 28**2)
_GATED = weight_and_bias({name: f"{_VISUAL}mlp.{name}_proj" for name in ("gate", "up", "down")})
_QWEN3_VL_FAMILY = VisionFamily(
    "Qwen3-VL",
    "qwen3",
    qwen3_vl,
    _QWEN_MODEL,
    _QWEN3_VL,
    _QWEN_IMAGES,
    _QWEN_NAMES | _QWEN3_NAMES,
    "qwen3vl_merger",
    _QWEN_GGUF_NAMES,
    _qwen_in_gguf(64 * 32**2, 16384 * 32**2),
    _qwen3_tower_in_gguf,
    sections=(24, 20, 20),
    fused=_qwen3_names,
    gguf_fused=_qwen3_names_in_gguf,
)
_QWEN3_5_FAMILY = replace(
    _QWEN3_VL_FAMILY,
    title="Qwen3.5",
    text="qwen3_5_text",
    sections=(11, 11, 10),
    model_keys=table(_QWEN_MODEL.values(), image_token_id=248056),
    tower_keys=table(_QWEN3_VL.values(), deepstack_visual_indexes=[]),
)
VISION_FAMILIES = {
    "qwen2_vl": VisionFamily(
        "Qwen2-VL",
        "qwen2",
        qwen2_vl,
        _QWEN_MODEL,
        _QWEN2_VL,
        _QWEN_IMAGES,
        _QWEN_NAMES,
        "qwen2vl_merger",
        _QWEN_GGUF_NAMES,
        _QWEN2_IN_GGUF,
        _qwen2_tower_in_gguf,
        fused=qkv_rows,
    ),
    "qwen2_5_vl": VisionFamily(
        "Qwen2.5-VL",
        "qwen2",
        qwen2_5_vl,
        _QWEN_MODEL,
        _QWEN2_5_VL,
        _QWEN_IMAGES,
        _QWEN_NAMES | _GATED,
        "qwen2.5vl_merger",
        _QWEN_GGUF_NAMES,
        _QWEN2_IN_GGUF,
        _qwen2_5_tower_in_gguf,
        fused=qkv_rows,
    ),
    "qwen3_vl": _QWEN3_VL_FAMILY,
    "qwen3_vl_moe": replace(_QWEN3_VL_FAMILY, title="Qwen3-VL with experts", text="qwen3_vl_moe_text"),
    "qwen3_5": _QWEN3_5_FAMILY,
    "qwen3_5_moe": replace(_QWEN3_5_FAMILY, title="Qwen3.5 with experts", text="qwen3_5_moe_text"),
}
