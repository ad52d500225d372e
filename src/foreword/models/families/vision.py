"""Encoders of images: SigLIP with the projectors of Idefics 3, SmolVLM and Gemma 3; those of Qwen2-VL to 3-VL."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.encoder_spec import EncoderActivation, EncoderLayerSpec, EncoderSpec
from foreword.models.families.base import ACTIVATIONS, Rows
from foreword.models.families.encoders import weight_and_bias
from foreword.models.keys import Key, Keys, only, table
from foreword.models.spec import RopeSpec
from foreword.models.vision_spec import (
    AreaProcessing,
    CropProcessing,
    ImagePrompt,
    Normalization,
    TileProcessing,
    VisionSpec,
)

FILTERS = range(6)  # of Pillow
_LARGEST = float(np.finfo(np.float32).max)
LARGEST_SIDE = 4096
"""The longest side of the tiles of processors, in pixels."""


class VisionConfigs(NamedTuple):
    """The configurations of a model of images and texts: its own, of the encoder, of the processor of images, and of
    the processor of messages.

    tokens: id → text of the tokens that a text is cut at. vector_size: hidden_size of the decoder.
    """

    model: Config
    tower: Config
    images: Config
    processor: Config
    tokens: Mapping[int, str]
    vector_size: int


GgufValues = Callable[[Config, Mapping[str, int]], tuple[dict[str, object], dict[str, object]]]
"""From the configuration of an encoder and the ids of tokens, the values of that of the model and of the processor."""
Shapes = Mapping[str, tuple[int, ...]]
"""Those of the tensors of a file, by name."""


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """The description of a family of models of images and texts: how the files of its encoder are read.

    title: its name on pages. text: the ``model_type`` of its decoder, unless the configuration has another. spec: its
    `VisionSpec`. model_keys, tower_keys, image_keys: those of `VisionConfigs`. names: canonical names in safetensors,
    after `plain_name`. norms_less_one: the norm of the projector is stored as w − 1 there. fused: weights that are rows
    of another tensor there, and those of features.
    gguf: the name of the projector in GGUF files; gguf_names: canonical names in these; gguf_tower: what these leave
    out of the configuration of the encoder, from the rest and the shapes of the tensors; gguf_values: what they leave
    out of those of the model and of the processor, from that of the encoder and the tokenizer's ids; gguf_fused: as
    ``fused``.
    """

    title: str
    text: str
    spec: Callable[[VisionConfigs], VisionSpec]
    model_keys: Keys
    tower_keys: Keys
    image_keys: Keys
    names: Mapping[str, str]
    gguf: str
    gguf_names: Mapping[str, str]
    gguf_values: GgufValues
    gguf_tower: Callable[[Config, Shapes], dict[str, object]] = lambda tower, shapes: {}
    norms_less_one: bool = False
    fused: Callable[[VisionSpec], Mapping[str, str | Rows]] = lambda spec: {}
    gguf_fused: Callable[[VisionSpec], Mapping[str, str | Rows]] = lambda spec: {}


_PREFIXES = (
    ("vision_tower.vision_model.", "vision."),
    ("vision_tower.", "vision."),
    ("vision_model.", "vision."),
    ("visual.", "visual."),
    ("connector.", "connector."),
    ("multi_modal_projector.", "multi_modal_projector."),
)
UNUSED = ("vision.head.",)
"""Beginnings of the names of tensors that are left out: the head of SigLIP alone."""


def plain_name(name: str) -> str | None:
    """Return the name of a tensor of the encoder without the prefixes that files have; None for one of the decoder."""
    own = name.removeprefix("model.")
    return next((new + own[len(old) :] for old, new in _PREFIXES if own.startswith(old)), None)


def idefics3(given: VisionConfigs) -> VisionSpec:
    """Tiles; the squares of ``scale_factor`` patches along each side become one vector."""
    images = given.images
    tile, longest = (_edge(images, key) for key in ("max_image_size", "size"))
    processing = TileProcessing(tile, longest, images.get("do_image_splitting", bool))
    token = given.tokens.get(token_id := given.model.get("image_token_id", int))
    if token != "<image>":
        whose = "no token of its tokenizer" if token is None else f"that of {token!r:.80}"
        raise given.model.error(f"image_token_id {token_id} is {whose}, not that of <image>", USE_ITS_CONFIG)
    fake = "<fake_token_around_image>"
    prompt = ImagePrompt(
        placeholder=token,
        token=token,
        begin=fake + "<global-img>",
        end=fake,
        tile=fake + "<row_{row}_col_{column}>",
        row_end="\n",
    )
    tower = siglip(given.tower)
    return _checked(
        given,
        VisionSpec(
            tower=tower,
            patch_size=given.tower.size("patch_size", most=LARGEST_SIDE),
            num_positions=_side(given.tower) ** 2,
            placing="nearest",
            factor=given.model.size("scale_factor", most=64),
            projector="shuffle",
            vector_size=given.vector_size,
            processing=processing,
            normalization=_normalization(images),
            prompt=prompt,
        ),
    )


def gemma3(given: VisionConfigs) -> VisionSpec:
    """One tile; vectors are means of squares of patches, and see each other in the decoder."""
    images, side = given.images, _side(given.tower)
    count = given.model.size("mm_tokens_per_image")
    along = math.isqrt(count)
    if along**2 != count or side % along:
        reason = f"mm_tokens_per_image = {count} is not the square of a divisor of {side}, the patches along a side"
        raise given.model.error(reason, USE_ITS_CONFIG)
    size = images.value("size")
    tile = given.tower.size("image_size", most=LARGEST_SIDE)
    if size != {"height": tile, "width": tile}:
        raise images.error(f"size is {size!r:.80}, not that of the encoder, {tile} × {tile}", USE_ITS_CONFIG)
    names = [given.tokens.get(given.model.get(f"{name}_token_index", int)) for name in ("image", "boi", "eoi")]
    image, begin, end = names
    if image is None or begin is None or end is None:
        reason = "its tokenizer has no special tokens of image_token_index, boi_token_index or eoi_token_index"
        raise given.model.error(reason, USE_ITS_CONFIG)
    return _checked(
        given,
        VisionSpec(
            tower=siglip(given.tower),
            patch_size=given.tower.size("patch_size", most=LARGEST_SIDE),
            num_positions=side**2,
            placing="rows",
            factor=side // along,
            projector="pool",
            vector_size=given.vector_size,
            processing=TileProcessing(tile, None, False, _crops(images)),
            normalization=_normalization(images),
            prompt=ImagePrompt(
                placeholder=begin,
                token=image,
                begin=f"\n\n{begin}",
                end=f"{end}\n\n",
                whole="Here is the original image ",
                crops=" and here are some crops to help you see better ",
            ),
            sees_all=True,
        ),
    )


def _crops(images: Config) -> CropProcessing | None:
    if not images.value(_PAN_AND_SCAN):
        return None
    found = CropProcessing(
        images.size("pan_and_scan_min_crop_size", 256, most=LARGEST_SIDE),
        images.size("pan_and_scan_max_num_crops", 4, most=64),
        images.positive("pan_and_scan_min_ratio_to_activate", 1.2),
    )
    if found.least_side < found.most_crops:  # then a crop may be empty
        reason = f"pan_and_scan_min_crop_size {found.least_side} is below pan_and_scan_max_num_crops {found.most_crops}"
        raise images.error(reason, USE_ITS_CONFIG)
    return found


def qwen2_vl(given: VisionConfigs) -> VisionSpec:
    """An image is one tile of its own proportions, whose vectors have rotary positions by row and column."""
    config = given.tower
    hidden = config.size("embed_dim")
    tower = _rotated(config, hidden, config.size("mlp_ratio", most=64) * hidden)
    return _placed(given, tower)


def qwen2_5_vl(given: VisionConfigs) -> VisionSpec:
    """Qwen2-VL with gated layers, most of which see windows alone."""
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
    """Qwen2-VL with learned positions, and with features for the first layers of the decoder."""
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
    rope = config.value("rope_parameters") or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", "axial") != "axial":
        raise config.error(f"rope_parameters {rope!r:.80} are not supported", "Use a model with rope_type = 'axial'")
    theta = Config(config.path, rope, part="vision_config.rope_parameters.").positive("rope_theta", 10000.0)
    half = hidden // heads // 2
    inv_freq = [float(np.float32(1 / theta ** (2 * k / half))) for k in range(half // 2)]
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
    area = Config(images.path, {name: images.value(older) or size.get(name) for name, older in _AREA.items()})
    least, most = (area.size(name, most=LARGEST_SIDE**2) for name in _AREA)
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
        normalization=_normalization(images),
        prompt=ImagePrompt(placeholder=token, token=token, begin="", end=""),
        num_frames=frames,
        is_placed=True,
    )


def _qwen3_names(spec: VisionSpec) -> Mapping[str, str | Rows]:
    merger = "visual.deepstack_merger_list.{k}."
    parts = {"norm": merger + "norm", "proj": merger + "linear_fc1", "out": merger + "linear_fc2"}
    return {**_of_features(parts, range(len(spec.feature_layers))), **qkv_rows(spec)}


def _qwen3_names_in_gguf(spec: VisionSpec) -> Mapping[str, str | Rows]:
    """The projectors of features have the numbers of their layers."""
    parts = {"norm": _FEATURE + "norm", "proj": _FEATURE + "fc1", "out": _FEATURE + "fc2"}
    return _of_features(parts, spec.feature_layers)


def _of_features(parts: Mapping[str, str], numbers: Sequence[int]) -> Mapping[str, str]:
    """Return the names of the projectors of features in a file, which have {k} as one of ``numbers``."""
    return weight_and_bias(
        {f"features.{i}.{name}": part.format(k=k) for i, k in enumerate(numbers) for name, part in parts.items()}
    )


def qkv_rows(spec: VisionSpec) -> Mapping[str, Rows]:
    """Return q, k and v as the rows of one tensor."""
    d = spec.tower.hidden_size
    rows = {name: (i * d, (i + 1) * d) for i, name in enumerate("qkv")}
    return {f"{name}{end}": Rows(f"qkv{end}", *of) for name, of in rows.items() for end in ("", "_bias")}


def siglip(config: Config) -> EncoderSpec:
    """Return the layers of a SigLIP, whose inputs are patches with positions."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads", most=512)
    if hidden % heads:
        raise config.error(f"hidden_size {hidden} is not a multiple of {heads} heads", USE_ITS_CONFIG)
    return EncoderSpec(
        architecture="siglip",
        vocab_size=0,
        hidden_size=hidden,
        intermediate_size=config.size("intermediate_size"),
        num_heads=heads,
        head_dim=hidden // heads,
        max_model_len=_side(config) ** 2,
        layers=(EncoderLayerSpec(),) * config.size("num_hidden_layers", most=4096),
        norm_eps=config.positive("layer_norm_eps"),
        activation=ACTIVATIONS[config.get("hidden_act", str)],
        norms_before=True,
    )


def _side(config: Config) -> int:
    """Return the patches along a side of the table of positions."""
    size, patch = config.size("image_size", most=LARGEST_SIDE), config.size("patch_size", most=LARGEST_SIDE)
    if patch > size:
        raise config.error(f"patch_size {patch} is larger than image_size {size}", USE_ITS_CONFIG)
    return size // patch


def _checked(given: VisionConfigs, spec: VisionSpec) -> VisionSpec:
    """Return the spec. Raise ModelError unless the whole patches of a tile make whole vectors."""
    tile = spec.processing.tile_size if isinstance(spec.processing, TileProcessing) else 0
    side = tile // spec.patch_size
    if side % spec.factor:
        reason = f"tiles of {tile} pixels have {side} patches along a side, not {spec.factor} times a whole number"
        raise given.images.error(reason, USE_ITS_CONFIG)
    num_vectors = (side // spec.factor) ** 2
    for config in (given.images, given.processor):
        for key in _COUNTS:
            if (count := config.optional(key, int)) not in (None, num_vectors):
                raise config.error(f"{key} is {count}, a tile has {num_vectors} vectors", USE_ITS_CONFIG)
    return spec


def _edge(config: Config, key: str) -> int:
    """Return the longest edge that a size names. Raise ModelError for a size of another form."""
    value = config.value(key)
    given = {name: one for name, one in value.items() if one is not None} if isinstance(value, Mapping) else {}
    edge = given.pop("longest_edge", None)
    if given or type(edge) is not int or not 1 <= edge <= LARGEST_SIDE:
        reason = f"{key} is {value!r:.80}, not a longest_edge of 1 to {LARGEST_SIDE} pixels"
        raise config.error(reason, USE_ITS_CONFIG)
    return edge


def _normalization(config: Config) -> Normalization:
    resample = config.get("resample", int)
    if resample not in FILTERS:
        raise config.error(f"resample = {resample} is not a filter of Pillow", USE_ITS_CONFIG)
    mean, std = _channels(config, "image_mean"), _channels(config, "image_std")
    if 0 in std:
        raise config.error(f"image_std {std} has a zero", USE_ITS_CONFIG)
    scale = config.positive("rescale_factor")
    ends = [(end * scale - one) / deviation for one, deviation in zip(mean, std, strict=True) for end in (0, 255)]
    if not all(abs(end) <= _LARGEST for end in ends):
        reason = f"rescale_factor {scale}, image_mean {mean} and image_std {std} give values that are not finite"
        raise config.error(reason, USE_ITS_CONFIG)
    return Normalization(resample, scale, mean, std)


def _channels(config: Config, key: str) -> tuple[float, float, float]:
    """Return a number per channel."""
    values = config.value(key)
    if (
        not isinstance(values, Sequence)
        or len(values) != 3
        or not all(type(one) in (int, float) and abs(one) <= _LARGEST for one in values)
    ):
        raise config.error(f"{key} is {values!r:.80}, not three finite numbers", USE_ITS_CONFIG)
    red, green, blue = map(float, values)
    return red, green, blue


def _idefics3_in_gguf(tower: Config, ids: Mapping[str, int]) -> tuple[dict[str, object], dict[str, object]]:
    side = tower.size("image_size", most=LARGEST_SIDE)
    longest = tower.size("preproc_image_size", 4 * side, most=LARGEST_SIDE)
    images: dict[str, object] = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}
    tokens = _ids_in_gguf(tower, ids, {"image_token_id": "<image>"})
    return {**tokens, "scale_factor": tower.size("projector_scale", most=64)}, images


def _gemma3_in_gguf(tower: Config, ids: Mapping[str, int]) -> tuple[dict[str, object], dict[str, object]]:
    side = tower.size("image_size", most=LARGEST_SIDE)
    texts = {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"}
    along, factor = _side(tower), tower.size("projector_scale", 4, most=64)
    if along % factor:
        reason = f"{tower.label('projector_scale')} {factor} does not divide the {along} patches along a side"
        raise tower.error(reason, USE_ITS_CONFIG)
    tokens = _ids_in_gguf(tower, ids, {f"{name}_token_index": text for name, text in texts.items()})
    return {**tokens, "mm_tokens_per_image": (along // factor) ** 2}, {"size": {"height": side, "width": side}}


def _qwen_in_gguf(least: int, most: int) -> GgufValues:
    """Return the function for files without bounds of pixels, which have those of the published configurations."""

    def values(tower: Config, ids: Mapping[str, int]) -> tuple[dict[str, object], dict[str, object]]:
        images: dict[str, object] = {
            "patch_size": tower.value("patch_size"),
            "merge_size": tower.value("spatial_merge_size"),
            "temporal_patch_size": tower.value("temporal_patch_size"),
            "min_pixels": tower.size(_LEAST, least),
            "max_pixels": tower.size(_MOST, most),
        }
        return _ids_in_gguf(tower, ids, {"image_token_id": "<|image_pad|>"}), images

    return values


def _qwen2_tower_in_gguf(tower: Config, shapes: Shapes) -> dict[str, object]:
    """Files have the width of the decoder as that of the MLP."""
    hidden = tower.size("embed_dim")
    up = shapes.get(_GGUF_NAMES["up"].format(i=0), ())
    return {"mlp_ratio": max(1, math.prod(up) // hidden**2)}


def _qwen2_5_tower_in_gguf(tower: Config, shapes: Shapes) -> dict[str, object]:
    """Every so-many-th layer sees the whole image."""
    every = tower.size(_EVERY, most=4096)
    return {"fullatt_block_indexes": list(range(every - 1, tower.size("depth", most=4096), every))}


def _qwen3_tower_in_gguf(tower: Config, shapes: Shapes) -> dict[str, object]:
    """Files list of each layer whether it has features."""
    flags, positions = tower.sequence(_HAS_FEATURES), shapes.get(_GGUF_NAMES["positions"])
    found: dict[str, object] = {"deepstack_visual_indexes": [i for i, flag in enumerate(flags) if flag]}
    return found | ({"num_position_embeddings": positions[0]} if positions else {})


def _ids_in_gguf(tower: Config, ids: Mapping[str, int], texts: Mapping[str, str]) -> dict[str, object]:
    """Return the ids of tokens of the decoder.

    Raise ModelError if it lacks one: then the encoder is of another model.
    """
    if missing := [text for text in texts.values() if text not in ids]:
        reason = f"the tokenizer of the model that it is given for has no {' and no '.join(missing)}"
        raise tower.error(reason, "Give the mmproj of this model")
    return {key: ids[text] for key, text in texts.items()}


_COUNTS = ("image_seq_len", "image_seq_length")  # vectors of a tile
_OF_A_CLASS = ("image_processor_type", "feature_extractor_type", "processor_class")  # of transformers
PROCESSOR_KEYS = table(Key(name, kind=object) for name in (*_COUNTS, *_OF_A_CLASS, "image_processor"))
"""Of a processor_config.json, beside those of its image_processor."""
_OF_OTHERS = ("model_type", "architectures", "text_config", "vision_config", "tie_word_embeddings")  # the loader
_OF_VIDEOS = ("video_token_id", "vision_token_id", "vision_start_token_id", "vision_end_token_id")  # and of templates
MODEL_KEYS = table(Key(name) for name in (*_OF_OTHERS, *_OF_VIDEOS, "_pad_token_id", "quantization_config"))
"""Of a config.json, beside those of a family and of its decoder: other code reads them, or nothing does."""
_SIGLIP = table(
    [
        Key("model_type"),
        Key("hidden_size", gguf="embedding_length"),
        Key("intermediate_size", 3072, gguf="feed_forward_length"),
        Key("num_hidden_layers", 12, gguf="block_count"),
        Key("num_attention_heads", gguf="attention.head_count"),
        only("num_channels", 3),
        Key("image_size", 224, gguf="image_size"),
        Key("patch_size", gguf="patch_size"),
        Key("hidden_act", "gelu_pytorch_tanh", tuple(ACTIVATIONS)),
        Key("layer_norm_eps", 1e-6, gguf="attention.layer_norm_epsilon", gguf_default=1e-6),
        Key("preproc_image_size", gguf="preproc_image_size"),
        Key("projector_scale", gguf="projector.scale_factor"),
        Key("vision_use_head", values=(True, False)),  # its output is not read
    ]
)
_IDEFICS3_TOWER = table(_SIGLIP.values(), hidden_size=1152, num_attention_heads=16, patch_size=32)
_PAN_AND_SCAN = "do_pan_and_scan"
_IMAGES = table(
    [
        *(only(name, True) for name in ("do_resize", "do_rescale", "do_normalize")),
        *(only(name, None, False) for name in ("do_center_crop", _PAN_AND_SCAN)),
        Key("do_convert_rgb", True, (True, False)),  # images are RGB
        Key("do_pad", True, (True, False)),  # all tiles are of one size
        *(Key("size"), Key("resample"), Key("rescale_factor", 1 / 255)),
        *(Key("image_mean", [0.5, 0.5, 0.5], kind=list), Key("image_std", [0.5, 0.5, 0.5], kind=list)),
        *(Key(name, kind=object) for name in (*_COUNTS, *_OF_A_CLASS)),
    ]
)
_TILES = table(
    _IMAGES.values(),
    [Key("max_image_size", {"longest_edge": 364}), Key("do_image_splitting", True)],
    size={"longest_edge": 4 * 364},
    resample=1,
)
_ONE_TILE = table(
    _IMAGES.values(),
    [
        Key(_PAN_AND_SCAN, None, (None, False, True)),
        *(Key(f"pan_and_scan_{name}", kind=int) for name in ("min_crop_size", "max_num_crops")),
        Key("pan_and_scan_min_ratio_to_activate", kind=float),
    ],
    size={"height": 224, "width": 224},
    resample=2,
)

_ACTIVATIONS: Mapping[str, EncoderActivation] = {**ACTIVATIONS, "quick_gelu": "quick_gelu"}
_AREA = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}  # pixels of an image, and their older names
_EPS, _LEAST, _MOST = "*.attention.layer_norm_epsilon", "*.image_min_pixels", "*.image_max_pixels"
_EVERY, _HAS_FEATURES = "*.n_wa_pattern", "*.is_deepstack_layers"  # of GGUF files alone
_QWEN = table(
    [
        *(Key("model_type"), Key("spatial_patch_size"), Key("tokens_per_second")),  # the last one is of videos
        *(Key("depth", 32, gguf="block_count"), Key("num_heads", 16, gguf="attention.head_count")),
        *(only("in_channels", 3), only("in_chans", None, 3), Key("patch_size", 14, gguf="patch_size")),
        Key("spatial_merge_size", 2, gguf="spatial_merge_size", gguf_default=2),
        *(Key("temporal_patch_size", 2), Key("rope_parameters")),
        Key(_EPS, 1e-6, gguf="attention.layer_norm_epsilon", gguf_default=1e-6),
        *(Key(_LEAST, gguf="image_min_pixels", kind=int), Key(_MOST, gguf="image_max_pixels", kind=int)),
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
        *(Key("fullatt_block_indexes", [7, 15, 23, 31], kind=list), Key(_EVERY, gguf="n_wa_pattern")),
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
        Key(_HAS_FEATURES, gguf="is_deepstack_layers"),
        Key("hidden_act", "gelu_pytorch_tanh", tuple(_ACTIVATIONS)),
    ],
    patch_size=16,
)
_QWEN_IMAGES = table(
    _IMAGES.values(),
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

_LAYER, _BLOCK, _VISUAL = "vision.encoder.layers.{i}.", "v.blk.{i}.", "visual.blocks.{i}."
_FEATURE = "v.deepstack.{k}."
_NAMES = weight_and_bias(
    {
        "patch": "vision.embeddings.patch_embedding",
        "attn_norm": _LAYER + "layer_norm1",
        "mlp_norm": _LAYER + "layer_norm2",
        **{name: f"{_LAYER}self_attn.{name}_proj" for name in "qkv"},
        "o": _LAYER + "self_attn.out_proj",
        "up": _LAYER + "mlp.fc1",
        "down": _LAYER + "mlp.fc2",
        "final_norm": "vision.post_layernorm",
    }
) | {"positions": "vision.embeddings.position_embedding.weight"}
_GGUF_NAMES = weight_and_bias(
    {
        "patch": "v.patch_embd",
        "attn_norm": _BLOCK + "ln1",
        "mlp_norm": _BLOCK + "ln2",
        **{name: f"{_BLOCK}attn_{name}" for name in ("q", "k", "v", "qkv")},
        "o": _BLOCK + "attn_out",
        "gate": _BLOCK + "ffn_gate",
        "up": _BLOCK + "ffn_up",
        "down": _BLOCK + "ffn_down",
        "final_norm": "v.post_ln",
    }
) | {"positions": "v.position_embd.weight"}

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
_QWEN_GGUF_NAMES = _GGUF_NAMES | weight_and_bias({"proj": "mm.0", "out": "mm.2"})
_QWEN2_IN_GGUF = _qwen_in_gguf(4 * 28**2, 16384 * 28**2)
_GATED = weight_and_bias({name: f"{_VISUAL}mlp.{name}_proj" for name in ("gate", "up", "down")})

_IDEFICS3 = VisionFamily(
    "Idefics 3, SmolVLM",
    "llama",
    idefics3,
    table([Key("image_token_id", 128257), Key("scale_factor", 2)]),
    _IDEFICS3_TOWER,
    _TILES,
    _NAMES | {"proj": "connector.modality_projection.proj.weight"},
    "idefics3",
    _GGUF_NAMES | {"proj": "mm.model.fc.weight"},
    _idefics3_in_gguf,
)
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
    fused=_qwen3_names,
    gguf_fused=_qwen3_names_in_gguf,
)
_QWEN3_5_FAMILY = replace(
    _QWEN3_VL_FAMILY,
    title="Qwen3.5",
    text="qwen3_5_text",
    model_keys=table(_QWEN_MODEL.values(), image_token_id=248056),
    tower_keys=table(_QWEN3_VL.values(), deepstack_visual_indexes=[]),
)
VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "gemma3": VisionFamily(
        "Gemma 3",
        "gemma3_text",
        gemma3,
        table(
            [
                Key("mm_tokens_per_image", 256),
                *(Key("image_token_index", 262144), Key("boi_token_index", 255999), Key("eoi_token_index", 256000)),
            ]
        ),
        table(_SIGLIP.values(), hidden_size=768, num_attention_heads=12, patch_size=16),
        _ONE_TILE,
        _NAMES
        | {
            "proj": "multi_modal_projector.mm_input_projection_weight",
            "proj_norm": "multi_modal_projector.mm_soft_emb_norm.weight",
        },
        "gemma3",
        _GGUF_NAMES | {"proj": "mm.input_projection.weight", "proj_norm": "mm.soft_emb_norm.weight"},
        _gemma3_in_gguf,
        norms_less_one=True,
    ),
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
"""By ``model_type`` of a config.json."""
GGUF_VISION_FAMILIES: Mapping[str, VisionFamily] = {one.gguf: one for one in VISION_FAMILIES.values()}
"""By ``clip.projector_type`` of a GGUF file. Families with the same one read it in the same way."""
