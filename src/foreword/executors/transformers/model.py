"""Models as transformers loads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from foreword.errors import ModelError, RequestError
from foreword.executors.option_types import TransformersKeywords
from foreword.executors.options import TransformersOptions
from foreword.executors.torch.options import DTYPES, check_compiler, device_of, use_threads
from foreword.executors.transformers.decoder_trace import DecoderTrace
from foreword.executors.transformers.encoder_decoder_load import (
    decoder_length,
    encoder_decoder_class,
    prompt_reader,
    traced,
)
from foreword.executors.transformers.encoder_prompts import EncoderPromptReader
from foreword.executors.transformers.interface import text_attention
from foreword.executors.transformers.media import ARGUMENTS, TransformersEncoder, load_processor
from foreword.executors.transformers.own_cache import OwnCacheTrace, trace_own_cache
from foreword.executors.transformers.trace import Trace, trace
from foreword.executors.transformers.verify import Inputs, check_media, inputs_of
from foreword.models.pooling import PoolingSpec
from foreword.models.sentence_transformers import read_sentence_transformer
from foreword.models.tokenizer import Tokenizer
from foreword.models.vision_files import read_processing
from foreword.models.weights import Weights

ANY_LENGTH = 1 << 17
"""The tokens of a request of a model without a longest position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTransformers:
    """A causal model of transformers, and what an engine needs besides: the counterpart of `LoadedModel`.

    trace: how it attends. inputs: what it reads besides tokens. media: its encoders, None for a model of text.
    refused: kind of media → the reason why it does not take it. generates: False if its files have no weights for
    logits. weights: none that Foreword reads.
    """

    module: PreTrainedModel
    trace: Trace
    inputs: Inputs
    media: TransformersEncoder | None
    refused: dict[str, str]
    max_model_len: int
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    name: str
    path: Path
    generates: bool = True
    pooling: PoolingSpec = field(default_factory=PoolingSpec)
    weights: Weights = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedOwnCache(LoadedTransformers):
    """A causal model of transformers each of whose requests has a cache of the model's own."""

    trace: OwnCacheTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEncoderDecoder(LoadedTransformers):
    """An encoder–decoder of transformers. encoder: reads its prompts."""

    trace: DecoderTrace
    encoder: EncoderPromptReader


def load_transformers(
    folder: Path, name: str, **given: Unpack[TransformersKeywords]
) -> LoadedTransformers | LoadedOwnCache | LoadedEncoderDecoder:
    """Load a directory that transformers can read. Code of the directory is never run.

    A model that paged attention cannot serve has a cache of its own per request. Raise ModelError, with the reason, for
    one that is missing, damaged, or served by neither: each model is compared with its own forward pass. Raise
    ConfigError for a device that is not here, and without the compiler that torch.compile needs.
    """
    options = TransformersOptions(**given)
    target = device_of(options.device)
    use_threads(options.num_threads)
    if options.compile:
        check_compiler()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        of_encoder = encoder_decoder_class(config)
        if (of_encoder or causal_class(config)) is None:
            raise ModelError(f"transformers has no causal language model of type {config.model_type!r}")
        if of_encoder is None and config.is_encoder_decoder:
            raise ModelError("it is an encoder–decoder")
        if of_encoder is not None and options.compile:
            raise ModelError("encoder–decoders are not compiled: leave compile out")
        hidden_size = config.get_text_config(decoder=True).hidden_size
        files = read_sentence_transformer(folder, hidden_size)
        tokenizer = _tokenizer(folder, config, lowercase=files.lowercase)
        auto: Any = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForMultimodalLM
        module: PreTrainedModel
        module, loading = (of_encoder or auto).from_pretrained(
            folder,
            config=config,
            dtype=DTYPES.get(options.dtype, "auto"),
            attn_implementation=text_attention(config, "eager"),
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        generates = _has_logits(module, loading["missing_keys"])
        module = module.eval().requires_grad_(False).to(target)
        if of_encoder is not None:
            reader = prompt_reader(folder, module, config.get_text_config(decoder=True).vocab_size)
            return LoadedEncoderDecoder(
                module=module,
                trace=traced(module, reader),
                inputs=Inputs(0, 0, 0),
                media=None,
                refused=dict.fromkeys(ARGUMENTS, "it is an encoder–decoder"),
                max_model_len=decoder_length(config),
                tokenizer=tokenizer,
                eos_token_ids=tokenizer.eos_ids,
                name=name,
                path=folder,
                encoder=reader,
            )
        length = max_model_len(config)
        length = min(length, files.max_text_len or length)
        found, inputs = served(module, length, must_page=options.compile or not generates)
        if isinstance(found, OwnCacheTrace):
            return LoadedOwnCache(
                module=module,
                trace=found,
                inputs=inputs,
                media=None,
                refused=dict.fromkeys(ARGUMENTS, "each of its requests has a cache of the model's own"),
                max_model_len=length,
                tokenizer=tokenizer,
                eos_token_ids=tokenizer.eos_ids,
                name=name,
                path=folder,
            )
    except ModelError as error:
        raise ModelError(f"{folder}: cannot run on transformers: {error}. Use another model or executor") from None
    except Exception as error:  # configurations, files and models raise errors of any kind
        reason = _first_line(error)
        raise ModelError(f"{folder}: transformers cannot load it: {reason:.500}. Check the files") from error
    length -= inputs.first_position  # positions are rows of a table where they do not begin at 0
    media, refused = _media(folder, module, found, inputs, tokenizer, options.media_cache_bytes)
    if media is not None:
        inputs = inputs._replace(extra_size=media.extra_size)
    eos = tokenizer.eos_ids
    pooling = PoolingSpec(
        hidden_size=hidden_size,
        pooling=files.pooling or "last",
        prompts=files.prompts,
        default_prompt=files.default_prompt,
        comparison=files.comparison,
    )
    return LoadedTransformers(
        module=module,
        trace=found,
        inputs=inputs,
        media=media,
        refused=refused,
        max_model_len=length,
        tokenizer=tokenizer,
        eos_token_ids=eos,
        name=name,
        path=folder,
        generates=generates,
        pooling=pooling,
    )


def served(module: PreTrainedModel, max_model_len: int, *, must_page: bool = False) -> tuple[Trace, Inputs]:
    """Return the way in which a causal model is served: with paged attention or, unless it must page, with a cache of
    the model per request (`OwnCacheTrace`). Raise ModelError, with the reasons, if neither is possible.
    """
    rule = getattr(getattr(module, "model", None), "get_rope_index", None)
    try:
        found = trace(module, max_model_len)
        return found, inputs_of(module, found, mrope_dims=3 if rule is not None else 0)
    except MemoryError:
        raise
    except Exception as error:  # models without a cache of their own raise errors of any kind
        reason = " ".join(str(error).split()) or type(error).__name__
        if must_page:
            raise ModelError(
                f"{reason:.200}; with a cache of its own it is not compiled, and has no embeddings"
            ) from None
        return trace_own_cache(module, f"{reason:.200}"), Inputs(0, 0, 0)


def _media(
    folder: Path, module: PreTrainedModel, trace: Trace, inputs: Inputs, tokenizer: Tokenizer, cache_bytes: int
) -> tuple[TransformersEncoder | None, dict[str, str]]:
    """Return the model's encoders, and the kinds of media that it does not take, with the reasons."""
    core = getattr(module, "model", module)
    refused = dict.fromkeys(ARGUMENTS, "it is a model of text")
    if not any(hasattr(core, f"get_{kind}_features") for kind in ARGUMENTS):
        return None, refused
    try:
        vector_size = module.get_input_embeddings().weight.shape[1]
        family = read_processing(folder, tokenizer.added_token_ids, vector_size)
        encoder = TransformersEncoder(module, load_processor(folder, module), cache_bytes, family)
    except Exception as error:  # processors raise errors of any kind
        return None, dict.fromkeys(ARGUMENTS, _first_line(error))
    for kind in ARGUMENTS:
        try:
            encoder.add(kind)
            check_media(
                module, trace, inputs, encoder, kind, lambda text: tokenizer.encode(text, add_special_tokens=False)
            )
            del refused[kind]
        except MemoryError:
            raise
        except Exception as error:  # processors and encoders raise errors of any kind
            encoder.drop(kind)
            refused[kind] = _first_line(error)
    return encoder if encoder.placeholders else None, refused


def _has_logits(module: PreTrainedModel, missing: Iterable[str]) -> bool:
    """Return whether the files have the weights of the logits. Raise ModelError for other weights that they lack."""
    head = module.get_output_embeddings()
    of_head = [] if head is None else [id(weight) for weight in head.parameters()]
    names = {name for name, weight in module.named_parameters() if id(weight) in of_head}
    if others := sorted(set(missing) - names):
        raise ModelError(f"its files lack {len(others)} weights, {others[0]} among them")
    return not names & set(missing)


def _first_line(error: Exception) -> str:
    text = error.reason if isinstance(error, RequestError) else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]


def causal_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of causal models with such a configuration; None if there is none."""
    mappings = MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING
    found: Any = next((of[type(config)] for of in mappings if type(config) in of), None)
    kind: type[PreTrainedModel] | None = found[0] if isinstance(found, tuple) else found
    return kind


def max_model_len(config: PreTrainedConfig) -> int:
    """Return the tokens that a model was made for: `ANY_LENGTH` if its configuration names no longest position.

    Rotary frequencies that depend on the longest position of a step would differ between steps of one request: the
    model is then used up to the length at which they begin to.
    """
    text = config.get_text_config(decoder=True)
    names = "max_position_embeddings", "max_seq_len", "seq_length", "context_length"
    length = next((value for name in names if (value := getattr(text, name, None)) is not None), ANY_LENGTH)
    if not isinstance(length, int) or length < 2:
        raise ModelError(f"its configuration has max_position_embeddings = {length!r}")
    fixed = [
        rope.get("original_max_position_embeddings")
        or getattr(text, "original_max_position_embeddings", None)
        or length
        for rope in _ropes(getattr(text, "rope_parameters", None))
        if rope.get("rope_type") in ("dynamic", "longrope")
    ]
    return min([length, *fixed])


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """Return the rotary parameters: one mapping, or one for each type of layers."""
    if isinstance(parameters, dict):
        if "rope_type" in parameters:
            yield parameters
        for value in parameters.values():
            yield from _ropes(value)


def _tokenizer(folder: Path, config: PreTrainedConfig, *, lowercase: bool) -> Tokenizer:
    """Return the tokenizer of the directory; one that has no tokenizer.json is converted by transformers."""
    if (folder / "tokenizer.json").exists():
        return Tokenizer.from_directory(folder, lowercase=lowercase)
    converted = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with TemporaryDirectory() as place:
        converted.save_pretrained(place)
        config.save_pretrained(place)
        generation = folder / "generation_config.json"
        if generation.exists():
            (Path(place) / generation.name).write_bytes(generation.read_bytes())
        return Tokenizer.from_directory(place, lowercase=lowercase)
