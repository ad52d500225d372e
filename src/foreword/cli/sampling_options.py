"""The fields of `SamplingParams` as options of a command, and as settings of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword import SamplingParams
from foreword.batch.values.parameters import Parameter
from foreword.batch.values.sampling_params import PARAMETERS
from foreword.cli.options import Group, option_type, summary, typer_option, values_given
from foreword.engine.defaults import DEFAULT_PARAMS, described
from foreword.errors import ConfigError, RequestError
from foreword.jsonfile import parse_object, read_object
from foreword.models.generation_files import SUGGESTIBLE
from foreword.names import advice

WITHOUT_OPTION = ("detokenize", "structured_outputs")
"""Parameters that have no effect on a text answer, or that have options with other names."""

FIELDS = {row.name: row for row in PARAMETERS if row.name not in WITHOUT_OPTION}
"""The parameters that are options and settings, by name."""

OF_ONE_PROMPT = ("n", "best_of", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
"""Fields that a conversation does not have: each of its turns is one answer, shown as text."""

_OF_TOKENS = ("on|off", "ID", "ID,ID", "ID=X")
"""Types of values whose options are in a separate panel."""


@dataclass(frozen=True, slots=True)
class GivenParams:
    """Fields of `SamplingParams` that were given to a command, whose values can be. Raise RequestError for others."""

    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        SamplingParams(**{"max_tokens": None, **self.values})

    def over(self, default: SamplingParams) -> SamplingParams:
        """Return the parameters with the values of ``default`` where none was given."""
        return replace(default, **self.values)

    def remarks(self, suggested: Mapping[str, Any]) -> list[str]:
        """Return a line about the values that the model suggests and that were not given, if there are any."""
        followed = {name: value for name, value in suggested.items() if name not in self.values}
        return [f"as the model suggests, {described(followed)}"] if followed else []


def sampling_options(without: Sequence[str] = ()) -> Group[GivenParams]:
    """Add the options of a command that become sampling parameters, checked. ``without`` names the fields that it does
    not have.
    """
    options = {name: _option(row, getattr(DEFAULT_PARAMS, name)) for name, row in FIELDS.items() if name not in without}
    schema = typer.Option(
        metavar="FILE|JSON", help="The answer is JSON of this schema: a file, or its text.", rich_help_panel="Sampling"
    )
    return Group({**options, "json_schema": (Annotated[str | None, schema], None)}, _params)


def _params(json_schema: str | None, **values: Any) -> GivenParams:
    fields = {name: _collected(FIELDS[name], value) for name, value in values_given(values).items()}
    if json_schema is not None:
        fields["structured_outputs"] = {"json": _schema(json_schema)}
    return GivenParams(fields)


def _schema(text: str) -> dict[str, Any]:
    """Return the schema of a text, or of the file that it names."""
    if text.lstrip().startswith("{"):
        return parse_object(text, "--json-schema", ConfigError)
    return read_object(Path(text), ConfigError)


def _option(row: Parameter, default: Any) -> tuple[Any, object]:
    """Return the annotation and the default of a command's parameter."""
    shown = "" if row.kind.collect is None else " Repeatable."
    help = summary(row, default) + shown + " Shown with --json." * row.name.endswith("logprobs")
    if row.name in SUGGESTIBLE:
        help = help.replace("[default: ", "[default: the model's, or ")
    heading = "Tokens" if row.form in _OF_TOKENS else "Sampling"
    return Annotated[option_type(row) | None, typer_option(row, partial(_read, row), help, heading=heading)], None


def _read(row: Parameter, value: Any) -> Any:
    """Return the value of a parameter, or its items, from texts.

    Raise RequestError for a text that is not one of its values.
    """
    return _one(row, value) if row.kind.collect is None else [_one(row, item) for item in value]


def _one(row: Parameter, text: Any) -> Any:
    if not isinstance(text, str) and row.kind.collect is not dict:
        return text  # the name of a file
    try:
        return row.kind.read(text)
    except (AttributeError, KeyError, ValueError):
        raise RequestError(None, row.name, text, f"expected {row.form}", "See --help or /help.") from None


def _collected(row: Parameter, value: Any) -> Any:
    return value if row.kind.collect is None else row.kind.collect(value)


def setting(name: str, words: Sequence[str]) -> tuple[str, Any]:
    """Return a field and its value from what a user typed: its name and words; "none" means no limit, no value, an
    empty list.

    Raise RequestError for a name that is not a field of a conversation, and for words that are not a value of it.
    """
    field = name.strip("-").replace("-", "_")
    known = [known for known in FIELDS if known not in OF_ONE_PROMPT]
    if field not in known:
        fix = advice(field, known, "/help lists them.")
        raise RequestError(None, name, " ".join(words), "is not a setting of a conversation", fix)
    row = FIELDS[field]
    if [word.lower() for word in words] == ["none"]:
        return field, None
    is_list = row.kind.collect is not None
    if not words or (len(words) > 1 and not is_list):
        raise RequestError(None, field, " ".join(words), "expected one value", f"Type /set {field} {row.form}.")
    return field, _collected(row, _read(row, words if is_list else words[0]))
