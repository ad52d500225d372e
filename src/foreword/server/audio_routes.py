"""OpenAI's routes of sounds: /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from foreword.engine.transcription import Transcriber, make_transcriber
from foreword.errors import RequestError
from foreword.openai.transcription import (
    FORMATS,
    JSON_FIELDS,
    TranscriptionRequest,
    answer,
    delta_frame,
    done_frame,
    parse_transcription,
    parse_translation,
)
from foreword.server.config import ServerConfig
from foreword.server.context import Context
from foreword.server.errors import HttpError
from foreword.server.events import EventStream
from foreword.server.generation import Generation
from foreword.server.openapi import FORM, Body, Operation
from foreword.server.reply import apart, form_body, reply

EXAMPLE = {"file": b"RIFF", "response_format": "json"}
NUM_READING = 2  # sounds that are decoded at the same time: a long one takes some 100 MB for a moment
FIELDS = {"encoder_input": "file", "prompt_token_ids": "prompt", "timestamps": "response_format"}
"""Fields of the engine → those of a form."""


def routes_of(context: Context) -> list[Operation]:
    """/v1/audio/transcriptions, /v1/audio/translations. A model that does not write down speech answers 404."""
    reading = asyncio.Semaphore(NUM_READING)

    async def transcriptions(request: Request) -> Response:
        """What is said in a sound, in OpenAI's form."""
        return await _answer(context, reading, request, parse_transcription)

    async def translations(request: Request) -> Response:
        """What is said in a sound, in English, in OpenAI's form."""
        return await _answer(context, reading, request, parse_translation)

    kinds = tuple(dict.fromkeys(kind.partition(";")[0] for kind, _ in FORMATS.values()))
    return [
        Operation(f"/v1/audio/{name}", route, Body(parse, EXAMPLE, generates=True, kind=FORM), media_types=kinds)
        for name, route, parse in (
            ("transcriptions", transcriptions, parse_transcription),
            ("translations", translations, parse_translation),
        )
    ]


async def _answer(
    context: Context, reading: asyncio.Semaphore, request: Request, parse: Callable[[object], TranscriptionRequest]
) -> Response:
    if context.media.speech is None:
        raise HttpError(404, f"model: {context.names[0]!r:.80} does not write down speech", param="model")
    _check_origin(request, context.config)
    generation, body = Generation(context, request), await form_body(request, JSON_FIELDS)
    await generation.limit_time(body)
    wanted = parse(body)
    generation.choose_model(wanted.model)
    generation.enter(wanted.params)
    try:
        async with reading:
            arguments = context.media, context.tokenizer, wanted.file, wanted.params, wanted.what
            transcriber = await apart(True, lambda: make_transcriber(*arguments, field="file"))
    except RequestError as error:
        raise _of_form(error) from None
    generation.add_tokens(transcriber.num_frames)
    texts = _texts(generation, transcriber, wanted)
    if wanted.stream:

        async def frames() -> AsyncGenerator[bytes, None]:
            async with aclosing(texts):
                async for text in texts:
                    yield delta_frame(text)
            generation.leave()
            yield done_frame(transcriber.result())

        return EventStream(frames(), keep_alive=context.config.keep_alive)
    async for _ in texts:
        pass
    media_type, found = answer(wanted, transcriber.result())
    return Response(found, media_type=media_type) if isinstance(found, str) else reply(found)


async def _texts(
    generation: Generation, transcriber: Transcriber, wanted: TranscriptionRequest
) -> AsyncGenerator[str, None]:
    """Run the parts of a transcription: its text, in pieces."""
    part, length = transcriber.advance(), 0
    while part is not None:
        stream = wanted.stream and part.is_text
        reader = transcriber.detokenizer()
        try:
            jobs = await generation.texts([part.prompt], part.params, wanted.options, stream=stream)
            async with aclosing(generation.outputs(jobs)) as outputs:
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


def _of_form(error: RequestError) -> RequestError:
    """The error with the field of the form."""
    field = FIELDS.get(error.field, error.field)
    return RequestError(error.request_id, field, error.value, error.reason, error.fix)


def _check_origin(request: Request, config: ServerConfig) -> None:
    """HttpError 403 for a form that a web page of another origin sends, which browsers do without asking the server."""
    origin = request.headers.get("origin")
    if origin is None or {"*", origin} & set(config.cors_origin):
        return
    if urlsplit(origin).netloc != request.headers.get("host"):
        raise HttpError(403, f"origin {origin!r:.80}: web pages of it may not call this server; see cors_origin")
