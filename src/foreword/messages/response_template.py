"""Convert Hugging Face's ``response_template`` in tokenizer_config.json to a `ResponseFormat`.

It is the inverse of the chat template, as data (transformers ≥ 5.13, version 1). Its fields are the regions of the
output: "content", "thinking" (also "reasoning", "reasoning_content") and "tool_calls".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from foreword.errors import ModelError, shown
from foreword.installation import install
from foreword.messages.calls import CallSink, CallsReader, JsonCalls, NamedCalls, arguments_of
from foreword.messages.formats import Calls, Region, ResponseFormat
from foreword.messages.markers import Literals, Marker, Pattern
from foreword.messages.notation import JSON, Notation, Quotes, Status, ValueReader

_KINDS = {
    "content": "content",
    "thinking": "reasoning",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
    "tool_calls": "calls",
}
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_MAX_DEPTH = 200  # deepest nesting of arguments that are read as a whole


def read_response_template(template: object) -> ResponseFormat:
    """Return the format that a response template declares. Raise ModelError if it is invalid or uses an unsupported
    feature.
    """
    if not isinstance(template, Mapping) or not isinstance(fields := template.get("fields"), Mapping) or not fields:
        _refuse("is not an object with fields", template)
    if template.get("version", 1) != 1:
        _refuse("has an unknown version", template.get("version"))
    anchor = _marker(template, "start_anchor", "start_anchor_pattern")
    if anchor is None:
        _refuse("has no start_anchor", template)
    regions = [_region(name, field) for name, field in fields.items()]
    outside = [region for region in regions if region.open is None]
    if len(outside) > 1:
        _refuse("has several fields without an opening mark", list(fields))
    marked = next((region.calls for region in regions if isinstance(region.calls, JsonCalls)), None)
    return ResponseFormat(
        name="response_template",
        regions=tuple(region for region in regions if region.open is not None),
        outside=outside[0] if outside else Region(kind="discard"),
        anchor=anchor,
        strip_ends=True,
        bare=None if marked is None else replace(marked, unmarked=True, closed=True),
    )


def _region(name: str, field: object) -> Region:
    if name not in _KINDS:
        _refuse(f"has a field that is not supported (there are {', '.join(_KINDS)})", name)
    if not isinstance(field, Mapping):
        _refuse(f"has a field {name} that is not an object", field)
    kind, content, args = _KINDS[name], field.get("content", "text"), field.get("content_args", {})
    join = field.get("join") if field.get("repeats") else None
    if not isinstance(args, Mapping) or (join is not None and not isinstance(join, str)):
        _refuse(f"has a field {name} with wrong content_args or join", field)
    open, close = _marker(field, "open", "open_pattern"), _marker(field, "close", "close_pattern")
    if kind == "calls":
        if open is None:
            _refuse("has tool_calls without an opening mark", field)
        return Region(kind="calls", open=open, close=close, calls=_calls(field, content, args))
    if content != "text":
        _refuse(f"has a field {name} that is not text", content)
    text_join = "\n" if join is None else join
    return Region(kind=kind, open=open, close=close, strip=bool(args.get("strip", True)), join=text_join)  # type: ignore[arg-type]


def _marker(field: Mapping[str, Any], literal: str, pattern: str) -> Marker | None:
    if pattern in field:
        return Pattern(_compiled(field[pattern]))
    if literal not in field:
        return None
    texts = [field[literal]] if isinstance(field[literal], str) else field[literal]
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) and text for text in texts):
        _refuse(f"has a wrong {literal}", field[literal])
    return Literals(list(dict.fromkeys(texts)))


def _compiled(pattern: object) -> Any:
    try:
        import regex  # imported here, because few models have templates with patterns
    except ImportError:
        raise ModelError(
            f"the model's response_template has the pattern {shown(pattern)}, which needs the package regex. "
            f"{install('templates')} Or give message_format="
        ) from None
    try:
        return regex.compile(pattern, regex.DOTALL)
    except Exception as error:
        _refuse(f"has an invalid pattern ({error!s:.100})", pattern)


def _calls(field: Mapping[str, Any], content: object, args: Mapping[str, Any]) -> Calls:
    """Return calls with a streaming reader if the field's content and transform allow it, else with one that reads
    whole regions.
    """
    transform = field.get("transform", "{content}")
    function = transform.get("function", transform) if isinstance(transform, Mapping) else transform
    if content == "json" and not args.get("allow_non_json"):
        notation = _notation(args)
        if function == "{content}":
            return JsonCalls(notation=notation)
        name, arguments = (
            (_path(function.get("name")), _path(function.get("arguments")))
            if isinstance(function, Mapping)
            else ("", "")
        )
        prefix = "" if field.get("transform_each") else "content."
        keys = [path.removeprefix(prefix) for path in (name, arguments) if path.startswith(prefix)]
        if len(keys) == 2 and all(key and "." not in key for key in keys) and notation == JSON:
            return JsonCalls(name=keys[0], arguments=keys[1])
        if arguments == "content" and name and "." not in name:
            return NamedCalls(notation=notation, capture=name)
    reads = _content_parser(str(content), args)
    return WholeCalls(reads, transform, bool(field.get("transform_each")))


def _path(placeholder: object) -> str:
    found = _PLACEHOLDER.fullmatch(placeholder) if isinstance(placeholder, str) else None
    return found[1] if found else ""


def _notation(args: Mapping[str, Any]) -> Notation:
    delimiters = args.get("string_delims", [])
    try:
        quotes = {opening: Quotes(closing, "none") for opening, closing in delimiters}
        if not all(isinstance(text, str) and text for pair in delimiters for text in pair):
            raise ValueError
    except (TypeError, ValueError):
        _refuse("has wrong string_delims", delimiters)
    names = bool(args.get("unquoted_keys", False))
    return Notation(quotes={**JSON.quotes, **quotes}, names_as_keys=names) if quotes or names else JSON


@dataclass(frozen=True, slots=True)
class WholeCalls:
    """Calls whose region is read as a whole. read: parses the region. transform: the template's transform of this value
    to calls.
    """

    read: Callable[[str], Any]
    transform: Any
    each: bool

    def reader(self, sink: CallSink, captures: Mapping[str, str]) -> CallsReader:
        return WholeCallsReader(self, sink, captures)


class WholeCallsReader(CallsReader):
    """Read `WholeCalls`: the whole text up to the closing mark, when the mark has arrived."""

    __slots__ = ("_calls", "_captures")

    def __init__(self, calls: WholeCalls, sink: CallSink, captures: Mapping[str, str]) -> None:
        super().__init__(sink, "")
        self._calls, self._captures = calls, captures
        self.is_bad = True  # the text cannot be read piece by piece

    def _item(self, text: str, at: int) -> int:
        return self._refuse(at)

    def collect(self) -> None:
        try:
            value = self._calls.read("".join(self._sink.unread))
            scopes = value if self._calls.each else [{"content": value}]
            found = [_filled(self._calls.transform, {**self._captures, **scope}) for scope in scopes]
            found = found[0] if not self._calls.each and isinstance(found[0], list) else found
            functions = [call.get("function", call) for call in found]
            calls = [(function["name"], arguments_of(function)) for function in functions]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, TimeoutError):
            return  # damaged: it stays content
        if all(isinstance(name, str) and name and isinstance(arguments, Mapping) for name, arguments in calls):
            for name, arguments in calls:
                self._sink.start(name)
                self._sink.arguments(json.dumps(arguments, ensure_ascii=False))
                self._sink.end()


def _filled(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Return the transform with values in place of "{name}" and "{name.key}"."""
    if isinstance(transform, Mapping):
        return {key: _filled(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_filled(value, scope) for value in transform]
    if not (path := _path(transform)):
        return transform
    value: Any = scope
    for key in path.split("."):
        value = value[key]
    return value


def _content_parser(name: str, args: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a parser for a field's text, or for a value inside it. It raises a ValueError for damaged text."""

    def text(value: str) -> str:
        return value.strip() if args.get("strip", True) else value

    def value_parser() -> Callable[[str], Any]:
        inner = args.get("value_parser")
        if inner is None:
            return str
        if not isinstance(inner, Mapping):
            _refuse("has a wrong value_parser", inner)
        return _content_parser(str(inner.get("name", "text")), inner.get("args", {}))

    match name:
        case "text":
            return text
        case "int":
            return lambda value: int(text(value))
        case "float":
            return lambda value: float(text(value))
        case "bool":
            return lambda value: text(value).lower() in ("true", "1")
        case "json":
            return _json_parser(_notation(args), text if args.get("allow_non_json") else None)
        case "xml-inline":
            tag = _compiled(args.get("tag_pattern"))
            if "key" not in tag.groupindex:
                _refuse("has a tag_pattern without a group named key", args.get("tag_pattern"))
            return _tags_parser(tag, value_parser(), bool(args.get("merge_duplicates")))
        case "kv-lines":
            line_sep, kv_sep, read = str(args.get("line_sep", "\n")), str(args.get("kv_sep", ":")), value_parser()

            def lines(value: str) -> dict[str, Any]:
                pairs = [text(line).split(kv_sep, 1) for line in value.split(line_sep) if kv_sep in line]
                return {text(pair[0]): read(text(pair[1])) for pair in pairs if len(pair) == 2}

            return lines
        case _:
            raise _error("has an unknown content parser", name)


def _json_parser(notation: Notation, otherwise: Callable[[str], str] | None) -> Callable[[str], Any]:
    def parse(value: str) -> Any:
        reader = ValueReader(notation)
        end = reader.read(value + " ", 0)  # the space ends a number
        if reader.status is Status.DONE and not value[end:].strip() and reader.depth <= _MAX_DEPTH:
            return json.loads("".join(reader.written))
        if otherwise is None:
            raise ValueError("not JSON")
        return otherwise(value)

    return parse


def _tags_parser(tag: Any, read: Callable[[str], Any], merge: bool) -> Callable[[str], dict[str, Any]]:
    def parse(value: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for match in tag.finditer(value, timeout=1.0):
            groups = match.groupdict()
            key, item = groups["key"], read(groups.get("value") or "")
            if merge and key in found:
                known = found[key]
                found[key] = [*(known if isinstance(known, list) else [known]), item]
            else:
                found[key] = item
        return found

    return parse


def _error(reason: str, value: object) -> ModelError:
    return ModelError(f"the model's response_template {reason}: {shown(value)}. Fix the file, or give message_format=")


def _refuse(reason: str, value: object) -> NoReturn:
    raise _error(reason, value)
