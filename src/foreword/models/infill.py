"""Fill in the middle: the tokens by which a model is given what stands before and after a gap in a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class InfillForm(NamedTuple):
    """One notation: the texts of its tokens. A prompt is ``prefix BEFORE suffix AFTER middle``, or with suffix_first
    ``suffix AFTER prefix BEFORE``, which ends with the text before the gap.
    """

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False


FORMS = (
    InfillForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma, Granite 4
    InfillForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite 3
    InfillForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    InfillForm("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    InfillForm("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM 4
    InfillForm("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)
_ENDS = (
    "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|endoftext|>", "<|file_sep|>", "<file_sep>", "<|file_separator|>",
    "<|repo_name|>", "<｜end▁of▁sentence｜>", "▁<EOT>", "<EOT>",
)  # fmt: skip
"""Tokens after which a text in the gap does not go on, beside the end of a reply."""


@dataclass(frozen=True, slots=True)
class Infill:
    """The notation of one model, as token ids. middle: None if a prompt ends with the text before the gap.

    ends: that end the text in the gap.
    """

    prefix: int
    suffix: int
    middle: int | None
    ends: tuple[int, ...]

    def prompt(self, begin: Sequence[int], before: Sequence[int], after: Sequence[int]) -> list[int]:
        """Return the tokens of a prompt. begin: of any text."""
        if self.middle is None:
            return [*begin, self.suffix, *after, self.prefix, *before]
        return [*begin, self.prefix, *before, self.suffix, *after, self.middle]


def find_infill(token_ids: Mapping[str, int]) -> Infill | None:
    """Return the notation that a vocabulary has, by the ids of its special tokens; None if it has none of `FORMS`."""
    for form in FORMS:
        needed = [text for text in form[:3] if text]
        if all(text in token_ids for text in needed):
            ends = (*needed, *_ENDS)
            middle = None if form.suffix_first else token_ids[form.middle]
            known = tuple(token_ids[text] for text in ends if text in token_ids)
            return Infill(token_ids[form.prefix], token_ids[form.suffix], middle, known)
    return None
