"""Images and sounds of prompts: the processor and the encoders of a model of transformers."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from foreword.arrays import F32, I32
from foreword.errors import ModelError, RequestError
from foreword.executors.image_options import EDGES, OPTIONS, check_options
from foreword.executors.media_prompt import MediaCache, Places, check_num_vectors, expanded_text, vector_prompt
from foreword.executors.torch.tensors import as_floats
from foreword.executors.vision.processing import num_vectors
from foreword.media.encoder import PROCESSING, MediaPrompt
from foreword.media.images import Image
from foreword.media.parts import Medium
from foreword.media.sounds import Sound
from foreword.models.vision_files import ImageProcessing

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
ARGUMENTS = {"image": "images", "audio": "audio"}
"""Kind of medium → its argument of a processor."""
_PAN_AND_SCAN = "pan_and_scan"
"""Part of the names of the parameters of crops in the configuration of an image processor."""
OF_TEXT = frozenset({"input_ids", "attention_mask", "mm_token_type_ids"})


@dataclass(frozen=True, slots=True, eq=False)
class _Encoded:
    """A medium for the decoder. text: its placeholders, and what stands between them. vectors: one for each
    placeholder, [N, hidden]; [N, (1 + layers) hidden] where later layers add some, too. grid: what the model's rule of
    positions reads of it.
    """

    text: str
    vectors: F32
    grid: dict[str, torch.Tensor]


class TransformersEncoder:
    """Implements `MediaEncoder` with a model's own encoders. Vectors are kept by content, up to cache_bytes.

    family: the processor of images of one of Foreword's families, which gives the same numbers of vectors.
    """

    def __init__(
        self, model: PreTrainedModel, processor: Any, cache_bytes: int, family: ImageProcessing | None
    ) -> None:
        self.processor = processor
        self.placeholders: dict[str, str] = {}
        self._model, self._core = model, getattr(model, "model", model)
        self._rule = getattr(self._core, "get_rope_index", None)
        self._token_ids: dict[str, int] = {}
        self._seeing_all: set[str] = set()
        self._hidden_size = model.get_input_embeddings().weight.shape[1]
        self._num_deep = 0  # layers of the decoder with vectors of their own
        self._processing = threading.Lock()  # two threads may not use its tokenizer at once
        self._family = family
        images = getattr(processor, "image_processor", None)
        self._configured: Mapping[str, Any] = {} if images is None else images.to_dict()
        names = () if images is None else OPTIONS.keys() & images.valid_kwargs.__annotations__.keys()
        self._options = {name: self._configured.get(name) for name in names} if family is None else {}
        if family is not None:
            self._options = family.configured(OPTIONS)
        self.cache = MediaCache(self._encode, cache_bytes)

    def add(self, kind: str) -> None:
        """Take media of a kind. Raise ModelError, with the reason, if the model takes none as vectors of tokens."""
        if not hasattr(self._core, f"get_{kind}_features"):
            raise ModelError("it has no encoder for it")
        placeholder = getattr(self.processor, f"{kind}_token", None)
        token_id = getattr(self._model.config, f"{kind}_token_id", None)
        if not placeholder or token_id is None:
            raise ModelError("its encoder does not give vectors in place of tokens")
        self.placeholders[kind], self._token_ids[kind] = placeholder, token_id

    def drop(self, kind: str) -> None:
        """Take no media of this kind."""
        self.placeholders.pop(kind, None)
        self._token_ids.pop(kind, None)
        self.see_all(kind, False)

    def see_all(self, kind: str, sees_all: bool) -> None:
        """Set whether the vectors of a medium of this kind see each other."""
        (self._seeing_all.add if sees_all else self._seeing_all.discard)(kind)

    @property
    def extra_size(self) -> int:
        """See `Executor`. Known when media of every kind were encoded."""
        return self._num_deep * self._hidden_size + 1 if self._num_deep or self._seeing_all else 0

    def check_processing(self, values: Mapping[str, object]) -> None:
        check_options(values, self._options, self._family)

    def check_length(self, media: Sequence[Medium], max_tokens: int) -> None:
        """See `MediaEncoder`. If no family computes the number of vectors, only the processor knows it."""
        check_num_vectors(media, self._num_vectors, max_tokens)

    def expanded(self, text: str, media: Sequence[Medium]) -> str:
        return expanded_text(text, media, self._places, self._text_of)

    def prompt(self, text: str, media: Sequence[Medium], encode: Callable[[str], list[int]]) -> MediaPrompt:
        found = vector_prompt(
            text, media, self._places, self.cache, encode, lambda: self._hidden_size + self.extra_size
        )
        positions = self._positions(found.token_ids, found.encoded)
        return MediaPrompt(found.token_ids, found.is_token, found.embeds, *positions)

    def processed(self, text: str, media: Sequence[Medium], **options: Any) -> Any:
        """Return what the processor makes of a text with media of one kind."""
        if any(isinstance(medium, Sound) for medium in media):
            rate = options["sampling_rate"] = self.processor.feature_extractor.sampling_rate
            media = [medium.at(rate) if isinstance(medium, Sound) else medium for medium in media]
        if isinstance(media[0], Image):
            options |= self._options_of(media[0].processing)
        contents = {ARGUMENTS[media[0].kind]: [medium.content for medium in media]}
        return self.processor(text=[text], **contents, return_tensors="pt", add_special_tokens=False, **options)

    @property
    def _places(self) -> Places:
        return Places(self.placeholders, self._token_ids, self._seeing_all)

    def _num_vectors(self, medium: Medium) -> int:
        if self._family is not None and isinstance(medium, Image):
            return num_vectors(medium.pixels.size, self._family.spec(medium.processing))
        token = self.processor.tokenizer.convert_ids_to_tokens(self._token_ids[medium.kind])
        return self._text_of(medium).count(token)

    def _text_of(self, medium: Medium) -> str:
        """Return the text of a medium without encoding it."""
        kept = self.cache.find(medium.digest)
        if kept is not None:
            return kept.text
        with _as_request_error(medium):
            return self._placed(medium)[0]

    def _placed(self, medium: Medium) -> tuple[str, Any]:
        """Return the text of a medium, and what the processor makes of it."""
        with self._processing:
            given = self.processed(self.placeholders[medium.kind], [medium], return_text_replacement_offsets=True)
        [[placed]] = given["text_replacement_offsets"]
        return placed["replacement"], given

    def _options_of(self, processing: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the processor for images. It reads those of crops from its arguments alone, and the
        bounds of pixels from its size.
        """
        crops = {key: value for key, value in self._configured.items() if _PAN_AND_SCAN in key and value is not None}
        given = {**crops, **processing}
        bounds = {edge: given.pop(name) for name, edge in EDGES.items() if name in given}
        if bounds:
            given["size"] = {**(given.get("size") or self._configured.get("size") or {}), **bounds}
        return given

    def _encode(self, medium: Medium) -> _Encoded:
        features = getattr(self._core, f"get_{medium.kind}_features")
        with _as_request_error(medium):
            text, given = self._placed(medium)
            with torch.inference_mode():
                inputs = {name: value.to(self._model.device) for name, value in named(features, given).items()}
                found = features(**inputs, return_dict=True)
                deep = getattr(found, "deepstack_features", None) or ()
                vectors = np.concatenate([_joined(x) for x in (found.pooler_output, *deep)], 1)
                self._num_deep = len(deep)
        grid = {name: value for name, value in named(self._rule, given).items() if name not in OF_TEXT}
        return _Encoded(text, vectors, grid)

    def _positions(self, token_ids: list[int], encoded: Sequence[_Encoded]) -> tuple[I32 | None, int]:
        """Return the positions of a prompt by the model's own rule, and what later ones add."""
        if self._rule is None:
            return None, 0
        names = {name for one in encoded for name in one.grid}
        grids = {name: torch.cat([one.grid[name] for one in encoded if name in one.grid]) for name in names}
        types = self.processor.create_mm_token_type_ids([token_ids])
        given = {"input_ids": torch.tensor([token_ids]), "mm_token_type_ids": torch.tensor(types), **grids}
        positions, delta = self._rule(**named(self._rule, given))
        return positions[:, 0].numpy().astype(np.int32), int(delta)


@contextmanager
def _as_request_error(medium: Medium) -> Iterator[None]:
    """Raise RequestError for an error of a processor or an encoder, of any kind."""
    try:
        yield
    except (MemoryError, RequestError):
        raise
    except Exception as error:
        reason = f"the model cannot take it ({(str(error).splitlines() or [type(error).__name__])[0]:.200})"
        values = f", or other values of {PROCESSING}" if isinstance(medium, Image) and medium.processing else ""
        raise RequestError(None, medium.field, medium.size, reason, f"Give one of another size{values}.") from error


def _joined(found: torch.Tensor | Sequence[torch.Tensor]) -> F32:
    """Return the vectors [N, hidden] of an encoder's output."""
    joined = found if isinstance(found, torch.Tensor) else torch.cat(list(found))
    return as_floats(joined.flatten(0, -2))


def named(function: Callable[..., Any] | None, given: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that are parameters of a function."""
    names = () if function is None else inspect.signature(function).parameters
    return {name: value for name, value in dict(given).items() if name in names and isinstance(value, torch.Tensor)}


def load_processor(folder: Path, model: PreTrainedModel) -> Any:
    """Return the processor of a directory, without videos.

    Raise ModelError if it has none, or one of code of its own.
    """
    files = [path for path in map(folder.joinpath, PROCESSOR_FILES) if path.exists()]
    name = next(filter(None, (json.loads(path.read_text("utf-8")).get("processor_class") for path in files)), None)
    kind: Any = getattr(transformers, name, None) if name else PROCESSOR_MAPPING.get(type(model.config), None)
    if kind is None:
        raise ModelError("transformers has no processor for it")

    class WithoutVideos(kind):  # type: ignore[misc]
        """Videos would need more libraries."""

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in kind.get_attributes() if "video" not in name]

        @classmethod
        def from_args_and_dict(cls, args: Sequence[Any], processor_dict: dict[str, Any], **kwargs: Any) -> Any:
            given = iter(args)
            parts = [None if "video" in name else next(given) for name in kind.get_attributes()]
            return super().from_args_and_dict(parts, processor_dict, **kwargs)

    WithoutVideos.__name__ = kind.__name__
    return WithoutVideos.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
