"""Find the requests that hold each block of the KV cache, from the events of a trace and the steps of its replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from foreword.batch import InputBatch
from foreword.trace.events import Add, AppendBlocks, Correct, Event, Ids, Remove, Restart, Step
from foreword.trace.header import TraceHeader


class BlockChange(NamedTuple):
    """One change of one block.

    kind: "new": the request now holds the block and will write it. "reused": the request now holds it, with content
    that an earlier request computed. "left": the request no longer holds it. "zero": it is zeroed. "copy": it is a copy
    of block ``source``.
    entry: its place in the request's block table of this KV group.
    """

    kind: str
    block: int
    request: str = ""
    group: int = 0
    entry: int = 0
    source: int = -1


class BlockHolders:
    """Follows the holders of blocks, event by event.

    held: request → KV group → its blocks by entry, the null block where the request holds none.
    num_held: blocks that some request holds.
    """

    def __init__(self, header: TraceHeader) -> None:
        self.held: dict[str, list[list[int]]] = {}
        self._count: Counter[int] = Counter()
        self._null = header.null_block
        self._windows = [group.sliding_window for group in header.kv_groups]
        cp, most = header.context_parallel, header.max_model_len
        self.tokens_per_block = [group.tokens_per_block(cp, most) for group in header.kv_groups]
        self._recurrent = [group.recurrent for group in header.kv_groups]

    @property
    def num_held(self) -> int:
        return len(self._count)

    def apply(self, event: Event, batch: InputBatch | None) -> list[BlockChange]:
        """Return the changes that an event makes. batch: the step of a `Step` event."""
        match event:
            case Add():
                self.held[event.req_id] = [[] for _ in self._windows]
                return list(self._grown(event.req_id, event.block_ids, event.num_computed_tokens))
            case AppendBlocks():
                return list(self._grown(event.req_id, event.block_ids, 0))
            case Correct(block_ids=block_ids) if block_ids is not None:
                return self._replaced(event.req_id, block_ids)
            case Remove():
                return list(self._left(event.req_id))
            case Restart():
                return [change for req_id in list(self.held) for change in self._left(req_id)]
            case Step() if batch is not None:
                changes = list(self._below_windows(batch))
                changes += [BlockChange("zero", int(block)) for block in event.zero]
                pairs = np.asarray(event.copies, np.int64).reshape(-1, 2).tolist()
                return changes + [BlockChange("copy", into, source=source) for source, into in pairs]
        return []

    def _grown(self, req_id: str, block_ids: Sequence[Ids], num_computed: int) -> Iterator[BlockChange]:
        for group, ids in enumerate(block_ids):
            table, per_block = self.held[req_id][group], self.tokens_per_block[group]
            for block in map(int, ids):
                entry = len(table)
                table.append(block)
                if block == self._null:
                    continue
                self._count[block] += 1
                is_reused = num_computed > 0 and (self._recurrent[group] or entry * per_block < num_computed)
                yield BlockChange("reused" if is_reused else "new", block, req_id, group, entry)

    def _replaced(self, req_id: str, block_ids: Sequence[Ids]) -> list[BlockChange]:
        """Return a change for each entry of a request's tables that differs from the entry before."""
        changes = []
        for group, ids in enumerate(block_ids):
            before, after = self.held[req_id][group], [int(block) for block in ids]
            for entry in range(max(len(before), len(after))):
                old = before[entry] if entry < len(before) else self._null
                new = after[entry] if entry < len(after) else self._null
                if old == new:
                    continue
                if old != self._null:
                    self._release(old)
                    changes.append(BlockChange("left", old, req_id, group, entry))
                if new != self._null:
                    self._count[new] += 1
                    changes.append(BlockChange("new", new, req_id, group, entry))
            self.held[req_id][group] = after
        return changes

    def _left(self, req_id: str) -> Iterator[BlockChange]:
        for group, table in enumerate(self.held.pop(req_id, [])):
            for entry, block in enumerate(table):
                if block != self._null:
                    self._release(block)
                    yield BlockChange("left", block, req_id, group, entry)

    def _release(self, block: int) -> None:
        self._count[block] -= 1
        if not self._count[block]:
            del self._count[block]

    def _below_windows(self, batch: InputBatch) -> Iterator[BlockChange]:
        """Give up the blocks below sliding windows, which no query reads any more."""
        for group, window in enumerate(self._windows):
            if window is None:
                continue
            needed = np.maximum(batch.num_computed_tokens.astype(np.int64) - window + 1, 0)
            for req_id, first in zip(batch.req_ids, (needed // self.tokens_per_block[group]).tolist(), strict=True):
                table = self.held[req_id][group]
                for entry in range(min(first, len(table)) - 1, -1, -1):
                    block = table[entry]
                    if block == self._null:
                        break
                    table[entry] = self._null
                    self._release(block)
                    yield BlockChange("left", block, req_id, group, entry)
