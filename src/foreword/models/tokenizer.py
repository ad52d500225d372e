"""Text to token ids and back, and messages to a prompt, by a model's vocabulary and chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers

from foreword.errors import ModelError, RequestError
from foreword.models.detokenizer import Detokenizer, TokenBytes
from foreword.models.tokenizer_gguf import build_from_gguf, turn_ends


class Tokenizer:
    """A model's tokenizer and chat templates.

    ``bos_id`` is the token that begins a text, or None; ``eos_ids`` end a reply, the model's eos_token first.
    ``chat_templates`` are Jinja sources by name: "default", and "tool_use" if there is a separate one for tools.
    ``special_tokens`` are variables of the templates: bos_token, eos_token, unk_token, pad_token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self._chat_sources = dict(chat_templates or {})
        self._special_tokens = dict(special_tokens or {})
        self._renderers: dict[str, Callable[..., str]] = {}
        self._token_bytes = TokenBytes(backend)
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Self:
        """From a GGUF file's metadata (``tokenizer.ggml.*``). ModelError if it is incomplete or not supported."""
        parts = build_from_gguf(metadata)
        return cls(
            parts.backend,
            bos_id=parts.bos_id,
            eos_ids=parts.eos_ids,
            chat_templates=parts.chat_templates,
            special_tokens=parts.special_tokens,
        )

    @classmethod
    def from_directory(cls, path: str | Path) -> Self:
        """From tokenizer.json and, if present, tokenizer_config.json, generation_config.json, config.json and
        chat_template.jinja. ModelError if a file is damaged or tokenizer.json is missing.
        """
        path = Path(path)
        try:
            backend = tokenizers.Tokenizer.from_buffer((path / "tokenizer.json").read_bytes())
        except OSError as error:
            fix = "Give a directory with the fast tokenizer's file; a tokenizer.model alone is not supported"
            raise ModelError(f"{path / 'tokenizer.json'}: cannot be read ({error.strerror}). {fix}") from None
        except Exception as error:  # tokenizers raises plain Exception
            raise ModelError(f"{path / 'tokenizer.json'}: {error}. The file is damaged: fetch it again") from None
        backend.no_truncation()  # some files truncate or pad silently; limits are the caller's
        backend.no_padding()
        config = _read_json(path / "tokenizer_config.json")
        generation, model = _read_json(path / "generation_config.json"), _read_json(path / "config.json")
        special = {
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := _token_text(config.get(name))) is not None
        }
        bos_id = backend.token_to_id(special.get("bos_token", ""))
        ends = _id_list(generation.get("eos_token_id")) or _id_list(model.get("eos_token_id")) + turn_ends(backend)
        eos_id = backend.token_to_id(special.get("eos_token", ""))
        eos_ids = dict.fromkeys(ends if eos_id is None else [eos_id, *ends])
        templates = _chat_templates(config.get("chat_template"))
        if (source := _read(path / "chat_template.jinja")) is not None:
            templates["default"] = source
        return cls(backend, bos_id=bos_id, eos_ids=list(eos_ids), chat_templates=templates, special_tokens=special)

    @property
    def vocab_size(self) -> int:
        """The number of token ids. A model's logits may be wider because of padding."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        ``add_special_tokens`` adds the beginning-of-text token if the model uses one; pass False for a rendered chat
        template, which contains it. With ``parse_special`` False, "<|im_end|>" in the text is ten
        ordinary characters rather than the token that ends a turn. RequestError if ``text`` is not Unicode text.
        """
        backend = self.backend if parse_special else self._literal_backend
        try:
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            reason, fix = "is not text of valid Unicode characters", "Give a str without lone surrogates"
            raise RequestError(None, "prompt", text, reason, fix) from None

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Ids outside the vocabulary add nothing; invalid UTF-8 becomes U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens)
        try:
            return detokenizer.push(token_ids) + detokenizer.finish()
        except (OverflowError, TypeError) as error:
            reason, fix = f"not token ids: {error}", f"Give integers from 0 to {self.vocab_size - 1}"
            raise RequestError(None, "token_ids", token_ids, reason, fix) from None

    def detokenizer(self, skip_special_tokens: bool = True, *, continues: bool = False) -> Detokenizer:
        """An incremental decoder; ``continues``: the text follows a prompt, so its first space is kept."""
        hidden = self._special_ids if skip_special_tokens else ()
        return Detokenizer(self._token_bytes, hidden=hidden, continues=continues)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text, special or not, possibly part of a character. b"" for an unknown id."""
        return self._token_bytes[token_id]

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._chat_sources)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt of a list of messages, to be encoded with ``add_special_tokens=False``.

        RequestError names the wrong message; ModelError if the model has no chat template or an invalid one.
        """
        name = "tool_use" if tools and "tool_use" in self._chat_sources else "default"
        render = self._renderer(name)
        return render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **extra)

    def _renderer(self, name: str) -> Callable[..., str]:
        """The `ChatTemplate.render` of a template, which is compiled on first use."""
        if name not in self._renderers:
            from foreword.models.chat import ChatTemplate  # Jinja takes 0.05 s to import; only chats need it

            if name not in self._chat_sources:
                raise ModelError(
                    "the model has no chat template. Give the prompt as text, or use a model tuned for conversation"
                )
            self._renderers[name] = ChatTemplate(self._chat_sources[name], self._special_tokens).render
        return self._renderers[name]

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """The same vocabulary (shared, not copied), which encodes special tokens as ordinary text."""
        literal = tokenizers.Tokenizer(self.backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if (value := getattr(self.backend, part)) is not None:
                setattr(literal, part, value)
        added = sorted(self.backend.get_added_tokens_decoder().items())
        literal.add_tokens([token for _, token in added])
        literal.encode_special_tokens = True
        return literal


def _read(path: Path) -> str | None:
    """The file's text, None if it does not exist."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}. The file is damaged: fetch it again") from None


def _read_json(path: Path) -> dict[str, Any]:
    """The file's JSON object, {} if it does not exist."""
    text = _read(path)
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}. The file is damaged: fetch it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}, not an object. Fetch it again")
    return value


def _token_text(value: object) -> str | None:
    """A token in a configuration: its text, or an object with the text as "content"."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _id_list(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if type(i) is int and i >= 0]


def _chat_templates(value: object) -> dict[str, str]:
    """The configuration's chat_template: one source, or a list of {"name", "template"}."""
    if isinstance(value, str):
        return {"default": value}
    entries = [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []
    named = [(entry.get("name"), entry.get("template")) for entry in entries]
    return {name: source for name, source in named if isinstance(name, str) and isinstance(source, str)}
