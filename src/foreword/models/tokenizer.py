"""Text to token ids and back, and messages to a prompt, by a model's vocabulary and chat template."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import tokenizers

from foreword import utf8
from foreword.arrays import I32
from foreword.errors import ContextLengthError, RequestError
from foreword.models.detokenizer import Detokenizer, TokenBytes
from foreword.models.infill import FORMS, Infill, find_infill
from foreword.models.text_bounds import TextBound
from foreword.models.tokenizer_files import read_from_directory
from foreword.models.tokenizer_gguf import build_from_gguf
from foreword.models.tokenizer_parts import TokenizerParts, panics_caught

if TYPE_CHECKING:
    from foreword.models.chat import ChatTemplate, InWords  # Jinja takes 0.05 s to import; only chats need it


class Tokenizer:
    """A model's tokenizer and chat templates.

    ``bos_id`` is the token that begins a text, or None; ``eos_ids`` end a reply, the model's eos_token first.
    ``chat_templates`` are Jinja sources by name: "default", and "tool_use" if there is a separate one for tools.
    ``special_tokens`` are variables of the templates: bos_token, eos_token, unk_token, pad_token.
    ``special_token_ids`` are the ids of all special tokens by their text, which `decode` leaves out.
    ``added_token_ids`` are these and those of other tokens that a text is cut at wherever it has them.
    ``response_template`` is Hugging Face's declaration of the model's outputs, as it was read; None without one.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self.backend, self.bos_id, self.eos_ids = parts.backend, parts.bos_id, parts.eos_ids
        self._chat_sources, self._special_tokens = parts.chat_templates, parts.special_tokens
        self.response_template, self.unread_keys = parts.response_template, parts.unread
        self._templates: dict[str, ChatTemplate] = {}
        self._token_bytes = TokenBytes(self.backend, parts.repeated)
        self._num_repeated = len(parts.repeated)
        added = self.backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_token_ids = {token.content: i for i, token in added.items() if token.special}
        self.added_token_ids = {token.content: i for i, token in added.items()}

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], *, of_encoder: bool = False) -> Self:
        """Read a tokenizer from a GGUF file's metadata (``tokenizer.ggml.*``), of a decoder or an encoder. Raise
        ModelError if it is incomplete or not supported.
        """
        return cls(build_from_gguf(metadata, of_encoder=of_encoder))

    @classmethod
    def from_directory(cls, path: str | Path, *, lowercase: bool = False) -> Self:
        """Read a tokenizer from tokenizer.json, or without it from tiktoken.model (of Kimi), and, if present, from
        tokenizer_config.json, generation_config.json, config.json, chat_template.json and chat_template.jinja. Raise
        ModelError if a file is damaged or both are missing. With ``lowercase``, texts are lower-cased first.
        """
        return cls(read_from_directory(Path(path), lowercase=lowercase))

    @property
    def vocab_size(self) -> int:
        """The number of token ids. A model's logits may be wider because of padding."""
        return self.backend.get_vocab_size(with_added_tokens=True) + self._num_repeated

    def encode(
        self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of a text.

        ``add_special_tokens`` adds the beginning-of-text token if the model uses one; pass False for a rendered chat
        template, which contains it. With ``parse_special`` False, "<|im_end|>" in the text is ten
        ordinary characters rather than the token that ends a turn.

        Raise RequestError if ``text`` is not Unicode text, if the tokenizer fails on it, or if it certainly has more
        than ``max_tokens`` tokens (`foreword.models.text_bounds`), which is found out before it is tokenized.
        """
        if max_tokens is not None and isinstance(text, str) and max_tokens < len(text):
            least = self._bound.min_tokens(text)
            if least > max_tokens:
                reason = f"its {len(text)} characters are at least {least} tokens, more than {max_tokens}"
                raise ContextLengthError(
                    None, "prompt", text[:100], reason, "Shorten it, or raise max_model_len",
                    num_tokens=least, longest=max_tokens, max_model_len=max_tokens,
                )  # fmt: skip
        try:
            with panics_caught():
                backend = self.backend if parse_special else self._literal_backend
                # encode_batch_fast, unlike encode, lets other threads run, and leaves out what is not read here.
                return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            reason, fix = "is not text of valid Unicode characters", "Give a str without lone surrogates"
        except Exception as error:  # tokenizers raises plain Exception
            reason, fix = f"the tokenizer fails on it ({error!s:.200})", "Change the text, such as very long runs in it"
        raise RequestError(None, "prompt", text, reason, fix)

    @cached_property
    def infill(self) -> Infill | None:
        """The tokens of gaps in texts; None if the model has none."""
        known = {text: self.backend.token_to_id(text) for form in FORMS for text in form[:3] if text}
        found = {text: i for text, i in known.items() if i is not None}
        return find_infill({**self.special_token_ids, **found})

    def encode_infill(self, before: str, after: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a prompt whose completion stands between two texts. Raise RequestError as `encode`
        does, and for a model that has no tokens for it.
        """
        if self.infill is None:
            reason, fix = "the model has no tokens for a gap in a text", "Use a model for code that was trained to fill"
            raise RequestError(None, "suffix", after, reason, fix)
        first, second = (
            self.encode(text, add_special_tokens=False, parse_special=False, max_tokens=max_tokens)
            for text in (before, after)
        )
        return self.infill.prompt(self.encode(""), first, second)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """Return the token ids of two texts as one, and the number of them that belong to the first; None if the
        tokenizer does not distinguish them. Raise RequestError as `encode` does.
        """
        try:
            with panics_caught():
                encoding = self.backend.encode_batch([(first, second)])[0]  # encode_batch_fast leaves type_ids out
        except Exception as error:  # TypeError, or plain Exception of tokenizers
            reason, fix = f"the tokenizer fails on the pair ({error!s:.200})", "Give two str without lone surrogates"
            raise RequestError(None, "prompt", (first, second), reason, fix) from None
        types = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else None

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Ids outside the vocabulary add nothing; invalid UTF-8 becomes U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens)
        try:
            return detokenizer.push(token_ids) + detokenizer.finish()
        except (OverflowError, TypeError) as error:
            reason, fix = f"not token ids: {error}", f"Give integers from 0 to {self.vocab_size - 1}"
            raise RequestError(None, "token_ids", token_ids, reason, fix) from None

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        *,
        continues: bool = False,
        prompt: Sequence[int] | I32 = (),
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """Return an incremental decoder. ``continues``: the text follows a prompt, so its first space is kept.
        ``prompt``: the tokens before the text, which may complete their last character.
        """
        hidden = self._special_ids if skip_special_tokens else ()
        unfinished, spaces = utf8.unfinished(self.token_bytes, prompt), spaces_between_special_tokens
        return Detokenizer(
            self._token_bytes, hidden=hidden, continues=continues, unfinished=unfinished, added_spaces=spaces
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token adds to the text, special or not, possibly part of a character. b"" for an unknown
        id.
        """
        return self._token_bytes[token_id]

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model has a chat template."""
        return bool(self._chat_sources)

    def chat_template(self, *, tools: bool = False, chat_template: str | None = None) -> str:
        """Return the Jinja source of a chat template as `apply_chat_template` chooses it; "" if the model has none."""
        return self._chat_sources.get(self._template_name(tools, chat_template), "")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        in_words: InWords | None = None,
        call_ids: str = "",
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        media: Collection[str] = (),
        **extra: Any,
    ) -> str:
        """Return the prompt of a list of messages, to be encoded with ``add_special_tokens=False``. See
        `ChatTemplate.render`.

        chat_template: the name of one of the model's; None: with tools "tool_use" if there is one, else "default".
        RequestError names the wrong message or template, and says if the model has none; ModelError for an invalid
        one.
        """
        template = self._template(self._template_name(bool(tools), chat_template))
        return template.render(
            messages,
            tools=tools,
            in_words=in_words,
            call_ids=call_ids,
            add_generation_prompt=add_generation_prompt,
            media=media,
            **extra,
        )

    def template_variables(self, *, tools: bool = False, chat_template: str | None = None) -> frozenset[str]:
        """Return the names that a chat template reads. Errors are those of `apply_chat_template`."""
        return self._template(self._template_name(tools, chat_template)).variables

    def written_call(self, *, tools: bool = False, chat_template: str | None = None) -> str | None:
        """Return `ChatTemplate.written_call` of a chat template. Errors are those of `apply_chat_template`."""
        return self._template(self._template_name(tools, chat_template)).written_call

    def _template_name(self, tools: bool, name: str | None) -> str:
        names = ", ".join(map(repr, self._chat_sources)) or "none"
        if name is not None and not (isinstance(name, str) and name in self._chat_sources):
            reason = f"is not one of the model's chat templates: {names}"
            raise RequestError(None, "chat_template", name, reason, "Give the name of one, or leave it out.")
        name = name or ("tool_use" if tools and "tool_use" in self._chat_sources else "default")
        if self._chat_sources and name not in self._chat_sources:
            reason = f"the model has several chat templates and no default: {names}"
            raise RequestError(None, "chat_template", None, reason, "Give the name of one.")
        return name

    def _template(self, name: str) -> ChatTemplate:
        """Return a template, which is compiled on first use."""
        if name not in self._templates:
            from foreword.models.chat import ChatTemplate

            if name not in self._chat_sources:
                reason, fix = "the model has no chat template", "Give a text, or use a model tuned for conversation"
                raise RequestError(None, "messages", None, reason, fix)
            self._templates[name] = ChatTemplate(self._chat_sources[name], self._special_tokens)
        return self._templates[name]

    @cached_property
    def _bound(self) -> TextBound:
        return TextBound(self.backend)

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """Return a tokenizer with the same vocabulary (shared, not copied) that encodes special tokens as ordinary
        text.
        """
        literal = tokenizers.Tokenizer(self.backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if (value := getattr(self.backend, part)) is not None:
                setattr(literal, part, value)
        added = sorted(self.backend.get_added_tokens_decoder().items())
        literal.add_tokens([token for _, token in added])
        literal.encode_special_tokens = True
        return literal
