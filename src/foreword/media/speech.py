"""Prepare the input of a model that transcribes speech: windows of a sound, and the decoder's first tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from foreword.arrays import F32
from foreword.errors import RequestError
from foreword.media.sources import fail

SECONDS_PER_FRAME, SECONDS_PER_TIMESTAMP = 0.01, 0.02
TRANSCRIBE, TRANSLATE = "transcribe", "translate"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Speech:
    """A speech model like Whisper. Values are token ids; values that a model does not have are None or empty.

    log_mel: samples, and whether silence is added up to a whole window → [channels, frames]. sampling_rate: of the
    samples. num_frames: the frames of a window, which the encoder reads at a time. max_previous: the maximum number of
    text tokens before the first tokens. start: the first token of the decoder's prompt. forced: the tokens that follow
    if neither language nor task is requested. languages: by name and by code; a model without this map has one
    language. language, task: the defaults; if language is None, it is detected. tasks: by name. no_timestamps: the last
    token of a prompt whose output has no timestamps; the next id is that of 0 seconds. no_speech: the token of silence.
    timestamps: whether the model writes them by default.
    """

    log_mel: Callable[[F32, bool], F32]
    sampling_rate: int
    num_frames: int
    max_previous: int
    start: int
    forced: Sequence[int] = ()
    languages: Mapping[str, int]
    language: int | None = None
    tasks: Mapping[str, int]
    task: str = TRANSCRIBE
    no_timestamps: int | None = None
    no_speech: int | None = None
    timestamps: bool = False

    @property
    def window_seconds(self) -> float:
        return self.num_frames * SECONDS_PER_FRAME

    @property
    def first_timestamp(self) -> int | None:
        """Return the token of 0 seconds; each following id is `SECONDS_PER_TIMESTAMP` later."""
        return None if self.no_timestamps is None else self.no_timestamps + 1

    def features(self, samples: F32, field: str = "audio") -> F32:
        """Return the encoder's input for a sound, [channels, frames]: a window, or more frames if the sound is longer.

        Raise a RequestError with the field if samples are too large to compute features.
        """
        is_short = len(samples) <= self.window_seconds * self.sampling_rate
        with np.errstate(over="ignore", invalid="ignore"):
            found = self.log_mel(samples, is_short)
        if not np.isfinite(found).all():
            largest = float(np.abs(samples).max())
            fail(field, f"samples up to {largest:g}", "have no finite spectrum", "Give samples in [-1, 1].")
        return found

    def window(self, features: F32, start: int) -> F32:
        """Return the frames [channels, num_frames] that begin at a frame, with zeros after the end."""
        part = features[:, start : start + self.num_frames]
        return np.pad(part, ((0, 0), (0, self.num_frames - part.shape[1])))

    def language_of(self, name: str | None) -> int | None:
        """Return the token of a language, or None if it is to be detected or the model has one language."""
        if name is None:
            return self.language
        if not self.languages:
            if name.lower() in ("en", "english"):
                return None
            _refuse("language", name, "the model has one language")
        token = self.languages.get(name.lower())
        if token is None:
            codes = sorted(code for code in self.languages if len(code) <= 3)
            fail("language", name, "is not one of the model's", f"Give one of {', '.join(codes)}.")
        return token

    def name_of(self, language: int) -> str:
        """Return the longest name of a language."""
        return max((name for name, token in self.languages.items() if token == language), key=len)

    def first_tokens(self, language: int | None, task: str | None, *, timestamps: bool) -> list[int]:
        """Return the decoder's prompt. Raise RequestError for a task or timestamps that the model does not support."""
        if timestamps and self.no_timestamps is None:
            _refuse("timestamps", True, "the model writes no timestamps")
        asked = task is not None or language != self.language
        task = self.task if task is None else task
        if not self.languages:
            if task != self.task:
                _refuse("task", task, f"the model can {self.task} only")
            found = [self.start, *self.forced]
        else:
            if language is None:
                fix = "Give the language, or use LLM.transcribe, which detects it."
                fail("language", None, "is needed by a model of several languages", fix)
            if self.tasks and task not in self.tasks:
                fail("task", task, "is not one of the model's", f"Give one of {', '.join(self.tasks)}.")
            named = [language, self.tasks[task]] if self.tasks else [language]
            found = [self.start, *(named if asked or not self.forced else self.forced)]
        if found[-1] == self.no_timestamps:
            found.pop()
        return found if timestamps or self.no_timestamps is None else [*found, self.no_timestamps]


def _refuse(field: str, value: object, reason: str) -> NoReturn:
    raise RequestError(None, field, value, reason, "Leave it out, or use another model.")
