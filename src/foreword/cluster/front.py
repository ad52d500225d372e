"""The front end of the server's replicas, which are processes or Ray's replicas."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.cluster.metrics import Page, merged, responses_by_status
from foreword.server.app import behind_gate
from foreword.server.client import CLIENT
from foreword.server.config import ServerConfig
from foreword.server.operation import Operation
from foreword.server.replicas import Replicas

LOST = "the replica ended while it answered; send the request again"

KEPT_BACK = frozenset((b"authorization", b"x-api-key", b"x-request-id", b"origin", b"expect", CLIENT))
"""Headers of requests that concern the front end alone, which has checked them."""


class Front(Replicas):
    """An ASGI application with every operation: some concern all replicas, and one replica answers each of the
    others.
    """

    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation: Operation = scope["operation"]
        request, answer = Request(scope, receive), operation.replicas.answer
        if answer is None:
            await self.pass_on(scope, await request.body(), send)
        else:
            await (await answer(self, request))(scope, receive, send)

    def behind_gate(self, config: ServerConfig) -> ASGIApp:
        """Return the application with the checks of the server's keys and limits in front of it."""
        return behind_gate(self, config, self.responses)

    @abstractmethod
    async def pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        """Answer with the response of one replica."""

    def passed_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return the headers of the forwarded request."""
        kept = [(name, value) for name, value in scope["headers"] if name not in KEPT_BACK]
        return [*kept, (b"x-request-id", scope["request_id"].encode()), scope["requester"].header]

    @abstractmethod
    async def pages(self) -> Iterable[tuple[str, str]]:
        """Return the name and the metrics of every replica."""

    def own_metrics(self) -> Iterable[Metric]:
        """Return the metrics of the front end itself."""
        return (responses_by_status(self.responses),)

    async def metrics(self) -> bytes:
        return Page([*self.own_metrics(), *merged(await self.pages())]).text()
