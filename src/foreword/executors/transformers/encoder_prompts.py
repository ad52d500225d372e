"""Prompts of encoder–decoders: what the encoder reads, and the decoder's first tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foreword.arrays import F32, I32, as_array
from foreword.batch import PromptInputs
from foreword.errors import RequestError
from foreword.fields import entries_of
from foreword.integers import flat_int32, length_of
from foreword.media.sounds import sound_of
from foreword.media.speech import Speech
from foreword.sampling.generation_rules import GenerationRules

OF_TEXT = ("encoder_token_ids",)
OF_SPEECH = ("audio", "input_features")
CHOICES = ("language", "task", "timestamps")
KEYS = (*OF_TEXT, *OF_SPEECH, "prompt_token_ids", *CHOICES)


@dataclass(frozen=True, slots=True)
class EncoderPromptReader:
    """Implements `EncoderPrompts`.

    first_tokens: of a decoder whose prompt is not given. max_len: the longest output of the encoder.
    speech: of a model that reads sounds; None for one of tokens. rules: of its outputs.
    """

    first_tokens: tuple[int, ...]
    vocab_size: int
    max_len: int
    speech: Speech | None = None
    rules: GenerationRules = field(default_factory=GenerationRules)

    def split(
        self, request_id: str, prompt: object, encode: Callable[[str, int | None], list[int]]
    ) -> tuple[Sequence[int], PromptInputs]:
        if isinstance(prompt, Mapping):
            given = entries_of(request_id, prompt)
        else:
            given = {"encoder_token_ids": encode(prompt, self.max_len) if isinstance(prompt, str) else prompt}
        for key in given:
            if key not in KEYS:
                reason = "is not a key of a prompt of an encoder–decoder"
                raise RequestError(request_id, "prompt", key, reason, f"Use {', '.join(KEYS)}.")
        given = {key: value for key, value in given.items() if value is not None}
        wanted = OF_TEXT if self.speech is None else OF_SPEECH
        found = [key for key in given if key in OF_TEXT + OF_SPEECH]
        if len(found) != 1 or found[0] not in wanted:
            name, reason = (found or wanted)[-1], f"the encoder reads {' or '.join(wanted)}"
            raise RequestError(request_id, name, given.get(name), reason, "Give one of these, and nothing else of it.")
        if self.speech is None:
            for key in CHOICES:
                if key in given:
                    reason = "is of models of speech"
                    raise RequestError(request_id, key, given[key], reason, "Write it into what the encoder reads.")
            tokens = self._tokens(request_id, given[found[0]])
            inputs = PromptInputs(encoder_len=len(tokens), encoder_input=tokens)
            return given.get("prompt_token_ids", self.first_tokens), inputs
        try:
            features = self._features(self.speech, **{found[0]: given[found[0]]})
            first = _first_tokens(self.speech, given)
        except RequestError as error:
            raise RequestError(request_id, error.field, error.value, error.reason, error.fix) from None
        return first, PromptInputs(encoder_len=self.max_len, encoder_input=features)

    def _tokens(self, request_id: str, token_ids: object) -> I32:
        field, length = "encoder_token_ids", length_of(token_ids)
        if not 0 < length <= self.max_len:
            reason = f"must be 1 to {self.max_len} tokens"
            raise RequestError(request_id, field, f"{max(length, 0)} tokens", reason, "Shorten what the encoder reads.")
        ids = flat_int32(token_ids)
        if ids is None or ((ids < 0) | (ids >= self.vocab_size)).any():
            reason = f"must be a flat list of integers in [0, {self.vocab_size - 1}]"
            raise RequestError(request_id, field, token_ids, reason, "Use the tokenizer of this model.")
        return ids

    def _features(self, speech: Speech, *, audio: object = None, input_features: object = None) -> F32:
        """Return what the encoder reads [channels, frames], of samples or as it was given."""
        if audio is not None:
            sound = sound_of("audio", audio, speech.sampling_rate)
            if sound.seconds > speech.window_seconds:
                reason, fix = f"is longer than {speech.window_seconds:g} s", "Use LLM.transcribe, which cuts it."
                raise RequestError(None, "audio", f"{len(sound.samples)} samples", reason, fix)
            return speech.features(sound.samples)
        array = as_array(input_features)
        shape = speech.features(np.zeros(1, np.float32)).shape
        if array is None or array.shape != shape or array.dtype.kind != "f" or not np.isfinite(array).all():
            got = input_features if array is None else f"{array.dtype} {list(array.shape)}"
            reason, fix = f"must be finite floats {list(shape)}", "Give what Speech.window returns."
            raise RequestError(None, "input_features", got, reason, fix)
        return np.ascontiguousarray(array, np.float32)


def _first_tokens(speech: Speech, given: Mapping[str, Any]) -> Sequence[int]:
    """Return the decoder's prompt, as given or of the language, the task and whether timestamps are wanted."""
    chosen = {key: given[key] for key in CHOICES if key in given}
    if (tokens := given.get("prompt_token_ids")) is not None:
        for key, value in chosen.items():
            raise RequestError(None, key, value, "prompt_token_ids is given too", "Give one of them.")
        return tokens  # type: ignore[no-any-return]
    for key, kind, name in (
        ("language", str, "a text"),
        ("task", str, "a text"),
        ("timestamps", bool, "True or False"),
    ):
        if key in chosen and not isinstance(chosen[key], kind):
            raise RequestError(None, key, chosen[key], f"must be {name}", "Correct it, or leave it out.")
    language = speech.language_of(chosen.get("language"))
    return speech.first_tokens(language, chosen.get("task"), timestamps=chosen.get("timestamps", speech.timestamps))
