"""Admission of one request: blocks from the cache, then a row with them."""

from __future__ import annotations

from typing import Any

from foreword.arrays import I32
from foreword.batch import NewRequest, RequestStates
from foreword.batch.values.requests import TokenIds
from foreword.cache import KVCacheManager, PrefixHit
from foreword.cache.manager import NO_KEYS
from foreword.cache.prefix import BlockKeys


def admit(
    states: RequestStates,
    cache: KVCacheManager,
    req_id: str,
    prompt: TokenIds,
    hit: PrefixHit,
    num_tokens: int,
    keys: BlockKeys = NO_KEYS,
    **fields: Any,
) -> tuple[int, I32]:
    """Add a row with blocks for the request's first ``num_tokens`` tokens, the hit's among them. fields: the other ones
    of its `NewRequest`.

    Returns the row and the block copies, int32 [C, 2] (from, to), to make before the next forward pass.
    CapacityError when blocks or rows are short, RequestError for a bad request; then nothing changes.
    """
    blocks = cache.allocate(hit, num_tokens)
    try:
        request = NewRequest(req_id, prompt, blocks.block_ids, num_computed_tokens=hit.num_tokens, **fields)
        row = states.add_request(request)
    except Exception:
        cache.cancel(blocks)
        raise
    cache.attach(row, hit, keys)
    return row, blocks.copies
