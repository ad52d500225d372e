"""Settings: each is declared once, as a field of a frozen dataclass.

    @dataclass(frozen=True, kw_only=True)
    class Limits:
        max_num_seqs: int = setting(256, "Requests that run at the same time.", least=1, most=2**16)

        def __post_init__(self) -> None:
            check_settings(self)

A setting is a row of `foreword.declared`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from foreword.declared import Declared, declarations, declared, declared_like
from foreword.errors import ConfigError, setting_text

_SIZE = re.compile(r"\s*(\d{1,18})(?:\.(\d{1,18}))?\s*(?:([KMGT])(i?))?B?\s*", re.IGNORECASE)

setting, setting_of = declared, declared_like
"""Declare a setting of a class, and a setting like that of another class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Declared):
    """A setting. Numbers are not negative unless a row allows it. decoders_only: encoders refuse any value but the
    default.
    """

    least: float | None = 0
    most: float | None = 2**31
    decoders_only: bool = False

    def read(self, value: Any) -> Any:
        """Return the value of a text, such as one of a command line; any other value is checked as by `checked`.
        Raise ConfigError if it is wrong.
        """
        if isinstance(value, str) and self.kind.is_number and not self.unit:
            with suppress(ValueError):
                value = self.kind.read(value)
        return self.checked(value)

    def checked(self, value: Any) -> Any:
        """Return the value in the form in which its owner stores it. Raise ConfigError with the name, the value and the
        valid values.
        """
        if value is None and self.optional:
            return None
        try:
            if self.unit == "path" and isinstance(value, os.PathLike):
                value = os.fspath(value)
            if self.convert is not None:
                return self.convert(value)
            kept = bytes_of(value) if self.unit == "bytes" and isinstance(value, str) else self.kind.convert(value)
            reason = self.refusal(kept)
        except ValueError as error:
            reason = str(error) or f"expected {self.expected}"
        if reason is None:
            return kept
        raise ConfigError(f"{setting_text(self.name, value, is_known=self.is_shown)}: {reason}")


def settings_of(owner: type) -> Mapping[str, Setting]:
    """Return the settings that a class declares, by the names of their fields."""
    return _settings_of(owner)


@cache
def _settings_of(owner: Any) -> Mapping[str, Setting]:
    return declarations(owner, Setting)


def check_settings(values: Any) -> None:
    """Check and convert each setting of an instance that is being made. Raise ConfigError for a wrong one."""
    for name, known in settings_of(type(values)).items():
        value = getattr(values, name)
        if (kept := known.checked(value)) is not value:
            object.__setattr__(values, name, kept)


def check_of_encoder(values: Any) -> None:
    """Raise ConfigError for a setting of an instance that only decoders have and that does not have its default."""
    names = [name for name, known in settings_of(type(values)).items() if known.decoders_only]
    check_not_given(values, names, "only decoders have it, and the model is an encoder")


def check_not_given(values: Any, names: Iterable[str], reason: str) -> None:
    """Raise ConfigError with the reason for one of these settings of an instance that does not have its default."""
    known = settings_of(type(values))
    for name in names:
        if name in known and (value := getattr(values, name)) != known[name].default:
            raise ConfigError(f"{name}={value!r}: {reason}; leave it out")


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
