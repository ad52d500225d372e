"""Images of prompts: the processor and the encoder of a model of transformers."""

from __future__ import annotations

import inspect
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
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
from foreword.executors.torch.tensors import as_floats
from foreword.media.encoder import MediaPrompt
from foreword.media.images import Image

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, eq=False)
class _Encoded:
    """An image for the decoder. text: its placeholders, and what stands between them. vectors: [N, hidden], one for
    each placeholder. grid: what the model's rule of positions reads of it.
    """

    text: str
    vectors: F32
    grid: dict[str, torch.Tensor]


class ImageEncoder:
    """Implements `MediaEncoder` with a model's own encoder. Vectors of images are kept by content, up to cache_bytes:
    the least recently used are dropped first.
    """

    def __init__(self, model: PreTrainedModel, load_processor: Callable[[], Any], cache_bytes: int) -> None:
        """ModelError, with the reason, for a model that takes no images, or not as vectors in place of tokens."""
        self._core = getattr(model, "model", model)
        if not hasattr(self._core, "get_image_features"):
            raise ModelError("it is a model of text")
        self.processor = load_processor()
        self.placeholder: str = getattr(self.processor, "image_token", None) or ""
        self._token_id: int | None = getattr(model.config, "image_token_id", None)
        if not (self.placeholder and self._token_id is not None):
            raise ModelError("its images are not vectors in place of tokens")
        self._model, self._cache_bytes = model, cache_bytes
        self._rule = getattr(self._core, "get_rope_index", None)
        self._cache: OrderedDict[str, _Encoded] = OrderedDict()
        self._lock = threading.Lock()

    def prompt(self, text: str, images: Sequence[Image], encode: Callable[[str], list[int]]) -> MediaPrompt:
        """See `MediaEncoder.prompt`."""
        pieces = text.split(self.placeholder)
        if len(pieces) != len(images) + 1:
            reason = f"the prompt has {len(pieces) - 1} placeholders {self.placeholder!r} for {len(images)} images"
            fix = "Leave the placeholder out of texts; the chat template must have a place for each image."
            raise RequestError(None, "messages", f"{len(images)} images", reason, fix)
        encoded = [self._encoded(image) for image in images]
        whole = pieces[0] + "".join(one.text + piece for one, piece in zip(encoded, pieces[1:], strict=True))
        token_ids = encode(whole)
        is_token = np.array(token_ids, np.int32) != self._token_id
        vectors = np.concatenate([one.vectors for one in encoded])
        if len(vectors) != np.count_nonzero(~is_token):
            reason = f"the prompt has {np.count_nonzero(~is_token)} places for the {len(vectors)} vectors of its images"
            raise RequestError(None, "messages", f"{len(images)} images", reason, "Check the text of the messages.")
        embeds = np.zeros((len(token_ids), vectors.shape[1]), np.float32)
        embeds[~is_token] = vectors
        return MediaPrompt(token_ids, is_token, embeds, *self._positions(token_ids, encoded))

    def _encoded(self, image: Image) -> _Encoded:
        digest = image.digest
        with self._lock:
            found = self._cache.pop(digest, None)
            if found is None:
                found = self._encode(image)
                self._drop_until(self._cache_bytes - found.vectors.nbytes)
            if found.vectors.nbytes <= self._cache_bytes:
                self._cache[digest] = found
        return found

    def _drop_until(self, num_bytes: int) -> None:
        used = sum(one.vectors.nbytes for one in self._cache.values())
        while self._cache and used > num_bytes:
            used -= self._cache.popitem(last=False)[1].vectors.nbytes

    def _encode(self, image: Image) -> _Encoded:
        try:
            given = self.processor(
                text=[self.placeholder],
                images=[image.pixels],
                return_tensors="pt",
                return_text_replacement_offsets=True,
                add_special_tokens=False,
            )
            [[placed]] = given["text_replacement_offsets"]
            with torch.inference_mode():
                inputs = {name: value.to(self._model.device) for name, value in named(self._features, given).items()}
                found = self._features(**inputs, return_dict=True).pooler_output
                joined = torch.cat(list(found)) if isinstance(found, list | tuple) else found
                vectors = as_floats(joined.flatten(0, -2)).copy()
        except MemoryError:
            raise
        except Exception as error:  # of processors and encoders, of any kind
            size = " × ".join(map(str, image.pixels.size))
            reason = (
                f"the model cannot take it ({str(error).splitlines()[0] if str(error) else type(error).__name__:.200})"
            )
            raise RequestError(None, image.field, f"{size} pixels", reason, "Give an image of another size.") from error
        of_text = "input_ids", "attention_mask", "mm_token_type_ids"
        grid = {name: value for name, value in named(self._rule, given).items() if name not in of_text}
        return _Encoded(placed["replacement"], vectors, grid)

    @property
    def _features(self) -> Callable[..., Any]:
        found: Callable[..., Any] = self._core.get_image_features
        return found

    def _positions(self, token_ids: list[int], encoded: Sequence[_Encoded]) -> tuple[I32 | None, int]:
        """The positions of a prompt by the model's own rule, and what later ones add."""
        if self._rule is None:
            return None, 0
        grids = {name: torch.cat([one.grid[name] for one in encoded]) for name in encoded[0].grid}
        types = self.processor.create_mm_token_type_ids([token_ids])
        given = {"input_ids": torch.tensor([token_ids]), "mm_token_type_ids": torch.tensor(types), **grids}
        positions, delta = self._rule(**named(self._rule, given))
        return positions[:, 0].numpy().astype(np.int32), int(delta)


def named(function: Callable[..., Any] | None, given: Any) -> dict[str, torch.Tensor]:
    """Those tensors that are parameters of a function."""
    names = () if function is None else inspect.signature(function).parameters
    return {name: value for name, value in dict(given).items() if name in names and isinstance(value, torch.Tensor)}


def load_processor(folder: Path, model: PreTrainedModel) -> Any:
    """The processor of a directory, for images alone. ModelError if it has none, or one of code of its own."""
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
