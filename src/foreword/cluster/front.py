"""Routes that concern all replicas, whatever the replicas are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response as Answer
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.cluster.metrics import Page, merged, responses_by_status
from foreword.server import app as server_app  # the dialects of errors are registered by its routes
from foreword.server.config import ServerConfig
from foreword.server.errors import HttpError
from foreword.server.gate import Gate
from foreword.server.reply import reply

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
LOST = "the replica ended while it answered; send the request again"

Called = Sequence[tuple[str, int, Any]]
"""The name of each replica that answered, status and JSON value."""


class Front(ABC):
    """Every route of the server: those that concern all replicas here, all others at one of them."""

    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()
        self._own: dict[str, Callable[[Request], Awaitable[Answer]]] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/requests": self._requests,
            "/kv_event_sources": self._sources,
            "/abort": self._abort,
            "/reset_prefix_cache": self._reset,
            LOAD: self._load,
            UNLOAD: self._unload,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        incoming = Request(scope, receive)
        own = self._why if scope["path"].startswith("/requests/") else self._own.get(scope["path"])
        if own is not None:
            await (await own(incoming))(scope, receive, send)
        else:
            await self.pass_on(scope, await incoming.body(), send)

    def behind_gate(self, config: ServerConfig) -> ASGIApp:
        """The application behind keys and limits, those of the server."""
        return server_app.with_origins(Gate(self, config, self.responses), config)

    @abstractmethod
    async def pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        """Answer with the response of one replica."""

    @abstractmethod
    async def call_all(self, method: str, path: str, body: object = None) -> Called:
        """A short request to every replica; those that are lost meanwhile are left out."""

    @abstractmethod
    async def pages(self) -> Iterable[tuple[str, str]]:
        """The name and the metrics of every replica."""

    @abstractmethod
    async def states(self) -> list[dict[str, Any]]:
        """What /ready tells about the replicas; empty if none takes requests."""

    @abstractmethod
    async def adapters(self) -> Mapping[str, dict[str, Any]]:
        """Bodies of the loads of LoRA adapters, by name, which a new replica gets before any request."""

    @abstractmethod
    async def keep_adapter(self, name: str, body: dict[str, Any] | None) -> None:
        """Set one of them, or remove it."""

    def own_metrics(self) -> Iterable[Metric]:
        """Metrics of the front end itself."""
        return (responses_by_status(self.responses),)

    async def _health(self, incoming: Request) -> Answer:
        return reply({"status": "ok"})

    async def _ready(self, incoming: Request) -> Answer:
        states = await self.states()
        if not states:
            raise HttpError(503, "no replica is ready", code="not_ready")
        return reply({"status": "ready", "replicas": states})

    async def _metrics(self, incoming: Request) -> Answer:
        metrics = [*self.own_metrics(), *merged(await self.pages())]
        return Answer(Page(metrics).text(), media_type=CONTENT_TYPE_LATEST)

    async def _requests(self, incoming: Request) -> Answer:
        found = await self._called("GET", "/requests")
        data = [{**item, "replica": name} for name, status, answer in found if status == 200 for item in answer["data"]]
        return reply({"object": "list", "data": data})

    async def _sources(self, incoming: Request) -> Answer:
        found = await self._called("GET", "/kv_event_sources")
        return reply(
            {
                "object": "list",
                "data": [item for _, status, answer in found if status == 200 for item in answer["data"]],
            }
        )

    async def _why(self, incoming: Request) -> Answer:
        return reply(*first_found(await self._called("GET", incoming.url.path)))

    async def _abort(self, incoming: Request) -> Answer:
        return reply(*first_found(await self._called("POST", "/abort", await _json(incoming))))

    async def _reset(self, incoming: Request) -> Answer:
        found = await self._called("POST", "/reset_prefix_cache", await _json(incoming))
        wrong = next((answer for _, status, answer in found if status != 200), None)
        return reply(
            {"reset": all(answer["reset"] for *_, answer in found)} if wrong is None else wrong,
            200 if wrong is None else 400,
        )

    async def _load(self, incoming: Request) -> Answer:
        """Load an adapter on all replicas, or on none."""
        body = await _json(incoming)
        found = await self._called("POST", LOAD, body)
        failed = next((known for known in found if known[1] != 200), None)
        name = body.get("lora_name") if isinstance(body, dict) else None
        if failed is None:
            assert isinstance(body, dict)  # others are refused
            await self.keep_adapter(body["lora_name"], {**body, "load_inplace": True})
            return reply(found[0][2])
        if isinstance(name, str) and name not in await self.adapters():
            await self.call_all("POST", UNLOAD, {"lora_name": name})  # from those that have it
        replica, status, answer = failed
        if len({each[1] for each in found}) > 1:
            answer["error"]["message"] = f"replica {replica}: {answer['error']['message']}"
        return reply(answer, status)

    async def _unload(self, incoming: Request) -> Answer:
        """Drop an adapter, also if no replica is ready."""
        body = await _json(incoming)
        if isinstance(body, dict):
            await self.keep_adapter(str(body.get("lora_name")), None)
        return reply(*first_found(await self._called("POST", UNLOAD, body)))

    async def _called(self, method: str, path: str, body: object = None) -> Called:
        found = await self.call_all(method, path, body)
        if not found:
            raise HttpError(503, "no replica is ready", code="not_ready")
        return found


def first_found(found: Called) -> tuple[Any, int]:
    """JSON value and status: the first with status 200, or any."""
    _, status, answer = next((known for known in found if known[1] == 200), found[0])
    return answer, status


async def _json(incoming: Request) -> object:
    try:
        return msgspec.json.decode(await incoming.body())
    except (msgspec.DecodeError, RecursionError) as error:
        raise HttpError(400, f"body: is not JSON: {error}", param="body") from None
