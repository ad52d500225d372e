"""The description of the operations for programs, made from the functions that read their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable

from foreword import __version__
from foreword.fields import STRING, Schema
from foreword.server.access import Keys
from foreword.server.errors import OLLAMA, Dialect
from foreword.server.failures import answered
from foreword.server.operation import JSON, Operation

_NAMED: Schema = {"type": "object", "properties": {"message": STRING.schema, "type": STRING.schema}}
_FORMS: dict[str, Schema] = {"": _NAMED, "_text": STRING.schema}
"""The end of the name of a described failure → what its "error" is: an object, or in Ollama's interface a text."""


def description(operations: Iterable[Operation], keys: Keys) -> Schema:
    """Return an OpenAPI document."""
    paths: Schema = {}
    schemes: Schema = {}
    for operation in operations:
        needed = keys.needed(operation.access)
        paths.setdefault(operation.shown_path, {})[operation.method.lower()] = _described(operation, needed)
        schemes |= {} if needed is None else {needed: {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Foreword", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": schemes, "responses": _failures()},
    }


def _statuses(operation: Operation, needed: str | None) -> list[str]:
    """Return the statuses of failures that concern an operation."""
    concerned = {
        "every": True,
        "key": needed is not None,
        "body": operation.body is not None,
        "engine": operation.body is not None and operation.body.timeout,
    }
    return sorted({str(one.status) for one in answered() if concerned[one.of]})


def _form(dialect: Dialect) -> str:
    return "_text" if dialect is OLLAMA else ""


def _failures() -> Schema:
    """Return the responses of failures, by their status and form."""
    meanings: dict[int, list[str]] = {}
    for one in answered():
        code = "" if one.code is None else f"`{one.code}`: "
        meanings.setdefault(one.status, []).append(f"{code}{one.meaning} {one.remedy}")
    return {
        f"{status}{form}": {"description": "\n".join(found), "content": {JSON: {"schema": _object(error)}}}
        for form, error in _FORMS.items()
        for status, found in meanings.items()
    }


def _object(error: Schema) -> Schema:
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}


def _described(operation: Operation, needed: str | None) -> Schema:
    """Return an OpenAPI "operation". needed: the kind of its key."""
    form = _form(operation.errors)
    found: Schema = {
        "summary": operation.summary,
        "security": [] if needed is None else [{needed: []}],
        "responses": {
            "200": {"description": "The answer.", "content": {kind: {} for kind in operation.media_types}},
            **{status: {"$ref": f"#/components/responses/{status}{form}"} for status in _statuses(operation, needed)},
        },
    }
    if operation.details:
        found["description"] = operation.details
    names = re.findall(r"{(\w+)", operation.path)
    if names:
        found["parameters"] = [{"name": n, "in": "path", "required": True, "schema": STRING.schema} for n in names]
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": {operation.body.kind: {"schema": operation.body.schema()}}}
    return found
