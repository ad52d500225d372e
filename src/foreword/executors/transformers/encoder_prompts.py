"""Prompts of encoder–decoders: what the encoder reads, and the decoder's first tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreword.arrays import F32, I32
from foreword.batch import PromptInputs
from foreword.batch.values.integers import flat_int32, length_of
from foreword.errors import RequestError

KEYS = "encoder_token_ids", "audio", "prompt_token_ids"


@dataclass(frozen=True, slots=True)
class EncoderPromptReader:
    """Implements `EncoderPrompts`.

    first_tokens: of a decoder whose prompt is not given. max_len: the longest output of the encoder.
    features: of a model that reads audio, the encoder's input [channels, frames] of samples; None for one of tokens.
    sampling_rate: of the samples, and max_samples: the most that the model takes.
    """

    first_tokens: tuple[int, ...]
    vocab_size: int
    max_len: int
    features: Callable[[F32], F32] | None = None
    sampling_rate: int = 0
    max_samples: int = 0

    def split(
        self, request_id: str, prompt: object, encode: Callable[[str, int | None], list[int]]
    ) -> tuple[Sequence[int], PromptInputs]:
        """See `EncoderPrompts`."""
        given: dict[Any, Any] = {}
        if not isinstance(prompt, Mapping):
            given["encoder_token_ids"] = encode(prompt, self.max_len) if isinstance(prompt, str) else prompt
        else:
            given |= prompt
        for key in given:
            if key not in KEYS:
                reason = "is not a key of a prompt of an encoder–decoder"
                raise RequestError(request_id, "prompt", key, reason, f"Use {', '.join(KEYS)}.")
        given = {key: value for key, value in given.items() if value is not None}
        wanted, other = KEYS[:2] if self.features is None else (KEYS[1], KEYS[0])
        if wanted not in given or other in given:
            reason = f"the encoder reads {'tokens' if self.features is None else 'audio'}"
            raise RequestError(request_id, wanted, given.get(wanted), reason, f"Give {wanted}, and not {other}.")
        if self.features is None:
            tokens = self._tokens(request_id, given[wanted])
            inputs = PromptInputs(encoder_len=len(tokens), encoder_input=tokens)
        else:
            inputs = PromptInputs(encoder_len=self.max_len, encoder_input=self._features(request_id, given[wanted]))
        return given.get("prompt_token_ids", self.first_tokens), inputs

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

    def _features(self, request_id: str, audio: object) -> F32:
        assert self.features is not None
        try:
            samples = np.asarray(audio)
        except MemoryError:
            raise
        except Exception:  # whatever the caller's object raises
            samples = np.empty(0)
        if samples.dtype.kind != "f" or samples.ndim != 1 or not len(samples):
            reason = "must be floats [samples] of one channel, at least one"
            fix = f"Give samples in [-1, 1] at {self.sampling_rate} Hz."
            raise RequestError(request_id, "audio", f"{samples.dtype} {list(samples.shape)}", reason, fix)
        if len(samples) > self.max_samples:
            reason = f"is longer than {self.max_samples / self.sampling_rate:g} s"
            raise RequestError(request_id, "audio", f"{len(samples)} samples", reason, "Cut it into several requests.")
        if not np.isfinite(samples).all():
            raise RequestError(request_id, "audio", "samples", "are not all finite", "Give finite numbers.")
        return self.features(samples.astype(np.float32))
