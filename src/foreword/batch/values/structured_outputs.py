"""The form that an output must have: a JSON schema, a regular expression, a choice, a grammar, or tags in free text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, NoReturn, get_args

from foreword.errors import RequestError
from foreword.names import advice
from foreword.schemas import schema_of

Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
KINDS = get_args(Kind)
OPTIONS = ("disable_any_whitespace", "max_whitespace", "disable_additional_properties")
MOST_WHITESPACE = 64
ANY_OBJECT = '{"type": "object"}'
_FIELD = "structured_outputs"


class Origin(NamedTuple):
    """The origin of a constraint: the field that a caller gave, and its value, which errors name."""

    field: str
    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """A constraint of the output, as plain text, so that equal ones are equal values.

    kind: "json" (text: a JSON schema), "regex", "choice" (text: a JSON list of strings), "grammar" (Lark or GBNF) or
    "structural_tag" (text: JSON with "structures" and "triggers").

    JSON has one space after each comma and colon, as json.dumps writes it, and no other whitespace.
    disable_any_whitespace: no whitespace at all. max_whitespace: up to this many characters between any two parts;
    there is always a limit. disable_additional_properties: objects allow only their declared properties by default.

    origin: None for the field ``structured_outputs`` itself. parts: the constraints from which this one was made; if it
    cannot be compiled, the error names the first part that cannot. Both are ignored when values are compared.
    """

    MAX_CHARS: ClassVar[int] = 1 << 17  # largest length of a text that is compiled
    kind: Kind
    text: str
    disable_any_whitespace: bool = False
    max_whitespace: int = 0
    disable_additional_properties: bool = False
    origin: Origin | None = field(default=None, compare=False, repr=False)
    parts: tuple[StructuredOutputs, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of_schema(cls, schema: object, origin: Origin) -> StructuredOutputs:
        """Return the constraint of a JSON schema that comes from another field."""
        try:
            return replace(cls.of({"json": schema}), origin=origin)
        except RequestError as error:
            raise RequestError(None, *origin, error.reason, error.fix) from None

    def refusal(
        self, request_id: str | None, reason: str, fix: str, place: str = "", part: object = None
    ) -> RequestError:
        """Return the error for a constraint that is not supported; it names the field of the constraint. place: the
        part of its JSON schema, such as ".properties.x".
        """
        name, value = self.origin or Origin(_FIELD, self.mapping())
        if place:
            name, value = (name if self.origin else f"{_FIELD}.{self.kind}") + place, part
        return RequestError(request_id, name, value, reason, fix)

    @classmethod
    def of(cls, given: object, request_id: str | None = None) -> StructuredOutputs:
        """Return the constraint of a mapping with one kind and options: ``{"json": schema}``, ``{"choice": ["yes",
        "no"]}``.

        json: a schema as a dictionary or as JSON text, a type with a schema (see `schema_of`), or True for any object,
        which json_object: True also means. choice: a list of strings. structural_tag: a dictionary, or its JSON text.
        Raise RequestError, with the most similar name, for anything else.
        """

        def refuse(value: object, reason: str, fix: str, name: str | None = None) -> NoReturn:
            field = _FIELD if name is None else f"{_FIELD}.{name}"
            raise RequestError(request_id, field, value, reason, fix)

        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            refuse(given, "expected a mapping", 'Give {"json": schema}, or another kind: ' + ", ".join(KINDS) + ".")
        try:
            values = {name: value for name, value in given.items() if value is not None}
        except MemoryError:
            raise
        except Exception as error:  # any error that the caller's mapping raises
            refuse(given, f"cannot be read: {error!s:.200}", "Give a dictionary.")
        for name in values:
            if name not in KINDS + OPTIONS:
                text = name if isinstance(name, str) else ""
                refuse(name, "is unknown", advice(text, KINDS + OPTIONS, f"Use one of {', '.join(KINDS + OPTIONS)}."))
        kinds = [name for name in KINDS if name in values]
        if len(kinds) != 1:
            refuse(kinds, f"expected exactly one of {', '.join(KINDS)}", "Give one.")
        kind, options = kinds[0], {name: values[name] for name in OPTIONS if name in values}
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if type(options.get(name, False)) is not bool:
                refuse(options[name], "expected a bool", "Give True or False.", name)
        most = options.get("max_whitespace", 0)
        if type(most) is not int or not 0 <= most <= MOST_WHITESPACE:
            refuse(most, f"must be an integer in [0, {MOST_WHITESPACE}]", "Use 0 for none.", "max_whitespace")
        if most and options.get("disable_any_whitespace"):
            refuse(most, "contradicts disable_any_whitespace", "Leave one out.", "max_whitespace")
        if options and kind not in ("json", "json_object", "structural_tag"):
            refuse(next(iter(options)), f"is an option of JSON, not of {kind!r}", "Leave it out.")

        def check_size(value: object) -> None:
            if _is_longer(value, cls.MAX_CHARS):
                refuse(value, f"has more than {cls.MAX_CHARS} characters", "Use a smaller one.", kind)

        def as_text() -> str:
            value = values[kind]
            if kind == "json_object" or (kind == "json" and value is True):
                if value is not True:
                    refuse(value, "expected True", "Give True, or leave it out.", kind)
                return ANY_OBJECT
            if kind in ("regex", "grammar"):
                if not isinstance(value, str) or not value:
                    refuse(value, "expected a string that is not empty", "Give its text.", kind)
                return value
            if kind == "choice":
                if isinstance(value, str) or not isinstance(value, Sequence) or not len(value):
                    refuse(value, "expected a list of strings", "Give at least one string.", kind)
                check_size(value)
                if not all(isinstance(item, str) and item for item in value):
                    refuse(value, "expected strings that are not empty", "Remove the others.", kind)
                return json.dumps(list(value))
            if isinstance(value, str):
                return value
            if kind == "json":
                try:
                    value = schema_of(value)
                except TypeError as error:
                    refuse(value, str(error), "Give its JSON schema.", kind)
            if not isinstance(value, Mapping):
                refuse(value, "expected a dictionary or JSON text", "Give one of them.", kind)
            try:
                check_size(value)
                return json.dumps(value)
            except (MemoryError, RequestError):
                raise
            except Exception as error:  # any error that the caller's items raise
                refuse(value, f"is not JSON: {error!s:.200}", "Use plain dictionaries, lists, texts and numbers.", kind)

        made = cls(kind="json" if kind == "json_object" else kind, text=as_text(), **options)
        return made.with_structures(values[kind], f"{_FIELD}.{kind}") if kind == "structural_tag" else made

    def with_structures(self, tag: object, at: str) -> StructuredOutputs:
        """Return the constraint of a structural tag with the schemas of its structures as ``parts``. at: its field."""
        structures = tag.get("structures") if isinstance(tag, Mapping) else None
        schemas = {
            f"{at}.structures[{i}].schema": one["schema"]
            for i, one in enumerate(structures if isinstance(structures, Sequence) else ())
            if isinstance(one, Mapping) and isinstance(one.get("schema"), Mapping)
        }
        return replace(self, parts=tuple(StructuredOutputs.of_schema(s, Origin(f, s)) for f, s in schemas.items()))

    def mapping(self) -> dict[str, object]:
        """Return the mapping from which it can be made."""
        options = {name: value for name in OPTIONS if (value := getattr(self, name))}
        return {self.kind: json.loads(self.text) if self.kind == "choice" else self.text, **options}


def _is_longer(value: object, most: int) -> bool:
    """Return whether the JSON text of a value certainly has more characters, judged by the sizes of its parts. For a
    large value only the first parts are read; writing the whole text would block other threads.
    """
    left, size = [value], 0
    while left and size <= most:
        part = left.pop()
        if isinstance(part, str):
            size += len(part) + 2
        elif isinstance(part, Mapping):
            size += 4 * len(part)
            left += [*part, *part.values()] if size <= most else ()
        elif isinstance(part, list | tuple):
            size += 2 * len(part)
            left += part if size <= most else ()
        else:
            size += 1
    return size > most
