"""Prompts of encoder–decoders: what the encoder reads, and the decoder's first tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreword.arrays import F32
from foreword.batch import PromptInputs
from foreword.engine.prompt import PromptLimit, checked_tokens
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
            limit = PromptLimit(self.max_len, has_output=False)
            try:
                tokens = checked_tokens(request_id, given[wanted], vocab_size=self.vocab_size, limit=limit)
            except RequestError as error:
                field = error.field.replace("prompt_token_ids", wanted)
                raise RequestError(request_id, field, error.value, error.reason, error.fix) from None
            inputs = PromptInputs(encoder_len=len(tokens), encoder_input=tokens)
        else:
            inputs = PromptInputs(encoder_len=self.max_len, encoder_input=self._features(request_id, given[wanted]))
        return given.get("prompt_token_ids", self.first_tokens), inputs

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
