"""Tokenizers from the files of a directory: tokenizer.json, and the configurations beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from foreword.errors import ModelError
from foreword.jsonfile import read_bytes, read_object
from foreword.models.files import FETCH_AGAIN
from foreword.models.text_bounds import check_growth
from foreword.models.tokenizer_parts import TokenizerParts, panics_caught, turn_ends


def read_from_directory(folder: Path, *, lowercase: bool = False) -> TokenizerParts:
    """See `foreword.models.tokenizer.Tokenizer.from_directory`."""
    backend = _read_backend(folder / "tokenizer.json")
    if lowercase:
        own = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = _read_optional(config_path)
    special = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _token_text(config_path, name, config.get(name))) is not None
    }
    ids = {name: backend.token_to_id(text) for name, text in special.items()}
    ends = _end_ids(folder / "generation_config.json") or [*_end_ids(folder / "config.json"), *turn_ends(backend)]
    if (eos_id := ids.get("eos_token")) is not None:
        ends.insert(0, eos_id)
    of_processor = _read_optional(folder / "chat_template.json").get("chat_template")
    templates = _chat_templates(config.get("chat_template")) | _chat_templates(of_processor)
    if template_path.exists():
        try:
            templates["default"] = read_bytes(template_path, ModelError).decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{template_path}: {error}. {FETCH_AGAIN}") from None
    response_template = config.get("response_template")
    return TokenizerParts(
        backend, ids.get("bos_token"), tuple(dict.fromkeys(ends)), templates, special, response_template
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        fix = "Give a directory with the fast tokenizer's file; a tokenizer.model alone is not supported"
        raise ModelError(f"{path}: cannot be read (there is no such file). {fix}")
    content = read_bytes(path, ModelError)
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
    """The file's JSON object, {} if it does not exist."""
    return read_object(path, ModelError) if path.exists() else {}


def _token_text(path: Path, name: str, value: object) -> str | None:
    """A token in a configuration: its text, or an object with the text as "content"."""
    if isinstance(value, Mapping):
        value = value.get("content")
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ModelError(f"{path}: {name} is {value!r:.80}, not Unicode text. {FETCH_AGAIN}") from None
    return value


def _end_ids(path: Path) -> list[int]:
    """eos_token_id of a configuration: one id, a list of ids, or none."""
    value = _read_optional(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ModelError(f"{path}: eos_token_id is {value!r:.80}, not a token id or a list of these. {FETCH_AGAIN}")
    return ids


def _chat_templates(value: object) -> dict[str, str]:
    """The configuration's chat_template: one source, or a list of {"name", "template"}."""
    if isinstance(value, str):
        return {"default": value}
    entries = [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []
    named = [(entry.get("name"), entry.get("template")) for entry in entries]
    return {name: source for name, source in named if isinstance(name, str) and isinstance(source, str)}
