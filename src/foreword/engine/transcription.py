"""Transcribe a sound, one window after the other, as Whisper does. Without input or output: see `Transcriber`."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import NamedTuple

import numpy as np

from foreword.batch import SamplingParams
from foreword.engine.outputs import RequestOutput
from foreword.engine.prompt import EncoderDecoderPrompt
from foreword.errors import RequestError, known_keywords
from foreword.media.encoder import Media
from foreword.media.sounds import Sound, read_sound, sound_of
from foreword.media.speech import SECONDS_PER_FRAME, SECONDS_PER_TIMESTAMP, Speech
from foreword.models.detokenizer import Detokenizer
from foreword.models.tokenizer import Tokenizer
from foreword.sampling.generation_rules import IGNORES_RULES

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
PREVIOUS = "<|startofprev|>"
"""The token before text of an earlier window."""
FRAMES_PER_TIMESTAMP = round(SECONDS_PER_TIMESTAMP / SECONDS_PER_FRAME)


@known_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionOptions:
    """language: a code or a name; None: it is detected. task: "transcribe", or "translate" into English; None: the
    model's own. prompt: text that comes before, of which the last tokens are used. timestamps: whether the model tells
    when its segments begin and end; of a sound longer than a window it always does. scores: whether segments have
    no_speech_prob and avg_logprob.
    """

    language: str | None = None
    task: str | None = None
    prompt: str = ""
    timestamps: bool = False
    scores: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a transcription, in seconds of the sound. seek: the frame at which its window begins. avg_logprob: of
    the window's tokens, by the unchanged logits. no_speech_prob: that its window has no speech. None if not asked for.
    """

    start: float
    end: float
    text: str
    token_ids: Sequence[int]
    seek: int
    avg_logprob: float | None = None
    no_speech_prob: float | None = None

    @property
    def compression_ratio(self) -> float:
        """The bytes of its text per compressed byte; large for repetitions."""
        data = self.text.encode(errors="replace")
        return len(data) / len(zlib.compress(data))


@dataclass(frozen=True, slots=True)
class Transcription:
    """The result of a transcription. text: of all segments. language: its name; None for a model of one language."""

    text: str
    language: str | None
    seconds: float
    segments: Sequence[Segment]


class Part(NamedTuple):
    """A request of the engine. is_text: its tokens are the text, as they come."""

    prompt: EncoderDecoderPrompt
    params: SamplingParams
    is_text: bool = False


class Transcriber:
    """One sound on its way through the engine.

        part = transcriber.advance()
        while part is not None:
            part = transcriber.advance(«the final output of the part»)
        transcriber.result()

    num_frames: of the sound, whose features are computed at once. Raise RequestError for unknown options.
    """

    def __init__(
        self, speech: Speech, tokenizer: Tokenizer, sound: Sound, params: SamplingParams, options: TranscriptionOptions
    ) -> None:
        for name, value, usual in (("n", params.num_completions, 1), ("stop", params.stop_strings, ())):
            if value != usual:
                raise RequestError(None, name, value, "is not supported for transcriptions", "Leave it out.")
        self._speech, self._tokenizer, self._options = speech, tokenizer, options
        self._params = replace(params, detokenize=False, logprobs=0 if options.scores else None)
        self._language = speech.language_of(options.language)
        detected = min(speech.languages.values(), default=None) if self._language is None else self._language
        speech.first_tokens(detected, options.task, timestamps=options.timestamps)  # raises for what does not exist
        self._previous = self._prompt_tokens(options.prompt)
        sound = sound.at(speech.sampling_rate)
        self._seconds = sound.seconds
        is_long = sound.seconds > speech.window_seconds
        self._timestamps = options.timestamps or speech.timestamps or is_long
        if self._timestamps and speech.no_timestamps is None:
            reason = f"is longer than {speech.window_seconds:g} s, and the model writes no timestamps to go on from"
            raise RequestError(None, sound.field, sound.size, reason, "Cut it.")
        self._features = speech.features(sound.samples, sound.field)
        self.num_frames: int = self._features.shape[1]
        self._segments: list[Segment] = []
        self._parts = self._all_parts()

    def advance(self, output: RequestOutput | None = None) -> Part | None:
        """Return the part after one with this final output, and the first part without one; None after the last part
        and after an aborted one.
        """
        try:
            return next(self._parts) if output is None else self._parts.send(output)
        except StopIteration:
            return None

    def result(self) -> Transcription:
        """Return what is known so far; all of it after the last part."""
        language = None if self._language is None else self._speech.name_of(self._language)
        text = "".join(segment.text for segment in self._segments).lstrip()
        return Transcription(text, language, self._seconds, self._segments)

    def detokenizer(self) -> TextOfTokens:
        """Return a new detokenizer for the tokens of one window."""
        return TextOfTokens(self._tokenizer.detokenizer(continues=True), self._speech.first_timestamp)

    def _all_parts(self) -> Generator[Part, RequestOutput, None]:
        speech, seek, end = self._speech, 0, self.num_frames
        if self._language is None and speech.languages:
            output = yield self._probe(0, [speech.start], sorted(set(speech.languages.values())))
            if not (tokens := output.outputs[0].token_ids):
                return
            self._language = tokens[0]
        while seek < end:
            silence = None
            if self._options.scores and speech.no_speech is not None:
                output = yield self._probe(seek, [*self._previous, speech.start], [speech.no_speech])
                silence = _mean_logprob(output)
            first = speech.first_tokens(self._language, self._options.task, timestamps=self._timestamps)
            prompt = self._window(seek, [*self._previous, *first])
            output = yield Part(prompt, self._params, is_text=not self._timestamps)
            if output.outputs[0].finish_reason == "abort":
                return
            seek += self._read(output, seek, min(end - seek, speech.num_frames), silence)

    def _window(self, seek: int, tokens: Sequence[int]) -> EncoderDecoderPrompt:
        return EncoderDecoderPrompt(input_features=self._speech.window(self._features, seek), prompt_token_ids=tokens)

    def _probe(self, seek: int, tokens: Sequence[int], allowed: Sequence[int]) -> Part:
        """Return a part that samples one of the allowed tokens."""
        params = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=allowed, logprobs=0, detokenize=False, ignore_eos=True,
            extra_args=IGNORES_RULES,
        )  # fmt: skip
        return Part(self._window(seek, tokens), params)

    def _prompt_tokens(self, text: str) -> list[int]:
        """Return the tokens of the text before. Raise RequestError for special tokens, and a model that reads no such
        text.
        """
        speech = self._speech
        if not text.strip():
            return []
        previous = self._tokenizer.special_token_ids.get(PREVIOUS)
        if previous is None:
            raise RequestError(None, "prompt", text, "the model reads no text of before", "Leave it out.")
        tokens = self._tokenizer.encode(" " + text.strip(), add_special_tokens=False)
        special = {*self._tokenizer.special_token_ids.values(), *speech.languages.values()}
        if special & set(tokens) or max(tokens) >= (speech.first_timestamp or max(tokens) + 1):
            raise RequestError(None, "prompt", text, "has special tokens", "Leave them out.")
        return [previous, *tokens[-speech.max_previous :]]

    def _read(self, output: RequestOutput, seek: int, num_frames: int, silence: float | None) -> int:
        """Add the segments of a window. Returns the frames until the next one begins."""
        tokens = output.outputs[0].token_ids
        if output.outputs[0].finish_reason == "stop":
            tokens = tokens[:-1]
        found, offset = [(0, num_frames // FRAMES_PER_TIMESTAMP, tokens)], num_frames
        if self._timestamps and (first := self._speech.first_timestamp) is not None:
            found, offset = split(tokens, first, num_frames)
        begin = seek * SECONDS_PER_FRAME
        scores = (_mean_logprob(output) if self._options.scores else None, None if silence is None else exp(silence))
        for start, end, part in found:
            reader = self.detokenizer()
            if text := reader.push(part) + reader.finish():
                seconds = [round(begin + place * SECONDS_PER_TIMESTAMP, 3) for place in (start, end)]
                self._segments.append(Segment(seconds[0], seconds[1], text, part, seek, *scores))
        return offset


def make_transcriber(
    media: Media,
    tokenizer: Tokenizer,
    source: object,
    params: SamplingParams | None,
    options: TranscriptionOptions,
    *,
    field: str = "audio",
) -> Transcriber:
    """Make a transcriber of a source: what `read_sound` takes, or an array of samples at the model's rate. Raise
    RequestError, with the field of the source, for input that is not audio, and for a model that cannot transcribe.
    """
    if (speech := media.speech) is None:
        reason, fix = "this model cannot transcribe audio", "Use one that can, such as Whisper."
        raise RequestError(None, field, "a sound", reason, fix)
    if isinstance(source, np.ndarray):
        sound = sound_of(field, source, speech.sampling_rate)
    else:
        sound = read_sound(field, source, media.limits)
    return Transcriber(speech, tokenizer, sound, params or GREEDY, options)


class TextOfTokens:
    """The text of a window's tokens, without timestamps and special tokens. See `Detokenizer`."""

    def __init__(self, detokenizer: Detokenizer, first_timestamp: int | None) -> None:
        self._detokenizer, self._first_timestamp = detokenizer, first_timestamp

    def push(self, token_ids: Sequence[int]) -> str:
        limit = self._first_timestamp
        return self._detokenizer.push(token_ids if limit is None else [token for token in token_ids if token < limit])

    def finish(self) -> str:
        return self._detokenizer.finish()


def split(tokens: list[int], first: int, num_frames: int) -> tuple[list[tuple[int, int, list[int]]], int]:
    """Return the segments of a window's tokens as (start, end, tokens), in timestamps, and the frames until the next
    window.

    <0> a b <2> <2> c <5> <5> d     (0, 2, …), (2, 5, …); the next window begins at 5, and d is read again
    <0> a b <2> <2> c <5>           (0, 2, …), (2, 5, …); nothing is said after 5: the next window follows
    <0> a b <2>, or <0> a b         one segment; the next window follows
    """
    is_time = [token >= first for token in tokens]
    ends = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
    if not ends:
        last = [token - first for token in tokens if token > first]
        return [(0, last[-1] if last else num_frames // FRAMES_PER_TIMESTAMP, tokens)], num_frames
    is_complete = is_time[-2:] == [False, True]
    if is_complete:
        ends.append(len(tokens))
    starts = [0, *ends[:-1]]
    found = [(tokens[i] - first, tokens[j - 1] - first, tokens[i:j]) for i, j in zip(starts, ends, strict=True)]
    offset = num_frames if is_complete else FRAMES_PER_TIMESTAMP * found[-1][1]
    return found, offset if 0 < offset < num_frames else num_frames


def _mean_logprob(output: RequestOutput) -> float | None:
    """Return the mean log-probability of the tokens; None if there are none."""
    completion = output.outputs[0]
    found = completion.logprobs or ()
    values = [entry[token].logprob for token, entry in zip(completion.token_ids, found, strict=False)]
    return float(np.mean(values)) if values else None
