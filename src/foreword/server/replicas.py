"""Answer operations where one front end stands before several replicas of the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foreword.server.errors import HttpError
from foreword.server.failures import INVALID, NOT_READY
from foreword.server.reply import json_body, reply

CALL_SECONDS = 2.0  # that a replica has for a short request
Called = Sequence[tuple[str, int, Any]]
"""The name of each replica that answered, status and JSON value."""


class Replicas(ABC):
    """The requests that a front end can send to its replicas."""

    @abstractmethod
    async def call_all(self, method: str, path: str, body: object = None, *, seconds: float = CALL_SECONDS) -> Called:
        """Send a request to every replica. Those that are lost, or do not answer within the time, are left out."""

    @abstractmethod
    async def fetch_of(self, name: str, path: str, *, seconds: float = CALL_SECONDS) -> tuple[int, bytes] | None:
        """Return status and content of the answer of one replica to GET. None if it is lost, or answers too late."""

    @abstractmethod
    async def metrics(self) -> bytes:
        """Return the metrics of the front end and of all replicas in Prometheus' text format."""

    @abstractmethod
    async def states(self) -> list[dict[str, Any]]:
        """Return what /ready tells about the replicas, nothing if none takes requests."""

    @abstractmethod
    async def adapters(self) -> Mapping[str, dict[str, Any]]:
        """Return the bodies of the loads of LoRA adapters by name, which a new replica gets before any request."""

    @abstractmethod
    async def keep_adapter(self, name: str, body: dict[str, Any] | None) -> None:
        """Set one of them, or remove it."""

    async def answers(self, request: Request, body: object = None) -> Called:
        """Send a request that has this body to every replica. Raise HttpError 503 if none is ready."""
        method, seconds = (
            "GET" if request.method == "HEAD" else request.method,
            request.scope["operation"].replica_seconds,
        )
        found = await self.call_all(method, request.scope["path"], body, seconds=seconds)
        if not found:
            raise HttpError(NOT_READY, "no replica is ready")
        return found


@dataclass(frozen=True, slots=True)
class Spread:
    """The replicas that answer an operation. name: for the page. answer: of a front end; None: one replica's."""

    name: str
    answer: Callable[[Replicas, Request], Awaitable[Response]] | None = None


def merged(name: str, merge: Callable[[Called], tuple[Any, int]]) -> Spread:
    """Send the request to all replicas; ``merge`` makes a JSON value and a status of their answers."""

    async def answer(replicas: Replicas, request: Request) -> Response:
        body = await json_body(request) if request.method == "POST" else None
        return reply(*merge(await replicas.answers(request, body)))

    return Spread(name, answer)


def first_found(found: Called) -> tuple[Any, int]:
    """Return JSON value and status of the first replica with status 200, or of any."""
    _, status, answer = next((known for known in found if known[1] == 200), found[0])
    return answer, status


def listed(found: Called) -> tuple[Any, int]:
    """Return the items of all replicas' lists, each with the name of its replica."""
    data = [{**item, "replica": name} for name, status, answer in found if status == 200 for item in answer["data"]]
    return {"object": "list", "data": data}, 200


def refused(reason: str) -> Spread:
    """Answer with status 400 where there are several replicas."""

    async def answer(replicas: Replicas, request: Request) -> Response:
        raise HttpError(INVALID, reason)

    return Spread("refused", answer)


ONE = Spread("one")
FIRST = merged("first", first_found)
ALL_LISTED = merged("all", listed)
