"""Exceptions of Foreword. Each message names the request, the field, the value and the fix."""

from __future__ import annotations

import reprlib

_SHORT = reprlib.Repr()
"""Writes the beginning of any value, also of one whose own ``repr`` fails, nests deeply or is long."""
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 40


class ForewordError(Exception):
    """Base class of all exceptions below."""


class ConfigError(ForewordError, ValueError):
    """A configuration that cannot work, such as a KV pool smaller than one request."""


class RequestError(ForewordError, ValueError):
    """A request that cannot be served as given. The engine and its other requests continue."""

    def __init__(self, request_id: str | None, field: str, value: object, reason: str, fix: str) -> None:
        self.request_id, self.field, self.value, self.reason, self.fix = request_id, field, value, reason, fix
        shown = _SHORT.repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        prefix = f"request {request_id!r}: " if request_id is not None else ""
        super().__init__(f"{prefix}{field} = {shown}: {reason}. {fix}")


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
