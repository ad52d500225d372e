"""Requests, rows and a cache in which a piece of prompt is one number instead of its tokens.

The scheduler, the allocation of blocks, the prefix tree and eviction are those of the engine. Data that only a model
reads is left out: token ids, sampling parameters, features. A load says which pieces of prompts are equal, so comparing
the names of pieces is the same as comparing their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import Any, cast

import numpy as np

from foreword.arrays import I32, Ints
from foreword.batch import BlockTable, ContentIds, KVGroup, NewRequest, RequestStates, SamplingParams
from foreword.cache import KVCacheManager, PrefixHit
from foreword.cache.content import CachedContent
from foreword.cache.manager import NO_KEYS
from foreword.cache.prefix import BlockKeys
from foreword.scheduler.request import Request
from foreword.simulation.trace import HASHED_TOKENS, Arrival

_ZEROS = np.broadcast_to(np.zeros((), np.int32), 2**31 - 1)  # four bytes
GREEDY = SamplingParams(temperature=0.0)
_UNNAMED: I32 = np.zeros(0, np.int32)


def piece_size(block_size: int, hashed_tokens: int) -> int:
    """Return the number of tokens of a piece: the greatest common divisor of a block and of the tokens of a hash id."""
    return gcd(block_size, hashed_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A prompt of ``num_tokens`` as the names of its pieces, int32, followed by those of the answer."""

    num_tokens: int
    names: I32

    def __len__(self) -> int:
        return self.num_tokens


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedRequest(Request):
    """A simulated request. names: int32, the names of the pieces of its prompt and answer. arrived, first_token: times
    in seconds; −1 before the event. seat: the row that it has or had. last_token: while it has no row, the time of its
    last token, or of its arrival. is_measured: see `Arrival`.
    """

    names: I32 = field(default_factory=lambda: _UNNAMED)
    arrived: float = 0.0
    first_token: float = -1.0
    seat: int = -1
    last_token: float = 0.0
    is_measured: bool = True

    def tokens(self) -> I32:
        return cast(I32, Content(len(self), self.names))


def simulated_request(
    arrival: Arrival, index: int, max_model_len: int, size: int, hashed_tokens: int = HASHED_TOKENS
) -> SimulatedRequest:
    """Return the request of an arrival, cut to max_model_len, prompt first. size: tokens of a piece."""
    length = min(arrival.input_length, max_model_len - 1)
    end = min(length + arrival.output_length, max_model_len)
    return SimulatedRequest(
        request_id=str(index),
        prompt=_ZEROS[:length],
        params=GREEDY,
        arrival=index,
        max_len=end,
        names=arrival.names(index, length, end, size, hashed_tokens),
        arrived=arrival.time,
        last_token=arrival.time,
        is_measured=arrival.is_measured,
        streams=arrival.streams,
    )


class Rows:
    """The part of `RequestStates` that the scheduler and the cache use, under the same names.

    names: the names of the pieces of the request in each row.
    """

    max_num_draft_tokens = 0

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int) -> None:
        self.max_num_reqs, self.max_model_len = max_num_reqs, max_model_len
        group = KVGroup(block_size)
        self.block_tables = (BlockTable.allocate(group, None, max_num_reqs, max_model_len, 0, ContentIds()),)
        self.num_tokens, self.num_computed_tokens, self.prefill_len, self.num_placeholders = (
            np.zeros(max_num_reqs, np.int32) for _ in range(4)
        )
        self.live = np.zeros(max_num_reqs, np.bool_)
        self.token_ids = np.broadcast_to(_ZEROS[:1], (max_num_reqs, max_model_len))
        self.names: list[I32] = [_UNNAMED] * max_num_reqs
        self._rows: dict[str, int] = {}
        self._free = list(range(max_num_reqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._rows

    def row_of(self, request_id: str) -> int:
        return self._rows[request_id]

    def add_request(self, request: NewRequest) -> int:
        """Add a request with one group of blocks. The scheduler made it, so it is not checked."""
        row = self._rows[request.req_id] = self._free.pop()
        assert request.prompt_token_ids is not None
        known = len(request.prompt_token_ids) + len(request.output_token_ids)
        self.num_tokens[row] = self.prefill_len[row] = known
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.live[row] = True
        (table,), (blocks,) = self.block_tables, request.block_ids
        table.table[row, : len(blocks)] = blocks
        table.num_blocks[row] = len(blocks)
        return row

    def remove_request(self, request_id: str) -> bool:
        row = self._rows.pop(request_id)
        self.block_tables[0].num_blocks[row] = 0
        self.live[row] = False
        self.names[row] = _UNNAMED
        self._free.append(row)
        return True

    def remove_rows(self, rows: Ints) -> None:
        gone = set(rows.tolist())
        for name in [name for name, row in self._rows.items() if row in gone]:
            self.remove_request(name)


class SimulatedCache(KVCacheManager):
    """The engine's cache over the names of pieces."""

    def __init__(
        self, rows: Rows, num_blocks: int, *, prefix_caching: bool, hashed_tokens: int = HASHED_TOKENS
    ) -> None:
        super().__init__(cast(RequestStates, rows), num_blocks, prefix_caching=prefix_caching, partial_reuse=False)
        self._piece = piece_size(self._node_tokens, hashed_tokens)
        self._names = rows.names
        self._content = CachedContent(
            self._node_tokens // self._piece,
            self._node_blocks,
            self.pool.is_cached,
            hash_function=cast(Any, None),  # without events, blocks need no names
            on_event=None,
        )

    def why_missed(self, hit: PrefixHit, token_ids: I32, keys: BlockKeys = NO_KEYS) -> None:
        """Return nothing: a simulation does not explain cache misses."""

    def _content_of(self, token_ids: I32) -> bytes:
        content = cast(Content, token_ids)
        return content.names[: content.num_tokens // self._piece].tobytes()

    def _content_in(self, row: int, start: int, end: int) -> bytes:
        return self._names[row][start // self._piece : end // self._piece].tobytes()
