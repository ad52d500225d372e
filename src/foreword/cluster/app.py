"""The front end as an ASGI application: requests to replicas, and routes that concern all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response as Answer
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.cluster.client import ReplicaLostError, Response, request
from foreword.cluster.cluster import Cluster
from foreword.cluster.metrics import Page, merged, own_metrics
from foreword.cluster.process import ReplicaProcess
from foreword.cluster.prompts import TOKENS_PER_PIECE, pieces_of
from foreword.errors import CapacityError
from foreword.server import app as server_app  # the dialects of errors are registered by the routes
from foreword.server.config import ServerConfig
from foreword.server.errors import HttpError
from foreword.server.gate import Gate
from foreword.server.reply import reply

DROPPED = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"host", b"authorization",
                     b"x-api-key", b"x-request-id", b"date", b"expect"))  # fmt: skip
"""Headers that are not passed on."""

FULL = (429, 503)
"""Statuses with which a replica refuses what another one may take."""

LOST = "the replica ended while it answered; send the request again"


class Front:
    """Every route of the server: those that concern all replicas here, all others at one that the router chooses."""

    def __init__(self, cluster: Cluster, responses: Counter[int]) -> None:
        self._cluster, self._responses = cluster, responses
        self._own: dict[str, Callable[[Request], Awaitable[Answer]]] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/requests": self._requests,
            "/abort": self._abort,
            "/reset_prefix_cache": self._reset,
            "/v1/load_lora_adapter": self._load,
            "/v1/unload_lora_adapter": self._unload,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        incoming = Request(scope, receive)
        path = scope["path"]
        own = self._own.get(path)
        if path.startswith("/requests/"):
            own = self._why
        if own is not None:
            await (await own(incoming))(scope, receive, send)
        else:
            await self._pass_on(scope, await incoming.body(), send)

    # -- to one replica ----------------------------------------------------------------------------------------------

    async def _pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        """Answer with the response of a replica; of another one, if that did not begin to answer or is full."""
        num_tokens, pieces = await pieces_of(body) if scope["method"] == "POST" else (1, [])
        tried: set[int] = set()
        while True:
            async with AsyncExitStack() as stack:
                try:
                    number, process = await stack.enter_async_context(
                        self._cluster.chosen(num_tokens, pieces, TOKENS_PER_PIECE, tried)
                    )
                except CapacityError:
                    raise HttpError(
                        503, "no replica is ready", code="not_ready", headers={"Retry-After": "1"}
                    ) from None
                tried.add(number)
                is_last = len(tried) >= len(self._cluster.ready)
                try:
                    response = await stack.enter_async_context(_request(scope, process, body))
                    if response.status in FULL and not is_last:
                        continue
                    whole = None if response.is_stream else await response.body()
                except ReplicaLostError:
                    if is_last:
                        raise HttpError(503, LOST, code="replica_lost", headers={"Retry-After": "1"}) from None
                    continue
                await _answer(response, whole, send)
                return

    # -- about all replicas ------------------------------------------------------------------------------------------

    async def _health(self, incoming: Request) -> Answer:
        return reply({"status": "ok"})

    async def _ready(self, incoming: Request) -> Answer:
        cluster, ready = self._cluster, dict(self._cluster.ready)
        states = [
            {"replica": n, "ready": n in ready, "restarts": cluster.restarts[n]} for n in range(len(cluster.replicas))
        ]
        if not ready:
            raise HttpError(503, "no replica is ready", code="not_ready")
        return reply({"status": "ready", "replicas": states})

    async def _metrics(self, incoming: Request) -> Answer:
        async def page(number: int, process: ReplicaProcess) -> tuple[int, str]:
            try:
                async with request(process.port, "GET", b"/metrics", _headers(process)) as response:
                    return number, (await response.body()).decode()
            except ReplicaLostError:
                return number, ""

        ready = self._cluster.ready
        pages = await asyncio.gather(*(page(*known) for known in ready))
        pids = {number: process.process.pid or 0 for number, process in ready}
        metrics = [*own_metrics(pids, self._cluster.restarts, self._responses), *merged(pages)]
        return Answer(Page(metrics).text(), media_type=CONTENT_TYPE_LATEST)

    async def _requests(self, incoming: Request) -> Answer:
        data = []
        for number, status, answer in await self._call_all("GET", "/requests"):
            if status == 200:
                data += [{**item, "replica": number} for item in answer["data"]]
        return reply({"object": "list", "data": data})

    async def _why(self, incoming: Request) -> Answer:
        return _first_found(await self._call_all("GET", incoming.url.path))

    async def _abort(self, incoming: Request) -> Answer:
        return _first_found(await self._call_all("POST", "/abort", await _json(incoming)))

    async def _reset(self, incoming: Request) -> Answer:
        found = await self._call_all("POST", "/reset_prefix_cache", await _json(incoming))
        wrong = next((answer for _, status, answer in found if status != 200), None)
        if wrong is not None:
            return reply(wrong, 400)
        return reply({"reset": all(answer["reset"] for *_, answer in found)})

    async def _load(self, incoming: Request) -> Answer:
        """On all replicas, or on none."""
        body = await _json(incoming)
        found = await self._call_all("POST", "/v1/load_lora_adapter", body)
        failed = next(((status, answer) for _, status, answer in found if status != 200), None)
        name = body.get("lora_name") if isinstance(body, dict) else None
        if failed is None and isinstance(body, dict):
            self._cluster.adapters[str(name)] = {**body, "load_inplace": True}
            return reply(found[0][2])
        if name not in self._cluster.adapters:
            for number, status, _ in found:
                process = self._cluster.replicas[number]
                if status == 200 and process is not None:
                    await process.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        assert failed is not None  # a body that is no object is refused
        return reply(failed[1], failed[0])

    async def _unload(self, incoming: Request) -> Answer:
        body = await _json(incoming)
        found = await self._call_all("POST", "/v1/unload_lora_adapter", body)
        if isinstance(body, dict):
            self._cluster.adapters.pop(str(body.get("lora_name")), None)
        return _first_found(found)

    async def _call_all(self, method: str, path: str, body: object = None) -> list[tuple[int, int, Any]]:
        """Number of the replica, status and JSON value, of those that answer. HttpError 503 if none does."""

        async def call(number: int, process: ReplicaProcess) -> tuple[int, int, Any] | None:
            try:
                return number, *(await process.call(method, path, body))
            except ReplicaLostError:
                return None

        found = await asyncio.gather(*(call(*known) for known in self._cluster.ready))
        answers = [answer for answer in found if answer is not None]
        if not answers:
            raise HttpError(503, "no replica is ready", code="not_ready")
        return answers


def make_front(cluster: Cluster, config: ServerConfig) -> ASGIApp:
    """The front end behind keys and limits, those of the server."""
    responses: Counter[int] = Counter()
    return server_app.with_origins(Gate(Front(cluster, responses), config, responses), config)


def _request(scope: Scope, process: ReplicaProcess, body: bytes) -> Any:
    query = scope.get("query_string", b"")
    target = scope.get("raw_path") or scope["path"].encode()
    headers = [
        *((name, value) for name, value in scope["headers"] if name not in DROPPED),
        *_headers(process),
        (b"x-request-id", scope["request_id"].encode()),
    ]
    return request(process.port, scope["method"], target + (b"?" + query if query else b""), headers, body)


def _headers(process: ReplicaProcess) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + process.key.encode())]


async def _answer(response: Response, whole: bytes | None, send: Send) -> None:
    """Pass a response on. HttpError, after the last whole event, if the replica is lost in the middle of a stream."""
    headers = [(name, value) for name, value in response.headers if name not in DROPPED]
    if whole is not None:
        headers.append((b"content-length", b"%d" % len(whole)))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    if whole is None:
        try:
            async for events in _whole_events(response):
                await send({"type": "http.response.body", "body": events, "more_body": True})
        except ReplicaLostError:
            raise HttpError(503, LOST, code="replica_lost") from None
    await send({"type": "http.response.body", "body": whole or b""})


async def _whole_events(response: Response) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for part in response.parts():
        events, end, rest = (rest + part).rpartition(b"\n\n")
        if end:
            yield events + end
    if rest:
        yield rest


async def _json(incoming: Request) -> object:
    try:
        return msgspec.json.decode(await incoming.body())
    except (msgspec.DecodeError, RecursionError) as error:
        raise HttpError(400, f"body: is not JSON: {error}", param="body") from None


def _first_found(found: list[tuple[int, int, Any]]) -> Answer:
    """The first answer with status 200, or any."""
    _, status, answer = next((known for known in found if known[1] == 200), found[0])
    return reply(answer, status)
