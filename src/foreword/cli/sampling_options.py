"""The fields of `SamplingParams` as options of a command, and as settings of a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword import SamplingParams
from foreword.batch.values.sampling_params import PARAMETERS
from foreword.cli.options import Group
from foreword.engine.intake import DEFAULT_PARAMS
from foreword.errors import ConfigError, RequestError
from foreword.jsonfile import parse_object, read_object
from foreword.names import advice

WITHOUT_OPTION = ("detokenize", "structured_outputs")
"""Parameters that a text answer has no use for, or that have options of other names."""

FIELDS = {row.name: row for row in PARAMETERS if row.name not in WITHOUT_OPTION}
"""The parameters that are options and settings, by name."""

OF_ONE_PROMPT = ("n", "best_of", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
"""Fields that a conversation does not have: each of its turns is one answer, shown as text."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The values of a field: how the text of one is read, its form in help, and whether a field has several."""

    read: Callable[[str], Any]
    form: str
    is_list: bool = False
    collect: Callable[[Iterable[Any]], Any] = tuple


def _on_or_off(text: str) -> bool:
    return {"on": True, "true": True, "off": False, "false": False}[text.lower()]


def _text_or_id(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def _token_ids(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    return int(token), float(bias)


def _argument(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


_KINDS = {
    "int": Kind(int, "N"),
    "float": Kind(float, "X"),
    "bool": Kind(_on_or_off, "on|off"),
    "str | Sequence[str]": Kind(str, "TEXT", is_list=True),
    "str | int": Kind(_text_or_id, "TEXT|ID"),
    "Sequence[str]": Kind(str, "TEXT", is_list=True),
    "Sequence[int]": Kind(int, "ID", is_list=True),
    "Sequence[Sequence[int]]": Kind(_token_ids, "ID,ID", is_list=True),
    "Mapping[int, float]": Kind(_bias, "ID=X", is_list=True, collect=dict),
    "Mapping[str, object]": Kind(_argument, "NAME=JSON", is_list=True, collect=dict),
}
"""Type of a parameter → its values."""

KINDS = {name: _KINDS[row.type] for name, row in FIELDS.items()}
ON = frozenset(name for name, row in FIELDS.items() if row.default is True)
_OF_TOKENS = ("on|off", "ID", "ID,ID", "ID=X")
"""Forms of values whose options are in a panel of their own."""


def sampling_options(without: Sequence[str] = ()) -> Group[SamplingParams]:
    """Options of a command that become a `SamplingParams`, checked. ``without``: fields that it does not have."""
    options = {_parameter(name): _option(name, getattr(DEFAULT_PARAMS, name)) for name in FIELDS if name not in without}
    schema = typer.Option(
        metavar="FILE|JSON", help="The answer is JSON of this schema: a file, or its text.", rich_help_panel="Sampling"
    )
    return Group({**options, "json_schema": (Annotated[str | None, schema], None)}, _params)


def _params(json_schema: str | None, **values: Any) -> SamplingParams:
    given = {name: _collected(name, value) for name, value in values.items() if name in FIELDS}
    given |= {name: not values[_parameter(name)] for name in ON}
    if json_schema is not None:
        given["structured_outputs"] = {"json": _schema(json_schema)}
    params = SamplingParams(**given)
    params.check()  # before a model is loaded
    return params


def _schema(given: str) -> dict[str, Any]:
    """Return the schema of a text, or of the file that it names."""
    if given.lstrip().startswith("{"):
        return parse_object(given, "--json-schema", ConfigError)
    return read_object(Path(given), ConfigError)


def _parameter(name: str) -> str:
    """The command's parameter: of a field that is on by default, the flag that switches it off."""
    return f"no_{name}" if name in ON else name


def _option(name: str, default: Any) -> tuple[Any, object]:
    """The annotation and the default of a command's parameter."""
    kind, help = KINDS[name], FIELDS[name].help
    panel = "Tokens" if kind.form in _OF_TOKENS else "Sampling"
    if kind.read is _on_or_off:
        help = f"Do not {help[0].lower()}{help[1:]}" if name in ON else help
        flag = f"--{_parameter(name).replace('_', '-')}"
        return Annotated[bool, typer.Option(flag, help=help, rich_help_panel=panel)], False
    help += " Repeatable." * kind.is_list + " Shown with --json." * name.endswith("logprobs")
    value: Any = kind.read if kind.read in (int, float) else str
    option = typer.Option(metavar=kind.form, help=help, rich_help_panel=panel)
    return (Annotated[list[value] | None, option], None) if kind.is_list else (Annotated[value | None, option], default)


def _collected(name: str, value: Any) -> Any:
    """The value of a field from that of its option: Typer has read numbers, flags and texts."""
    kind = KINDS[name]
    if not kind.is_list:
        return _read(name, value) if isinstance(value, str) else value
    return kind.collect(_read(name, item) if isinstance(item, str) else item for item in value or ()) or None


def _read(name: str, text: str) -> Any:
    try:
        return KINDS[name].read(text)
    except (ValueError, KeyError):
        raise RequestError(None, name, text, f"expected {KINDS[name].form}", "See --help or /help.") from None


def setting(name: str, words: Sequence[str]) -> tuple[str, Any]:
    """A field and its value from what a user typed: its name and words; "none" is no limit, no value, an empty list.

    RequestError for a name that is no field of a conversation, and for words that are no value of it.
    """
    field = name.strip("-").replace("-", "_")
    known = [known for known in FIELDS if known not in OF_ONE_PROMPT]
    if field not in known:
        fix = advice(field, known, "/help lists them.")
        raise RequestError(None, name, " ".join(words), "is not a setting of a conversation", fix)
    kind = KINDS[field]
    if [word.lower() for word in words] == ["none"]:
        return field, None
    if not words or (len(words) > 1 and not kind.is_list):
        raise RequestError(None, field, " ".join(words), "expected one value", f"Type /set {field} {kind.form}.")
    values = [_read(field, word) for word in words]
    return field, kind.collect(values) if kind.is_list else values[0]
