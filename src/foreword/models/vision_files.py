"""Read the encoder of images of a model: from its directory, or from the GGUF file of the encoder alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreword.errors import ModelError
from foreword.jsonfile import read_object
from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import Rows
from foreword.models.families.vision import GGUF_VISION_FAMILIES, VisionConfigs, VisionFamily, plain_name
from foreword.models.files import FileRows, ModelFile
from foreword.models.gguf import GGUF, read_gguf
from foreword.models.mmproj import is_mmproj, mmproj_of
from foreword.models.naming import vision_weights
from foreword.models.tokenizer import Tokenizer
from foreword.models.vision_spec import VisionSpec
from foreword.models.weights import FileWeights, Tensor, Weights

_VISION = "clip.vision."  # before the keys of an encoder in a GGUF file


@dataclass(frozen=True, slots=True)
class LoadedVision:
    """The encoder of images of a model. token_id: of the tokens that have vectors."""

    spec: VisionSpec
    weights: Weights
    token_id: int


def read_vision(
    folder: Path,
    family: VisionFamily,
    config: Config,
    tensors: Mapping[str, Tensor],
    files: Iterable[ModelFile],
    tokenizer: Tokenizer,
    vector_size: int,
) -> LoadedVision:
    """Read the encoder of a directory. Raise ModelError for one that is damaged or not supported.

    config: of the whole model. tensors, files: all of it. vector_size: hidden_size of the decoder.
    """
    tower = config.value("vision_config")
    if not isinstance(tower, Mapping):
        raise config.error(f"vision_config is {tower!r:.80}, not an object", USE_ITS_CONFIG)
    given = VisionConfigs(
        model=Config(config.path, config.values, keys=family.model_keys),
        tower=Config(config.path, tower, keys=family.tower_keys, part="vision_config."),
        images=_image_config(folder, family),
        tokens={i: text for text, i in tokenizer.added_token_ids.items()},
        vector_size=vector_size,
    )
    spec = _spec(family, given)
    own = {plain: tensor for name, tensor in tensors.items() if (plain := plain_name(name)) is not None}
    names: dict[str, str | Rows] = {**family.names, **family.fused(spec)}
    weights = vision_weights(folder, own, spec, names, norms_less_one=family.norms_less_one)
    return _loaded(folder, spec, FileWeights(weights, files, config.values), tokenizer)


def find_mmproj(model: Path) -> Path | None:
    """Return the GGUF file of an encoder beside that of a model, see `mmproj_of`. None if there is none. Raise
    ModelError for several none of which is chosen.
    """
    found = sorted(path.name for path in model.parent.glob("*.gguf") if is_mmproj(path.name))
    chosen = mmproj_of(model.name, found)
    if found and chosen is None:
        names = ", ".join(found)
        raise ModelError(f"{model}: beside it are {len(found)} encoders of images: {names}. Name one as mmproj")
    return model.with_name(chosen) if chosen else None


def read_mmproj(path: Path, tokenizer: Tokenizer, vector_size: int) -> LoadedVision:
    """Read the GGUF file of an encoder of images, as llama.cpp's converter writes it. Raise ModelError for one that is
    missing, damaged, not supported, or of another model.

    tokenizer, vector_size: of the decoder, the latter its hidden_size.
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
    tower = _tower_of(gguf, family)
    ids = tokenizer.added_token_ids
    model, images = family.gguf_values(tower, ids)
    images |= {f"image_{name}": _list(gguf.metadata.get(f"{_VISION}image_{name}")) for name in ("mean", "std")}
    given = VisionConfigs(
        model=Config(path, model, keys=family.model_keys),
        tower=tower,
        images=Config(path, images, keys=family.image_keys),
        tokens={i: text for text, i in ids.items()},
        vector_size=vector_size,
    )
    spec = _spec(family, given)
    names: dict[str, str | Rows] = dict(family.gguf_names)
    down_name = family.gguf_names["down"].format(i=0)
    down = gguf.tensors.get(down_name)
    if down is not None and down.shape[-1] == spec.tower.hidden_size != spec.tower.intermediate_size:
        for end in ("", "_bias"):  # older files name the two the other way round
            names[f"up{end}"], names[f"down{end}"] = names[f"down{end}"], names[f"up{end}"]
    weights = vision_weights(path, gguf.tensors, spec, names, norms_less_one=False)
    files = dict.fromkeys(t.stored.file for t in gguf.tensors.values() if isinstance(t.stored, FileRows))
    return _loaded(path, spec, FileWeights(weights, files), tokenizer)


def _tower_of(gguf: GGUF, family: VisionFamily) -> Config:
    """Return the configuration of the encoder in a GGUF file."""
    values: dict[str, object] = {
        key.name: gguf.metadata[_VISION + key.gguf]
        for key in family.tower_keys.values()
        if key.gguf and _VISION + key.gguf in gguf.metadata
    }
    acts = {"clip.use_gelu": "gelu_pytorch_tanh", "clip.use_silu": "silu"}
    values["hidden_act"] = next((act for name, act in acts.items() if gguf.metadata.get(name)), "quick_gelu")
    return Config(gguf.path, values, keys=family.tower_keys, prefix=_VISION)


def _list(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _spec(family: VisionFamily, given: VisionConfigs) -> VisionSpec:
    for config in (given.model, given.tower, given.images):
        config.check()
    return family.spec(given)


def _loaded(path: Path, spec: VisionSpec, weights: Weights, tokenizer: Tokenizer) -> LoadedVision:
    token_id = tokenizer.added_token_ids.get(spec.prompt.token)
    if token_id is None:
        fix = "Use the tokenizer that came with the model"
        raise ModelError(f"{path}: its tokenizer has no token {spec.prompt.token}. {fix}")
    return LoadedVision(spec, weights, token_id)


def _image_config(folder: Path, family: VisionFamily) -> Config:
    """Return the configuration of the processor of images. Raise ModelError for a directory without one."""
    for name, part in (("processor_config.json", "image_processor"), ("preprocessor_config.json", "")):
        path = folder / name
        values: Any = read_object(path, ModelError) if path.exists() else None
        if part and values is not None:
            values = values.get(part)
        if isinstance(values, Mapping):
            return Config(path, values, keys=family.image_keys, part=part and f"{part}.")
    raise ModelError(f"{folder}: has no preprocessor_config.json. Fetch it with the model")
