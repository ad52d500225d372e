"""The encoder of images of Gemma 4: layers with norms on both sides, and means of squares of patches as vectors."""

from __future__ import annotations

from collections.abc import Mapping

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.encoder_spec import EncoderLayerSpec, EncoderSpec
from foreword.models.families.base import ACTIVATIONS
from foreword.models.families.vision_base import (
    IMAGE_KEYS,
    LARGEST_SIDE,
    NAMES_IN_GGUF,
    PROCESSOR_KEYS,
    Shapes,
    VisionConfigs,
    VisionFamily,
    axial_frequencies,
    ids_in_gguf,
    normalization,
)
from foreword.models.keys import Key, table
from foreword.models.spec import RopeSpec
from foreword.models.vision_spec import AreaProcessing, ImagePrompt, VisionSpec

_MOST_VECTORS = (70, 140, 280, 560, 1120)
"""The values of max_soft_tokens that the reference takes."""


def gemma4(given: VisionConfigs) -> VisionSpec:
    """Return a spec in which an image is one tile of its own proportions, as large as the bound of vectors allows."""
    tower, images = given.tower, given.images
    patch, factor = tower.size("patch_size", most=LARGEST_SIDE), tower.size("pooling_kernel_size", most=64)
    for key, own in (("patch_size", patch), ("pooling_kernel_size", factor)):
        if images.size(key) != own:
            raise images.error(f"{key} is {images.size(key)}, that of the encoder is {own}", USE_ITS_CONFIG)
    if factor == 1:  # the reference then returns the vectors of the padding
        raise tower.refused("pooling_kernel_size", 1)
    most, num_positions = images.get("max_soft_tokens", int), tower.size("position_embedding_size", most=1 << 20)
    if most not in _MOST_VECTORS:
        reason = f"max_soft_tokens = {most} is not one of {', '.join(map(str, _MOST_VECTORS))}"
        raise images.error(reason, USE_ITS_CONFIG)
    if most * factor > num_positions:  # the patches along the side of the longest image
        reason = f"max_soft_tokens = {most}: {most * factor} patches in a row have {num_positions} positions"
        raise images.error(reason, USE_ITS_CONFIG)
    side = patch * factor
    if most * side**2 > LARGEST_SIDE**2:
        reason = f"max_soft_tokens = {most} of {side} × {side} pixels are more than {LARGEST_SIDE**2} pixels"
        raise images.error(reason, USE_ITS_CONFIG)
    _check_padding(given)
    return VisionSpec(
        tower=_tower(tower, factor),
        patch_size=patch,
        num_positions=num_positions,
        placing="axes",
        factor=factor,
        projector="unit_pool",
        vector_size=given.vector_size,
        processing=AreaProcessing(side, most * side**2, most * side**2, fills=True),
        normalization=normalization(images if images.get("do_normalize", bool) else images.with_values(_UNCHANGED)),
        prompt=_prompt(given),
        is_centred=True,
        standardizes=tower.get("standardize", bool),
    )


def _tower(config: Config, factor: int) -> EncoderSpec:
    heads, kv_heads = (config.size(f"num_{name}_heads", most=512) for name in ("attention", "key_value"))
    if heads % kv_heads:
        reason = f"{heads} heads are not a multiple of num_key_value_heads = {kv_heads}"
        raise config.error(reason, USE_ITS_CONFIG)
    dim = config.size("head_dim", most=1 << 12)
    if dim % 4:
        raise config.error(f"head_dim {dim} is not a multiple of 4", USE_ITS_CONFIG)
    inv_freq = axial_frequencies(config, dim, 100.0)
    rotary = RopeSpec((*inv_freq, *inv_freq), axes=(1,) * len(inv_freq) + (0,) * len(inv_freq))
    return EncoderSpec(
        architecture="gemma4",
        vocab_size=0,
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        max_model_len=_MOST_VECTORS[-1] * factor**2,
        layers=(EncoderLayerSpec(rotary),) * config.size("num_hidden_layers", most=4096),
        norm_eps=config.positive("rms_norm_eps"),
        activation=ACTIVATIONS[config.get("hidden_activation", str)],
        norms_before=True,
        post_norms=True,
        rms_norm=True,
        has_final_norm=False,
        gated=True,
        biases=False,
        scale=1.0,
        qk_norm=True,
        unit_v=True,
        bounded=config.get("use_clipped_linears", bool),
    )


def _prompt(given: VisionConfigs) -> ImagePrompt:
    names = [given.tokens.get(given.model.get(f"{name}_token_id", int)) for name in ("image", "boi", "eoi")]
    image, begin, end = names
    if image is None or begin is None or end is None:
        reason = "its tokenizer has no special tokens of image_token_id, boi_token_id or eoi_token_id"
        raise given.model.error(reason, USE_ITS_CONFIG)
    return ImagePrompt(placeholder=image, token=image, begin=begin, end=end)


def _check_padding(given: VisionConfigs) -> None:
    """Raise ModelError unless the inputs of layers at the place of a vector are those of token 0."""
    text = given.model.value("text_config")
    if not isinstance(text, Mapping) or not text.get("hidden_size_per_layer_input", 256):
        return
    if (padding := text.get("pad_token_id", 0)) != 0:
        raise given.model.error(f"text_config.pad_token_id is {padding!r:.80}, not 0", USE_ITS_CONFIG)


def _model_in_gguf(
    tower: Config, ids: Mapping[str, int], shapes: Shapes
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the tokens by their texts, and a processor with the numbers of the published ones."""
    texts = {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"}
    images = {name: tower.value(name) for name in ("patch_size", "pooling_kernel_size")}
    return ids_in_gguf(tower, ids, texts), {**images, "do_normalize": True}


def _tower_in_gguf(tower: Config, shapes: Shapes) -> dict[str, object]:
    """Return what tensors tell, and the activation: a file that has none is of the published one."""
    heads = tower.size("num_attention_heads", most=512)
    rows = {name: shapes.get(_GGUF_NAMES[name].format(i=0), (heads,))[0] for name in "qk"}
    dim = max(1, rows["q"] // heads)
    told = tower.values["hidden_act"]
    found: dict[str, object] = {
        "head_dim": dim,
        "num_key_value_heads": rows["k"] // dim,
        "standardize": _GGUF_NAMES["std_bias"] in shapes,
        "use_clipped_linears": "v.blk.0.attn_q.input_min" in shapes,
        "hidden_activation": _ACTIVATION if told == "quick_gelu" else told,
    }
    positions = shapes.get(_GGUF_NAMES["positions"], ())
    return found | ({"position_embedding_size": positions[1]} if len(positions) > 1 else {})


_ACTIVATION = "gelu_pytorch_tanh"
_UNCHANGED = {"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]}
_TOWER = table(
    [
        Key("model_type"),
        Key("hidden_size", 768, gguf="embedding_length"),
        Key("intermediate_size", 3072, gguf="feed_forward_length"),
        Key("num_hidden_layers", 16, gguf="block_count"),
        Key("num_attention_heads", 12, gguf="attention.head_count"),
        *(Key("num_key_value_heads", 12), Key("head_dim", 64)),
        Key("hidden_activation", _ACTIVATION, tuple(ACTIVATIONS)),
        Key("rms_norm_eps", 1e-6, gguf="attention.layer_norm_epsilon", gguf_default=1e-6),
        *(Key("rope_parameters"), Key("patch_size", 16, gguf="patch_size")),
        Key("pooling_kernel_size", 3, gguf="projector.scale_factor", gguf_default=3),
        Key("position_embedding_size", 10240),
        *(Key("use_clipped_linears", False), Key("standardize", False)),
        *(Key(name, kind=object) for name in ("attention_bias", "max_position_embeddings")),  # no layer reads them
    ]
)
_OF_SOUNDS = ("audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index")
_MODEL = table(
    [
        *(Key("image_token_id", 258880), Key("boi_token_id", 255999), Key("eoi_token_id", 258882)),
        Key("text_config", kind=object),
        *(Key(name, kind=object) for name in (*_OF_SOUNDS, "vision_soft_tokens_per_image")),
    ]
)
_IMAGES = table(
    IMAGE_KEYS.values(),
    [
        *(Key("patch_size", 16), Key("max_soft_tokens", 280), Key("pooling_kernel_size", 3)),
        *(Key("do_normalize", False), Key("size", kind=object)),  # the keys above say it
    ],
    resample=3,
    image_mean=_UNCHANGED["image_mean"],
    image_std=_UNCHANGED["image_std"],
)
_SOUNDS_AND_VIDEOS = ("audio_ms_per_token", "audio_seq_length", "feature_extractor", "video_processor")
_MATRICES = {
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
    **{f"{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
}
_LAYER, _BLOCK = "vision.encoder.layers.{i}.", "v.blk.{i}."
_NAMES = {
    "patch": "vision.patch_embedder.input_proj.weight",
    "positions": "vision.patch_embedder.position_embedding_table",
    **{name: f"{_LAYER}{module}.weight" for name, module in _NORMS.items()},
    **{name: f"{_LAYER}{module}.linear.weight" for name, module in _MATRICES.items()},
    **{f"{name}_bounds": f"{_LAYER}{module}.bounds" for name, module in _MATRICES.items()},
    **{name: f"vision.{name}" for name in ("std_bias", "std_scale")},
    "proj": "embed_vision.embedding_projection.weight",
}
_GGUF_NAMES = {
    **NAMES_IN_GGUF,
    **{f"{name}_bounds": NAMES_IN_GGUF[name].replace(".weight", ".bounds") for name in _MATRICES},
    **{f"{name}_norm": f"{_BLOCK}attn_{name}_norm.weight" for name in "qk"},
    "post_attn_norm": _BLOCK + "attn_post_norm.weight",
    "post_mlp_norm": _BLOCK + "ffn_post_norm.weight",
    **{name: f"v.{name}" for name in ("std_bias", "std_scale")},
    "proj": "mm.input_projection.weight",
}
VISION_FAMILIES = {
    "gemma4": VisionFamily(
        "Gemma 4",
        "gemma4_text",
        gemma4,
        _MODEL,
        _TOWER,
        _IMAGES,
        _NAMES,
        "gemma4v",
        _GGUF_NAMES,
        _model_in_gguf,
        _tower_in_gguf,
        processor_keys=table(PROCESSOR_KEYS.values(), [Key(name, kind=object) for name in _SOUNDS_AND_VIDEOS]),
        has_channels_last=True,
        rotates_halves=True,
    )
}
