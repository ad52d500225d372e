"""Each answer of a server to a request that fails is a row of one table."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import foreword
from foreword.errors import ForewordError, RequestError
from foreword.openai.errors import STATUSES
from foreword.server import errors, failures
from foreword.server.errors import TYPES, as_http_error, openai_error
from foreword.server.failures import CLOSED, FAILURES, answered, failure

SOURCE = Path(foreword.__file__).parent
RAISERS = [path for path in SOURCE.rglob("*.py") if "HttpError(" in path.read_text()]
ROWS = {name for name, value in vars(failures).items() if isinstance(value, failures.Failure)}


def classes(of: type[ForewordError] = ForewordError) -> list[type[ForewordError]]:
    return [of, *(found for one in of.__subclasses__() for found in classes(one))]


def test_a_status_and_a_code_name_one_row():
    assert len({(one.status, one.code) for one in FAILURES}) == len(FAILURES) == len(ROWS)
    codes = [one.code for one in FAILURES if one.code is not None]
    assert len(set(codes)) == len(codes)
    assert set(answered()) == set(FAILURES) - {CLOSED}
    for one in answered():
        assert one.meaning.endswith(".")
        assert one.remedy.endswith(".")
        assert 400 <= one.status < 600


@pytest.mark.parametrize("path", RAISERS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_error_over_http_is_made_of_a_row(path):
    """The first argument of each call is the name of a row, or, where any exception becomes one, is looked up."""
    calls = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "HttpError"
    ]
    names = {call.args[0].id for call in calls if isinstance(call.args[0], ast.Name)}
    assert len(calls) == len([call for call in calls if isinstance(call.args[0], ast.Name)])
    assert names - {"found"} <= ROWS
    assert "found" not in names or path == Path(errors.__file__)


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_every_exception_becomes_a_row(kind):
    error = kind.__new__(kind, "reason")
    vars(error).update(
        {"field": "x", "num_tokens": 3, "longest": 2, "max_model_len": 2} if issubclass(kind, RequestError) else {}
    )
    found = as_http_error(error)
    assert failure(found.status, found.code) in FAILURES
    assert {status for _, status, _ in STATUSES} | TYPES.keys() <= {one.status for one in FAILURES}


def test_any_other_exception_becomes_a_row():
    for error in (TimeoutError(), ValueError("a secret"), MemoryError()):
        found = as_http_error(error)
        assert failure(found.status, found.code) in FAILURES
        assert "secret" not in openai_error(found)["error"]["message"]
