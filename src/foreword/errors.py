"""Exceptions of Foreword. Each message names the request, the field, the value and the fix."""

from __future__ import annotations

import pickle
from typing import Any


class ForewordError(Exception):
    """Base class of all exceptions below. They can be copied and pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (type(self), self.args, {name: _portable(value) for name, value in vars(self).items()})


def _remake(kind: type[ForewordError], args: tuple[Any, ...], attributes: dict[str, Any]) -> ForewordError:
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


def _portable(value: object) -> object:
    """The value, or its text if it cannot be pickled."""
    try:
        pickle.dumps(value)
    except Exception:
        return shown(value)
    return value


def shown(value: object, limit: int = 80) -> str:
    """``repr(value)``, at most ``limit`` characters."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


class ConfigError(ForewordError, ValueError):
    """A configuration that cannot work, such as a KV pool smaller than one request."""


class RequestError(ForewordError, ValueError):
    """A request that cannot be served as given. The engine and its other requests continue."""

    def __init__(self, request_id: str | None, field: str, value: object, reason: str, fix: str) -> None:
        self.request_id, self.field, self.value, self.reason, self.fix = request_id, field, value, reason, fix
        prefix = f"request {request_id!r}: " if request_id is not None else ""
        super().__init__(f"{prefix}{field} = {shown(value)}: {reason}. {fix}")


class CapacityError(ForewordError, RuntimeError):
    """A fixed capacity (rows, blocks of a row, tokens of a step) would be exceeded. Nothing was changed."""


class PlanError(ForewordError, ValueError):
    """A step's plan or tensors break an invariant."""

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        request: str | None = None,
        tensor: str | None = None,
        index: object = None,
        expected: object = None,
        got: object = None,
    ) -> None:
        self.step, self.request, self.tensor, self.index = step, request, tensor, index
        self.expected, self.got = expected, got
        fields = (
            ("step", step),
            ("request", request),
            ("tensor", tensor),
            ("index", index),
            ("expected", expected),
            ("got", got),
        )
        where = ", ".join(f"{k} {v!r}" for k, v in fields if v is not None)
        super().__init__(f"{message} ({where})" if where else message)


class ModelError(ForewordError):
    """A model file is missing, truncated, corrupt or not supported."""


class EngineError(ForewordError, RuntimeError):
    """A request was aborted because the engine failed or was closed. The request itself may be valid."""
