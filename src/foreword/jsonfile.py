"""Reading JSON that others wrote: whatever it holds, the outcome is a value or a typed error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foreword.errors import ForewordError, reason_of


def parse_json(text: str | bytes, source: object, error: type[ForewordError]) -> Any:
    """Return the value of a JSON text. Raise ``error`` with the source for text that is not JSON, is nested too deeply,
    or has huge numbers.
    """
    try:
        return json.loads(text)
    except RecursionError:
        reason = "the values nest too deeply"
    except MemoryError:
        reason = "the values need more memory than there is"
    except ValueError as fault:  # also UnicodeDecodeError, and an integer of thousands of digits
        reason = str(fault)
    raise error(f"{source}: not valid JSON ({reason}). Fetch it again, or correct it") from None


def parse_object(text: str | bytes, source: object, error: type[ForewordError]) -> dict[str, Any]:
    """Return the object of a JSON text. Raise ``error`` as `parse_json` does, and for any other value."""
    value = parse_json(text, source, error)
    if not isinstance(value, dict):
        raise error(f"{source}: holds a {type(value).__name__}, not a JSON object. Fetch it again, or correct it")
    return value


def read_object(path: Path, error: type[ForewordError]) -> dict[str, Any]:
    """Return the object of a JSON file. ``error`` as in `parse_object`, and for a file that cannot be read."""
    return parse_object(read_bytes(path, error), path, error)


def read_bytes(path: Path, error: type[ForewordError]) -> bytes:
    """Return the file's bytes. ``error`` names the file and the reason if it cannot be read."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as fault:  # ValueError: a null byte in the name
        raise error(f"{path}: cannot be read ({reason_of(fault)}). Check the path and its permissions") from None
