"""`foreword migrate`: the command line of another engine's server as one of `foreword serve`."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword.batch import SamplingParams
from foreword.cli.app import flag_of, option_names, real_command
from foreword.cli.options import Json
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
"""Prefixes of the names of options without a value."""


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
        elif not words or _is_option(words[0]) or SWITCH.match(plain_name(word)):
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
}
"""Name → what to do in its place, for what names.OTHERS, which is of settings and parameters, does not have."""


def _migrated(options: Iterator[tuple[str, str | None]]) -> Iterator[Row]:
    command: Any = real_command("serve")
    known = option_names(command)
    parameters = {field.name for field in fields(SamplingParams)}
    for name, value in options:
        plain, text = plain_name(name), " ".join((name, *([value] if value is not None else [])))
        names, remark = OTHERS.get(name) or OTHERS.get(plain) or ((), "")
        mine = plain if plain in known else next((one for one in names if one in known), None)
        if name in MODEL or plain in MODEL:
            yield Row(text, (value,)) if value else Row(text, (), f"{name} needs a value, the model.")
        elif plain in REMARKS:
            yield Row(text, (), REMARKS[plain])
        elif mine is not None:
            there = value if value is None else next(iter(OTHERS.get(value.lower(), ((), ""))[0]), value)
            row = _with_value(text, known[mine], there, remark if mine != plain else "", is_off=plain.startswith("no_"))
            yield _checked(row, command)
        elif found := next((one for one in (plain, *names) if one in parameters), None):
            yield Row(text, (), f"A parameter of each request: {found}.")
        else:
            yield Row(text, (), remark or advice(name, known, "Nothing here corresponds to it.", form=flag_of))


def _with_value(text: str, option: Any, value: str | None, remark: str, *, is_off: bool) -> Row:
    """Return the translation of an option that `foreword serve` has."""
    flag = max(option.opts, key=len)
    if option.is_flag:
        flags = option.secondary_opts if is_off or (value or "").lower() in ("false", "0") else option.opts
        return Row(text, (max(flags, key=len),) if flags else (), remark)
    if value is None:
        return Row(text, (), f"{flag} needs a value. {remark}".strip())
    if remark.startswith("a number of bytes, not"):
        return Row(text, (), f"Give {flag}, {remark}.")
    return Row(text, (flag, value), remark)


def _checked(row: Row, command: Any) -> Row:
    """Return the row, or, where the command refuses its words, one that says why."""
    try:
        command.make_context("serve", list(row.here))
    except (ConfigError, typer.BadParameter) as error:
        return Row(row.given, (), " ".join(str(error).split()))
    return row
