"""`foreword migrate`: the command line of another engine's server as one of `foreword serve`."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword.batch import SamplingParams
from foreword.cli.app import flag_of, option_names, real_command
from foreword.cli.options import OF_EXECUTORS, SETTINGS, Json
from foreword.cli.terminal import print_rows
from foreword.errors import ConfigError, shown
from foreword.names import OTHERS, advice, plain_name

ENGINES = ("vllm", "llama.cpp", "ollama")
MODULE = "vllm.entrypoints.openai.api_server"
PROGRAMS = ("vllm", "serve", "python", "python3", MODULE, "llama-server", "ollama")
MODEL = ("model", "-m", "hf", "-hf", "hf_repo", "model_tag", "from")
"""Options of other programs that name the model."""
SWITCH = re.compile(
    r"(enable|disable|no|trust|enforce|use|mlock|flash_attn|fa|metrics|jinja|verbose|cont_batching)(_|$)"
)
"""Prefixes of the names of options without a value, or with one of `STATES`."""
STATES = ("on", "off", "auto", "true", "false")
LISTS = ("lora_modules", "served_model_name")
"""Options with several values after them."""


@dataclass(frozen=True, slots=True)
class Row:
    """The translation of one option. here: the arguments of `foreword serve`; () if there are none."""

    given: str
    here: tuple[str, ...]
    remark: str = ""


def migrate(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="vllm, llama.cpp or ollama.")],
    arguments: Annotated[
        str,
        typer.Argument(
            metavar="ARGUMENTS", help="Its command line in quotes; for ollama a Modelfile, or - for standard input."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Translate the command line of another engine's server into one of `foreword serve`.

    Options without a counterpart are named with the reason and left out. The exit status is 1 if one was left out that
    changes what is served.
    """
    if engine not in ENGINES:
        raise ConfigError(f"{shown(engine)}: the engine must be one of {', '.join(ENGINES)}")
    options = _modelfile(arguments) if engine == "ollama" else _options(_words(arguments))
    rows = list(_migrated(options))
    command = ["foreword", "serve", *(word for row in rows for word in row.here)]
    if as_json:
        print(json.dumps({"command": command, "options": [asdict(row) for row in rows]}))
    else:
        print(shlex.join(command) + "\n")
        print_rows((row.given, shlex.join(row.here) or "–", row.remark) for row in rows)
    if any(not row.here for row in rows):
        raise typer.Exit(1)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"ARGUMENTS {shown(line)}: is not a command line ({error}). Close its quotes") from None


def _options(words: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the name and value of each option; the model, which has no name, as ("model", …)."""
    while words and (words[0] in PROGRAMS or words[:2] == ["-m", MODULE]):
        words = words[1:]
    while words:
        word, *words = words
        if not word.startswith("-"):
            yield "model", word
        elif "=" in word:
            name, _, value = word.partition("=")
            yield name, value
        elif plain_name(word) in LISTS:
            while words and not _is_option(words[0]):
                yield word, words[0]
                words = words[1:]
        elif not words or _is_option(words[0]) or (SWITCH.match(plain_name(word)) and words[0] not in STATES):
            yield word, None
        else:
            yield word, words[0]
            words = words[1:]


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-[\d.]+", word)


def _modelfile(source: str) -> Iterator[tuple[str, str | None]]:
    """Yield the instructions of a Modelfile, as options."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown(source)}: cannot be read as a Modelfile ({error}). Give its path") from None
    text = re.sub(r'"""(.*?)"""', lambda quoted: json.dumps(quoted[1]), text, flags=re.DOTALL)
    for line in text.splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if not instruction or instruction.startswith("#"):
            continue
        if instruction.upper() == "PARAMETER":
            name, _, rest = rest.strip().partition(" ")
            yield name, rest.strip().strip('"')
        else:
            yield instruction.lower(), rest.strip().strip('"')


REMARKS: Mapping[str, str] = {
    "system": "Send it as the first message of each conversation, with the role system.",
    "template": "The chat template is read from the model's files.",
    "license": "It stays with the model's files.",
    "message": "Send it in the messages of each conversation.",
    "tool_call_parser": "The format of calls is found in the chat template; --message-format chooses another.",
    "reasoning_parser": "The format of reasoning is found in the chat template; --message-format chooses another.",
    "enable_auto_tool_choice": "Calls are read whenever a request has tools; leave it out.",
    "jinja": "Chat templates are always rendered; leave it out.",
    "cont_batching": "Requests are always batched; leave it out.",
    "distributed_executor_backend": "--tensor-parallel-size starts processes of its own; leave it out.",
}
"""Name → what to do in its place, for what names.OTHERS, which is of settings and parameters, does not have."""
SPECULATIVE = {
    "method": "speculation",
    "model": "speculation_model",
    "num_speculative_tokens": "speculation_num_tokens",
    "prompt_lookup_min": "speculation_min_match",
    "prompt_lookup_max": "speculation_max_match",
}
"""Key of vLLM's --speculative-config → setting. Other keys may have the names of options of the server."""
MATCHES = {"speculation_min_match": "speculation_max_match", "speculation_max_match": "speculation_min_match"}
"""Setting → the one that vLLM gives the same value if it is not given."""


@dataclass(frozen=True, slots=True)
class Given:
    """An option of the other program. plain: its name as settings have it; for a key of --speculative-config, that of
    the setting. mine: the option of `foreword serve`; None if there is none. names, remark: of names.OTHERS.
    """

    name: str
    value: str | None
    text: str
    plain: str
    mine: str | None
    names: tuple[str, ...]
    remark: str


def _each(given: Iterable[tuple[str, str | None]], known: Collection[str]) -> Iterator[Given]:
    for name, value in given:
        plain, text = plain_name(name), name if value is None else f"{name} {value}"
        if plain == "speculative_config":
            parts = ((f"{name}.{key}", part) for key, part in _json_object(name, value).items())
            yield from _each(((key, part if isinstance(part, str) else json.dumps(part)) for key, part in parts), known)
            continue
        if plain.startswith("speculative_config."):
            plain = SPECULATIVE.get(plain.partition(".")[2], plain)
        unknown = (), "Nothing here corresponds to it." if plain.startswith("speculative_config.") else ""
        names, remark = OTHERS.get(name) or OTHERS.get(plain) or unknown
        mine = plain if plain in known else next((one for one in names if one in known), None)
        if mine == "speculation_model" and value == "[ngram]":
            plain = mine = "speculation"
            value = "ngram"
        yield Given(name, value, text, plain, mine, names, remark if mine != plain else "")


def _json_object(name: str, value: str | None) -> dict[str, Any]:
    try:
        found = json.loads(value or "")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} {shown(value)}: is not a JSON object. Give one, in quotes of the shell")
    return found


def _migrated(options: Iterable[tuple[str, str | None]]) -> Iterator[Row]:
    command: Any = real_command("serve")
    known = option_names(command)
    parameters = {field.name for field in fields(SamplingParams)}
    given = list(_each(options, known))
    values = {one.mine: one.value for one in given if one.mine is not None and one.plain not in REMARKS}
    num_adapters, model = 0, ""
    for one in given:
        if model and one.name == "model":
            yield Row(one.text, (), f"It follows no option, and {model} is the model.")
        elif one.name in MODEL or one.plain in MODEL:
            model = one.value or model
            yield (
                Row(one.text, (one.value,)) if one.value else Row(one.text, (), f"{one.name} needs a value, the model.")
            )
        elif one.plain in REMARKS:
            yield Row(one.text, (), REMARKS[one.plain])
        elif one.mine == "adapter" and one.value and (one.name == "adapter" or one.plain == "lora"):  # a path alone
            num_adapters += 1
            name = f"adapter{num_adapters if num_adapters > 1 else ''}"
            remark = f"It is used by requests that name it as their model: {name}."
            yield _checked(Row(one.text, ("--adapter", f"{name}={one.value}"), remark), command)
        elif one.mine is not None:
            yield _checked(_together(_with_value(one, known[one.mine]), one.mine, values), command)
        elif found := next((name for name in (one.plain, *one.names) if name in parameters), None):
            yield Row(one.text, (), f"A parameter of each request: {found}.")
        else:
            remark = one.remark or advice(one.name, known, "Nothing here corresponds to it.", form=flag_of)
            yield Row(one.text, (), remark)


def _value(mine: str, value: str) -> str:
    """Return the value of an option as it is called here."""
    if mine == "speculation":
        return "head" if value.endswith("mtp") else value
    choices = SETTINGS[mine].choices if mine in SETTINGS else ()
    return next((name for name in OTHERS.get(value.lower(), ((), ""))[0] if name in choices), value)


def _together(row: Row, mine: str, values: Mapping[str, str | None]) -> Row:
    """Return the row with what its option needs beside it. values: of the given options, by their names here."""
    if not row.here:
        return row
    value = row.here[-1]
    if mine == "speculation_model":
        method = values.get("speculation") or "draft_model"
        if method != "draft_model":
            return Row(row.given, (), f"It is of the method draft_model, and {method} is given.")
        beside = () if "speculation" in values else ("--speculation", method)
        return replace(row, here=(*row.here, *beside), remark="")
    if mine == "speculation" and value == "draft_model" and "speculation_model" not in values:
        return Row(row.given, (), "draft_model needs --speculation-model, and no model is given.")
    if mine in MATCHES and MATCHES[mine] not in values:
        return replace(row, here=(*row.here, flag_of(MATCHES[mine]), value))
    kinds = [kind for kind, one in OF_EXECUTORS.get(mine, {}).items() if not one.choices or value in one.choices]
    if kinds and "native" not in kinds and "executor" not in values:
        return replace(row, remark=f"{row.remark} It needs --executor {' or '.join(kinds)}.".strip())
    return row


def _with_value(one: Given, option: Any) -> Row:
    """Return the translation of an option that `foreword serve` has."""
    text, value, remark, flag = one.text, one.value, one.remark, max(option.opts, key=len)
    if option.is_flag:
        is_off = one.plain.startswith("no_")
        flags = option.secondary_opts if is_off or (value or "").lower() in ("false", "0") else option.opts
        return Row(text, (max(flags, key=len),) if flags else (), remark)
    if value is None:
        return Row(text, (), f"{flag} needs a value. {remark}".strip())
    if remark.startswith("a number of bytes, not"):
        return Row(text, (), f"Give {flag}, {remark}.")
    return Row(text, (flag, _value(one.mine or "", value)), remark)


def _checked(row: Row, command: Any) -> Row:
    """Return the row, or, where the command refuses its words, one that says why."""
    try:
        command.make_context("serve", list(row.here))
    except (ConfigError, typer.BadParameter) as error:
        return Row(row.given, (), " ".join(str(error).split()))
    return row
