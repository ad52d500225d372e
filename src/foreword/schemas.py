"""JSON schemas: the schema of a Python type, and the keywords of a schema that ask for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import GenericAlias, UnionType
from typing import Any, Protocol, get_origin, runtime_checkable

FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
"""Formats of strings that outputs follow. By the standard any other ``format`` is an annotation."""

KEPT = ("coerce_one_of", "lenient")
"""Options in a schema's own "x-guidance" that are passed on; its whitespace is a matter of the request."""

INVALID_JSON = "INVALID_JSON"
"""The one key of an object that stands for text that should be an object, as in Anthropic's interface."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with an object of schemas by name."""
_NESTED = (
    "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "additionalProperties",
    "unevaluatedProperties", "propertyNames", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
)  # fmt: skip
"""Keywords with a schema, or a list of schemas."""


KINDS: dict[str, type | tuple[type, ...]] = {
    "type": (str, list), "properties": dict, "required": list, "enum": list, "anyOf": list, "oneOf": list,
    "allOf": list, "$defs": dict, "definitions": dict,
}  # fmt: skip
"""The types of keywords that are read before a grammar is compiled."""


@runtime_checkable
class _Model(Protocol):
    """An object with its own schema, such as a model class of Pydantic."""

    def model_json_schema(self) -> dict[str, Any]: ...


def schema_of(value: object) -> object:
    """Return the JSON schema of a Python type: a model class of Pydantic, and with Pydantic installed any type that it
    has schemas of, such as dataclasses and TypedDicts. Any other value is returned as it is.

    Raise TypeError, with the reason, for a type that has no schema.
    """
    if not isinstance(value, type | GenericAlias | UnionType) and get_origin(value) is None:
        return value
    try:
        if isinstance(value, _Model):
            return value.model_json_schema()
        from pydantic import TypeAdapter  # here: it is slow to import, and optional

        kind: Any = value
        return TypeAdapter(kind).json_schema()
    except ImportError:
        raise TypeError("the schema of a type needs Pydantic, which is not installed") from None
    except MemoryError:
        raise
    except Exception as error:  # raised by Pydantic, or by the class itself
        raise TypeError(f"the type has no JSON schema: {error!s:.200}") from None


def subschemas(schema: object, root: object = None) -> Iterator[dict[str, Any]]:
    """Yield the schema and those inside it, at any depth, with those that a ``$ref`` names by a path in it. Values of
    other keywords, as of ``enum``, are no schemas. root: the schema in which a ``$ref`` is a path; None: this one.
    """
    left, seen = [schema], set()
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            yield part
            left += [part[name] for name in _NESTED if name in part]
            for name in _NAMED:
                if isinstance(named := part.get(name), dict):
                    left += named.values()
            if isinstance(path := part.get("$ref"), str) and path.startswith("#/"):
                left.append(_at(schema if root is None else root, path[2:].split("/")))


def _at(schema: object, path: list[str]) -> object:
    """Return the value at a JSON pointer, None if there is none."""
    for step in path:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(name)] if name.isdecimal() and int(name) < len(schema) else None
        else:
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


_TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
"""Types of JSON by those of Python."""


def types_of(schema: object, root: object) -> frozenset[str] | None:
    """Return the types of the values that a schema allows, as its first keyword of ``$ref``, ``const``, ``enum``,
    ``type``, ``anyOf``, ``oneOf`` and an ``allOf`` of one schema says; None: any type. root: the schema in which a
    ``$ref`` is a path.
    """
    found: set[str] = set()
    left, seen = [schema], set()
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        match part:
            case {"$ref": str()}:
                left.append(resolved(part, root))
            case {"const": value}:
                found.add(_TYPES.get(type(value), "object"))
            case {"enum": [*values]}:
                found.update(_TYPES.get(type(value), "object") for value in values)
            case {"type": str(name)}:
                found.add(name)
            case {"type": [*names]}:
                found.update(name for name in names if isinstance(name, str))
            case {"anyOf": [*parts]} | {"oneOf": [*parts]} | {"allOf": [_] as parts}:
                left += parts
            case _:
                return None
    return frozenset(found)


def resolved(schema: object, root: object) -> object:
    """Return the schema that a ``$ref`` names by a path in the root, or the schema itself if it has none."""
    seen: set[int] = set()
    while isinstance(schema, dict) and isinstance(path := schema.get("$ref"), str) and id(schema) not in seen:
        seen.add(id(schema))
        schema = _at(root, path.removeprefix("#/").split("/"))
    return schema


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
"""Keywords, and the values with which they allow everything."""
_BESIDE = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords that mean nothing without another one."""


def drop_annotations(schema: object) -> None:
    """Remove, in place, the keywords that ask for nothing and that llguidance refuses."""
    for part in subschemas(schema):
        if isinstance(format := part.get("format"), str) and format not in FORMATS:
            del part["format"]
        nothing = [name for name, values in _NEUTRAL.items() if name in part and part[name] in values]
        nothing += [name for name, other in _BESIDE.items() if name in part and other not in part]
        for name in nothing:
            del part[name]


def with_options(schema: Mapping[str, Any], options: Mapping[str, object]) -> dict[str, Any]:
    """Return the schema with these options of llguidance, and those of its own that are kept."""
    own = schema.get("x-guidance")
    kept = {name: own[name] for name in KEPT if name in own} if isinstance(own, dict) else {}
    return {**schema, "x-guidance": {**kept, **options}}
