"""Convert `StructuredOutputs` to grammars of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from foreword.batch import StructuredOutputs
from foreword.schemas import drop_annotations, subschemas, with_options

ANY_TEXT = r"(.|\n)*"


def grammar_text(value: StructuredOutputs, special_tokens: Collection[str]) -> str:
    """Return the grammar in llguidance's own form. Raise a ValueError with the reason for an invalid text.

    special_tokens: the texts of the tokens that are not ordinary text.
    """
    match value.kind:
        case "json":
            return str(LLMatcher.grammar_from_json_schema(json.dumps(_schema(_parsed(value.text), value))))
        case "regex":
            return str(LLMatcher.grammar_from_regex(value.text))
        case "choice":  # one lexeme, because a rule with many alternatives exceeds the limits of the parser
            return _lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, _parsed(value.text))))
        case "grammar":
            return _lark(any_to_lark(value.text) if "::=" in value.text else value.text)
        case _:
            return _lark(_tags(_parsed(value.text), value, special_tokens))


def _lark(text: str) -> str:
    return str(LLMatcher.grammar_from_lark(text))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON text nests too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None


def _schema(schema: Any, value: StructuredOutputs) -> Any:
    """Return the schema with the request's options of whitespace and properties."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is an object, not {json.dumps(schema):.40}")
    drop_annotations(schema)
    space = "" if value.disable_any_whitespace or value.max_whitespace else " "
    options: dict[str, object] = {"item_separator": "," + space, "key_separator": ":" + space}
    if value.max_whitespace:
        options["whitespace_pattern"] = f"[ \\n\\r\\t]{{1,{value.max_whitespace}}}"
    else:
        options["whitespace_flexible"] = False
    if value.disable_additional_properties:
        _close(schema)
    return with_options(schema, options)


def _close(schema: object) -> None:
    """Forbid other properties in objects that list properties, unless the schema allows them. The schema is changed in
    place.
    """
    for part in subschemas(schema):
        if "properties" in part or "patternProperties" in part:
            part.setdefault("additionalProperties", False)


def _tags(tags: Any, value: StructuredOutputs, special_tokens: Collection[str]) -> str:
    """Return a grammar of free text in which each trigger begins one of the structures: {"begin", "schema", "end"}."""
    structures = tags.get("structures") if isinstance(tags, dict) else None
    triggers = tags.get("triggers") if isinstance(tags, dict) else None
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
        raise ValueError('expected {"structures": [{"begin": …, "schema": …, "end": …}, …], "triggers": ["…", …]}')
    rules: list[str] = []
    for i, tag in enumerate(structures):
        if not isinstance(tag, Mapping) or not all(isinstance(tag.get(name, ""), str) for name in ("begin", "end")):
            raise ValueError(f"structures[{i}]: expected texts as begin and end")
        begin, end = tag.get("begin", ""), tag.get("end", "")
        trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"structures[{i}]: begin {begin!r:.80} starts with none of the triggers")
        schema = json.dumps(_schema(tag.get("schema", {}), value))
        rest = f"{_literal(begin[len(trigger) :])} %json {schema} {_literal(end)}"
        if trigger in special_tokens and re.fullmatch(r"<[^<>\s]+>", trigger):
            rules.append(f"tag_{i}: TEXT {trigger} {rest}")
        else:
            rules += [f"start_{i}[lazy]: TEXT {_literal(trigger)}", f"tag_{i}: start_{i} {rest}"]
    any_tag = " | ".join(f"tag_{i}" for i in range(len(structures)))
    return "\n".join([f"start: ({any_tag})* last", "last: TEXT", f"TEXT: /{ANY_TEXT}/", *rules])


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""
