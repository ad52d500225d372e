"""The page of the errors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import foreword
from foreword import ForewordError
from foreword.anthropic.response import KIND_OF_STATUS
from foreword.openai.errors import WORDS, status_of
from foreword.server.failures import FAILURES, Failure


def page() -> str:
    """Return the page in Markdown."""
    lines = [
        "# Errors",
        "",
        "All exceptions can be imported from `foreword`, for example `from foreword import RequestError`. A message",
        "names the request (if there is one), the field, the value, and the fix. A `RequestError` has the parts of its",
        "message as attributes: `request_id`, `field`, `value`, `reason` and `fix`. Some errors also have a `code`.",
        "Parameters are checked when an object is created: `SamplingParams(temperature=-1.0)` raises an error.",
        "",
        "| exception | is a | when | HTTP status | type for OpenAI's and Anthropic's clients |",
        "|---|---|---|---|---|",
        *map(_line, _classes()),
        "",
        "## Errors of the server",
        "",
        "In OpenAI's form of errors, `error.code` has the code, or null if there is none. Every status of 500 or more",
        "is logged as a line of JSON with the id of the request (`X-Request-Id`) and the reason.",
        "",
        "| status | code | when | what the client should do |",
        "|---|---|---|---|",
        *(f"| {one.status} | {_code(one)} | {one.meaning} | {one.remedy} |" for one in FAILURES),
        "",
        "## Texts that clients look for",
        "",
        "The messages of these errors begin with a text that clients of the interface look for. Foreword's own text",
        "follows.",
        "",
        "| code | text for OpenAI's clients | text for Anthropic's clients |",
        "|---|---|---|",
        *(f"| `{code}` | {words['openai']} | {words['anthropic']} |" for code, words in WORDS.items()),
        "",
        "`make pages` writes this page from the classes and from the tables of `foreword.openai.errors` and",
        "`foreword.server.failures`.",
    ]
    return "\n".join(lines) + "\n"


def _code(one: Failure) -> str:
    return "" if one.code is None else f"`{one.code}`"


def _classes() -> Iterator[type[ForewordError]]:
    """Yield the exceptions, each behind its base."""
    yield ForewordError
    found = (getattr(foreword, name) for name in foreword.__all__)
    yield from sorted(
        (one for one in found if inspect.isclass(one) and issubclass(one, ForewordError) and one is not ForewordError),
        key=lambda one: [base.__name__ for base in reversed(one.__mro__)],
    )


def _line(kind: type[ForewordError]) -> str:
    bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
    when = " ".join(inspect.getdoc(kind).partition("\n\n")[0].split())  # type: ignore[union-attr]
    if kind is ForewordError:
        return f"| `{kind.__name__}` | {bases} | {when} | | |"
    status, name = status_of(kind.__new__(kind))
    anthropic = KIND_OF_STATUS.get(status, "api_error")
    return f"| `{kind.__name__}` | {bases} | {when} | {status} | `{name}`, `{anthropic}` |"
