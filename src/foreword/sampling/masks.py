"""Token masks of a step, and the grammars they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from foreword.arrays import F32, I32, Ints
from foreword.batch import InputBatch

WORD_BITS = 32


class Grammar(Protocol):
    """What one request's output has to follow, with the state after the tokens accepted so far."""

    @property
    def is_terminated(self) -> bool:
        """Whether the output is complete: an end token was accepted."""
        ...

    def fill_mask(self, words: I32) -> None:
        """Write the tokens that may follow to int32 [ceil(V / 32)]: bit t mod 32 of word t // 32 is 1 for an allowed
        token t. Every bit has to be written.
        """
        ...

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance by the longest prefix that is allowed; returns its length."""
        ...

    def roll_back(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens."""
        ...

    def reset(self) -> None:
        """Undo every accepted token, also after an interrupt in the middle of another method."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """Allowed tokens for some of a step's rows of logits.

    logit_rows: int32 [N], ascending indices of rows of logits. words: int32 [N, ceil(V / 32)], bit t mod 32 of word
    t // 32 is 1 where token t is allowed. failures: batch index → the error of a request's grammar; its rows are not
    masked, and it ends without a token of this step.
    """

    logit_rows: I32
    words: I32
    failures: Mapping[int, Exception] = field(default_factory=dict)

    def apply(self, logits: F32, indices: Ints) -> None:
        """Forbid tokens in logits [n, V], of which row i is row indices[i] (ascending) of the step. Rows without a mask
        stay as they are.
        """
        vocab_size = logits.shape[1]
        if self.words.shape != (len(self.logit_rows), num_words(vocab_size)):
            raise ValueError(
                f"words has shape {self.words.shape}, expected {len(self.logit_rows), num_words(vocab_size)}"
            )
        masked = np.isin(self.logit_rows, indices)
        at = np.searchsorted(indices, self.logit_rows[masked])
        octets = np.ascontiguousarray(self.words[masked], "<i4").view(np.uint8)
        allowed = np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little").view(np.bool_)
        logits[at] = np.where(allowed, logits[at], np.float32(-np.inf))


def num_words(vocab_size: int) -> int:
    """The int32 words of a mask."""
    return -(-vocab_size // WORD_BITS)


def token_masks(batch: InputBatch, grammars: Mapping[int, Grammar], vocab_size: int) -> TokenMasks | None:
    """Masks for the scheduled requests that have a grammar, by state row; None without any.

        for each request, j = 0 … its drafts:  mask of its logit row j = allowed after the first j drafts

    Behind a draft that the grammar does not accept, or that ends the output, everything is allowed: those rows are
    discarded. A prompt chunk that is not the last gets no mask. The grammars are left as they were, except one that
    raises an error.
    """
    states, spans = batch.states, []
    for b in np.flatnonzero(np.isin(batch.idx_mapping, list(grammars))).tolist():
        first, end, row = int(batch.cu_num_logits[b]), int(batch.cu_num_logits[b + 1]), int(batch.idx_mapping[b])
        if batch.positions[batch.logits_indices[first]] + 1 >= states.num_tokens[row]:
            draft = int(batch.cu_num_draft_tokens[b])
            drafts = batch.draft_token_ids[draft : draft + end - first - 1].tolist()
            spans.append((b, grammars[row], range(first, end), drafts))
    if not spans:
        return None
    words = np.full((sum(len(span) for _, _, span, _ in spans), num_words(vocab_size)), -1, np.int32)
    failures: dict[int, Exception] = {}
    start = 0
    for b, grammar, span, drafts in spans:
        own = words[start : start + len(span)]
        try:
            _fill(grammar, own, drafts)
        except MemoryError:
            raise
        except Exception as error:
            own[:] = -1
            failures[b] = error
        start += len(span)
    return TokenMasks(np.concatenate([np.array(span, np.int32) for _, _, span, _ in spans]), words, failures)


def _fill(grammar: Grammar, words: I32, drafts: Sequence[int]) -> None:
    """The masks [1 + drafts, ceil(V / 32)] of one request."""
    accepted = 0
    grammar.fill_mask(words[0])
    for draft in drafts:
        if not grammar.accept([draft]):
            break
        accepted += 1
        if grammar.is_terminated:
            break
        grammar.fill_mask(words[accepted])
    grammar.roll_back(accepted)
