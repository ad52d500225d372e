"""Parse the forms of OpenAI's transcriptions and translations of sounds, and make their answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from foreword.batch import SamplingParams
from foreword.engine import RequestOptions
from foreword.engine.transcription import Segment, Transcription, TranscriptionOptions
from foreword.errors import RequestError
from foreword.fields import BOOLEAN, STRING, STRINGS, Fields, Kind, Neutral, one_of
from foreword.media.speech import TRANSCRIBE, TRANSLATE
from foreword.openai.frames import AnswerStream
from foreword.openai.request import SAMPLING, request_options
from foreword.openai.response import Body

FILE = Kind("a file", lambda value: isinstance(value, bytes), {"type": "string", "format": "binary"})
SAMPLED = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
)  # fmt: skip
"""Fields of `SamplingParams` that a form may have."""
JSON_FIELDS = frozenset((*SAMPLED, "stream", "priority", "timeout"))
"""Fields of a form that are no texts."""
GRANULARITIES = "timestamp_granularities[]"
NEUTRAL: Neutral = {"include[]": ([],), "chunking_strategy": ()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionRequest:
    """The form of /v1/audio/transcriptions or /v1/audio/translations. file: the bytes of the file. format: the format
    of the answer, one of `FORMATS`. The other fields are those of `ChatRequest` and of `LLM.transcribe`.
    """

    model: str | None
    file: bytes
    params: SamplingParams
    what: TranscriptionOptions
    format: str = "json"
    options: RequestOptions = field(default_factory=RequestOptions)
    stream: bool = False


def parse_transcription(body: object) -> TranscriptionRequest:
    """Parse the fields of a form of /v1/audio/transcriptions. Raise RequestError if it cannot be served as given."""
    fields = Fields(body)
    granularities = fields.take(GRANULARITIES, STRINGS, [])
    return _parse(fields, TRANSCRIBE, granularities)


def parse_translation(body: object) -> TranscriptionRequest:
    """Parse the fields of a form of /v1/audio/translations, with the same errors."""
    return _parse(Fields(body), TRANSLATE, [])


def _parse(fields: Fields, task: str, granularities: Sequence[str]) -> TranscriptionRequest:
    format, stream = fields.take("response_format", one_of(*FORMATS), "json"), fields.take("stream", BOOLEAN, False)
    if stream and format not in STREAMED:
        raise fields.refuse("response_format", format, f"Give {' or '.join(STREAMED)} for a stream.")
    for name in granularities:
        if name != "segment":
            raise fields.refuse(GRANULARITIES, name, "Give segment.")
        if format != "verbose_json":
            reason = "needs response_format: verbose_json"
            raise RequestError(None, GRANULARITIES, name, reason, "Leave it out.")
    sampling = {name: value for name in SAMPLED if (value := fields.take(name, SAMPLING[name])) is not None}
    request = TranscriptionRequest(
        model=fields.take("model", STRING),
        file=fields.require("file", FILE),
        params=SamplingParams(**{"temperature": 0.0, "max_tokens": None, **sampling}),
        what=TranscriptionOptions(
            language=fields.take("language", STRING),
            task=task,
            prompt=fields.take("prompt", STRING, ""),
            timestamps=format in TIMED,
            scores=format == "verbose_json",
        ),
        format=format,
        options=request_options(fields),
        stream=stream,
    )
    fields.end(NEUTRAL)
    return request


def answer(request: TranscriptionRequest, found: Transcription) -> tuple[str, Body | str]:
    """Return the media type of an answer that is not a stream, and the answer: a JSON value for JSON, else a text."""
    media_type, write = FORMATS[request.format]
    return media_type, write(request, found)


class TranscriptionStream(AnswerStream[str | Transcription]):
    """The events of one transcription: one per piece of its text, then one for the whole."""

    def frames(self, output: str | Transcription) -> bytes:
        if isinstance(output, str):
            return _frame({"type": "transcript.text.delta", "delta": output})
        return _frame({"type": "transcript.text.done", "text": output.text, "usage": _usage(output)})


def _frame(body: Body) -> bytes:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode("ascii")


def _usage(found: Transcription) -> Body:
    return {"type": "duration", "seconds": ceil(found.seconds)}


def _json(request: TranscriptionRequest, found: Transcription) -> Body:
    return {"text": found.text, "usage": _usage(found)}


def _verbose_json(request: TranscriptionRequest, found: Transcription) -> Body:
    segments = [
        {
            "id": i,
            "seek": one.seek,
            "start": one.start,
            "end": one.end,
            "text": one.text,
            "tokens": list(one.token_ids),
            "temperature": request.params.temperature,
            "avg_logprob": one.avg_logprob,
            "compression_ratio": one.compression_ratio,
            "no_speech_prob": one.no_speech_prob,
        }
        for i, one in enumerate(found.segments)
    ]
    return {
        "task": request.what.task,
        "language": found.language or "english",
        "duration": found.seconds,
        "text": found.text,
        "segments": segments,
        "usage": _usage(found),
    }


def _text(request: TranscriptionRequest, found: Transcription) -> str:
    return found.text


def _srt(request: TranscriptionRequest, found: Transcription) -> str:
    return "".join(f"{i}\n{_cue(one, ',')}" for i, one in enumerate(found.segments, 1))


def _vtt(request: TranscriptionRequest, found: Transcription) -> str:
    return "WEBVTT\n\n" + "".join(_cue(one, ".") for one in found.segments)


def _cue(segment: Segment, point: str) -> str:
    """Return a cue: its times and its text, which is changed if it could be read as times or as the end of the cue."""
    lines = (line.strip() for line in segment.text.replace("-->", "->").splitlines())
    text = "\n".join(line for line in lines if line)
    return f"{_time(segment.start, point)} --> {_time(segment.end, point)}\n{text}\n\n"


def _time(seconds: float, point: str) -> str:
    milliseconds = round(1000 * seconds)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"


FORMATS: dict[str, tuple[str, Callable[[TranscriptionRequest, Transcription], Any]]] = {
    "json": ("application/json", _json),
    "text": ("text/plain; charset=utf-8", _text),
    "verbose_json": ("application/json", _verbose_json),
    "srt": ("text/plain; charset=utf-8", _srt),
    "vtt": ("text/vtt; charset=utf-8", _vtt),
}
"""Values of ``response_format`` → the media type of the answer, and what writes it."""
TIMED = ("verbose_json", "srt", "vtt")
STREAMED = ("json", "text")
