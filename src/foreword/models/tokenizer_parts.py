"""The parts of a tokenizer, from whichever files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tokenizers

_TURN_ENDS = {"<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>"}
_HARMONY_ENDS = {"<|return|>", "<|call|>"}


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The parts of a `foreword.models.tokenizer.Tokenizer`.

    repeated: texts of ids that the backend does not have, because ids before them have the same texts.
    unread: keys of the files that have no influence.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    response_template: object = None
    repeated: Mapping[int, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()


def turn_ends(backend: tokenizers.Tokenizer) -> list[int]:
    """Control tokens that end a turn, found by name: files of chat models often list only the end of text. In harmony
    (gpt-oss) <|end|> ends a message, and a turn may have several.
    """
    control = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
    ends = _HARMONY_ENDS if control.keys() >= _HARMONY_ENDS else _TURN_ENDS
    return sorted(i for content, i in control.items() if content in ends)


def surrounding(
    first: Sequence[tuple[str, int]], last: Sequence[tuple[str, int]]
) -> tokenizers.processors.TemplateProcessing:
    """Return what puts these tokens, texts with their ids, before and after a text."""
    return tokenizers.processors.TemplateProcessing(
        single=[*(text for text, _ in first), "$A", *(text for text, _ in last)],
        special_tokens=list(dict.fromkeys([*first, *last])),
    )


@contextlib.contextmanager
def panics_caught() -> Iterator[None]:
    """Raise a panic in `tokenizers` as a RuntimeError: its class, which cannot be imported, is not an Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from None
