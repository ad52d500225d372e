"""Settings: each is declared once, as a field of a frozen dataclass.

    @dataclass(frozen=True, kw_only=True)
    class Limits:
        max_num_seqs: int = setting(256, "Requests that run at the same time.", least=1, most=2**16)

        def __post_init__(self) -> None:
            check_settings(self)

Checks, messages, command lines, environment variables, configuration files and the page of settings are loops over
`settings_of` of such classes.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from foreword.errors import ConfigError, shown
from foreword.names import advice

_SETTING = "setting"
_SIZE = re.compile(r"\s*(\d{1,18})(?:\.(\d{1,18}))?\s*(?:([KMGT])(i?))?B?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting.

    name: of the option. kind: the type of its value, or of each of its values if it is ``repeated``: bool, int, float
    or str. optional: None is a value too. choices: the only texts, if there are some. least, most: the range of a
    number. unit: "bytes" also takes texts such as "2GiB". value_name: stands for the value in help.
    fix: what the error of another choice recommends; "": the most similar choice.
    convert: reads the value instead of the checks of its kind; ValueError with the reason if it cannot.
    decoders_only: encoders refuse any value but the default.
    """

    name: str = ""
    kind: type = str
    default: object = None
    help: str = ""
    optional: bool = False
    repeated: bool = False
    choices: tuple[str, ...] = ()
    least: float = 0
    most: float = 2**31
    unit: str = ""
    value_name: str = ""
    fix: str = ""
    convert: Callable[[Any], Any] | None = None
    decoders_only: bool = False

    @property
    def is_number(self) -> bool:
        return self.kind in (int, float)

    def expected(self) -> str:
        """Say which values are valid: "an integer from 1 to 65536, or None"."""
        if self.choices:
            one = f"one of {', '.join(map(repr, self.choices))}"
        elif self.is_number:
            one = f"{'an integer' if self.kind is int else 'a number'} from {_plain(self.least)} to {_plain(self.most)}"
            one += ', or a size such as "2GiB"' * (self.unit == "bytes")
        else:
            one = "True or False" if self.kind is bool else "a text that is not empty"
        one = f"a list, each item {one}" if self.repeated else one
        return f"{one}, or None" if self.optional else one

    def text_of(self, value: object) -> str:
        """Return a value as users write it: "2GiB" for a number of bytes."""
        if self.unit == "bytes" and isinstance(value, int):
            for power, prefix in ((30, "G"), (20, "M"), (10, "K")):
                if value and value % (1 << power) == 0:
                    return f"{value >> power}{prefix}iB"
        return str(value)

    def read(self, value: Any) -> Any:
        """Return the value of a text, such as one of a command line; others are as for `checked`. ConfigError."""
        if isinstance(value, str) and self.is_number and not self.unit:
            with suppress(ValueError):
                value = self.kind(value)
        return self.checked(value)

    def checked(self, value: Any) -> Any:
        """Return the value as its owner keeps it. ConfigError with the name, the value and what is expected."""
        if value is None and self.optional:
            return None
        try:
            if not self.repeated:
                return self._one(value)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise ValueError
            return tuple(map(self._one, value))
        except ValueError as error:
            reason = str(error) or f"expected {self.expected()}"
            raise ConfigError(f"{self.name}={shown(value)}: {reason}") from None

    def _one(self, value: Any) -> Any:
        if self.convert is not None:
            return self.convert(value)
        if self.unit == "bytes" and isinstance(value, str):
            value = bytes_of(value)
        if self.kind is bool:
            if not isinstance(value, bool):
                raise ValueError
        elif self.kind is str:
            if not isinstance(value, str) or not value:
                raise ValueError
            if self.choices and value not in self.choices:
                raise ValueError(f"must be {self.expected()}. {self.fix or advice(value, self.choices, '')}".rstrip())
        else:
            value = self._number(value)
        return value

    def _number(self, value: Any) -> float:
        if isinstance(value, bool):
            raise ValueError
        try:
            number = operator.index(value) if self.kind is int else float(operator.pos(value))
        except MemoryError:
            raise
        except Exception:  # whatever the value's own methods raise: it gives no number
            raise ValueError from None
        if not self.least <= number <= self.most:
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError
            raise ValueError(f"must be from {_plain(self.least)} to {_plain(self.most)}" + ", or None" * self.optional)
        return number


def setting(default: Any, help: str, **declared: Any) -> Any:
    """Declare a field of a settings class. declared: other fields of `Setting`, apart from those its type tells."""
    return _field(Setting(default=default, help=help, **declared))


def setting_of(owner: type, name: str) -> Any:
    """Declare a field like that of another settings class."""
    return _field(settings_of(owner)[name])


def _field(given: Setting) -> Any:
    return field(default=given.default, metadata={_SETTING: given})


def settings_of(owner: type) -> Mapping[str, Setting]:
    """Return the settings that a class declares, by the names of their fields."""
    return _settings_of(owner)


@cache
def _settings_of(owner: Any) -> Mapping[str, Setting]:
    hints = get_type_hints(owner)
    declared = {item.name: item.metadata[_SETTING] for item in fields(owner) if _SETTING in item.metadata}
    return {name: _typed(replace(given, name=name), hints[name]) for name, given in declared.items()}


def check_settings(values: Any) -> None:
    """Check, and convert where that is meant, each setting of an instance that is being made. Raise ConfigError."""
    for name, known in settings_of(type(values)).items():
        value = getattr(values, name)
        if (kept := known.checked(value)) is not value:
            object.__setattr__(values, name, kept)


def check_of_encoder(values: Any) -> None:
    """Raise ConfigError for a setting of an instance that only decoders have, and that has not its default."""
    for name, known in settings_of(type(values)).items():
        if known.decoders_only and (value := getattr(values, name)) != known.default:
            raise ConfigError(f"{name}={value!r}: only decoders have it, and the model is an encoder; leave it out")


def values_of(values: Any) -> dict[str, Any]:
    """Return the settings of an instance as a dictionary."""
    return {name: getattr(values, name) for name in settings_of(type(values))}


def bytes_of(text: str) -> int:
    """Return the number of bytes of a size: "512", "1.5GB" (10⁹), "2GiB" or "2Gi" (2³⁰). Raise ValueError."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError
    whole, part, prefix, binary = match.groups("")
    factor: int = (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " ")
    if part and factor == 1:
        raise ValueError
    return int(int(whole + part) * factor // 10 ** len(part))


def _typed(given: Setting, hint: Any) -> Setting:
    """Return the setting with what the annotation of its field says."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    optional = NoneType in parts
    [hint, *others] = [part for part in parts if part is not NoneType]
    if given.convert is not None or others:
        return replace(given, optional=optional, repeated=given.repeated or get_origin(hint) is tuple)
    if get_origin(hint) is tuple:
        return replace(given, kind=get_args(hint)[0], repeated=True)
    if get_origin(hint) is Literal:
        return replace(given, choices=get_args(hint), optional=optional)
    return replace(given, kind=hint, optional=optional)


def _plain(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)
