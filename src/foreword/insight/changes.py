"""Describe the changes in the rows between two steps."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from foreword.batch import InputBatch

MAX_REQUESTS, MAX_LISTED = 16, 8  # largest number of items that are listed; then "… more"
WIDTH = 120  # characters of a line without a terminal


class _Seen(NamedTuple):
    """The state of a request at a step: the number of earlier uses of its row, its tokens, and its blocks per KV
    group.
    """

    generation: int
    num_tokens: int
    num_computed: int
    blocks: tuple[tuple[int, ...], ...]


class StepChanges:
    """Describes the differences between each step and the one before: requests, their tokens and their blocks.

    text_of: returns the text of a token id, which is shown with the id.
    """

    def __init__(self, text_of: Callable[[int], str] | None = None) -> None:
        self._text_of = text_of
        self._seen: dict[str, _Seen] = {}
        self._step: int | None = None

    def since_last(self, batch: InputBatch, width: int | None = None) -> str:
        """Return the changes since the step of the last call; "" in the first call."""
        now = {req_id: self._look(batch, row) for req_id, row in zip(batch.req_ids, batch.idx_mapping, strict=True)}
        lines = list(self._lines(batch, now)) if self._step is not None else []
        head = f"Changed since step {self._step}"
        kept = {req_id: seen for req_id, seen in self._seen.items() if req_id in batch.states}
        self._seen, self._step = kept | now, batch.step
        left_out = len(lines) - MAX_REQUESTS
        lines = [*lines[:MAX_REQUESTS], *([f"… {left_out} more"] if left_out > 0 else [])]
        wrapped = (
            textwrap.fill(line, width or WIDTH, initial_indent="  ", subsequent_indent=" " * 6) for line in lines
        )
        return "\n".join([head, *wrapped]) if lines else ""

    def _look(self, batch: InputBatch, row: int) -> _Seen:
        states = batch.states
        tables = states.block_tables
        return _Seen(
            int(states.row_generation[row]),
            int(states.num_tokens[row]),
            int(states.num_computed_tokens[row]),
            tuple(tuple(table.table[row, : table.num_blocks[row]].tolist()) for table in tables),
        )

    def _lines(self, batch: InputBatch, now: dict[str, _Seen]) -> Iterator[str]:
        for req_id in self._seen:
            if req_id not in batch.states:
                yield f"request {req_id}: has left its row, and its blocks are free"
        for req_id, seen in now.items():
            before = self._seen.get(req_id)
            is_new = before is None or before.generation != seen.generation
            words = _admitted(seen) if before is None or is_new else self._continued(batch, req_id, seen, before)
            yield f"request {req_id}: {'; '.join(words)}"

    def _continued(self, batch: InputBatch, req_id: str, seen: _Seen, before: _Seen) -> Iterator[str]:
        """Yield the changes of a request that already had a row."""
        computed = seen.num_computed - before.num_computed
        yield f"{computed} more computed, {seen.num_computed} in all"
        row = batch.states.row_of(req_id)
        sampled = batch.states.token_ids[row, before.num_tokens : seen.num_tokens].tolist()
        shown = [str(i) if self._text_of is None else f"{i} ({self._text_of(i)})" for i in sampled]
        yield f"sampled {_listed(shown)}" if shown else "nothing sampled"
        new = [b[len(a) :] for a, b in zip(before.blocks, seen.blocks, strict=True)]
        yield f"new block{'s' * (sum(map(len, new)) > 1)} {_blocks(new)}" if any(new) else "no new block"


def _admitted(seen: _Seen) -> Iterator[str]:
    """Yield the description of a request that got a row."""
    yield f"is admitted with {seen.num_tokens} known tokens"
    if seen.num_computed:
        yield f"{seen.num_computed} of them are in the cache already"
    yield f"blocks {_blocks(seen.blocks)}"


def _blocks(groups: Iterable[tuple[int, ...]]) -> str:
    return " and ".join(_listed(list(map(str, blocks))) or "none" for blocks in groups)


def _listed(words: list[str]) -> str:
    left_out = len(words) - MAX_LISTED
    return ", ".join([*words[:MAX_LISTED], *([f"… {left_out} more"] if left_out > 0 else [])])
