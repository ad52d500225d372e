"""`foreword migrate`: the command line of another engine's server as one of `foreword serve`."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path, PureWindowsPath
from typing import Annotated, Any

import typer

from foreword.batch import SamplingParams
from foreword.cli.app import flag_of, option_names, real_command
from foreword.cli.elsewhere import Elsewhere, elsewhere, options_of
from foreword.cli.options import OF_EXECUTORS, SETTINGS, Json
from foreword.cli.terminal import print_rows
from foreword.errors import ConfigError, shown
from foreword.names import OTHERS, advice, plain_name

ENGINES = ("vllm", "llama.cpp", "ollama")
MODULE = "vllm.entrypoints.openai.api_server"
PROGRAMS = {
    "vllm": (("vllm", "serve"), ("serve",), ("python", "-m", MODULE), ("-m", MODULE), (MODULE,)),
    "llama.cpp": (("llama-server",), ("llama", "serve")),
}
"""Engine → the words that start its server; the first one is the base name of a path."""
RUNNERS = (("uv", "run"), ("poetry", "run"), ("sudo",), ("exec",), ("nohup",), ("env",), ("time",))
"""Words that run the program that follows them, without an effect on what it serves."""
OTHER_PROGRAMS = re.compile(
    r"python|vllm|ollama|llama(-.*)?|docker|podman|nerdctl|kubectl|bash|sh|ssh|cd|source|export|uvx?|poetry|conda|ray"
    r"|torchrun|srun|numactl|taskset"
)
"""Base names of first words that are not models."""
SHELL = re.compile(r"&&?|\|\|?|;|\d?>.*|<.*")
VARIABLE = re.compile(r"([A-Za-z_]\w*)=.*", re.S)
VARIABLES = {
    r"HF_\w+|CUDA_VISIBLE_DEVICES|HTTPS?_PROXY|NO_PROXY": "It is read here too: set it for this command.",
    r"VLLM_API_KEY|LLAMA_API_KEY": "Set FOREWORD_SERVE_API_KEY to this key: without one the server needs none.",
    r"LLAMA_ARG_\w+": "An option of llama-server means the same: give it in the command line.",
    r"\w+": "No variable corresponds to it.",
}
"""Name of a variable of the environment → what to do with it; the first that fits."""
EXPANSION = re.compile(r"\$(\w+|\{\w+\}|\(.*)")
"""A part of a word that a shell replaces."""
MODEL = ("model", "-m", "hf", "-hf", "hf_repo", "from")
"""Options of other programs that name the model."""
STATES = ("on", "off", "auto", "true", "false")
"""Values of options that may have none."""
INSTRUCTION = re.compile(r"([A-Za-z]+)(?:[ \t]+(.*))?")
"""A line of a Modelfile; a value in quotes may go over several."""
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
"""The factors of the units of vLLM's numbers."""


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

    Options without a counterpart are named with the reason and left out. The exit status is 1 if one was left out.
    """
    if engine not in ENGINES:
        raise ConfigError(f"{shown(engine)}: the engine must be one of {', '.join(ENGINES)}")
    table = options_of(engine)
    if engine == "ollama":
        rows = _replaced(_migrated(_modelfile(arguments), table))
    else:
        variables, words = _after_program(_words(arguments), engine)
        rows = _replaced([*variables, *_migrated(_options(words, table), table)])
    command = ["foreword", "serve", *chain.from_iterable(dict.fromkeys(row.here for row in rows))]
    if as_json:
        print(json.dumps({"command": command, "options": [asdict(row) for row in rows]}))
    else:
        print(shlex.join(command) + "\n")
        print_rows((row.given, shlex.join(row.here) or "–", row.remark) for row in rows)
    if any(not row.here for row in rows):
        raise typer.Exit(1)


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"ARGUMENTS {shown(line)}: is not a command line ({error}). Close its quotes") from None
    if not words:
        raise ConfigError(f"ARGUMENTS {shown(line)}: has no words. Give the command line of a server")
    if found := next((word for word in words if SHELL.fullmatch(word)), None):
        raise ConfigError(f"ARGUMENTS: {shown(found)} is of a shell. Give the command line of the server alone")
    return words


def _length(words: list[str], starts: Iterable[tuple[str, ...]]) -> int:
    """Return the number of words of the first of these beginnings that the words have; 0 if they have none."""
    given = [_base_name(words[0]), *words[1:]] if words else []
    return next((len(start) for start in starts if given[: len(start)] == list(start)), 0)


def _base_name(word: str) -> str:
    name = PureWindowsPath(word).name.removesuffix(".exe")
    return "python" if re.fullmatch(r"python[\d.]+", name) else name


def _after_program(words: list[str], engine: str) -> tuple[list[Row], list[str]]:
    """Return rows of the variables before the program, and the words after it.

    A line without a program begins with an option or with the model. Raise ConfigError for other programs.
    """
    rows: list[Row] = []
    is_run, whole, programs = False, words, PROGRAMS[engine]
    while words:
        if count := _length(words, programs):
            return rows, words[count:]
        if found := VARIABLE.fullmatch(words[0]):
            remark = next(remark for name, remark in VARIABLES.items() if re.fullmatch(name, found[1]))
            rows.append(Row(words[0], (), remark))
            count = 1
        elif not (count := _length(words, RUNNERS)):
            break
        is_run, words = True, words[count:]
    has_program = any(_length(whole[at:], (start for start in programs if start != ("serve",)))
                      for at in range(1, len(whole)))  # fmt: skip
    word = words[0] if words else whole[-1]
    if is_run or OTHER_PROGRAMS.fullmatch(_base_name(word)) or (has_program and not word.startswith("-")):
        raise ConfigError(
            f"ARGUMENTS: {shown(word)} cannot be followed. Give the command line from {' '.join(programs[0])} on"
        )
    return rows, words


def _options(words: list[str], table: Mapping[str, Elsewhere]) -> Iterator[tuple[str, str | None]]:
    """Yield the name and value of each option, once per value; the model, which has no name, as ("model", …)."""
    while words:
        word, *words = words
        if not word.startswith("-"):
            yield "model", word
            continue
        name, is_whole, value = re.sub(r"^(-O)(\d)$", r"\1=\2", word).partition("=")
        known = elsewhere(name, table)
        most = 1 if known is None else known.most
        values = [value] if is_whole else []
        while words and len(values) < most and not is_whole and not _is_option(words[0]):
            if known is not None and known.least < most == 1 and words[0] not in STATES:
                break
            values.append(words[0])
            words = words[1:]
        for one in values or (None,):
            yield name, one


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-[\d.]+", word)


def _modelfile(source: str) -> Iterator[tuple[str, str | None]]:
    """Yield the instructions of a Modelfile, and its parameters by their names, as options."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown(source)}: cannot be read as a Modelfile ({error}). Give its path") from None
    lines, has_model = enumerate(text.split("\n"), 1), False
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = INSTRUCTION.fullmatch(line.strip())
        name, rest = (found[1].lower(), found[2] or "") if found else ("", "")
        role = ""
        if name == "parameter":
            name, rest = _first_word(rest)
        elif name == "message":
            role, rest = _first_word(rest)
        if not name:
            raise ConfigError(f"line {number}, {shown(line)}: is not an instruction of a Modelfile. Correct it")
        value = rest.strip()
        while (unquoted := _unquoted(value)) is None:
            _, following = next(lines, (0, None))
            if following is None:
                raise ConfigError(
                    f"line {number}, {shown(line)}: its quotes do not end at the end of a line. Close them"
                )
            value = f"{value}\n{following.rstrip()}"
        has_model = has_model or name == "from"
        yield name, f"{role} {unquoted}" if role else unquoted
    if not has_model:
        raise ConfigError(f"{shown(source)}: no instruction FROM names a model. Add one")


def _first_word(text: str) -> tuple[str, str]:
    """Return the first word of a text, and the text behind it; words are separated by spaces and tabs."""
    first, *rest = text.split(maxsplit=1) or [""]
    return first, rest[0] if rest else ""


def _unquoted(value: str) -> str | None:
    """Return the value without its quotes; None if they are not closed at its end."""
    for mark in ('"""', '"'):
        if value.startswith(mark):
            is_closed = len(value) >= 2 * len(mark) and value.endswith(mark)
            return value[len(mark) : -len(mark)] if is_closed else None
    return value


PARTS = {
    "speculative_config": {
        "method": "speculation",
        "model": "speculation_model",
        "num_speculative_tokens": "speculation_num_tokens",
        "prompt_lookup_min": "speculation_min_match",
        "prompt_lookup_max": "speculation_max_match",
    },
    "kv_events_config": {"endpoint": "kv_events", "replay_endpoint": "kv_events_replay", "topic": "kv_events_topic"},
    "limit_mm_per_prompt": {"image": "max_images"},
}
"""Option of vLLM with a JSON object → its key → setting. Other keys may have the names of options of the server."""
MATCHES = {"speculation_min_match": "speculation_max_match", "speculation_max_match": "speculation_min_match"}
"""Setting → the one that vLLM gives the same value if it is not given."""


@dataclass(frozen=True, slots=True)
class Given:
    """An option of the other program. plain: its name as settings have it; for a key of --speculative-config, that of
    the setting. mine: the option of `foreword serve`; None if there is none. names, remark: of names.OTHERS, or
    why there is no option. is_off: it is the form of a switch that turns it off. left_out: values that the option does
    not have, and why.
    """

    name: str
    value: str | None
    text: str
    plain: str
    mine: str | None
    names: tuple[str, ...]
    remark: str
    is_off: bool
    left_out: Mapping[str, str] = field(default_factory=dict)


def _each(
    given: Iterable[tuple[str, str | None]], table: Mapping[str, Elsewhere], known: Collection[str]
) -> Iterator[Given]:
    for name, value in given:
        there = elsewhere(name, table) or Elsewhere(name)
        plain = name if there.remark else there.here or plain_name(there.names)
        if "." in name and "." not in plain:
            plain = f"{plain}.{plain_name(name.partition('.')[2])}"
        text = name if value is None else f"{name} {value}".replace("\n", "\\n")
        whole, _, key = plain.partition(".")
        if plain in PARTS:
            found = _json_object(name, value)
            if not found:
                yield Given(name, value, text, plain, None, (), "It is empty; leave it out.", there.is_off)
            parts = ((f"{name}.{key}", part) for key, part in found.items())
            written = ((key, part if isinstance(part, str) else json.dumps(part)) for key, part in parts)
            yield from _each(written, table, known)
            continue
        if whole in PARTS:
            plain = PARTS[whole].get(key, plain)
        names, remark = ((), there.remark) if there.remark else OTHERS.get(name) or OTHERS.get(plain) or ((), "")
        mine = None if there.remark else plain if plain in known else next((one for one in names if one in known), None)
        if mine == "speculation_model" and value == "[ngram]":
            plain = mine = "speculation"
            value = "ngram"
        values = _values(there, value)
        if not values:
            yield Given(name, value, text, plain, None, (), "It is empty; leave it out.", there.is_off)
        for one in values:
            remark = remark if mine != plain else ""
            yield Given(name, one, text, plain, mine, names, remark, there.is_off, there.left_out)


def _values(there: Elsewhere, value: str | None) -> list[str | None]:
    """Return the values of an option as they are written here."""
    if value is None:
        return [None]
    if there.separator == "json":
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = None
        return [str(one) for one in found] if isinstance(found, list) else [value]
    if there.separator:
        return [one for one in value.split(there.separator) if one]
    if there.unit == "n":
        number = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)([kmgKMG])", value)
        return [value if number is None else str(int(float(number[1]) * UNITS[number[2]]))]
    return [there.values.get(value, f"{value}{there.unit}")]


def _json_object(name: str, value: str | None) -> dict[str, Any]:
    try:
        found = json.loads(value or "")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} {shown(value)}: is not a JSON object. Give one, in quotes of the shell")
    return found


def _migrated(options: Iterable[tuple[str, str | None]], table: Mapping[str, Elsewhere]) -> Iterator[Row]:
    command: Any = real_command("serve")
    known = option_names(command)
    parameters = {field.name for field in fields(SamplingParams)}
    given = list(_each(options, table, known))
    values = {one.mine: one.value for one in given if one.mine is not None}
    models = [one for one in given if one.name in MODEL or one.plain in MODEL]
    named = sorted((one for one in models if one.value), key=lambda one: one.name == "model")
    num_adapters = 0
    for one in given:
        if one in models and not one.value:
            yield Row(one.text, (), f"{one.name} needs a value, the model.")
        elif one in models and one is not named[0]:
            beside = "It follows no option, and " * (one.name == "model")
            yield Row(one.text, (), f"{beside}{named[0].value} is the model.")
        elif one in models and str(one.value).startswith("-"):
            yield Row(one.text, (), f"{shown(one.value)} would be read as an option. Give the path of the model.")
        elif one in models:
            yield _checked(Row(one.text, (str(one.value),)), command)
        elif one.mine == "adapter" and one.value and (one.name == "adapter" or one.plain == "lora"):  # a path alone
            num_adapters += 1
            name = f"adapter{num_adapters if num_adapters > 1 else ''}"
            remark = f"It is used by requests that name it as their model: {name}."
            yield _checked(Row(one.text, ("--adapter", f"{name}={one.value}"), remark), command)
        elif one.mine == "adapter" and one.value:
            here = ("--adapter", adapter) if (adapter := _adapter(one.value)) else ()
            yield _checked(Row(one.text, here, "" if here else "--adapter needs NAME=PATH."), command)
        elif one.mine is not None:
            yield _checked(_together(_with_value(one, known[one.mine]), one.mine, values), command)
        elif found := next((name for name in (one.plain, *one.names) if name in parameters), None):
            yield Row(one.text, (), f"A parameter of each request: {found}.")
        else:
            remark = one.remark or advice(one.name, known, "Nothing here corresponds to it.", form=flag_of)
            yield Row(one.text, (), remark)
    if not models and not {"models_dir", "config"} & set(values):
        yield Row("model", (), "None is given. Add a model, or --models-dir.")


def _replaced(rows: Iterable[Row]) -> list[Row]:
    """Return the rows without the values that a later option of the command replaces."""
    known = option_names(real_command("serve"))
    with_one_value = {
        flag: name
        for name, option in known.items()
        if not option.multiple
        for flag in (*option.opts, *option.secondary_opts)
    }
    kept: list[Row] = []
    last: dict[str, tuple[str, ...]] = {}
    for row in reversed(list(rows)):
        name = with_one_value.get(row.here[0], "") if row.here else ""
        if name and last.setdefault(name, row.here) != row.here:
            row = Row(row.given, (), f"A later option replaces it: {shlex.join(last[name])}.")
        kept.append(row)
    return kept[::-1]


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
        return Row(row.given, (), f"{shlex.join(row.here)} needs --executor {' or '.join(kinds)}: give both.")
    return row


def _with_value(one: Given, option: Any) -> Row:
    """Return the translation of an option that `foreword serve` has."""
    text, value, remark, flag = one.text, one.value, one.remark, max(option.opts, key=len)
    if option.is_flag:
        is_off = one.is_off or one.plain.startswith("no_") or (value or "").lower() in ("false", "0")
        flags = option.secondary_opts if is_off else option.opts
        return Row(text, (max(flags, key=len),) if flags else (), remark)
    if value is None:
        return Row(text, (), f"{flag} needs a value. {remark}".strip())
    if value in one.left_out:
        return Row(text, (), one.left_out[value])
    if one.mine == "host" and "/" in value:
        return Row(text, (), "The server listens at addresses, not at sockets in files.")
    if remark.startswith("a number of bytes, not"):
        return Row(text, (), f"Give {flag}, {remark}.")
    return Row(text, (flag, _value(one.mine or "", value)), remark)


def _adapter(value: str) -> str | None:
    """Return an adapter as NAME=PATH, from this form or from an object in JSON; None if it has neither form."""
    if not value.startswith("{"):
        return value if "=" in value else None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    name, path = (found.get(key) for key in ("name", "path"))
    return f"{name}={path}" if isinstance(name, str) and isinstance(path, str) else None


def _checked(row: Row, command: Any) -> Row:
    """Return the row, or, where the command refuses its words, one that says why."""
    if found := next((found for word in row.here if (found := EXPANSION.search(word))), None):
        return Row(row.given, (), f"A shell replaces {shown(found[0])}: give its value.")
    try:
        command.make_context("serve", list(row.here))
    except (ConfigError, typer.BadParameter) as error:
        return Row(row.given, (), " ".join(str(error).split()))
    return row
