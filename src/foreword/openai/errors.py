"""Convert errors to bodies of responses: the status of each, and the text for those with a code in each interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

from foreword.errors import ContextLengthError, ForewordError, ModelOutputError, RequestError, UnknownAdapterError

Interface = Literal["openai", "anthropic"]

STATUSES: tuple[tuple[type[ForewordError], int, str], ...] = (
    (ModelOutputError, 500, "server_error"),
    (UnknownAdapterError, 404, "not_found_error"),
    (RequestError, 400, "invalid_request_error"),
    (ForewordError, 500, "server_error"),
)
"""Class of errors, HTTP status, OpenAI's type; the first class that an error belongs to counts."""

WORDS: Mapping[str, Mapping[Interface, str]] = {
    ContextLengthError.code: {
        "openai": "This model's maximum context length is {max_model_len} tokens. However, your {part} resulted in "
        "{num_tokens} tokens. Please reduce the length of the {part}.",
        "anthropic": "prompt is too long: {num_tokens} tokens > {longest} maximum.",
    }
}
"""Code of an error → the words that clients of an interface look for. The error's own text follows them."""

PROMPTS = ("prompt", "prompt_token_ids")
"""Fields that the engine and the tokenizer name in errors of a prompt."""
_PARTS = {"messages": "messages", "input": "input", **dict.fromkeys(PROMPTS, "prompt")}


def text_in(interface: Interface, error: ForewordError) -> str:
    """Return the text of an error. If its code has words of the interface, the text begins with them."""
    if not isinstance(error, RequestError) or error.code is None or error.code not in WORDS:
        return str(error)
    part = _PARTS.get(error.field.partition("[")[0], "request")
    return f"{WORDS[error.code][interface].format(part=part, **vars(error))} {error}"


def status_of(error: ForewordError) -> tuple[int, str]:
    """Return the HTTP status and OpenAI's type of an error."""
    return next((status, kind) for known, status, kind in STATUSES if isinstance(error, known))


def as_sent(error: ForewordError) -> ForewordError:
    """Return an error with the field that a client has given: it names an adapter as its model."""
    return error.renamed({"lora": "model"}) if isinstance(error, UnknownAdapterError) else error


def error_body(error: ForewordError) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and OpenAI's body for a request that cannot be served."""
    error = as_sent(error)
    (status, kind), param, code = status_of(error), None, None
    if isinstance(error, RequestError) and status < 500:
        param, code = error.field, error.code
    return status, {"error": {"message": text_in("openai", error), "type": kind, "param": param, "code": code}}


@contextmanager
def named(field: str, origins: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Let a RequestError in the block name the field of the body from which its own field comes: see
    `RequestError.renamed`.

    field: the field with the prompt or all messages. origins: the paths of further fields.
    """
    known = dict.fromkeys(PROMPTS, field)
    try:
        yield
    except RequestError as error:
        if error.field == "messages":
            known["messages"] = field
        raise error.renamed({**known, **origins}) from None
