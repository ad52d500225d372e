"""An operation of the server, declared once: its path, who may use it, which replicas answer it, and its errors.

The router, the keys, the front end of replicas, the description and the reference page are loops over the declarations.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from foreword.errors import ConfigError
from foreword.fields import NUMBER, Described, Schema
from foreword.server.context import Context
from foreword.server.errors import OPENAI, Dialect, not_found
from foreword.server.models import Models
from foreword.server.replicas import CALL_SECONDS, ONE, Spread
from foreword.server.reply import form_body, json_body, parsed
from foreword.server.shared import Shared
from foreword.server.time_limit import deadline

T = TypeVar("T")
Access = Literal["public", "key", "admin"]
Method = Literal["GET", "POST", "DELETE"]
Handler = Callable[[Context, Request], Awaitable[Response]]
JSON, FORM = "application/json", "multipart/form-data"


@dataclass(frozen=True, slots=True)
class Body(Generic[T]):
    """The body that an operation expects. parse: converts a JSON object to the request. example: an object that
    ``parse`` accepts, with an object for each optional field whose own fields are to be described. timeout: whether it
    may have that field. form: if the body is a form, its fields that are numbers and truth values. samples: whether
    ``parse`` also takes the sampling parameters that the model suggests.
    """

    parse: Callable[..., T]
    example: Mapping[str, Any]
    timeout: bool = False
    form: frozenset[str] | None = None
    samples: bool = False

    @property
    def kind(self) -> str:
        return JSON if self.form is None else FORM

    async def fields(self, request: Request) -> dict[str, Any]:
        """Return the fields of a request; they may already have been read to find its model. Raise HttpError for a body
        of another kind.
        """
        known: dict[str, Any] | None = request.scope.pop("fields", None)
        if known is not None:
            return known
        if self.form is None:
            return await json_body(request)
        return await form_body(request, self.form)

    async def read(self, request: Request) -> T:
        """Read a request. Raise RequestError or HttpError if it cannot be served as given."""
        return await parsed(self.parse, await self.fields(request), request)

    def parse_for(self, context: Context) -> Callable[[object], T]:
        """Return the function that parses the bodies of a server."""
        return partial(self.parse, suggested=context.engine.engine.suggested) if self.samples else self.parse

    def schema(self) -> Schema:
        """Return the JSON schema of the bodies."""
        example = Described(self.example)
        self.parse(example)
        found = example.schema()
        if self.timeout:
            found["properties"]["timeout"] = {"anyOf": [{**NUMBER.schema, "exclusiveMinimum": 0}, {"type": "null"}]}
        return {**found, "examples": [self.example]}


@dataclass(frozen=True, slots=True)
class OfServer:
    """A handler for the whole server. If it needs a model, it chooses one itself."""

    answer: Callable[[Models, Request], Awaitable[Response]]


def of_shared(answer: Callable[[Shared, Request], Awaitable[Response]]) -> OfServer:
    """Return a handler for data that all models of a server share. It does not load a model."""
    return OfServer(lambda models, request: answer(models.shared, request))


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of the server.

    handler: a function of the context of the model that the request names, or for the whole server. body: None for GET;
    with a body, the method is POST unless it is given. access: who may use it. An operation for admins concerns the
    whole server, so it must declare its replicas. summary: one sentence in the imperative that says what it does.
    details: further sentences. replicas: the replicas that answer it. replica_seconds: the time limit of each replica.
    errors: the form of errors. media_types: those of its answers. is_served: returns whether the model of a server
    supports it. model_field: the field of the body that names the model. Raise ConfigError for declarations that
    contradict this.
    """

    path: str
    handler: Handler | OfServer
    body: Body[Any] | None = None
    _: KW_ONLY
    given_method: Method | None = None
    access: Access
    summary: str
    details: str = ""
    replicas: Spread = ONE
    replica_seconds: float = CALL_SECONDS
    errors: Dialect = OPENAI
    media_types: tuple[str, ...] = (JSON,)
    is_served: Callable[[Context], bool] = lambda context: True
    model_field: str = "model"

    def __post_init__(self) -> None:
        if self.access not in (known := get_args(Access)):
            raise ConfigError(f"{self.path}: access={self.access!r:.80}: must be one of {', '.join(known)}")
        if self.access == "admin" and self.replicas is ONE:
            raise ConfigError(f"{self.path}: replicas: an admin's operation concerns all; say how all answer it")
        if not re.fullmatch(r"[A-Z].*\.", self.summary):
            raise ConfigError(f"{self.path}: summary={self.summary!r:.80}: must be a sentence")

    @property
    def method(self) -> Method:
        return self.given_method or ("GET" if self.body is None else "POST")

    async def context(self, models: Models, request: Request) -> Context:
        """Return the context of the model that a request names in its body or query. It stays loaded until the request
        ends. Raise HttpError as in `Models.using`, and 404 if the model does not support the operation. Raise
        TimeoutError if the time of the request ends before.
        """
        context = models.single
        if context is None:
            name = await self.model_name(request)
            stack: AsyncExitStack = request.scope["stack"]
            is_limited = self.body is not None and self.body.timeout
            when = deadline(request, request.scope["fields"], models.config) if is_limited else None
            async with asyncio.timeout_at(when):
                context = await stack.enter_async_context(models.using(name, request.scope["request_id"]))
        if not self.is_served(context):
            raise not_found(request.method, request.scope["path"])
        return context

    async def model_name(self, request: Request) -> str | None:
        """Return the name of the model that a request gives. The parser checks a value of another type."""
        if self.body is None:
            return request.query_params.get("model")
        fields = request.scope["fields"] = await self.body.fields(request)
        name = fields.get(self.model_field)
        return name if isinstance(name, str) else None

    @property
    def shown_path(self) -> str:
        """Return the path for readers, such as /v1/models/{name}."""
        return re.sub(r":\w+}", "}", self.path)


class Target(NamedTuple):
    """The target of a request. operation: None if there is none with this method and path; the other fields are then
    those of an operation with the same path, or with the path above it. methods: the methods of the path. parameters:
    values in the path.
    """

    operation: Operation | None
    access: Access
    errors: Dialect
    methods: tuple[str, ...]
    parameters: Mapping[str, str]


class Operations:
    """All operations of a server. Raise ConfigError if two have the same method and path."""

    def __init__(self, *tables: Iterable[Operation]) -> None:
        self._by_path: dict[str, dict[str, Operation]] = {}
        for operation in (one for table in tables for one in table):
            methods = self._by_path.setdefault(operation.path, {})
            if methods.setdefault(operation.method, operation) is not operation:
                raise ConfigError(f"{operation.method} {operation.path}: is declared twice")
        self._patterns = [(compile_path(path)[0], methods) for path, methods in self._by_path.items() if "{" in path]

    def __iter__(self) -> Iterator[Operation]:
        return (operation for methods in self._by_path.values() for operation in methods.values())

    def target(self, method: str, path: str) -> Target:
        """Return the target of a request. An unknown path needs a key, and has errors in the form of the operation
        above it.
        """
        methods, parameters = self._at(path)
        operation = methods.get("GET" if method == "HEAD" else method)
        if (near := operation or next(iter(methods.values()), None)) is not None:
            return Target(operation, near.access, near.errors, tuple(methods), parameters)
        above = (one.errors for one in self if path.startswith(f"{one.path}/"))
        return Target(None, "key", next(above, OPENAI), (), {})

    def _at(self, path: str) -> tuple[Mapping[str, Operation], Mapping[str, str]]:
        """Return the operations of a path by their method, and the values in it."""
        if path in self._by_path and "{" not in path:
            return self._by_path[path], {}
        matches = ((match, methods) for pattern, methods in self._patterns if (match := pattern.match(path)))
        return next(((methods, match.groupdict()) for match, methods in matches), ({}, {}))
