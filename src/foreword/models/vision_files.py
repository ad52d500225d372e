"""Read the encoder of images of a model: from its directory, or from the GGUF file of the encoder alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from foreword.errors import ModelError
from foreword.models.config import USE_ITS_CONFIG, Config, read_config
from foreword.models.families.base import Rows
from foreword.models.families.vision import GGUF_VISION_FAMILIES, VISION_FAMILIES
from foreword.models.families.vision_base import MODEL_KEYS, NEVER, VisionConfigs, VisionFamily, plain_name, qkv_rows
from foreword.models.files import FileRows, ModelFile
from foreword.models.gguf import GGUF, Strings, read_gguf
from foreword.models.gguf_names import folders_of_mmproj, is_mmproj, mmproj_of
from foreword.models.keys import Keys
from foreword.models.naming import vision_weights
from foreword.models.text_files import read_object
from foreword.models.tokenizer import Tokenizer
from foreword.models.vision_spec import VisionSpec
from foreword.models.weights import FileWeights, Tensor, Weights, float_tensor

_VISION = "clip.vision."  # before the keys of an encoder in a GGUF file
_ACTIVATIONS = {"clip.use_gelu": "gelu_pytorch_tanh", "clip.use_silu": "silu"}
_TOLD: Mapping[str, bool | None] = {
    "clip.has_vision_encoder": True,
    "clip.has_text_encoder": False,
    "clip.has_audio_encoder": None,  # sounds are refused
    "clip.has_llava_projector": None,
    "clip.has_qwen2vl_merger": None,  # older files have it beside projector_type
}
"""Flags that the tensors tell, too, each with the only value that is computed; None: either."""
_SIZES = ("projection_dim", "image_size", "feed_forward_length")  # the tensors have them
_READ = {"clip.projector_type", *(_VISION + name for name in ("projector_type", "image_mean", "image_std", *_SIZES))}
_READ |= {*_ACTIVATIONS, *_TOLD}
_OF_SOUNDS = ("a.", "mm.a.")
"""Beginnings of the names of tensors of an encoder of sounds in the same file, which is not run."""
_LIMITS = ("input_min", "input_max", "output_min", "output_max")
_CONVERT_AGAIN = "Convert the encoder again"


@dataclass(frozen=True, slots=True)
class ImageProcessing:
    """The processor of images of a family, by its configuration."""

    family: VisionFamily
    given: VisionConfigs

    def configured(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of those of the names that images of the family depend on: those of any kind are not
        read.
        """
        keys, images = self.family.image_keys, self.given.images
        read = {name for name, key in keys.items() if key.values != NEVER and key.kind is not object}
        return {name: images.value(name) for name in names if name in read}

    def spec(self, values: Mapping[str, object]) -> VisionSpec:
        """Return the spec with values in place of those of the configuration. Raise ModelError, which names no file,
        for some that are not computed.
        """
        images = self.given.images
        older = {"min_pixels", "max_pixels"} if "size" in values else set()
        base = {name: value for name, value in images.values.items() if name not in older}
        own = Path("its processor")
        images = replace(images, path=own, part="", values={**base, **values})
        return _spec(self.family, self.given._replace(images=images, processor=replace(self.given.processor, path=own)))


@dataclass(frozen=True, slots=True)
class LoadedVision:
    """The encoder of images of a model. token_id: of the tokens that have vectors. unread: keys of its configurations
    that have no influence. known: those of the configuration of the model that the encoder has, or nothing needs.
    num_axes: the first numbers of the rotary position of a vector, its time, row and column, that the decoder reads.
    """

    spec: VisionSpec
    weights: Weights
    token_id: int
    unread: tuple[str, ...]
    processing: ImageProcessing
    known: frozenset[str] = frozenset()
    num_axes: int = 3


def read_vision(
    folder: Path,
    family: VisionFamily,
    config: Config,
    tensors: Mapping[str, Tensor],
    files: Iterable[ModelFile],
    tokenizer: Tokenizer,
    vector_size: int,
    text_keys: Keys,
) -> LoadedVision:
    """Read the encoder of a directory. Raise ModelError for one that is damaged or not supported.

    config: of the whole model. tensors, files: all of it. vector_size: hidden_size of the decoder. text_keys: of the
    decoder, if its keys are beside those of the whole model.
    """
    given = _configs(folder, family, config, tokenizer.added_token_ids, vector_size)
    images, processor = given.images, given.processor
    spec = _spec(family, given)
    own = {plain: tensor for name, tensor in tensors.items() if (plain := plain_name(name)) is not None}
    own = _with_bounds(own)
    if family.has_channels_last:
        own = _with_channels_first(own, family.names["patch"], spec.patch_size)
    names: dict[str, str | Rows] = {**family.names, **family.fused(spec)}
    weights = vision_weights(
        folder, own, spec, names, norms_less_one=family.norms_less_one, rotates_halves=family.rotates_halves
    )
    unread = [f"vision_config.{key}" for key in given.tower.unread(family.tower_keys)]
    unread += [f"{images.path.name}: {images.part}{key}" for key in images.unread(family.image_keys)]
    unread += [f"{processor.path.name}: {key}" for key in processor.unread(family.processor_keys)]
    known = {**MODEL_KEYS, **family.model_keys}
    unread += given.model.unread({**text_keys, **known})
    loaded = _loaded(folder, spec, FileWeights(weights, files, config.values), tokenizer, unread, family, given)
    return replace(loaded, known=frozenset(known))


def read_processing(folder: Path, ids: Mapping[str, int], vector_size: int) -> ImageProcessing | None:
    """Return the processor of images of a directory, without the weights. None if no family computes its images.

    ids: of the tokens that a text is cut at. vector_size: hidden_size of the decoder.
    """
    try:
        config = read_config(folder / "config.json")
        family = VISION_FAMILIES.get(config.get("model_type", str))
        if family is None:
            return None
        found = ImageProcessing(family, _configs(folder, family, config, ids, vector_size))
        found.spec({})
    except ModelError:
        return None
    return found


def _configs(
    folder: Path, family: VisionFamily, config: Config, ids: Mapping[str, int], vector_size: int
) -> VisionConfigs:
    tower = config.value("vision_config")
    if not isinstance(tower, Mapping):
        raise config.error(f"vision_config is {tower!r:.80}, not an object", USE_ITS_CONFIG)
    processor, images = _processor_configs(folder, family)
    return VisionConfigs(
        model=Config(config.path, config.values, keys=family.model_keys),
        tower=Config(config.path, tower, keys=family.tower_keys, part="vision_config."),
        images=images,
        processor=processor,
        tokens={i: text for text, i in ids.items()},
        vector_size=vector_size,
    )


def find_mmproj(model: Path) -> Path | None:
    """Return the GGUF file of an encoder beside that of a model, see `mmproj_of`. None if there is none. Raise
    ModelError for several none of which is chosen.
    """
    model = model.absolute()
    near = map(Path, folders_of_mmproj(model))
    found = [str(path) for folder in near for path in sorted(folder.glob("*.gguf")) if is_mmproj(path.name)]
    chosen = mmproj_of(str(model), found)
    if found and chosen is None:
        names = ", ".join(Path(name).name for name in found)
        raise ModelError(f"{model}: beside it are {len(found)} encoders of images: {names}. Name one as mmproj")
    return Path(chosen) if chosen else None


def read_mmproj(path: Path, tokenizer: Tokenizer, vector_size: int) -> LoadedVision:
    """Read the GGUF file of an encoder of images, as llama.cpp's converter writes it. Raise ModelError for one that is
    missing, damaged, not supported, or of another model.

    tokenizer, vector_size: the tokenizer and the hidden_size of the decoder.
    """
    gguf = read_gguf(path)
    if (architecture := gguf.get("general.architecture", str)) != "clip":
        fix = "Give the file whose name begins with mmproj"
        raise ModelError(f"{path}: architecture {architecture!r:.80} is not an encoder of images (clip). {fix}")
    kind = gguf.get("clip.vision.projector_type", str, gguf.get("clip.projector_type", str, "none"))
    family = GGUF_VISION_FAMILIES.get(kind)
    if family is None:
        supported = ", ".join(sorted(GGUF_VISION_FAMILIES))
        raise ModelError(f"{path}: projector {kind!r:.80} is not supported. Supported are {supported}")
    _check_told(gguf, vector_size)
    tower = _tower_of(gguf, family)
    ids = tokenizer.added_token_ids
    shapes = {name: tensor.shape for name, tensor in gguf.tensors.items()}
    model, images = family.gguf_values(tower, ids, shapes)
    images |= {f"image_{name}": _list(gguf.metadata.get(f"{_VISION}image_{name}")) for name in ("mean", "std")}
    given = VisionConfigs(
        model=Config(path, model, keys=family.model_keys),
        tower=tower,
        images=Config(path, images, keys=family.image_keys),
        processor=Config(path, {}, keys=family.processor_keys),
        tokens={i: text for text, i in ids.items()},
        vector_size=vector_size,
    )
    tensors = {name: tensor for name, tensor in gguf.tensors.items() if not name.startswith(_OF_SOUNDS)}
    spec, tensors = _spec(family, given), _with_bounds(_with_whole_patch(tensors, family.gguf_names["patch"]))
    names: dict[str, str | Rows] = {**family.gguf_names, **family.gguf_fused(spec)}
    if family.gguf_names["qkv"].format(i=0) in tensors:
        names |= qkv_rows(spec)
    down = tensors.get(family.gguf_names["down"].format(i=0))
    if down is not None and down.shape[-1] == spec.tower.hidden_size != spec.tower.intermediate_size:
        for end in ("", "_bias"):  # older files name the two the other way round
            names[f"up{end}"], names[f"down{end}"] = names[f"down{end}"], names[f"up{end}"]
    _check_width(path, tensors, spec, family)
    weights = vision_weights(path, tensors, spec, names, norms_less_one=False, rotates_halves=family.rotates_halves)
    files = dict.fromkeys(t.stored.file for t in gguf.tensors.values() if isinstance(t.stored, FileRows))
    own = {_VISION + key.gguf for key in family.tower_keys.values() if key.gguf and key.name in tower.read}
    named = (key for key in gguf.metadata if key.startswith("clip.") and not key.startswith("clip.audio."))
    unread = sorted(key for key in named if key not in own | _READ)
    return _loaded(path, spec, FileWeights(weights, files), tokenizer, unread, family, given)


def _check_told(gguf: GGUF, vector_size: int) -> None:
    """Raise ModelError for metadata that say again what the tensors have, and contradict them or are no such values."""
    for name, only in _TOLD.items():
        value = gguf.get(name, bool, only is not False)
        if only is not None and value is not only:
            raise ModelError(f"{gguf.path}: {name} = {value} is not supported. {_CONVERT_AGAIN}")
    for name in _SIZES:
        gguf.get(_VISION + name, int, 0)
    if (width := gguf.get(f"{_VISION}projection_dim", int, vector_size)) != vector_size:
        reason = f"{_VISION}projection_dim = {width}, the embeddings of the model have {vector_size} numbers"
        raise ModelError(f"{gguf.path}: {reason}. Give the mmproj of this model")


def _tower_of(gguf: GGUF, family: VisionFamily) -> Config:
    """Return the configuration of the encoder in a GGUF file."""
    values: dict[str, object] = {
        key.name: _list(gguf.metadata[_VISION + key.gguf])
        for key in family.tower_keys.values()
        if key.gguf and _VISION + key.gguf in gguf.metadata
    }
    told = [name for name in _ACTIVATIONS if gguf.get(name, bool, False)]
    if len(told) > 1:
        raise ModelError(f"{gguf.path}: {' and '.join(told)} are both true. {_CONVERT_AGAIN}")
    values["hidden_act"] = _ACTIVATIONS[told[0]] if told else "quick_gelu"
    config = Config(gguf.path, values, keys=family.tower_keys, prefix=_VISION)
    shapes = {name: tensor.shape for name, tensor in gguf.tensors.items()}
    return replace(config, values={**values, **family.gguf_tower(config, shapes)})


def _with_channels_first(tensors: Mapping[str, Tensor], name: str, patch_size: int) -> dict[str, Tensor]:
    """Return the tensors of a directory with that of patches as [d, 3, P, P]: it has them as rows of pixels, each of
    three channels [d, P · P · 3].
    """
    patch = tensors.get(name)
    if patch is None or patch.shape[1:] != (3 * patch_size**2,):
        return dict(tensors)  # refused as missing, or for its shape
    pixels = patch.dequantize().reshape(-1, patch_size, patch_size, 3)
    return {**tensors, name: float_tensor(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))}


def _with_bounds(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the bounds of each product in one: files have a number for each."""
    found = dict(tensors)
    for stem in [name.removesuffix(f".{_LIMITS[0]}") for name in tensors if name.endswith(f".{_LIMITS[0]}")]:
        own = [f"{stem}.{name}" for name in _LIMITS]
        if all(name in tensors and prod(tensors[name].shape) == 1 for name in own):
            values = [found.pop(name).dequantize().ravel() for name in own]
            found[f"{stem}.bounds"] = float_tensor(np.concatenate(values))
    return found


def _with_whole_patch(tensors: Mapping[str, Tensor], name: str) -> Mapping[str, Tensor]:
    """Return the tensors of a file with that of patches whole: files have a tensor for each frame [d, 3, P, P]."""
    found = {key for key in tensors if key.startswith(f"{name}.")}
    later = [f"{name}.{i + 1}" for i in range(len(found))]
    if name not in tensors or not later:
        return tensors
    frames = [tensors[key].dequantize() for key in (name, *later)] if found == {*later} else []
    if len({frame.shape for frame in frames}) != 1:
        return tensors  # refused as tensors that are not part of the model
    return {key: tensor for key, tensor in tensors.items() if key not in later} | {
        name: float_tensor(np.stack(frames, 2))
    }


def _check_width(path: Path, tensors: Mapping[str, Tensor], spec: VisionSpec, family: VisionFamily) -> None:
    """Raise ModelError for vectors of another width than those of the decoder."""
    last = tensors.get(family.gguf_names["out" if spec.projector == "mlp" else "proj"])
    if last is not None and (width := last.shape[-1 if spec.projector == "pool" else 0]) != spec.vector_size:
        reason = f"its vectors have {width} numbers, the embeddings of the model {spec.vector_size}"
        raise ModelError(f"{path}: {reason}. Give the mmproj of this model")


def _list(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray | Strings) else value


def _spec(family: VisionFamily, given: VisionConfigs) -> VisionSpec:
    for config in (given.model, given.tower, given.images):
        config.check()
    return family.spec(given)


def _loaded(
    path: Path,
    spec: VisionSpec,
    weights: Weights,
    tokenizer: Tokenizer,
    unread: Iterable[str],
    family: VisionFamily,
    given: VisionConfigs,
) -> LoadedVision:
    token_id = tokenizer.added_token_ids.get(spec.prompt.token)
    if token_id is None:
        fix = "Use the tokenizer that came with the model"
        raise ModelError(f"{path}: its tokenizer has no token {spec.prompt.token}. {fix}")
    return LoadedVision(spec, weights, token_id, tuple(unread), ImageProcessing(family, given))


def _processor_configs(folder: Path, family: VisionFamily) -> tuple[Config, Config]:
    """Return the configuration of the processor of images. Raise ModelError for a directory without one."""
    path, other = folder / "processor_config.json", folder / "preprocessor_config.json"
    values: Mapping[str, Any] = read_object(path) if path.exists() else {}
    processor = Config(path, values, keys=family.processor_keys)
    if isinstance(own := values.get("image_processor"), Mapping):
        return processor, Config(path, own, keys=family.image_keys, part="image_processor.")
    if other.exists():
        return processor, Config(other, read_object(other), keys=family.image_keys)
    raise ModelError(f"{folder}: has no preprocessor_config.json. Fetch it with the model")
