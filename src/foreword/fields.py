"""Read the fields of a JSON object of a request. Each is taken once, with its type; fields that remain are refused.

Also read the entries of a mapping that a caller made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from foreword.errors import RequestError
from foreword.names import OTHERS, advice

Schema = dict[str, Any]
Neutral = Mapping[str, tuple[object, ...]]
"""Fields that are not supported → the values that have no effect and are therefore accepted."""


class Kind(NamedTuple):
    """A type of JSON values: its name in messages, the test of a value, and the JSON schema.

    most: the largest number of entries of a list or an object; None: any. It is compared before an entry is looked at.
    """

    name: str
    accepts: Callable[[Any], bool]
    schema: Schema
    most: int | None = None


def list_of(kind: Kind, name: str, *, most: int | None = None) -> Kind:
    """Return the kind of lists of a kind, with at most ``most`` items."""
    schema = {"type": "array", "items": kind.schema} | ({} if most is None else {"maxItems": most})
    return Kind(name, lambda value: isinstance(value, list) and all(map(kind.accepts, value)), schema, most)


def either(one: Kind, other: Kind) -> Kind:
    """Return the kind of values of either kind. At most one of the two may have a limit."""
    name, schema = f"{one.name} or {other.name}", {"anyOf": [one.schema, other.schema]}
    most = other.most if one.most is None else one.most
    return Kind(name, lambda value: one.accepts(value) or other.accepts(value), schema, most)


def one_of(*values: str) -> Kind:
    """Return the kind of these texts."""
    return Kind(" or ".join(map(repr, values)), lambda value: value in values, {"enum": list(values)})


INTEGER = Kind("an integer", lambda value: type(value) is int, {"type": "integer"})
NUMBER = Kind("a number", lambda value: type(value) in (int, float), {"type": "number"})
BOOLEAN = Kind("true or false", lambda value: type(value) is bool, {"type": "boolean"})
STRING = Kind("a string", lambda value: isinstance(value, str), {"type": "string"})
OBJECT = Kind("an object", lambda value: isinstance(value, dict), {"type": "object"})
STRINGS = list_of(STRING, "a list of strings")
OBJECTS = list_of(OBJECT, "a list of objects")


class Fields:
    """The fields of an object. A field that is null counts as absent.

    at: the path of the object in the body, "" for the body; errors name fields such as ``messages[0].content``.
    """

    def __init__(self, given: object, at: str = "") -> None:
        if not isinstance(given, dict):
            fix = "Give one." if at else 'Give {"model": "…", …}.'
            raise RequestError(None, at or "body", given, "expected a JSON object", fix)
        self._at = at
        self._left = {name: value for name, value in given.items() if value is not None}
        self._known: dict[str, Kind] = {}
        self._required: list[str] = []
        self._neutral: Neutral = {}
        self._given = given
        if isinstance(given, Described):
            given.fields = self

    def path(self, name: str) -> str:
        """Return the path of a field in the body."""
        return f"{self._at}.{name}" if self._at else name

    def take(self, name: str, kind: Kind, default: Any = None) -> Any:
        """Return the value of a field, or the default. Raise RequestError if it is of another type, or has too many
        entries.
        """
        self._known[name] = kind
        value = self._left.pop(name, default)
        if kind.most is not None and isinstance(value, list | dict) and len(value) > kind.most:
            reason = f"has {len(value)} entries, more than {kind.most}"
            raise RequestError(None, self.path(name), value, reason, "Give fewer.")
        if value is not default and not kind.accepts(value):
            fix = "Give one, or leave the field out."
            raise RequestError(None, self.path(name), value, f"expected {kind.name}", fix)
        return value

    def require(self, name: str, kind: Kind) -> Any:
        """Return the value of a field. Raise RequestError if it is missing or of another type."""
        value = self.take(name, kind)
        self._required.append(name)
        if value is None:
            raise RequestError(None, self.path(name), None, "is missing", f"Give {kind.name}.")
        return value

    def nested(self, name: str) -> Fields | None:
        """Return the fields of a field that is an object; None if it is absent."""
        value = self.take(name, OBJECT)
        return None if value is None else Fields(value, self.path(name))

    def nested_list(self, name: str) -> Iterator[Fields] | None:
        """Return the fields of each object in a field that is a list of objects; None if it is absent. They are made
        one by one, because there may be many.
        """
        listed, at = self.take(name, OBJECTS), self.path(name)
        return None if listed is None else (Fields(one, f"{at}[{i}]") for i, one in enumerate(listed))

    def refuse(self, name: str, value: object, fix: str) -> RequestError:
        """Return the error for a value that is not supported."""
        return RequestError(None, self.path(name), value, "is not supported", fix)

    def end(self, neutral: Neutral | None = None) -> None:
        """Raise RequestError for the first field that was not taken."""
        self._neutral = neutral or {}
        for name, value in self._left.items():
            values = self._neutral.get(name)
            if values is None:
                fix = advice(name, self._known, "Leave it out.")
                raise RequestError(None, self.path(name), value, "unknown field", fix)
            if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values):
                others = values if all(isinstance(other, str) for other in values) else values[:1]
                instead = " or ".join(repr(other) for other in others)
                fix = f"Leave it out or give {instead}." if others else "Leave it out."
                raise self.refuse(name, value, advice(name, self._known, fix) if name in OTHERS else fix)

    def schema(self) -> Schema:
        """Return the JSON schema of the objects whose fields are taken in this way."""
        found: dict[str, Schema] = {name: {"enum": list(values)} for name, values in self._neutral.items()}
        for name, kind in self._known.items():
            part = self._given.get(name)
            found[name] = part.schema() if isinstance(part, Described) else kind.schema
        for name in found.keys() - set(self._required):
            found[name] = {"anyOf": [found[name], {"type": "null"}]}
        others = {"type": "null"}  # null counts as absent
        return {"type": "object", "properties": found, "required": self._required, "additionalProperties": others}


def entries_of(request_id: str, prompt: Mapping[Any, Any], keys: Iterable[str] = ()) -> dict[Any, Any]:
    """Return the values of a caller's mapping for ``keys``, None for missing keys, and then its other entries.
    Raise RequestError if it cannot be read.
    """
    given: dict[Any, Any] = dict.fromkeys(keys)
    try:
        given |= prompt
    except MemoryError:
        raise
    except Exception:  # any error that the caller's mapping raises
        raise RequestError(request_id, "prompt", prompt, "cannot be read", "Give a dict.") from None
    return given


class Described(dict[str, Any]):
    """An example of an object: once a parser has taken its fields, it has the JSON schema of such objects."""

    fields: Fields

    def schema(self) -> Schema:
        return self.fields.schema()


_SCALARS = (str, int, float, type(None))
_DEEPEST = 256


def check_json(field: str, value: object) -> None:
    """Raise RequestError with the path of the first value found that JSON does not have: it has texts, numbers, truth
    values, None, lists and tuples, and mappings whose keys are texts. Also raise it for values
    that nest too deeply, such as a list in itself.
    """
    left = [(field, value, 0)]
    while left:
        at, one, depth = left.pop()
        if depth > _DEEPEST:
            raise RequestError(None, field, value, f"nests more than {_DEEPEST} levels deep", "Nest it less.")
        if isinstance(one, list | tuple):
            left += [(f"{at}[{i}]", x, depth + 1) for i, x in enumerate(one) if not isinstance(x, _SCALARS)]
        elif isinstance(one, Mapping):
            for key in one:
                if not isinstance(key, str):
                    raise RequestError(None, at, key, "is a key, and not a text", "Give keys as str.")
            left += [(f"{at}.{key}", x, depth + 1) for key, x in one.items() if not isinstance(x, _SCALARS)]
        elif not isinstance(one, _SCALARS):
            fix = "Give a text, a number, True, False, None, a list or a mapping."
            raise RequestError(None, at, one, "is not a value of JSON", fix)
