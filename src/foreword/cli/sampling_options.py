"""The fields of `SamplingParams` as options of a command, and as settings of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword import SamplingParams
from foreword.cli.options import Group
from foreword.engine.intake import DEFAULT_PARAMS
from foreword.errors import ConfigError, RequestError
from foreword.jsonfile import read_object
from foreword.names import advice

HELP = {
    "Sampling": {
        "max_tokens": "Maximum number of tokens of the answer.",
        "temperature": "0: always the likeliest token; around 0.7: variety.",
        "top_p": "Only the likeliest tokens with this probability in sum.",
        "top_k": "Only this many likeliest tokens; 0: all.",
        "min_p": "Only tokens with this part of the largest probability.",
        "typical_p": "Only tokens of typical probability, with this in sum.",
        "top_n_sigma": "Only logits within this many deviations of the largest.",
        "xtc_probability": "The chance that all likely tokens but one are dropped.",
        "xtc_threshold": "The probability that makes a token likely for that.",
        "repetition_penalty": "Above 1: fewer tokens of prompt and answer again.",
        "presence_penalty": "Subtracted from tokens that the answer has.",
        "frequency_penalty": "The same, for each time that it has them.",
        "dry_multiplier": "Against repeated phrases; around 0.8.",
        "dry_base": "Its growth with the length of the phrase.",
        "dry_allowed_length": "Phrases shorter than this are not penalised.",
        "dry_range": "Tokens in which phrases are searched; -1: all.",
        "dry_sequence_breakers": "No phrase goes over this text. Repeatable.",
        "seed": "Equal seeds give equal answers.",
        "stop": "The answer ends before this text. Repeatable.",
        "bad_words": "Text that is never written. Repeatable.",
        "min_tokens": "The answer does not end before this many tokens.",
        "thinking_end": "The text or token that ends a first part of thoughts.",
        "thinking_start": "The text or token that begins it, in answers that have one.",
        "thinking_budget": "Most tokens before it; then it is forced.",
        "n": "Number of answers.",
        "best_of": "Candidates, of which the n most probable are shown.",
    },
    "Tokens": {
        "ignore_eos": "Do not end at the model's end tokens.",
        "stop_token_ids": "End at this token. Repeatable.",
        "include_stop_str_in_output": "Show the stop that ended it.",
        "skip_special_tokens": "Show special tokens in the text.",
        "spaces_between_special_tokens": "No spaces between such tokens.",
        "allowed_token_ids": "Choose only these. Repeatable.",
        "bad_words_token_ids": "Never these in a row. Repeatable.",
        "dry_breaker_token_ids": "As --dry-sequence-breakers.",
        "logit_bias": "Added to a logit, as 5=-2.5. Repeatable.",
        "truncate_prompt_tokens": "Only the prompt's last ones; -1: what fits.",
        "logprobs": "Alternatives shown per token, with --json.",
        "prompt_logprobs": "The same for the tokens of the prompt.",
    },
}
"""Heading → field of `SamplingParams` → help of its option. A new field needs one line here."""

FIELDS = {name: text for panel in HELP.values() for name, text in panel.items()}

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


_KINDS = {
    "int": Kind(int, "N"),
    "int | None": Kind(int, "N"),
    "float": Kind(float, "X"),
    "float | None": Kind(float, "X"),
    "bool": Kind(_on_or_off, "on|off"),
    "str | Sequence[str]": Kind(str, "TEXT", is_list=True),
    "str | int | None": Kind(_text_or_id, "TEXT|ID"),
    "Sequence[str]": Kind(str, "TEXT", is_list=True),
    "Sequence[str] | None": Kind(str, "TEXT", is_list=True),
    "Sequence[int]": Kind(int, "ID", is_list=True),
    "Sequence[int] | None": Kind(int, "ID", is_list=True),
    "Sequence[Sequence[int]]": Kind(_token_ids, "ID,ID", is_list=True),
    "Mapping[int, float] | None": Kind(_bias, "ID=X", is_list=True, collect=dict),
}
"""Annotation of a field of `SamplingParams` → its values."""

ON = frozenset(field.name for field in fields(SamplingParams) if field.default is True)
KINDS = {field.name: _KINDS[str(field.type)] for field in fields(SamplingParams) if field.name in FIELDS}


def sampling_options(without: Sequence[str] = ()) -> Group[SamplingParams]:
    """Options of a command that become a `SamplingParams`, checked. ``without``: fields that it does not have."""
    options = {
        _parameter(name): _option(name, panel, getattr(DEFAULT_PARAMS, name))
        for panel, texts in HELP.items()
        for name in texts
        if name not in without
    }
    schema = typer.Option(metavar="FILE", help="The answer is JSON of this schema.", rich_help_panel="Sampling")
    return Group({**options, "json_schema": (Annotated[Path | None, schema], None)}, _params)


def _params(json_schema: Path | None, **values: Any) -> SamplingParams:
    given = {name: _collected(name, value) for name, value in values.items() if name in FIELDS}
    given |= {name: not values[_parameter(name)] for name in ON & FIELDS.keys()}
    if json_schema is not None:
        given["structured_outputs"] = {"json": read_object(json_schema, ConfigError)}
    params = SamplingParams(**given)
    params.check()  # before a model is loaded
    return params


def _parameter(name: str) -> str:
    """The command's parameter: of a field that is on by default, the flag that switches it off."""
    return f"no_{name}" if name in ON else name


def _option(name: str, panel: str, default: Any) -> tuple[Any, object]:
    """The annotation and the default of a command's parameter."""
    kind = KINDS[name]
    if kind.read is _on_or_off:
        flag = f"--{_parameter(name).replace('_', '-')}"
        return Annotated[bool, typer.Option(flag, help=FIELDS[name], rich_help_panel=panel)], False
    value: Any = kind.read if kind.read in (int, float) else str
    option = typer.Option(metavar=kind.form, help=FIELDS[name], rich_help_panel=panel)
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
