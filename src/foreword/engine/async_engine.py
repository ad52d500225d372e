"""The engine behind an event loop: requests in from coroutines, steps in one thread, outputs back as streams.

coroutine   generate ──check──▶ inbox ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄▶ stream ──▶ yield
thread                          inbox ──▶ add, abort ──▶ step ──▶ outputs ──▶ one call into the loop per step
"""

from __future__ import annotations

import asyncio
import atexit
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Self, TypeVar, Unpack
from weakref import WeakKeyDictionary

from foreword.batch import PoolingParams, SamplingParams, StructuredOutputs
from foreword.engine.engine import Engine
from foreword.engine.outputs import RequestOutput
from foreword.engine.pooling import PoolingRequestOutput, pooling_output
from foreword.engine.prompt import Prompt
from foreword.engine.request_group import RequestGroup, RequestOptions
from foreword.engine.transaction import check_process
from foreword.engine.turns import Turns
from foreword.errors import ConfigError, EngineError, RequestError, StepError
from foreword.structured.compiler import COMPILE_SECONDS, QUICK_SECONDS

T = TypeVar("T")
Event = RequestOutput | Exception
MOST_WAIT = 2 * COMPILE_SECONDS  # seconds to wait for a grammar; other requests may take the first half
NUM_CHECKING = 4  # number of texts that are tokenized at the same time


class Stream:
    """The latest output of one request. It has the whole text, and marks as new the part that the consumer has not
    read. Only the latest output is kept, so a slow consumer needs no memory.

    is_sent: the request is in the engine or on its way there. is_finished: the consumer has read the final output or
    the error. is_aborted: an abort was requested, perhaps before the request was in the engine.
    """

    __slots__ = ("_arrived", "_latest", "is_aborted", "is_finished", "is_sent", "loop", "request_id")

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id, self.loop = request_id, loop
        self.is_sent = self.is_finished = self.is_aborted = False
        self._arrived = asyncio.Event()
        self._latest: Event | None = None

    def put(self, event: Event) -> None:
        """Store an output or the final error. Called in the event loop."""
        unread = self._latest if self._arrived.is_set() else None
        if isinstance(event, RequestOutput) and isinstance(unread, RequestOutput):
            event = event.following(unread)
        self._latest = event
        self._arrived.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """Wait for the next output. Raise the exception that ended the request, if there is one."""
        if self.is_finished:
            raise StopAsyncIteration
        await self._arrived.wait()
        self._arrived.clear()
        event = self._latest
        assert event is not None
        self.is_finished = isinstance(event, Exception) or event.finished
        if isinstance(event, Exception):
            raise event
        return event


class AsyncEngine:
    """Serves the coroutines of event loops with an engine that runs in a separate thread.

        async with AsyncEngine(engine) as serving:
            async for output in serving.generate("Once upon a time", params):
                print(output.outputs[0].text)

    Several event loops may use it, one after another or in several threads at the same time. No other code may use the
    engine meanwhile. max_num_requests: largest number of requests of one event loop in the engine; further ones wait.
    turns: a context manager that is entered for each step, such as `StepTurns`.
    """

    def __init__(
        self, engine: Engine, *, max_num_requests: int = 1024, turns: AbstractContextManager[object] | None = None
    ) -> None:
        if max_num_requests < 1:
            raise ConfigError(f"max_num_requests={max_num_requests}: must be at least 1")
        self.engine = engine
        if engine.has_work:
            raise ConfigError("the engine has requests already: finish or abort them first")
        self._max_num_requests = max_num_requests
        self._turns = nullcontext() if turns is None else turns
        self._admission: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        # Texts are tokenized outside of the loop. Grammars have separate threads, and slow grammars others than fast
        # ones.
        self._checking = ThreadPoolExecutor(NUM_CHECKING, "foreword-check")
        self._compiling = Turns[bool]("foreword-grammar"), Turns[bool]("foreword-long-grammar")
        self._streams: dict[str, Stream] = {}  # streams by request id, until the request has ended
        self._names = count()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = Lock()  # no command is added after the one that ends the thread
        self._closed = self._ended = False
        self._pid = os.getpid()
        self._thread = Thread(target=self._serve, name="foreword-engine", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    # -- in the event loop ---------------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Return the number of requests that are in the engine or on their way to it."""
        return len(self._streams)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Return the ids of unfinished requests."""
        return tuple(self._streams)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        request_id: str | None = None,
        prompt_text: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt. Yield the request's output when it has new tokens; the last output is ``finished``.

        A consumer that is slower than the engine gets fewer outputs, always the latest one. A consumer that stops
        iterating or is cancelled aborts its request.
        prompt_text: the text that the token ids were made from, for the output. options: see `RequestOptions`; stream
        is True by default. With False, and with best_of above n, only the final output is yielded.

        Raise RequestError for a request that cannot be served, or that fails, such as for logits that are not numbers;
        EngineError if a step failed, or the engine is closed.
        """
        request_id = f"request-{next(self._names)}" if request_id is None else request_id
        check_process(self._pid)
        loop = asyncio.get_running_loop()
        async with self._admission.setdefault(loop, asyncio.Semaphore(self._max_num_requests)):
            with self._reserved(request_id) as stream:
                options.setdefault("stream", True)
                group = await self.check(request_id, prompt, params, prompt_text=prompt_text, **options)
                self._start(group, stream)
                async for output in stream:
                    yield output

    async def check(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        prompt_text: str | None = None,
        is_small: bool = False,
        client: str = "",
        **options: Unpack[RequestOptions],
    ) -> RequestGroup:
        """Return the checked request for `run`: see `Engine.check`.

        It is checked in another thread, unless ``is_small`` says that this takes less time than a switch of threads.
        Several texts are tokenized at the same time. Grammars are compiled one at a time and delay no request without a
        grammar. Clients take turns, and fast grammars do not wait for slow ones.
        """
        check_process(self._pid)
        self._check_open()
        checks = partial(self.engine.check, request_id, prompt, params, prompt_text=prompt_text, **options)
        if isinstance(params, SamplingParams) and params.needs_grammar:
            await self._settle(request_id, client, params)
        elif is_small:
            return checks()
        return await asyncio.get_running_loop().run_in_executor(self._checking, checks)

    async def _settle(self, request_id: str, client: str, params: SamplingParams) -> None:
        """Wait until it is known whether the request's grammar can be compiled. Raise RequestError if the grammars of
        others take too long.
        """
        try:
            async with asyncio.timeout(MOST_WAIT):
                for turns, seconds in zip(self._compiling, (QUICK_SECONDS, COMPILE_SECONDS), strict=True):
                    settle = partial(self.engine.settle_grammar, params, seconds)
                    if await asyncio.wrap_future(turns.submit(client, settle)):
                        return
        except TimeoutError:
            value = StructuredOutputs.of(params.structured_outputs, request_id)
            reason = f"waited {MOST_WAIT:g} s for others to be compiled"
            raise value.refusal(request_id, reason, "Try again later.") from None

    async def encode(self, prompt: Prompt, params: PoolingParams | None = None, **options: Any) -> PoolingRequestOutput:
        """Pool one prompt; without parameters, return its embedding. options, errors: see `generate`."""
        outputs = self.generate(prompt, params or PoolingParams(), **options)
        async with aclosing(outputs):
            return pooling_output([output async for output in outputs][-1])

    @contextmanager
    def run(self, group: RequestGroup) -> Iterator[Stream]:
        """Send a checked request to the engine: iterate over the stream for its outputs. Leaving the block aborts it.

        It does not wait for other requests: the caller limits their number.
        """
        check_process(self._pid)
        with self._reserved(group.request_id) as stream:
            self._start(group, stream)
            yield stream

    async def call(self, function: Callable[[], T]) -> T:
        """Return the result of a function that reads or changes the engine. It is called in the engine's thread between
        two steps.
        """
        result: Future[T] = Future()

        def run() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function())
                except Exception as error:
                    result.set_exception(error)

        self._send(run)
        return await asyncio.wrap_future(result)

    async def load_lora(self, name: str, path: str | Path) -> None:
        """Load an adapter: see `Engine.load_lora`. Another thread reads it while requests run."""
        self.engine.loras.check_name(name)
        adapter = await asyncio.to_thread(self.engine.loras.read, path)
        await self.call(partial(self.engine.load_lora, name, adapter))

    async def drop_lora(self, name: str) -> None:
        """Unload an adapter: see `Engine.drop_lora`."""
        await self.call(partial(self.engine.drop_lora, name))

    @property
    def loras(self) -> dict[str, Path]:
        """Return the path of each adapter by its name."""
        return self.engine.loras.paths

    @property
    def is_closed(self) -> bool:
        """Return whether the engine refuses new requests."""
        return self._closed

    def abort(self, request_id: str) -> None:
        """End a request with its tokens so far; finish_reason is "abort". An unknown id is ignored."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._request_abort(stream)

    async def close(self) -> None:
        """Abort every request, and end the thread. Closing twice is harmless."""
        await asyncio.get_running_loop().run_in_executor(None, self._end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @contextmanager
    def _reserved(self, request_id: str) -> Iterator[Stream]:
        """Provide a stream for a request id. Raise RequestError for an id in use. At the end of the block the request
        is aborted if it has not ended.
        """
        stream = Stream(request_id, asyncio.get_running_loop())
        if self._streams.setdefault(request_id, stream) is not stream:
            raise RequestError(request_id, "request_id", request_id, "is in use", "Use another id.")
        try:
            yield stream
        finally:
            if not stream.is_sent:
                self._streams.pop(request_id, None)
            elif not stream.is_finished:
                self._request_abort(stream)

    def _start(self, group: RequestGroup, stream: Stream) -> None:
        self._send(partial(self._add, group, stream))
        stream.is_sent = True

    def _request_abort(self, stream: Stream) -> None:
        stream.is_aborted = True
        with suppress(EngineError):  # the engine is closed, so the request has ended already
            self._send(partial(self._abort, stream))

    def _send(self, command: Callable[[], None]) -> None:
        with self._closing:
            self._check_open()
            self._inbox.put(command)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed: make a new one")

    def _end(self) -> None:
        if os.getpid() != self._pid:
            return  # in a forked process, the thread belongs to the parent
        with self._closing:
            if not self._closed:
                self._closed = True
                self._inbox.put(self._end_all)
        self._thread.join()
        self._checking.shutdown(wait=False, cancel_futures=True)
        for turns in self._compiling:
            turns.close()
        atexit.unregister(self._end)

    # -- in the engine's thread ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._ended:
                try:
                    command = self._inbox.get(block=not self.engine.has_work)
                except Empty:
                    self._step()
                else:
                    command()
        finally:
            with self._closing:
                self._closed = True
            self._deliver((request_id, EngineError("the engine was closed")) for request_id in list(self._streams))

    def _step(self) -> None:
        try:
            with self._turns:
                outputs = self.engine.step()
        except Exception as error:
            self._fail(error)
        else:
            self._deliver((output.request_id, output.failure or output) for output in outputs)

    def _add(self, group: RequestGroup, stream: Stream) -> None:
        try:
            self.engine.add(group)
        except Exception as error:
            self._deliver([(group.request_id, error)])
            return
        if stream.is_aborted:
            self._abort(stream)

    def _abort(self, stream: Stream) -> None:
        if self._streams.get(stream.request_id) is not stream:
            return  # the request has ended; another one may have its id
        event = self._abort_now(stream.request_id)
        if event is not None:
            self._deliver([(stream.request_id, event)])

    def _abort_now(self, request_id: str) -> Event | None:
        """End a request. Return its final output, or the error of an observer; None if the engine does not have it."""
        try:
            return self.engine.abort(request_id)
        except Exception as error:
            return error

    def _fail(self, error: Exception) -> None:
        """Handle a failed step: abort the request that the error names, or else every request in the engine.

        Later requests are still accepted.
        """
        if isinstance(error, RequestError) and error.request_id in self._streams:
            self._abort_now(error.request_id)
            self._deliver([(error.request_id, error)])
            return
        events: list[tuple[str, Event]] = []
        for request_id in list(self._streams):
            if self._abort_now(request_id) is not None:
                events.append((request_id, StepError(error)))
        self._deliver(events)

    def _end_all(self) -> None:
        """End all requests. This is the last command of the thread."""
        self._ended = True
        for stream in list(self._streams.values()):
            self._abort(stream)
        self.engine.close()

    def _deliver(self, events: Iterable[tuple[str, Event]]) -> None:
        """Pass events to the streams, in one call into their event loop, and remove the streams that end.

        The first outputs of requests are passed on before further outputs of other requests, because their consumers
        have waited longer.
        """
        by_loop: dict[asyncio.AbstractEventLoop, deque[tuple[Stream, Event]]] = {}
        for request_id, event in events:
            stream = self._streams.get(request_id)
            if stream is None:  # the request was not added by `generate`
                continue
            if isinstance(event, Exception) or event.finished:
                del self._streams[request_id]
            items = by_loop.setdefault(stream.loop, deque())
            (items.append if isinstance(event, RequestOutput) and event.continues else items.appendleft)(
                (stream, event)
            )
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(put_all, items)
            except RuntimeError:  # the loop is closed
                for stream, _ in items:
                    self._inbox.put(partial(self._abort, stream))


def put_all(items: Iterable[tuple[Stream, Event]]) -> None:
    """Give each stream its event."""
    for stream, event in items:
        stream.put(event)
