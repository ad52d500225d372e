"""The answer of a prefix lookup, and its explanation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foreword.arrays import I32
from foreword.cache.prefix import PrefixNode


@dataclass(slots=True, eq=False)
class PrefixHit:
    """The part of a request's prompt that the cache has. Not to be changed; not frozen, for speed.

    It holds no reference: it is valid until the cache's next change.

    prompt_len: tokens of the request. num_full: tokens covered by whole blocks, shared with other owners.
    num_partial: further tokens at the start of the next block, taken by copying that block.
    blocks[g]: int32, one entry per block of group g up to num_full, null where the group no longer reads it; empty
    for a recurrent state. copy_from: int32, the block of each group to copy, 0 for none, or empty: the block that
    num_partial is part of, or a snapshot. path: the known nodes. num_known: leading tokens that equal content in the
    tree, reusable or not; −1 without a lookup. stops: where chunks of the prompt should end, so that a recurrent state
    can be kept there. next_block: the content of the block after num_full, b"" where it could not be hit.
    """

    prompt_len: int
    num_full: int
    num_partial: int
    blocks: tuple[I32, ...]
    copy_from: I32
    path: tuple[PrefixNode, ...]
    num_known: int
    stops: tuple[int, ...] = ()
    next_block: bytes = b""

    @property
    def num_tokens(self) -> int:
        """The number of tokens that need not be computed, at most prompt_len − 1: the last one is computed to sample
        after it.
        """
        return self.num_full + self.num_partial

    def cut(self, n: int) -> int:
        """Return how many of n tokens after the hit are before the next stop."""
        return min([n, *(stop - self.num_tokens for stop in self.stops if stop > self.num_tokens)])

    def without_partial(self) -> PrefixHit:
        """Return the hit with whole blocks only, so that nothing has to be copied."""
        if not self.num_partial:
            return self
        return replace(self, num_partial=0, copy_from=self.copy_from[:0])

    def __str__(self) -> str:
        said = f"reused {self.num_tokens} of {self.prompt_len}"
        if self.num_known < 0:
            return f"{said}; not looked up"
        if self.num_tokens == self.prompt_len - 1:
            return f"{said}; the last token is always computed"
        if self.num_known > self.num_tokens:
            return f"{said}; equal up to position {self.num_known}, but those blocks are gone or not reusable"
        return f"{said}; differs at position {self.num_known}"
