"""Load a model from a .gguf file, a directory of safetensors, a known name, or a hub id."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from foreword.errors import ModelError, UnsupportedModelError
from foreword.models import registry
from foreword.models.config import USE_ITS_CONFIG, Config, config_from_gguf, read_config
from foreword.models.encoder_spec import EncoderSpec
from foreword.models.families import ENCODER_FAMILIES, FAMILIES, GGUF_FAMILIES, OF_CLASSES, TEXT_MODELS, TEXT_PARTS
from foreword.models.families.base import NUM_FEATURES, Family
from foreword.models.families.encoder_base import EncoderFamily
from foreword.models.families.gguf_encoders import GGUF_ENCODER_FAMILIES
from foreword.models.families.vision import VISION_FAMILIES
from foreword.models.families.vision_base import plain_name
from foreword.models.files import ModelFile
from foreword.models.generation_files import GenerationFiles, generation_of_gguf, read_generation
from foreword.models.gguf import GGUF
from foreword.models.gguf_files import read_model
from foreword.models.gguf_names import model_name, models_among
from foreword.models.keys import Keys
from foreword.models.mlx_names import with_usual_convolutions
from foreword.models.naming import (
    DENSE,
    encoder_weights,
    has_own_head,
    numbers_of_layers,
    weights_from_gguf,
    weights_from_safetensors,
)
from foreword.models.next_token import NextTokenHead, read_head, without_head
from foreword.models.ollama_names import from_ollama
from foreword.models.pooling import HeadLayer, PoolingSpec
from foreword.models.pooling_files import (
    architectures,
    gguf_dense,
    gguf_encoder_pooling,
    gguf_pooling,
    has_logits,
    read_pooling,
)
from foreword.models.quants import Quant
from foreword.models.rope import with_usual_sections
from foreword.models.safetensors import read_directory
from foreword.models.sentence_transformers import SentenceTransformer, read_sentence_transformer
from foreword.models.spec import DecoderSpec
from foreword.models.tokenizer import Tokenizer
from foreword.models.vision_files import LoadedVision, find_mmproj, read_mmproj, read_vision
from foreword.models.weights import FileWeights, Tensor, Weights

_OF_ENCODERS = ("vision_config", "audio_config")
_TEXT_ALONE = "this executor runs its text model alone; executor='transformers' runs its encoders, too"
_EMBEDS_TEXT_ALONE = "of models of embeddings, only the text model is run"


def no_head() -> None:
    """Return None: the files of a model have no head for further tokens."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The parts of a model that an engine needs: the architecture, the weights under canonical names, the
    tokenizer, and the pooling.
    """

    spec: DecoderSpec | EncoderSpec
    weights: Weights
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    name: str
    path: Path
    family: Family | None = None  # None for an encoder
    pooling: PoolingSpec = field(default_factory=PoolingSpec)
    unread_keys: tuple[str, ...] = ()  # keys of its configurations that have no influence
    generation: GenerationFiles = field(default_factory=GenerationFiles)
    images: LoadedVision | None = None
    no_images: str = ""  # the reason why it takes none although it is a model of images and texts
    head: Callable[[], NextTokenHead | None] = no_head  # that predicts further tokens, read when it is called
    num_features: int | None = None  # number for a separate encoder of images, 0 if this file names none
    encoder_family: EncoderFamily | None = None  # None for a decoder, and for a GGUF file

    @property
    def decoder(self) -> DecoderSpec:
        """The spec of a model with a KV cache. Raise ModelError for an encoder."""
        if isinstance(self.spec, EncoderSpec):
            raise ModelError(f"{self.name}: is an encoder, which has no KV cache. Use a model that generates text")
        return self.spec


def load_model(model: str | Path, *, mmproj: str | Path | None = None) -> LoadedModel:
    """Load a model. Weights stay in the file until an executor reads them.

    model: a .gguf file; a directory with config.json, tokenizer.json and safetensors, or with one .gguf file; a known
    name, fetched if it is not cached; a hub id such as "org/model" or "org/model@REVISION:Q4_K_M", see `from_hub`; or a
    name of Ollama's such as "llama3.2:1b", see `from_ollama`.
    mmproj: the GGUF file of the encoder of images of a model in a GGUF file; None: that beside it, see `find_mmproj`.
    Raise ModelError if the model is missing, damaged or not supported; UnsupportedModelError for its architecture
    alone.
    """
    path, name = find_model(model)
    loaded = _load_directory(path, name) if path.is_dir() else _load_gguf(path, name)
    if mmproj is not None:
        return with_mmproj(loaded, mmproj)
    if loaded.path.is_dir():
        return loaded
    try:
        beside = find_mmproj(loaded.path)
        return loaded if beside is None else with_mmproj(loaded, beside)
    except ModelError as error:
        return replace(loaded, no_images=str(error))


def with_mmproj(loaded: LoadedModel, mmproj: str | Path) -> LoadedModel:
    """Return a model in a GGUF file with the encoder of images in another one, in place of any other. Raise ModelError
    for a directory, and as `read_mmproj`.
    """
    if loaded.path.is_dir():
        fix = "A directory of safetensors has its own; leave mmproj out"
        raise ModelError(f"{loaded.path}: takes no encoder of images from a GGUF file. {fix}")
    images = read_mmproj(Path(mmproj), loaded.tokenizer, loaded.decoder.hidden_size)
    if loaded.images is not None:
        others = set(loaded.images.unread)
        loaded = replace(loaded, unread_keys=tuple(key for key in loaded.unread_keys if key not in others))
    return _with_images(replace(loaded, no_images=""), images, Path(mmproj))


def find_model(model: str | Path) -> tuple[Path, str]:
    """Return the directory or .gguf file of a model, fetched if it is not here, and its name. Raise ModelError as
    `load_model`.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise ModelError(f"model is {model!r:.80}: give a path or one of {', '.join(registry.KNOWN)}")
    path, name = Path(model), str(model)
    try:
        is_directory, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # such as a name that is too long
        raise ModelError(f"{name:.200}: cannot be read ({error.strerror}). Check the path") from None
    if is_directory:
        return path, path.resolve().name
    if is_file and path.suffix in (".safetensors", ".json"):
        raise ModelError(
            f"{name}: is a part of a model; give the directory, {str(path.parent)!r:.200}, or a .gguf file"
        )
    if is_file:
        return path, model_name(path)
    if name.lower() not in registry.KNOWN and (known_as := from_ollama(name)) is not None:
        return find_model(known_as)
    if (
        path.suffix in (".gguf", ".safetensors")
        or name.startswith((".", "~", os.sep))
        or name.partition("@")[0].count("/") > 1
    ):
        raise ModelError(f"{name}: the file or directory does not exist. Check the path")
    if "/" in name:
        from foreword.models.hub import from_hub

        found = from_hub(name)
        return found, found.resolve().name if found.is_dir() else model_name(found)
    known = registry.known_model(name)
    found = registry.verified_path(known)
    return found.parent if known.beside else found, known.name


def _load_gguf(path: Path, name: str) -> LoadedModel:
    gguf = read_model(path)
    architecture = gguf.get("general.architecture", str)
    if (encoder := GGUF_ENCODER_FAMILIES.get(architecture)) is not None:
        return _load_gguf_encoder(path, gguf, encoder, name)
    family = GGUF_FAMILIES.get(architecture)
    if family is None:
        known = {**GGUF_FAMILIES, **GGUF_ENCODER_FAMILIES}
        raise _unsupported(path, f"architecture {architecture!r}", "GGUF files", known)
    if any(tensor.quant is Quant.NVFP4 for tensor in gguf.tensors.values()):
        from foreword.models.quantized.gguf_nvfp4 import with_factors  # here: other files do not need it

        gguf = replace(gguf, tensors=with_factors(path, gguf.tensors, family.gguf_scales))
    config = config_from_gguf(gguf, family.keys)
    family = replace(family, is_scaled=family.is_scaled_in_gguf)
    spec = family.read(config)
    if not spec.is_causal:
        spec = spec.changed(has_logits=False)
    tensors = {**gguf.tensors, **numbers_of_layers(gguf, family.gguf_numbers, spec.num_layers)}
    own = without_head(tensors, spec.num_layers)
    dense = gguf_dense(config, gguf.tensors, spec.hidden_size)
    size = dense[-1].outputs if dense else spec.hidden_size
    pooling = PoolingSpec(hidden_size=size, pooling=gguf_pooling(config), dense=dense)
    weights = FileWeights(weights_from_gguf(path, own, spec, family, pooling), gguf.files)
    tokenizer = _gguf_tokenizer(gguf)
    generation = generation_of_gguf(path, gguf.metadata)
    loaded = _loaded(spec, weights, tokenizer, name, path, pooling, generation, config, family.keys, family)
    num_features = config.get(NUM_FEATURES.name, int, 0) if NUM_FEATURES.name in family.keys else 0
    head = partial(read_head, path, gguf.tensors, spec, family)
    return replace(loaded, head=head, num_features=num_features)


def _load_gguf_encoder(path: Path, gguf: GGUF, family: EncoderFamily, name: str) -> LoadedModel:
    config = config_from_gguf(gguf, family.keys)
    types = gguf.tensors.get("token_types.weight")
    config = config.with_values({"type_vocab_size": 0 if types is None else types.shape[0]})
    spec = family.read(config)
    pooling = replace(gguf_encoder_pooling(config, family), num_token_types=spec.num_token_types)
    weights = FileWeights(encoder_weights(path, gguf.tensors, spec, family, pooling), gguf.files)
    tokenizer = _gguf_tokenizer(gguf, of_encoder=True)
    return _loaded(spec, weights, tokenizer, name, path, pooling, GenerationFiles(), config, family.keys)


def _gguf_tokenizer(gguf: GGUF, *, of_encoder: bool = False) -> Tokenizer:
    try:
        return Tokenizer.from_gguf(gguf.metadata, of_encoder=of_encoder)
    except ModelError as error:
        raise ModelError(f"{gguf.path}: {error}") from None


def _load_directory(folder: Path, name: str) -> LoadedModel:
    config_path = folder / "config.json"
    if not config_path.exists():
        files = models_among(path.name for path in folder.glob("*.gguf"))
        if len(files) == 1:
            only = folder / files[0]
            return _load_gguf(only, model_name(only))
        fix = "Give a .gguf file, or a directory with config, tokenizer and safetensors"
        raise ModelError(f"{folder}: has no config.json and {len(files)} .gguf files. {fix}")
    config = read_config(config_path)
    model_type = config.get("model_type", str)
    if (encoder := ENCODER_FAMILIES.get(model_type)) is not None:
        return _load_encoder(folder, config, encoder, name)
    whole, is_text_part, of_images = config, model_type in TEXT_MODELS, VISION_FAMILIES.get(model_type)
    if is_text_part:
        config = _text_config(config)
        default = TEXT_MODELS[model_type]
        model_type = default if config is whole else config.get("model_type", str, default)
        model_type = TEXT_PARTS.get(model_type, model_type)
    model_type = next((OF_CLASSES[name] for name in architectures(config) if name in OF_CLASSES), model_type)
    family = FAMILIES.get(model_type)
    if family is None:
        raise _unsupported(config_path, f"model_type {model_type!r}", "directories", {**FAMILIES, **ENCODER_FAMILIES})
    tensors, sources = _tensors(folder, config)
    all_tensors = tensors
    if is_text_part:
        tensors = _text_tensors(tensors)
    if (usual_tensors := with_usual_convolutions(tensors)) is not None:
        tensors, (family, config) = usual_tensors, family.by_mlx(config)
    spec = family.read(config if of_images is None else with_usual_sections(config, of_images.sections))
    family = family.in_directory(config)
    if not (spec.is_causal and has_logits(config)):
        spec = spec.changed(has_logits=False)
    elif spec.tie_embeddings and has_own_head(folder, tensors, family):
        spec = spec.changed(tie_embeddings=False)
    if _rounds_inputs(config):
        spec = _with_rounded_inputs(config, spec)
    usual = config.with_usual_names(family.other_names)
    declared = replace(usual, keys=family.keys)
    projection = _projection(declared, family, spec.hidden_size)
    beside = read_sentence_transformer(folder, spec.hidden_size if projection is None else projection.outputs)
    if beside.max_text_len is not None and beside.max_text_len <= spec.max_model_len:
        spec = replace(spec, max_model_len=beside.max_text_len, longer=None)
    head, head_pooling = partial(family.head, declared), family.head_pooling(declared)
    pooling = read_pooling(usual, beside, family.pooling, projection, head, head_pooling)
    own = {
        **without_head(tensors, spec.num_layers),
        **_dense_tensors(beside, sources, first=int(projection is not None)),
    }
    weights = FileWeights(weights_from_safetensors(folder, own, spec, family, pooling), sources, config.values)
    tokenizer = Tokenizer.from_directory(folder, lowercase=beside.lowercase)
    generation = read_generation(folder)
    loaded = _loaded(spec, weights, tokenizer, name, folder, pooling, generation, config, family.keys, family)
    loaded = replace(loaded, head=partial(read_head, folder, tensors, spec, family))
    if of_images is None:
        has_encoders = is_text_part and any(isinstance(whole.value(name), Mapping) for name in _OF_ENCODERS)
        reason = _TEXT_ALONE if spec.is_causal else _EMBEDS_TEXT_ALONE
        return replace(loaded, no_images=reason) if has_encoders else loaded
    try:
        keys = family.keys if config is whole else {}
        images = read_vision(folder, of_images, whole, all_tensors, sources, tokenizer, spec.hidden_size, keys)
        return _with_images(loaded, images, folder)
    except ModelError as error:
        return replace(loaded, no_images=str(error))


def _rounds_inputs(config: Config) -> bool:
    """Return whether the quantisation of a checkpoint rounds the inputs of products, too."""
    given = config.value("quantization_config")
    return isinstance(given, dict) and str(given.get("quant_method")).lower() == "bitnet"


def _with_rounded_inputs(config: Config, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec of a model whose products have rounded inputs. Raise ModelError unless all layers have attention
    of heads and a dense MLP.
    """
    is_plain = spec.pre_norms and not (spec.mla or spec.per_layer or spec.streams)
    for layer in spec.layers:
        is_plain = is_plain and layer.has_attention and layer.has_mlp and layer.experts is None
    if not is_plain:
        raise config.error(f"a quantization_config of BitNet is not supported for {spec.architecture}", USE_ITS_CONFIG)
    return spec.changed(rounds_inputs=True)


def _with_images(loaded: LoadedModel, images: LoadedVision, source: Path) -> LoadedModel:
    """Return a decoder with an encoder of images. Raise ModelError if they do not belong together. source: of the
    encoder.
    """
    sees_all = images.spec.sees_all or loaded.decoder.spans_in_windows
    images = replace(images, spec=replace(images.spec, sees_all=sees_all))
    spec = loaded.decoder.changed(sees_spans=sees_all, num_features=len(images.spec.feature_layers))
    reason = ""
    if spec.num_features > spec.num_layers:
        reason = f"its encoder has features for {spec.num_features} layers, and the decoder has {spec.num_layers}"
    elif loaded.num_features not in (None, spec.num_features):
        reason = f"its encoder has features for {spec.num_features} layers, the decoder takes {loaded.num_features}"
    elif images.spec.is_placed and not 0 < spec.mrope_dims <= images.num_axes:
        what = f"{spec.mrope_dims} sections" if spec.mrope_dims else "no sections"
        reason = f"its encoder has vectors of rows and columns, and the rotary positions of the decoder have {what}"
    if reason:
        raise ModelError(f"{source}: {reason}. Use encoder and decoder of the same model")
    unread = (*(key for key in loaded.unread_keys if key not in images.known), *images.unread)
    images = replace(images, num_axes=spec.mrope_dims)
    return replace(loaded, spec=spec, images=images, unread_keys=tuple(dict.fromkeys(unread)))


def _load_encoder(folder: Path, config: Config, family: EncoderFamily, name: str) -> LoadedModel:
    own = family.declared(config)
    config = config.with_usual_names(family.other_names)
    spec = family.read(config)
    if _rounds_inputs(config):
        raise config.error("a quantization_config of BitNet is not supported for an encoder", USE_ITS_CONFIG)
    beside = read_sentence_transformer(folder, spec.hidden_size)
    spec = replace(spec, max_model_len=min(spec.max_model_len, beside.max_text_len or spec.max_model_len))
    pooling = read_pooling(config, beside, "mean", None, partial(family.head, own), family.head_pooling(own))
    pooling = replace(pooling, num_token_types=spec.num_token_types)
    tensors, sources = _tensors(folder, config)
    tensors = {**tensors, **_dense_tensors(beside, sources)}
    weights = FileWeights(encoder_weights(folder, tensors, spec, family, pooling), sources, config.values)
    tokenizer = Tokenizer.from_directory(folder, lowercase=beside.lowercase)
    loaded = _loaded(spec, weights, tokenizer, name, folder, pooling, GenerationFiles(), config, family.keys)
    return replace(loaded, encoder_family=family)


def _text_config(config: Config) -> Config:
    """Return the config of the text model in that of a model of images and texts, of which either may say that its
    embeddings are tied.
    """
    own = config.value("text_config")
    if own is None and config.value("hidden_size") is not None:  # older files have the text model's keys beside it
        return config
    if not isinstance(own, Mapping):
        raise config.error(f"text_config is {own!r:.80}, not an object", USE_ITS_CONFIG)
    tied = "tie_word_embeddings"
    outer = {name: config.value(name) for name in (tied, "quantization_config", "quantization", "architectures")}
    found = {**{name: value for name, value in outer.items() if value is not None}, **own}
    return Config(config.path, {**found, tied: outer[tied] or found.get(tied)} if tied in found else found)


def _text_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the text model of a model of images and texts, under their own names."""
    own: dict[str, Tensor] = {}
    of_text = {name: tensor for name, tensor in tensors.items() if plain_name(name) is None}
    if not any("language_model." in name or "text_model." in name for name in of_text):
        return of_text
    for name, tensor in of_text.items():
        rest = name.removeprefix("model.language_model.").removeprefix("model.text_model.")
        if rest != name:
            own[f"model.{rest}"] = tensor
        elif not name.startswith("model."):
            own[name.removeprefix("language_model.")] = tensor
    return own


def _tensors(folder: Path, config: Config) -> tuple[Mapping[str, Tensor], list[ModelFile]]:
    """Return the tensors, and the files that hold them."""
    from foreword.models.quantized import read_weights  # here: GGUF files do not need it

    entries = read_directory(folder)
    return read_weights(entries, config), list(dict.fromkeys(entry.rows.file for entry in entries.values()))


def _projection(config: Config, family: Family, hidden_size: int) -> HeadLayer | None:
    if family.projection is None:
        return None
    _, key = family.projection
    return HeadLayer(hidden_size, config.size(key), bias=False)


def _dense_tensors(beside: SentenceTransformer, files: list[ModelFile], *, first: int = 0) -> dict[str, Tensor]:
    """Return the tensors of the layers after the pooling, with names that begin with `DENSE` and the number of each
    layer, from ``first`` on. Their files are added to ``files``.
    """
    found: dict[str, Tensor] = {}
    for i, (_, folder) in enumerate(beside.dense, first):
        for name, entry in read_directory(folder).items():
            found[f"{DENSE}{i}.{name}"] = entry.tensor()
            files.append(entry.rows.file)
    return found


def _loaded(
    spec: DecoderSpec | EncoderSpec,
    weights: Weights,
    tokenizer: Tokenizer,
    name: str,
    path: Path,
    pooling: PoolingSpec,
    generation: GenerationFiles,
    config: Config,
    keys: Keys,
    family: Family | None = None,
) -> LoadedModel:
    """Return the model. Raise ModelError if its files name tokens that the weights do not have."""
    suppressed = (*generation.suppressed, *generation.suppressed_first)
    for kind, ids in (("bos", [tokenizer.bos_id]), ("eos", tokenizer.eos_ids), ("suppressed", suppressed)):
        if wrong := [i for i in ids if i is not None and i >= spec.vocab_size]:
            fix = "Use configuration, tokenizer and weights of the same model"
            raise ModelError(f"{path}: {kind} token id {wrong[0]} is not below vocab_size {spec.vocab_size}. {fix}")
    unread = (*config.unread(keys), *tokenizer.unread_keys, *generation.unread)
    return LoadedModel(spec, weights, tokenizer, tokenizer.eos_ids, name, path, family, pooling, unread, generation)


def _unsupported(path: Path, what: str, form: str, supported: Iterable[str]) -> ModelError:
    return UnsupportedModelError(
        f"{path}: {what} is not supported. Supported in {form}: {', '.join(sorted(supported))}"
    )
