"""The front end of replicas that are processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from prometheus_client.core import Metric
from starlette.types import Scope, Send

from foreword.cluster.client import ReplicaLostError, Response, request
from foreword.cluster.cluster import Cluster
from foreword.cluster.front import LOST, Front
from foreword.cluster.metrics import replica_metrics
from foreword.cluster.process import ReplicaProcess
from foreword.cluster.prompts import TOKENS_PER_PIECE, pieces_of
from foreword.errors import CapacityError
from foreword.server.errors import HttpError
from foreword.server.failures import NOT_READY, REPLICA_LOST
from foreword.server.replicas import CALL_SECONDS, Called

OF_CONNECTION = (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"host")
"""Headers of a request or response that concern one connection alone."""

OF_FRONT = (*OF_CONNECTION, b"date", b"x-request-id")
"""Headers of a response that the front end writes itself."""

FULL = (429, 503)
"""Statuses with which a replica refuses what another one may take."""


class ProcessFront(Front):
    """Serve all routes with the replicas of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster

    async def pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        """Answer with the response of a replica, or of another replica if the first did not begin to answer or is
        full.
        """
        num_tokens, pieces = await pieces_of(scope, body) if scope["method"] == "POST" else (1, [])
        tried: set[int] = set()
        while True:
            async with AsyncExitStack() as stack:
                try:
                    number, process = await stack.enter_async_context(
                        self._cluster.chosen(num_tokens, pieces, TOKENS_PER_PIECE, tried)
                    )
                except CapacityError:
                    raise HttpError(NOT_READY, "no replica is ready", headers={"Retry-After": "1"}) from None
                tried.add(number)
                is_last = len(tried) >= len(self._cluster.ready)
                try:
                    response = await stack.enter_async_context(self._request(scope, process, body))
                    if response.status in FULL and not is_last:
                        continue
                    whole = await response.body() if response.is_short else None
                except ReplicaLostError:
                    if is_last:
                        raise HttpError(REPLICA_LOST, LOST, headers={"Retry-After": "1"}) from None
                    continue
                await _answer(response, whole, send)
                return

    async def call_all(self, method: str, path: str, body: object = None, *, seconds: float = CALL_SECONDS) -> Called:
        async def call(number: int, process: ReplicaProcess) -> tuple[str, int, Any] | None:
            try:
                return str(number), *(await process.call(method, path, body, seconds=seconds))
            except ReplicaLostError:
                return None

        found = await asyncio.gather(*(call(*known) for known in self._cluster.ready))
        return [answer for answer in found if answer is not None]

    async def fetch_of(self, name: str, path: str, *, seconds: float = CALL_SECONDS) -> tuple[int, bytes] | None:
        process = next((process for number, process in self._cluster.ready if str(number) == name), None)
        try:
            return None if process is None else await process.fetch("GET", path, seconds=seconds)
        except ReplicaLostError:
            return None

    async def pages(self) -> Iterable[tuple[str, str]]:
        async def page(number: int, process: ReplicaProcess) -> tuple[str, str]:
            try:
                return str(number), (await process.fetch("GET", "/metrics"))[1].decode()
            except ReplicaLostError:
                return str(number), ""

        return await asyncio.gather(*(page(*known) for known in self._cluster.ready))

    def own_metrics(self) -> Iterable[Metric]:
        pids = {number: process.process.pid or 0 for number, process in self._cluster.ready}
        return *super().own_metrics(), *replica_metrics(pids, self._cluster.restarts)

    async def states(self) -> list[dict[str, Any]]:
        ready = dict(self._cluster.ready)
        restarts = enumerate(self._cluster.restarts)
        return [{"replica": n, "ready": n in ready, "restarts": count} for n, count in restarts if ready]

    async def adapters(self) -> Mapping[str, dict[str, Any]]:
        return self._cluster.adapters

    async def keep_adapter(self, name: str, body: dict[str, Any] | None) -> None:
        self._cluster.adapters.pop(name, None)
        if body is not None:
            self._cluster.adapters[name] = body

    def _request(self, scope: Scope, process: ReplicaProcess, body: bytes) -> AbstractAsyncContextManager[Response]:
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        kept = [header for header in self.passed_headers(scope) if header[0] not in OF_CONNECTION]
        headers = [*kept, (b"authorization", b"Bearer " + process.key.encode())]
        return request(process.port, scope["method"], target, headers, body)


async def _answer(response: Response, whole: bytes | None, send: Send) -> None:
    """Forward a response. whole: its body, or None if it arrives in pieces. If the replica is lost in the middle of a
    stream, raise HttpError after the last whole event or line.
    """
    headers = [(name, value) for name, value in response.headers if name not in OF_FRONT]
    if whole:  # a response to HEAD has no body
        headers.append((b"content-length", b"%d" % len(whole)))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    if whole is None:
        try:
            separator = response.separator
            async for part in response.parts() if separator is None else _whole(response, separator):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except ReplicaLostError:
            raise HttpError(REPLICA_LOST, LOST) from None
    await send({"type": "http.response.body", "body": whole or b""})


async def _whole(response: Response, separator: bytes) -> AsyncGenerator[bytes, None]:
    """Yield whole events, or lines, as they arrive."""
    rest = b""
    async for part in response.parts():
        pieces, end, rest = (rest + part).rpartition(separator)
        if end:
            yield pieces + end
    if rest:
        yield rest
