"""The routes' description for programs, /openapi.json, made from the functions that read the bodies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from foreword import __version__
from foreword.fields import NUMBER, STRING, Described, Schema
from foreword.server.access import Access
from foreword.server.config import ServerConfig
from foreword.server.reply import reply

PATH = "/openapi.json"
JSON, FORM, EVENTS = "application/json", "multipart/form-data", "text/event-stream"
_NAMED = {"type": "object", "properties": {"message": STRING.schema, "type": STRING.schema}}
ERROR: Schema = {
    "description": "An error.",
    "content": {JSON: {"schema": {"type": "object", "properties": {"error": _NAMED}, "required": ["error"]}}},
}


@dataclass(frozen=True, slots=True)
class Body:
    """What a route takes. parse: reads it. example: one that ``parse`` accepts, with an object for each optional field
    whose own fields are to be described. generates: it may have a ``timeout``, and its answer may be a stream. kind:
    how it is written.
    """

    parse: Callable[[Any], object]
    example: Mapping[str, Any]
    generates: bool = False
    kind: str = JSON

    def schema(self) -> Schema:
        example = Described(self.example)
        self.parse(example)
        found = example.schema()
        if self.generates:
            found["properties"]["timeout"] = {"anyOf": [{**NUMBER.schema, "exclusiveMinimum": 0}, {"type": "null"}]}
        return {**found, "examples": [self.example]}


class Operation(Route):
    """A route that the description has. body: None for GET. media_types: of its answers. The endpoint's docstring is
    the summary.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Any],
        body: Body | None = None,
        *,
        media_types: Sequence[str] = (JSON,),
    ) -> None:
        super().__init__(path, endpoint, methods=["GET" if body is None else "POST"])
        self.body, self.media_types = body, media_types

    def description(self, access: Access) -> Schema:
        """Its OpenAPI "operation"."""
        needed = access.needed(self.path)
        answers = [*self.media_types, *([EVENTS] if self.body is not None and self.body.generates else [])]
        found: Schema = {
            "summary": self.endpoint.__doc__,
            "security": [] if needed is None else [{needed: []}],
            "responses": {
                "200": {"description": "The answer.", "content": {kind: {} for kind in answers}},
                "default": {"$ref": "#/components/responses/error"},
            },
        }
        names = re.findall(r"{(\w+)", self.path)
        if names:
            found["parameters"] = [{"name": n, "in": "path", "required": True, "schema": STRING.schema} for n in names]
        if self.body is not None:
            found["requestBody"] = {"required": True, "content": {self.body.kind: {"schema": self.body.schema()}}}
        return found


def route_of(operations: Sequence[Operation], config: ServerConfig) -> Operation:
    """/openapi.json, which describes the operations and itself."""

    async def openapi(request: Request) -> Response:
        """This description of the routes."""
        return reply(description([*operations, route], Access(config)))

    route = Operation(PATH, openapi)
    return route


def description(operations: Sequence[Operation], access: Access) -> Schema:
    """An OpenAPI document."""
    needed = {access.needed(route.path) for route in operations} - {None}
    paths: Schema = {}
    for route in operations:
        method = "get" if route.body is None else "post"
        paths.setdefault(re.sub(r":\w+}", "}", route.path), {})[method] = route.description(access)
    schemes = {name: {"type": "http", "scheme": "bearer"} for name in needed}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Foreword", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": schemes, "responses": {"error": ERROR}},
    }
