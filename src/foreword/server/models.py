"""The models of a server. They are loaded when a request names them, and unloaded when others need their memory or no
request uses them.

    request ─▶ using(name) ─▶ loaded ─────────────────────────────▶ its context, until the request ends
                           └▶ unloaded ─▶ turn ─▶ room ─▶ load ─▶ ┘
                                                  └▶ least recently used ones: no new requests ─▶ idle ─▶ unloaded

All of this runs in one event loop; threads read files and make engines.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from math import ceil, inf
from pathlib import Path
from traceback import print_exception
from typing import Literal, NamedTuple, Protocol

from foreword.engine.memory import size_text
from foreword.engine.options import LLMOptions
from foreword.errors import ConfigError, ForewordError, RequestError
from foreword.machine import memory_bytes
from foreword.server.about import About, local_path
from foreword.server.admission import LONGEST_WAIT
from foreword.server.config import ServerConfig
from foreword.server.context import Context, not_served
from foreword.server.errors import HttpError
from foreword.server.failures import FULL, INVALID, MODEL_FAILED, MODEL_LOADING
from foreword.server.served import ServedModel
from foreword.server.shared import Shared

State = Literal["loaded", "loading", "unloaded", "unloading"]
FIRST_LOAD = 5.0  # seconds that a load probably takes, before one is measured
CLIENT_SECONDS = 60.0  # seconds after a client's request in which its model is not unloaded for a batch


class Memory(NamedTuple):
    """The bytes of a loaded model. weights: the bytes that it shares with other models of the same key; None: it shares
    none.
    """

    num_bytes: int
    weights: int = 0
    key: str | None = None


NO_MEMORY = Memory(0)


def total_bytes(models: Iterable[Memory]) -> int:
    """Return the bytes of several loaded models. Models with equal keys have their weights in memory once."""
    shared: dict[str, int] = {}
    total = 0
    for one in models:
        total += one.num_bytes
        if one.key is not None:
            total -= one.weights
            shared[one.key] = max(one.weights, shared.get(one.key, 0))
    return total + sum(shared.values())


class ReadModel(Protocol):
    """A model whose files were read. memory: its memory when it is loaded; `load` may find that it shares none."""

    @property
    def memory(self) -> Memory: ...

    def load(self) -> Context:
        """Make the engine of the model."""
        ...


Reader = Callable[[ServedModel, Mapping[str, str | Path], Callable[[int], None]], ReadModel]
"""A function that reads the files of a model with these adapters, which replace those of its options. It runs in a
thread. Before it takes memory for weights, it calls the function that it is given with their bytes; weights that are
read when they are used take none.
"""


class MeasuredError(Exception):
    """Ends the reading of a model whose weights would take memory. memory: what it needs at least."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.memory = Memory(num_bytes)


class ModelEntry:
    """One model of a server.

    context: None unless it is loaded. memory: its memory while it is loaded. needs: the memory that it has when it is
    loaded; None before its files were read. num_requests: the requests that use it or wait until it is loaded;
    num_clients: those of them that are not lines of a batch. error: why it could not be loaded the last time, "" if it
    could. keep_alive: seconds.
    used_at: the end of its last request; client_at: the end of the last request of a client; turn_until: the time until
    which other batches do not unload it. All three are times of `time.monotonic`. num_loads: the number of times that
    it was loaded. about: the description of its files, after they were read.
    """

    def __init__(self, served: ServedModel, context: Context | None = None) -> None:
        self.served, self.context = served, context
        self.state: State = "unloaded" if context is None else "loaded"
        self.memory, self.num_requests, self.num_clients, self.num_loads = NO_MEMORY, 0, 0, 0
        self.needs: Memory | None = None
        self.client_at, self.turn_until = -inf, -inf
        self.error, self.keep_alive = "", served.keep_alive
        self.used_at = self.began_at = time.monotonic()
        self.load_seconds: float | None = None
        self.loras: dict[str, str | Path] = {**(served.options.get("loras") or {})}  # adapters of its next load
        self.loading: asyncio.Task[None] | None = None
        self.idle, self.gone = asyncio.Event(), asyncio.Event()  # while it is "unloading"
        self.timer: asyncio.TimerHandle | None = None
        self.about: About | None = None

    @property
    def path(self) -> Path | None:
        """Return the file or directory of the model; None if it is not known to be on this machine."""
        return local_path(self.served.model) if self.context is None else self.context.path

    @property
    def num_bytes(self) -> int:
        """The bytes of its memory, with those that it shares; 0 before it is loaded."""
        return self.memory.num_bytes

    @property
    def name(self) -> str:
        return self.served.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the model and of its adapters."""
        if self.context is not None:
            return self.context.served
        return *self.served.names, *self.loras

    @property
    def is_loaded(self) -> bool:
        """Return whether it takes requests at once."""
        return self.state == "loaded"

    @property
    def is_of_clients(self) -> bool:
        """Return whether clients use the model, or used it recently."""
        return self.num_clients > 0 or time.monotonic() - self.client_at < CLIENT_SECONDS

    @property
    def is_in_turn(self) -> bool:
        """Return whether a batch may use the model for some more time before it is unloaded for another batch."""
        return time.monotonic() < self.turn_until

    @property
    def expires_in(self) -> float | None:
        """Return the seconds until it is unloaded if no request arrives; None if it stays loaded."""
        if self.keep_alive is None or self.served.pin or self.context is None:
            return None
        return self.keep_alive if self.num_requests else max(self.used_at + self.keep_alive - time.monotonic(), 0.0)


class Models:
    """All models of a server, and the memory that they share.

    responses: the counter of HTTP requests by the status of their response. single: the context of a server of one
    model, which is always loaded. budget: the bytes of all loaded models together; None: no limit. waiting: the
    requests whose model is not loaded yet, by their ids. created: seconds since 1970.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        config: ServerConfig,
        read: Reader,
        shared: Shared,
        options: LLMOptions | None = None,
    ) -> None:
        """Serve ``models``. ``options`` are the options of the engines of models that are added later."""
        self.config, self._read, self.shared, self._options = config, read, shared, options or LLMOptions()
        self.entries = [ModelEntry(served) for served in models]
        self.single: Context | None = None
        self.responses: Counter[int] = Counter()
        self.budget = config.ram_budget or memory_bytes()
        self.waiting: dict[str, ModelEntry] = {}
        self.created = int(time.time())
        self.is_closed = False
        self._turn = asyncio.Lock()  # for loading one model at a time
        self._naming: set[str] = set()  # names of adapters that are being loaded
        self._ending: set[asyncio.Task[None]] = set()  # tasks of models that are "unloading"

    @classmethod
    def of(cls, context: Context) -> Models:
        """Return the models of a server of one, which is loaded already and belongs to its owner."""

        def refuse(served: ServedModel, loras: Mapping[str, str | Path], take: Callable[[int], None]) -> ReadModel:
            raise ConfigError(f"model {served.model!r:.200}: is never loaded again")

        served = ServedModel(model=context.names[0], names=context.names, pin=True)
        shared = Shared(context.admission, context.store, context.responses)
        found = cls([], context.config, refuse, shared)
        found.entries, found.single, found.responses = [ModelEntry(served, context)], context, context.metrics.responses
        return found

    @property
    def loaded(self) -> list[tuple[ModelEntry, Context]]:
        """The models with an engine."""
        return [(entry, entry.context) for entry in self.entries if entry.context is not None]

    @property
    def refused(self) -> Counter[str]:
        """Return the number of refused requests, by the limit that was reached."""
        return self.shared.admission.num_refused

    @property
    def num_bytes(self) -> int:
        """The bytes of all loaded models and of the one that is being loaded."""
        return total_bytes(entry.memory for entry in self.entries)

    def find(self, name: str | None) -> ModelEntry:
        """Return the model with this name, or with an adapter of this name; None: the first one. Raise HttpError for an
        unknown name.

        Clients of Ollama give names without a tag the tag "latest".
        """
        if name is None:
            return self.entries[0]
        if (entry := self.owner(name)) is not None:
            return entry
        raise not_served(name, (known for entry in self.entries for known in entry.names))

    def owner(self, name: str) -> ModelEntry | None:
        """Return the model with this name, or with an adapter of this name, as `find`; None if there is none."""
        names = (name, name.removesuffix(":latest"))
        return next((entry for wanted in names for entry in self.entries if wanted in entry.names), None)

    def check_changes(self) -> None:
        """Raise HttpError if no model may be added or removed."""
        if self.single is not None or not self.config.load_on_demand:
            reason = "the server has the models that it was started with. Start it with --load-on-demand to change them"
            raise HttpError(INVALID, reason, param="model")

    def check_free(self, name: str) -> None:
        """Raise HttpError for the name of an adapter, which a model cannot have too."""
        owner = self.owner(name)
        if name in self._naming or (owner is not None and not {name, f"{name}:latest"} & {*owner.served.names}):
            of = "" if owner is None else f" of {owner.name!r:.80}"
            reason = f"is the name of an adapter{of}. Unload it first"
            raise HttpError(INVALID, f"model = {name!r:.80}: {reason}", param="model")

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Reserve this name for an adapter that is loaded in the block. Raise HttpError if another one is."""
        if name in self._naming:
            reason = f"lora_name = {name!r:.80}: an adapter of this name is being loaded. Try again later"
            raise HttpError(INVALID, reason, param="lora_name")
        self._naming.add(name)
        try:
            yield
        finally:
            self._naming.remove(name)

    def add(self, name: str) -> None:
        """Serve one more model, which is loaded at its first request. Raise HttpError as `check_free` does."""
        self.check_free(name)
        if all(name not in entry.names for entry in self.entries):
            keep_alive = self.config.model_keep_alive
            options, common = self._options, frozenset(self._options)
            served = ServedModel(model=name, names=(name,), options=options, common=common, keep_alive=keep_alive)
            self.entries.append(ModelEntry(served))

    async def remove(self, entry: ModelEntry) -> None:
        """Unload a model, and serve it no longer. Raise HttpError if it is pinned, used or the only one."""
        is_only = len(self.entries) == 1
        if is_only or entry.served.pin or entry.num_requests or entry.state in ("loading", "unloading"):
            reason = (
                "is the only model" if is_only else "is pinned" if entry.served.pin else "is in use; try again later"
            )
            raise HttpError(INVALID, f"model = {entry.name!r:.80}: {reason}", param="model")
        self.entries.remove(entry)
        if entry.state == "loaded":
            await self._unload(entry)

    @asynccontextmanager
    async def using(
        self, name: str | None, request_id: str, *, of_batch: bool = False
    ) -> AsyncGenerator[Context, None]:
        """Yield the context of a model, which is loaded if necessary and stays loaded within the block. of_batch:
        whether this is for a line of a batch, not for a client.

        Raise HttpError 404 for an unknown name, 503 if it cannot be loaded, or not within load_timeout, and 429 if as
        many requests as may be in progress wait for models already.
        """
        if self.single is not None:
            yield self.single
            return
        entry = self.find(name)
        entry.num_clients += not of_batch
        try:
            context = await self._enter(entry, request_id)
            try:
                yield context
            finally:
                self._leave(entry)
        finally:
            if not of_batch:
                entry.num_clients -= 1
                entry.client_at = time.monotonic()

    async def measure(self, entry: ModelEntry) -> None:
        """Determine the memory that a model needs, unless it is known. Of one that the library transformers loads it
        is that of its weights until it is loaded.

        Raise HttpError 503 if its files cannot be read.
        """
        async with self._turn:
            if entry.needs is not None:
                return

            def take(num_bytes: int) -> None:
                raise MeasuredError(num_bytes)

            try:
                entry.needs = (await asyncio.to_thread(self._read, entry.served, entry.loras, take)).memory
            except MeasuredError as found:
                entry.needs = found.memory
            except Exception as error:
                _note_failure(entry, error)
                raise _failed(entry) from None

    def has_room(self, entry: ModelEntry, beside: Iterable[ModelEntry]) -> bool:
        """Return whether a model fits beside these models, which are loaded or will be, and beside the pinned ones;
        False while its size is not known.
        """
        if self.budget is None:
            return True
        kept = {*beside, *(one for one in self.entries if one.served.pin)}
        needs = [one.needs for one in kept | {entry}]
        known = [one for one in needs if one is not None]
        return len(known) == len(needs) and total_bytes(known) <= self.budget

    async def start(self) -> None:
        """Load the models that do not wait for a request. Raise ConfigError for one that cannot be loaded, or if they
        do not fit.
        """
        for entry in self.entries:
            if self.config.load_on_demand and not entry.served.pin:
                continue
            try:
                await self._load_now(entry, may_unload=False)
            except Exception as error:
                raise error if isinstance(error, ForewordError) else ConfigError(_reason(error)) from error
            self._leave(entry, count=0)

    def set_keep_alive(self, entry: ModelEntry, seconds: float) -> None:
        """Set the time for which a model stays loaded without requests, until its next request; below 0: as long as its
        memory is not needed.

        Raise HttpError if the time is 0 and the model is pinned.
        """
        if seconds == 0 and entry.served.pin:
            reason = "the server always keeps this model loaded. Serve several models, or one with --load-on-demand"
            raise HttpError(INVALID, f"keep_alive = 0: {reason}", param="keep_alive")
        entry.keep_alive = None if seconds < 0 else seconds
        self._rest(entry)

    async def close(self) -> None:
        """Unload all models at once."""
        self.is_closed = True
        for entry in self.entries:
            self._stop_timer(entry)
        if tasks := {entry.loading for entry in self.entries if entry.loading is not None} | self._ending:
            await asyncio.wait(tasks)
        for _, context in self.loaded:
            await _end(context)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _enter(self, entry: ModelEntry, request_id: str) -> Context:
        entry.keep_alive = entry.served.keep_alive
        if entry.state == "loaded" and entry.context is not None:
            entry.num_requests += 1
            self._stop_timer(entry)
            return entry.context
        if len(self.waiting) >= self.config.max_requests:
            self.refused["models"] += 1
            reason = f"{len(self.waiting)} requests wait for models, of max_requests"
            raise HttpError(FULL, f"the server is full: {reason}. Try again", headers=self._retry_after())
        if request_id in self.waiting:
            raise RequestError(request_id, "X-Request-Id", request_id, "is in use", "Use another id.")
        self.waiting[request_id] = entry
        try:
            async with asyncio.timeout(self.config.load_timeout):
                return await self._wait(entry)
        except TimeoutError:
            reason = f"is {entry.state}, and was not ready within load_timeout = {self.config.load_timeout:g} s"
            text = f"model = {entry.name!r:.80}: {reason}. Try again"
            raise HttpError(MODEL_LOADING, text, param="model", headers=self._retry_after()) from None
        finally:
            self.waiting.pop(request_id, None)

    async def _wait(self, entry: ModelEntry) -> Context:
        while entry.state == "unloading":
            await entry.gone.wait()
        entry.num_requests += 1  # from here on it is not unloaded before the request ends
        try:
            if entry.context is None:
                if entry.loading is None:
                    entry.loading = asyncio.create_task(self._load(entry))
                await asyncio.shield(entry.loading)
            if entry.context is None:
                raise _failed(entry)
        except BaseException:
            self._leave(entry)
            raise
        return entry.context

    def _leave(self, entry: ModelEntry, count: int = 1) -> None:
        entry.num_requests -= count
        entry.used_at = time.monotonic()
        if not entry.num_requests:
            entry.idle.set()
            self._rest(entry)

    def _rest(self, entry: ModelEntry) -> None:
        """Unload an idle model when its time has passed."""
        self._stop_timer(entry)
        if entry.num_requests or entry.state != "loaded" or (seconds := entry.expires_in) is None or self.is_closed:
            return

        def expire() -> None:
            if entry.state == "loaded" and not entry.num_requests:
                self._begin_end(entry)

        entry.timer = asyncio.get_running_loop().call_later(seconds, expire)

    def _stop_timer(self, entry: ModelEntry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None

    # -- loading and unloading ---------------------------------------------------------------------------------------

    async def _load(self, entry: ModelEntry) -> None:
        """Load a model. If that fails, the error is in the entry afterwards."""
        try:
            await self._load_now(entry, may_unload=True)
        except Exception as error:
            _note_failure(entry, error)
        finally:
            entry.loading = None
            if not entry.num_requests:  # its requests did not wait for it
                self._rest(entry)

    async def _load_now(self, entry: ModelEntry, *, may_unload: bool) -> None:
        entry.state, entry.began_at = "loading", time.monotonic()
        try:
            async with self._turn:
                entry.began_at = time.monotonic()
                loop = asyncio.get_running_loop()

                def take(num_bytes: int) -> None:
                    """Wait for room for weights that are read at once, and for the rest if it is known."""
                    needs = Memory(num_bytes)
                    if entry.needs is not None and entry.needs.num_bytes > num_bytes and self.has_room(entry, ()):
                        needs = entry.needs
                    room = self._make_room(entry, needs, may_unload=may_unload)
                    asyncio.run_coroutine_threadsafe(room, loop).result()

                read = await asyncio.to_thread(self._read, entry.served, entry.loras, take)
                await self._make_room(entry, read.memory, may_unload=may_unload)
                entry.memory = entry.needs = read.memory
                entry.context = await asyncio.to_thread(read.load)
                entry.memory = entry.needs = read.memory
                entry.load_seconds = time.monotonic() - entry.began_at
        except BaseException:
            entry.state, entry.memory = "unloaded", NO_MEMORY
            raise
        entry.state, entry.error = "loaded", ""
        entry.num_loads += 1

    async def _make_room(self, entry: ModelEntry, memory: Memory, *, may_unload: bool) -> None:
        """Unload models until this memory is free. Models of clients are unloaded last, and before them those in the
        turn of a batch. Of the others those without requests come first, the least recently used before the others.

        Raise ConfigError, with figures, if models that stay loaded leave too little.
        """
        if self.budget is None:
            return
        kept = [one for one in self.entries if one.num_bytes and (one.served.pin or not may_unload)]
        of_kept = total_bytes(one.memory for one in kept)
        size = total_bytes([*(one.memory for one in kept), memory]) - of_kept
        if size + of_kept > self.budget:
            held = f", and {', '.join(one.name for one in kept)}, which stay loaded, have" if kept else ""
            figures = f" {size_text(of_kept)}" if kept else ""
            fix = "Raise ram_budget, lower kv_cache_bytes, " + ("unpin one" if may_unload else "or give load_on_demand")
            raise ConfigError(
                f"model {entry.name!r:.80}: needs {size_text(size)}{held}{figures}, of {size_text(self.budget)} that "
                f"models may use. {fix}"
            )
        while total_bytes([*(one.memory for one in self.entries), memory]) > self.budget:
            going = [one for one in self.entries if one.state == "unloading"]
            if going:
                await going[0].gone.wait()
                continue
            loaded = [one for one in self.entries if one.state == "loaded" and one.num_bytes and not one.served.pin]
            await self._unload(min(loaded, key=_rank))

    async def _unload(self, entry: ModelEntry) -> None:
        """Give a loaded model no more requests, wait until its requests end, and unload it."""
        await asyncio.shield(self._begin_end(entry))  # it continues if the caller that waits for it is cancelled

    def _begin_end(self, entry: ModelEntry) -> asyncio.Task[None]:
        self._stop_timer(entry)
        entry.state = "unloading"
        entry.gone.clear()
        if entry.num_requests:
            entry.idle.clear()
        else:
            entry.idle.set()
        task = asyncio.create_task(self._end_entry(entry))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _end_entry(self, entry: ModelEntry) -> None:
        await entry.idle.wait()
        context = entry.context
        assert context is not None
        entry.loras = {**context.engine.loras}
        entry.context = None
        await _end(context)
        del context
        await asyncio.to_thread(gc.collect)  # a server collects garbage rarely, and an engine is a cycle of references
        entry.state, entry.memory = "unloaded", NO_MEMORY
        entry.gone.set()

    def _retry_after(self) -> dict[str, str]:
        """Return the header with the time after which the models that are being loaded now are probably ready."""
        now = time.monotonic()
        known = [entry.load_seconds for entry in self.entries if entry.load_seconds is not None]
        usual = sum(known) / len(known) if known else FIRST_LOAD
        loading = [entry for entry in self.entries if entry.state == "loading"]
        left = sum((entry.load_seconds or usual) for entry in loading)
        if loading:
            left -= min(now - min(entry.began_at for entry in loading), left)
        return {"Retry-After": str(min(max(ceil(left), 1), LONGEST_WAIT))}


def _rank(entry: ModelEntry) -> tuple[bool, bool, bool, bool, float]:
    """Return the rank of a loaded model among those that may be unloaded: the smallest goes first."""
    return entry.num_clients > 0, entry.is_of_clients, entry.is_in_turn, entry.num_requests > 0, entry.used_at


def _note_failure(entry: ModelEntry, error: Exception) -> None:
    if not isinstance(error, ForewordError | OSError | MemoryError):
        print_exception(error)
    entry.error = _reason(error)


def _failed(entry: ModelEntry) -> HttpError:
    """Return the error of requests for a model that could not be loaded."""
    reason = f"cannot be loaded: {entry.error}"
    return HttpError(MODEL_FAILED, f"model = {entry.name!r:.80}: {reason}", param="model")


async def _end(context: Context) -> None:
    """Close the engine of a model. An error is printed, because the memory is freed nevertheless."""
    try:
        try:
            await context.engine.close()
        finally:
            if context.trace is not None:
                await asyncio.to_thread(context.trace.close)
    except Exception as error:
        print_exception(error)


def _reason(error: BaseException) -> str:
    """Return the text for requests that failed."""
    if isinstance(error, MemoryError):
        return "there is too little memory"
    return str(error) if isinstance(error, ForewordError | OSError) else f"the server failed: {type(error).__name__}"
