"""OpenAI's operations of sounds: transcriptions and translations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from starlette.responses import Response

from foreword.engine.transcription import Transcriber, Transcription, make_transcriber
from foreword.errors import RequestError
from foreword.openai import Named
from foreword.openai.frames import EVENTS
from foreword.openai.transcription import (
    FORMATS,
    JSON_FIELDS,
    TranscriptionRequest,
    TranscriptionStream,
    answer,
    parse_transcription,
    parse_translation,
)
from foreword.server.answer import Api
from foreword.server.context import Context
from foreword.server.errors import HttpError
from foreword.server.failures import NOT_FOUND
from foreword.server.generation import Generation
from foreword.server.operation import Body, Operation
from foreword.server.reply import apart, reply

FIELDS = {"encoder_input": "file", "prompt_token_ids": "prompt", "timestamps": "response_format"}
"""Fields of the engine → those of a form."""


async def _heard(generation: Generation, wanted: TranscriptionRequest) -> AsyncGenerator[str | Transcription, None]:
    """Return the pieces of a transcription's text, then the whole. Raise HttpError 404 if the model takes no speech."""
    context = generation.context
    if context.media.speech is None:
        raise HttpError(NOT_FOUND, f"model: {context.names[0]!r:.80} cannot transcribe audio", param="model")
    generation.enter(wanted.params)
    try:
        async with context.decoding:
            arguments = context.media, context.tokenizer, wanted.file, wanted.params, wanted.what
            transcriber = await apart(True, lambda: make_transcriber(*arguments, field="file"))
    except RequestError as error:
        raise _of_form(error) from None
    generation.add_tokens(transcriber.num_frames)
    return _pieces(generation, transcriber, wanted)


async def _pieces(
    generation: Generation, transcriber: Transcriber, wanted: TranscriptionRequest
) -> AsyncGenerator[str | Transcription, None]:
    part, length = transcriber.advance(), 0
    while part is not None:
        stream = wanted.stream and part.is_text
        reader = transcriber.detokenizer()
        try:
            checked = await generation.check("prompt", [part.prompt], [part.params], wanted.options, stream=stream)
            async with aclosing(generation.outputs(checked)) as outputs:
                async for output in outputs:
                    text = reader.push(output.outputs[0].new_token_ids) if stream else ""
                    text = text if length else text.lstrip()
                    length += len(text)
                    if text:
                        yield text
        except RequestError as error:
            raise _of_form(error) from None
        part = transcriber.advance(output)
        text = transcriber.result().text
        if text[length:]:
            yield text[length:]
        length = len(text)
    yield transcriber.result()


def _of_form(error: RequestError) -> RequestError:
    """Return the error with the field of the form."""
    return error.renamed(FIELDS)


def _whole(
    context: Context, wanted: TranscriptionRequest, pieces: Sequence[str | Transcription], named: Named
) -> Response:
    (found,) = (piece for piece in pieces if isinstance(piece, Transcription))
    media_type, body = answer(wanted, found)
    return Response(body, media_type=media_type) if isinstance(body, str) else reply(body)


def _operation(path: str, parse: Callable[[object], TranscriptionRequest], summary: str, details: str) -> Operation:
    api: Api[TranscriptionRequest, str | Transcription] = Api(
        body=Body(parse, {"file": b"RIFF", "response_format": "json"}, timeout=True, form=JSON_FIELDS),
        run=_heard,
        whole=_whole,
        size=len,
        stream=lambda context, wanted, named: TranscriptionStream() if wanted.stream else None,
    )
    kinds = tuple(dict.fromkeys(kind.partition(";")[0] for kind, _ in FORMATS.values()))
    return Operation(path, api, api.body, access="key", summary=summary, details=details, media_types=(*kinds, EVENTS))


OPERATIONS = (
    _operation(
        "/v1/audio/transcriptions",
        parse_transcription,
        "Transcribe speech (OpenAI Transcriptions).",
        "The model must be a Whisper model; otherwise the status is 404. With `stream: true` the text is sent in "
        "pieces.",
    ),
    _operation(
        "/v1/audio/translations",
        parse_translation,
        "Translate speech into English text (OpenAI Translations).",
        "It takes the form of a transcription.",
    ),
)
