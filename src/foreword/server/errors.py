"""Errors as responses, in the form of the interface that a request belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foreword import anthropic, ollama
from foreword.errors import EngineError, ForewordError, StepError
from foreword.openai import error_body, error_frame
from foreword.openai.errors import Interface, as_sent, text_in
from foreword.server.failures import ENGINE_CLOSED, FAILED, NOT_FOUND, TIMEOUT, Failure, failure

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class HttpError(Exception):
    """A request that is answered with a status. failure: its row in the table; param: the field that is wrong; of: the
    error that it tells, which may have words of its own in each interface.
    """

    def __init__(
        self,
        failure: Failure,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        of: ForewordError | None = None,
    ) -> None:
        super().__init__(message)
        self.failure, self.status, self.code = failure, failure.status, failure.code
        self.param, self.headers, self.of = param, dict(headers or {}), of

    def text_in(self, interface: Interface) -> str:
        return str(self) if self.of is None else text_in(interface, self.of)

    @property
    def type(self) -> str:
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


def not_found(method: str, path: str) -> HttpError:
    """Return the error for a route that does not exist."""
    return HttpError(NOT_FOUND, f"{method} {path}: Not Found")


def as_http_error(error: Exception) -> HttpError:
    """Return any failure of a request as one with a status, without details of what is wrong inside the server."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, TimeoutError):
        return HttpError(TIMEOUT, "the request's time is over")
    if isinstance(error, StepError):
        return HttpError(FAILED, "a step of the engine failed, and the request with it. Send it again")
    if isinstance(error, ForewordError):
        error = as_sent(error)
        status, body = error_body(error)
        is_closed = isinstance(error, EngineError) and "closed" in str(error)
        found = ENGINE_CLOSED if is_closed else failure(status, body["error"]["code"])
        return HttpError(found, str(error), param=body["error"]["param"], of=error)
    return HttpError(FAILED, f"the server failed: {type(error).__name__}")


def openai_error(error: HttpError) -> dict[str, Any]:
    """Return an error in the form of OpenAI."""
    return {"error": {"message": error.text_in("openai"), "type": error.type, "param": error.param, "code": error.code}}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form in which an interface writes errors. body: the JSON value. event: the name of the event that ends
    a failed stream. lines: streams are lines of JSON, not events.
    """

    body: Callable[[HttpError], dict[str, Any]] = openai_error
    event: str | None = None
    lines: bool = False

    def frame(self, error: HttpError) -> bytes:
        """Return the last frame of a stream that failed."""
        if self.lines:
            return ollama.line(self.body(error))
        name = b"" if self.event is None else f"event: {self.event}\n".encode()
        return name + error_frame(self.body(error))


OPENAI = Dialect()
OLLAMA = Dialect(lambda error: ollama.error_body(str(error)), lines=True)
ANTHROPIC = Dialect(lambda error: anthropic.error_body(error.status, error.text_in("anthropic")), event="error")
