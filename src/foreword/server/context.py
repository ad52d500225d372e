"""The objects that the routes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from foreword.engine.async_engine import AsyncEngine
from foreword.engine.slots import Slots
from foreword.kv_events.source import KVEventSource
from foreword.media.encoder import TEXT_ONLY, Media
from foreword.models.tokenizer import Tokenizer
from foreword.server.admission import Admission
from foreword.server.client import Client
from foreword.server.config import ServerConfig
from foreword.server.errors import HttpError
from foreword.server.failures import MODEL_NOT_FOUND
from foreword.server.inspector import Inspector
from foreword.server.metrics import ServerMetrics
from foreword.server.pace import Pace
from foreword.server.responses import Responses
from foreword.server.shared import Shared
from foreword.server.store import Store
from foreword.trace.header import TokenIds

if TYPE_CHECKING:
    from foreword.server.tracing import Traces  # imported only for types: it needs packages of another extra

NUM_DECODING = 2  # number of sounds that are decoded at the same time: a long one needs about 100 MB for a moment


@dataclass(slots=True, eq=False)
class Progress:
    """An HTTP request that generates. client: who sent it. names: the ids of its requests in the engine. is_aborted:
    whether these must end.
    """

    client: Client
    names: tuple[str, ...] = ()
    is_aborted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """The engine and its tokenizer, and the data of one model.

    media: the inputs that the model supports besides text. names: the model's names in requests; the first one is used
    in responses, except for adapters, which have separate names. path: the path of its files, if it has any. created:
    seconds since 1970. kv_events: the addresses at which cache events are published, None if they are not. progress:
    the HTTP requests that generate, by their ids. trace: is called at the end of each request. slots: conversations
    that can be saved, None if they cannot. decoding: limits the number of sounds that are decoded at the same time.
    lines: limits the lines of batches to half of the rows, so that clients get the other half. pace: the pace of
    streams. shared: data that all models of a server share.
    """

    engine: AsyncEngine
    tokenizer: Tokenizer
    media: Media = TEXT_ONLY
    names: tuple[str, ...]
    path: Path | None = None
    config: ServerConfig = field(default_factory=ServerConfig)
    kv_events: KVEventSource | None = None
    trace: Traces | None = None
    slots: Slots | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    shared: Shared | None = None
    admission: Admission = field(init=False)
    store: Store = field(init=False)
    responses: Responses = field(init=False)
    metrics: ServerMetrics = field(init=False)
    inspector: Inspector = field(init=False)
    progress: dict[str, Progress] = field(init=False, default_factory=dict)
    decoding: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(NUM_DECODING))
    lines: asyncio.Semaphore = field(init=False)
    pace: Pace = field(init=False, default_factory=Pace)

    def __post_init__(self) -> None:
        shared = Shared.of(self.config) if self.shared is None else self.shared
        object.__setattr__(self, "admission", shared.admission)
        object.__setattr__(self, "store", shared.store)
        object.__setattr__(self, "responses", shared.responses)
        metrics = ServerMetrics(self.engine.engine, self.names[0], shared.admission if self.shared is None else None)
        object.__setattr__(self, "metrics", metrics)
        num_lines = max(self.engine.engine.states.max_num_reqs // 2, 1)
        object.__setattr__(self, "lines", asyncio.Semaphore(num_lines))
        shown = self.engine.engine.config.record_token_ids or "plain"
        token_ids: TokenIds = shown if self.config.shows_texts else "omitted"
        inspector = Inspector(self.engine, self.tokenizer, self.names[0], token_ids)
        object.__setattr__(self, "inspector", inspector)

    @property
    def served(self) -> tuple[str, ...]:
        """Return the names of the model and of its adapters."""
        return (*self.names, *self.engine.loras)

    def check_model(self, name: str | None) -> str:
        """Return the name of the model in the response. Raise HttpError if a request asks for another model."""
        if name is None:
            return self.names[0]
        for known in (name, name.removesuffix(":latest")):  # clients of Ollama add this tag
            if known in self.served:
                return known
        raise not_served(name, self.served)


def not_served(name: str, served: Iterable[str]) -> HttpError:
    """Return the error for a request for a model whose name is not served."""
    known = ", ".join(map(repr, served))
    return HttpError(MODEL_NOT_FOUND, f"model = {name!r:.80}: not served. Use {known}", param="model")
