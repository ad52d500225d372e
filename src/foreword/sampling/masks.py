"""The token masks of a step, and the grammars that they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, Self

import numpy as np

from foreword.arrays import I32
from foreword.batch import InputBatch

WORD_BITS = 32


class Grammar(Protocol):
    """The grammar that one request's output has to follow, with the state after the tokens accepted so far."""

    @property
    def is_terminated(self) -> bool:
        """Return whether the output is complete: nothing may follow the tokens accepted."""

    def fill_mask(self, words: I32) -> None:
        """Write all of int32 [ceil(V / 32)]: bit t mod 32 of word t // 32 is 1 if token t may follow, else 0."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance by the longest allowed prefix, and return its length."""

    def roll_back(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens."""

    def reset(self) -> None:
        """Undo every accepted token, also after an interrupt in the middle of another method."""

    def copy(self) -> Self:
        """Return the same grammar with no token accepted, for another completion."""

    def forced_tokens(self, limit: int) -> Sequence[int]:
        """Return up to ``limit`` tokens that must follow, each the only one that the mask at its place allows. They are
        verified like all drafts, so missing or wrong ones only cost time. An error means that there are none.
        """


Wait = Callable[[], None]


class TokenMasks:
    """Allowed tokens for some of a step's rows of logits.

    logit_rows: int32 [N], ascending indices of rows of logits. words: int32 [N, ceil(V / 32)], bit t mod 32 of word
    t // 32 is 1 where token t is allowed. failures: batch index → the error of a request's grammar; its rows are not
    masked, and it ends without a token of this step.

    words and failures may still be computed in another thread: reading one of them waits for that.
    """

    __slots__ = ("_failures", "_wait", "_words", "logit_rows")

    def __init__(
        self, logit_rows: I32, words: I32, failures: Mapping[int, Exception] | None = None, wait: Wait | None = None
    ) -> None:
        self.logit_rows, self._words, self._failures, self._wait = logit_rows, words, failures or {}, wait

    @property
    def words(self) -> I32:
        self.wait()
        return self._words

    @property
    def failures(self) -> Mapping[int, Exception]:
        self.wait()
        return self._failures

    def wait(self) -> None:
        """Wait until the masks are computed. Raise the error of the computation."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


def num_words(vocab_size: int) -> int:
    """Return the number of int32 words of a mask."""
    return -(-vocab_size // WORD_BITS)


class Masked(NamedTuple):
    """A scheduled request with a grammar: its batch index, the rows of its logits, and its drafts."""

    batch_index: int
    grammar: Grammar
    logit_rows: range
    drafts: list[int]


def token_masks(
    batch: InputBatch,
    grammars: Mapping[int, Grammar],
    vocab_size: int,
    start: Callable[[Callable[[], None]], Wait] | None = None,
) -> TokenMasks | None:
    """Return masks for the scheduled requests that have a grammar, by state row; None if there are none.

        for each request, j = 0 … its drafts:  mask of its logit row j = allowed after the first j drafts

    After a draft that the grammar does not accept, or that ends the output, everything is allowed, because those rows
    are discarded. A prompt chunk that is not the last gets no mask. The grammars do not change, except one that raises
    an error. start: starts the computation in another thread, and returns a function that waits for its end.
    """
    states, requests = batch.states, list[Masked]()
    for b in np.flatnonzero(np.isin(batch.idx_mapping, list(grammars))).tolist():
        first, end, row = int(batch.cu_num_logits[b]), int(batch.cu_num_logits[b + 1]), int(batch.idx_mapping[b])
        if batch.positions[batch.logits_indices[first]] + 1 >= states.num_tokens[row]:
            draft = int(batch.cu_num_draft_tokens[b])
            drafts = batch.draft_token_ids[draft : draft + end - first - 1].tolist()
            requests.append(Masked(b, grammars[row], range(first, end), drafts))
    if not requests:
        return None
    rows = np.concatenate([np.array(request.logit_rows, np.int32) for request in requests])
    words, failures = np.empty((len(rows), num_words(vocab_size)), np.int32), dict[int, Exception]()
    fill = partial(_fill_all, requests, words, failures)
    if start is not None:
        return TokenMasks(rows, words, failures, start(fill))
    fill()
    return TokenMasks(rows, words, failures)


def _fill_all(requests: Sequence[Masked], words: I32, failures: dict[int, Exception]) -> None:
    start = 0
    for request in requests:
        own = words[start : start + len(request.logit_rows)]
        try:
            _fill(request.grammar, own, request.drafts)
        except MemoryError:
            raise
        except Exception as error:
            own[:] = -1
            failures[request.batch_index] = error
        start += len(own)


def _fill(grammar: Grammar, words: I32, drafts: Sequence[int]) -> None:
    """Fill the masks [1 + drafts, ceil(V / 32)] of one request."""
    accepted, filled = 0, 1
    grammar.fill_mask(words[0])
    for draft in drafts:
        if not grammar.accept([draft]):
            break
        accepted += 1
        if grammar.is_terminated:
            break
        grammar.fill_mask(words[filled])
        filled += 1
    words[filled:] = -1
    grammar.roll_back(accepted)
