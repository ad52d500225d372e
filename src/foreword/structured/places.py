"""Find the part of a JSON schema that cannot be compiled, for errors."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_DEFINITIONS = ("$defs", "definitions")
_BY_NAME = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
_SINGLE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
MOST_TRIED = 256


class Place(NamedTuple):
    """A part of a schema. path: from the schema to the part, such as ".properties.x", or "" for the schema itself.
    part: its value.
    """

    path: str
    part: object


def refused_place(schema: Any, reason: str, refusal: Callable[[str], str | None], seconds: float) -> Place:
    """Return the innermost part of a schema that is refused for the same reason as the whole.

    refusal: returns why the text of a schema cannot be compiled, or None if it can. At most `MOST_TRIED` parts are
    compiled, and none after these seconds; then the result is the innermost refused place so far.
    """
    end, tries_left = time.monotonic() + seconds, MOST_TRIED
    place = Place("", schema)
    definitions = {name: schema[name] for name in _DEFINITIONS if isinstance(schema, dict) and name in schema}
    while True:
        for path, part in _parts(place.part):
            if (tries_left := tries_left - 1) < 0 or time.monotonic() > end:
                return place
            whole = {**definitions, **part} if isinstance(part, dict) else part
            if refusal(json.dumps(whole)) == reason:
                place = Place(place.path + path, part)
                break
        else:
            return place


def _parts(schema: object) -> Iterator[tuple[str, object]]:
    """Yield path and value of each schema directly inside a schema, definitions first."""
    if not isinstance(schema, dict):
        return
    for name in _BY_NAME:
        if isinstance(named := schema.get(name), dict):
            yield from ((f".{name}{_step(key)}", part) for key, part in named.items())
    for name in (*_LISTS, *_SINGLE):
        if isinstance(listed := schema.get(name), list):
            yield from ((f".{name}[{i}]", part) for i, part in enumerate(listed))
        elif name in _SINGLE and name in schema:
            yield f".{name}", schema[name]


def _step(key: str) -> str:
    return f".{key}" if re.fullmatch(r"[\w$-]{1,80}", key) else f"[{json.dumps(key):.80}]"
