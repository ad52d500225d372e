"""Declarations of operations, and what is found for a path."""

import pytest

from foreword.errors import ConfigError
from foreword.server.errors import ANTHROPIC, OPENAI
from foreword.server.operation import Operation, Operations
from foreword.server.operations import OPERATIONS


async def handler(context, request): ...


def declared(path="/x", **fields):
    return Operation(path, handler, **{"access": "key", "summary": "Do it.", **fields})


def test_a_declaration_without_access_or_summary_fails():
    with pytest.raises(TypeError, match="'access' and 'summary'"):
        Operation("/x", handler)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"access": "open"}, "/x: access='open': must be one of public, key, admin"),
        ({"access": None}, "/x: access=None"),
        ({"access": "admin"}, "/x: replicas: an admin's operation concerns all"),
        ({"summary": "One of them"}, "/x: summary='One of them': must be a sentence"),
        ({"summary": "what it is."}, "must be a sentence"),
    ],
)
def test_a_declaration_that_contradicts_itself_fails(fields, message):
    with pytest.raises(ConfigError, match=message):
        declared(**fields)


def test_a_method_and_path_is_declared_once():
    with pytest.raises(ConfigError, match="GET /x: is declared twice"):
        Operations([declared()], [declared("/y"), declared()])


@pytest.mark.parametrize(
    ("method", "path", "found", "access", "errors", "methods", "parameters"),
    [
        ("GET", "/requests", "/requests", "admin", OPENAI, ("GET",), {}),
        ("HEAD", "/requests", "/requests", "admin", OPENAI, ("GET",), {}),
        ("POST", "/requests", None, "admin", OPENAI, ("GET",), {}),
        ("GET", "/requests/a/why", "/requests/{id}/why", "key", OPENAI, ("GET",), {"id": "a"}),
        ("GET", "/requests/{id}/why", "/requests/{id}/why", "key", OPENAI, ("GET",), {"id": "{id}"}),
        ("GET", "/requests/a/b/why", None, "key", OPENAI, (), {}),
        ("GET", "/v1/models/a/b", "/v1/models/{name:path}", "key", OPENAI, ("GET",), {"name": "a/b"}),
        ("POST", "/v1/messages", "/v1/messages", "key", ANTHROPIC, ("POST",), {}),
        ("POST", "/v1/messages/batches", None, "key", ANTHROPIC, (), {}),
        ("POST", "/v1/messages2", None, "key", OPENAI, (), {}),
        ("GET", "/", "/", "public", OPENAI, ("GET",), {}),
        ("GET", "", None, "key", OPENAI, (), {}),
        ("GET", "/health/", None, "key", OPENAI, (), {}),
    ],
)
def test_a_path_has_the_declared_access_and_errors_whatever_the_method(
    method, path, found, access, errors, methods, parameters
):
    target = OPERATIONS.target(method, path)
    assert (target.operation and target.operation.path) == found
    assert target[1:] == (access, errors, methods, parameters)
