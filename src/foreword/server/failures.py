"""Every way in which a request can fail: its status, its code, what it means and what the client should do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from foreword.errors import ContextLengthError

Concerned = Literal["every", "key", "body", "engine"]


class Failure(NamedTuple):
    """code: a word for programs, which tells it from others of its status; None for the ordinary one. of: the
    operations that it concerns: those with a key, with a body, or whose body is for the engine.
    """

    status: int
    code: str | None
    meaning: str
    remedy: str
    of: Concerned = "every"


# fmt: off
INVALID = Failure(
    400, None,
    "The request cannot be served as given, or a header that may occur only once, such as `Authorization`, occurs "
    "twice.",
    "Correct the field that `param` and the message name.",
)
CONTEXT_LENGTH = Failure(
    400, ContextLengthError.code,
    "The prompt, or the prompt with its output, has more tokens than the model takes.",
    "Send a shorter prompt, or ask for fewer tokens.", "engine",
)
NOT_STORED = Failure(
    400, "not_stored",
    "The server has no `data_directory`, so it stores no files and batches, and its replicas store no responses.",
    "Start the server with a data directory.",
)
STORAGE_FULL = Failure(
    400, "storage_full",
    "The stored files, batches and responses would take more than `max_data_bytes`, or there are too many of them.",
    "Delete some.", "body",
)
ANSWER_TOO_LARGE = Failure(
    400, "answer_too_large",
    "The answer may take more memory than `max_answer_bytes`.",
    "Ask for fewer prompts, completions, tokens or log-probabilities.", "engine",
)
INVALID_API_KEY = Failure(
    401, "invalid_api_key",
    "There is no valid key in the request.", "Send the header `Authorization: Bearer KEY`.", "key",
)
FOREIGN_ORIGIN = Failure(
    403, None,
    "A form, or a POST without a body, is from a web page that may not call the server.",
    "Add the origin of the page to `cors_origin`.", "body",
)
FORBIDDEN = Failure(
    403, "forbidden",
    "The adapter is outside of `adapter_directory`, or there is no such directory.",
    "Give a path below that directory.", "body",
)
NOT_FOUND = Failure(
    404, None, "The route, request or adapter does not exist, or the model does not support the route.",
    "Check the name.",
)
MODEL_NOT_FOUND = Failure(
    404, "model_not_found",
    "No model or adapter has this name.", "Use one of those that the message, or `GET /v1/models`, lists.",
)
METHOD_NOT_ALLOWED = Failure(
    405, None, "The route does not support this method.", "Use a method that the header `Allow` lists.",
)
TOO_SLOW = Failure(
    408, None, "The request did not arrive within `receive_timeout`.", "Send the whole request in less time.",
)
BODY_TOO_LONG = Failure(
    413, None, "The body is longer than `max_body_bytes`.", "Send a shorter one.", "body",
)
WRONG_BODY = Failure(
    415, None,
    "The body is not JSON (or not a form, if the route expects one), or it is compressed.",
    "Send the body in the form that the message asks for, with its `Content-Type`.",
)
EXPECTATION = Failure(
    417, None, "The header `Expect` asks for more than `100-continue`.", "Leave the header out.",
)
UNKNOWN_HOST = Failure(
    421, "unknown_host",
    "The header `Host` has a name that is not one of `allowed_host`.",
    "Use another name, or add this one to the setting.",
)
FULL = Failure(
    429, "full",
    "The server is full.", "Send it again after as many seconds as the header `Retry-After` has.", "body",
)
KEY_LIMIT = Failure(
    429, "key_limit",
    "The API key has reached one of its limits: `key_limit`.",
    "Send it again after as many seconds as the header `Retry-After` has.", "engine",
)
HEAD_TOO_LONG = Failure(
    431, None, "The head is longer than `max_header_bytes`.", "Send fewer or shorter headers.",
)
CLOSED = Failure(
    499, None, "The client has closed the connection. Only the log and the metrics have this status.", "",
)
FAILED = Failure(
    500, None,
    "A step failed, or the model computed values that are not numbers. The server continues.",
    "Send it again. If it fails again, give the header `X-Request-Id` to the operator.",
)
ENGINE_CLOSED = Failure(
    503, None, "The engine is closed.", "Use another server.",
)
MODEL_LOADING = Failure(
    503, "model_loading",
    "The model is being loaded, or waits for memory that other models use, and was not ready within `load_timeout`.",
    "Send it again after as many seconds as the header `Retry-After` has.", "engine",
)
MODEL_FAILED = Failure(
    503, "model_failed",
    "The model could not be loaded, for example because a file is damaged or there is too little memory. The message "
    "has the reason.",
    "Correct what the message names. The next request tries to load it again.", "engine",
)
STORE_FAILED = Failure(
    503, "store_failed",
    "The files in `data_directory` cannot be read or written: another program has locked the database, the directory "
    "is missing or read-only, or the disk fails. The message says which.",
    "Send it again a little later. If that does not help, correct the problem that the message names.", "key",
)
NOT_READY = Failure(
    503, "not_ready", "No replica is ready.", "Send it again a little later.",
)
REPLICA_LOST = Failure(
    503, "replica_lost", "The replica ended while it answered.", "Send it again; another one answers.",
)
STOPPED = Failure(
    503, "stopped", "The server is being stopped.", "Use another server.",
)
TIMEOUT = Failure(
    504, "timeout",
    "The answer took longer than the limit: `timeout` in the body, the header `X-Request-Timeout`, or the server's "
    "setting.",
    "Ask for less, or allow more time.", "engine",
)
DISK_FULL = Failure(
    507, "disk_full",
    "The disk of `data_directory` is full, because it has less space than `max_data_bytes`.",
    "Free some space on the disk, or delete files and responses.", "key",
)
# fmt: on
FAILURES = (
    INVALID,
    CONTEXT_LENGTH,
    NOT_STORED,
    STORAGE_FULL,
    ANSWER_TOO_LARGE,
    INVALID_API_KEY,
    FOREIGN_ORIGIN,
    FORBIDDEN,
    NOT_FOUND,
    MODEL_NOT_FOUND,
    METHOD_NOT_ALLOWED,
    TOO_SLOW,
    BODY_TOO_LONG,
    WRONG_BODY,
    EXPECTATION,
    UNKNOWN_HOST,
    FULL,
    KEY_LIMIT,
    HEAD_TOO_LONG,
    CLOSED,
    FAILED,
    ENGINE_CLOSED,
    MODEL_LOADING,
    MODEL_FAILED,
    STORE_FAILED,
    NOT_READY,
    REPLICA_LOST,
    STOPPED,
    TIMEOUT,
    DISK_FULL,
)  # fmt: skip
_KNOWN = {(one.status, one.code): one for one in FAILURES}


def failure(status: int, code: str | None = None) -> Failure:
    """Return the row of a status and a code. Raise KeyError if there is none."""
    return _KNOWN[status, code]


def answered() -> Iterator[Failure]:
    """Yield those that a client can read, in order of their status."""
    return (one for one in FAILURES if one is not CLOSED)
