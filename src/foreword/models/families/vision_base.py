"""Shared by all families of encoders of images: how one is described, and the keys and names that several have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import Rows
from foreword.models.families.encoder_base import weight_and_bias
from foreword.models.keys import Key, Keys, only, table
from foreword.models.vision_spec import Normalization, VisionSpec

FILTERS = range(6)  # the filters of Pillow
_LARGEST = float(np.finfo(np.float32).max)
LARGEST_SIDE = 4096
"""The longest side of the tiles of processors, in pixels."""
MOST_CROPS = 64
"""The largest number of crops of an image."""
NEVER = (None, False)
"""The values of what a processor never does."""
COUNTS = ("image_seq_len", "image_seq_length")  # vectors of a tile
_OF_A_CLASS = ("image_processor_type", "feature_extractor_type", "processor_class")  # names of classes of transformers
PROCESSOR_KEYS = table(Key(name, kind=object) for name in (*COUNTS, *_OF_A_CLASS, "image_processor"))
"""The keys of a processor_config.json, beside those of its image_processor."""


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


Shapes = Mapping[str, tuple[int, ...]]
"""Those of the tensors of a file, by name."""
GgufValues = Callable[[Config, Mapping[str, int], Shapes], tuple[dict[str, object], dict[str, object]]]
"""A function of an encoder's configuration, of token ids and of shapes: the values of model and processor."""


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """The description of a family of models of images and texts: how the files of its encoder are read.

    title: its name on pages. text: the ``model_type`` of its decoder, unless the configuration has another. spec: its
    `VisionSpec`. model_keys, tower_keys, image_keys, processor_keys: those of `VisionConfigs`. names: canonical names
    in safetensors, after `plain_name`. norms_less_one: the norm of the projector is stored as w − 1 there. fused:
    weights that are rows of another tensor there, and those of features. has_channels_last: patches are rows there, in
    which the channels of a pixel are side by side. rotates_halves: the first half of each head of queries and keys is
    rotated by the column, and the second one by the row. sections: ``mrope_section`` of a decoder in a directory that
    has none.
    gguf: the name of the projector in GGUF files; gguf_names: canonical names in these; gguf_tower: what these leave
    out of the configuration of the encoder, from the rest and the shapes of the tensors; gguf_values: what they leave
    out of those of the model and of the processor, from that of the encoder, the tokenizer's ids and the shapes;
    gguf_fused: as ``fused``.
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
    sections: tuple[int, ...] = ()
    fused: Callable[[VisionSpec], Mapping[str, str | Rows]] = lambda spec: {}
    gguf_fused: Callable[[VisionSpec], Mapping[str, str | Rows]] = lambda spec: {}
    processor_keys: Keys = field(default_factory=lambda: PROCESSOR_KEYS)
    has_channels_last: bool = False
    rotates_halves: bool = False


_PREFIXES = (
    ("vision_tower.vision_model.", "vision."),
    ("vision_tower.", "vision."),
    ("vision_model.", "vision."),
    ("visual.", "visual."),
    ("connector.", "connector."),
    ("multi_modal_projector.", "multi_modal_projector."),
    ("embed_vision.", "embed_vision."),
)
UNUSED = ("vision.head.",)
"""Beginnings of the names of tensors that are left out: the head of SigLIP alone."""


def plain_name(name: str) -> str | None:
    """Return the name of a tensor of the encoder without the prefixes that files have; None for one of the decoder."""
    own = name.removeprefix("model.")
    return next((new + own[len(old) :] for old, new in _PREFIXES if own.startswith(old)), None)


def qkv_rows(spec: VisionSpec) -> Mapping[str, Rows]:
    """Return q, k and v as the rows of one tensor."""
    d = spec.tower.hidden_size
    rows = {name: (i * d, (i + 1) * d) for i, name in enumerate("qkv")}
    return {f"{name}{end}": Rows(f"qkv{end}", *of) for name, of in rows.items() for end in ("", "_bias")}


def normalization(config: Config) -> Normalization:
    """Return the normalization of pixels. Raise ModelError for one whose results are not all finite."""
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


def axial_frequencies(config: Config, head_dim: int, base: float) -> tuple[float, ...]:
    """Return the frequencies of the rotation by row or by column, half of the pairs of a head, as float32 rounds each
    step of the reference: positions of long images are large. base: unless the configuration has another.
    """
    rope = {} if config.value("rope_parameters") is None else config.value("rope_parameters")
    if not isinstance(rope, Mapping) or rope.get("rope_type", "axial") not in ("axial", "default"):
        raise config.error(f"rope_parameters {rope!r:.80} are not supported", "Use a model with rope_type = 'axial'")
    theta = Config(config.path, rope, part="vision_config.rope_parameters.").positive("rope_theta", base)
    exponents = np.arange(0, head_dim // 2, 2, dtype=np.float32) / np.float32(head_dim // 2)
    return tuple((1 / (theta ** exponents.astype(np.float64)).astype(np.float32)).tolist())


def ids_in_gguf(tower: Config, ids: Mapping[str, int], texts: Mapping[str, str]) -> dict[str, object]:
    """Return the ids of tokens of the decoder.

    Raise ModelError if it lacks one: then the encoder is of another model.
    """
    if missing := [text for text in texts.values() if text not in ids]:
        reason = f"the tokenizer of the model that it is given for has no {' and no '.join(missing)}"
        raise tower.error(reason, "Give the mmproj of this model")
    return {key: ids[text] for key, text in texts.items()}


_OF_OTHERS = ("model_type", "architectures", "text_config", "vision_config", "tie_word_embeddings")  # the loader
_OF_VIDEOS = ("video_token_id", "vision_token_id", "vision_start_token_id", "vision_end_token_id")  # and of templates
MODEL_KEYS = table(
    Key(name) for name in (*_OF_OTHERS, *_OF_VIDEOS, "_pad_token_id", "quantization_config", "quantization")
)
"""The keys of a config.json that other code reads, or none, beside those of a family and of its decoder."""
PAN_AND_SCAN = "do_pan_and_scan"
"""The key of families whose images may have crops, and which others refuse."""
IMAGE_KEYS = table(
    [
        *(only(name, True) for name in ("do_resize", "do_rescale", "do_normalize")),
        *(only(name, *NEVER) for name in ("do_center_crop", PAN_AND_SCAN)),
        Key("do_convert_rgb", True, (True, False)),  # images are RGB
        Key("do_pad", True, (True, False)),  # all tiles are of one size
        *(Key("size"), Key("resample"), Key("rescale_factor", 1 / 255)),
        *(Key("image_mean", [0.5, 0.5, 0.5], kind=list), Key("image_std", [0.5, 0.5, 0.5], kind=list)),
        *(Key(name, kind=object) for name in (*COUNTS, *_OF_A_CLASS)),
    ]
)
"""The keys of a preprocessor_config.json that every family has."""
_BLOCK = "v.blk.{i}."
NAMES_IN_GGUF = weight_and_bias(
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
"""Canonical names in GGUF files of what all encoders have; files have q, k and v as three tensors or as one."""
