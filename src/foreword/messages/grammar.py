"""The grammar of a format's tool calls, in the Lark syntax of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from foreword.errors import RequestError
from foreword.messages.calls import JsonCalls, NamedCalls
from foreword.messages.formats import WRITABLE, ResponseFormat
from foreword.messages.markers import Literals, Marker
from foreword.messages.notation import JSON, PYTHON, Notation
from foreword.messages.tagged_calls import KEY, NAME, TaggedCalls, parameter_schema
from foreword.schemas import KINDS, drop_annotations, resolved, subschemas, types_of, with_options

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as in chat templates
_NOTES = frozenset((
    "title", "description", "default", "examples", "$schema", "$comment", "deprecated", "readOnly", "writeOnly",
    "x-guidance",
))  # fmt: skip
"""Keywords of schemas that ask for nothing."""
_EXPRESSED = _NOTES | {
    "type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "oneOf",
}  # fmt: skip
"""Keywords of schemas that are followed in notations other than JSON, and those that ask for nothing."""
_TAGGED = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$ref"}
"""Keywords that are followed in the schema of a tool whose arguments are between tags."""
_FREE = _NOTES | {"type", "anyOf", "oneOf", "$ref"}
"""Keywords that are followed in the schema of a value between tags that may be any text."""
_KEY = re.compile(r"[\w.+$-]+")
_NEWLINE = r'"\n"?'
"""The rule for whitespace between tags, which models may write."""


class Tool(NamedTuple):
    """The description of a tool. at: its field, such as ``tools[0].function``. parameters: a JSON schema."""

    at: str
    name: str
    parameters: Mapping[str, Any]
    is_strict: bool


class Choice(NamedTuple):
    """The tools that an answer may call. mode: whether it must call one. names: the allowed tools; None: all."""

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Parse descriptions of tools. Raise a RequestError with the path of the field for an invalid one."""
    return [_read_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]


def _read_tool(at: str, tool: object) -> Tool:
    function, example = tool, '{"type": "function", "function": {"name": "…", "parameters": {…}}}'
    if isinstance(tool, Mapping) and "function" in tool:
        at, function = f"{at}.function", tool["function"]
    if not isinstance(function, Mapping):
        raise RequestError(None, at, function, "there is no function with a name", f"Give {example}.")
    if not isinstance(name := function.get("name"), str) or not name:
        raise RequestError(None, f"{at}.name", name, "there is no function with a name", f"Give {example}.")
    schema = function.get("parameters")
    if schema is not None and not isinstance(schema, Mapping):
        raise RequestError(None, f"{at}.parameters", schema, "is not a JSON schema", "Give an object.")
    return Tool(at, name, schema or {"type": "object", "properties": {}}, function.get("strict") is True)


def read_choice(choice: str | Mapping[str, Any]) -> Choice:
    """Parse a choice of tools. Raise RequestError unless it is "none" or one of the choices that `call_grammar`
    lists.
    """
    if isinstance(choice, str | Mapping):  # an array compares each of its entries
        match choice:
            case "none" | "auto" | "required":
                return Choice(choice)
            case {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)},
            }:
                return Choice(mode, frozenset(_read_tool("tool_choice", tool).name for tool in tools))
            case Mapping() if choice.get("type", "function") == "function":
                return Choice("required", frozenset([_read_tool("tool_choice", choice).name]))
    fix = 'Give "auto", "none", "required" or {"type": "function", "function": {"name": "…"}}.'
    raise RequestError(None, "tool_choice", choice, "is none of the choices", fix)


def chosen_tools(tools: Sequence[Tool], tool_choice: str | Mapping[str, Any]) -> list[Tool]:
    """Return the tools that may be called. Raise RequestError if there are none."""
    names = read_choice(tool_choice).names
    missing = sorted(names - {tool.name for tool in tools}) if names is not None else []
    if missing or not tools or names == frozenset():
        reason = "there are no tools" if not tools else f"there is no tool {missing[0]!r}" if missing else "names none"
        raise RequestError(None, "tool_choice", tool_choice, reason, "Give the tools, and the name of one of them.")
    return [tool for tool in tools if names is None or tool.name in names]


def call_grammar(
    format: ResponseFormat,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] = "required",
    *,
    parallel: bool = True,
    special_token_ids: Mapping[str, int] | None = None,
    after_reasoning: bool = False,
) -> str:
    """Return a Lark grammar whose texts are calls of the tools in the notation of the format.

    tools: descriptions with JSON schemas of their parameters. tool_choice: "required", {"type": "function",
    "function": {"name": …}}, {"type": "allowed_tools", "allowed_tools": {"mode": "required" or "auto", "tools": […]}},
    or "auto": any text, in which calls must be well-formed; with "auto", only the arguments of strict tools follow
    their schemas. parallel: several calls are allowed. special_token_ids: the ids of the tokenizer's special tokens by
    text, which the grammar writes as tokens. after_reasoning: the text follows the end of the reasoning, so it may
    begin with whitespace.

    Raise RequestError if there is no such tool, or the format's calls have no grammar.
    """
    chosen = chosen_tools(read_tools(tools), tool_choice)
    free = read_choice(tool_choice).mode == "auto"
    if free:
        chosen = [tool if tool.is_strict else tool._replace(parameters={"type": "object"}) for tool in chosen]
    region = format.calls_region
    writer = _Writer(special_token_ids or {})
    calls = region.calls if region is not None else None
    if region is None or not format.writes_calls or not isinstance(calls, WRITABLE):
        reason = f"no grammar can be made of the calls of the format {format.name!r}"
        raise RequestError(
            None, "tool_choice", tool_choice, reason, "Use tool_choice='auto', or another message_format."
        )
    if isinstance(calls, JsonCalls):
        names = [writer.json_call(calls, tool) for tool in chosen]
    elif isinstance(calls, TaggedCalls):
        names = [writer.tagged_call(calls, tool) for tool in chosen]
    else:
        names = [writer.named_call(calls, tool) for tool in chosen]
    writer.rule("call", " | ".join(names))
    closing = f"{writer.text(region.padding)} {writer.text(_first(region.close))}"
    if free and region.open is not None:
        mark = _first(region.open)
        others = [other for other in _call_marks(format) if other not in mark]
        opening = f"{writer.text_before(mark, others)} {writer.text(region.padding)}"
    else:
        opening = writer.text(_first(region.open) + region.padding)
    if calls.listed:
        space = r"/[ \n]{0,8}/" if isinstance(calls, JsonCalls) and calls.number else ""
        separator = f'"," {space}' if space else _quoted(", ")
        writer.rule("region", f'{opening} "[" {space} {_many("call", separator, parallel)} {space} "]" {closing}')
        body = "region"
    elif region.open is None:
        body = f"{opening} {_many('call', _quoted(calls.separators[:1] + ' '), parallel)}"
    else:
        several = region.between is not None
        text = region.padding if region.between is None else region.between
        between = _NEWLINE if isinstance(calls, TaggedCalls) else writer.text(text)
        writer.rule("region", f"{opening} {_many('call', between, parallel) if several else 'call'} {closing}")
        body = "region" if free or several else _many("region", between, parallel)
    if free:
        repeated = "*" if parallel and not calls.listed and region.between is None else "?"
        other = writer.other_text(format)
        body = f"({body}){repeated} {other}" if region.open is not None else f"{body} | {other}"
    elif after_reasoning:
        body = rf"/\s{{0,2}}/ ({body})"
    writer.rule("start", body)
    return writer.grammar


def call_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, with the whitespace that chat templates write and without keywords that
    are null. Raise RequestError if it is not JSON, or a keyword has a wrong type.
    """
    try:
        schema = json.loads(json.dumps(with_options(tool.parameters, _SEPARATORS)))
    except MemoryError:
        raise
    except Exception as error:  # objects of the caller may raise any exception
        reason, fix = f"is not JSON: {error!s:.200}", "Use plain dictionaries, lists, texts and numbers."
        raise RequestError(None, f"{tool.at}.parameters", tool.parameters, reason, fix) from None
    for part in subschemas(schema):
        for name in KINDS.keys() & part.keys():
            if part[name] is None:  # as clients write what they do not have
                del part[name]
            elif not isinstance(part[name], KINDS[name]):
                reason = f"is not a value of {name}"
                raise RequestError(None, f"{tool.at}.parameters", part[name], reason, "Give a JSON schema.")
    drop_annotations(schema)
    return schema  # type: ignore[no-any-return]


def _check_expressed(at: str, schemas: Iterable[Mapping[str, Any]], expressed: frozenset[str] = _EXPRESSED) -> None:
    """Raise RequestError for a keyword that is not one of these, which a notation other than JSON can follow."""
    for schema in schemas:
        for name in schema.keys() - expressed:
            reason = "strict: true, and the notation of the model's calls cannot follow this keyword"
            raise RequestError(None, at, name, reason, "Leave out the keyword, or strict.")


def _many(item: str, separator: str, parallel: bool) -> str:
    """Return a rule for one item, or for several with this rule between them if calls may be parallel."""
    return f"{item} ({separator} {item})*" if parallel else item


def _first(marker: Marker | None) -> str:
    return marker.texts[0] if isinstance(marker, Literals) else ""


def _call_marks(format: ResponseFormat) -> list[str]:
    """Return the marks that open calls, except those that contain another one."""
    regions = [region for region in format.regions if region.calls is not None]
    marks = [mark for region in regions if isinstance(region.open, Literals) for mark in region.open.texts]
    return [mark for mark in marks if not any(other != mark and other in mark for other in marks)]


def _without(mark: str) -> str:
    """Return the part of a terminal that excludes texts with this mark."""
    return r" & ~/(?s:.*)" + re.escape(mark).replace("/", r"\/") + "(?s:.*)/"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _Writer:
    """The rules of a grammar."""

    def __init__(self, special_token_ids: Mapping[str, int]) -> None:
        self._special = special_token_ids
        texts = sorted(special_token_ids, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._rules: dict[str, str] = {}

    @property
    def grammar(self) -> str:
        return "\n".join(f"{name}: {body}" for name, body in reversed(self._rules.items())) + "\n"

    def rule(self, name: str, body: str) -> str:
        self._rules[name] = body
        return name

    def text(self, text: str) -> str:
        """Return a rule for a fixed text, with its special tokens as tokens."""
        parts, at = [], 0
        for match in self._split.finditer(text) if self._split is not None else ():
            parts += [_quoted(text[at : match.start()]), f"<[{self._special[match[0]]}]>"]
            at = match.end()
        return " ".join(part for part in [*parts, _quoted(text[at:])] if part != '""')

    def text_before(self, mark: str, others: Sequence[str] = ()) -> str:
        """Return a rule for any text without the other marks, and the mark that ends it."""
        text = "/(?s:.*)/" + "".join(map(_without, others))
        if mark in self._special:
            return f"{self.rule(f'BEFORE{len(self._rules)}_' if others else 'TEXT_', text)} {self.text(mark)}"
        name = f"before{len(self._rules)}"
        self.rule(f"{name}[suffix={_quoted(mark)}]", text)
        return name

    def other_text(self, format: ResponseFormat) -> str:
        """Return a rule for a text that neither begins like a call nor contains the mark of a call."""
        regions = [region for region in format.regions if region.calls is not None]
        unmarked = "".join(region.unmarked for region in regions)
        first = rf"[^{re.escape(unmarked)}\s]" if unmarked else ""
        return self.rule("OTHER", f"/{first}(?s:.*)/" + "".join(map(_without, _call_marks(format))))

    def json_call(self, calls: JsonCalls, tool: Tool) -> str:
        index = len(self._rules)
        schema = call_schema(tool)
        arguments = self.rule(f"arguments{index}", f"%json {json.dumps(schema)}")
        head = f"{json.dumps(calls.name)}: {json.dumps(tool.name)}, {json.dumps(calls.arguments)}: "
        if not calls.name:
            head = f"{json.dumps(tool.name)}: "
        number = f'{_quoted(json.dumps(calls.number) + ": ")} /"[0-9]{{1,4}}", / ' if calls.number else ""
        return self.rule(f"call{index}", f"{_quoted('{')} {number}{_quoted(head)} {arguments} {_quoted('}')}")

    def named_call(self, calls: NamedCalls, tool: Tool) -> str:
        number = f"{self.text(calls.number)} /[0-9]{{1,4}}/" if calls.number else ""
        parts = [self.text(calls.begin + calls.prefix), _quoted(tool.name), number, self.text(calls.header)]
        head, end = " ".join(filter(None, parts)), self.text("".join(calls.end))
        if calls.notation is JSON:
            arguments = self.rule(f"arguments{len(self._rules)}", f"%json {json.dumps(call_schema(tool))}")
            return self.rule(f"call{len(self._rules)}", f"{head} {arguments} {end}")
        at = f"{tool.at}.parameters"
        schema = call_schema(tool)
        if tool.is_strict:
            _check_expressed(at, subschemas(schema))
        values = _Values(self, calls.notation, at)
        brackets = ("(", ")", "=") if calls.opening == "(" else ("{", "}", ":")
        body = values.object(schema, *brackets)
        return self.rule(f"call{len(self._rules)}", f"{head} {body} {end}")

    def tagged_call(self, calls: TaggedCalls, tool: Tool) -> str:
        at, root = f"{tool.at}.parameters", call_schema(tool)
        if not NAME.fullmatch(tool.name):
            reason = "is a name that the model's format cannot write"
            fix = "Use letters, digits, dashes and underscores."
            raise RequestError(None, f"{tool.at}.name", tool.name, reason, fix)
        schema = resolved(root, root)
        if not isinstance(schema, dict):
            raise RequestError(None, at, root.get("$ref"), "names no schema", "Give an object of parameters.")
        if tool.is_strict:
            _check_expressed(at, [root, schema], _TAGGED)
        tags = _Tags(self, calls, tool, root)
        properties, required = schema.get("properties"), schema.get("required", [])
        if isinstance(properties, dict):
            first = [key for key in properties if key in required] + [key for key in required if key not in properties]
            others = [key for key in properties if key not in required and properties[key] is not False]
            arguments = " ".join([*map(tags.argument, first), *(f"{tags.argument(key)}?" for key in others)])
        else:
            arguments = "" if schema.get("additionalProperties") is False else f"{tags.argument(None)}*"
        head = self.text(calls.name[0] + tool.name + calls.name[1])
        return self.rule(f"call{len(self._rules)}", f"{head} {_NEWLINE} {arguments} {self.text(calls.end)}")


_WORDS = {
    "boolean": [word for word, value in PYTHON.constants.items() if value != "null"],
    "null": [word for word, value in PYTHON.constants.items() if value == "null"],
}
"""Texts of constants between tags: chat templates write those of Python."""


class _Tags:
    """Rules for the arguments of a tool between tags. root: the schema of the arguments, in which a ``$ref`` is a path.

    The values of strings are any text, or one of the texts of an enum or const; others follow their schemas as JSON.
    """

    def __init__(self, writer: _Writer, calls: TaggedCalls, tool: Tool, root: Mapping[str, Any]) -> None:
        self._writer, self._calls, self._tool, self._root = writer, calls, tool, root

    def argument(self, key: str | None) -> str:
        """Return a rule for a key and its value. key: None for any key."""
        writer, calls = self._writer, self._calls
        if key is not None and not (isinstance(key, str) and KEY.fullmatch(key)):
            fix = "Use a name without angle brackets, quotation marks and line breaks."
            reason = "is a parameter that the model's format cannot write"
            raise RequestError(None, f"{self._tool.at}.parameters", key, reason, fix)
        written = writer.rule("KEY", rf"/{KEY.pattern}/") if key is None else _quoted(key)
        parts = [writer.text(calls.key[0]), written, writer.text(calls.key[1])]
        if calls.value[0]:
            parts += [_NEWLINE, writer.text(calls.value[0])]
        if calls.has_lines:
            parts.append(_NEWLINE)
        parts += [self._value(parameter_schema(self._root, key or "")), _NEWLINE]
        return writer.rule(f"argument{len(writer._rules)}", " ".join(filter(None, parts)))

    def _value(self, schema: object) -> str:
        """Return a rule for a value and the tag behind it."""
        writer, end, (opening, quote) = self._writer, self._calls.value[1], self._calls.quotes
        options = self._options(schema, set())
        if not options and not opening:
            return writer.text_before(end)
        if not options:
            quoted = f"{writer.text(opening)} {writer.text_before(quote)} {writer.text(end)}"
            return writer.rule(f"value{len(writer._rules)}", f"{writer.text_before(end, [opening])} | {quoted}")
        closing = f"{_NEWLINE if self._calls.has_lines else ''} {writer.text(end)}"
        return f"{writer.rule(f'value{len(writer._rules)}', ' | '.join(options))} {closing}"

    def _options(self, schema: object, seen: set[int]) -> list[str] | None:
        """Return rules for the values of a schema, or None for any text. seen: the schemas that have rules already."""
        writer, root = self._writer, self._root
        types, part = types_of(schema, root), resolved(schema, root)
        if id(part) in seen:
            return []
        seen.add(id(part))
        if types and isinstance(part, dict):
            values = [part["const"]] if "const" in part else part.get("enum")
            if types <= _WORDS.keys() and not values:
                return [_quoted(text) for kind in sorted(types) for text in _WORDS[kind]]
            if "string" not in types:
                return [writer.rule(f"value{len(writer._rules)}", f"%json {self._json(schema)}")]
            if isinstance(values, list):
                texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
                return [writer.text(text) or '""' for text in texts]
            parts = next((part[name] for name in ("anyOf", "oneOf", "allOf") if name in part), None)
            if isinstance(parts, list):
                options = [self._options(item, seen) for item in parts]
                if None not in options:
                    return [rule for option in options for rule in option or ()]
        if self._tool.is_strict:
            at = f"{self._tool.at}.parameters"
            _check_expressed(at, subschemas(schema, root), _FREE if part is not None else _NOTES)
        return None

    def _json(self, schema: object) -> str:
        """Return a schema as JSON. If it has a ``$ref``, the root is one of its definitions."""
        whole = {**(schema if isinstance(schema, dict) else {}), "x-guidance": self._root["x-guidance"]}
        if '"$ref": "#' not in (text := json.dumps(whole)):
            return text
        return json.dumps({**whole, "$defs": {"root": self._root}}).replace('"$ref": "#', '"$ref": "#/$defs/root')


class _Values:
    """Rules for values in a notation. They support the common part of JSON schema: type, properties, items, enum,
    anyOf.

    Other keywords are ignored; the calls still have the right notation and types.
    """

    def __init__(self, writer: _Writer, notation: Notation, at: str) -> None:
        self._writer, self._notation, self._at = writer, notation, at
        # Use the quotation mark without escapes, if there is one: models are trained on it.
        unescaped = [mark for mark, quotes in notation.quotes.items() if quotes.escapes == "none"]
        self._quotes = unescaped or list(notation.quotes)
        self._comma = "/, ?/" if notation.call_brackets else _quoted(",")

    def _colon(self, colon: str) -> str:
        return "/: ?/" if colon == ":" and self._notation.call_brackets else _quoted(colon)

    def value(self, schema: object) -> str:
        if not isinstance(schema, Mapping):
            return self._any()
        if "const" in schema or "enum" in schema:
            items = [schema["const"]] if "const" in schema else schema["enum"]
            return self._either(self._literal(item) for item in items)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self._either(map(self.value, schema[union]))
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._either(self.value({**schema, "type": item}) for item in kind)
        match kind:
            case "object":
                return self.object(schema, "{", "}", ":") if schema.get("properties") else self._any_object()
            case "array":
                return self._list(self.value(schema.get("items")))
            case "string" | "integer" | "number" | "boolean" | "null":
                return self._scalar(kind)
        return self._any()

    def object(self, schema: Mapping[str, Any], opening: str, closing: str, colon: str) -> str:
        """Return a rule for an object: the required properties, then any of the others, each group in the given order.
        If no properties are listed, any are allowed.
        """
        if "properties" not in schema:
            return self._any_object(opening, closing, colon)
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        named = {
            key: f"{self._key(key, colon)} {self._colon(colon)} {self.value(item)}" for key, item in properties.items()
        }
        first = [named[key] for key in named if key in required]
        others = [named[key] for key in named if key not in required]
        if first:
            body = f" {self._comma} ".join(first) + "".join(f" ({self._comma} {item})?" for item in others)
        else:
            body = ""
            for item in reversed(others):  # the first property that is present has no comma before it
                rest = f" ({self._comma} {body})?" if body else ""
                body = self._rule(f"{item}{rest}" + (f" | {body}" if body else ""))
            body = f"({body})?" if body else ""
        return self._rule(f"{_quoted(opening)} {body} {_quoted(closing)}")

    def _rule(self, body: str) -> str:
        return self._writer.rule(f"value{len(self._writer._rules)}", body)

    def _either(self, alternatives: Iterable[str]) -> str:
        return self._rule(" | ".join(alternatives))

    def _key(self, key: str, colon: str) -> str:
        if colon != "=" and not self._notation.names_as_keys:
            return self._literal(key)
        if not _KEY.fullmatch(key):
            fix = "Use a name of letters, digits and underscores."
            raise RequestError(None, self._at, key, "is a parameter that the model's format cannot write", fix)
        return _quoted(key)

    def _list(self, item: str) -> str:
        return self._rule(f'"[" ({item} ({self._comma} {item})*)? "]"')

    def _scalar(self, kind: str) -> str:
        match kind:
            case "string":
                return self._either(map(self._string, self._quotes))
            case "integer":
                return self._writer.rule("INTEGER", "/-?(0|[1-9][0-9]{0,17})/")
            case "number":
                return self._writer.rule("NUMBER", r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/")
            case "boolean":
                return self._either(map(self._word, ("true", "false")))
        return self._word("null")

    def _string(self, mark: str) -> str:
        """Return a rule for a string between quotation marks that open with this one."""
        quotes = self._notation.quotes[mark]
        escapes = r"(\\[\\'\"nt])" if quotes.escapes != "none" else ""
        inner = rf"[^{re.escape(quotes.close[0])}\\\n]" if escapes else f"[^{re.escape(quotes.close[0])}]"
        name = f"STRING_TEXT{self._quotes.index(mark)}"
        text = self._writer.rule(name, f"/({inner}{'|' + escapes if escapes else ''})*/")
        return self._rule(f"{self._writer.text(mark)} {text} {self._writer.text(quotes.close)}")

    def _word(self, json_word: str) -> str:
        """Return a rule for a constant, in each spelling of the notation."""
        return self._either(_quoted(word) for word, other in self._notation.constants.items() if other == json_word)

    def _any(self) -> str:
        if "any_value" not in self._writer._rules:
            self._writer.rule("any_value", "")
            scalars = [self._scalar(kind) for kind in ("string", "number", "boolean", "null")]
            self._writer.rule("any_value", " | ".join([*scalars, self._list("any_value"), self._any_object()]))
        return "any_value"

    def _any_object(self, opening: str = "{", closing: str = "}", colon: str = ":") -> str:
        self._any()
        key = self._writer.rule("ANY_KEY", r"/[A-Za-z_][A-Za-z0-9_]*/")
        if colon != "=" and not self._notation.names_as_keys:
            key = self._scalar("string")
        pair = f"{key} {self._colon(colon)} any_value"
        return self._rule(f"{_quoted(opening)} ({pair} ({self._comma} {pair})*)? {_quoted(closing)}")

    def _literal(self, value: Any) -> str:
        """Return a rule for a fixed value."""
        if isinstance(value, str):
            return self._either(self._literal_string(value, mark) for mark in self._quotes)
        text = json.dumps(value)
        return self._word(text) if text in self._notation.constants.values() else _quoted(text)

    def _literal_string(self, text: str, mark: str) -> str:
        quotes = self._notation.quotes[mark]
        if quotes.escapes != "none":
            text = text.replace("\\", "\\\\").replace(mark, "\\" + mark)
        return self._writer.text(mark + text + quotes.close)
