"""The prompts that running requests compute: a waiting request with the same beginning waits for them."""

from __future__ import annotations

from foreword.cache import KVCacheManager, PrefixHit
from foreword.cache.prefix import BlockKeys

_Block = tuple[int, bytes]


class SharedPrompts:
    """For each running request, the first whole block of its prompt that cannot be hit yet: (first token, content).

    A waiting request whose hit ends where such a block begins, and which continues with the same content, has a longer
    hit once the block is computed. Waiting for it takes no longer than computing it, and costs nothing.

    is_used: false if prompts are computed in small chunks together with other requests, and for recurrent models.
    """

    def __init__(self, cache: KVCacheManager, *, is_used: bool) -> None:
        self._cache = cache
        self._is_used = is_used and cache.prefix_caching and not cache.keeps_states
        self._rows: dict[_Block, int] = {}
        self._blocks: dict[int, _Block] = {}  # by row

    def follow(self, row: int, hit: PrefixHit | None = None) -> None:
        """Update the block of a request: after its admission with a hit, and whenever more of its prompt can
        be reused.
        """
        self.forget(row)
        if self._is_used:
            block = self._cache.next_block(row) if hit is None else (hit.num_full, hit.next_block)
            if block[1]:
                self._blocks[row], self._rows[block] = block, row

    def forget(self, row: int) -> None:
        """Remove the block of a row whose request leaves, or whose block changes."""
        block = self._blocks.pop(row, None)
        if block is not None and self._rows.get(block) == row:
            del self._rows[block]

    def clear(self) -> None:
        self._rows.clear()
        self._blocks.clear()

    def computing(self, hit: PrefixHit, keys: BlockKeys) -> int:
        """Return the row whose request computes the block after a waiting request's hit, or −1."""
        block = hit.num_full, hit.next_block
        row = self._rows.get(block, -1)
        return row if self._blocks.get(row) == block and self._cache.continues(row, hit, keys) else -1
