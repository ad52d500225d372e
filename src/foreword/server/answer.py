"""Answer a request that generates or pools: the one way through the server, whatever the interface."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from foreword.openai import Named
from foreword.openai.frames import AnswerStream
from foreword.server.context import Context
from foreword.server.events import EventStream
from foreword.server.generation import Generation
from foreword.server.operation import Body
from foreword.server.reply import MANY, apart, parsed
from foreword.server.time_limit import deadline


class Wanted(Protocol):
    """A parsed body. model: the name of the model that is to answer."""

    @property
    def model(self) -> str | None: ...


R = TypeVar("R", bound=Wanted)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Api(Generic[R, T]):
    """One interface, as the handler of its operations.

    body: of its requests. run: takes places in the server, checks what the engine is to do, and returns the outputs of
    it as they come. whole: the response that has them all. size: about how many values that has. waits: whether making
    it waits for a disk. stream: what makes frames of the outputs; None: the request wants the answer as a whole. known:
    further arguments of ``parse``.
    """

    body: Body[R]
    run: Callable[[Generation, R], Awaitable[AsyncGenerator[T, None]]]
    whole: Callable[[Context, R, Sequence[T], Named], Response]
    size: Callable[[Sequence[T]], int]
    waits: Callable[[R], bool] = lambda _: False
    stream: Callable[[Context, R, Named], AnswerStream[T] | None] = lambda *_: None
    known: Callable[[Context, Request, dict[str, Any]], Awaitable[dict[str, Any]]] | None = None

    async def __call__(self, context: Context, request: Request) -> Response:
        """Answer a request. The place in the server is given back as soon as the engine has done its part."""
        generation, body = Generation(context, request), await self.body.fields(request)
        await generation.limit_time(deadline(request, body, context.config))
        parse = self.body.parse_for(context)
        if self.known is not None:
            parse = partial(parse, **await self.known(context, request, body))
        wanted = await parsed(parse, body, request)
        del body  # its unread part is not kept while a long answer is made
        model = generation.choose_model(wanted.model)
        running = await self.run(generation, wanted)
        named = Named(response_id=generation.id, created=int(time.time()), model=model)
        stream = self.stream(context, wanted, named)
        if stream is not None:
            request.scope["stream"] = stream
            frames = _frames(generation, running, stream)
            return EventStream(
                frames, silence=context.config.keep_alive, keep_alive=stream.keep_alive, media_type=stream.media_type
            )
        async with aclosing(running):
            outputs = [output async for output in running]
        generation.leave()
        is_long = self.waits(wanted) or self.size(outputs) >= MANY
        return await apart(is_long, self.whole, context, wanted, outputs, named)


async def _frames(
    generation: Generation, running: AsyncGenerator[T, None], stream: AnswerStream[T]
) -> AsyncGenerator[bytes, None]:
    """Yield the frames of the outputs. Closing it aborts what still runs at once, not when it is collected."""
    pace = generation.context.pace
    async with aclosing(running):
        async for output in running:
            if (size := stream.size(output)) >= MANY or stream.waits(output):
                yield await apart(True, stream.frames, output)
            else:
                await pace.take(size)
                yield stream.frames(output)
    generation.leave()
    yield stream.end()
