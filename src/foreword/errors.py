"""Exceptions of Foreword. Each message names the request, the field, the value and the fix."""

from __future__ import annotations

import pickle
import re
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, ClassVar, TypeVar

from foreword.names import advice

T = TypeVar("T")
E = TypeVar("E", bound="ForewordError")


class _Short(reprlib.Repr):
    """Writes the beginning of any value, also of one whose own ``repr`` fails, nests deeply or is long."""

    def repr_int(self, value: int, level: int) -> str:
        try:
            return super().repr_int(value, level)
        except ValueError:  # Python writes no integer of so many digits
            return f"<int of {value.bit_length()} bits>"


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRETS = frozenset({"key", "keys", "password", "passwords", "secret", "secrets", "token"})
_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 40


class ForewordError(Exception):
    """Base class of all exceptions of Foreword. They can be copied and pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (type(self), self.args, {name: _portable(value) for name, value in vars(self).items()})


def _remake(kind: type[E], args: tuple[Any, ...], attributes: dict[str, Any]) -> E:
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


def _portable(value: object) -> object:
    """Return the value, or its text if it cannot be pickled."""
    try:
        pickle.dumps(value)
    except Exception:
        return shown(value)
    return value


def reason_of(error: OSError | ValueError) -> str:
    """Return why a file cannot be read or written, without its name where the system gives the reason."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def known_keywords(cls: type[T]) -> type[T]:
    """Make a dataclass raise a TypeError with advice for an unknown keyword."""
    init, names = cls.__init__, frozenset(field.name for field in fields(cls))  # type: ignore[arg-type]

    @wraps(init)
    def __init__(self: T, *args: Any, **values: Any) -> None:
        try:
            init(self, *args, **values)
        except TypeError:
            for name in values.keys() - names:
                fix = advice(name, names, f"The parameters are {', '.join(sorted(names))}.")
                raise TypeError(f"{cls.__name__} has no parameter {name!r}. {fix}") from None
            raise

    cls.__init__ = __init__  # type: ignore[assignment, method-assign]
    return cls


def shown(value: object) -> str:
    """Return the beginning of ``repr(value)``, at most 80 characters."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def setting_text(name: str, value: object, *, is_known: bool = False) -> str:
    """Return "name=value" for a message, or the name alone if its value, or a part of it, may be a secret. is_known:
    the name is that of a setting without secrets, whatever words it has.
    """
    return name if _may_be_secret("" if is_known else name, value) else f"{name}={shown(value)}"


def _may_be_secret(name: str, value: object) -> bool:
    parts: list[tuple[object, object]] = [(name, value)]
    while parts:
        of, inner = parts.pop()
        if isinstance(of, str) and not _SECRETS.isdisjoint(word.lower() for word in _WORD.findall(of)):
            return True
        if isinstance(inner, dict):
            parts.extend(inner.items())
        elif isinstance(inner, list | tuple):
            parts.extend(("", item) for item in inner)
    return False


class ConfigError(ForewordError, ValueError):
    """A configuration cannot work, for example because the KV pool is smaller than one request."""


class RequestError(ForewordError, ValueError):
    """A request cannot be served as given. The engine and its other requests continue.

    code: a word by which programs recognise some of these errors; None for most errors.
    """

    code: ClassVar[str | None] = None

    def __init__(self, request_id: str | None, field: str, value: object, reason: str, fix: str) -> None:
        field = field if len(field) <= 200 else f"{field[:197]}..."  # clients can give names of any length
        self.request_id, self.field, self.value, self.reason, self.fix = request_id, field, value, reason, fix
        super().__init__(self._message())

    def _message(self) -> str:
        prefix = f"request {self.request_id!r}: " if self.request_id is not None else ""
        return f"{prefix}{self.field} = {shown(self.value)}: {self.reason}. {self.fix}"

    def renamed(self, origins: Mapping[str, str]) -> RequestError:
        """Return the same error of the field that this one was made from: with {"messages[0]": "input[1]"} one of
        ``messages[0].role`` is one of ``input[1].role``. The longest name counts.
        """
        for name in sorted(origins, key=len, reverse=True):
            rest = self.field.removeprefix(name)
            if self.field.startswith(name) and rest[:1] in ("", ".", "["):
                return self._with(field=origins[name] + rest)
        return self

    def of_request(self, request_id: str) -> RequestError:
        """Return the same error of a request."""
        return self._with(request_id=request_id)

    def _with(self, **values: str) -> RequestError:
        made = _remake(type(self), self.args, {**vars(self), **values})
        made.args = (made._message(),)
        return made


class ContextLengthError(RequestError):
    """A prompt, or a prompt with its output, has more tokens than the model supports.

    num_tokens: a lower bound of its length. longest: the length that would fit. max_model_len: the limit for a prompt
    with its output.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        request_id: str | None,
        field: str,
        value: object,
        reason: str,
        fix: str,
        *,
        num_tokens: int,
        longest: int,
        max_model_len: int,
    ) -> None:
        self.num_tokens, self.longest, self.max_model_len = num_tokens, longest, max_model_len
        super().__init__(request_id, field, value, reason, fix)


class UnknownAdapterError(RequestError):
    """A request is for a LoRA adapter that is not loaded, or no longer loaded."""

    code = "model_not_found"


class ModelOutputError(RequestError):
    """The model computed values for a request that are not numbers. The request itself may be valid."""


class CapacityError(ForewordError, RuntimeError):
    """A fixed capacity (rows, blocks of a row, tokens of a step) would be exceeded. Nothing was changed.

    request, tensor, index: the place of the error. expected: the largest value that fits. got: the given value. Each is
    None if there is no such value.
    """

    def __init__(
        self,
        message: str = "",
        *,
        request: str | None = None,
        tensor: str | None = None,
        index: object = None,
        expected: object = None,
        got: object = None,
    ) -> None:
        self.request, self.tensor, self.index, self.expected, self.got = request, tensor, index, expected, got
        super().__init__(message)


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


class UnsupportedModelError(ModelError):
    """The architecture of a model is not supported."""


class EngineError(ForewordError, RuntimeError):
    """A request was aborted because the engine failed or was closed. The request itself may be valid."""


class StepError(EngineError):
    """A step of the engine failed, and with it every request in the step. ``__cause__`` is the original error. The
    message contains its text, which may name other requests, so a server does not send it to clients.
    """

    def __init__(self, cause: Exception) -> None:
        notes = "".join(f" ({note})" for note in getattr(cause, "__notes__", ()))
        super().__init__(f"a step failed, and its requests with it: {type(cause).__name__}: {cause}{notes}")
        self.__cause__ = cause
