"""Mapping model files, and values of metadata by type. Errors name the file and the fix."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from foreword.errors import ModelError

T = TypeVar("T", int, float, bool, str)

FETCH_AGAIN = "The file is damaged or incomplete: fetch it again"
"""The fix of errors about damaged files."""


def map_file(path: Path, at_least: int) -> mmap.mmap:
    """The file's bytes, mapped for reading. ModelError if it cannot be read or has fewer than ``at_least`` bytes."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < at_least:
                raise ModelError(f"{path}: {size} bytes are too few for a header of {at_least}. {FETCH_AGAIN}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{path}: cannot be read ({reason}). Check the path and its permissions") from None


def typed_value(values: Mapping[str, object], key: str, kind: type[T], default: T | None = None) -> T:
    """The value of a key, where None counts as absent. TypeError says what is wrong with it: it is absent without a
    default, it is not a ``kind``, or it is a float that is not finite. An int is also a float.
    """
    value = values.get(key)
    value = default if value is None else value
    if kind is float and type(value) is int and abs(value) < 1 << 62:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        found = "is missing" if value is None else f"is {value!r:.80}, not of type {kind.__name__}"
        raise TypeError(f"{key} {found}")
    return value


def check_overlap(path: Path, spans: Iterable[tuple[int, int, str]]) -> None:
    """ModelError names two tensors whose bytes (first, last + 1, name) overlap."""
    for (_, end, name), (first, _, other) in pairwise(sorted(spans)):
        if first < end:
            raise ModelError(f"{path}: tensors {name!r:.80} and {other!r:.80} overlap. {FETCH_AGAIN}")
