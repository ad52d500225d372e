"""Encoders of images: SigLIP with the projectors of Idefics 3, SmolVLM and Gemma 3."""

from __future__ import annotations

import math
from collections.abc import Mapping

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.encoder_spec import EncoderLayerSpec, EncoderSpec
from foreword.models.families.base import ACTIVATIONS
from foreword.models.families.encoder_base import weight_and_bias
from foreword.models.families.vision_base import (
    COUNTS,
    IMAGE_KEYS,
    LARGEST_SIDE,
    MOST_CROPS,
    NAMES_IN_GGUF,
    PAN_AND_SCAN,
    Shapes,
    VisionConfigs,
    VisionFamily,
    ids_in_gguf,
    normalization,
)
from foreword.models.keys import Key, only, table
from foreword.models.vision_spec import CropProcessing, ImagePrompt, TileProcessing, VisionSpec


def idefics3(given: VisionConfigs) -> VisionSpec:
    """Return a spec with tiles; squares of ``scale_factor`` patches along each side become one vector."""
    images = given.images
    tile, longest = (_edge(images, key) for key in ("max_image_size", "size"))
    processing = TileProcessing(tile, longest, images.get("do_image_splitting", bool))
    token = given.tokens.get(token_id := given.model.get("image_token_id", int))
    if token != "<image>":
        whose = "not a token of its tokenizer" if token is None else f"that of {token!r:.80}"
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
    tower = siglip(given.tower, _side(given.tower) ** 2)
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
            normalization=normalization(images),
            prompt=prompt,
        ),
    )


def gemma3(given: VisionConfigs) -> VisionSpec:
    """Return a spec with one tile; vectors are means of squares of patches, and see each other in the decoder."""
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
            tower=siglip(given.tower, side**2),
            patch_size=given.tower.size("patch_size", most=LARGEST_SIDE),
            num_positions=side**2,
            placing="rows",
            factor=side // along,
            projector="pool",
            vector_size=given.vector_size,
            processing=TileProcessing(tile, None, False, _crops(images)),
            normalization=normalization(images),
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
    """Return the crops of pan and scan, with the numbers of transformers where the configuration has none."""
    found = CropProcessing(
        images.size("pan_and_scan_min_crop_size", 256, most=LARGEST_SIDE),
        images.size("pan_and_scan_max_num_crops", 4, most=MOST_CROPS),
        images.positive("pan_and_scan_min_ratio_to_activate", 1.2),
    )
    if not images.value(PAN_AND_SCAN):
        return None
    if found.least_side < found.most_crops:  # then a crop may be empty
        reason = f"pan_and_scan_min_crop_size {found.least_side} is below pan_and_scan_max_num_crops {found.most_crops}"
        raise images.error(reason, USE_ITS_CONFIG)
    return found


def siglip(config: Config, most_patches: int) -> EncoderSpec:
    """Return the layers of a SigLIP, whose inputs are patches with positions. most_patches: of a tile."""
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
        max_model_len=most_patches,
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
        for key in COUNTS:
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


def _idefics3_in_gguf(
    tower: Config, ids: Mapping[str, int], shapes: Shapes
) -> tuple[dict[str, object], dict[str, object]]:
    side = tower.size("image_size", most=LARGEST_SIDE)
    longest = tower.size("preproc_image_size", 4 * side, most=LARGEST_SIDE)
    images: dict[str, object] = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}
    tokens = ids_in_gguf(tower, ids, {"image_token_id": "<image>"})
    return {**tokens, "scale_factor": tower.size("projector_scale", most=64)}, images


def _gemma3_in_gguf(
    tower: Config, ids: Mapping[str, int], shapes: Shapes
) -> tuple[dict[str, object], dict[str, object]]:
    side = tower.size("image_size", most=LARGEST_SIDE)
    texts = {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"}
    along, factor = _side(tower), tower.size("projector_scale", 4, most=64)
    if along % factor:
        reason = f"{tower.label('projector_scale')} {factor} does not divide the {along} patches along a side"
        raise tower.error(reason, USE_ITS_CONFIG)
    tokens = ids_in_gguf(tower, ids, {f"{name}_token_index": text for name, text in texts.items()})
    return {**tokens, "mm_tokens_per_image": (along // factor) ** 2}, {"size": {"height": side, "width": side}}


SIGLIP = table(
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
"""The keys of a SigLIP."""
_IDEFICS3_TOWER = table(SIGLIP.values(), hidden_size=1152, num_attention_heads=16, patch_size=32)
_TILES = table(
    IMAGE_KEYS.values(),
    [Key("max_image_size", {"longest_edge": 364}), Key("do_image_splitting", True)],
    size={"longest_edge": 4 * 364},
    resample=1,
)
_ONE_TILE = table(
    IMAGE_KEYS.values(),
    [
        Key(PAN_AND_SCAN, None, (None, False, True)),
        *(Key(f"pan_and_scan_{name}", kind=int) for name in ("min_crop_size", "max_num_crops")),
        Key("pan_and_scan_min_ratio_to_activate", kind=float),
    ],
    size={"height": 224, "width": 224},
    resample=2,
)
_LAYER = "vision.encoder.layers.{i}."
NAMES_OF_SIGLIP = weight_and_bias(
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
"""The canonical names of a SigLIP in safetensors."""
_IDEFICS3 = VisionFamily(
    "Idefics 3, SmolVLM",
    "llama",
    idefics3,
    table([Key("image_token_id", 128257), Key("scale_factor", 2)]),
    _IDEFICS3_TOWER,
    _TILES,
    NAMES_OF_SIGLIP | {"proj": "connector.modality_projection.proj.weight"},
    "idefics3",
    NAMES_IN_GGUF | {"proj": "mm.model.fc.weight"},
    _idefics3_in_gguf,
)
VISION_FAMILIES = {
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
        table(SIGLIP.values(), hidden_size=768, num_attention_heads=12, patch_size=16),
        _ONE_TILE,
        NAMES_OF_SIGLIP
        | {
            "proj": "multi_modal_projector.mm_input_projection_weight",
            "proj_norm": "multi_modal_projector.mm_soft_emb_norm.weight",
        },
        "gemma3",
        NAMES_IN_GGUF | {"proj": "mm.input_projection.weight", "proj_norm": "mm.soft_emb_norm.weight"},
        _gemma3_in_gguf,
        norms_less_one=True,
    ),
}
