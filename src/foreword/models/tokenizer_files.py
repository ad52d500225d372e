"""Tokenizers from the files of a directory: tokenizer.json, and the configurations beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from foreword.errors import ModelError
from foreword.models.config import Config
from foreword.models.files import FETCH_AGAIN
from foreword.models.text_bounds import check_growth
from foreword.models.text_files import read_bytes, read_object
from foreword.models.tokenizer_config import SPECIAL, configure
from foreword.models.tokenizer_parts import TokenizerParts, panics_caught, turn_ends
from foreword.models.tokenizer_ranks import RANKS_FILE, read_ranks

_OF_TEMPLATES = ("bos_token", "eos_token", "unk_token", "pad_token")
"""Special tokens that are variables of chat templates."""


def read_from_directory(folder: Path, *, lowercase: bool = False) -> TokenizerParts:
    """See `foreword.models.tokenizer.Tokenizer.from_directory`."""
    config_path = folder / "tokenizer_config.json"
    config = _read_optional(config_path)
    ranks, has_file = folder / RANKS_FILE, (folder / "tokenizer.json").exists()
    if ranks.exists() and not has_file:
        backend = read_ranks(ranks, Config(config_path, config))
    else:
        backend = _read_backend(folder / "tokenizer.json")
    if lowercase:
        own = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    texts = {name: _token_text(config_path, name, config.get(name)) for name in SPECIAL}
    special = {name: text for name in _OF_TEMPLATES if (text := texts[name]) is not None}
    ids = {name: backend.token_to_id(text) for name, text in special.items()}
    ends = _end_ids(folder / "generation_config.json") or [*_end_ids(folder / "config.json"), *turn_ends(backend)]
    if (eos_id := ids.get("eos_token")) is not None:
        ends.insert(0, eos_id)
    return TokenizerParts(
        backend,
        ids.get("bos_token"),
        tuple(dict.fromkeys(ends)),
        _templates(folder),
        special,
        config.get("response_template"),
        unread=configure(backend, Config(config_path, config)),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        fix = "Give a directory with the fast tokenizer's file; a tokenizer.model alone is not supported"
        raise ModelError(f"{path}: cannot be read (there is no such file). {fix}")
    content = read_bytes(path)
    try:
        with panics_caught():
            backend = tokenizers.Tokenizer.from_buffer(content)
        check_growth(backend)
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"{path}: {error!s:.500}. {FETCH_AGAIN}") from None
    backend.no_truncation()  # some files truncate or pad silently; limits are the caller's
    backend.no_padding()
    return backend


def _read_optional(path: Path) -> dict[str, Any]:
    """Return the file's JSON object, {} if it does not exist."""
    return read_object(path) if path.exists() else {}


def _token_text(path: Path, name: str, value: object) -> str | None:
    """Return a token in a configuration: its text, or an object with the text as "content"."""
    text = value.get("content") if isinstance(value, Mapping) else value
    if value is None:
        return None
    if not isinstance(text, str):
        raise ModelError(f"{path}: {name} is {value!r:.80}, not a token. {FETCH_AGAIN}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ModelError(f"{path}: {name} is {text!r:.80}, not Unicode text. {FETCH_AGAIN}") from None
    return text


def _end_ids(path: Path) -> list[int]:
    """Return eos_token_id of a configuration: one id, a list of ids, or none."""
    value = _read_optional(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ModelError(f"{path}: eos_token_id is {value!r:.80}, not a token id or a list of these. {FETCH_AGAIN}")
    return ids


def _templates(folder: Path) -> dict[str, str]:
    """Return the chat templates by name. Files of their own take the place of those in the configurations."""
    default, more = folder / "chat_template.jinja", folder / "additional_chat_templates"
    files = {"default": default} if default.exists() else {}
    files |= {path.stem: path for path in sorted(more.glob("*.jinja"))}
    if files:
        return {name: _text(path) for name, path in files.items()}
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):  # the latter of a processor
        found |= _chat_templates(folder / name, _read_optional(folder / name).get("chat_template"))
    return found


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: {error}. {FETCH_AGAIN}") from None


def _chat_templates(path: Path, value: object) -> dict[str, str]:
    """Return the chat_template of a configuration: one source, a list of {"name", "template"}, or sources by name."""
    match value:
        case None:
            return {}
        case str(source):
            return {"default": source}
        case [*entries]:
            found = [entry if isinstance(entry, Mapping) else {} for entry in entries]
            named = [(entry.get("name"), entry.get("template")) for entry in found]
        case {**sources}:
            named = list(sources.items())
        case _:
            named = [(None, None)]
    texts = {name: source for name, source in named if isinstance(name, str) and isinstance(source, str)}
    if len(texts) != len(named):
        raise ModelError(f"{path}: chat_template is {value!r:.80}, not a text or texts by name. {FETCH_AGAIN}")
    return texts
