"""The engine behind an event loop: requests in from coroutines, steps in one thread, outputs back as streams.

coroutine   generate ──check──▶ inbox ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄▶ stream ──▶ yield
thread                          inbox ──▶ add, abort ──▶ step ──▶ outputs ──▶ one call into the loop a step
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Self

from foreword.batch.values.sampling_params import SamplingParams
from foreword.engine.completion import Job
from foreword.engine.engine import Engine, Prompt
from foreword.engine.outputs import RequestOutput
from foreword.errors import ConfigError, EngineError, RequestError

News = RequestOutput | Exception


class Stream:
    """What one consumer has not seen yet. An output tells everything so far, so only the latest is kept, and a slow
    consumer costs no memory.

    is_aborted: somebody asked for its end, perhaps before the engine had it.
    """

    __slots__ = ("_arrived", "_latest", "is_aborted", "loop", "request_id")

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id, self.loop = request_id, loop
        self.is_aborted = False
        self._arrived = asyncio.Event()
        self._latest: News | None = None

    def put(self, news: News) -> None:
        """Called in the loop."""
        self._latest = news
        self._arrived.set()

    async def next(self) -> RequestOutput:
        """Wait for news. An exception among them is raised."""
        await self._arrived.wait()
        self._arrived.clear()
        if isinstance(self._latest, Exception):
            raise self._latest
        assert self._latest is not None
        return self._latest


class AsyncEngine:
    """Serves the coroutines of an event loop with an engine that runs in a thread of its own.

        async with AsyncEngine(engine) as serving:
            async for output in serving.generate("Once upon a time", params):
                print(output.outputs[0].text)

    Nobody else may use the engine meanwhile. max_num_requests: requests in the engine at once; for the next one
    `generate` waits until a place is free.
    """

    def __init__(self, engine: Engine, *, max_num_requests: int = 1024) -> None:
        if max_num_requests < 1:
            raise ConfigError(f"max_num_requests={max_num_requests}: must be at least 1")
        self.engine = engine
        self._places = asyncio.Semaphore(max_num_requests)
        self._tokenizing = asyncio.Lock()  # one text at a time, beside the loop
        self._streams: dict[str, Stream] = {}  # until the engine has let go of the request
        self._names = count()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = Lock()  # nothing enters the inbox after the command that ends the thread
        self._closed = self._given_up = False
        self._thread = Thread(target=self._serve, name="foreword-engine", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    # -- in the event loop ---------------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests that the engine has or is about to get."""
        return len(self._streams)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        prompt_text: str | None = None,
        priority: int = 0,
        lora_id: int = 0,
        cache_salt: str | None = None,
        stream: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt: yields the request's state whenever it has new tokens, the last time ``finished``.

        A consumer that is slower than the engine sees fewer states, never an old one. Who stops listening, by leaving
        the iteration or by being cancelled, ends the request. stream: False yields the final state alone, and so does
        best_of above n.
        prompt_text: what token ids were made from, for the output.

        RequestError for what cannot be served; EngineError when a step failed, or the engine is closed.
        """
        request_id = f"request-{next(self._names)}" if request_id is None else request_id
        async with self._places:
            ours = Stream(request_id, asyncio.get_running_loop())
            if self._streams.setdefault(request_id, ours) is not ours:
                raise RequestError(request_id, "request_id", request_id, "is here already", "Use another id.")
            try:
                check = partial(self.engine.check, request_id, prompt, params, stream=stream, prompt_text=prompt_text)
                async with self._tokenizing:
                    job = await ours.loop.run_in_executor(None, check)
                add = partial(self.engine.add, job, priority=priority, lora_id=lora_id, cache_salt=cache_salt)
                self._send(partial(self._add, job, add, ours))
            except BaseException:
                self._streams.pop(request_id, None)
                raise
            finished = False
            try:
                while not finished:
                    output = await ours.next()
                    finished = output.finished
                    yield output
            finally:
                if not finished:
                    self._ask_to_abort(ours)

    def abort(self, request_id: str) -> None:
        """End a request with what it has; its stream ends with finish_reason "abort". Nothing for an unknown id."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._ask_to_abort(stream)

    async def close(self) -> None:
        """End every request as `abort` does, and the thread. Closing twice is harmless."""
        await asyncio.get_running_loop().run_in_executor(None, self._end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _ask_to_abort(self, stream: Stream) -> None:
        stream.is_aborted = True
        with suppress(EngineError):  # closed: it has ended already
            self._send(partial(self._abort, stream))

    def _send(self, command: Callable[[], None]) -> None:
        with self._closing:
            if self._closed:
                raise EngineError("the engine is closed: make a new one")
            self._inbox.put(command)

    def _end(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                self._inbox.put(self._give_up)
        self._thread.join()
        atexit.unregister(self._end)

    # -- in the engine's thread ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._given_up:
                try:
                    command = self._inbox.get(block=not self.engine.has_work)
                except Empty:
                    self._step()
                else:
                    command()
        finally:
            with self._closing:
                self._closed = True
            self._tell((request_id, EngineError("the engine was closed")) for request_id in list(self._streams))

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            self._fail(error)
        else:
            self._tell((output.request_id, output) for output in outputs)

    def _add(self, job: Job, add: Callable[[], None], stream: Stream) -> None:
        try:
            add()
        except Exception as error:
            self._tell([(job.request_id, error)])
            return
        if stream.is_aborted:
            self._abort(stream)

    def _abort(self, stream: Stream) -> None:
        if self._streams.get(stream.request_id) is not stream:
            return  # it has ended; another one may have its name
        output = self.engine.abort(stream.request_id)
        if output is not None:
            self._tell([(stream.request_id, output)])

    def _fail(self, error: Exception) -> None:
        """A step failed: give up every request that the engine has. Later ones may have better luck."""
        news: list[tuple[str, News]] = []
        for request_id in list(self._streams):
            if self.engine.abort(request_id) is not None:
                failure = EngineError(f"a step failed, and its requests with it: {type(error).__name__}: {error}")
                failure.__cause__ = error
                news.append((request_id, failure))
        self._tell(news)

    def _give_up(self) -> None:
        """The last command."""
        self._given_up = True
        for stream in list(self._streams.values()):
            self._abort(stream)
        self.engine.close()

    def _tell(self, news: Iterable[tuple[str, News]]) -> None:
        """Hand news to the streams, in one call into their event loop, and let go of those that end."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, News]]] = {}
        for request_id, item in news:
            stream = self._streams[request_id]
            if isinstance(item, Exception) or item.finished:
                del self._streams[request_id]
            by_loop.setdefault(stream.loop, []).append((stream, item))
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(put_all, items)
            except RuntimeError:  # the loop is closed and nobody listens any more
                for stream, _ in items:
                    self._inbox.put(partial(self._abort, stream))


def put_all(items: list[tuple[Stream, News]]) -> None:
    for stream, news in items:
        stream.put(news)
