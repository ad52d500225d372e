"""The encoder of images of LFM2-VL: SigLIP 2 on tiles of any proportions, and a projector of two products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import ACTIVATIONS
from foreword.models.families.encoder_base import weight_and_bias
from foreword.models.families.siglip import NAMES_OF_SIGLIP, SIGLIP, siglip
from foreword.models.families.vision_base import (
    IMAGE_KEYS,
    LARGEST_SIDE,
    MOST_CROPS,
    NAMES_IN_GGUF,
    PROCESSOR_KEYS,
    Shapes,
    VisionConfigs,
    VisionFamily,
    ids_in_gguf,
    normalization,
)
from foreword.models.keys import Key, of_gguf, only, table
from foreword.models.vision_spec import AreaProcessing, GridProcessing, ImagePrompt, MlpProjector, VisionSpec


def lfm2_vl(given: VisionConfigs) -> VisionSpec:
    """Return a spec in which an image is one tile of its own proportions, which a grid of tiles precedes if it is
    large; the square of positions is resized to each tile.
    """
    model, tower, images = given.model, given.tower, given.images
    patch, factor = tower.size("patch_size", most=LARGEST_SIDE), model.size("downsample_factor", most=64)
    for key, own in (("encoder_patch_size", patch), ("downsample_factor", factor)):
        if images.size(key) != own:
            raise images.error(f"{key} is {images.size(key)}, that of the encoder is {own}", USE_ITS_CONFIG)
    num_positions = tower.size("num_patches", most=1 << 20)
    if math.isqrt(num_positions) ** 2 != num_positions:
        raise tower.error(f"num_patches = {num_positions} is not a square", USE_ITS_CONFIG)
    token = given.tokens.get(model.get("image_token_id", int))
    if token is None:
        raise model.error("its tokenizer has no token of image_token_id", USE_ITS_CONFIG)
    prompt = ImagePrompt(placeholder=token, token=token, begin="", end="")
    if given.processor.get("use_image_special_tokens", bool):
        prompt = replace(
            prompt,
            start="<|image_start|>",
            tile="<|img_row_{row}_col_{column}|>",
            whole="<|img_thumbnail|>",
            end="<|image_end|>",
        )
    return VisionSpec(
        tower=siglip(tower, LARGEST_SIDE**2 // patch**2),
        patch_size=patch,
        num_positions=num_positions,
        placing="resized",
        factor=factor,
        projector="mlp",
        vector_size=given.vector_size,
        processing=_processing(images, patch, patch * factor),
        normalization=replace(normalization(images), is_joint=True),
        prompt=prompt,
        mlp=MlpProjector(
            model.size("projector_hidden_size"),
            ACTIVATIONS[model.get("projector_hidden_act", str)],
            _NORM_EPS if model.get("projector_use_layernorm", bool) else None,
            model.get("projector_bias", bool),
        ),
    )


def _processing(images: Config, patch: int, side: int) -> AreaProcessing:
    """Return the changes of an image. side: the pixels of a vector along each side."""
    area, largest = side**2, LARGEST_SIDE**2
    least, most = (images.size(f"{end}_image_tokens", most=largest // area) for end in ("min", "max"))
    if least > most:
        raise images.error(f"images have at least {least} and at most {most} vectors", USE_ITS_CONFIG)
    tile = images.size("tile_size", most=LARGEST_SIDE)
    fewest, most_tiles = (images.size(f"{end}_tiles", most=MOST_CROPS) for end in ("min", "max"))
    grid = GridProcessing(
        tile,
        fewest,
        most_tiles,
        most * area * images.positive("max_pixels_tolerance"),
        patch,
        images.get("use_thumbnail", bool),
    )
    if not images.get("do_image_splitting", bool) or fewest == most_tiles == 1:
        return AreaProcessing(side, least * area, most * area, side)
    if not 1 < fewest <= most_tiles:
        reason = f"min_tiles = {fewest} and max_tiles = {most_tiles} are not 2 or more, and in order"
        raise images.error(reason, USE_ITS_CONFIG)
    if tile % side:
        raise images.error(f"tile_size {tile} is not a multiple of {side}, the pixels of a vector", USE_ITS_CONFIG)
    if tile**2 * most_tiles > largest:
        reason = f"max_tiles = {most_tiles} of tile_size {tile} have more than {largest} pixels"
        raise images.error(reason, USE_ITS_CONFIG)
    return AreaProcessing(side, least * area, most * area, side, grid)


def _model_in_gguf(
    tower: Config, ids: Mapping[str, int], shapes: Shapes
) -> tuple[dict[str, object], dict[str, object]]:
    """Return what the tensors tell of the projector, and a processor with the numbers of the published ones."""
    factor, filter_name = tower.size("projector_scale", 2, most=64), tower.get(_RESIZING, str)
    tower.check_computed(_RESIZING, filter_name)
    model: dict[str, object] = {
        "downsample_factor": factor,
        "projector_use_layernorm": _GGUF_NAMES["proj_norm"] in shapes,
        "projector_bias": _GGUF_NAMES["proj_bias"] in shapes,
    }
    if first := shapes.get(_GGUF_NAMES["proj"]):
        model["projector_hidden_size"] = first[0]
    images = {
        "encoder_patch_size": tower.value("patch_size"),
        "downsample_factor": factor,
        "resample": _FILTERS[filter_name],
    }
    return {**ids_in_gguf(tower, ids, {"image_token_id": "<image>"}), **model}, images


def _tower_in_gguf(tower: Config, shapes: Shapes) -> dict[str, object]:
    """Return the number of positions from their tensor."""
    positions = shapes.get(NAMES_IN_GGUF["positions"])
    return {"num_patches": positions[0]} if positions else {}


_NORM_EPS = 1e-5  # The norm of the projector has it; no file does.
_RESIZING = "*.image_resize_algo"  # a key of GGUF files alone
_FILTERS = {"lanczos": 1, "bilinear": 2, "bicubic": 3}
"""The numbers of Pillow's filters by their names in GGUF files."""
_NOT_READ = (
    *("size", "default_to_square", "patch_size", "max_num_patches"),  # the keys of tokens and tiles say it
    *("data_format", "return_row_col_info"),  # what another implementation returns
)
_TOWER = table(
    (key for key in SIGLIP.values() if key.name not in ("image_size", "preproc_image_size")),
    [Key("num_patches", 256), of_gguf(_RESIZING, "bilinear", tuple(_FILTERS), gguf_default="bilinear")],
    hidden_size=768,
    num_attention_heads=12,
    patch_size=16,
)
_MODEL = table(
    [
        *(Key("image_token_id", 396), Key("downsample_factor", 2), Key("projector_hidden_size", 2560)),
        Key("projector_hidden_act", "gelu", tuple(ACTIVATIONS)),
        *(Key("projector_bias", True), Key("projector_use_layernorm", True)),
        only("vision_feature_layer", None, -1),  # states of an earlier layer are not read
    ]
)
_IMAGES = table(
    IMAGE_KEYS.values(),
    [
        *(Key("do_image_splitting", True), Key("tile_size", 512), Key("use_thumbnail", True)),
        *(Key("min_tiles", 2), Key("max_tiles", 10), Key("max_pixels_tolerance", 2.0)),
        *(Key("min_image_tokens", 64), Key("max_image_tokens", 256)),
        *(Key("encoder_patch_size", 16), Key("downsample_factor", 2)),
        Key("do_resize", True, (True, False)),  # the reference resizes whatever it says
        Key("do_convert_rgb", None, (None, True, False)),
        *(Key(name, kind=object) for name in _NOT_READ),
    ],
    resample=2,
)
_GGUF_NAMES = NAMES_IN_GGUF | weight_and_bias({"proj_norm": "mm.input_norm", "proj": "mm.1", "out": "mm.2"})
VISION_FAMILIES = {
    "lfm2_vl": VisionFamily(
        "LFM2-VL",
        "lfm2",
        lfm2_vl,
        _MODEL,
        _TOWER,
        _IMAGES,
        NAMES_OF_SIGLIP
        | weight_and_bias(
            {
                "proj_norm": "multi_modal_projector.layer_norm",
                "proj": "multi_modal_projector.linear_1",
                "out": "multi_modal_projector.linear_2",
            }
        ),
        "lfm2",
        _GGUF_NAMES,
        _model_in_gguf,
        _tower_in_gguf,
        processor_keys=table(PROCESSOR_KEYS.values(), [Key("use_image_special_tokens", True)]),
        has_channels_last=True,
    )
}
