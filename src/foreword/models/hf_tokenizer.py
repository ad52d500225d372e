"""The tokenizer of a model's directory: tokenizer.json, with tokenizer_config.json and the chat template beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from foreword.errors import ModelError
from foreword.models.chat import ChatTemplate
from foreword.models.config import read_json
from foreword.models.detokenizer import Spelling
from foreword.models.tokenizer import Tokenizer


def tokenizer_from_directory(folder: Path, eos_ids: Iterable[int]) -> Tokenizer:
    """ModelError if tokenizer.json is missing, damaged, or of a kind that text cannot be streamed from."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{path}: is missing. Fetch it from where the model came from, or save it with the model")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: is no tokenizer ({error}). Fetch it again") from None
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    names = {key: _text(config.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    ids = {key: backend.token_to_id(name) for key, name in names.items() if name}
    source = _template(folder, config)
    spelling, strip = _spelling(path, json.loads(backend.to_str())["decoder"])
    return Tokenizer(
        backend,
        spelling=spelling,
        strip_first_space=strip,
        bos_id=ids.get("bos_token"),
        eos_ids=[*eos_ids, *(i for key, i in ids.items() if key == "eos_token" and i is not None)],
        chat_template=ChatTemplate(source, names) if source else None,
    )


def _text(token: Any) -> str:
    """A special token's name: given as text, or as an object with its content."""
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _template(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template") or ""
    if isinstance(source, list):  # several by name
        named = {str(entry.get("name")): entry.get("template", "") for entry in source}
        source = named.get("default", "")
    return str(source)


def _spelling(path: Path, decoder: Any) -> tuple[Spelling, bool]:
    """How the vocabulary spells bytes, and whether a text's first space is its own addition."""
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return "byte_level", False
    if kinds & {"Metaspace", "ByteFallback"}:
        adds = any(step.get("prepend_scheme", "never") != "never" or step.get("type") == "Strip" for step in steps)
        return "sentencepiece", adds
    raise ModelError(f"{path}: decoder of kind {sorted(map(str, kinds))} is not supported. "
                     "Use a model with a byte-level or SentencePiece vocabulary")  # fmt: skip
