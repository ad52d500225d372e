"""The variable FOREWORD_CHECK: how the steps of another engine are checked. Importing it loads no package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from foreword.errors import ConfigError

VARIABLE = "FOREWORD_CHECK"
FORM = "off, host, tensors or full, then any of: sample:N, first:K, raise, record:FILE[:SIZE], report:FILE"
Level = Literal["host", "tensors", "full"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The options in FOREWORD_CHECK.

    level: "host" compares values that are on the host already, "tensors" all of them, "full" the cache's slots too.
    every: of ``sample:N``, only each N-th step is compared. first: findings that are logged; all are counted.
    raises: whether the first finding raises, which ends the engine.
    record: "FILE" or "FILE:SIZE", where the steps are written as a trace. report: where the report is kept up to date.
    """

    level: Level = "full"
    every: int = 1
    first: int = 20
    raises: bool = False
    record: str | None = None
    report: Path | None = None

    @classmethod
    def of_environment(cls, default: str = "off") -> CheckOptions | None:
        """Return the options of FOREWORD_CHECK, see `of`. default: its value where it is not set."""
        return cls.of(os.environ.get(VARIABLE, default))

    @classmethod
    def of(cls, text: str) -> CheckOptions | None:
        """Return the options of "full,sample:10"; None for "off" and "". Raise ConfigError for anything else."""
        words = [word.strip() for word in text.split(",")]
        if words in ([""], ["off"]):
            return None
        values: dict[str, str] = {}
        for word in words:
            name, colon, value = word.partition(":")
            known = name in ("sample", "first", "record", "report") if colon else name in (*LEVELS, "raise")
            key = "level" if name in LEVELS and not colon else name
            if not known or key in values:
                raise ConfigError(f"{VARIABLE}={text!r:.200}: {word!r:.80} is {_why(known)}. The form is {FORM}")
            values[key] = value if colon else name
        numbers = {name: _number(text, name, values[name], low) for name, low in _LEAST.items() if name in values}
        for name in ("record", "report"):
            if not values.get(name, name):
                raise ConfigError(f"{VARIABLE}={text!r:.200}: {name} needs the name of a file")
        return cls(
            level=cast(Level, values.get("level", "full")),
            every=numbers.get("sample", 1),
            first=numbers.get("first", 20),
            raises="raise" in values,
            record=values.get("record"),
            report=Path(values["report"]) if "report" in values else None,
        )


_LEAST: Mapping[str, int] = {"sample": 1, "first": 0}


def _why(known: bool) -> str:
    return "given twice" if known else "unknown"


def _number(text: str, name: str, value: str, low: int) -> int:
    if not (value.isascii() and value.isdigit() and low <= int(value) < 2**31):
        raise ConfigError(f"{VARIABLE}={text!r:.200}: {name}:{value:.40} must be a number of {low} or more")
    return int(value)
